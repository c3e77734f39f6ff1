"""What the tests of a stream put in place of a target: a corpus of random tokens, and engines that copy states out of a
stored cache instead of computing them.

    environment: STREAM_REPLAYS=<root>/cache_targets/tiny-1a2b3c4d
    Producers(work, settings, window, "tests.pipelines.replay:Replay")
"""

import hashlib
import io
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dspark.cache import CacheReader, CacheRow, write_shard
from dspark.storage import Storage
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome
from pipelines.flow import RegenerateConfig
from pipelines.runner import Work
from pipelines.stages.cache_targets import Made, Settings, Unit
from pipelines.stages.regenerate import SCHEMA

CACHE_VARIABLE = "STREAM_REPLAYS"
NUM_ROWS = {"train": 24, "select": 6}
POISONED_ROW = "row-07"


def write_corpus(config: RegenerateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    """In place of pipelines.stages.regenerate:run. Prompts of 8-19 tokens, answers of 12-31; always the same."""
    generator, rows = np.random.default_rng(0), []
    splits = [split for split, count in NUM_ROWS.items() for _ in range(count)]
    for i, split in enumerate(generator.permutation(splits).tolist()):
        num_prompt, num_answer = int(generator.integers(8, 20)), int(generator.integers(12, 32))
        rows.append(
            {
                "row_id": f"row-{i:02d}", "prompt_id": f"{i}", "turn": 0, "domain": "noise", "split": split,
                "token_ids": generator.integers(4, 260, num_prompt + num_answer).tolist(),
                "loss_mask": [0] * num_prompt + [1] * num_answer,
                "num_prompt_tokens": num_prompt, "finish_reason": "stop", "is_truncated": False, "sampling": "{}",
            }
        )  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink)
    out.put("rows-00000.parquet", sink.getvalue())
    num_answer = sum(sum(row["loss_mask"]) for row in rows)
    num_prompt = sum(row["num_prompt_tokens"] for row in rows)
    metrics = {"rows": float(len(rows)), "response_tokens": float(num_answer), "prompt_tokens": float(num_prompt)}
    return Outcome({"rows-00000.parquet": hashlib.sha256(sink.getvalue()).hexdigest()}, metrics)


class Replay:
    """In place of pipelines.stages.cache_targets:Capturer."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._out = settings, open_storage(settings.out_uri)
        cache = CacheReader(open_storage(os.environ[CACHE_VARIABLE]), settings.identity)
        self._rows = {entry.row_id: cache[i] for i, entry in enumerate(cache.entries)}

    def __call__(self, unit: Unit) -> Made:
        receipt = write_shard(self._out, unit.name, self._states(unit), self._settings.identity, self._settings.form, "replay")
        return Made(unit.name, receipt, 1.0)

    def _states(self, unit: Unit) -> Iterator[CacheRow]:
        for row in unit.rows:
            yield self._rows[row.row_id]


class Slow(Replay):
    """Training waits for every shard."""

    def __call__(self, unit: Unit) -> Made:
        time.sleep(0.3)
        return super().__call__(unit)


class Broken(Replay):
    """Stops for good at a unit in the middle of the training."""

    def __call__(self, unit: Unit) -> Made:
        if unit.name.startswith("unit-") and int(unit.name.split("-")[1]) >= 12:
            raise RuntimeError("the oven is cold")
        return super().__call__(unit)


class Poisoned(Replay):
    """One row whose states are not finite, whenever it is made."""

    poisoned = frozenset({POISONED_ROW})

    def _states(self, unit: Unit) -> Iterator[CacheRow]:
        for row in super()._states(unit):
            is_poisoned = row.row_id in self.poisoned
            yield replace(row, log_sum_exp_S=np.full_like(row.log_sum_exp_S, np.nan)) if is_poisoned else row


class Hollow(Replay):
    """No row of the units that a step in the middle of the training begins with is of any use."""

    def _states(self, unit: Unit) -> Iterator[CacheRow]:
        is_hollow = unit.name.startswith("unit-") and 16 <= int(unit.name.split("-")[1]) < 24
        for row in super()._states(unit):
            yield replace(row, log_sum_exp_S=np.full_like(row.log_sum_exp_S, np.nan)) if is_hollow else row


class Damaged(Poisoned):
    """An engine of whose rows a third is useless."""

    poisoned = frozenset(f"row-{i:02d}" for i in range(0, sum(NUM_ROWS.values()), 3))
