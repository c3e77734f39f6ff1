"""Acceptance statistics over decoding rounds (§2 of the paper, names as in the field), and how good predicted survivals are.

    accepted length         mean over rounds of accepted + 1, the bonus or correction included; a round that ended by an
                            accepted stop token emits none
    prefix survival @k      rounds with accepted >= k / rounds with proposed >= k
    conditional acceptance  rounds with accepted >= k / rounds with proposed >= k and accepted >= k-1
    acceptance rate         sum accepted / sum proposed, without and with the bonus tokens

Everything pools rounds (never a mean of means) and carries its denominators; a ratio without trials is None.

A prediction is a probability, here the survival a_k, beside its outcome, 1.0 or 0.0 (§3.2.1):

    reliability             bins of equal width on [0, 1]: mean prediction and mean outcome of each
    ECE                     mean over predictions of the |mean prediction - mean outcome| of their bin
    ECE, equal mass         the same with bins of equally many predictions
    ECE floor               the ECE to be expected of predictions that are true, from chance alone
    Brier                   mean of (prediction - outcome)^2
    AUROC                   chance that an outcome 1 has the higher prediction than an outcome 0, a tie counting one half

Shapes: N rounds (or predictions), K block positions, P prompts, R trainings, S resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

METRICS = ("ece", "ece_mass", "brier", "auroc")
NUM_BINS = 15  # of SGLang's fitter too; DeepSpec's ECE has 20


@dataclass(frozen=True)
class Acceptance:
    accepted_length: float | None
    prefix_survival: list[float | None]
    prefix_survival_denominator: list[int]
    conditional_acceptance: list[float | None]
    conditional_denominator: list[int]
    acceptance_rate: float | None
    acceptance_rate_with_bonus: float | None
    num_rounds: int


def acceptance(proposed: Sequence[int], accepted: Sequence[int], ended_by_stop: Sequence[bool], block_size: int) -> Acceptance:
    """Statistics of rounds, given as columns of equal length."""
    proposed_N, accepted_N = np.asarray(proposed, dtype=np.int64), np.asarray(accepted, dtype=np.int64)
    bonus_N = ~np.asarray(ended_by_stop, dtype=bool)
    k = np.arange(1, block_size + 1)[:, None]
    is_proposed_KN, is_survivor_KN = proposed_N >= k, (accepted_N >= k) & (proposed_N >= k)
    is_tried_KN = is_proposed_KN & (accepted_N >= k - 1)
    num_proposed, num_accepted, num_bonus = int(proposed_N.sum()), int(accepted_N.sum()), int(bonus_N.sum())
    return Acceptance(
        accepted_length=_ratio(num_accepted + num_bonus, len(proposed_N)),
        prefix_survival=[_ratio(a.sum(), b.sum()) for a, b in zip(is_survivor_KN, is_proposed_KN, strict=True)],
        prefix_survival_denominator=is_proposed_KN.sum(1).tolist(),
        conditional_acceptance=[_ratio(a.sum(), b.sum()) for a, b in zip(is_survivor_KN, is_tried_KN, strict=True)],
        conditional_denominator=is_tried_KN.sum(1).tolist(),
        acceptance_rate=_ratio(num_accepted, num_proposed),
        acceptance_rate_with_bonus=_ratio(num_accepted + num_bonus, num_proposed + len(proposed_N)),
        num_rounds=len(proposed_N),
    )


def truncate_by_threshold(
    accepted: Sequence[int], ended_by_stop: Sequence[bool], confidence_NK: ArrayLike, threshold: float
) -> tuple[list[int], list[int], list[bool]]:
    """The same rounds had only the longest prefix with every conditional confidence >= threshold been verified.

    Returns (verified, accepted, ended_by_stop); a truncated round that no longer reaches its stop token regains its bonus.
    Confidences are NaN behind the end of their round.
    """
    verified_N = np.logical_and.accumulate(np.asarray(confidence_NK, dtype=np.float64) >= threshold, axis=1).sum(1)
    accepted_N = np.asarray(accepted, dtype=np.int64)
    is_stopped_N = np.asarray(ended_by_stop, dtype=bool) & (verified_N >= accepted_N)
    return verified_N.tolist(), np.minimum(accepted_N, verified_N).tolist(), is_stopped_N.tolist()


@dataclass(frozen=True)
class ThresholdPoint:
    """`verified_tokens` and `rejected_tokens`: drafted ones, a round."""

    threshold: float
    verified_tokens: float | None
    rejected_tokens: float | None
    accepted_length: float | None
    acceptance_rate: float | None


def threshold_sweep(
    accepted: Sequence[int], ended_by_stop: Sequence[bool], confidence_NK: ArrayLike, thresholds: Sequence[float]
) -> list[ThresholdPoint]:
    """Each round of one pass that verified whole blocks, cut by `truncate_by_threshold`.

    An estimate for the anchors that this pass visited: decoding with the threshold goes on elsewhere after a round that it
    cuts, where a round may accept more or less. At temperature 0 the text is the same and only the anchors are others.
    """
    points = []
    for threshold in thresholds:
        verified, kept, stops = truncate_by_threshold(accepted, ended_by_stop, confidence_NK, threshold)
        found = acceptance(verified, kept, stops, 0)
        num_verified = sum(verified)
        each = (_ratio(num_verified, len(verified)), _ratio(num_verified - sum(kept), len(verified)))
        points.append(ThresholdPoint(threshold, *each, found.accepted_length, found.acceptance_rate))
    return points


@dataclass(frozen=True)
class PooledLength:
    """Tokens emitted / rounds, with its 95 % bootstrap interval over prompts; None without rounds."""

    accepted_length: float | None
    accepted_length_interval: tuple[float, float] | None
    num_rounds: int
    num_prompts: int


def pooled_length(emitted_N: ArrayLike, prompt_N: ArrayLike) -> PooledLength:
    """`emitted`: tokens of each round, its bonus or correction included; `prompt`: what it belongs to."""
    emitted_N = np.asarray(emitted_N, dtype=np.float64)
    if not len(emitted_N):
        return PooledLength(None, None, 0, 0)
    prompt_index_N = np.unique(np.asarray(prompt_N), return_inverse=True)[1]
    tokens_P, rounds_P = np.bincount(prompt_index_N, emitted_N), np.bincount(prompt_index_N)
    interval = bootstrap_interval(tokens_P.tolist(), rounds_P.tolist())
    return PooledLength(_ratio(tokens_P.sum(), rounds_P.sum()), interval, len(emitted_N), len(tokens_P))


@dataclass(frozen=True)
class ContextBucket:
    """Rounds whose anchor's position is in [from, below); `below` None: no limit."""

    from_tokens: int
    below_tokens: int | None
    length: PooledLength


