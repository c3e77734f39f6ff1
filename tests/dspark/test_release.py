"""A release: exactly the names, shapes and keys that engines read, written once, whole and checked."""

import dataclasses
import hashlib
import json

import pytest
import torch
from safetensors.torch import load as load_safetensors

from dspark.calibration import GRID, Calibration
from dspark.families import target_shape
from dspark.layers import Rotation
from dspark.model_card import model_card
from dspark.release import CHECKSUMS, FILES, check_release, write_release
from dspark.scheduler import SpsTable
from dspark.serving_files import AdditiveSps, read_additive
from dspark.storage import LocalStorage
from dspark.target import TargetHead
from tests.dspark import tiny

TARGET_CONFIG = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "intermediate_size": 20, "vocab_size": 23, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 512, "tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu", "sliding_window": 7,
}  # fmt: skip
SPS = SpsTable((1, 8, 64), (0.001, 0.001, 0.002), (0.009, 0.019, 0.048))
ADDITIVE = AdditiveSps.of((1, 2, 16), (0.001, 0.0015, 0.002), (1, 8, 64), (0.009, 0.019, 0.048))
SUMMARY = {"accepted_length": 1.234, "accepted_length_interval": [1.2, 1.3]}
REPORT = {"settings": {"t1-probabilistic": {"test": {"all": SUMMARY, "math": SUMMARY}, "gsm8k": {"all": SUMMARY}}}}
LINEAGE = {"train": {"fingerprint": "1a2b3c4d", "lr": 0.003}}


def _calibration(block_size=tiny.BLOCK):
    return Calibration((1.2,) * block_size, (0.11,) * block_size, (0.02,) * block_size, 900, 15, GRID)


def _head(shape=tiny.SHAPE):
    return TargetHead(shape, tiny.tables(shape))


def _write(folder, drafter=None, *, target_config=TARGET_CONFIG, head=None, calibration=None, sps=SPS):
    storage = LocalStorage(str(folder))
    drafter = drafter or tiny.drafter("dspark", tiny.REDUCED)
    calibration = calibration or _calibration()
    names = write_release(storage, drafter, head or _head(), target_config, calibration, sps, ADDITIVE, REPORT, LINEAGE, "the card")
    assert sorted(names) == storage.list()
    return storage, drafter


def _json(storage, name):
    return json.loads(storage.read(name))


# --- what is written --------------------------------------------------------------------------------------------------


def _expected_shapes(num_draft_ids):
    """The table of a released checkpoint: H 16, L 3, n 4, kv 2, d 6, I 20, V 23, r 5, 2 layers."""
    shapes = {"fc.weight": (16, 48), "hidden_norm.weight": (16,), "norm.weight": (16,)}
    for i in range(2):
        of_layer = {
            "input_layernorm": (16,), "post_attention_layernorm": (16,), "self_attn.q_proj": (24, 16), "self_attn.k_proj": (12, 16),
            "self_attn.v_proj": (12, 16), "self_attn.o_proj": (16, 24), "self_attn.q_norm": (6,), "self_attn.k_norm": (6,),
            "mlp.gate_proj": (20, 16), "mlp.up_proj": (20, 16), "mlp.down_proj": (16, 20),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
    shapes |= {"markov_head.markov_w1.weight": (23, 5), "markov_head.markov_w2.weight": (num_draft_ids, 5)}
    return shapes | {"confidence_head.proj.weight": (1, 21), "confidence_head.proj.bias": (1,)}


@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
def test_release_tensors_have_the_names_shapes_and_values_of_the_drafter(tmp_path, draft_ids):
    storage, drafter = _write(tmp_path, tiny.drafter("dspark", draft_ids))
    tensors = load_safetensors(storage.read("model.safetensors"))
    expected = _expected_shapes(23 if draft_ids is None else 9)
    if draft_ids is not None:
        expected |= {"lm_head.weight": (9, 16), "d2t": (9,)}
        assert torch.equal(tensors["lm_head.weight"], tiny.tables().lm_head_VD[tiny.REDUCED].bfloat16())
        assert tensors["d2t"].dtype == torch.int64
        assert [i + offset for i, offset in enumerate(tensors["d2t"].tolist())] == tiny.REDUCED.tolist()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    for name, tensor in drafter.state_dict().items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], tensor.bfloat16())
    check_release(storage)


