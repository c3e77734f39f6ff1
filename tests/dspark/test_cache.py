"""The target cache: what is written is read bit for bit, in every form and from every place; what is damaged is named."""

import dataclasses
import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from dspark.cache import (
    CacheFormat,
    CacheReader,
    CacheRow,
    Exactness,
    check_row,
    deepspec_bytes,
    num_tapped,
    supervised_rows,
    write_manifest,
    write_shard,
)
from dspark.states import States, encode
from dspark.storage import LocalStorage
from tests.dspark import tiny

FORMS = {
    f"{dtype}-{logits}-{compression}": CacheFormat(dtype, logits, 5 if logits == "topk" else 0, compression)
    for dtype in ("bf16", "fp8")
    for logits in ("final", "topk")
    for compression in ("none", "zstd")
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
every_place = pytest.mark.parametrize("place", [lambda path: path, tiny.Remote], ids=["local", "remote"])


def _plain(value):
    """A row as plain Python with the types of its arrays, to be compared."""
    if isinstance(value, (CacheRow, States)):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value


def _edge_rows(form=tiny.FORM):
    return [
        tiny.row("nothing supervised", tiny.loss_mask(4, 0), 1, form=form),
        tiny.row("one token each", tiny.loss_mask(1, 1), 2, form=form),
        tiny.row("two turns", tiny.loss_mask(2, 10, hole=[6, 7]), 3, form=form),
        tiny.row("all supervised", tiny.loss_mask(0, 5), 4, form=form),
        tiny.row("名前", tiny.loss_mask(3, 2), 5, form=form),
    ]


# --- written and read ---------------------------------------------------------------------------------------------------


@every_place
@every_form
def test_cache_written_and_read_is_equal_bit_for_bit(tmp_path, form, place):
    sequences = [*tiny.rows(form=form), *_edge_rows(form)]
    reader = tiny.write_cache(place(tmp_path), sequences, rows_per_shard=4, form=form)
    assert len(reader) == len(sequences) == reader.manifest["num_rows"]
    for i, row in enumerate(sequences):
        assert _plain(reader[i]) == _plain(row)
        assert (reader.entries[i].row_id, reader.entries[i].split) == (row.row_id, row.split)
        assert (reader.entries[i].num_tokens, reader.entries[i].num_supervised) == (len(row.token_ids_T), len(row.log_sum_exp_S))
    assert [len(shard.entries) for shard in reader.shards] == [4, 4, 4, 4]


@every_place
def test_row_read_again_is_the_same(tmp_path, place):
    reader = tiny.write_cache(place(tmp_path), tiny.rows(3, 0))
    assert _plain(reader[1]) == _plain(reader[1])


@every_form
def test_remote_row_is_one_request_of_its_own_bytes(tmp_path, form):
    storage = tiny.Remote(tmp_path)
    reader = tiny.write_cache(storage, tiny.rows(3, 0, form), form=form)
    assert storage.ranges == []
    _ = reader[2]
    entry = reader.entries[2]
    assert storage.ranges == [("shard-00000.arrow", entry.offset, entry.offset + entry.bytes)]


@every_place
def test_cache_read_by_several_threads_gives_every_row(tmp_path, place):
    sequences = tiny.rows(8, 0)
    reader = tiny.write_cache(place(tmp_path), sequences, rows_per_shard=3)
    with ThreadPoolExecutor(6) as pool:
        read = list(pool.map(reader.__getitem__, list(range(8)) * 6))
    assert [_plain(row) for row in read] == [_plain(row) for row in sequences] * 6


def test_compressed_cache_is_smaller_and_says_so(tmp_path):
    rows = [tiny.row(f"row-{i}", tiny.loss_mask(3, 40), i) for i in range(3)]
    for row in rows:
        row.tapped_PLD.codes[:, 1:] = row.tapped_PLD.codes[:, :1]  # noise alone does not compress
    sizes = {}
    for name in ("none", "zstd"):
        form = dataclasses.replace(tiny.FORM, compression=name)
        sizes[name] = tiny.write_cache(tmp_path / name, rows, form=form).manifest["bytes"]
    assert sizes["zstd"] < 0.8 * sizes["none"]


def test_supervised_rows_of_a_mask_with_a_hole_are_the_positions_before_labels():
    mask = np.array([0, 0, 1, 1, 0, 1], dtype=np.uint8)
    assert supervised_rows(mask).tolist() == [j for j in range(5) if mask[j + 1]] == [1, 2, 4]
    assert num_tapped(mask) == 4
    assert num_tapped(np.zeros(3, dtype=np.uint8)) == 0


def test_cache_of_no_rows_is_empty_and_readable(tmp_path):
    reader = tiny.write_cache(tmp_path, [])
    assert (len(reader), reader.entries) == (0, [])


# --- a stranger with pyarrow alone --------------------------------------------------------------------------------------


def _strangers_view(folder):
    """What the docstring of dspark/cache.py promises to someone who has only pyarrow: metadata, and each row's columns."""
    with pa.memory_map(str(folder / "shard-00000.arrow")) as source:
        file = pa.ipc.open_file(source)
        batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        assert [batch.num_rows for batch in batches] == [1] * len(batches)
        return {k.decode(): v.decode() for k, v in file.schema.metadata.items()}, [batch.to_pylist()[0] for batch in batches]


def _bf16(data):
    """bf16 is the upper half of a float."""
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def _e4m3(code):
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 0x7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_bf16_shard_is_readable_with_pyarrow_alone(tmp_path, compression):
    sequences = tiny.rows(2, 0)
    tiny.write_cache(tmp_path, sequences, form=dataclasses.replace(tiny.FORM, compression=compression))
    metadata, records = _strangers_view(tmp_path)
    L, D = len(json.loads(metadata["tapped_layers"])), int(metadata["width"])
    assert (L, D) == (3, 16)
    assert {key: metadata[key] for key in metadata if key not in ("tapped_layers", "width")} == {
        "schema": "dspark.cache", "schema_version": "2", "target": "tiny", "weights": "a" * 64, "tokenizer": "b" * 64,
        "chat_template": "c" * 64, "layer_convention": "output_of_layer", "final_state": "after_final_norm", "dtype": "bf16",
        "logits": "final", "num_top_logits": "0", "compression": compression, "engine": "noise 1",
    }  # fmt: skip
    assert len(records) == 2
    for row, record in zip(sequences, records, strict=True):
        mask = record["loss_mask"]
        supervised = [j for j in range(len(mask) - 1) if mask[j + 1] == 1]
        assert list(record) == [
            "row_id", "domain", "split", "provenance", "token_ids", "loss_mask", "tapped", "final", "log_sum_exp",
        ]  # fmt: skip
        assert [record[name] for name in ("row_id", "domain", "split")] == [row.row_id, row.domain, row.split]
        assert json.loads(record["provenance"]) == json.loads(row.provenance)
        assert (record["token_ids"], mask) == (row.token_ids_T.tolist(), row.loss_mask_T.tolist())
        assert record["log_sum_exp"] == row.log_sum_exp_S.tolist()
        tapped = np.array(_bf16(record["tapped"])).reshape(max(supervised), L, D)
        assert tapped.tolist() == tiny.values(row.tapped_PLD).tolist()
        assert np.array(_bf16(record["final"])).reshape(len(supervised), D).tolist() == tiny.values(row.final_SD).tolist()


def test_fp8_shard_is_readable_with_pyarrow_alone(tmp_path):
    (row,) = tiny.rows(1, 0, tiny.FP8)
    tiny.write_cache(tmp_path, [row], form=tiny.FP8)
    metadata, (record,) = _strangers_view(tmp_path)
    assert metadata["dtype"] == "fp8"
    for name, states in (("tapped", row.tapped_PLD), ("final", row.final_SD)):
        codes = np.array([_e4m3(code) for code in record[name]]).reshape(-1, int(metadata["width"]))
        exponents = struct.unpack(f"{len(codes)}b", record[f"{name}_exponents"])
        decoded = [[value * 2.0**e for value in state] for state, e in zip(codes.tolist(), exponents, strict=True)]
        assert decoded == tiny.values(states).reshape(-1, 16).tolist()


def test_shard_of_best_logits_is_readable_with_pyarrow_alone(tmp_path):
    (row,) = tiny.rows(1, 0, tiny.TOPK)
    tiny.write_cache(tmp_path, [row], form=tiny.TOPK)
    metadata, (record,) = _strangers_view(tmp_path)
    C, S = int(metadata["num_top_logits"]), len(record["log_sum_exp"])
    assert (metadata["logits"], C) == ("topk", 5)
    assert "final" not in record
    assert struct.unpack(f"<{S * C}i", record["top_ids"]) == tuple(row.top_ids_SC.flatten().tolist())
    logits = np.array(struct.unpack(f"<{S * C}f", record["top_logits"])).reshape(S, C)
    assert logits.tolist() == row.top_logits_SC.tolist()
    assert (np.diff(logits) <= 0).all()  # best first


# --- receipts and sums --------------------------------------------------------------------------------------------------


@every_form
def test_receipt_of_a_shard_places_and_hashes_its_rows_and_its_file(tmp_path, form):
    storage, sequences = LocalStorage(str(tmp_path)), tiny.rows(3, 0, form)
    dropped = [{"row_id": "row-9", "reason": "too long"}]
    receipt = write_shard(storage, "shard-00007", sequences, tiny.IDENTITY, form, tiny.ENGINE, dropped)
    assert json.loads((tmp_path / "shard-00007.json").read_text()) == json.loads(json.dumps(receipt))
    data = (tmp_path / "shard-00007.arrow").read_bytes()
    assert (receipt["file"], receipt["bytes"], receipt["checksum"]) == ("shard-00007.arrow", len(data), xxhash.xxh3_128_hexdigest(data))
    assert receipt["num_tokens"] == sum(len(row.token_ids_T) for row in sequences)
    assert receipt["num_supervised"] == sum(int(row.loss_mask_T[1:].sum()) for row in sequences)
    assert (receipt["engine"], receipt["dropped"], receipt["exactness"]) == (tiny.ENGINE, dropped, None)
    assert receipt["format"] == dataclasses.asdict(form)
    schema, end = pa.ipc.open_file(pa.py_buffer(data)).schema, 0
    for row, values in zip(sequences, receipt["rows"], strict=True):
        row_id, domain, split, num_tokens, num_supervised, offset, num_bytes, checksum = values
        assert (row_id, domain, split) == (row.row_id, row.domain, row.split)
        assert (num_tokens, num_supervised) == (len(row.token_ids_T), len(row.log_sum_exp_S))
        assert offset >= end
        end = offset + num_bytes
        part = data[offset:end]
        assert xxhash.xxh3_128_hexdigest(part) == checksum
        assert pa.ipc.read_record_batch(pa.py_buffer(part), schema).column("row_id").to_pylist() == [row_id]
    assert end < len(data)


def test_manifest_of_a_cache_adds_its_shards_up(tmp_path):
    sequences = tiny.rows(5, 0)
    manifest = tiny.write_cache(tmp_path, sequences, rows_per_shard=2).manifest
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert [shard["file"] for shard in manifest["shards"]] == [f"shard-0000{i}.arrow" for i in range(3)]
    assert [shard["num_rows"] for shard in manifest["shards"]] == [2, 2, 1]
    for shard in manifest["shards"]:
        data, receipt = (tmp_path / shard["file"]).read_bytes(), (tmp_path / shard["file"]).with_suffix(".json").read_bytes()
        assert (shard["bytes"], shard["checksum"]) == (len(data), xxhash.xxh3_128_hexdigest(data))
        assert shard["receipt_checksum"] == xxhash.xxh3_128_hexdigest(receipt)
    assert (manifest["num_rows"], manifest["num_dropped"], manifest["engines"]) == (5, 0, [tiny.ENGINE])
    assert manifest["num_tokens"] == sum(len(row.token_ids_T) for row in sequences)
    assert manifest["num_supervised"] == sum(int(row.loss_mask_T[1:].sum()) for row in sequences)
    assert manifest["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.arrow"))
    assert manifest["bytes_per_token"] == manifest["bytes"] / manifest["num_tokens"]
    assert manifest["bytes_as_deepspec"] == manifest["num_tokens"] * (4 + 1 + 1 + 2 * 3 * 16 + 2 * 16)
    assert (manifest["schema_version"], manifest["layer_convention"]) == (2, "output_of_layer")
    assert manifest["identity"] == {**dataclasses.asdict(tiny.IDENTITY), "tapped_layers": list(tiny.TAPPED)}


