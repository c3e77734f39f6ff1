"""The target against transformers' own forward: which state is tapped, what the head sees, and batches of unequal length."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import target as target_module
from dspark.step import Step
from dspark.target import KeyValueCache, TargetHead, TransformersTarget, load_head, read_shape

TAPPED = (0, 1)
CPU = torch.device("cpu")
TOKENS = [5, 63, 0, 17, 17, 40, 2, 31, 8, 8, 12]


def _load(folder, dtype=torch.float64):
    return TransformersTarget(folder, TAPPED, dtype, CPU)


@pytest.fixture(scope="module")
def target(tiny_target):
    return _load(tiny_target)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """A Qwen3 with tied embeddings whose last two layers see a window of 4 positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        initializer_range=0.3, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=1,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("sliding_target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    return _gemma(tmp_path_factory, "gemma4_text", hidden_size_per_layer_input=4, vocab_size_per_layer_input=64)


@pytest.fixture(scope="module")
def gemma4_unified(tmp_path_factory):
    return _gemma(tmp_path_factory, "gemma4_unified_text")


def _gemma(tmp_path_factory, model_type, **fields):
    """Sliding layers, and full ones with heads of another width; a soft cap, and another dictionary of tokens for each layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, global_head_dim=12, sliding_window=4, layer_types=["sliding_attention", "full_attention", "full_attention"],
        initializer_range=0.3, final_logit_softcapping=5.0, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **fields,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp(model_type)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=["tiny_target", "sliding", "gemma4", "gemma4_unified"])
def folder(request):
    return request.getfixturevalue(request.param)


def _reference(folder, tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), output_hidden_states=True)


def test_tapped_and_final_states_equal_those_of_transformers(folder):
    target, reference = _load(folder), _reference(folder, TOKENS)
    states = target.states(TOKENS)
    for i, layer in enumerate(TAPPED):
        assert torch.allclose(states.tapped_SLD[:, i], reference.hidden_states[layer + 1][0], atol=1e-12)
    assert torch.allclose(states.final_SD, reference.hidden_states[-1][0], atol=1e-12)
    assert torch.allclose(target.logits(states.final_SD), reference.logits[0], atol=1e-12)


def test_head_read_from_safetensors_gives_the_targets_logits_and_final_norm(folder):
    target, head = _load(folder), load_head(folder, torch.float64)
    states, before_norm = target.states(TOKENS), []
    hook = target._body.norm.register_forward_hook(lambda _module, inputs, _output: before_norm.append(inputs[0]))
    target.states(TOKENS)
    hook.remove()
    assert torch.allclose(head.logits(states.final_SD), target.logits(states.final_SD), atol=1e-12)
    assert torch.allclose(head.normalise(before_norm[0][0]), states.final_SD, atol=1e-6)  # transformers' norm is fp32
    assert torch.equal(head.tables.embedding_VD, target._model.get_input_embeddings().weight)
    assert (head.tables.lm_head_VD is head.tables.embedding_VD) == target._model.config.tie_word_embeddings


def _step(tokens, first_positions, slots=None):
    return Step.of(tokens, first_positions, range(len(tokens)) if slots is None else slots, CPU)


def test_states_of_requests_of_several_lengths_equal_those_of_each_alone(folder):
    target = _load(folder)
    prompts = [TOKENS, TOKENS[:3], TOKENS[2:9]]
    step = _step(prompts, [0, 0, 0], [4, 0, 2])
    states = target.forward(step, KeyValueCache(5, 20))
    for start, prompt in zip(step.starts_R.tolist(), prompts, strict=True):
        alone, rows = target.states(prompt), slice(start, start + len(prompt))
        assert torch.allclose(states.tapped_SLD[rows], alone.tapped_SLD, atol=1e-12)
        assert torch.allclose(states.final_SD[rows], alone.final_SD, atol=1e-12)


def test_states_after_rejected_tokens_equal_those_of_the_kept_text(folder):
    """Two rounds at different positions a request, over entries that a rejected draft and padding left behind."""
    target, cache = _load(folder), KeyValueCache(2, 24)
    kept, lengths, following = [TOKENS[:6], TOKENS[:3]], [6, 3], [[1, 2], [3]]
    target.forward(_step(kept, [0, 0]), cache)
    target.forward(_step([[60], [33, 34, 35]], lengths), cache)
    states = target.forward(_step(following, lengths), cache)
    for rows, text, new in zip((slice(0, 2), slice(2, 3)), kept, following, strict=True):
        alone = target.states([*text, *new])
        assert torch.allclose(states.final_SD[rows], alone.final_SD[-len(new) :], atol=1e-12)
        assert torch.allclose(states.tapped_SLD[rows], alone.tapped_SLD[-len(new) :], atol=1e-12)


def test_a_request_moved_to_another_slot_goes_on_there(target):
    cache, prompts = KeyValueCache(3, 12), [TOKENS[:4], TOKENS[1:5], TOKENS[2:5]]
    target.forward(_step(prompts, [0, 0, 0]), cache)
    cache.move(2, 0, 3)
    states = target.forward(_step([[7], [8]], [3, 4]), cache)
    for row, text in enumerate([[*prompts[2], 7], [*prompts[1], 8]]):
        assert torch.allclose(states.final_SD[row], target.states(text).final_SD[-1], atol=1e-12)


def test_logits_of_a_capped_head_are_bounded(tiny_target, tmp_path):
    _copy(tiny_target, tmp_path, final_logit_softcapping=2.0)
    head, plain = load_head(tmp_path, torch.float64), load_head(tiny_target, torch.float64)
    final = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(head.logits(final), 2.0 * torch.tanh(plain.logits(final) / 2.0), atol=1e-12)
    assert plain.logits(final).abs().max() > 2.0


def test_logits_of_a_bf16_target_are_fp32(tiny_target):
    target = _load(tiny_target, torch.bfloat16)
    assert target.logits(target.states(TOKENS).final_SD).dtype == torch.float32
    assert load_head(tiny_target, torch.bfloat16).tables.embedding_VD.dtype == torch.bfloat16


def test_last_layer_tapped_is_the_state_before_the_final_norm(tiny_target):
    states = TransformersTarget(tiny_target, (0, 2), torch.float32, CPU).states([5, 9, 33])
    assert torch.equal(load_head(tiny_target, torch.float32).normalise(states.tapped_SLD[:, 1]), states.final_SD)


def test_head_in_several_files_equals_the_head_in_one(tiny_target, tmp_path):
    _copy(tiny_target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-{i % 2}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole, parts = load_head(tiny_target, torch.float32), load_head(tmp_path, torch.float32)
    assert torch.equal(whole.tables.embedding_VD, parts.tables.embedding_VD)
    assert torch.equal(whole.tables.lm_head_VD, parts.tables.lm_head_VD)
    assert torch.equal(whole.tables.norm_D, parts.tables.norm_D)


def test_head_of_a_folder_without_embedding_is_refused(tiny_target, tmp_path):
    _copy(tiny_target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "embed" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no embedding or no final norm"):
        load_head(tmp_path, torch.float32)


def _copy(source, destination, **changes):
    for file in source.iterdir():
        (destination / file.name).write_bytes(file.read_bytes())
    config = json.loads((destination / "config.json").read_text())
    (destination / "config.json").write_text(json.dumps({**config, **changes}))
    assert read_shape(destination).vocab_size == 64


@pytest.mark.parametrize("scale", [1.0, 60.0, 4000.0], ids=["plain", "large", "above what exp takes"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_log_sum_exp_over_tiles_equals_that_of_all_logits(tiny_target, monkeypatch, scale, cap):
    head = load_head(tiny_target, torch.float32)
    head = TargetHead(dataclasses.replace(head.shape, logit_soft_cap=cap), head.tables)
    monkeypatch.setattr(target_module, "TILE_ROWS", 24)  # of 64
    states = torch.randn(5, head.shape.width, generator=torch.Generator().manual_seed(0)) * scale
    found = head.log_sum_exp(states)
    assert torch.allclose(found, head.logits(states).logsumexp(-1), rtol=1e-6, atol=1e-5)
    assert torch.isfinite(found).all()
