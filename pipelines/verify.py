"""mode=verify: reads a whole target cache again and names what in it is not what was written, or cannot be right.

Of every shard: its receipt, the bytes and checksum of the file, and of every row its own checksum, its tokens and mask
against the corpus, finite states, and no state that is all zero at a layer and position. Of one row a shard: whether the
stored final states put the target's own best token first. Nothing is changed but for a note, `damaged.json`, by which the
next run makes the named shards anew and keeps the others.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from dspark.cache import MANIFEST, CacheRow, ShardReader, check_row, checksum, read_receipt, require_identity, supervised_rows
from dspark.storage import Storage
from pipelines.backends.object_store import open_storage
from pipelines.dag import DAMAGED, Artifact, Step
from pipelines.flow import CacheTargetsConfig
from pipelines.runner import Progress, Work
from pipelines.stages.cache_targets import cache_identity, corpus_rows
from pipelines.stages.regenerate import read_shard
from pipelines.targets import local_folder

DECISIVE_LOGITS = 0.5  # the target's best token leads by more: rounding does not change it
MIN_AGREEMENT = 0.95


@dataclass(frozen=True)
class Settings:
    config: CacheTargetsConfig
    target_uri: str
    corpus: Artifact
    cache: Artifact


@dataclass(frozen=True)
class ShardReport:
    """`problems`: (row or "", what is wrong). `num_agreeing` of `num_compared` final states have the target's best token first."""

    file: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    num_compared: int
    num_agreeing: int
    problems: tuple[tuple[str, str], ...]


def run(step: Step, cache: Artifact, corpus: Artifact, out: Storage, work: Work) -> list[ShardReport]:
    """Reports in shard order; damage is noted in the cache's folder (and an older note taken away when there is none)."""
    files = [name for name in cache.record["files"] if name.endswith(".arrow")]
    reports = [_manifest_report(step.config, cache, out)]
    work.report(Progress(0, len(files), "shards"))
    settings = Settings(step.config, work.resources.target_uri, corpus, cache)
    for report in work.map("pipelines.verify:Verifier", settings, files):
        reports.append(report)
        work.report(Progress(len(reports) - 1, len(files), "shards"))
    damaged = [report.file for report in reports if report.problems]
    if damaged:
        out.put(DAMAGED, json.dumps({"files": damaged, "problems": {r.file: r.problems for r in reports if r.problems}}, indent=1).encode())
    else:
        out.remove(DAMAGED)
    return sorted(reports, key=lambda report: report.file)


def _manifest_report(config: CacheTargetsConfig, cache: Artifact, out: Storage) -> ShardReport:
    problems = []
    for name in sorted(name for name in cache.record["files"] if not name.endswith(".arrow")):
        try:
            data = out.read(name)
            if checksum(data) != cache.record["files"][name]:
                problems.append(("", f"{name}: not the bytes that were written"))
            elif name == MANIFEST:
                require_identity(cache.uri, json.loads(data), cache_identity(config))
        except FileNotFoundError:
            problems.append(("", f"{name}: missing"))
        except ValueError as error:
            problems.append(("", f"{name}: {error}"))
    return ShardReport(MANIFEST, 0, 0, 0, 0, 0, tuple(problems))


@dataclass(frozen=True)
class _Held:
    """A shard that was read once, as the place that its reader reads rows from."""

    uri: str
    data: bytes

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return self.data[start:end]