def test_manifest_of_shards_with_rows_set_aside_counts_them_and_names_every_engine(tmp_path):
    storage = LocalStorage(str(tmp_path))
    receipts = [
        write_shard(storage, "shard-0", tiny.rows(2, 0), tiny.IDENTITY, tiny.FORM, "b 2", [{"row_id": "x", "reason": "y"}]),
        write_shard(storage, "shard-1", [], tiny.IDENTITY, tiny.FORM, "a 1", [{"row_id": "z", "reason": "y"}] * 2),
    ]
    manifest = write_manifest(storage, receipts, tiny.IDENTITY, tiny.FORM)
    assert (manifest["num_rows"], manifest["num_dropped"], manifest["engines"]) == (2, 3, ["a 1", "b 2"])
    assert [row.row_id for row in map(CacheReader(storage, tiny.IDENTITY).__getitem__, range(2))] == ["row-0", "row-1"]


def test_exactness_of_a_cache_is_the_error_over_all_its_rows(tmp_path):
    """Layers 0 and 1 and the final state err differently: layer 1 is a multiple of powers of two, which e4m3 holds exactly."""
    rows, errors, norms = [], np.zeros(4), np.zeros(4)
    for i, row in enumerate(tiny.rows(6, 0, tiny.FP8)):
        tapped, final = tiny.noise(np.random.default_rng(i), row.loss_mask_T)
        tapped[:, 1] = tapped[:, 1].sign() * 2.0**i
        tapped[0, 0] *= 100.0
        row.tapped_PLD, row.final_SD = encode(tapped, "fp8"), encode(final, "fp8")
        row.exactness = Exactness.of(tapped, final, row.tapped_PLD, row.final_SD)
        row.exactness.missing_mass, row.exactness.largest_missing_mass = 0.5 * i, 0.1 * i
        stored = tiny.values(row.tapped_PLD)
        for n, (exact, kept) in enumerate([*((tapped[:, j], stored[:, j]) for j in range(3)), (final, tiny.values(row.final_SD))]):
            errors[n] += float((exact.double() - kept).square().sum())
            norms[n] += float(exact.double().square().sum())
        rows.append(row)
    manifest = tiny.write_cache(tmp_path, rows, rows_per_shard=4, form=tiny.FP8).manifest
    found = manifest["exactness"]
    assert found["relative_error"] == pytest.approx(np.sqrt(errors / norms).tolist(), rel=1e-5)
    assert found["relative_error"][1] == 0.0
    assert all(0.005 < found["relative_error"][n] < 0.04 for n in (0, 2, 3))
    assert found["mean_missing_mass"] == pytest.approx(0.5 * 15 / manifest["num_supervised"])
    assert found["largest_missing_mass"] == pytest.approx(0.5)


