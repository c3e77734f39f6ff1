"""The step cache_targets without an engine: its worker is fed with states that were recorded beforehand.

Corpus, storage, units, shards, receipts, lease and record are the real ones, so that a process of it may be killed anywhere:

    record_states(folder, answers, config)
    make(root_uri, recipe(answers, config, folder), 400_000, environment, part_bytes)      # the main function of a process
"""

import hashlib
import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401 - pyarrow imports it when it is first needed
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs  # noqa: F401 - imported once, for all processes that are forked from one that has this module
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark.drafters.base import FrozenTables
from dspark.storage import Storage
from dspark.target import TargetHead
from pipelines import lease, runner
from pipelines.artifacts import Corpus, TargetCache
from pipelines.backends import object_store
from pipelines.backends.object_store import ObjectStorage, open_storage
from pipelines.dag import Artifact, Outcome, Resources, Step
from pipelines.flow import CacheTargetsConfig
from pipelines.runner import LocalExecutor, NullTracker, Progress, Work
from pipelines.settings import CacheTargetsStage
from pipelines.stages import cache_targets
from pipelines.stages.regenerate import SCHEMA, read_shard
from tests.dspark import tiny

RECORDED = "tests.pipelines.recorded:Recorded"
STATES = "states.safetensors"
NUM_PROMPT_TOKENS = 12
ROWS_PER_FILE = 16
ROW_SECONDS = 0.01  # what a recorded row takes
STAGE = CacheTargetsStage(
    engine="transformers", dtype="bf16", logits="final", num_top_logits=0, mode="store", compression="none",
    max_bytes=None, window_bytes=1_000_000, assumed_prompt_tokens=45, assumed_response_tokens=110,
)  # fmt: skip


# --- a recipe of two steps --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """A corpus of random tokens in [first_token, vocab_size), by `lengths` of its answers."""

    lengths: tuple[int, ...]
    first_token: int
    vocab_size: int
    max_length_tokens: int


def corpus_rows(answers: Answers) -> list[dict[str, Any]]:
    rows, generator = [], np.random.default_rng(0)
    for i, length in enumerate(answers.lengths):
        tokens = generator.integers(answers.first_token, answers.vocab_size, NUM_PROMPT_TOKENS + length).tolist()
        rows.append(
            {
                "row_id": f"prompt-{i:04d}/0", "prompt_id": f"prompt-{i:04d}", "turn": 0, "domain": "noise",
                "split": "select" if i % 8 == 7 else "train", "token_ids": tokens, "loss_mask": [0] * NUM_PROMPT_TOKENS + [1] * length,
                "num_prompt_tokens": NUM_PROMPT_TOKENS, "finish_reason": "stop", "is_truncated": False, "sampling": '{"seed": 0}',
            }
        )  # fmt: skip
    return rows


def answer(config: Answers, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    """In place of regenerate."""
    rows, files = corpus_rows(config), {}
    for start in range(0, len(rows), ROWS_PER_FILE):
        sink, name = io.BytesIO(), f"rows-{start // ROWS_PER_FILE:05d}.parquet"
        pq.write_table(pa.Table.from_pylist(rows[start : start + ROWS_PER_FILE], schema=SCHEMA), sink)
        out.put(name, sink.getvalue())
        files[name] = hashlib.sha256(sink.getvalue()).hexdigest()
    counts = {"rows": len(rows), "response_tokens": sum(config.lengths), "prompt_tokens": NUM_PROMPT_TOKENS * len(rows)}
    return Outcome(files, {name: float(count) for name, count in counts.items()})


def recipe(answers: Answers, config: CacheTargetsConfig, target_uri: Path) -> list[Step]:
    resources = Resources(str(target_uri), cache=replace(STAGE, dtype=config.cache_targets.dtype, logits=config.cache_targets.logits))
    corpus = Step("regenerate", 1, "tests.pipelines.recorded:answer", answers, {}, Corpus, "tiny", resources)
    function = "pipelines.stages.cache_targets:run"
    return [corpus, Step("cache_targets", 1, function, config, {"corpus": corpus}, TargetCache, "tiny", resources)]


class SilentScreen:
    def started(self, step: Step, reason: str) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def finished(self, step: Step, record: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


def make(root_uri: str, steps: Sequence[Step], unit_bytes: int, environment: Mapping[str, str], part_bytes: int) -> None:
    """The main function of a process: runs the recipe with recorded states, and ends."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    lease.SETTLE_SECONDS = 0.02
    cache_targets.SHARD_BYTES, cache_targets.CAPTURER, ObjectStorage.UPLOAD_PART_BYTES = unit_bytes, RECORDED, part_bytes
    connect, clients = object_store._connect, {}
    object_store._connect = lambda scheme, *rest: clients.get(scheme) or clients.setdefault(scheme, connect(scheme, *rest))  # 0.2 s each
    root = open_storage(root_uri)
    runner.run(runner.plan(steps, root), root, open_storage, LocalExecutor(), NullTracker(), SilentScreen())


# --- states that were recorded ------------------------------------------------------------------------------------------


def record_states(folder: Path, answers: Answers, config: CacheTargetsConfig) -> None:
    """Noise, for every token of the corpus."""
    generator, states = torch.Generator().manual_seed(0), {}
    for row in corpus_rows(answers):
        name, T = _name(row["token_ids"]), len(row["token_ids"])
        noise = torch.randn(T, len(config.tapped_layers) + 1, config.width, generator=generator).bfloat16()
        states[f"{name}.tapped"], states[f"{name}.final"] = noise[:, :-1].contiguous(), noise[:, -1].contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(states, folder / STATES)


def _name(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


class Recording:
    """An engine that has seen these sequences before."""

    version = "recorded 1"

    def __init__(self, folder: Path) -> None:
        self._states = safe_open(folder / STATES, framework="pt")

    def capture(self, sequences: list[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for token_ids in sequences:
            time.sleep(ROW_SECONDS)
            name = _name(token_ids)
            yield self._states.get_tensor(f"{name}.tapped"), self._states.get_tensor(f"{name}.final")


class Recorded(cache_targets.Capturer):
    """The worker of cache_targets, with a recording for its engine and random tables for its head."""

    def __init__(self, settings: cache_targets.Settings) -> None:
        self._settings, self._config = settings, settings.config
        self._out, self._corpus = open_storage(settings.out_uri), open_storage(settings.corpus_uri)
        shape = replace(tiny.SHAPE, width=settings.config.width)
        tables = tiny.tables(shape)
        self._head = TargetHead(shape, FrozenTables(tables.embedding_VD.float(), tables.lm_head_VD.float(), torch.ones(shape.width)))
        self._files = lru_cache(4)(lambda file: read_shard(self._corpus, file))
        self._engine = Recording(Path(settings.target_uri))
