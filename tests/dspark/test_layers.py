"""The building blocks against vector loops; attention against a dense mask over all columns."""

import numpy as np
import pytest
import torch

from dspark.blocks import attention_mask
from dspark.config import Rope
from dspark.layers import (
    FEW_ROWS,
    MLP,
    DrafterLayer,
    RMSNorm,
    Rotation,
    as_columns,
    as_rows,
    attend,
    inverse_frequencies,
    product,
    rms_norm,
)
from tests import oracles
from tests.dspark import tiny


def _random(*size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, 1.0, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_of_any_number_of_rows_is_the_linear_layers(dtype):
    weight = _random(12, 8).to(dtype)
    for num_rows in range(FEW_ROWS + 3):
        x = _random(num_rows, 8, seed=num_rows).to(dtype)
        found, wanted = product(x, weight), torch.nn.functional.linear(x, weight)
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert product(x.view(1, -1, 1, 8), weight).shape == (1, len(x), 1, 12)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(2, 2), (3, 4), (6, 6), (7, 8), (9, 16), (16, 16), (17, 24), (24, 24), (63, 64)])
def test_columns_of_fp32_are_filled_up_to_a_number_that_is_quick(num_rows, num_columns):
    x = _random(num_rows, 8).float()
    assert as_columns(x).shape == (8, num_columns)
    assert torch.equal(as_rows(as_columns(x), num_rows), x)
    assert as_columns(x.bfloat16()).shape == (8, num_rows)


def test_rms_norm_of_rows_equals_the_loop():
    x, weight = _random(3, 2, 8), _random(8, seed=1)
    found = rms_norm(x, weight, 1e-3)
    assert all(torch.allclose(found[i, j], oracles.rms_norm(x[i, j], weight, 1e-3), atol=1e-13) for i, j in np.ndindex(3, 2))
    assert torch.allclose(rms_norm(x, weight, 1e-3, offset=1.0), rms_norm(x, weight + 1.0, 1e-3))


def test_rms_norm_of_large_bf16_values_keeps_its_statistics_in_fp32():
    x = torch.full((1, 64), 3.0e4, dtype=torch.bfloat16)
    assert rms_norm(x, torch.ones(64), 1e-6).tolist() == [[1.0] * 64]
    assert RMSNorm(64, 1e-6).bfloat16()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("rope", [Rope(50.0, 6, None), *tiny.ROPES.values()], ids=["default", *tiny.ROPES])
def test_rotation_of_heads_equals_the_loop(rope):
    x, positions = _random(2, 3, 4, 6), torch.tensor([[0, 1, 17], [5, 900, 2]])
    found = Rotation.at(positions, rope, torch.float64).apply(x)
    for b, t, n in np.ndindex(2, 3, 4):
        assert torch.allclose(found[b, t, n], oracles.rotate(x[b, t, n], int(positions[b, t]), rope), atol=1e-11)


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_scaled_frequencies_of_the_tiny_shapes_are_kept_blended_and_divided(name):
    """So that the comparisons with the oracle reach every branch of both formulas."""
    rope = tiny.ROPES[name]
    ratio = inverse_frequencies(rope, torch.float64, torch.device("cpu")) / 100.0 ** (-torch.arange(3.0, dtype=torch.float64) / 3)
    assert ratio[0] == pytest.approx(1.0)
    assert 1 / rope.scaling.factor < ratio[1] < 1.0
    assert ratio[2] == pytest.approx(1 / rope.scaling.factor)


def test_rotation_at_long_positions_in_bf16_keeps_its_angles_in_fp32():
    exact = Rotation.at(torch.tensor([8191]), Rope(1e6, 64, None), torch.float64)
    half = Rotation.at(torch.tensor([8191]), Rope(1e6, 64, None), torch.bfloat16)
    assert (half.cos.double() - exact.cos).abs().max() < 0.006  # bf16's own rounding; an angle in bf16 would be off by 32


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("anchors", [[0, 3, 6], [2, 3, 4], [5], [7, 1, 7]])
def test_attend_to_context_and_own_block_equals_dense_attention_under_the_mask(num_heads, num_kv_heads, anchors):
    A, K, T, H = len(anchors), 3, 7, 4
    query = _random(2, A, K, num_heads, H)
    own_key, own_value = (_random(2, A, K, num_kv_heads, H, seed=s) for s in (1, 2))
    context_key, context_value = (_random(2, T, num_kv_heads, H, seed=s) for s in (3, 4))
    orders = [anchors, anchors[::-1]]  # the two sequences see different things
    visible = torch.arange(T) < torch.tensor(orders)[..., None, None]
    found = attend(query, own_key, own_value, context_key, context_value, visible)
    for b, order in enumerate(orders):
        keys, values = (torch.cat([c[b], o[b].flatten(0, 1)]) for c, o in ((context_key, own_key), (context_value, own_value)))
        wanted = oracles.attention(query[b].flatten(0, 1), keys, values, attention_mask(np.array(order), T, K))
        assert torch.allclose(found[b].flatten(0, 1), wanted, atol=1e-12)


def test_mlp_of_a_row_equals_swiglu():
    mlp, x = MLP(5, 7).double(), _random(5)
    gate, up = mlp.gate_proj.weight @ x, mlp.up_proj.weight @ x
    assert torch.allclose(mlp(x), mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * up), atol=1e-13)


def test_context_of_a_layer_bypasses_its_input_norm():
    layer, context = DrafterLayer(tiny.SHAPE).double(), _random(1, 5, tiny.SHAPE.width)
    rotation = Rotation.at(torch.arange(5)[None], tiny.SHAPE.rope, torch.float64)
    before = layer.self_attn.keys_values(context, rotation)
    x, visible = _random(1, 1, 2, tiny.SHAPE.width, seed=1), torch.ones(1, 1, 5, dtype=torch.bool)
    own = Rotation.at(torch.tensor([[[5, 6]]]), tiny.SHAPE.rope, torch.float64)
    first = layer(x, own, before, visible)
    layer.input_layernorm.weight.data.mul_(3.0)
    assert all(torch.equal(a, b) for a, b in zip(before, layer.self_attn.keys_values(context, rotation), strict=True))
    assert not torch.allclose(first, layer(x, own, before, visible))
