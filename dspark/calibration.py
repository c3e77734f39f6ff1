"""Sequential Temperature Scaling: one temperature per block position makes predicted survivals true (§3.2.1 of the paper).

The confidence head is overconfident, and errors of c_1 .. c_k multiply up in the survival a_k = c_1 ... c_k, which is what
the scheduler reads. So the fit goes left to right and looks at the survival, not at c_k: for k = 1 .. K

    T_k = argmin over a grid of  ECE( sigmoid(z_1 / T_1) ... sigmoid(z_k / T_k),  y_k ),   y_k = [accepted >= k]

with T_1 .. T_{k-1} kept. The order of c_k within a position stays; that of survivals need not for k > 1. Only T_k is free at
position k: its ECE is never above that of T_k = 1 after the same T_1 .. T_{k-1}, but may be above that of no calibration at all.

    outcome_NK = outcomes(accepted_N, block_size, proposed_N)
    calibration = fit(logits_NK, accepted_N, proposed_N=proposed_N)    # rounds of the calibrate split
    before_NK, after_NK = survival(logits_NK), calibration.survival(logits_NK)    # rounds that were not used to fit
    quality(after_NK, outcome_NK)
    before_SK, after_SK = (resample("ece", x, outcome_NK, prompt_N) for x in (before_NK, after_NK))
    estimates(after_SK - before_SK)    # with intervals (dspark/metrics.py)

A position with fewer than `min_rounds` rounds to fit keeps T = 1 and is named in `fallback_positions`. A fit holds for one drafter,
draft mode and sampling temperature. A round cut at a stop token counts only where proposed >= k; behind that its outcome is NaN and
its logits are not read.

Shapes: N rounds, K block positions, G temperatures of the grid.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from dspark.metrics import (
    NUM_BINS,
    Floats,
    ReliabilityBin,
    auroc,
    brier,
    ece,
    ece_floor,
    ece_mass,
    position_columns,
    reliability,
)

GRID = tuple(float(t) for t in 10.0 ** np.linspace(-1.0, 1.0, 41))  # holds 1.0
TIE = 1e-12  # two ECE this near are equal
BLOCK_ROUNDS = 8192  # of a fit at once, for all temperatures: they stay in a core's cache


class Confidence(Protocol):
    """What turns confidence logits [..., K] into probabilities; NaN logits stay NaN."""

    @property
    def fallback_positions(self) -> tuple[int, ...]:
        """Positions, from 1, that had too few rounds to fit and stay as the drafter predicts them."""

    def confidence(self, logits: ArrayLike) -> Floats:
        """c_k of each position, in [0, 1]."""

    def survival(self, logits: ArrayLike) -> Floats:
        """a_k = c_1 ... c_k, which never rises with k."""


def sigmoid(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # e^-x = inf gives 0
        return 1.0 / (1.0 + np.exp(-x))


def survival(logits: ArrayLike, temperatures: ArrayLike = 1.0) -> Floats:
    """a_k of confidence logits [..., K]; without temperatures, what the drafter itself predicts."""
    confidence = sigmoid(np.asarray(logits, dtype=np.float64) / np.asarray(temperatures, dtype=np.float64))
    return np.cumprod(confidence, axis=-1, dtype=np.float64)


@dataclass(frozen=True)
class Calibration:
    """The temperatures, and what they were fitted on. ValueError when a value is outside its rule.

    `to_json` gives the file that SGLang reads; it ignores the keys that are ours (num_bins, grid, fallback_positions).
    """

    temperatures_K: tuple[float, ...]
    ece_before_K: tuple[float, ...]  # of the survivals at temperature 1, on the rounds of the fit
    ece_after_K: tuple[float, ...]
    num_rounds: int
    num_bins: int
    grid: tuple[float, ...]
    fallback_positions: tuple[int, ...] = ()  # from 1: too few rounds to fit, T = 1

    def __post_init__(self) -> None:
        for name, values in (("temperatures", self.temperatures_K), ("grid", self.grid)):
            if not values or not all(0.0 < t < math.inf for t in values):
                raise _error(name, list(values), "at least one number, all above 0 and finite", "fit again")
        for name, values in (("ece_before", self.ece_before_K), ("ece_after", self.ece_after_K)):
            if len(values) != len(self.temperatures_K) or not all(0.0 <= x <= 1.0 for x in values):
                raise _error(name, list(values), f"a fraction for each of the {len(self.temperatures_K)} temperatures", "fit again")
        for name, number in (("num_samples", self.num_rounds), ("num_bins", self.num_bins)):
            if number < 1:
                raise _error(name, number, "at least 1", "fit again")
        for k in self.fallback_positions:
            if not 1 <= k <= len(self.temperatures_K) or self.temperatures_K[k - 1] != 1.0:
                raise _error(
                    "fallback_positions", list(self.fallback_positions), "positions of the block whose temperature is 1", "fit again"
                )

    def confidence(self, logits: ArrayLike) -> Floats:
        """c_k = sigmoid(z_k / T_k) of logits [..., K]."""
        return sigmoid(checked_logits(logits, len(self.temperatures_K)) / np.asarray(self.temperatures_K))

    def survival(self, logits: ArrayLike) -> Floats:
        """a_k = c_1 ... c_k of logits [..., K]."""
        return survival(checked_logits(logits, len(self.temperatures_K)), self.temperatures_K)

    def to_json(self) -> str:
        values = {"temperatures": self.temperatures_K, "num_samples": self.num_rounds, "ece_before": self.ece_before_K}
        ours = {"num_bins": self.num_bins, "grid": self.grid, "fallback_positions": self.fallback_positions}
        return json.dumps(values | {"ece_after": self.ece_after_K} | ours, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, block_size: int) -> "Calibration":
        """Reads what `to_json` wrote; more keys (provenance) may stand beside its own. ValueError when K is not block_size."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise _error("calibration", text[:40], f"a JSON object ({error})", "run the step calibrate again") from error
        if not isinstance(found, dict):
            raise _error("calibration", found, "a JSON object", "run the step calibrate again")
        temperatures, before, after, grid = (_numbers(found, name) for name in ("temperatures", "ece_before", "ece_after", "grid"))
        if len(temperatures) != block_size:
            rule = f"one temperature for each of the {block_size} drafted positions"
            raise _error("temperatures", list(temperatures), rule, "use the calibration of this drafter")
        fallback = tuple(int(k) for k in _numbers(found, "fallback_positions"))
        return cls(temperatures, before, after, _integer(found, "num_samples"), _integer(found, "num_bins"), grid, fallback)


