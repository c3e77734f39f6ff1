"""Facts of a target from its config.json."""

import dataclasses
import re

import pytest

from dspark.families import check_tapped_layers, target_shape

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}  # fmt: skip


def test_shape_of_a_llama_config_copies_its_facts():
    found = target_shape(LLAMA)
    assert dataclasses.asdict(found) == {
        "model_type": "llama", "num_layers": 30, "width": 576, "num_heads": 9, "num_kv_heads": 3, "head_width": 64, "mlp_width": 1536,
        "vocab_size": 49152, "norm_epsilon": 1e-5, "rope_theta": 1e5,
        "embedding_scale": 1.0, "norm_weight_offset": 0.0, "logit_soft_cap": None,
    }  # fmt: skip


def test_shape_of_an_older_config_falls_back_to_its_defaults():
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_parameters", "head_dim", "num_key_value_heads")}
    found = target_shape({**config, "rope_theta": 5e5, "rope_scaling": None})
    assert (found.rope_theta, found.head_width, found.num_kv_heads) == (5e5, 64, 9)


def test_shape_of_a_multimodal_config_is_that_of_its_text_part():
    text = {**LLAMA, "model_type": "gemma3_text", "hidden_size": 256, "final_logit_softcapping": 30.0}
    found = target_shape({"model_type": "gemma3", "vision_config": {}, "text_config": text})
    assert (found.embedding_scale, found.norm_weight_offset, found.logit_soft_cap) == (16.0, 1.0, 30.0)


def test_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mamba' is not a known family \(llama, .*dspark/families.py"):
        target_shape({**LLAMA, "model_type": "mamba"})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rope_parameters": None, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        # One entry a layer type, as Gemma has it: no single rotation describes the target.
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_theta": 1e6, "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}},
    ],
    ids=["yarn", "linear", "partial", "partial_outside", "by_layer_type", "by_layer_type_default"],
)
def test_unknown_rotary_embedding_is_refused(rope):
    with pytest.raises(ValueError, match="only the default rotary embedding is"):
        target_shape({**LLAMA, **rope})


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
