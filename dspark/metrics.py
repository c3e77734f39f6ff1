"""Acceptance statistics over decoding rounds (definitions of §2 of the paper; names as in the field).

    accepted length         mean over rounds of accepted + 1, the bonus or correction included; a round that ended by an
                            accepted stop token emits none
    prefix survival @k      rounds with accepted >= k / rounds with proposed >= k
    conditional acceptance  rounds with accepted >= k / rounds with proposed >= k and accepted >= k-1
    acceptance rate         sum accepted / sum proposed, without and with the bonus tokens

Everything pools rounds (never a mean of means) and carries its denominators; a ratio without trials is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    accepted: Sequence[int], ended_by_stop: Sequence[bool], confidences: Sequence[Sequence[float]], threshold: float
) -> tuple[list[int], list[int], list[bool]]:
    """The same rounds had only the longest prefix with every conditional confidence >= threshold been verified.

    Returns (verified, accepted, ended_by_stop); a truncated round that no longer reaches its stop token regains its bonus.
    """
    verified = [next((i for i, c in enumerate(row) if c < threshold), len(row)) for row in confidences]
    kept = [min(a, v) for a, v in zip(accepted, verified, strict=True)]
    return verified, kept, [s and v >= a for s, v, a in zip(ended_by_stop, verified, accepted, strict=True)]


def bootstrap_interval(
    num_tokens: Sequence[float], num_rounds: Sequence[float], seed: int = 0, num_resamples: int = 1000
) -> tuple[float, float]:
    """95 % percentile interval of sum(tokens) / sum(rounds), resampling prompts (rounds of one prompt are not independent)."""
    tokens_P, rounds_P = np.asarray(num_tokens, dtype=np.float64), np.asarray(num_rounds, dtype=np.float64)
    index = np.random.default_rng(seed).integers(0, len(tokens_P), size=(num_resamples, len(tokens_P)))
    low, high = np.percentile(tokens_P[index].sum(1) / rounds_P[index].sum(1), [2.5, 97.5])
    return float(low), float(high)


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator) / float(denominator) if denominator else None
