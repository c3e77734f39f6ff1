"""Step costs: medians by hand, interpolation against loops over plain numbers, and the timings that are refused."""

import dataclasses
import random

import numpy as np
import pytest

from dspark.step_cost import Curve, StepCost, StepProfile, StepTiming, check_timings, random_lengths, spread

COST = StepCost((1, 4, 16), (0.002, 0.003, 0.009), (1, 8, 16, 32, 128), (0.01, 0.012, 0.012, 0.02, 0.08))


# --- one cost ---------------------------------------------------------------------------------------------------------------


def test_step_cost_is_linear_between_probes_and_constant_outside():
    table = COST.table(2)
    assert table.draft_seconds == pytest.approx((0.002 + 0.001 / 3,) * 5, rel=1e-12)
    assert (table.batch_tokens, table.verify_seconds) == (COST.batch_tokens, COST.verify_seconds)
    assert COST.table(99).draft_seconds == (0.009,) * 5
    assert COST.table(99, is_drafting=False).draft_seconds == (0.0,) * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": (4, 1, 16)}, r"cost\.num_requests: \[4, 1, 16\] must be ascending"),
        ({"num_requests": (1, 4)}, r"one draft_seconds each \(3 given\)"),
        ({"num_requests": (), "draft_seconds": ()}, r"cost\.num_requests: \[\]"),
        ({"draft_seconds": (0.1, -0.1, 0.1)}, r"draft_seconds: -0\.1"),
        ({"verify_seconds": (0.1,)}, r"5 batch_tokens, 5 draft_seconds, 1 verify_seconds"),
    ],
)
def test_impossible_step_costs_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"{message}.*Fix"):
        dataclasses.replace(COST, **changes)


def test_padded_cost_is_that_of_the_next_probe():
    padded = COST.padded().table(4, is_drafting=False)
    assert [padded.seconds(size) for size in (1, 2, 8, 9, 16, 17, 32, 33, 128)] == pytest.approx(
        [0.01, 0.012, 0.012, 0.012, 0.012, 0.02, 0.02, 0.08, 0.08], rel=1e-12
    )


def test_linear_cost_is_the_line_that_errs_least_relatively():
    stairs = dataclasses.replace(COST, verify_seconds=(0.009, 0.013, 0.013, 0.02, 0.05))
    linear, sizes, measured = stairs.linear(), np.array(COST.batch_tokens), np.array(stairs.verify_seconds)
    assert dataclasses.replace(linear, verify_seconds=stairs.verify_seconds) == stairs
    slope = (linear.verify_seconds[-1] - linear.verify_seconds[0]) / 127
    fixed = linear.verify_seconds[0] - slope
    assert linear.verify_seconds == pytest.approx((fixed + slope * sizes).tolist(), rel=1e-12)

    def error(fixed, slope):
        return float((((fixed + slope * sizes) / measured - 1.0) ** 2).sum())

    assert all(error(fixed, slope) < error(fixed + a, slope + b) for a, b in ((1e-5, 0), (-1e-5, 0), (0, 1e-6), (0, -1e-6)))
    exact = dataclasses.replace(COST, verify_seconds=tuple(0.01 + 0.001 * size for size in COST.batch_tokens))
    assert exact.linear().verify_seconds == pytest.approx(exact.verify_seconds, rel=1e-12)


def test_linear_cost_of_a_table_that_falls_is_nowhere_below_its_cheapest_probe():
    falling = dataclasses.replace(COST, verify_seconds=(1.0, 0.5, 0.2, 0.1, 0.1))
    assert min(falling.linear().verify_seconds) == 0.1


# --- profile ----------------------------------------------------------------------------------------------------------------


def _timing(context_tokens, num_requests, batch_tokens, seconds=None, **parts):
    """By default a step that costs its tokens, its requests' contexts, and a draft pass; a fifth of the verification is overhead."""
    seconds = 0.01 + 1e-4 * batch_tokens + 1e-6 * num_requests * context_tokens if seconds is None else seconds
    values = {"draft_seconds": 0.001 * num_requests, "verify_seconds": 0.8 * seconds, "overhead_seconds": 0.2 * seconds}
    return StepTiming(context_tokens, num_requests, batch_tokens, **values | parts)