def by_context_length(context_length_N: ArrayLike, emitted_N: ArrayLike, prompt_N: ArrayLike, edges: Sequence[int]) -> list[ContextBucket]:
    """Accepted length of the rounds in each bucket, empty ones too. `edges`: ascending, the first of them 0."""
    context_length_N, emitted_N, prompt_N = (np.asarray(x) for x in (context_length_N, emitted_N, prompt_N))
    index_N = np.searchsorted(np.asarray(edges), context_length_N, side="right") - 1
    if (index_N < 0).any():
        raise ValueError(f"context_edges_tokens: {list(edges)} leaves out a context of {context_length_N.min()}. Fix: begin with 0")
    limits = zip(edges, [*edges[1:], None], strict=True)
    return [ContextBucket(*limit, pooled_length(emitted_N[index_N == i], prompt_N[index_N == i])) for i, limit in enumerate(limits)]


def bootstrap_interval(
    num_tokens: Sequence[float], num_rounds: Sequence[float], seed: int = 0, num_resamples: int = 1000
) -> tuple[float, float]:
    """95 % percentile interval of sum(tokens) / sum(rounds), resampling prompts (rounds of one prompt are not independent)."""
    tokens_P, rounds_P = np.asarray(num_tokens, dtype=np.float64), np.asarray(num_rounds, dtype=np.float64)
    index = np.random.default_rng(seed).integers(0, len(tokens_P), size=(num_resamples, len(tokens_P)))
    return _percentiles(tokens_P[index].sum(1) / rounds_P[index].sum(1))


