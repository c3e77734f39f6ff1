"""cache_targets: runs the frozen target once over every corpus row and stores what training reads of it.

The corpus rows, in their order, are cut into units of about SHARD_BYTES: a unit is a set of rows and makes one shard (layout
and identity: dspark/cache.py). The engine only prefills prompt plus answer; states come back raw, the final norm and the
log-sum-exp of the whole vocabulary are computed here, with the very head that training will use.

Making a unit again changes nothing but its own shard, which counts once its receipt exists; the manifest comes last. A row
that the engine cannot take, or whose states are damaged, is set aside with its reason and counted. A unit that ends its
engine again and again is cut in two until the one row that does it stands alone.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dspark.cache import (
    MANIFEST,
    NUM_READERS,
    CacheFormat,
    CacheIdentity,
    CacheRow,
    Exactness,
    checksum,
    num_tapped,
    supervised_rows,
    write_manifest,
    write_shard,
)
from dspark.states import decode, encode
from dspark.storage import Storage
from pipelines import sizing
from pipelines.artifacts import TargetCache
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, Resources
from pipelines.flow import CacheTargetsConfig
from pipelines.runner import Failed, Progress, Work
from pipelines.stages.regenerate import read_shard
from pipelines.targets import local_folder

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.target import TargetHead

CAPTURER = "pipelines.stages.cache_targets:Capturer"
MIN_SUPERVISED_TOKENS = 2  # one anchor and one label
SHARD_BYTES = 96_000_000  # what a kill can cost, and what a stream's window is filled with
CORPUS_FILES = 32  # kept read by a worker
GROUP_TOKENS = 2048  # whose states are encoded at once
LOGIT_ROWS = 256  # rows of [rows, vocabulary] logits held at once
MAX_POISONED_FRACTION = 0.05  # above it the engine is at fault, not the rows


@dataclass(frozen=True)
class Settings:
    """What a worker needs to make units."""

    config: CacheTargetsConfig
    compression: Literal["none", "zstd"]
    target_uri: str
    corpus_uri: str
    max_length_tokens: int  # of a corpus row
    out_uri: str

    @property
    def identity(self) -> CacheIdentity:
        return cache_identity(self.config)

    @property
    def form(self) -> CacheFormat:
        content = self.config.cache_targets
        return CacheFormat(content.dtype, content.logits, content.num_top_logits, self.compression)


@dataclass(frozen=True)
class CorpusRow:
    """Where a corpus row stands, and what caching it takes."""

    row_id: str
    split: str
    file: str
    index: int
    num_bytes: int  # of its states


@dataclass(frozen=True)
class Unit:
    """Rows that become one shard."""

    name: str
    rows: tuple[CorpusRow, ...]


@dataclass(frozen=True)
class Made:
    name: str
    receipt: dict[str, Any]
    seconds: float


def run(config: CacheTargetsConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    corpus, stage = inputs["corpus"], work.resources.cache
    counted = sizing.corpus_rows(corpus.record["metrics"], stage)
    sizing.require_room(sizing.measure(stage, config.width, len(config.tapped_layers), counted, out), stage)
    rows, dropped = corpus_rows(corpus, config)
    settings = capture_settings(config, corpus, work.resources, out)
    receipts: dict[str, dict[str, Any]] = {}
    done = 0
    waiting = cut(rows, SHARD_BYTES)
    while waiting:
        with ThreadPoolExecutor(NUM_READERS) as pool:  # two requests each
            there = list(pool.map(lambda unit: finished(out, unit.name), waiting))
        found = {unit.name: receipt for unit, receipt in zip(waiting, there, strict=True) if receipt}
        receipts |= found
        done += sum(len(receipt["rows"]) + len(receipt["dropped"]) for receipt in found.values())
        work.report(Progress(done, len(rows), "rows"))
        again: list[Unit] = []
        for result in work.map(CAPTURER, settings, [u for u in waiting if u.name not in found], keep_failed=True):
            if isinstance(result, Failed):
                again += smaller(result, settings, out)
                continue
            receipts[result.name] = result.receipt
            done += len(result.receipt["rows"]) + len(result.receipt["dropped"])
            work.report(Progress(done, len(rows), "rows", {"captured_tokens_per_second": result.receipt["num_tokens"] / result.seconds}))
        waiting = again
    ordered = [receipts[name] for name in sorted(receipts)]
    dropped += [item for receipt in ordered for item in receipt["dropped"]]
    out.put(TargetCache.DROPPED, "".join(json.dumps(item) + "\n" for item in dropped).encode())
    num_poisoned = sum("is_poisoned" in item for item in dropped)
    if num_poisoned > MAX_POISONED_FRACTION * len(rows) or not any(receipt["rows"] for receipt in ordered):
        raise ValueError(
            f"{len(dropped)} rows were set aside, {num_poisoned} of them for what the engine returned, for example {dropped[-1:]}. "
            f"Fix: look at their reasons in {out.uri}/{TargetCache.DROPPED}, mend the engine, then rebuild=[cache_targets]"
        )
    require_rows(ordered, rows, out)
    manifest = write_manifest(out, ordered, settings.identity, settings.form)
    metrics = {key: float(manifest[key]) for key in ("num_rows", "num_tokens", "bytes", "bytes_per_token")} | {
        "rows_dropped": float(len(dropped)),
        "ratio_to_deepspec": manifest["bytes"] / manifest["bytes_as_deepspec"],
    }
    checksums = {receipt["file"]: receipt["checksum"] for receipt in ordered}
    return Outcome(checksums | {name: checksum(out.read(name)) for name in (MANIFEST, TargetCache.DROPPED)}, metrics)


def corpus_rows(corpus: Artifact, config: CacheTargetsConfig) -> tuple[list[CorpusRow], list[dict[str, Any]]]:
    """Every row of the corpus that can be trained on, in order, and those set aside."""
    storage, rows, dropped = open_storage(corpus.uri), [], []
    longest, content = max_length(corpus), config.cache_targets
    vector = 2 * config.width if content.dtype == "bf16" else config.width + 1
    at_row = vector if content.logits == "final" else 8 * content.num_top_logits
    for file in sorted(name for name in corpus.record["files"] if name.endswith(".parquet")):
        for index, row in enumerate(read_shard(storage, file, ("row_id", "split", "loss_mask"))):
            mask_T = np.asarray(row["loss_mask"], np.uint8)
            num_supervised = len(supervised_rows(mask_T))
            if num_supervised < MIN_SUPERVISED_TOKENS:
                dropped.append({"row_id": row["row_id"], "reason": f"fewer than {MIN_SUPERVISED_TOKENS} supervised tokens"})
            elif len(mask_T) > longest:
                dropped.append({"row_id": row["row_id"], "reason": f"{len(mask_T)} tokens, target.max_length_tokens is {longest}"})
            else:
                num_bytes = num_tapped(mask_T) * len(config.tapped_layers) * vector + num_supervised * at_row
                rows.append(CorpusRow(row["row_id"], row["split"], file, index, num_bytes))
    return rows, dropped


def cut(rows: Sequence[CorpusRow], unit_bytes: int) -> list[Unit]:
    """Consecutive rows in units of at most `unit_bytes` of states, or of one row."""
    units: list[list[CorpusRow]] = []
    size = 0
    for row in rows:
        if not units or size + row.num_bytes > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(row)
        size += row.num_bytes
    return [Unit(f"shard-{i:05d}", tuple(unit)) for i, unit in enumerate(units)]


def finished(out: Storage, name: str) -> dict[str, Any] | None:
    """The receipt of a unit that is there, whole."""
    try:
        receipt = json.loads(out.read(f"{name}.json"))
        return receipt if out.size_bytes(receipt["file"]) == receipt["bytes"] else None
    except FileNotFoundError:
        return None


def require_rows(receipts: Sequence[Mapping[str, Any]], rows: Sequence[CorpusRow], out: Storage) -> None:
    """ValueError unless every row is in a shard or set aside, once: shards that another version began may be cut elsewhere."""
    made = [values[0] for receipt in receipts for values in receipt["rows"]]
    made += [item["row_id"] for receipt in receipts for item in receipt["dropped"]]
    if sorted(made) != sorted(row.row_id for row in rows):
        differing = sorted({*made} ^ {row.row_id for row in rows})
        raise ValueError(
            f"{out.uri}: its shards hold {len(made)} rows, {len({*made})} of them different, and the corpus has {len(rows)}; "
            f"in one of both alone: {', '.join(differing[:3]) or 'none'}. Fix: rebuild=[cache_targets]"
        )


def smaller(failed: Failed, settings: Settings, out: Storage) -> list[Unit]:
    """The halves of a unit that ended every worker it was given to; a single row is set aside in a shard of its own."""
    unit: Unit = failed.item
    if len(unit.rows) > 1:
        middle = len(unit.rows) // 2
        return [Unit(f"{unit.name}-{i}", rows) for i, rows in enumerate((unit.rows[:middle], unit.rows[middle:]))]
    dropped = {"row_id": unit.rows[0].row_id, "reason": f"it ended its engine: {failed.cause}", "is_poisoned": True}
    write_shard(out, unit.name, [], settings.identity, settings.form, "none", [dropped])
    return [unit]


def cache_identity(config: Any) -> CacheIdentity:
    """`config`: any step config with `target`, `tapped_layers` and `width`."""
    target = config.target
    return CacheIdentity(target.name, target.weights, target.tokenizer, target.chat_template, config.tapped_layers, config.width)


def max_length(corpus: Artifact) -> int:
    return corpus.record["identity"]["config"]["max_length_tokens"]


def capture_settings(config: CacheTargetsConfig, corpus: Artifact, resources: Resources, out: Storage) -> Settings:
    return Settings(config, resources.cache.compression, resources.target_uri, corpus.uri, max_length(corpus), out.uri)


class Capturer:
    """Lives on one worker with one engine; makes units."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from dspark.layers import fast_dtype
        from dspark.target import load_head

        folder, config = local_folder(settings.target_uri), settings.config
        self._settings, self._config = settings, config
        self._out, self._corpus = open_storage(settings.out_uri), open_storage(settings.corpus_uri)
        self._head = load_head(folder, fast_dtype()).to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._files = lru_cache(CORPUS_FILES)(lambda file: read_shard(self._corpus, file))
        if not all(0 <= layer < self._head.shape.num_layers for layer in config.tapped_layers):
            raise ValueError(
                f"target.tapped_layers: {list(config.tapped_layers)}: the target has layers 0 to {self._head.shape.num_layers - 1}. Fix: layers among these"
            )
        if config.width != self._head.shape.width:
            raise ValueError(
                f"target.width: {config.width}, the model's is {self._head.shape.width}. Fix: target.width={self._head.shape.width}"
            )
        if not 0 <= config.mask_token_id < self._head.shape.vocab_size:
            raise ValueError(
                f"target.mask_token_id: {config.mask_token_id} is not a token of the target ({self._head.shape.vocab_size}). Fix: an unused special token"
            )
        if config.cache_targets.engine == "vllm":
            from pipelines.backends.vllm import Capture

            self._engine: Any = Capture(folder, config.tapped_layers, self._head, settings.max_length_tokens)
        else:
            self._engine = ReferenceCapture(folder, config.tapped_layers)

    def __call__(self, unit: Unit) -> Made:
        started = time.monotonic()
        receipt = write_shard(self._out, unit.name, self._cached(unit), self._settings.identity, self._settings.form, self._engine.version)
        return Made(unit.name, receipt, time.monotonic() - started)

    def _cached(self, unit: Unit) -> Iterator[CacheRow]:
        rows = [self._files(row.file)[row.index] for row in unit.rows]
        for row in rows:
            if self._config.mask_token_id in row["token_ids"]:
                raise ValueError(
                    f"target.mask_token_id: {self._config.mask_token_id} occurs in corpus row {row['row_id']}. Fix: choose a special token that never occurs in text"
                )
        yield from cached_rows(rows, self._engine.capture([row["token_ids"] for row in rows]), self._head, self._settings.form)


