"""The target cache: what the frozen target computed for each sequence, as Arrow IPC files that pyarrow alone can read.

A cache is a set of shards `shard-00000.arrow`, a receipt `shard-00000.json` beside each (written after it) and
`manifest.json`, written last. A receipt lists its rows (id, place and checksum in the file, lengths), the rows set aside
with their reasons, bytes and checksum of the file, and how exact its lossy parts are; the manifest has their sums and a
checksum of each receipt. Checksums are xxh3-128. Schema version 2, one row a sequence, one record batch a row, so that a
row is one range of the file:

    row_id           string          prompt id and turn
    domain           string
    split            string          train | select
    provenance       string          JSON: how the response was sampled, by which engine
    token_ids        list<int32>     T ids, prompt and response, up to the last supervised one
    loss_mask        list<uint8>     T flags, 1 on supervised (response) tokens
    tapped           large_binary    [P, L, D]: residual stream after each tapped layer, for the first P tokens
    tapped_exponents large_binary    [P, L] int8, only with dtype fp8
    final            large_binary    [S, D]: state after the final norm, at the S rows that predict a supervised label
    final_exponents  large_binary    [S] int8, only with dtype fp8
    log_sum_exp      list<float32>   S: log-sum-exp of the target's logits over its whole vocabulary, at those rows
    top_ids          large_binary    [S, C] int32, with logits topk in place of `final`: the target's best tokens
    top_logits       large_binary    [S, C] float32: their logits, best first

The S rows are the positions j with loss_mask[j+1] = 1, ascending. P = the last of them: an anchor is at most there and
sees only what is strictly before it, so nothing later is stored. A state is D bf16 values, or D e4m3 codes with a power of
two for scale (dspark/states.py). The schema's metadata holds the identity of the target (name, weights, tokenizer and chat
template by hash), L and D, the tapped layers and their convention (`output_of_layer`: the stream after decoder layer l, 0-based),
`final_state` (`after_final_norm`: what the LM head reads), dtype, logits, and the engine that computed it.

Shapes: T tokens, P tapped tokens, S supervised rows, L tapped layers, D width, C best tokens.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
import xxhash
from torch import Tensor

from dspark.states import CODE_DTYPES, StateDtype, States, decode
from dspark.storage import LocalStorage, Storage

CACHE_SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
LAYER_CONVENTION = "output_of_layer"
CONVENTIONS = {"schema": "dspark.cache", "layer_convention": LAYER_CONVENTION, "final_state": "after_final_norm"}
FILE_HEAD_BYTES = 8  # "ARROW1" and padding, before the schema
NUM_READERS = 4  # rows or receipts of a remote cache read at once: more only take turns in one client


@dataclass(frozen=True)
class CacheIdentity:
    """Whose states they are; readers refuse a cache that does not fit their drafter."""

    target: str
    weights: str
    tokenizer: str
    chat_template: str
    tapped_layers: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class CacheFormat:
    """In what form states and logits are stored. `num_top_logits`: C, with logits topk."""

    dtype: StateDtype
    logits: Literal["final", "topk"]
    num_top_logits: int
    compression: Literal["none", "zstd"] = "none"


@dataclass
class CacheRow:
    """One sequence. `final` or the two `top_` arrays, as the cache's format says."""

    row_id: str
    domain: str
    split: str
    provenance: str
    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    tapped_PLD: States
    log_sum_exp_S: np.ndarray
    final_SD: States | None = None
    top_ids_SC: np.ndarray | None = None
    top_logits_SC: np.ndarray | None = None
    exactness: "Exactness | None" = None  # known when it is captured; a shard keeps only the sum


@dataclass(frozen=True)
class RowEntry:
    """A row's line in the receipt: enough to choose it, to read it by one range and to check what was read."""

    row_id: str
    domain: str
    split: str
    num_tokens: int
    num_supervised: int
    offset: int
    bytes: int
    checksum: str


