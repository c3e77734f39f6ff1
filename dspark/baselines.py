"""What Sequential Temperature Scaling is measured against: the head as it is, one temperature, Platt scaling, isotonic regression.

    raw        c_k = sigmoid(z_k)
    global     c_k = sigmoid(z_k / T), T of the grid with the least ECE of the survivals, mean over positions
    platt      c_k = sigmoid(slope_k z_k + intercept_k), the maximum of the likelihood
    isotonic   c_k = f_k(z_k), the rising function with the least squared error
    sts        c_k = sigmoid(z_k / T_k) (dspark/calibration.py)

Platt and isotonic fit c_k as what it stands for, the probability that draft k is accepted after the k - 1 before it: on the
rounds with accepted >= k - 1, outcome [accepted >= k]. The product of true c_k is a true survival, but nothing they minimise
reads the survival, so that errors of c_1 .. c_k multiply up.

    methods = fit_all(logits_NK, accepted_N, proposed_N)          # name -> Confidence
    methods["platt"].survival(other_logits_NK)
    cross_fitted(logits_NK, accepted_N, proposed_N, prompt_N)     # name -> survivals [N, K], each prompt's by fits without it

Shapes: N rounds, K block positions, M distinct logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dspark.calibration import (
    GRID,
    TIE,
    Confidence,
    checked_logits,
    checked_rounds,
    fit,
    nearest_to_one_first,
    sigmoid,
    survival,
)
from dspark.metrics import NUM_BINS, Floats, ece, position_columns

METHODS = ("raw", "global", "platt", "isotonic", "sts")
RIDGE = 1e-2  # of Platt's slope and intercept towards 1 and 0, the raw head: finite where outcomes are separable
NEWTON_STEPS = 100
NEWTON_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Linear:
    """c_k = sigmoid(slope_k z_k + intercept_k)."""

    slope_K: tuple[float, ...]
    intercept_K: tuple[float, ...]
    fallback_positions: tuple[int, ...] = ()

    def confidence(self, logits: ArrayLike) -> Floats:
        return sigmoid(checked_logits(logits, len(self.slope_K)) * np.asarray(self.slope_K) + np.asarray(self.intercept_K))

    def survival(self, logits: ArrayLike) -> Floats:
        return np.cumprod(self.confidence(logits), axis=-1, dtype=np.float64)


@dataclass(frozen=True)
class Curve:
    """Rising: straight lines between the knots, flat beyond them."""

    logit_M: tuple[float, ...]
    probability_M: tuple[float, ...]


@dataclass(frozen=True)
class Isotonic:
    """c_k is read from the curve of position k; None: sigmoid(z_k)."""

    curve_K: tuple[Curve | None, ...]

    @property
    def fallback_positions(self) -> tuple[int, ...]:
        return tuple(k for k, curve in enumerate(self.curve_K, 1) if curve is None)

    def confidence(self, logits: ArrayLike) -> Floats:
        logits = checked_logits(logits, len(self.curve_K))
        columns = [
            sigmoid(logits[..., k]) if curve is None else np.interp(logits[..., k], curve.logit_M, curve.probability_M)
            for k, curve in enumerate(self.curve_K)
        ]
        return np.stack(columns, axis=-1)

    def survival(self, logits: ArrayLike) -> Floats:
        return np.cumprod(self.confidence(logits), axis=-1, dtype=np.float64)


def fit_all(
    logits_NK: ArrayLike,
    accepted_N: ArrayLike,
    proposed_N: ArrayLike | None = None,
    *,
    num_bins: int = NUM_BINS,
    grid: Sequence[float] = GRID,
    min_rounds: int = 1,
) -> dict[str, Confidence]:
    """Every method of METHODS fitted on the same rounds; arguments, errors and the rule of `min_rounds` are those of `calibration.fit`."""
    sts = fit(logits_NK, accepted_N, proposed_N=proposed_N, num_bins=num_bins, grid=grid, min_rounds=min_rounds)
    logits_NK, outcome_NK = checked_rounds(logits_NK, accepted_N, proposed_N)
    block_size = logits_NK.shape[1]
    # Positions without enough rounds for STS are fitted by nobody; a position may also be proposed often and never reached.
    has_enough_K = [k not in sts.fallback_positions for k in range(1, block_size + 1)]
    tries = [
        columns if has_enough and len(columns[0]) else None
        for columns, has_enough in zip(_tries(logits_NK, outcome_NK), has_enough_K, strict=True)
    ]
    methods = (
        Linear((1.0,) * block_size, (0.0,) * block_size),
        _fit_global(logits_NK, outcome_NK, num_bins, grid, has_enough_K),
        _fit_platt(tries),
        Isotonic(tuple(fit_isotonic(*columns) if columns else None for columns in tries)),
        sts,
    )
    return dict(zip(METHODS, methods, strict=True))


def cross_fitted(
    logits_NK: ArrayLike,
    accepted_N: ArrayLike,
    proposed_N: ArrayLike,
    prompt_N: ArrayLike,
    *,
    num_folds: int = 5,
    num_bins: int = NUM_BINS,
    min_rounds: int = 1,
    seed: int = 0,
) -> dict[str, Floats]:
    """Survivals [N, K] of every method: prompts are dealt into folds, and a fold's come from the fit on the others."""
    logits_NK, accepted_N, proposed_N = np.asarray(logits_NK, dtype=np.float64), np.asarray(accepted_N), np.asarray(proposed_N)
    prompt_index_N = np.unique(np.asarray(prompt_N), return_inverse=True)[1]
    num_prompts = int(prompt_index_N.max(initial=-1)) + 1
    if not 2 <= num_folds <= num_prompts:
        raise ValueError(f"num_folds: {num_folds}: from 2 to the number of prompts, {num_prompts}. Fix: fewer folds, or more prompts")
    fold_N = (np.random.default_rng(seed).permutation(num_prompts) % num_folds)[prompt_index_N]
    found = {name: np.full(logits_NK.shape, np.nan) for name in METHODS}
    for fold in range(num_folds):
        here = fold_N == fold
        fitted = fit_all(logits_NK[~here], accepted_N[~here], proposed_N[~here], num_bins=num_bins, min_rounds=min_rounds)
        for name, method in fitted.items():
            found[name][here] = method.survival(logits_NK[here])
    return found