SIZES = {1: (1, 2, 4), 2: (2, 3, 4, 8), 8: (8, 16, 32)}
EXACT = [_timing(context, num, size) for context in (100, 300) for num, sizes in SIZES.items() for size in sizes]
PROFILE = StepProfile.of(EXACT)


def test_profile_of_repeated_timings_holds_their_medians_with_the_overhead():
    repeated = [_timing(100, 1, 2, seconds, draft_seconds=draft) for seconds, draft in ((3.0, 0.5), (1.0, 0.25), (9.0, 8.0), (2.0, 0.125))]
    repeated += [_timing(100, 1, 1, 0.5, draft_seconds=0.25)]
    random.Random(0).shuffle(repeated)
    assert StepProfile.of(repeated).curves == (Curve(100, 1, 0.25, (1, 2), (0.5, pytest.approx(2.5))),)


def test_cost_at_what_was_measured_is_what_was_measured():
    for curve in PROFILE.curves:
        found = PROFILE.at(curve.context_tokens, curve.num_requests)
        assert found.draft_seconds == (curve.draft_seconds,)
        seconds = dict(zip(found.batch_tokens, found.verify_seconds, strict=True))
        assert {size: seconds[size] for size in curve.batch_tokens} == dict(zip(curve.batch_tokens, curve.verify_seconds, strict=True))


@pytest.mark.parametrize(("context_tokens", "num_requests"), [(100, 3), (150.5, 2), (250, 5), (300, 8), (900, 2), (170, 24), (900, 40)])
def test_cost_between_and_above_probes_is_that_of_steps_whose_time_is_linear(context_tokens, num_requests):
    """Time is linear in tokens and in requests times context, so every interpolation is exact, and so is going on above."""
    found = PROFILE.at(context_tokens, num_requests)
    assert (found.batch_tokens[0], found.batch_tokens[-1]) == (num_requests, 4 * num_requests)
    expected = [0.01 + 1e-4 * size + 1e-6 * num_requests * context_tokens for size in found.batch_tokens]
    assert found.verify_seconds == pytest.approx(expected, rel=1e-9)
    assert found.draft_seconds == (pytest.approx(0.001 * num_requests, rel=1e-12),)


def test_cost_behind_a_context_below_the_first_is_the_firsts():
    assert PROFILE.at(1, 3) == PROFILE.at(100, 3)


def test_cost_above_the_last_probe_never_falls():
    """More requests or context measured faster, by noise, are not extrapolated into free ones."""
    falling = StepProfile.of([_timing(c, n, n * w, 1.0 - 0.001 * c + 0.01 * w) for c in (100, 300) for n in (1, 2) for w in (1, 4)])
    assert falling.at(900, 2) == falling.at(300, 2)
    fewer = StepProfile.of([_timing(100, n, n * w, 1.0 - 0.1 * n, draft_seconds=1.0 / n) for n in (1, 2) for w in (1, 4)])
    assert (fewer.at(100, 9).draft_seconds, fewer.at(100, 9).verify_seconds) == ((0.5,), fewer.at(100, 2).verify_seconds)


def test_cost_of_a_stair_keeps_both_of_its_probes():
    """An engine that pads to 16: probes at 16 and 17 are the stair, and a lookup between them and their neighbours is flat."""
    stair = StepProfile.of([_timing(100, 8, size, 0.01 if size <= 16 else 0.02) for size in (8, 16, 17, 32)])
    assert (1.0 / stair.at(100, 8).table(8, is_drafting=False).sps(np.arange(8, 33))).tolist() == pytest.approx([0.01] * 9 + [0.02] * 16)


@pytest.mark.parametrize(("num_requests", "curves"), [(0, PROFILE.curves), (1, PROFILE.curves[1:3]), (3, PROFILE.curves[1:2])])
def test_cost_of_fewer_requests_than_measured_or_beside_the_only_number_is_refused(num_requests, curves):
    with pytest.raises(ValueError, match=f"num_requests: {num_requests} must be at least.*Fix"):
        StepProfile(curves).at(100, num_requests)