@dataclass
class Exactness:
    """How far the stored form is from what the target computed, as sums that add up over rows and shards."""

    squared_error: np.ndarray  # [L + 1], each tapped layer and then the final state
    squared_norm: np.ndarray
    missing_mass: float = 0.0  # of the target's distribution outside its C best tokens, summed over rows
    largest_missing_mass: float = 0.0

    @staticmethod
    def of(tapped_PLD: Tensor, final_SD: Tensor, stored_tapped: States, stored_final: States) -> "Exactness":
        """Of one row: what was computed against what is stored."""
        errors, norms = [], []
        for states, stored in ((tapped_PLD, stored_tapped), (final_SD, stored_final)):
            wide = states.float()
            if stored.exponents is None:  # bit for bit
                errors.append(torch.zeros(wide.shape[1:-1]).reshape(-1))
            else:
                decoded = torch.empty_like(states)
                decode(stored, decoded)
                errors.append((decoded.float() - wide).square().sum((0, -1)).reshape(-1))
            norms.append(wide.square().sum((0, -1)).reshape(-1))
        return Exactness(torch.cat(errors).double().numpy(), torch.cat(norms).double().numpy())

    def __add__(self, other: "Exactness") -> "Exactness":
        return Exactness(
            self.squared_error + other.squared_error,
            self.squared_norm + other.squared_norm,
            self.missing_mass + other.missing_mass,
            max(self.largest_missing_mass, other.largest_missing_mass),
        )


