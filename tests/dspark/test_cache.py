"""The target cache: what is written is read bit for bit, and a cache that is not whole or not right is refused."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import pyarrow as pa
import pytest

from dspark.cache import CacheReader, check_row, num_tapped, supervised_rows, write_shard
from dspark.storage import LocalStorage
from tests.dspark import tiny


def _fields(row):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in dataclasses.asdict(row).items()}


def _edge_rows():
    return [
        tiny.row("nothing supervised", tiny.loss_mask(4, 0), 1),
        tiny.row("one token each", tiny.loss_mask(1, 1), 2),
        tiny.row("two turns", tiny.loss_mask(2, 10, hole=[6, 7]), 3),
        tiny.row("all supervised", tiny.loss_mask(0, 5), 4),
    ]


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_cache_written_and_read_is_equal_bit_for_bit(tmp_path, is_remote, monkeypatch):
    sequences = [*tiny.rows(), *_edge_rows()]
    reader = tiny.write_cache(tmp_path, sequences, rows_per_shard=4)
    if is_remote:
        monkeypatch.setattr("dspark.cache.LocalStorage", type("Other", (), {}))
        reader = CacheReader(LocalStorage(str(tmp_path)), tiny.IDENTITY)
    assert len(reader) == len(sequences) == reader.manifest["num_rows"]
    for i, row in enumerate(sequences):
        assert _fields(reader[i]) == _fields(row)
        assert reader[i].tapped_PLD.dtype == reader[i].final_SD.dtype == np.uint16
    assert reader.column("split") == [row.split for row in sequences]


def test_supervised_rows_of_a_mask_with_a_hole_are_the_positions_before_labels():
    mask = np.array([0, 0, 1, 1, 0, 1], dtype=np.uint8)
    assert supervised_rows(mask).tolist() == [j for j in range(5) if mask[j + 1]] == [1, 2, 4]
    assert num_tapped(mask) == 4
    assert num_tapped(np.zeros(3, dtype=np.uint8)) == 0


def test_receipt_of_a_shard_names_its_rows_and_hashes_its_file(tmp_path):
    storage, sequences = LocalStorage(str(tmp_path)), tiny.rows(3, 0)
    dropped = [{"row_id": "row-9", "reason": "too long"}]
    receipt = write_shard(storage, "shard-00007", sequences, tiny.IDENTITY, dropped)
    data = (tmp_path / "shard-00007.arrow").read_bytes()
    assert receipt == {
        "file": "shard-00007.arrow", "rows": ["row-0", "row-1", "row-2"], "num_tokens": sum(len(r.token_ids_T) for r in sequences),
        "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "width": 16, "dropped": dropped,
    }  # fmt: skip
    assert json.loads((tmp_path / "shard-00007.json").read_text()) == receipt


def test_manifest_of_a_cache_adds_its_shards_up(tmp_path):
    sequences = tiny.rows(5, 0)
    manifest = tiny.write_cache(tmp_path, sequences, rows_per_shard=2).manifest
    assert [shard["file"] for shard in manifest["shards"]] == [f"shard-0000{i}.arrow" for i in range(3)]
    assert [shard["num_rows"] for shard in manifest["shards"]] == [2, 2, 1]
    assert manifest["num_tokens"] == sum(len(row.token_ids_T) for row in sequences)
    assert manifest["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    assert manifest["bytes_per_token"] == manifest["bytes"] / manifest["num_tokens"]
    assert (manifest["layer_convention"], manifest["tapped_layers"]) == ("output_of_layer", list(tiny.TAPPED))


def test_cache_without_a_manifest_is_refused(tmp_path):
    tiny.write_cache(tmp_path, tiny.rows(3, 0))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest.json, so this cache is not whole. Fix: run the step cache_targets"):
        CacheReader(LocalStorage(str(tmp_path)), tiny.IDENTITY)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("target_weights_sha256", "b" * 64, ("a" * 64, "b" * 64)),
        ("tapped_layers", (1, 2, 4), ("(1, 3, 4)", "(1, 2, 4)")),
        ("width", 32, (", 16)", ", 32)")),
    ],
)
def test_cache_of_another_identity_is_refused_with_both(tmp_path, field, value, shown):
    tiny.write_cache(tmp_path, tiny.rows(2, 0))
    with pytest.raises(ValueError, match=f"{re.escape(shown[0])}.*the drafter needs.*{re.escape(shown[1])}"):
        CacheReader(LocalStorage(str(tmp_path)), dataclasses.replace(tiny.IDENTITY, **{field: value}))


def test_cache_of_another_schema_version_is_refused(tmp_path):
    tiny.write_cache(tmp_path, tiny.rows(2, 0))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 2}))
    with pytest.raises(ValueError, match=r"= \(2, .*needs \(1, "):
        CacheReader(LocalStorage(str(tmp_path)), tiny.IDENTITY)


NAN, INFINITY = 0x7FC0, 0xFF80


def _broken(name):
    """A good row with one thing wrong in it."""
    row = tiny.row("the bad one", tiny.loss_mask(3, 6), 5)
    if name == "nan":
        row.tapped_PLD[2, 1, 3] = NAN
    elif name == "infinity":
        row.final_SD[0, 0] = INFINITY
    elif name == "log_sum_exp":
        row.log_sum_exp_S[1] = np.nan
    elif name == "zero layer":
        row.tapped_PLD[:, 1] = 0x8000  # minus zero
    elif name == "zero position":
        row.tapped_PLD[-1, 2] = 0
    elif name == "zero final":
        row.final_SD[1] = 0
    elif name == "one state short":
        row.tapped_PLD = row.tapped_PLD[:-1]
    elif name == "one final short":
        row.final_SD = row.final_SD[1:]
    elif name == "one mask short":
        row.loss_mask_T = row.loss_mask_T[1:]
    elif name == "one layer short":
        row.tapped_PLD = row.tapped_PLD[:, 1:]
    elif name == "one sum short":
        row.log_sum_exp_S = row.log_sum_exp_S[1:]
    return row


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "tapped holds a NaN or an infinity"),
        ("infinity", "final holds a NaN or an infinity"),
        ("log_sum_exp", "log_sum_exp holds a NaN or an infinity"),
        ("zero layer", r"tapped is all zero at \[0, 1\], at 7 "),
        ("zero position", r"tapped is all zero at \[6, 2\], at 1 "),
        ("zero final", r"final is all zero at \[1\], at 1 "),
        ("one state short", r"tapped has shape \(6, 3, 16\), its tokens and mask need \(7, 3, 16\)"),
        ("one final short", "final has shape"),
        ("one mask short", "loss_mask has shape"),
        ("one layer short", "tapped has shape"),
        ("one sum short", "log_sum_exp has shape"),
    ],
)
def test_row_with_wrong_states_is_refused_by_name_and_nothing_is_written(tmp_path, name, message):
    storage = LocalStorage(str(tmp_path))
    with pytest.raises(ValueError, match=f"row the bad one: {message}"):
        write_shard(storage, "shard-00000", [*tiny.rows(1, 0), _broken(name)], tiny.IDENTITY)
    assert storage.list() == []


def test_row_without_faults_passes_its_check():
    for row in [*tiny.rows(), *_edge_rows(), _broken("nothing")]:
        check_row(row, tiny.IDENTITY)
    zeros = _broken("nothing")
    zeros.tapped_PLD[0, 0, :5] = 0  # single zeros occur
    check_row(zeros, tiny.IDENTITY)


def test_cache_file_is_readable_with_pyarrow_alone(tmp_path):
    (row,) = tiny.rows(1, 0)
    tiny.write_cache(tmp_path, [row])
    with pa.memory_map(str(tmp_path / "shard-00000.arrow")) as source:
        file = pa.ipc.open_file(source)
        metadata, record = file.schema.metadata, file.get_batch(0).to_pylist()[0]
    assert json.loads(metadata[b"tapped_layers"]) == list(tiny.TAPPED)
    assert (metadata[b"layer_convention"], metadata[b"schema_version"], metadata[b"dtype"]) == (b"output_of_layer", b"1", b"bfloat16")
    assert (record["row_id"], record["token_ids"], record["loss_mask"]) == ("row-0", row.token_ids_T.tolist(), row.loss_mask_T.tolist())
    assert np.frombuffer(record["tapped"], dtype=np.uint16).tolist() == row.tapped_PLD.flatten().tolist()
    assert np.frombuffer(record["final"], dtype=np.uint16).tolist() == row.final_SD.flatten().tolist()
    assert record["log_sum_exp"] == row.log_sum_exp_S.tolist()


def test_cache_of_no_rows_is_empty_and_readable(tmp_path):
    reader = tiny.write_cache(tmp_path, [])
    assert (len(reader), reader.column("row_id")) == (0, [])