@pytest.mark.parametrize("curves", [(), PROFILE.curves[1:], PROFILE.curves[::-1], PROFILE.curves[:1] * 2])
def test_profile_with_holes_is_refused(curves):
    with pytest.raises(ValueError, match=r"profile\.curves: .*every pair.*Fix"):
        StepProfile(curves)


# --- timings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "value"),
    [("verify_seconds", 0.0), ("verify_seconds", np.nan), ("draft_seconds", -0.1), ("draft_seconds", np.inf), ("overhead_seconds", np.nan)],
)
def test_timing_that_is_no_duration_is_refused(part, value):
    with pytest.raises(ValueError, match=rf"timing\.{part}: {value} at 8 batch_tokens, must be finite.*Fix"):
        _timing(100, 1, 8, **{part: value})


def _repeated(seconds, contexts=(100, 300), num_repeats=5):
    """seconds(timing, generator) of every size of EXACT, repeated."""
    generator = np.random.default_rng(0)
    return [
        _timing(t.context_tokens, t.num_requests, t.batch_tokens, seconds(t, generator))
        for t in EXACT
        for _ in range(num_repeats)
        if t.context_tokens in contexts
    ]


def test_timings_of_an_engine_that_responds_are_accepted():
    check_timings(_repeated(lambda t, g: t.whole_verify_seconds * g.uniform(0.95, 1.05)), max_spread=0.2, min_rank_correlation=0.7)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (lambda t, g: 0.01, r"at least 1\.05 times the fastest"),
        (
            lambda t, g: 0.01 * t.num_requests * g.uniform(0.8, 1.2),
            r"rank correlation with batch_tokens is -?0\.\d\d for 8 requests behind 100",
        ),
        (lambda t, g: 0.01 / t.batch_tokens, r"rank correlation with batch_tokens is -1\.00"),
        (lambda t, g: 0.01 * t.batch_tokens * g.choice([0.7, 1.3]), r"max_spread: 0\.2, but \d+ of 20 sizes.*\d tokens; at most 20% may"),
    ],
    ids=["flat", "ignores the size", "falls", "noisy"],
)
def test_timings_that_make_no_table_are_refused(seconds, message):
    with pytest.raises(ValueError, match=f"sps.*{message}.*Fix"):
        check_timings(_repeated(seconds), max_spread=0.2, min_rank_correlation=0.7)


def test_timings_that_ignore_the_size_behind_one_context_alone_are_refused():
    with pytest.raises(ValueError, match=r"for 8 requests behind 300 tokens"):
        check_timings(
            _repeated(lambda t, g: 0.01 * (t.batch_tokens if t.context_tokens == 100 else g.uniform(1, 2))),
            max_spread=1.0,
            min_rank_correlation=0.7,
        )


def test_timings_with_one_noisy_size_in_twenty_are_accepted():
    check_timings(
        _repeated(lambda t, g: 0.01 * t.batch_tokens * (g.choice([0.5, 3.0]) if t.batch_tokens == 1 else 1.0)),
        max_spread=0.2,
        min_rank_correlation=0.7,
    )


def test_random_lengths_are_of_the_size_asked_for_and_uneven():
    generator = np.random.default_rng(0)
    for batch_tokens in (8, 9, 24, 63, 64):
        found = np.stack([random_lengths(batch_tokens, 8, 7, generator) for _ in range(200)])
        assert (found.sum(axis=1) == batch_tokens - 8).all()
        assert found.min() >= 0
        assert found.max() <= 7
        mean = (batch_tokens - 8) / 8
        np.testing.assert_allclose(found.mean(axis=0), mean, atol=0.5)
    found = random_lengths(24, 8, 7, generator)
    assert found.max() > found.min()


def test_spread_is_interquartile_range_over_median():
    assert spread([5.0, 1.0, 2.0, 4.0, 100.0]) == (5.0 - 2.0) / 4.0
