"""How hidden states are stored: bf16 bit for bit, or fp8 with a power-of-two scale for each state.

fp8 is e4m3 (1 sign, 4 exponent, 3 mantissa bits, no infinity, largest value 448). A state x of D values becomes codes
x * 2^-e rounded to e4m3 and one int8 exponent e, the smallest with max|x| * 2^-e < 448. Scaling by a power of two is exact, and so
is decoding (bf16 has more of both kinds of bits), so the one error is the rounding of the code: at most 1/16 of a value.

    stored = encode(states, "fp8")        # D + 1 bytes a state instead of 2 D
    decode(stored, out)                   # bf16

numpy has neither type: bf16 travels as uint16, e4m3 as uint8. Shapes: "..." any leading shape, D width.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

StateDtype = Literal["bf16", "fp8"]
CODE_DTYPES: dict[str, type] = {"bf16": np.uint16, "fp8": np.uint8}
FP8_MAX = 448.0
SINGLE_THREAD_VALUES = 32_000  # torch shares element-wise work out among threads above 32,768 values


@dataclass
class States:
    """`codes` [..., D]; `exponents` [...] int8 with fp8, else None."""

    codes: np.ndarray
    exponents: np.ndarray | None = None

    def __getitem__(self, rows: slice | np.ndarray) -> "States":
        return States(self.codes[rows], None if self.exponents is None else self.exponents[rows])

    def problem(self) -> str | None:
        """What no state of a working target has, in words: a NaN, or a state (layer, position) of zeros."""
        # Without its sign a code that is not finite is at least this large: bf16 with all 8 exponent bits set, e4m3 with all 7 bits.
        not_finite, magnitude = (0x7F80, 0x7FFF) if self.codes.dtype == np.uint16 else (0x7F, 0x7F)
        largest = (self.codes & self.codes.dtype.type(magnitude)).max(-1)
        if np.any(largest >= not_finite):
            return "holds a NaN or an infinity"
        is_zero = largest == 0
        if is_zero.any():  # a layer that was never captured, or the tail of a buffer that was not filled
            first, count = np.argwhere(is_zero)[0].tolist(), int(is_zero.sum())
            return f"is all zero at {first}, at {count} places in all"
        return None


def encode(states: Tensor, dtype: StateDtype) -> States:
    """bf16 states [..., D] as they are stored."""
    states = states.contiguous()
    if dtype == "bf16":
        return States(states.view(torch.uint16).numpy())
    wide = states.float()
    largest = wide.abs().amax(-1)
    if not largest.isfinite().all():
        wide = wide.where(wide.isfinite(), torch.nan)  # torch's conversion saturates: infinity would become 448
    # frexp: largest / 448 = m * 2^e with m < 1. A state that is not finite keeps its own scale, and its NaN.
    exponents = torch.frexp(largest / FP8_MAX).exponent.where(largest.isfinite(), 0).clamp(-126, 126)
    codes = torch.ldexp(wide, -exponents[..., None]).to(torch.float8_e4m3fn)
    return States(codes.view(torch.uint8).numpy(), exponents.to(torch.int8).numpy())


def decode(states: States, out: Tensor) -> None:
    """Writes the states into bf16 `out` [..., D], in this thread alone: data are read ahead while a model computes."""
    bits = out.view(torch.int16).numpy()
    if states.exponents is None:
        bits[...] = states.codes.view(np.int16)
        return
    # Sign, exponent and mantissa of e4m3 where bf16 has them: the value, but for the 120 between the two exponent biases.
    # Much faster on a CPU than torch's own conversion, and right for subnormal codes too.
    np.left_shift(states.codes.view(np.int8), 4, out=bits, dtype=np.int16)
    np.bitwise_and(bits, ~0x7800, out=bits)
    scales = np.exp2(states.exponents.astype(np.float32)).reshape(-1)
    values, rows = out.view(-1, out.shape[-1]), max(SINGLE_THREAD_VALUES // out.shape[-1], 1)
    for start in range(0, len(values), rows):
        values[start : start + rows].mul_(2.0**120).mul_(torch.from_numpy(scales[start : start + rows]).bfloat16()[:, None])