def _tries(logits_NK: Floats, outcome_NK: Floats) -> list[tuple[Floats, Floats]]:
    """(logit, accepted) at each position, of the rounds that accepted every draft before it."""
    is_tried_NK = np.hstack([np.ones((len(outcome_NK), 1), dtype=bool), outcome_NK[:, :-1] == 1.0])
    return position_columns("logits", logits_NK, np.where(is_tried_NK, outcome_NK, np.nan))


def _fit_global(logits_NK: Floats, outcome_NK: Floats, num_bins: int, grid: Sequence[float], has_enough_K: Sequence[bool]) -> Linear:
    """One temperature for all positions; ties as in `calibration.fit`. A position with too few rounds has no say in it."""
    block_size = logits_NK.shape[1]
    temperatures = nearest_to_one_first(grid)
    means = []
    for temperature in temperatures:
        columns = position_columns("survival", survival(logits_NK, temperature), outcome_NK)
        eces = [ece(*column, num_bins) or 0.0 for column, has_enough in zip(columns, has_enough_K, strict=True) if has_enough]
        means.append(sum(eces) / max(len(eces), 1))
    mean_G = np.array(means)
    temperature = temperatures[int(np.argmax(mean_G <= mean_G.min() + TIE))]
    fallback = () if any(has_enough_K) else tuple(range(1, block_size + 1))
    return Linear((1.0 / temperature,) * block_size, (0.0,) * block_size, fallback)


def _fit_platt(tries: Sequence[tuple[Floats, Floats] | None]) -> Linear:
    fits = [fit_platt(*columns) if columns else (1.0, 0.0) for columns in tries]
    fallback = tuple(k for k, columns in enumerate(tries, 1) if columns is None)
    return Linear(tuple(slope for slope, _ in fits), tuple(intercept for _, intercept in fits), fallback)


def fit_platt(logit_N: Floats, outcome_N: Floats, ridge: float = RIDGE) -> tuple[float, float]:
    """(slope, intercept) with the least  -log likelihood + ridge / 2 ((slope - 1)^2 + intercept^2),  by damped Newton steps."""
    raw = np.array([1.0, 0.0])

    def loss(weights: Floats) -> float:
        score_N = weights[0] * logit_N + weights[1]
        # -log sigmoid(x) = log(1 + e^-x), and 1 - sigmoid(x) = sigmoid(-x)
        return float(np.logaddexp(0.0, np.where(outcome_N == 1.0, -score_N, score_N)).sum() + ridge / 2 * np.square(weights - raw).sum())

    weights, value = raw, loss(raw)
    for _ in range(NEWTON_STEPS):
        probability_N = sigmoid(weights[0] * logit_N + weights[1])
        error_N, variance_N = probability_N - outcome_N, probability_N * (1.0 - probability_N)
        gradient = np.array([error_N @ logit_N, error_N.sum()]) + ridge * (weights - raw)
        mixed = variance_N @ logit_N
        hessian = np.array([[variance_N @ np.square(logit_N), mixed], [mixed, variance_N.sum()]]) + ridge * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        if gradient @ step <= NEWTON_TOLERANCE:
            break
        size = 1.0
        while (lower := loss(weights - size * step)) > value - 1e-4 * size * (gradient @ step) and size > 1e-10:
            size /= 2.0
        weights, value = weights - size * step, lower
    return float(weights[0]), float(weights[1])


def fit_isotonic(logit_N: Floats, outcome_N: Floats) -> Curve:
    """Pool adjacent violators: the rising function of the logit with the least squared error; knots at both ends of each pool.

    Pooling neighbours that do not rise leads to the same pools in any order, so that a pass pools every falling run at once.
    """
    logit_M, distinct_N = np.unique(logit_N, return_inverse=True)
    # Sums of 0 and 1 and counts are exact in fp64, and so is their comparison crosswise.
    count, total = np.bincount(distinct_N).astype(np.float64), np.bincount(distinct_N, outcome_N)
    first = np.arange(len(logit_M))
    while True:
        does_rise = total[:-1] * count[1:] < total[1:] * count[:-1]
        if does_rise.all():
            break
        starts = np.flatnonzero(np.concatenate([[True], does_rise]))
        count, total, first = np.add.reduceat(count, starts), np.add.reduceat(total, starts), first[starts]
    last = np.append(first[1:], len(logit_M)) - 1
    knots = np.stack([first, last], axis=1)
    is_kept = np.stack([np.ones(len(first), dtype=bool), last > first], axis=1)
    probability = np.repeat((total / count)[:, None], 2, axis=1)
    return Curve(tuple(logit_M[knots[is_kept]].tolist()), tuple(probability[is_kept].tolist()))
