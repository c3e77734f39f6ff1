"""A drafter's directory: what is saved is loaded, for the same target only."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from dspark.checkpoint import load_drafter, save_drafter
from dspark.storage import LocalStorage
from dspark.target import TargetHead
from tests.dspark import tiny

SHA, OTHER = "c" * 64, "d" * 64


def _head(dtype=torch.float64, shape=tiny.SHAPE):
    tables = tiny.tables(shape)
    return TargetHead(shape, type(tables)(tables.embedding_VD.to(dtype), tables.lm_head_VD.to(dtype), tables.norm_D.to(dtype)))


def _save(folder, drafter):
    storage = LocalStorage(str(folder))
    names = save_drafter(storage, "best", drafter, drafter.state_dict(), SHA, {"run": "r1"})
    assert names == storage.list()[::-1] == ["best/model.safetensors", "best/config.json"]
    return storage


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_drafter_saved_and_loaded_is_equal_bit_for_bit(tmp_path, kind, draft_ids, dtype):
    drafter = tiny.drafter(kind, draft_ids, tiny.CAPPED).to(dtype)
    loaded = load_drafter(_save(tmp_path, drafter), "best", _head(dtype, tiny.CAPPED), SHA, dtype)
    state = loaded.state_dict()
    assert {name: tensor.dtype for name, tensor in state.items()} == dict.fromkeys(drafter.state_dict(), dtype)
    assert all(torch.equal(state[name], tensor) for name, tensor in drafter.state_dict().items())
    assert (loaded.config, loaded.shape) == (drafter.config, drafter.shape)
    assert (loaded.tapped_layers, loaded.mask_token_id) == (tiny.tapped_layers(kind), tiny.MASK)
    for table in ("draft_ids_W", "embedding_VD", "lm_head_WD"):
        assert torch.equal(getattr(loaded, table), getattr(drafter, table))
    assert not loaded.training


@pytest.mark.parametrize("rope", tiny.ROPES.values(), ids=tiny.ROPES)
def test_drafter_with_the_rotary_embedding_of_its_target_is_saved_and_loaded(tmp_path, rope):
    shape = dataclasses.replace(tiny.SHAPE, rope=rope)
    drafter = tiny.drafter("dspark", None, shape)
    assert load_drafter(_save(tmp_path, drafter), "best", _head(shape=shape), SHA, torch.float64).shape == shape
    stored = json.loads((tmp_path / "best" / "config.json").read_text())["target"]
    assert stored["rope"] == dataclasses.asdict(rope)


def test_saved_reduced_vocabulary_is_stored_as_offsets(tmp_path):
    _save(tmp_path, tiny.drafter("dspark", tiny.REDUCED))
    tensors = load_file(tmp_path / "best" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert [i + offset for i, offset in enumerate(tensors["d2t"].tolist())] == tiny.REDUCED.tolist()


def test_saved_whole_vocabulary_has_no_map_and_no_table_of_the_target(tmp_path):
    drafter = tiny.drafter("dspark")
    _save(tmp_path, drafter)
    assert set(load_file(tmp_path / "best" / "model.safetensors")) == {name for name, _ in drafter.named_parameters()}


def test_saved_config_says_what_an_engine_must_know(tmp_path):
    _save(tmp_path, tiny.drafter("dspark"))
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    assert config["drafter"]["sample_from_anchor"] is True
    assert (config["tapped_layers"], config["layer_convention"]) == (list(tiny.TAPPED), "output_of_layer")
    assert config["mask_token_id"] == tiny.MASK
    assert (config["drafter"]["kind"], config["drafter"]["block_size"], config["target"]["weights_sha256"]) == ("dspark", tiny.BLOCK, SHA)
    assert config["provenance"] == {"run": "r1"}


def test_drafter_of_another_target_is_refused_with_both_hashes(tmp_path):
    storage = _save(tmp_path, tiny.drafter("dflash"))
    with pytest.raises(ValueError, match=r"trained for target weights c{16}, given d{16}\. Fix"):
        load_drafter(storage, "best", _head(), OTHER, torch.float64)


def test_drafter_of_another_format_version_is_refused(tmp_path):
    storage, path = _save(tmp_path, tiny.drafter("dflash")), tmp_path / "best" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    with pytest.raises(ValueError, match="format version 9, this version reads 2"):
        load_drafter(storage, "best", _head(), SHA, torch.float64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_drafter_on_a_gpu_is_saved_like_one_on_the_cpu(tmp_path):
    drafter = tiny.drafter("dspark", tiny.REDUCED)
    first = _save(tmp_path / "cpu", drafter).read("best/model.safetensors")
    assert _save(tmp_path / "gpu", drafter.cuda()).read("best/model.safetensors") == first
