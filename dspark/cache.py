"""The target cache: what the frozen target computed for each sequence, as Arrow IPC files that pyarrow alone can read.

A cache is a set of shards `shard-00000.arrow`, a receipt `shard-00000.json` beside each (row ids, tokens, bytes,
SHA-256, rows set aside; written after the shard) and `manifest.json`, written last. One row a sequence, one record batch a row. Schema version 1:

    row_id        string          prompt id and turn
    domain        string
    split         string          train | select
    token_ids     list<int32>     T ids, prompt and response
    loss_mask     list<uint8>     T flags, 1 on supervised (response) tokens
    tapped        large_binary    bf16 [P, L, D]: residual stream after each tapped layer, for the first P tokens
    final         large_binary    bf16 [S, D]: state after the final norm, at the S rows that predict a supervised label
    log_sum_exp   list<float32>   S: log-sum-exp of the target's logits over its whole vocabulary, at those rows

The S rows are the positions j with loss_mask[j+1] = 1, ascending. P = S's last position: an anchor is at most there and
sees only what is strictly before it, so nothing later is stored. The schema metadata holds the tapped layers and their
convention (`output_of_layer`: the stream after decoder layer l, 0-based), L, D and the identity of the target.

Shapes: T tokens, P tapped tokens, S supervised rows, L tapped layers, D width. bf16 travels as uint16 (numpy has none).
"""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dspark.storage import LocalStorage, Storage

CACHE_SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
LAYER_CONVENTION = "output_of_layer"

_FIELDS = [
    pa.field("row_id", pa.string()),
    pa.field("domain", pa.string()),
    pa.field("split", pa.string()),
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("loss_mask", pa.list_(pa.uint8())),
    pa.field("tapped", pa.large_binary()),
    pa.field("final", pa.large_binary()),
    pa.field("log_sum_exp", pa.list_(pa.float32())),
]


@dataclass(frozen=True)
class CacheIdentity:
    """What the states are; readers refuse a cache that does not fit their drafter."""

    target_weights_sha256: str
    tapped_layers: tuple[int, ...]
    width: int


@dataclass
class CacheRow:
    """One sequence. States are uint16 views of bf16."""

    row_id: str
    domain: str
    split: str
    token_ids_T: np.ndarray
    loss_mask_T: np.ndarray
    tapped_PLD: np.ndarray
    final_SD: np.ndarray
    log_sum_exp_S: np.ndarray


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
    expected = {"loss_mask": (len(row.token_ids_T),), "tapped": (P, L, D), "final": (S, D), "log_sum_exp": (S,)}
    for name, array in zip(expected, (row.loss_mask_T, row.tapped_PLD, row.final_SD, row.log_sum_exp_S), strict=True):
        if array.shape != expected[name]:
            raise ValueError(f"row {row.row_id}: {name} has shape {array.shape}, its tokens and mask need {expected[name]}")
    for name, array in (("tapped", row.tapped_PLD), ("final", row.final_SD)):
        # bf16 is not finite when all 8 exponent bits are set, and zero when all but the sign are clear.
        if np.any((array & 0x7F80) == 0x7F80):
            raise ValueError(f"row {row.row_id}: {name} holds a NaN or an infinity")
        is_zero = ~np.any((array & 0x7FFF) != 0, axis=-1)
        if is_zero.any():  # a layer that was never captured, or the tail of a buffer that was not filled
            first, count = np.argwhere(is_zero)[0].tolist(), int(is_zero.sum())
            raise ValueError(f"row {row.row_id}: {name} is all zero at {first}, at {count} places in all")
    if not np.all(np.isfinite(row.log_sum_exp_S)):
        raise ValueError(f"row {row.row_id}: log_sum_exp holds a NaN or an infinity")


