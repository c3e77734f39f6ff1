"""Acceptance statistics against the cases; the bootstrap against a known distribution."""

import dataclasses

import numpy as np
import pytest

from dspark.calibration import pad
from dspark.metrics import (
    acceptance,
    bootstrap_difference,
    bootstrap_interval,
    by_context_length,
    pooled_length,
    threshold_sweep,
    truncate_by_threshold,
)


def _columns(case):
    return tuple([r[name] for r in case["rounds"]] for name in ("proposed", "accepted", "ended_by_stop", "confidences"))


def test_acceptance_of_a_case_has_its_rates_and_denominators(acceptance_case):
    proposed, accepted, ended_by_stop, _ = _columns(acceptance_case)
    found = dataclasses.asdict(acceptance(proposed, accepted, ended_by_stop, acceptance_case["block_size"]))
    assert found.pop("num_rounds") == len(proposed)
    for name, value in found.items():
        wanted = acceptance_case["expected"][name]
        if isinstance(wanted, list):
            assert [x is None for x in value] == [x is None for x in wanted], name
            assert [x or 0.0 for x in value] == pytest.approx([x or 0.0 for x in wanted], abs=1e-10), name
        else:
            assert value == (None if wanted is None else pytest.approx(wanted, abs=1e-10)), name


def test_threshold_sweep_of_a_case_truncates_the_same_rounds(acceptance_case):
    _, accepted, ended_by_stop, confidences = _columns(acceptance_case)
    confidence_NK = pad(confidences, acceptance_case["block_size"])
    for wanted in acceptance_case["expected"]["threshold_sweep"]:
        verified, kept, stops = truncate_by_threshold(accepted, ended_by_stop, confidence_NK, wanted["threshold"])
        assert verified == wanted["verified_lengths"]
        assert kept == wanted["accepted"]
        assert np.mean(verified) == pytest.approx(wanted["mean_verified"])
        assert np.mean(verified) - np.mean(kept) == pytest.approx(wanted["mean_rejected"])
        found = acceptance(verified, kept, stops, acceptance_case["block_size"])
        for name in ("acceptance_rate", "acceptance_rate_with_bonus", "accepted_length"):
            value = getattr(found, name)
            assert value == (None if wanted[name] is None else pytest.approx(wanted[name], abs=1e-10)), name


def test_threshold_sweep_of_a_case_has_the_means_of_the_truncated_rounds(acceptance_case):
    _, accepted, ended_by_stop, confidences = _columns(acceptance_case)
    confidence_NK = pad(confidences, acceptance_case["block_size"])
    found = threshold_sweep(accepted, ended_by_stop, confidence_NK, acceptance_case["thresholds"])
    for point, wanted in zip(found, acceptance_case["expected"]["threshold_sweep"], strict=True):
        values = (point.threshold, point.verified_tokens, point.rejected_tokens, point.accepted_length)
        assert values == pytest.approx(tuple(wanted[k] for k in ("threshold", "mean_verified", "mean_rejected", "accepted_length")))
        assert (point.acceptance_rate or 0.0) == pytest.approx(wanted["acceptance_rate"] or 0.0, abs=1e-10)


def test_threshold_sweep_at_zero_is_what_was_decoded_and_beyond_one_is_no_drafting():
    """The second round was stored cut at its stop token: two of three positions, no bonus until it is cut before it."""
    whole, none = threshold_sweep([1, 2], [False, True], [[0.0, 0.9, 0.1], [0.8, 0.4, np.nan]], [0.0, 1.1])
    assert (whole.verified_tokens, whole.accepted_length, whole.acceptance_rate) == (2.5, 2.0, 3 / 5)
    assert (none.verified_tokens, none.accepted_length, none.acceptance_rate) == (0.0, 1.0, None)
    assert threshold_sweep([], [], np.zeros((0, 3)), [0.5])[0].accepted_length is None


def test_context_buckets_hold_every_round_once_with_their_own_pooled_length():
    generator = np.random.default_rng(2)
    context, emitted, prompt = generator.integers(0, 900, 300), generator.integers(1, 8, 300), generator.integers(0, 12, 300)
    edges = [0, 1, 128, 512, 5000, 6000]
    found = by_context_length(context, emitted, [f"p{i}" for i in prompt], edges)
    assert [(bucket.from_tokens, bucket.below_tokens) for bucket in found] == list(zip(edges, [*edges[1:], None], strict=True))
    for bucket in found:
        mine = [i for i in range(300) if context[i] >= bucket.from_tokens and context[i] < (bucket.below_tokens or 10**9)]
        assert bucket.length.num_rounds == len(mine)
        assert bucket.length.num_prompts == len({int(prompt[i]) for i in mine})
        wanted = sum(int(emitted[i]) for i in mine) / len(mine) if mine else None
        assert bucket.length.accepted_length == (None if wanted is None else pytest.approx(wanted))
        assert (bucket.length.accepted_length_interval is None) == (not mine)
    assert sum(bucket.length.num_rounds for bucket in found) == 300
    with pytest.raises(ValueError, match=r"context_edges_tokens: \[5\] leaves out a context of 0\. Fix"):
        by_context_length([0, 9], [1, 1], ["a", "b"], [5])


