"""Facts of a target from its config.json."""

import copy
import dataclasses
import json
import math
import re
import shutil

import pytest
import torch

from dspark.config import LinearScaling, Llama3Scaling, ProportionalScaling, Rope, YarnScaling
from dspark.families import check_tapped_layers, target_shape
from dspark.layers import Rotation, inverse_frequencies
from dspark.target import load_head, read_shape

CPU = torch.device("cpu")

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}  # fmt: skip


def test_shape_of_a_llama_config_copies_its_facts():
    found = target_shape(LLAMA)
    assert dataclasses.asdict(found) == {
        "model_type": "llama", "num_layers": 30, "width": 576, "num_heads": 9, "num_kv_heads": 3, "head_width": 64, "mlp_width": 1536,
        "vocab_size": 49152, "norm_epsilon": 1e-5, "rope": {"theta": 1e5, "rotated_width": 64, "scaling": None},
        "embedding_scale": 1.0, "norm_weight_offset": 0.0, "logit_soft_cap": None,
    }  # fmt: skip


def test_shape_of_an_older_config_falls_back_to_its_defaults():
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_parameters", "head_dim", "num_key_value_heads")}
    found = target_shape({**config, "rope_theta": 5e5, "rope_scaling": None})
    assert (found.rope.theta, found.head_width, found.num_kv_heads) == (5e5, 64, 9)


def test_shape_of_a_multimodal_config_is_that_of_its_text_part():
    text = {**LLAMA, "model_type": "gemma3_text", "hidden_size": 256, "final_logit_softcapping": 30.0}
    found = target_shape({"model_type": "gemma3", "vision_config": {}, "text_config": text})
    assert (found.embedding_scale, found.norm_weight_offset, found.logit_soft_cap) == (16.0, 1.0, 30.0)


def test_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mamba' is not a known family \(llama, .*dspark/families.py"):
        target_shape({**LLAMA, "model_type": "mamba"})