def cached_rows(
    rows: Iterable[Mapping[str, Any]], states: "Iterable[tuple[Tensor, Tensor]]", head: "TargetHead", form: CacheFormat
) -> Iterator[CacheRow]:
    """Corpus rows and their bf16 states in the form in which they are stored: in groups, since a product with the whole LM head
    pays for many states at once, and not in a thread beside the engine's, which keeps every core busy by itself."""
    group: list[tuple[Mapping[str, Any], Tensor, Tensor]] = []
    for row, (tapped_TLD, final_TD) in zip(rows, states, strict=True):
        group.append((row, tapped_TLD, final_TD))
        if sum(len(final) for _, _, final in group) >= GROUP_TOKENS:
            yield from _cached_group(group, head, form)
            group = []
    yield from _cached_group(group, head, form)


def _cached_group(group: "Sequence[tuple[Mapping[str, Any], Tensor, Tensor]]", head: "TargetHead", form: CacheFormat) -> list[CacheRow]:
    """Each row encoded, with the error that this makes."""
    import torch

    found, logit_states = [], []
    for row, tapped_TLD, final_TD in group:
        if len(tapped_TLD) != len(row["loss_mask"]):
            raise ValueError(f"row {row['row_id']}: the engine returned states of {len(tapped_TLD)} tokens for {len(row['loss_mask'])}")
        mask_T = np.asarray(row["loss_mask"], np.uint8)
        mask_T = mask_T[: np.flatnonzero(mask_T)[-1] + 1]
        tapped_PLD, final_SD = (
            tapped_TLD[: num_tapped(mask_T)].contiguous(),
            final_TD[torch.from_numpy(supervised_rows(mask_T))].contiguous(),
        )
        tapped, stored = encode(tapped_PLD, form.dtype), encode(final_SD, form.dtype)
        found.append(
            CacheRow(
                row["row_id"], row["domain"], row["split"], row["sampling"], np.asarray(row["token_ids"][: len(mask_T)], np.int32), mask_T, tapped,
                np.empty(0, np.float32), exactness=Exactness.of(tapped_PLD, final_SD, tapped, stored),
            )
        )  # fmt: skip
        if form.logits == "final":  # the normaliser belongs to the logits that training will see: those of the stored state
            found[-1].final_SD = stored
            final_SD = torch.empty_like(final_SD)
            decode(stored, final_SD)
        logit_states.append(final_SD.to(head.dtype))
    if group:
        sizes = [len(part) for part in logit_states]
        for cached, sums in zip(found, head.log_sum_exp(torch.cat(logit_states).to(head.device)).cpu().split(sizes), strict=True):
            cached.log_sum_exp_S = sums.numpy()
    if form.logits == "topk":
        for cached, states_SD in zip(found, logit_states, strict=True):
            _keep_best(cached, states_SD, head, form.num_top_logits)
    return found