def test_exactness_of_bf16_is_without_error():
    tapped, final = tiny.noise(np.random.default_rng(0), tiny.loss_mask(3, 6))
    found = Exactness.of(tapped, final, encode(tapped, "bf16"), encode(final, "bf16"))
    assert found.squared_error.tolist() == [0.0] * 4
    assert found.squared_norm == pytest.approx([*tapped.double().square().sum((0, 2)).tolist(), float(final.double().square().sum())])


@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 1.01), ("fp8", 0.52)])
def test_bytes_of_a_cache_of_realistic_width_are_those_of_its_states(tmp_path, dtype, limit):
    """Of 150 tokens in rows like a chat's: u is the share of them that a block can see, s the share that is predicted."""
    H, layers, num_tokens = 576, (2, 9, 16, 23, 27), 150
    identity = dataclasses.replace(tiny.IDENTITY, tapped_layers=layers, width=H)
    masks = [tiny.loss_mask(40 + i, num_tokens - 40 - i) for i in range(4)]
    u = sum(max(t for t in range(1, num_tokens) if mask[t]) - 1 for mask in masks) / (4 * num_tokens)
    s = sum(int(mask[t]) for mask in masks for t in range(1, num_tokens)) / (4 * num_tokens)
    assert (u, s) == (pytest.approx(148 / 150), pytest.approx(108.5 / 150))
    rows, generator = [], np.random.default_rng(0)
    for i, mask in enumerate(masks):
        tapped, final = (
            torch.from_numpy(generator.normal(size=size)).bfloat16() for size in ((148, len(layers), H), (num_tokens - 40 - i, H))
        )
        lse = np.ones(len(final), dtype=np.float32)
        provenance = json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 128, "engine": "vllm 0", "seed": 2**30})
        tokens = np.arange(num_tokens, dtype=np.int32)
        rows.append(
            CacheRow(f"{i:064d}/0", "math", "train", provenance, tokens, mask, encode(tapped, dtype), lse, encode(final, dtype))
        )  # fmt: skip
    manifest = tiny.write_cache(tmp_path, rows, form=CacheFormat(dtype, "final", 0), identity=identity).manifest
    assert manifest["num_tokens"] == 4 * num_tokens
    states = 2 * H * (u * len(layers) + s)
    assert (limit - 0.02) * states < manifest["bytes_per_token"] <= limit * states
    assert manifest["bytes_as_deepspec"] == deepspec_bytes(4 * num_tokens, 5, H) == 4 * num_tokens * (6 + 12 * H)