def test_vocabulary_is_that_of_the_config_where_it_is_padded_beyond_the_tokenizer(tiny_target, tmp_path):
    """Qwen2.5 has 151,665 tokens and 151,936 rows: ids, LM head and log-sum-exp are over the rows of the model."""
    shutil.copytree(tiny_target, tmp_path, dirs_exist_ok=True)
    tokenizer = {"model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(57)}, "unk_token": "t0"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_head(tmp_path, torch.float32).tables.lm_head_VD.shape[0] == read_shape(tmp_path).vocab_size == 64


# --- the rotary embedding -----------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GEMMA = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5e5}),
        ("qwen2", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}),
        ("llama", {**LLAMA3, "rope_theta": 5e5}),
        ("qwen2", {**YARN, "rope_theta": 1e6}),
        ("qwen3", {**YARN, "rope_theta": 1e6, "attention_factor": 0.8}),
        ("qwen3", {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 20.0, "beta_slow": 2.0}),
        ("qwen3", {**YARN, "rope_theta": 1e4, "truncate": False}),
        ("gemma3_text", GEMMA),
        ("stablelm", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        ("stablelm", {**LLAMA3, "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("stablelm", {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("rope_type", "by_layer_type"),
)
def test_rotation_from_a_config_equals_the_module_of_transformers(model_type, rope):
    """Its inverse frequencies and its cos and sin, which it computes in fp32; the family of a partial one is not of the table."""
    from transformers import AutoConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
    from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

    config = AutoConfig.for_model(
        model_type, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=6, max_position_embeddings=131072,
        rope_parameters=copy.deepcopy(rope), **({} if model_type == "stablelm" else {"head_dim": 64}),
    )  # fmt: skip
    module = {
        "llama": LlamaRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding, "qwen3": Qwen3RotaryEmbedding,
        "gemma3_text": Gemma3RotaryEmbedding, "stablelm": StableLmRotaryEmbedding,
    }[model_type](config)  # fmt: skip
    layer_type = ("full_attention",) if model_type == "gemma3_text" else ()
    found = target_shape(
        json.loads(config.to_json_string()) | ({"model_type": "llama", "rms_norm_eps": 1e-5} if model_type == "stablelm" else {})
    ).rope
    wanted = module.full_attention_inv_freq if layer_type else module.inv_freq
    assert torch.allclose(inverse_frequencies(found, torch.float32, CPU), wanted, rtol=1e-5)
    positions = torch.tensor([[0, 1, 2, 77, 4095, 40000]])
    rotation = Rotation.at(positions, found, torch.float64)
    for ours, theirs in zip((rotation.cos, rotation.sin), module(torch.ones(1), positions, *layer_type), strict=True):
        assert torch.allclose(ours[:, :4].float(), theirs[:, :4], atol=2e-5)
        assert torch.allclose(ours.float(), theirs, atol=2e-2)  # its angles are fp32: 40,000 radians are within 0.004


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_proportional_frequencies_equal_those_of_transformers(factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": factor}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
    wanted, attention_factor = ROPE_INIT_FUNCTIONS["proportional"](config, CPU)
    assert attention_factor == 1.0
    assert torch.allclose(inverse_frequencies(target_shape({**LLAMA, "rope_parameters": rope}).rope, torch.float32, CPU), wanted)
    assert (wanted > 0).tolist() == [True] * 8 + [False] * 24


OLD = {k: v for k, v in LLAMA.items() if k != "rope_parameters"} | {"rope_theta": 1e6, "max_position_embeddings": 4096}
YARN_ROPE = YarnScaling("yarn", 4.0, 0.1 * math.log(4.0) + 1.0, 32.0, 1.0, 32768, truncate=True)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rope_scaling": YARN}, Rope(1e6, 64, YARN_ROPE)),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}, Rope(1e6, 64, YARN_ROPE)),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": None}, "original_max_position_embeddings": 32768}, Rope(1e6, 64, YARN_ROPE)),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, Rope(1e6, 64, dataclasses.replace(YARN_ROPE, original_max_position_embeddings=4096))),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(1e6, 64, LinearScaling("linear", 2.0))),
        ({"rope_scaling": LLAMA3}, Rope(1e6, 64, Llama3Scaling("llama3", 8.0, 1.0, 4.0, 8192))),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, Rope(1e6, 64, LinearScaling("linear", 2.0))),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, Rope(7e5, 64, None)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, Rope(1e6, 16, None)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}, Rope(1e6, 32, LinearScaling("linear", 2.0))),
        ({"rope_parameters": GEMMA}, Rope(1e6, 64, LinearScaling("linear", 8.0))),
        (
            {"rope_parameters": {**GEMMA, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}},
            Rope(1e6, 64, ProportionalScaling("proportional", 1.0, 8)),
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}}, Rope(1e6, 64, None)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}, Rope(1e6, 64, LinearScaling("linear", 8.0))),
    ],
    ids=[
        "transformers 4", "type", "null and length above", "length of the model", "linear", "llama3", "both", "transformers 5", "partial",
        "partial outside", "gemma3", "gemma4", "theta outside", "gemma3 of transformers 4",
    ],
)  # fmt: skip
def test_rope_of_either_spelling_is_read(changes, wanted):
    assert target_shape({**OLD, **changes}).rope == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"rope_scaling": {name: kind, "factor": 4.0}}, rf"rope_scaling\.rope_type: '{kind}': one of default, linear, llama3, yarn, proportional\. Fix: ")
            for name, kind in (("type", "dynamic"), ("rope_type", "longrope"), ("type", "su"), ("rope_type", "ntk"))
        ),
        (
            {"rope_parameters": {**GEMMA, "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.02}}},
            r"rope_parameters\.full_attention\.partial_rotary_factor: 0\.02: turns some, at most all, of a head's 32 pairs, not 0",
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, r"rope_parameters\.full_attention: None: a mapping"),
        ({"rope_theta": None}, r"rope_parameters\.rope_theta: None: a number above 0\. Fix: "),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor: None: a number"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, r"rope_scaling\.factor: '4': a number"),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, r"rope_scaling\.attention_factor: -1\.0: a number above 0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, r"rope_scaling\.high_freq_factor: 4\.0: above low_freq_factor, 4\. Fix: "),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor: None: a number"),
        ({"partial_rotary_factor": 0.24}, r"rope_parameters\.partial_rotary_factor: 0\.24: turns an even number, .* head's 64 components, not 15"),
        ({"partial_rotary_factor": 1.5}, r"rope_parameters\.partial_rotary_factor: 1\.5: .* not 96"),
        ({"partial_rotary_factor": 0.01}, r"rope_parameters\.partial_rotary_factor: 0\.01: .* not 0"),
    ],
)  # fmt: skip
def test_rope_that_is_not_understood_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"target config.json {message}"):
        target_shape({**OLD, **changes})


# --- the tapped layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tapped", [(), (1, 1), (3, 1), (-1, 2), (2, 7), (2, 9)])
def test_tapped_layers_that_cannot_be_are_refused_with_the_rule(tapped):
    with pytest.raises(ValueError, match=rf"target.tapped_layers: {re.escape(str(list(tapped)))} must be .* between 0 and 6"):
        check_tapped_layers(tapped, 8, "dspark")


@pytest.mark.parametrize("num_layers", [2, 3, 4, 5, 36])
def test_tapped_layers_that_the_error_proposes_are_right(num_layers):
    with pytest.raises(ValueError, match="Fix: for example") as error:
        check_tapped_layers((num_layers,), num_layers, "dspark")
    proposal = tuple(int(n) for n in re.findall(r"\d+", str(error.value).rpartition("[")[2]))
    check_tapped_layers(proposal, num_layers, "dspark")