def checksum(data: bytes | memoryview | pa.Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def supervised_rows(loss_mask_T: np.ndarray) -> np.ndarray:
    """Positions whose output predicts a supervised label: the S rows of `final` and `log_sum_exp`."""
    return np.flatnonzero(loss_mask_T[1:])


def num_tapped(loss_mask_T: np.ndarray) -> int:
    """P: how many leading tokens' tapped states any block can see."""
    rows = supervised_rows(loss_mask_T)
    return int(rows[-1]) if len(rows) else 0


def check_row(row: CacheRow, identity: CacheIdentity) -> None:
    """ValueError when a row's states do not belong to its tokens, are not finite, or are all zero at a layer or position."""
    P, S, L, D = num_tapped(row.loss_mask_T), len(supervised_rows(row.loss_mask_T)), len(identity.tapped_layers), identity.width
    parts = [
        ("loss_mask", row.loss_mask_T, (len(row.token_ids_T),)),
        ("tapped", row.tapped_PLD.codes, (P, L, D)),
        ("log_sum_exp", row.log_sum_exp_S, (S,)),
    ]
    if row.final_SD is not None:
        parts.append(("final", row.final_SD.codes, (S, D)))
    elif row.top_ids_SC is not None and row.top_logits_SC is not None:
        parts += [("top_logits", row.top_logits_SC, (S, row.top_ids_SC.shape[-1])), ("top_ids", row.top_ids_SC, row.top_logits_SC.shape)]
    else:
        raise ValueError(f"row {row.row_id}: it has neither final states nor best logits")
    for name, array, expected in parts:
        if array.shape != expected:
            raise ValueError(f"row {row.row_id}: {name} has shape {array.shape}, its tokens and mask need {expected}")
    for name, states in (("tapped", row.tapped_PLD), ("final", row.final_SD)):
        if states is not None and (problem := states.problem()):
            raise ValueError(f"row {row.row_id}: {name} {problem}")
    for name, values in (("log_sum_exp", row.log_sum_exp_S), ("top_logits", row.top_logits_SC)):
        if values is not None and not np.all(np.isfinite(values)):
            raise ValueError(f"row {row.row_id}: {name} holds a NaN or an infinity")


# --- writing --------------------------------------------------------------------------------------------------------


def write_shard(
    storage: Storage,
    name: str,
    rows: Iterable[CacheRow],
    identity: CacheIdentity,
    form: CacheFormat,
    engine: str,
    dropped: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Writes a shard and then its receipt; returns the receipt.

    A row whose states are not what its tokens need (`check_row`) is set aside with the reason, like those in `dropped`.
    """
    schema, sink, entries, aside = _schema(identity, form, engine), io.BytesIO(), [], list(dropped)
    exactness: Exactness | None = None
    options = pa.ipc.IpcWriteOptions(compression=None if form.compression == "none" else form.compression)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for row in rows:
            try:
                check_row(row, identity)
            except ValueError as error:
                aside.append({"row_id": row.row_id, "reason": str(error), "is_poisoned": True})
                continue
            start = sink.tell() or FILE_HEAD_BYTES + schema.serialize().size  # the head is written with the first batch
            writer.write_batch(pa.record_batch(_columns(row, schema), schema=schema))
            written = sink.getbuffer()[start:]
            counts = len(row.token_ids_T), len(row.log_sum_exp_S)
            entries.append(RowEntry(row.row_id, row.domain, row.split, *counts, start, len(written), checksum(written)))
            del written  # a BytesIO cannot grow while it is looked into
            if row.exactness is not None:
                exactness = row.exactness if exactness is None else exactness + row.exactness
    data = sink.getvalue()
    storage.put(f"{name}.arrow", data)
    receipt = {
        "file": f"{name}.arrow",
        "bytes": len(data),
        "checksum": checksum(data),
        "num_tokens": sum(entry.num_tokens for entry in entries),
        "num_supervised": sum(entry.num_supervised for entry in entries),
        "engine": engine,
        "identity": asdict(identity),
        "format": asdict(form),
        "exactness": exactness and {key: np.asarray(value).tolist() for key, value in vars(exactness).items()},
        "rows": [list(vars(entry).values()) for entry in entries],
        "dropped": aside,
    }
    storage.put(f"{name}.json", json.dumps(receipt).encode())
    return receipt


def _schema(identity: CacheIdentity, form: CacheFormat, engine: str = "") -> pa.Schema:
    is_fp8, has_final = form.dtype == "fp8", form.logits == "final"
    columns = [
        ("row_id", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("provenance", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("tapped", pa.large_binary()),
        *([("tapped_exponents", pa.large_binary())] if is_fp8 else []),
        *([("final", pa.large_binary())] if has_final else []),
        *([("final_exponents", pa.large_binary())] if has_final and is_fp8 else []),
        ("log_sum_exp", pa.list_(pa.float32())),
        *([] if has_final else [("top_ids", pa.large_binary()), ("top_logits", pa.large_binary())]),
    ]
    metadata = {"schema_version": CACHE_SCHEMA_VERSION, **CONVENTIONS, **asdict(identity), **asdict(form), "engine": engine}
    return pa.schema(columns, metadata={key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()})


def _columns(row: CacheRow, schema: pa.Schema) -> list[pa.Array]:
    final = row.final_SD or States(np.empty(0))
    values: dict[str, Any] = {
        "row_id": row.row_id,
        "domain": row.domain,
        "split": row.split,
        "provenance": row.provenance,
        "token_ids": row.token_ids_T.astype(np.int32),
        "loss_mask": row.loss_mask_T.astype(np.uint8),
        "tapped": row.tapped_PLD.codes,
        "tapped_exponents": row.tapped_PLD.exponents,
        "final": final.codes,
        "final_exponents": final.exponents,
        "log_sum_exp": row.log_sum_exp_S.astype(np.float32),
        "top_ids": row.top_ids_SC,
        "top_logits": row.top_logits_SC,
    }
    arrays = []
    for field in schema:
        value = values[field.name]
        if pa.types.is_large_binary(field.type):  # its two buffers as they are: no copy through Python's bytes
            offsets = pa.py_buffer(np.array([0, value.nbytes], np.int64))
            arrays.append(pa.Array.from_buffers(field.type, 1, [None, offsets, pa.py_buffer(np.ascontiguousarray(value))]))
        else:
            arrays.append(pa.array([value], field.type))
    return arrays


def deepspec_bytes(num_tokens: int, num_layers: int, width: int) -> int:
    """What DeepSpec's cache needs for as many tokens: ids and mask, every tapped state and the last one, for every token."""
    return num_tokens * (6 + 2 * width * (num_layers + 1))


def write_manifest(storage: Storage, receipts: Sequence[Mapping[str, Any]], identity: CacheIdentity, form: CacheFormat) -> dict[str, Any]:
    """Written last: from here on the cache is whole. Receipts in shard order."""
    num_bytes, num_tokens, num_supervised = (sum(r[key] for r in receipts) for key in ("bytes", "num_tokens", "num_supervised"))
    manifest = {
        "schema_version": CACHE_SCHEMA_VERSION,
        **CONVENTIONS,
        "identity": asdict(identity),
        "format": asdict(form),
        "engines": sorted({r["engine"] for r in receipts}),
        "num_rows": sum(len(r["rows"]) for r in receipts),
        "num_dropped": sum(len(r["dropped"]) for r in receipts),
        "num_tokens": num_tokens,
        "num_supervised": num_supervised,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / max(num_tokens, 1),
        "bytes_as_deepspec": deepspec_bytes(num_tokens, len(identity.tapped_layers), identity.width),
        "exactness": _exactness([r["exactness"] for r in receipts if r["exactness"]], num_supervised),
        "shards": [
            {key: r[key] for key in ("file", "bytes", "checksum")}
            | {"num_rows": len(r["rows"]), "receipt_checksum": checksum(json.dumps(r).encode())}
            for r in receipts
        ],
    }
    storage.put(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _exactness(found: Sequence[Mapping[str, Any]], num_supervised: int) -> dict[str, Any] | None:
    if not found:
        return None
    errors, norms = (np.sum([item[key] for item in found], axis=0) for key in ("squared_error", "squared_norm"))
    return {
        "relative_error": np.sqrt(errors / np.maximum(norms, np.finfo(float).tiny)).tolist(),
        "mean_missing_mass": sum(item["missing_mass"] for item in found) / max(num_supervised, 1),
        "largest_missing_mass": max(item["largest_missing_mass"] for item in found),
    }


# --- reading --------------------------------------------------------------------------------------------------------


class ShardReader:
    """The rows of one shard, each by one range: mapped into memory on a local disk, one ranged request elsewhere.

    A row is checked against its checksum when it is first read here, and each time when it comes over a network.
    """

    def __init__(self, storage: Storage, receipt: Mapping[str, Any]) -> None:
        self._storage, self.file = storage, receipt["file"]
        self.entries = [RowEntry(*values) for values in receipt["rows"]]
        self.identity = CacheIdentity(**{**receipt["identity"], "tapped_layers": tuple(receipt["identity"]["tapped_layers"])})
        self.form = CacheFormat(**receipt["format"])
        self._schema = _schema(self.identity, self.form)
        self._mapped: pa.Buffer | None = None
        self._checked: set[int] = set()

    def read(self, i: int) -> CacheRow:
        """ValueError when the bytes are not those that were written; names file and row."""
        entry = self.entries[i]
        data = self._bytes(entry)
        if i not in self._checked:
            if len(data) != entry.bytes or checksum(data) != entry.checksum:
                raise ValueError(
                    f"{self._storage.uri}/{self.file}: row {entry.row_id} is damaged: bytes {entry.offset} to {entry.offset + entry.bytes} are not "
                    "those that were written. Fix: python -m pipelines mode=verify names all damage; the run after it makes those shards anew"
                )
            if self._mapped is not None:
                self._checked.add(i)
        return self._row(pa.ipc.read_record_batch(data, self._schema))

    def _bytes(self, entry: RowEntry) -> pa.Buffer:
        try:
            if not isinstance(self._storage, LocalStorage):
                return pa.py_buffer(self._storage.read_range(self.file, entry.offset, entry.offset + entry.bytes))
            if self._mapped is None:
                self._mapped = pa.memory_map(str(self._storage.path(self.file))).read_buffer()
        except FileNotFoundError as error:
            raise ValueError(
                f"{self._storage.uri}/{self.file}: missing. Fix: run the same command again, it makes this shard alone"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self._storage.uri}/{self.file}: row {entry.row_id} cannot be read: {error}") from error
        start = min(entry.offset, self._mapped.size)  # of a file that was cut off: what is left
        return self._mapped.slice(start, min(entry.bytes, self._mapped.size - start))

    def _row(self, batch: pa.RecordBatch) -> CacheRow:
        names = batch.schema.names

        def text(name: str) -> str:
            return batch.column(name)[0].as_py()

        def numbers(name: str, dtype: type) -> np.ndarray:  # the values below a list of one row
            return np.frombuffer(batch.column(name).values.buffers()[1], dtype=dtype, count=len(batch.column(name).values))

        def binary(name: str, dtype: type, *shape: int) -> np.ndarray | None:
            """Its bytes where they lie; an Arrow scalar would be a copy."""
            if name not in names:
                return None
            return np.frombuffer(batch.column(name).buffers()[2], dtype=dtype, count=math.prod(shape)).reshape(shape)

        def states(name: str, *shape: int) -> States | None:
            codes = binary(name, CODE_DTYPES[self.form.dtype], *shape)
            return None if codes is None else States(codes, binary(f"{name}_exponents", np.int8, *shape[:-1]))

        mask_T, lse_S = numbers("loss_mask", np.uint8), numbers("log_sum_exp", np.float32)
        tapped = states("tapped", num_tapped(mask_T), len(self.identity.tapped_layers), self.identity.width)
        assert tapped is not None
        S, C = len(lse_S), self.form.num_top_logits
        return CacheRow(
            text("row_id"), text("domain"), text("split"), text("provenance"), numbers("token_ids", np.int32), mask_T, tapped, lse_S,
            states("final", S, self.identity.width), binary("top_ids", np.int32, S, C), binary("top_logits", np.float32, S, C),
        )  # fmt: skip


class CacheReader:
    """Random access to the rows of a whole cache; safe to use from several threads."""

    def __init__(self, storage: Storage, identity: CacheIdentity) -> None:
        try:
            self.manifest: Mapping[str, Any] = json.loads(storage.read(MANIFEST))
        except FileNotFoundError as error:
            raise ValueError(f"{storage.uri}: no {MANIFEST}, so this cache is not whole. Fix: run the step cache_targets again") from error
        require_identity(storage.uri, self.manifest, identity)
        with ThreadPoolExecutor(NUM_READERS) as pool:
            receipts = list(pool.map(lambda shard: read_receipt(storage, shard), self.manifest["shards"]))
        self.num_readers = 1 if isinstance(storage, LocalStorage) else NUM_READERS
        self.shards = [ShardReader(storage, receipt) for receipt in receipts]
        self.entries = [entry for shard in self.shards for entry in shard.entries]
        self._index = [(shard, i) for shard in self.shards for i in range(len(shard.entries))]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> CacheRow:
        shard, row = self._index[i]
        return shard.read(row)


def read_receipt(storage: Storage, shard: Mapping[str, Any]) -> dict[str, Any]:
    """The receipt of a shard of the manifest; ValueError when it is missing or is not the one the manifest was made from."""
    name = Path(shard["file"]).with_suffix(".json").name
    try:
        data = storage.read(name)
    except FileNotFoundError as error:
        raise ValueError(f"{storage.uri}/{name}: the receipt is missing. Fix: run the step cache_targets again") from error
    if checksum(data) != shard["receipt_checksum"]:
        raise ValueError(f"{storage.uri}/{name}: not the receipt that {MANIFEST} was made from. Fix: run the step cache_targets again")
    return json.loads(data)


def require_identity(uri: str, manifest: Mapping[str, Any], identity: CacheIdentity) -> None:
    """ValueError, with both values of every field that differs, when these are not the states that `identity` asks for."""
    if manifest["schema_version"] != CACHE_SCHEMA_VERSION:
        raise ValueError(
            f"{uri}: cache schema {manifest['schema_version']}, this version reads {CACHE_SCHEMA_VERSION}. Fix: run cache_targets again"
        )
    found = {**manifest["identity"], "tapped_layers": tuple(manifest["identity"]["tapped_layers"])}
    differing = [
        f"{f.name} is {found[f.name]!r}, the drafter needs {getattr(identity, f.name)!r}"
        for f in fields(identity)
        if found[f.name] != getattr(identity, f.name)
    ]
    if differing:
        raise ValueError(f"{uri}: states of another target: {'; '.join(differing)}. Fix: run cache_targets for this target")