class Verifier:
    """Lives on one worker; reads shards again."""

    def __init__(self, settings: Settings) -> None:
        from dspark.layers import fast_dtype
        from dspark.target import TransformersTarget

        self._settings, self._identity = settings, cache_identity(settings.config)
        self._cache, corpus = open_storage(settings.cache.uri), open_storage(settings.corpus.uri)
        self._rows = {row.row_id: row for row in corpus_rows(settings.corpus, settings.config)[0]}
        self._corpus_file = lru_cache(4)(lambda file: read_shard(corpus, file))
        self._shards: Mapping[str, Mapping[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            data = self._cache.read(MANIFEST)
            if checksum(data) == settings.cache.record["files"][MANIFEST]:
                self._shards = {shard["file"]: shard for shard in json.loads(data)["shards"]}
        import torch

        self._target = TransformersTarget(local_folder(settings.target_uri), (0,), fast_dtype(), torch.device("cpu"))

    def __call__(self, file: str) -> ShardReport:
        try:
            data, receipt = self._cache.read(file), self._receipt(file)
        except FileNotFoundError:
            return ShardReport(file, 0, 0, 0, 0, 0, (("", "missing"),))
        except ValueError as error:
            return ShardReport(file, 0, 0, 0, 0, 0, (("", str(error)),))
        problems: list[tuple[str, str]] = []
        if len(data) != receipt["bytes"]:
            problems.append(("", f"{len(data):,} bytes, {receipt['bytes']:,} were written"))
        elif checksum(data) != self._settings.cache.record["files"][file]:
            problems.append(("", "not the bytes that were written"))
        reader, sample = ShardReader(cast(Storage, _Held(self._cache.uri, data)), receipt), None
        if reader.identity != self._identity:
            problems.append(("", f"its identity is {reader.identity}, the step's is {self._identity}"))
        for i, entry in enumerate(reader.entries):
            end = entry.offset + entry.bytes
            if checksum(data[entry.offset : end]) != entry.checksum:
                problems.append((entry.row_id, f"bytes {entry.offset:,} to {end:,} are not those that were written"))
                continue
            try:
                row = reader.read(i)
                check_row(row, self._identity)
                self._compare(row)
                sample = sample or row
            except ValueError as error:
                problems.append((entry.row_id, str(error)))
        compared, agreeing = self._agreement(sample) if sample else (0, 0)
        if agreeing < MIN_AGREEMENT * compared:
            assert sample is not None
            problems.append(
                (sample.row_id, f"the best token of its final states is the target's at only {agreeing} of {compared} positions")
            )
        return ShardReport(file, len(reader.entries), receipt["num_tokens"], len(data), compared, agreeing, tuple(problems))

    def _receipt(self, file: str) -> dict[str, Any]:
        """ValueError when it is missing, or not the one that was written: the manifest has its checksum."""
        if file in self._shards:
            return read_receipt(self._cache, self._shards[file])
        name = f"{file.rpartition('.')[0]}.json"  # the manifest is damaged itself: the shards are not made anew for that
        try:
            receipt = json.loads(self._cache.read(name))
            is_right = receipt["checksum"] == self._settings.cache.record["files"][file]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            is_right = False
        if not is_right:
            raise ValueError(f"{self._cache.uri}/{name}: missing, or not the receipt of the bytes that were written")
        return receipt

    def _compare(self, row: CacheRow) -> None:
        """ValueError unless the row's tokens and mask are the corpus's."""
        place = self._rows.get(row.row_id)
        if place is None:
            raise ValueError(f"row {row.row_id}: the corpus has no such row")
        expected, num_tokens = self._corpus_file(place.file)[place.index], len(row.token_ids_T)
        for name, found in (("token_ids", row.token_ids_T), ("loss_mask", row.loss_mask_T)):
            if not np.array_equal(found, np.asarray(expected[name])[:num_tokens]) or any(expected["loss_mask"][num_tokens:]):
                raise ValueError(f"row {row.row_id}: its {name} are not the corpus's")

    def _agreement(self, row: CacheRow) -> tuple[int, int]:
        """Positions where the target's best token leads clearly, and those of them where the stored form has it first too."""
        import torch

        from dspark.states import decode

        best = self._target.logits(self._target.states(row.token_ids_T.tolist()).final_SD[supervised_rows(row.loss_mask_T)]).topk(2)
        is_decisive = best.values[:, 0] - best.values[:, 1] > DECISIVE_LOGITS
        if row.final_SD is not None:
            final = torch.empty(row.final_SD.codes.shape, dtype=torch.bfloat16)
            decode(row.final_SD, final)
            stored = self._target.logits(final.to(self._target.dtype)).argmax(-1)
        else:
            assert row.top_ids_SC is not None
            stored = torch.from_numpy(row.top_ids_SC[:, 0].astype(np.int64))
        return int(is_decisive.sum()), int((is_decisive & (stored == best.indices[:, 0])).sum())