def bootstrap_difference(
    ours: tuple[ArrayLike, ArrayLike], theirs: tuple[ArrayLike, ArrayLike], seed: int = 0, num_resamples: int = 1000
) -> tuple[float, float]:
    """95 % percentile interval of our sum(tokens) / sum(rounds) minus theirs, from (tokens [R, P], rounds [R, P]) of R trainings
    each on the same P prompts. A resample draws prompts, the same for both, and trainings of each."""
    generator, ratios = np.random.default_rng(seed), []
    num_prompts = np.shape(ours[0])[1]
    prompt_SP = generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), num_resamples)
    for tokens_RP, rounds_RP in (ours, theirs):
        num_trainings = len(np.asarray(tokens_RP))
        training_SR = generator.multinomial(num_trainings, np.full(num_trainings, 1 / num_trainings), num_resamples)
        tokens_S, rounds_S = (np.einsum("sr,rp,sp->s", training_SR, np.asarray(x), prompt_SP) for x in (tokens_RP, rounds_RP))
        ratios.append(tokens_S / rounds_S)
    return _percentiles(ratios[0] - ratios[1])


def _percentiles(values_S: Floats) -> tuple[float, float]:
    low, high = np.percentile(values_S, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class ReliabilityBin:
    bin: int  # 0-based
    count: int
    mean_probability: float
    mean_outcome: float


def bin_index(probability_N: ArrayLike, num_bins: int) -> Ints:
    """The bin of each probability: an edge belongs to the bin above it, and 1 to the last bin."""
    probability_N = np.asarray(probability_N, dtype=np.float64)
    if not ((probability_N >= 0.0) & (probability_N <= 1.0)).all():
        raise ValueError(
            f"probability: {probability_N.min()} .. {probability_N.max()} leaves [0, 1]. Fix: pass survivals, not confidence logits"
        )
    return np.minimum((probability_N * num_bins).astype(np.intp), num_bins - 1)


def reliability(probability_N: ArrayLike, outcome_N: ArrayLike, num_bins: int = NUM_BINS) -> list[ReliabilityBin]:
    """The bins that are not empty."""
    index_N = bin_index(probability_N, num_bins)
    count = np.bincount(index_N, minlength=num_bins)
    probability, outcome = (np.bincount(index_N, np.asarray(x), minlength=num_bins) for x in (probability_N, outcome_N))
    return [ReliabilityBin(int(b), int(n), float(probability[b] / n), float(outcome[b] / n)) for b, n in enumerate(count) if n]


def equal_mass_index(probability_N: ArrayLike, num_bins: int) -> Ints:
    """Bins of equally many predictions, in their order; equal predictions share a bin, so that others may be empty."""
    probability_N = np.asarray(probability_N, dtype=np.float64)
    first = -(-np.arange(1, num_bins) * len(probability_N) // num_bins)  # of each bin but the lowest, in order
    edges = np.sort(probability_N)[first[first < len(probability_N)]]
    return np.searchsorted(edges, probability_N, side="right")


def ece(probability_N: ArrayLike, outcome_N: ArrayLike, num_bins: int = NUM_BINS) -> float | None:
    """Expected calibration error over bins of equal width, a fraction."""
    return _ece(bin_index(probability_N, num_bins), probability_N, outcome_N)


def ece_mass(probability_N: ArrayLike, outcome_N: ArrayLike, num_bins: int = NUM_BINS) -> float | None:
    """Expected calibration error over bins of equally many predictions: sees small survivals that share one bin of equal width."""
    return _ece(equal_mass_index(probability_N, num_bins), probability_N, outcome_N)


def _ece(bin_N: Ints, probability_N: ArrayLike, outcome_N: ArrayLike) -> float | None:
    gap_N = np.asarray(probability_N, dtype=np.float64) - np.asarray(outcome_N, dtype=np.float64)
    return _ratio(np.abs(np.bincount(bin_N, gap_N)).sum(), len(gap_N))


def ece_floor(probability_N: ArrayLike, num_bins: int = NUM_BINS) -> float | None:
    """Expected `ece` if each outcome were drawn with its predicted probability: a smaller ECE cannot be told from none.

    A bin's gap of n predictions then has variance V = sum p (1 - p) and, about normal, the mean size sqrt(2 V / pi), never above
    2 V. Counts rounds as independent; those of one prompt are not, so the true floor is higher.
    """
    probability_N = np.asarray(probability_N, dtype=np.float64)
    variance_B = np.bincount(bin_index(probability_N, num_bins), probability_N * (1.0 - probability_N), minlength=num_bins)
    return _ratio(np.minimum(np.sqrt(2.0 * variance_B / np.pi), 2.0 * variance_B).sum(), len(probability_N))


def brier(probability_N: ArrayLike, outcome_N: ArrayLike) -> float | None:
    """Mean squared error of the probabilities."""
    error_N = np.asarray(probability_N, dtype=np.float64) - np.asarray(outcome_N, dtype=np.float64)
    return _ratio(np.square(error_N).sum(), len(error_N))


def auroc(probability_N: ArrayLike, outcome_N: ArrayLike) -> float | None:
    """Area under the ROC curve; None when all outcomes are the same."""
    rank_N = np.unique(probability_N, return_inverse=True)[1]
    outcome_N = np.asarray(outcome_N, dtype=np.float64)
    positive, negative = (np.bincount(rank_N, is_of_class) for is_of_class in (outcome_N, 1.0 - outcome_N))
    wins = np.sum(positive * (np.cumsum(negative) - 0.5 * negative))
    return _ratio(float(wins), positive.sum() * negative.sum())


def position_columns(name: str, value_NK: ArrayLike, outcome_NK: Floats) -> list[tuple[Floats, Floats]]:
    """(value, outcome) of the rounds that count, for each position; a round counts at k unless its outcome there is NaN."""
    value_NK = np.asarray(value_NK, dtype=np.float64)
    if value_NK.ndim != 2 or value_NK.shape != outcome_NK.shape:
        raise ValueError(f"{name}: shape {value_NK.shape} is not that of the outcomes, {outcome_NK.shape}. Fix: pass the same rounds")
    is_counted_NK = ~np.isnan(outcome_NK)
    is_wrong_NK = ~np.isfinite(value_NK) & is_counted_NK
    if is_wrong_NK.any():
        n, k = (int(i) for i in np.argwhere(is_wrong_NK)[0])
        raise ValueError(
            f"{name}[{n}][{k}]: {value_NK[n, k]} is not finite, and the position was proposed. Fix: use rounds of a drafter with a confidence head"
        )
    return [(value_NK[mask_N, k], outcome_NK[mask_N, k]) for k, mask_N in enumerate(is_counted_NK.T)]


@dataclass(frozen=True)
class Estimate:
    """With its 95 % percentile interval; None where the metric, or without resamples the interval, is not defined."""

    estimate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Estimates:
    position_K: tuple[Estimate, ...]
    mean: Estimate  # of the mean over the positions where the rounds themselves define it


def resample(
    metric: str,
    survival_NK: ArrayLike,
    outcome_NK: Floats,
    prompt_N: ArrayLike,
    *,
    num_bins: int = NUM_BINS,
    num_resamples: int = 1000,
    seed: int = 0,
) -> Floats:
    """The metric [1 + S, K] of the rounds themselves, then of S resamples of prompts (rounds of one prompt are not independent).

    A prompt comes with all of its rounds. One seed draws the same prompts every time, so that the difference of two results
    is paired. NaN where the metric is not defined (no rounds; AUROC: one outcome). Bins of equal mass are those of the
    rounds themselves in every resample.

    Of a difference of ECE read the interval's sign, not its size: noise raises a small ECE, and does so again in a resample,
    which draws the difference towards 0. On synthetic rounds (1,000 to 6,400) the interval all but never had the wrong sign, but
    as soon as one side was well calibrated it mostly left the true difference out, as too small a change. For the same reason
    the interval of a small ECE lies high.
    """
    if metric not in METRICS:
        raise ValueError(f"metric: {metric!r} is none of {', '.join(METRICS)}. Fix: name one of them")
    prompt_index_N = np.unique(np.asarray(prompt_N), return_inverse=True)[1]
    num_prompts = int(prompt_index_N.max(initial=-1)) + 1
    if prompt_index_N.shape != outcome_NK.shape[:1] or num_prompts < (2 if num_resamples else 1):
        raise ValueError(
            f"prompt: shape {prompt_index_N.shape} for {len(outcome_NK)} rounds, of at least 2 prompts. Fix: pass the prompt of each round"
        )
    index = np.random.default_rng(seed).integers(0, num_prompts, size=(num_resamples, num_prompts))
    drawn_SP = np.array([np.bincount(row, minlength=num_prompts) for row in index]).reshape(num_resamples, num_prompts)
    weight_SP = np.vstack([np.ones(num_prompts), drawn_SP])  # how often each prompt counts; first the rounds themselves
    values = []
    for (probability_N, outcome_N), is_proposed_N in zip(
        position_columns("survival", survival_NK, outcome_NK), ~np.isnan(outcome_NK.T), strict=True
    ):
        index_N = prompt_index_N[is_proposed_N]
        if metric == "auroc":
            values.append(_resampled_auroc(probability_N, outcome_N, index_N, weight_SP))
            continue
        # ECE and Brier are |sums over rounds| / rounds, and a resample's sums are weighted sums of the prompts' own.
        width, bin_N, term_N = 1, np.zeros_like(index_N), np.square(probability_N - outcome_N)
        if metric != "brier":
            binned = bin_index if metric == "ece" else equal_mass_index
            width, bin_N, term_N = num_bins, binned(probability_N, num_bins), probability_N - outcome_N
        sum_PB = np.bincount(index_N * width + bin_N, term_N, minlength=num_prompts * width).reshape(num_prompts, width)
        num_rounds_S = weight_SP @ np.bincount(index_N, minlength=num_prompts)
        values.append(np.abs(weight_SP @ sum_PB).sum(1) / np.where(num_rounds_S > 0, num_rounds_S, np.nan))
    return np.stack(values, axis=1)


def _resampled_auroc(probability_N: Floats, outcome_N: Floats, index_N: Ints, weight_SP: Floats) -> Floats:
    """From the wins of each prompt's survivors over each prompt's others: a resample's are their weighted sum."""
    num_prompts, is_survivor_N = weight_SP.shape[1], outcome_N == 1.0
    distinct, rank_N = np.unique(probability_N, return_inverse=True)
    wins_PP = np.zeros((num_prompts, num_prompts))
    for p in range(num_prompts):
        others = np.bincount(rank_N[(index_N == p) & ~is_survivor_N], minlength=len(distinct))
        beaten_N = (np.cumsum(others) - 0.5 * others)[rank_N[is_survivor_N]]
        wins_PP[:, p] = np.bincount(index_N[is_survivor_N], beaten_N, minlength=num_prompts)
    survivors_P, others_P = (np.bincount(index_N[mask_N], minlength=num_prompts) for mask_N in (is_survivor_N, ~is_survivor_N))
    num_pairs_S = (weight_SP @ survivors_P) * (weight_SP @ others_P)
    return ((weight_SP @ wins_PP) * weight_SP).sum(1) / np.where(num_pairs_S > 0, num_pairs_S, np.nan)


def estimates(value_SK: Floats) -> Estimates:
    """Of one result of `resample`, or of the difference of two; a resample in which it is not defined does not count."""
    is_defined_K = ~np.isnan(value_SK[0])
    mean_S = value_SK[:, is_defined_K].mean(1) if is_defined_K.any() else np.full(len(value_SK), np.nan)
    return Estimates(tuple(_estimate(value_S) for value_S in value_SK.T), _estimate(mean_S))


def _estimate(value_S: Floats) -> Estimate:
    if np.isnan(value_S[0]):
        return Estimate(None, None, None)
    resampled = value_S[1:][~np.isnan(value_S[1:])]
    low, high = _percentiles(resampled) if len(resampled) else (None, None)
    return Estimate(float(value_S[0]), low, high)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator) / float(denominator) if denominator else None