def _keep_best(cached: CacheRow, final_SD: "Tensor", head: "TargetHead", num_best: int) -> None:
    import torch

    best = [head.logits(part).topk(num_best) for part in final_SD.to(head.device).split(LOGIT_ROWS)]
    cached.top_ids_SC = torch.cat([part.indices for part in best]).int().cpu().numpy()
    cached.top_logits_SC = torch.cat([part.values for part in best]).cpu().numpy()
    mass_S = np.exp(cached.top_logits_SC - cached.log_sum_exp_S[:, None]).sum(-1, dtype=np.float64)
    assert cached.exactness is not None
    cached.exactness.missing_mass, cached.exactness.largest_missing_mass = float((1.0 - mass_S).sum()), float((1.0 - mass_S).max())


class ReferenceCapture:
    """The same states with transformers, one sequence at a time."""

    def __init__(self, folder: Any, tapped_layers: tuple[int, ...]) -> None:
        import torch
        import transformers

        from dspark.target import TransformersTarget

        self.version = f"transformers {transformers.__version__}"
        self._target = TransformersTarget(folder, tapped_layers, torch.bfloat16, torch.device("cpu"))

    def capture(self, sequences: list[list[int]]) -> Iterator[tuple[Any, Any]]:
        for token_ids in sequences:
            states = self._target.states(token_ids)
            yield states.tapped_SLD, states.final_SD