@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
def test_release_config_says_everything_at_the_top_level(tmp_path, draft_ids):
    storage, _ = _write(tmp_path, tiny.drafter("dspark", draft_ids))
    assert _json(storage, "config.json") == {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "vocab_size": 23, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu", "attention_bias": False,
        "rope_theta": 100.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "tie_word_embeddings": False,
        "layer_types": ["full_attention", "full_attention"], "use_sliding_window": False, "sliding_window": None,
        "num_target_layers": 6, "target_layer_ids": [1, 3, 4], "mask_token_id": 22, "block_size": 4, "sample_from_anchor": True,
        "markov_rank": 5, "markov_head_type": "vanilla", "sts_temperatures": [1.2, 1.2, 1.2, 1.2], "enable_confidence_head": True, "confidence_head_with_markov": True,
        **({} if draft_ids is None else {"draft_vocab_size": 9}),
    }  # fmt: skip


def test_release_config_is_read_alike_by_transformers(tmp_path):
    from transformers import AutoConfig

    _write(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (type(config).__name__, config.dtype, config.sliding_window) == ("Qwen3Config", torch.bfloat16, None)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
    assert (config.target_layer_ids, config.layer_types, config.markov_rank) == ([1, 3, 4], ["full_attention"] * 2, 5)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn_truncated"])
def test_release_of_a_scaled_rope_is_rotated_alike_by_transformers(tmp_path, name):
    """By the class of transformers 5; transformers 4 reads `rope_scaling` and `rope_theta` in place of `rope_parameters`."""
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    shape = dataclasses.replace(tiny.SHAPE, rope=tiny.ROPES[name])
    scaling = dataclasses.asdict(shape.rope.scaling)
    target_config = {**TARGET_CONFIG, "rope_parameters": {**scaling, "rope_theta": 100.0}}
    storage, _ = _write(tmp_path, tiny.drafter("dspark", None, shape), target_config=target_config, head=_head(shape))
    check_release(storage)
    config = _json(storage, "config.json")
    assert config["rope_parameters"] == {**config["rope_scaling"], "rope_theta": config["rope_theta"]} == {**scaling, "rope_theta": 100.0}
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert target_shape(config).rope == target_shape(older).rope == shape.rope
    positions = torch.tensor([[0, 1, 5, 300]])
    wanted = Rotation.at(positions, shape.rope, torch.float64)
    cos, sin = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))(torch.ones(1), positions)
    assert torch.allclose(cos, wanted.cos.float(), atol=1e-4)
    assert torch.allclose(sin, wanted.sin.float(), atol=1e-4)


def test_release_of_a_nested_target_config_reads_its_text_part(tmp_path):
    storage, _ = _write(tmp_path, target_config={"model_type": "other", "text_config": TARGET_CONFIG})
    assert _json(storage, "config.json")["max_position_embeddings"] == 512


def test_release_holds_calibration_costs_and_conventions(tmp_path):
    storage, _ = _write(tmp_path)
    assert Calibration.from_json(storage.read("calibration.json"), tiny.BLOCK) == _calibration()
    sps = _json(storage, "sps.json")
    assert (sps["sample_batch_tokens"], sps["max_batch_tokens"]) == ([1, 8, 64], 64)
    assert sps["sample_steps_per_sec"] == pytest.approx([100.0, 50.0, 20.0])
    assert SpsTable(tuple(sps["sample_batch_tokens"]), tuple(sps["draft_seconds"]), tuple(sps["verify_seconds"])) == SPS
    assert read_additive(storage.read("sps_additive.json"), tiny.BLOCK) == ADDITIVE
    tensorrt = _json(storage, "sps_tensorrt.json")
    assert (tensorrt["token_counts"], tensorrt["step_time_ms"]) == ([1, 8, 64], pytest.approx([10.0, 20.0, 50.0]))
    assert _json(storage, "serving.json") == {
        "method": "dspark", "num_speculative_tokens": 4, "sample_from_anchor": True, "target_layer_ids": [1, 3, 4],
        "layer_convention": "output_of_layer", "mask_token_id": 22, "vllm_tested": "0.32.0",
    }  # fmt: skip
    assert (_json(storage, "report.json"), _json(storage, "lineage.json"), storage.read("README.md")) == (REPORT, LINEAGE, b"the card")


def test_release_checksums_are_of_every_other_file_and_written_last(tmp_path):
    class Recorded(LocalStorage):
        def put(self, name, data):
            written.append(name)
            super().put(name, data)

    written, storage = [], Recorded(str(tmp_path))
    drafter = tiny.drafter("dspark")
    names = write_release(storage, drafter, _head(), TARGET_CONFIG, _calibration(), SPS, ADDITIVE, REPORT, LINEAGE, "the card")
    assert names == written == [*FILES, CHECKSUMS]
    assert _json(storage, CHECKSUMS) == {name: hashlib.sha256(storage.read(name)).hexdigest() for name in FILES}


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CHECKSUMS, "model.safetensors", "README.md"])
def test_release_over_another_one_is_refused_and_changes_nothing(tmp_path, name):
    storage = LocalStorage(str(tmp_path))
    storage.put(name, b"old")
    with pytest.raises(
        ValueError, match=rf"{tmp_path}: holds {name}: a release is never published over another one. Fix: publish to an empty"
    ):
        _write(tmp_path)
    assert (storage.list(), storage.read(name)) == ([name], b"old")