def checked_logits(logits: ArrayLike, block_size: int) -> Floats:
    """As fp64; ValueError unless they are [..., block_size]."""
    logits = np.asarray(logits, dtype=np.float64)
    if logits.shape[-1:] != (block_size,):
        rule = f"the last dimension is the block size {block_size} of the fit"
        raise _error("logits.shape", logits.shape, rule, "use the calibration of this drafter")
    return logits


def pad(rows: Sequence[Sequence[float]], block_size: int) -> Floats:
    """[N, K] of rows that end where their round was cut, NaN behind that: the confidence logits of stored rounds."""
    padded_NK = np.full((len(rows), block_size), np.nan)
    for n, row in enumerate(rows):
        if len(row) > block_size:
            raise _error(f"rows[{n}]", f"{len(row)} values", f"at most the block size {block_size}", "pass rounds of one drafter")
        padded_NK[n, : len(row)] = row
    return padded_NK


def outcomes(accepted_N: ArrayLike, block_size: int, proposed_N: ArrayLike | None = None) -> Floats:
    """y [N, K]: 1.0 where accepted >= k, else 0.0, and NaN where proposed < k. Without `proposed`, all K were."""
    accepted_N = np.asarray(accepted_N)
    proposed_N = np.full(accepted_N.shape, block_size) if proposed_N is None else np.asarray(proposed_N)
    if accepted_N.ndim != 1 or accepted_N.shape != proposed_N.shape:
        raise _error(
            "accepted, proposed", f"shapes {accepted_N.shape}, {proposed_N.shape}", "one length [N]", "pass a column of each round"
        )
    for name, lengths_N, most_N in (("proposed", proposed_N, np.full(len(proposed_N), block_size)), ("accepted", accepted_N, proposed_N)):
        is_wrong_N = ~((lengths_N >= 0) & (lengths_N <= most_N) & (lengths_N == np.floor(lengths_N)))
        if is_wrong_N.any():
            n = int(np.argmax(is_wrong_N))
            rule = f"an integer in 0 .. {most_N[n]} (accepted <= proposed <= block size)"
            raise _error(f"{name}[{n}]", lengths_N[n], rule, "pass rounds of one drafter, without the bonus token")
    k = np.arange(1, block_size + 1)
    return np.where(proposed_N[:, None] >= k, (accepted_N[:, None] >= k).astype(np.float64), np.nan)


def fit(
    logits_NK: ArrayLike,
    accepted_N: ArrayLike,
    *,
    proposed_N: ArrayLike | None = None,
    num_bins: int = NUM_BINS,
    grid: Sequence[float] = GRID,
    min_rounds: int = 1,
) -> Calibration:
    """Sequential Temperature Scaling of confidence logits against accepted lengths (the bonus token not counted).

    Ties go to the temperature nearest 1, then to the lower one (SGLang: to the lowest). A position with a single outcome
    has its optimum at an end of the grid, and gets it; one proposed in fewer than `min_rounds` rounds is not fitted.
    """
    logits_NK, outcome_NK = checked_rounds(logits_NK, accepted_N, proposed_N)
    nearest_first = nearest_to_one_first(grid)
    if num_bins < 1:
        raise _error("num_bins", num_bins, "at least 1", "use the default")
    columns = position_columns("logits", logits_NK, outcome_NK)
    before = [ece(*column, num_bins) or 0.0 for column in position_columns("survival", survival(logits_NK), outcome_NK)]
    prefix_N, temperatures, after, fallback = np.ones(len(logits_NK)), [], [], []
    for k, (logit_N, outcome_N) in enumerate(columns):
        is_proposed_N = ~np.isnan(outcome_NK[:, k])
        has_enough = len(outcome_N) >= max(min_rounds, 1)
        candidates = nearest_first if has_enough else [1.0]
        ece_G = _ece_of_each(candidates, prefix_N[is_proposed_N], logit_N, outcome_N, num_bins)
        best = int(np.argmax(ece_G <= ece_G.min() + TIE))
        prefix_N[is_proposed_N] *= sigmoid(logit_N / candidates[best])
        temperatures.append(candidates[best])
        after.append(float(ece_G[best]))
        fallback += [] if has_enough else [k + 1]
    return Calibration(tuple(temperatures), tuple(before), tuple(after), len(logits_NK), num_bins, tuple(grid), tuple(fallback))


