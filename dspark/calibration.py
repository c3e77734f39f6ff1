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
    paired_bootstrap(before_NK, after_NK, outcome_NK, prompt_N, "ece")

A fit holds for one drafter, draft mode and sampling temperature. A round cut at a stop token counts only where proposed >= k;
behind that its outcome is NaN and its logits are not read.

Shapes: N rounds, K block positions, G temperatures of the grid.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dspark.metrics import NUM_BINS, Floats, ReliabilityBin, auroc, brier, ece, position_columns, reliability

GRID = tuple(float(t) for t in 10.0 ** np.linspace(-1.0, 1.0, 41))  # holds 1.0
TIE = 1e-12  # two ECE this near are equal


def sigmoid(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def survival(logits: ArrayLike, temperatures: ArrayLike = 1.0) -> Floats:
    """a_k of confidence logits [..., K]; without temperatures, what the drafter itself predicts."""
    confidence = sigmoid(np.asarray(logits, dtype=np.float64) / np.asarray(temperatures, dtype=np.float64))
    return np.cumprod(confidence, axis=-1, dtype=np.float64)


@dataclass(frozen=True)
class Calibration:
    """The temperatures, and what they were fitted on. ValueError when a value is outside its rule.

    `to_json` gives the file that SGLang reads; it ignores the keys that are ours (num_bins, grid).
    """

    temperatures_K: tuple[float, ...]
    ece_before_K: tuple[float, ...]  # of the survivals at temperature 1, on the rounds of the fit
    ece_after_K: tuple[float, ...]
    num_rounds: int
    num_bins: int
    grid: tuple[float, ...]

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

    def confidence(self, logits: ArrayLike) -> Floats:
        """c_k = sigmoid(z_k / T_k) of logits [..., K]."""
        return sigmoid(self._checked(logits) / np.asarray(self.temperatures_K))

    def survival(self, logits: ArrayLike) -> Floats:
        """a_k = c_1 ... c_k of logits [..., K]."""
        return survival(self._checked(logits), self.temperatures_K)

    def _checked(self, logits: ArrayLike) -> Floats:
        logits = np.asarray(logits, dtype=np.float64)
        if logits.shape[-1:] != (len(self.temperatures_K),):
            rule = f"the last dimension is the block size {len(self.temperatures_K)} of the fit"
            raise _error("logits.shape", logits.shape, rule, "use the calibration of this drafter")
        return logits

    def to_json(self) -> str:
        values = {"temperatures": self.temperatures_K, "num_samples": self.num_rounds, "ece_before": self.ece_before_K}
        return json.dumps(values | {"ece_after": self.ece_after_K, "num_bins": self.num_bins, "grid": self.grid}, indent=1)

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
        return cls(temperatures, before, after, _integer(found, "num_samples"), _integer(found, "num_bins"), grid)


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
    has its optimum at an end of the grid, and gets it. ValueError when fewer than `min_rounds` were proposed at a position.
    """
    logits_NK = np.asarray(logits_NK, dtype=np.float64)
    if logits_NK.ndim != 2 or logits_NK.shape[0] != np.size(accepted_N) or not logits_NK.size:
        raise _error(
            "logits.shape", logits_NK.shape, f"[N, K] with N = {np.size(accepted_N)} accepted lengths, none 0", "pass a row a round"
        )
    if 1.0 not in grid or not all(0.0 < t < math.inf for t in grid):
        raise _error("grid", list(grid), "temperatures above 0, 1.0 among them, so that a position may stay as it is", "use the default")
    if num_bins < 1:
        raise _error("num_bins", num_bins, "at least 1", "use the default")
    outcome_NK = outcomes(accepted_N, logits_NK.shape[1], proposed_N)
    num_rounds_K = (~np.isnan(outcome_NK)).sum(0)
    if num_rounds_K.min() < max(min_rounds, 1):
        raise _error("rounds", num_rounds_K.tolist(), f"at least {max(min_rounds, 1)} proposed at each position", "trace more prompts")

    nearest_first = sorted(grid, key=lambda t: (round(abs(math.log(t)), 9), t))
    columns = position_columns("logits", logits_NK, outcome_NK)
    before = [ece(*column, num_bins) or 0.0 for column in position_columns("survival", survival(logits_NK), outcome_NK)]
    prefix_N, temperatures, after = np.ones(len(logits_NK)), [], []
    for k, (logit_N, outcome_N) in enumerate(columns):
        is_proposed_N = ~np.isnan(outcome_NK[:, k])
        candidates = [prefix_N[is_proposed_N] * sigmoid(logit_N / t) for t in nearest_first]
        ece_G = np.array([ece(candidate_N, outcome_N, num_bins) for candidate_N in candidates], dtype=np.float64)
        best = int(np.argmax(ece_G <= ece_G.min() + TIE))
        prefix_N[is_proposed_N] = candidates[best]
        temperatures.append(nearest_first[best])
        after.append(float(ece_G[best]))
    return Calibration(tuple(temperatures), tuple(before), tuple(after), len(logits_NK), num_bins, tuple(grid))


@dataclass(frozen=True)
class Quality:
    """How good the survivals of one position are; None without rounds (AUROC: without both outcomes)."""

    num_rounds: int
    num_survivors: int
    ece: float | None
    brier: float | None
    auroc: float | None
    reliability: list[ReliabilityBin]


def quality(survival_NK: ArrayLike, outcome_NK: Floats, num_bins: int = NUM_BINS) -> list[Quality]:
    """Of each position, over the rounds that count there."""
    found = []
    for probability_N, outcome_N in position_columns("survival", survival_NK, outcome_NK):
        measures = ece(probability_N, outcome_N, num_bins), brier(probability_N, outcome_N), auroc(probability_N, outcome_N)
        found.append(Quality(len(outcome_N), int(outcome_N.sum()), *measures, reliability(probability_N, outcome_N, num_bins)))
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