# --- rows that are not right --------------------------------------------------------------------------------------------

NAN, INFINITY, MINUS_ZERO = {"bf16": 0x7FC0, "fp8": 0x7F}, {"bf16": 0xFF80, "fp8": 0xFF}, {"bf16": 0x8000, "fp8": 0x80}
FAULTS = {
    "nan": "tapped holds a NaN or an infinity",
    "infinity": "final holds a NaN or an infinity",
    "log_sum_exp": "log_sum_exp holds a NaN or an infinity",
    "zero layer": r"tapped is all zero at \[0, 1\], at 7 ",
    "zero position": r"tapped is all zero at \[6, 2\], at 1 ",
    "zero final": r"final is all zero at \[1\], at 1 ",
    "one state short": r"tapped has shape \(6, 3, 16\), its tokens and mask need \(7, 3, 16\)",
    "one final short": "final has shape",
    "one mask short": "loss_mask has shape",
    "one layer short": "tapped has shape",
    "one sum short": "log_sum_exp has shape",
    "no final": "it has neither final states nor best logits",
}
TOPK_FAULTS = {
    "top_logits": "top_logits holds a NaN or an infinity",
    "one logit short": r"top_logits has shape \(5, 5\), its tokens and mask need \(6, 5\)",
    "one id fewer": r"top_logits has shape \(6, 5\), its tokens and mask need \(6, 4\)",
    "no final": "it has neither final states nor best logits",
}