def test_release_beside_files_that_are_not_its_own_is_written(tmp_path):
    (tmp_path / "record.json").write_bytes(b"{}")
    names = write_release(
        LocalStorage(str(tmp_path)), tiny.drafter("dspark"), _head(), TARGET_CONFIG, _calibration(), SPS, ADDITIVE, REPORT, LINEAGE, ""
    )
    assert "record.json" not in names
    check_release(LocalStorage(str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": tiny.drafter("dflash")}, "drafter.kind: dflash: only dspark has the confidence head"),
        ({"drafter": tiny.drafter("one_plus_n")}, "drafter.sample_from_anchor: False: a release is of the anchor-first layout"),
        ({"drafter": tiny.drafter("sliding")}, r"drafter.sliding_layers: \[1\]: unless told otherwise, engines run sliding layers"),
        ({"calibration": _calibration(7)}, "temperatures: .* one temperature for each of the 4 drafted positions"),
        ({"sps": SpsTable((8,), (0.0,), (0.01,))}, "at least 2 probes"),
        ({"sps": SpsTable((1, 8), (0.0, 0.0), (0.01, 0.01))}, "at least 2 distinct costs"),
        ({"target_config": {**TARGET_CONFIG, "rms_norm_eps": 1e-6}}, "target_config: .* the target that the drafter was trained for"),
        ({"target_config": {**TARGET_CONFIG, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}}, "target_config: .* the target that"),
        ({"head": _head(dataclasses.replace(tiny.SHAPE, vocab_size=24))}, "head.shape: .* the target that the drafter was trained for"),
        ({"drafter": tiny.drafter("dspark", None, tiny.CAPPED)}, "target llama: embedding scale 4, logit soft cap 3.0: Qwen3DSparkModel applies"),
        (
            {"drafter": tiny.drafter("dspark", None, dataclasses.replace(tiny.SHAPE, rope=tiny.ROPES["partial"]))},
            "target llama rotary embedding: 4 of 6 components of a head: Qwen3DSparkModel turns whole heads",
        ),
        (
            {"drafter": tiny.drafter("dspark", None, dataclasses.replace(tiny.SHAPE, rope=tiny.ROPES["proportional"]))},
            "target llama rotary embedding: proportional: Qwen3DSparkModel turns every pair",
        ),
    ],
    ids=["dflash", "1+N", "sliding", "gamma", "one probe", "flat", "target config", "rope", "head", "capped", "partial", "proportional"],
)  # fmt: skip
def test_release_that_no_engine_would_serve_rightly_is_refused_before_a_file_is_written(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        _write(tmp_path, **arguments)
    assert LocalStorage(str(tmp_path)).list() == []


# --- what a check finds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_check_of_a_changed_or_missing_file_names_it(tmp_path, name):
    storage, _ = _write(tmp_path)
    data = storage.read(name)
    storage.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{name}: [0-9a-f]{{16}}: SHA-256 [0-9a-f]{{16}}"):
        check_release(storage)
    storage.remove(name)
    with pytest.raises(ValueError, match=f"{name}: missing: SHA-256"):
        check_release(storage)


def test_check_without_checksums_or_with_a_shorter_list_is_refused(tmp_path):
    storage, _ = _write(tmp_path)
    checksums = _json(storage, CHECKSUMS)
    storage.put(CHECKSUMS, json.dumps({name: value for name, value in checksums.items() if name != "sps.json"}).encode())
    with pytest.raises(ValueError, match=r"checksums\.json: .* names model\.safetensors"):
        check_release(storage)
    storage.remove(CHECKSUMS)
    with pytest.raises(ValueError, match=r"no checksums\.json: it is written last"):
        check_release(storage)


def _rewrite(storage, name, data):
    """A file that somebody changed on purpose, its checksum with it."""
    storage.put(name, data)
    storage.put(CHECKSUMS, json.dumps({**_json(storage, CHECKSUMS), name: hashlib.sha256(data).hexdigest()}).encode())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("calibration.json", {"temperatures": []}, "temperatures: .*one temperature for each of the 4"),
        ("calibration.json", {"temperatures": [1.0, 1.0, 0.0, 1.0]}, "temperatures: .*above 0"),
        ("calibration.json", {"temperatures": [1.0] * 5}, "temperatures: .*one temperature for each of the 4"),
        ("calibration.json", {"ece_before": 0.1}, "ece_before: 0.1: a list of numbers"),
        ("sps.json", {"sample_batch_tokens": [1, 8, 8]}, "sample_batch_tokens: .*strictly increasing"),
        ("sps_additive.json", {"block_size": 7}, "sps_additive.json block_size: 7: 4, the block size of the drafter"),
        ("sps_tensorrt.json", {"step_time_ms": [10.0, 20.0, 51.0]}, "sps_tensorrt.json: .*the seconds of sps.json"),
        ("config.json", {"sts_temperatures": [1.2, 1.2, 1.2, 1.3]}, r"config.json sts_temperatures: .*those of calibration.json, \[1.2, 1.2"),
        ("config.json", {"architectures": ["DSparkSpeculator"]}, "config.json architectures: .*must be .*Qwen3DSparkModel"),
        ("config.json", {"model_type": "dspark"}, "config.json model_type: dspark: must be qwen3"),
        ("config.json", {"sample_from_anchor": False}, "sample_from_anchor: False: must be True"),
        ("config.json", {"layer_types": ["full_attention", "sliding_attention"]}, "full_attention for every layer"),
        ("config.json", {"mask_token_id": 23}, "mask_token_id: 23: a token of the target's vocabulary of 23"),
        ("config.json", {"target_layer_ids": [1, 3, 5]}, "target.tapped_layers"),
        ("config.json", {"draft_vocab_size": 8}, r"model.safetensors d2t: .*must be \(\(8,\)"),
        ("config.json", {"markov_rank": 6}, r"model.safetensors confidence_head.proj.weight: .*must be \(\(1, 22\)"),
    ],
)  # fmt: skip
def test_check_of_a_rule_that_an_engine_has_is_refused(tmp_path, name, change, message):
    storage, _ = _write(tmp_path)
    _rewrite(storage, name, json.dumps({**_json(storage, name), **change}).encode())
    with pytest.raises(ValueError, match=message):
        check_release(storage)