def write_shard(
    storage: Storage, name: str, rows: Iterable[CacheRow], identity: CacheIdentity, dropped: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Writes a shard and then its receipt; returns the receipt. Every row is checked first. `dropped`: rows set aside."""
    metadata = {
        "schema": "dspark.cache",
        "schema_version": str(CACHE_SCHEMA_VERSION),
        "dtype": "bfloat16",
        "layer_convention": LAYER_CONVENTION,
        "tapped_layers": json.dumps(identity.tapped_layers),
        "width": str(identity.width),
        "target_weights_sha256": identity.target_weights_sha256,
    }
    schema, sink, row_ids, num_tokens = pa.schema(_FIELDS, metadata=metadata), io.BytesIO(), [], 0
    with pa.ipc.new_file(sink, schema) as writer:
        for row in rows:
            check_row(row, identity)
            columns = [
                [row.row_id],
                [row.domain],
                [row.split],
                [row.token_ids_T.astype(np.int32)],
                [row.loss_mask_T.astype(np.uint8)],
                [row.tapped_PLD.tobytes()],
                [row.final_SD.tobytes()],
                [row.log_sum_exp_S.astype(np.float32)],
            ]
            writer.write_batch(pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, _FIELDS, strict=True)], schema=schema))
            row_ids.append(row.row_id)
            num_tokens += len(row.token_ids_T)
    data = sink.getvalue()
    storage.put(f"{name}.arrow", data)
    receipt = {
        "file": f"{name}.arrow",
        "rows": row_ids,
        "num_tokens": num_tokens,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "width": identity.width,
        "dropped": list(dropped),
    }
    storage.put(f"{name}.json", json.dumps(receipt).encode())
    return receipt


def write_manifest(storage: Storage, receipts: list[dict[str, Any]], identity: CacheIdentity) -> dict[str, Any]:
    """Written last: from here on the cache is whole. Receipts in shard order."""
    num_bytes, num_tokens = sum(r["bytes"] for r in receipts), sum(r["num_tokens"] for r in receipts)
    manifest = {
        "schema_version": CACHE_SCHEMA_VERSION,
        "dtype": "bfloat16",
        "layer_convention": LAYER_CONVENTION,
        "tapped_layers": list(identity.tapped_layers),
        "width": identity.width,
        "target_weights_sha256": identity.target_weights_sha256,
        "num_rows": sum(len(r["rows"]) for r in receipts),
        "num_tokens": num_tokens,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / max(num_tokens, 1),
        "shards": [{key: r[key] for key in ("file", "num_tokens", "bytes", "sha256")} | {"num_rows": len(r["rows"])} for r in receipts],
    }
    storage.put(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


class CacheReader:
    """Random access to the rows of a whole cache. Local shards are mapped into memory, remote ones read once."""

    def __init__(self, storage: Storage, identity: CacheIdentity) -> None:
        self._storage = storage
        try:
            self.manifest: Mapping[str, Any] = json.loads(storage.read(MANIFEST))
        except FileNotFoundError as error:
            raise ValueError(f"{storage.uri}: no {MANIFEST}, so this cache is not whole. Fix: run the step cache_targets again") from error
        found = (
            self.manifest["schema_version"],
            self.manifest["target_weights_sha256"],
            tuple(self.manifest["tapped_layers"]),
            self.manifest["width"],
        )
        wanted = (CACHE_SCHEMA_VERSION, identity.target_weights_sha256, identity.tapped_layers, identity.width)
        if found != wanted:
            raise ValueError(
                f"{storage.uri}: (schema, target, tapped layers, width) = {found}, the drafter needs {wanted}. Fix: run cache_targets for this target"
            )
        self._shards = [self._open(shard["file"]) for shard in self.manifest["shards"]]
        self._index = [(s, b) for s, shard in enumerate(self._shards) for b in range(shard.num_record_batches)]
        self._shape = (-1, len(identity.tapped_layers), identity.width)

    def _open(self, name: str) -> pa.RecordBatchFileReader:
        if isinstance(self._storage, LocalStorage):
            return pa.ipc.open_file(pa.memory_map(str(self._storage.path(name))))
        return pa.ipc.open_file(pa.BufferReader(self._storage.read(name)))

    def __len__(self) -> int:
        return len(self._index)

    def column(self, name: str) -> list[Any]:
        """One small column of every row, in row order, for choosing rows without touching states."""
        return [self._batch(i).column(name)[0].as_py() for i in range(len(self))]

    def _batch(self, i: int) -> pa.RecordBatch:
        shard, batch = self._index[i]
        return self._shards[shard].get_batch(batch)

    def __getitem__(self, i: int) -> CacheRow:
        batch = self._batch(i)

        def values(name: str) -> np.ndarray:
            return batch.column(name)[0].values.to_numpy(zero_copy_only=False)

        def states(name: str) -> np.ndarray:
            return np.frombuffer(batch.column(name)[0].as_buffer(), dtype=np.uint16)

        row_id, domain, split = (batch.column(name)[0].as_py() for name in ("row_id", "domain", "split"))
        return CacheRow(
            row_id,
            domain,
            split,
            values("token_ids"),
            values("loss_mask"),
            states("tapped").reshape(self._shape),
            states("final").reshape(-1, self._shape[-1]),
            values("log_sum_exp"),
        )