def test_pooled_length_has_the_interval_of_its_prompts():
    found = pooled_length([3, 1, 2, 4], ["b", "a", "b", "a"])
    assert (found.accepted_length, found.num_rounds, found.num_prompts) == (2.5, 4, 2)
    assert found.accepted_length_interval == bootstrap_interval([5.0, 5.0], [2.0, 2.0]) == (2.5, 2.5)


def test_acceptance_of_no_rounds_has_no_ratios():
    found = acceptance([], [], [], 2)
    assert (found.accepted_length, found.acceptance_rate, found.num_rounds) == (None, None, 0)
    assert found.prefix_survival == found.conditional_acceptance == [None, None]


def test_accepted_length_of_uneven_prompts_pools_rounds():
    """One prompt of a single round of 4 and one of three rounds of 0: pooled (5 + 3) / 4, not (5 + 1) / 2."""
    assert acceptance([4, 4, 4, 4], [4, 0, 0, 0], [False] * 4, 4).accepted_length == 2.0


def test_bootstrap_interval_of_equal_prompts_is_a_point():
    assert bootstrap_interval([6.0] * 5, [2.0] * 5) == (3.0, 3.0)


def test_bootstrap_interval_of_ratios_covers_the_truth_about_as_often_as_it_says():
    generator, hits = np.random.default_rng(3), 0
    for trial in range(300):
        rounds = generator.integers(1, 9, 60)
        tokens = np.array([generator.integers(1, 6, n).sum() for n in rounds])  # mean 3 a round
        low, high = bootstrap_interval(tokens, rounds, seed=trial, num_resamples=200)
        assert low <= tokens.sum() / rounds.sum() <= high
        hits += low <= 3.0 <= high
    assert 0.88 < hits / 300 < 0.99


def test_bootstrap_interval_of_uneven_prompts_pools_their_rounds():
    """Half of the prompts have one round of 5 tokens, half a hundred rounds of 2: 205 / 101 pooled, a mean of means is 3.5."""
    low, high = bootstrap_interval([5.0, 200.0] * 20, [1.0, 100.0] * 20)
    assert 2.0 < low <= 205 / 101 <= high < 2.2


def test_bootstrap_interval_resamples_prompts_not_rounds():
    """Rounds of a prompt go together: two kinds of prompts make a wide interval however many rounds each has."""
    low, high = bootstrap_interval([1000.0, 5000.0] * 10, [1000.0] * 20)
    assert high - low > 1.0
    assert bootstrap_interval([1.0, 2.0, 4.0], [1.0] * 3, seed=1) == bootstrap_interval([1.0, 2.0, 4.0], [1.0] * 3, seed=1)


def test_bootstrap_difference_draws_the_same_prompts_for_both():
    """A drafter that is a tenth better on every prompt, however much prompts differ, is better by a tenth of what was drawn."""
    tokens, rounds = np.random.default_rng(5).integers(20, 400, (1, 50)).astype(float), np.full((1, 50), 100.0)
    assert bootstrap_difference((tokens, rounds), (tokens, rounds)) == (0.0, 0.0)
    low, high = bootstrap_difference((tokens * 1.1, rounds), (tokens, rounds))
    unpaired = bootstrap_interval(tokens[0], rounds[0])
    assert np.allclose([low, high], np.array(unpaired) * 0.1, rtol=0.05)
    assert bootstrap_difference((tokens, rounds), (tokens * 1.1, rounds)) == pytest.approx((-high, -low))


def test_bootstrap_difference_of_trainings_that_scatter_more_than_they_differ_does_not_exclude_none():
    """Every prompt alike: all that is uncertain is the training. Theirs give 2.0 and 3.0; a quarter of the resamples draws one twice."""
    rounds, ours, theirs = np.ones((2, 40)), np.full((2, 40), 2.6), np.stack([np.full(40, 2.0), np.full(40, 3.0)])
    assert bootstrap_difference((ours, rounds), (theirs, rounds)) == pytest.approx((-0.4, 0.6))
    assert bootstrap_difference((ours, rounds), (theirs[:1], rounds[:1])) == pytest.approx((0.6, 0.6))


def test_bootstrap_difference_pools_rounds_of_uneven_trainings():
    """1 token in 1 round and 30 in 10: 31/11 when both are drawn, never the mean of 1 and 3."""
    uneven = (np.array([[1.0], [30.0]]), np.array([[1.0], [10.0]]))
    low, high = bootstrap_difference(uneven, (np.array([[0.0]]), np.array([[1.0]])), num_resamples=4000)
    assert (low, high) == pytest.approx((1.0, 3.0))
    one = bootstrap_difference((uneven[0].reshape(1, 2), uneven[1].reshape(1, 2)), (np.zeros((1, 2)), np.ones((1, 2))), num_resamples=4000)
    assert one == pytest.approx((1.0, 3.0))