def _broken(name, form=tiny.FORM):
    """A good row with one thing wrong in it."""
    row = tiny.row("the bad one", tiny.loss_mask(3, 6), 5, form=form)
    dtype, tapped, final = form.dtype, row.tapped_PLD.codes, row.final_SD and row.final_SD.codes
    if name == "nan":
        tapped[2, 1, 3] = NAN[dtype]
    elif name == "infinity":
        final[0, 0] = INFINITY[dtype]
    elif name == "log_sum_exp":
        row.log_sum_exp_S[1] = np.nan
    elif name == "zero layer":
        tapped[:, 1] = MINUS_ZERO[dtype]
    elif name == "zero position":
        tapped[-1, 2] = 0
    elif name == "zero final":
        final[1] = 0
    elif name == "one state short":
        row.tapped_PLD = row.tapped_PLD[:-1]
    elif name == "one final short":
        row.final_SD = row.final_SD[1:]
    elif name == "one mask short":
        row.loss_mask_T = row.loss_mask_T[1:]
    elif name == "one layer short":
        row.tapped_PLD = States(tapped[:, 1:])
    elif name == "one sum short":
        row.log_sum_exp_S = row.log_sum_exp_S[1:]
    elif name == "no final":
        row.final_SD = row.top_ids_SC = None
    elif name == "top_logits":
        row.top_logits_SC[0, 0] = np.inf
    elif name == "one logit short":
        row.top_logits_SC, row.top_ids_SC = row.top_logits_SC[1:], row.top_ids_SC[1:]
    elif name == "one id fewer":
        row.top_ids_SC = row.top_ids_SC[:, 1:]
    return row


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        *((form, name, message) for form in (tiny.FORM, tiny.FP8) for name, message in FAULTS.items()),
        *((tiny.TOPK, name, message) for name, message in TOPK_FAULTS.items()),
    ],
    ids=lambda value: f"{value.dtype}-{value.logits}" if isinstance(value, CacheFormat) else None,
)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_row_that_is_wrong_is_set_aside_with_its_reason_and_the_shard_survives(tmp_path, form, name, message, place):
    storage, good = LocalStorage(str(tmp_path)), tiny.rows(2, 0, form)
    rows = [*good[:place], _broken(name, form), *good[place:]]
    receipt = write_shard(storage, "shard-00000", rows, tiny.IDENTITY, form, tiny.ENGINE)
    (aside,) = receipt["dropped"]
    assert (aside["row_id"], aside["is_poisoned"]) == ("the bad one", True)
    assert re.match(f"row the bad one: {message}", aside["reason"]), aside["reason"]
    write_manifest(storage, [receipt], tiny.IDENTITY, form)
    reader = CacheReader(storage, tiny.IDENTITY)
    assert [_plain(reader[i]) for i in range(len(reader))] == [_plain(row) for row in good]
    assert receipt["num_tokens"] == sum(len(row.token_ids_T) for row in good)