def checked_rounds(logits_NK: ArrayLike, accepted_N: ArrayLike, proposed_N: ArrayLike | None) -> tuple[Floats, Floats]:
    """Logits and outcomes [N, K] of the rounds of a fit; ValueError when there are none, or lengths and logits do not belong together."""
    logits_NK = np.asarray(logits_NK, dtype=np.float64)
    if logits_NK.ndim != 2 or logits_NK.shape[0] != np.size(accepted_N) or not logits_NK.size:
        raise _error(
            "logits.shape", logits_NK.shape, f"[N, K] with N = {np.size(accepted_N)} accepted lengths, none 0", "pass a row a round"
        )
    return logits_NK, outcomes(accepted_N, logits_NK.shape[1], proposed_N)


def nearest_to_one_first(grid: Sequence[float]) -> list[float]:
    """The order in which a tie is decided."""
    if 1.0 not in grid or not all(0.0 < t < math.inf for t in grid):
        raise _error("grid", list(grid), "temperatures above 0, 1.0 among them, so that a position may stay as it is", "use the default")
    return sorted(grid, key=lambda t: (round(abs(math.log(t)), 9), t))


def _ece_of_each(temperatures: Sequence[float], prefix_N: Floats, logit_N: Floats, outcome_N: Floats, num_bins: int) -> Floats:
    """ECE [G] of prefix * sigmoid(logit / T) for each temperature T; 0 without rounds."""
    gap_GB = np.zeros((len(temperatures), num_bins + 1))  # `ece` without its checks; a survival of 1 is in the bin beyond the last
    for start in range(0, len(logit_N), BLOCK_ROUNDS):
        prefix, logit, outcome = (x[start : start + BLOCK_ROUNDS] for x in (prefix_N, logit_N, outcome_N))
        for gap_B, temperature in zip(gap_GB, temperatures, strict=True):
            with np.errstate(over="ignore"):
                candidate = prefix / (1.0 + np.exp(logit / -temperature))
            gap_B += np.bincount((candidate * num_bins).astype(np.intp), candidate - outcome, minlength=num_bins + 1)
    gap_GB[:, num_bins - 1] += gap_GB[:, num_bins]
    gap_GB = gap_GB[:, :num_bins]
    return np.abs(gap_GB).sum(1) / max(len(logit_N), 1)


@dataclass(frozen=True)
class Quality:
    """How good the survivals of one position are; None without rounds (AUROC: without both outcomes)."""

    num_rounds: int
    num_survivors: int
    ece: float | None
    ece_mass: float | None
    brier: float | None
    auroc: float | None
    ece_floor: float | None  # the `ece` that these predictions would have if they were true
    reliability: list[ReliabilityBin]


def quality(survival_NK: ArrayLike, outcome_NK: Floats, num_bins: int = NUM_BINS) -> list[Quality]:
    """Of each position, over the rounds that count there."""
    found = []
    for probability_N, outcome_N in position_columns("survival", survival_NK, outcome_NK):
        measures = {
            "ece": ece(probability_N, outcome_N, num_bins),
            "ece_mass": ece_mass(probability_N, outcome_N, num_bins),
            "brier": brier(probability_N, outcome_N),
            "auroc": auroc(probability_N, outcome_N),
            "ece_floor": ece_floor(probability_N, num_bins),
        }
        bins = reliability(probability_N, outcome_N, num_bins)
        found.append(Quality(len(outcome_N), int(outcome_N.sum()), reliability=bins, **measures))
    return found


def _numbers(found: dict[str, Any], name: str) -> tuple[float, ...]:
    values = found.get(name)
    if not isinstance(values, list) or not all(type(x) in (int, float) for x in values):
        raise _error(name, values, "a list of numbers", "run the step calibrate again")
    return tuple(float(x) for x in values)


def _integer(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    if type(value) is not int:
        raise _error(name, value, "an integer", "run the step calibrate again")
    return value


def _error(field: str, value: Any, rule: str, fix: str) -> ValueError:
    return ValueError(f"{field}: {value}: {rule}. Fix: {fix}")