@pytest.mark.parametrize("key", ["markov_rank", "enable_confidence_head", "target_layer_ids", "max_position_embeddings"])
def test_check_of_a_config_with_a_nested_key_is_refused(tmp_path, key):
    storage, _ = _write(tmp_path)
    config = _json(storage, "config.json")
    _rewrite(storage, "config.json", json.dumps({"dflash_config": {key: config.pop(key)}, **config}).encode())
    with pytest.raises(ValueError, match=f"config.json: without {key}: these keys stand at the top level"):
        check_release(storage)


def test_check_of_target_ids_instead_of_offsets_is_refused(tmp_path):
    from safetensors.torch import save

    storage, _ = _write(tmp_path)
    tensors = load_safetensors(storage.read("model.safetensors"))
    _rewrite(storage, "model.safetensors", save({**tensors, "d2t": tiny.REDUCED}))
    with pytest.raises(ValueError, match=r"d2t: .*offsets"):
        check_release(storage)


@pytest.mark.parametrize("data", [b"[]", b"{"])
def test_check_of_a_file_that_is_no_object_is_refused(tmp_path, data):
    storage, _ = _write(tmp_path)
    _rewrite(storage, "sps.json", data)
    with pytest.raises(ValueError, match=r"sps\.json: .*a JSON object"):
        check_release(storage)


# --- the model card -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft_ids", "sglang"), [(None, "--speculative-algorithm DSPARK"), (tiny.REDUCED, "SGLang serves whole draft vocabularies only")]
)
def test_model_card_says_what_was_made_measured_and_how_to_serve_it(draft_ids, sglang):
    card = model_card(tiny.drafter("dspark", draft_ids), "tiny-llama", _calibration(), SPS, ADDITIVE, REPORT, LINEAGE)
    assert """--speculative-config '{"method": "dspark", "model": "<this folder>", "num_speculative_tokens": 4}'""" in card
    table = card[card.index("| decoding") : card.index("## Serving")].strip().splitlines()
    assert table == [
        "| decoding | prompts | math | all |",
        "|---|---|---|---|",
        "| t1-probabilistic | test | 1.23 [1.20, 1.30] | 1.23 [1.20, 1.30] |",
        "| t1-probabilistic | gsm8k | - | 1.23 [1.20, 1.30] |",
    ]
    assert '- train: `{"fingerprint": "1a2b3c4d", "lr": 0.003}`' in card
    assert "| 4 | 1.2 | 0.1100 | 0.0200 |" in card
    assert f"{9 if draft_ids is not None else 23} of 23 tokens" in card
    assert sglang in card