def test_shard_of_nothing_but_wrong_rows_is_empty_and_readable(tmp_path):
    storage = LocalStorage(str(tmp_path))
    receipt = write_shard(storage, "shard-00000", [_broken("nan")], tiny.IDENTITY, tiny.FORM, tiny.ENGINE)
    write_manifest(storage, [receipt], tiny.IDENTITY, tiny.FORM)
    assert len(CacheReader(storage, tiny.IDENTITY)) == 0
    assert _strangers_view(tmp_path)[1] == []


@every_form
def test_row_without_faults_passes_its_check(form):
    for row in [*tiny.rows(form=form), *_edge_rows(form), _broken("nothing", form)]:
        check_row(row, tiny.IDENTITY)
    zeros = _broken("nothing", form)
    zeros.tapped_PLD.codes[0, 0, :5] = 0  # single zeros occur
    check_row(zeros, tiny.IDENTITY)


# --- damage -------------------------------------------------------------------------------------------------------------


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(bytes(data))


@every_place
@every_form
def test_byte_flipped_in_a_row_is_refused_by_file_and_row_and_the_others_are_read(tmp_path, form, place):
    sequences = tiny.rows(3, 0, form)
    tiny.write_cache(tmp_path, sequences, form=form)
    reader = tiny.write_cache(place(tmp_path), sequences, form=form)
    entry = reader.entries[1]
    _flip(tmp_path / "shard-00000.arrow", entry.offset + entry.bytes // 2)
    for _ in range(2):  # it does not pass the second time either
        with pytest.raises(ValueError, match=rf"{tmp_path.name}/shard-00000.arrow: row row-1 is damaged: bytes {entry.offset} to .*Fix: "):
            _ = reader[1]
    assert [_plain(reader[i]) for i in (0, 2)] == [_plain(sequences[i]) for i in (0, 2)]


def test_remote_row_is_checked_each_time_that_it_comes(tmp_path):
    reader = tiny.write_cache(tiny.Remote(tmp_path), tiny.rows(2, 0))
    entry = reader.entries[1]
    assert reader[1].row_id == "row-1"
    _flip(tmp_path / "shard-00000.arrow", entry.offset + entry.bytes // 2)
    with pytest.raises(ValueError, match="row row-1 is damaged"):
        _ = reader[1]


@every_place
@pytest.mark.parametrize("at", ["first", "last"])
def test_byte_flipped_at_an_end_of_a_row_is_refused(tmp_path, place, at):
    reader = tiny.write_cache(place(tmp_path), tiny.rows(2, 0))
    entry = reader.entries[1]
    _flip(tmp_path / "shard-00000.arrow", entry.offset if at == "first" else entry.offset + entry.bytes - 1)
    with pytest.raises(ValueError, match="row row-1 is damaged"):
        _ = reader[1]


@every_place
@pytest.mark.parametrize("left", ["nothing", "half a row", "none of the row"])
def test_file_that_was_cut_off_is_refused_by_file_and_row(tmp_path, place, left):
    reader = tiny.write_cache(place(tmp_path), tiny.rows(3, 0))
    entry, path = reader.entries[1], tmp_path / "shard-00000.arrow"
    kept = {"nothing": 0, "half a row": entry.offset + entry.bytes // 2, "none of the row": entry.offset - 100}[left]
    path.write_bytes(path.read_bytes()[:kept])
    for i in (1, 2):
        with pytest.raises(ValueError, match=rf"{tmp_path.name}/shard-00000.arrow: row row-{i} (is damaged|cannot be read).*Fix: "):
            _ = reader[i]
    if left == "half a row":
        assert reader[0].row_id == "row-0"


@every_place
def test_missing_shard_is_refused_by_name(tmp_path, place):
    reader = tiny.write_cache(place(tmp_path), tiny.rows(4, 0), rows_per_shard=2)
    (tmp_path / "shard-00001.arrow").unlink()
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/shard-00001.arrow: missing\. Fix: "):
        _ = reader[2]
    assert reader[1].row_id == "row-1"


@every_place
def test_missing_receipt_is_refused_by_name(tmp_path, place):
    tiny.write_cache(place(tmp_path), tiny.rows(4, 0), rows_per_shard=2)
    (tmp_path / "shard-00001.json").unlink()
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/shard-00001.json: the receipt is missing\. Fix: run the step cache_targets"):
        CacheReader(_storage(place, tmp_path), tiny.IDENTITY)


@every_place
def test_receipt_that_was_changed_is_refused_by_name(tmp_path, place):
    tiny.write_cache(place(tmp_path), tiny.rows(4, 0), rows_per_shard=2)
    path = tmp_path / "shard-00001.json"
    path.write_text(path.read_text().replace("row-2", "row-7"))
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/shard-00001.json: not the receipt that manifest.json was made from\. Fix: "):
        CacheReader(_storage(place, tmp_path), tiny.IDENTITY)


@every_place
def test_cache_without_a_manifest_is_refused(tmp_path, place):
    tiny.write_cache(place(tmp_path), tiny.rows(3, 0))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no manifest.json, so this cache is not whole. Fix: run the step cache_targets"):
        CacheReader(_storage(place, tmp_path), tiny.IDENTITY)


def _storage(place, folder):
    return tiny.Remote(folder) if place is tiny.Remote else LocalStorage(str(folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "huge"),
        ("weights", "d" * 64),
        ("tokenizer", "e" * 64),
        ("chat_template", "f" * 64),
        ("tapped_layers", (1, 2, 4)),
        ("width", 32),
    ],
)
def test_cache_of_another_identity_is_refused_with_both_values_of_the_field(tmp_path, field, value):
    tiny.write_cache(tmp_path, tiny.rows(2, 0))
    found = getattr(tiny.IDENTITY, field)
    with pytest.raises(ValueError, match=re.escape(f"{field} is {found!r}, the drafter needs {value!r}. Fix: ")) as caught:
        CacheReader(LocalStorage(str(tmp_path)), dataclasses.replace(tiny.IDENTITY, **{field: value}))
    assert str(tmp_path) in str(caught.value)
    assert str(caught.value).count("the drafter needs") == 1


def test_cache_of_another_identity_in_every_field_names_them_all(tmp_path):
    tiny.write_cache(tmp_path, tiny.rows(2, 0))
    other = dataclasses.replace(tiny.IDENTITY, target="huge", weights="d", tokenizer="e", chat_template="f", tapped_layers=(0,), width=8)
    with pytest.raises(ValueError, match="another target") as caught:
        CacheReader(LocalStorage(str(tmp_path)), other)
    assert str(caught.value).count("the drafter needs") == len(dataclasses.fields(other))


@pytest.mark.parametrize("version", [1, 3])
def test_cache_of_another_schema_version_is_refused(tmp_path, version):
    tiny.write_cache(tmp_path, tiny.rows(2, 0))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
    with pytest.raises(ValueError, match=rf"{tmp_path}: cache schema {version}, this version reads 2\. Fix: run cache_targets again"):
        CacheReader(LocalStorage(str(tmp_path)), tiny.IDENTITY)
