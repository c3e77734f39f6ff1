"""The packed target against transformers' forward, and against itself: requests of unequal length, wherever they are kept."""

from functools import partial
from typing import Any

import pytest
import torch

from dspark.layers import Rotation, rms_norm
from dspark.packed_target import PackedTarget, load_target
from dspark.step import Step
from dspark.target import KeyValueCache, TransformersTarget

CPU = torch.device("cpu")
TAPPED = (0, 2)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}}),
    "qwen2": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 12, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
}  # fmt: skip


def _save(folder, model_type, **fields):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    ends = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **{**sizes, **ends, "num_key_value_heads": 2, "initializer_range": 0.3, **fields})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms are ones and biases zeros
            parameter.data.normal_(1.0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    model_type, fields = MODELS[request.param]
    return _save(tmp_path_factory.mktemp(request.param), model_type, **fields)


def _exact(folder):
    """Transformers' model with norms and angles in fp64 too; they are fp32 whatever the weights are."""
    target = TransformersTarget(folder, TAPPED, torch.float64, CPU)
    for module in target._body.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, weight=module.weight, epsilon=module.variance_epsilon)

    def angles(_x, position_ids, *_args):
        rotation = Rotation.at(position_ids, target.shape.rope, torch.float64)
        return rotation.cos, rotation.sin

    target._body.rotary_emb.forward = angles
    return target


def _tokens(length, seed):
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_ragged_rounds_equal_transformers_on_each_text_alone(folder):
    """Prompts, three rounds that keep some tokens of each request and overwrite the others, and a move, in slots of any order."""
    target, exact, loose = PackedTarget(folder, TAPPED, torch.float64, CPU), _exact(folder), TransformersTarget(folder, TAPPED, torch.float64, CPU)  # fmt: skip
    cache, slots = KeyValueCache(5, 40), [3, 0, 4]
    texts: list[list[int]] = [[], [], []]
    rounds = [([11, 3, 7], [11, 3, 7]), ([8, 1, 3], [2, 1, 3]), ([2, 8, 5], [1, 3, 1]), ([1, 1, 1], [1, 1, 1]), ([4, 4, 4], [4, 4, 4])]
    for number, (lengths, kept) in enumerate(rounds):
        if number == 4:
            cache.move(4, 1, len(texts[2]))
            slots[2] = 1
        new = [_tokens(length, 10 * number + i) for i, length in enumerate(lengths)]
        step = Step.of(new, [len(text) for text in texts], slots, CPU)
        states = target.forward(step, cache)
        parts = zip(states.tapped_SLD.split(lengths), states.final_SD.split(lengths), strict=True)
        for i, (tapped, final) in enumerate(parts):
            for reference, tolerance in ((exact, 1e-10), (loose, 1e-4)):
                wanted = reference.states([*texts[i], *new[i]])
                assert torch.allclose(tapped, wanted.tapped_SLD[-lengths[i] :], rtol=tolerance, atol=tolerance)
                assert torch.allclose(final, wanted.final_SD[-lengths[i] :], rtol=tolerance, atol=tolerance)
                assert torch.allclose(
                    target.logits(final), reference.logits(wanted.final_SD)[-lengths[i] :], rtol=tolerance, atol=tolerance
                )
            texts[i] += new[i][: kept[i]]


def test_request_alone_equals_itself_among_others_of_all_lengths(folder):
    target = PackedTarget(folder, TAPPED, torch.float64, CPU)
    cache, prompts = KeyValueCache(8, 32), [_tokens(5 + i, i) for i in range(8)]
    target.forward(Step.of(prompts, [0] * 8, range(8), CPU), cache)
    new, firsts = [_tokens(8 - i, 20 + i) for i in range(8)], [len(prompt) for prompt in prompts]
    together = target.forward(Step.of(new, firsts, range(8), CPU), cache).final_SD.split([len(row) for row in new])
    for i in range(8):
        alone = target.forward(Step.of([new[i]], [firsts[i]], [i], CPU), cache)
        assert torch.allclose(alone.final_SD, together[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_rounds_take_the_fused_attention(folder, num_tokens):
    """Products of few tokens come transposed; with a stride other than 1 in its last dimension a query is refused by the fused kernel,
    and the plain one that takes its place passes through the scores of all requests a dozen times."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    target, cache = PackedTarget(folder, TAPPED, torch.bfloat16, CPU), KeyValueCache(4, 12)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for first, length in ((0, 5), (5, num_tokens)):
            target.forward(Step.of([_tokens(length, i) for i in range(4)], [first] * 4, range(4), CPU), cache)


def test_bf16_is_as_near_to_fp64_as_transformers(folder):
    tokens = _tokens(24, 0)
    exact = _exact(folder)
    wanted = exact.logits(exact.states(tokens).final_SD)
    errors = []
    for kind in (PackedTarget, TransformersTarget):
        target = kind(folder, TAPPED, torch.bfloat16, CPU)
        logits = target.logits(target.states(tokens).final_SD)
        assert logits.dtype == torch.float32
        errors.append(float((logits - wanted).norm()))
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gemma3_text", {}, "model_type 'gemma3_text' is none of llama, qwen2, qwen3"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "some layers have a sliding window"),
        ("llama", {"attention_bias": True}, "attention_bias or mlp_bias is set"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not 'silu'"),
    ],
)
def test_target_that_cannot_be_packed_is_refused_and_loaded_with_transformers(tmp_path, model_type, fields, reason):
    folder = _save(tmp_path, model_type, **fields)
    with pytest.raises(ValueError, match=rf"config\.json: {reason}.* Fix: "):
        PackedTarget(folder, TAPPED, torch.float32, CPU)
    assert isinstance(load_target(folder, TAPPED, torch.float32, CPU), TransformersTarget)


def test_target_that_can_be_packed_is(folder):
    assert isinstance(load_target(folder, TAPPED, torch.float32, CPU), PackedTarget)
