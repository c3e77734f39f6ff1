"""cache_targets: runs the frozen target once over every corpus row and stores what training reads of it.

One corpus shard becomes one cache shard (layout and identity: dspark/cache.py). The engine only prefills prompt plus
answer; states come back raw, the final norm and the log-sum-exp of the whole vocabulary are computed here, with the very
head that training will use. A shard counts once its receipt exists; the manifest comes last.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.cache import MANIFEST, CacheIdentity, CacheRow, num_tapped, supervised_rows, write_manifest, write_shard
from dspark.storage import Storage
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome
from pipelines.flow import CacheTargetsConfig
from pipelines.runner import Progress, Work
from pipelines.stages.regenerate import read_shard
from pipelines.targets import local_folder

MIN_SUPERVISED_TOKENS = 2  # one anchor and one label
LOGIT_ROWS = 256  # rows of [rows, vocabulary] logits held at once


@dataclass(frozen=True)
class Settings:
    config: CacheTargetsConfig
    target_uri: str
    corpus_uri: str
    max_length_tokens: int  # of a corpus row
    out_uri: str


@dataclass(frozen=True)
class Shard:
    name: str
    corpus_file: str


def run(config: CacheTargetsConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    corpus = inputs["corpus"]
    files = sorted(name for name in corpus.record["files"] if name.endswith(".parquet"))
    shards = [Shard(f"shard-{i:05d}", name) for i, name in enumerate(files)]
    receipts = {s.name: json.loads(out.read(f"{s.name}.json")) for s in shards if out.exists(f"{s.name}.json")}
    total, done = int(corpus.record["metrics"]["rows"]), sum(len(r["rows"]) + len(r["dropped"]) for r in receipts.values())
    work.report(Progress(done, total, "rows"))
    max_length = corpus.record["identity"]["config"]["max_length_tokens"]
    settings = Settings(config, work.resources.target_uri, corpus.uri, max_length, out.uri)
    for name, receipt, seconds in work.map(
        "pipelines.stages.cache_targets:Capturer", settings, [s for s in shards if s.name not in receipts]
    ):
        receipts[name] = receipt
        done += len(receipt["rows"]) + len(receipt["dropped"])
        work.report(Progress(done, total, "rows", {"captured_tokens_per_second": receipt["num_tokens"] / seconds}))
    ordered = [receipts[shard.name] for shard in shards]
    manifest = write_manifest(out, ordered, cache_identity(config, ordered[0]["width"]))
    dropped = [item for receipt in ordered for item in receipt["dropped"]]
    metrics = {key: float(manifest[key]) for key in ("num_rows", "num_tokens", "bytes", "bytes_per_token")} | {
        "rows_dropped": float(len(dropped))
    }
    if not manifest["num_rows"]:
        raise ValueError(
            f"every one of {len(dropped)} rows was set aside, for example {dropped[:1]}. Fix: look at their reasons in {out.uri}"
        )
    checksums = {receipt["file"]: receipt["sha256"] for receipt in ordered}
    return Outcome(checksums | {MANIFEST: hashlib.sha256(out.read(MANIFEST)).hexdigest()}, metrics)


def cache_identity(config: Any, width: int) -> CacheIdentity:
    """`config`: any step config with `target` and `tapped_layers`."""
    return CacheIdentity(config.target.weights, config.tapped_layers, width)


class Capturer:
    """Lives on one worker with one engine; captures a corpus shard."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from dspark.families import check_tapped_layers
        from dspark.target import load_head

        folder = local_folder(settings.target_uri)
        self._settings, self._config = settings, settings.config
        self._out, self._corpus = open_storage(settings.out_uri), open_storage(settings.corpus_uri)
        self._head = load_head(folder, torch.bfloat16)
        check_tapped_layers(self._config.tapped_layers, self._head.shape.num_layers)
        if not 0 <= self._config.mask_token_id < self._head.shape.vocab_size:
            raise ValueError(
                f"target.mask_token_id: {self._config.mask_token_id} is not a token of the target ({self._head.shape.vocab_size}). Fix: an unused special token"
            )
        if self._config.cache_targets.engine == "vllm":
            from pipelines.backends.vllm import Capture

            self._engine: Any = Capture(folder, self._config.tapped_layers, self._head, settings.max_length_tokens)
        else:
            self._engine = ReferenceCapture(folder, self._config.tapped_layers)

    def __call__(self, shard: Shard) -> tuple[str, dict[str, Any], float]:
        started = time.monotonic()
        rows, dropped = [], []
        for row in read_shard(self._corpus, shard.corpus_file):
            if self._config.mask_token_id in row["token_ids"]:
                raise ValueError(
                    f"target.mask_token_id: {self._config.mask_token_id} occurs in corpus row {row['row_id']}. Fix: choose a special token that never occurs in text"
                )
            if sum(row["loss_mask"]) < MIN_SUPERVISED_TOKENS:
                dropped.append({"row_id": row["row_id"], "reason": f"fewer than {MIN_SUPERVISED_TOKENS} supervised tokens"})
            else:
                rows.append(row)
        identity = cache_identity(self._config, self._head.shape.width)
        receipt = write_shard(self._out, shard.name, self._cached(rows), identity, dropped)
        return shard.name, receipt, time.monotonic() - started

    def _cached(self, rows: list[dict[str, Any]]) -> Iterator[CacheRow]:
        import torch

        for row, (tapped_TLD, final_TD) in zip(rows, self._engine.capture([row["token_ids"] for row in rows]), strict=True):
            mask_T = np.asarray(row["loss_mask"], dtype=np.uint8)
            if len(tapped_TLD) != len(mask_T):
                raise ValueError(f"row {row['row_id']}: the engine returned states of {len(tapped_TLD)} tokens for {len(mask_T)}")
            final_SD = final_TD[torch.from_numpy(supervised_rows(mask_T))].contiguous()
            log_sum_exp = torch.cat([self._head.logits(part).logsumexp(-1) for part in final_SD.split(LOGIT_ROWS)])
            yield CacheRow(
                row["row_id"], row["domain"], row["split"], np.asarray(row["token_ids"], np.int32), mask_T,
                tapped_TLD[: num_tapped(mask_T)].contiguous().view(torch.uint16).numpy(), final_SD.view(torch.uint16).numpy(), log_sum_exp.numpy(),
            )  # fmt: skip


class ReferenceCapture:
    """The same states with transformers, one sequence at a time."""

    def __init__(self, folder: Any, tapped_layers: tuple[int, ...]) -> None:
        import torch

        from dspark.target import TransformersTarget

        self._target = TransformersTarget(folder, tapped_layers, torch.bfloat16, torch.device("cpu"))

    def capture(self, sequences: list[list[int]]) -> Iterator[tuple[Any, Any]]:
        for token_ids in sequences:
            states = self._target.states(token_ids)
            yield states.tapped_BTLD, states.final_BTD
