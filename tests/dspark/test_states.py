"""Stored states: bf16 bit for bit; fp8 against torch's own type, against arithmetic, and within half a step of e4m3."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark.states import States, decode, encode
from tests.dspark import tiny

CODES = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)  # 0x7F and 0xFF are NaN
LOWEST, HIGHEST = -124, 119  # exponents at which bf16 holds every code's value: 2^-9 to 448 times 2^e


def _decoded(stored: States) -> torch.Tensor:
    out = torch.full(stored.codes.shape, torch.nan, dtype=torch.bfloat16)
    decode(stored, out)
    return out


def _e4m3(code: int) -> float:
    """The value of a code by the format's definition."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 0x7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


@pytest.mark.parametrize("exponent", [LOWEST, -60, -7, 0, 1, 60, HIGHEST])
def test_every_code_is_decoded_to_its_value_in_torch_times_the_scale(exponent):
    stored = States(CODES[:, None], np.full(len(CODES), exponent, dtype=np.int8))
    found, wanted = _decoded(stored).double(), torch.from_numpy(CODES)[:, None].view(torch.float8_e4m3fn).double() * 2.0**exponent
    assert torch.equal(found, wanted)
    assert torch.equal(found.signbit(), wanted.signbit())  # 0x80 is minus zero
    assert found.flatten().tolist() == [_e4m3(code) * 2.0**exponent for code in CODES.tolist()]
    assert len(set(found.flatten().tolist())) == 253  # no two codes but the two zeros are equal


def test_every_bit_pattern_of_bf16_survives():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    stored = encode(bits.view(torch.bfloat16).reshape(16, 64, 64), "bf16")
    assert stored.exponents is None
    assert stored.codes.shape == (16, 64, 64)
    assert torch.equal(_decoded(stored).view(torch.int16).flatten(), bits)


def _check_fp8(states: torch.Tensor) -> None:
    """The scale of each state is the smallest power of two that fits, and each value is off by half a step at most."""
    stored = encode(states, "fp8")
    assert (stored.codes.dtype, stored.exponents.dtype) == (np.uint8, np.int8)
    assert stored.exponents.shape == states.shape[:-1]
    exact, found = states.double().reshape(-1, states.shape[-1]), _decoded(stored).double().reshape(-1, states.shape[-1])
    for e, wanted, got in zip(stored.exponents.reshape(-1).tolist(), exact, found, strict=True):
        largest = float(wanted.abs().max())
        if largest > 0:
            assert largest * 2.0**-e < 448 <= largest * 2.0 ** -(e - 1), (largest, e)
        scaled = wanted.abs() * 2.0**-e
        step = (torch.frexp(scaled).exponent - 1).clamp_min(-6).double().exp2() / 8  # 3 bits after the leading one; 2^-9 below 2^-6
        assert ((got - wanted).abs() * 2.0**-e <= step / 2).all()
        assert (got.signbit() == wanted.signbit()).all()


@settings(max_examples=80)
@given(seed=st.integers(0, 999), power=st.floats(-30, 30), outlier=st.floats(0, 30), width=st.integers(1, 40))
@example(seed=0, power=-30.0, outlier=0.0, width=40)
@example(seed=0, power=30.0, outlier=0.0, width=40)
@example(seed=0, power=-30.0, outlier=30.0, width=40)
@example(seed=0, power=0.0, outlier=30.0, width=40)
def test_states_of_any_magnitude_have_the_smallest_scale_and_half_a_step_of_error(seed, power, outlier, width):
    generator = np.random.default_rng(seed)
    values = generator.normal(0.0, 10.0**power, (3, 2, width))
    values[1, 0, width // 2] *= 10.0 ** min(outlier, 37 - power)  # one value far above the rest of its state
    _check_fp8(torch.from_numpy(values).bfloat16())


@pytest.mark.parametrize("power", [-40, -1, 0, 1, 40])
def test_states_at_the_edge_of_a_scale_take_the_right_side(power):
    """Largest values beside 448 * 2^power: 448 itself does not fit any more, what bf16 has just below it does."""
    edges = torch.tensor([448.0, -448.0, 446.0, 450.0, 447.0, 224.0, 223.0]).bfloat16() * 2.0**power
    _check_fp8(torch.stack([edges, torch.full_like(edges, 3.0 * 2.0**power)], dim=-1))
    exponents = encode(edges[:, None], "fp8").exponents.tolist()
    assert exponents == [
        power + 1,
        power + 1,
        power,
        power + 1,
        power if float(edges[4]) < 448 * 2.0**power else power + 1,
        power,
        power - 1,
    ]


def test_state_of_zeros_stays_zero_beside_others():
    states = torch.tensor([[0.0, -0.0, 0.0], [1e-30, 2.0, -3.0]]).bfloat16()
    _check_fp8(states)
    assert _decoded(encode(states, "fp8"))[0].tolist() == [0.0, 0.0, 0.0]


def test_states_in_any_order_in_memory_are_stored_in_their_own():
    states = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3, 8))).bfloat16().transpose(0, 1)
    for dtype in ("bf16", "fp8"):
        stored = encode(states, dtype)
        assert torch.equal(tiny.values(stored), tiny.values(encode(states.contiguous(), dtype)))
        assert stored.codes.shape == (3, 4, 8)


# --- what no state of a working target has ------------------------------------------------------------------------------


def _states():
    return torch.from_numpy(np.random.default_rng(1).normal(size=(3, 2, 8))).bfloat16()


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 1, 7)])
def test_state_with_a_value_that_is_not_finite_is_a_problem_in_both_dtypes(dtype, value, place):
    states = _states()
    assert encode(states, dtype).problem() is None
    states[place] = value
    assert encode(states, dtype).problem() == "holds a NaN or an infinity"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_state_of_zeros_is_a_problem_with_its_first_place_and_their_number(dtype, zero):
    states = _states()
    states[0, 0, :7] = zero  # single zeros occur
    assert encode(states, dtype).problem() is None
    states[1, 1] = states[2, 0] = zero
    assert encode(states, dtype).problem() == "is all zero at [1, 1], at 2 places in all"


def test_state_whose_small_values_vanish_beside_an_outlier_is_no_problem():
    states = torch.full((1, 8), 1e-20).bfloat16()
    states[0, 3] = 1e20
    assert encode(states, "fp8").problem() is None


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_no_states_at_all_are_no_problem_and_decode_to_nothing(dtype):
    stored = encode(torch.empty(0, 2, 8, dtype=torch.bfloat16), dtype)
    assert stored.problem() is None
    assert _decoded(stored).shape == (0, 2, 8)


# --- how it is decoded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(70000, 1), (61, 3, 576), (9, 5120), (2, 40000)])
def test_states_of_any_width_decode_to_their_values(shape):
    generator = np.random.default_rng(2)
    codes, exponents = generator.choice(CODES, shape), generator.integers(LOWEST, HIGHEST + 1, shape[:-1]).astype(np.int8)
    stored = States(codes, exponents)
    assert torch.equal(_decoded(stored).double(), tiny.values(stored))


@pytest.mark.parametrize("shape", [(70000, 1), (61, 3, 576), (9, 5120)])
def test_decoding_shares_no_work_out_among_threads(shape, monkeypatch):
    """torch begins to use several threads above 32,768 values an operation."""
    sizes, multiply = [], torch.Tensor.mul_
    monkeypatch.setattr(torch.Tensor, "mul_", lambda self, other: sizes.append(self.numel()) or multiply(self, other))
    _decoded(States(np.ones(shape, dtype=np.uint8), np.zeros(shape[:-1], dtype=np.int8)))
    assert sum(sizes) == 2 * math.prod(shape)
    assert max(sizes) < 32768


def test_rows_taken_of_states_keep_their_scales():
    stored = encode(_states() * torch.tensor([1.0, 64.0, 1e6]).bfloat16()[:, None, None], "fp8")
    for rows in (slice(1, 3), np.array([2, 0, 2])):
        assert torch.equal(tiny.values(stored[rows]), tiny.values(stored)[rows])
