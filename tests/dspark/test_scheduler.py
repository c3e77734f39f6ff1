"""The scheduler against the cases, the paper's guarantees on random confidences, and loops over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.metrics import truncate_by_threshold
from dspark.scheduler import (
    SpsTable,
    admit,
    admit_async,
    admitted_lengths,
    early_stop,
    fixed,
    highest,
    none,
    policies,
    survival,
    threshold,
    verify_all,
    walk,
)
from tests import oracles


def _table(sps):
    """The table whose lookup gives a case's steps per second at every integer batch size."""
    return SpsTable(tuple(sps["batch_tokens"]), (0.0,) * len(sps["batch_tokens"]), tuple(1.0 / x for x in sps["steps_per_second"]))


# --- Algorithm 1 ----------------------------------------------------------------------------------------------------------


def test_admission_of_a_case_has_its_lengths_and_thetas(scheduler_sync_case):
    confidence, table, expected = (
        np.array(scheduler_sync_case["confidences"]),
        _table(scheduler_sync_case["sps"]),
        scheduler_sync_case["expected"],
    )
    found = admit(confidence, table)
    assert (found.lengths_R.tolist(), found.batch_tokens) == (expected["lengths"], expected["batch_tokens"])
    assert found.theta == pytest.approx(expected["theta"], rel=1e-10)
    evaluated = walk(survival(confidence), table)[1][: len(expected["thetas_evaluated"])]
    assert evaluated.tolist() == pytest.approx(expected["thetas_evaluated"], rel=1e-10)


def test_walk_of_a_case_has_its_order_and_global_maximum(scheduler_sync_case):
    confidence, table, expected = (
        np.array(scheduler_sync_case["confidences"]),
        _table(scheduler_sync_case["sps"]),
        scheduler_sync_case["expected"],
    )
    falling, theta = walk(survival(confidence), table)
    order = expected["admission_order"]
    assert [[r, k] for a, r, k in oracles.survivals(confidence.tolist()) if a > 0.0] == order
    assert falling[: len(order)].tolist() == [survival(confidence)[r, k - 1] for r, k in order]
    best = int(theta[: len(order) + 1].argmax())
    assert theta[best] == pytest.approx(expected["global_theta"], rel=1e-10)
    assert len(confidence) + best == expected["global_batch_tokens"]
    assert [max((k for r, k in order[:best] if r == row), default=0) for row in range(len(confidence))] == expected["global_lengths"]


def test_loop_of_a_case_has_its_values(scheduler_sync_case):
    expected, rows = scheduler_sync_case["expected"], scheduler_sync_case["confidences"]
    sps = dict(zip(*scheduler_sync_case["sps"].values(), strict=True)).__getitem__
    lengths, theta, batch_tokens, thetas = oracles.admission(rows, sps)
    assert (lengths, batch_tokens) == (expected["lengths"], expected["batch_tokens"])
    assert [theta, *thetas] == pytest.approx([expected["theta"], *expected["thetas_evaluated"]], rel=1e-10)


def _random(seed):
    """Confidences and a table; every third seed has few distinct values (ties, zeros, ones), every other one a stair."""
    generator = np.random.default_rng(seed)
    shape = (int(generator.integers(1, 12)), int(generator.integers(1, 8)))
    if seed % 3 == 0:
        confidence, stale = generator.choice([0.0, 0.5, 0.5, 1.0, 1.0], (2, *shape))
    else:
        confidence, stale = generator.uniform(0.3, 1.0, (2, *shape))
    probes = np.unique(generator.integers(1, 100, 6))
    growth = generator.choice([0.0, 0.01, 0.2], len(probes)) if seed % 2 else np.full(len(probes), generator.uniform(0.001, 0.1))
    verify = 0.01 * (1.0 + growth.cumsum())
    return generator, confidence, stale, SpsTable(tuple(probes.tolist()), (0.002,) * len(probes), tuple(verify.tolist()))


SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_admission_on_random_confidences_equals_the_loop(seed):
    _, confidence, _, table = _random(seed)
    found = admit(confidence, table)
    lengths, theta, batch_tokens, _ = oracles.admission(confidence.tolist(), lambda b: float(table.sps(b)))
    assert (found.lengths_R.tolist(), found.theta, found.batch_tokens) == (lengths, theta, batch_tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_admissions_on_random_confidences_are_lengths_that_add_up(seed):
    _, confidence, stale, table = _random(seed)
    named = policies(table, lengths=(1, 3), thresholds=(0.5,))
    for found in [admit_async(stale, confidence, table), *(policy(confidence) for policy in named.values())]:
        assert found.lengths_R.shape == (len(confidence),)
        assert ((found.lengths_R >= 0) & (found.lengths_R <= confidence.shape[1])).all()
        assert found.batch_tokens == (1 + found.lengths_R).sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_admission_of_a_token_ignores_the_confidences_after_it(seed):
    """c at later positions depends on the token itself, so a decision that read them would change its distribution."""
    generator, confidence, _, table = _random(seed)
    lengths = admit(confidence, table).lengths_R
    for request, k in np.ndindex(*confidence.shape):
        changed = confidence.copy()
        changed[request, k + 1 :] = generator.choice([0.0, 0.3, 1.0], confidence.shape[1] - k - 1)
        assert min(admit(changed, table).lengths_R[request], k + 1) == min(lengths[request], k + 1), (request, k)


@st.composite
def _steps(draw):
    """Confidences of a step, of others, and a table in which any size may cost anything."""
    num_requests, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    values = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0)
    rows = st.lists(st.lists(values, min_size=block_size, max_size=block_size), min_size=num_requests, max_size=num_requests)
    sizes = range(num_requests, num_requests * (block_size + 1) + 1)
    seconds = draw(st.lists(st.floats(0.01, 1.0), min_size=len(sizes), max_size=len(sizes)))
    return np.array(draw(rows)), np.array(draw(rows)), SpsTable(tuple(sizes), (0.0,) * len(sizes), tuple(seconds))


@given(_steps())
def test_admission_reads_nothing_behind_its_stop(step):
    """Every slot that the walk did not look at takes another survival, below that of the slot at which it stopped."""
    confidence, other, table = step
    found = admit(confidence, table)
    falling, _ = walk(survival(confidence), table)
    num_admitted = int(found.lengths_R.sum())
    stop = falling[num_admitted] if num_admitted < len(falling) else 0.0
    changed, is_stop_kept = confidence.copy(), False
    for request, length in enumerate(found.lengths_R):
        before = survival(confidence)[request, length - 1] if length else 1.0
        for k in range(length, confidence.shape[1]):
            if not is_stop_kept and k == length and survival(confidence)[request, k] == stop:
                is_stop_kept, before = True, stop  # the slot that was looked at last, and refused
                continue
            changed[request, k] = other[request, k] * 0.99 * (stop / before if before > stop else 1.0)
            before = survival(changed)[request, k]
    assert admit(changed, table).lengths_R.tolist() == found.lengths_R.tolist()
    assert admit(changed, table).theta == found.theta


@given(_steps())
def test_admission_of_any_step_is_the_loops_and_adds_up(step):
    confidence, stale, table = step
    found = admit(confidence, table)
    lengths, theta, batch_tokens, _ = oracles.admission(confidence.tolist(), lambda b: float(table.sps(b)))
    assert (found.lengths_R.tolist(), found.theta, found.batch_tokens) == (lengths, theta, batch_tokens)
    for admission in (found, admit_async(stale, confidence, table)):
        assert admission.batch_tokens == (1 + admission.lengths_R).sum()
        assert ((admission.lengths_R >= 0) & (admission.lengths_R <= confidence.shape[1])).all()


@given(_steps(), st.integers(0, 31))
def test_ranking_in_torch_verifies_what_the_numpy_one_does(step, num_admitted):
    confidence, _, _ = step
    survivals = survival(confidence)
    slots = [(r, k) for a, r, k in oracles.survivals(confidence.tolist()) if a > 0.0][:num_admitted]
    expected = [sum(r == request for r, _ in slots) for request in range(len(confidence))]
    for budget in (num_admitted, torch.tensor(num_admitted)):
        assert highest(torch.from_numpy(survivals), budget).tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_ranking_in_torch_gives_the_asynchronous_lengths(seed):
    _, confidence, stale, table = _random(seed)
    budget = walk(survival(stale), table)[1].argmax()
    found = highest(torch.from_numpy(survival(confidence)), int(budget))
    assert found.tolist() == admit_async(stale, confidence, table).lengths_R.tolist()


def test_ranking_in_torch_reads_nothing_back_to_the_host():
    """Tensors of the meta device have no values: reading one raises."""
    found = highest(torch.empty(5, 7, device="meta"), torch.empty((), dtype=torch.int64, device="meta"))
    assert (found.shape, found.device.type) == ((5,), "meta")


def test_admission_without_requests_is_empty():
    found = admit(np.zeros((0, 7)), SpsTable((1, 2), (0.0, 0.0), (0.01, 0.02)))
    assert (found.lengths_R.tolist(), found.theta, found.batch_tokens) == ([], 0.0, 0)


@pytest.mark.parametrize("value", [1.5, -0.1, np.nan])
def test_survival_of_what_is_no_probability_is_refused(value):
    with pytest.raises(ValueError, match=r"confidence_RK: .* must be a probability.*Fix"):
        survival(np.array([[0.5, value]]))


# --- asynchronous -----------------------------------------------------------------------------------------------------------


def test_async_admission_of_a_case_has_its_capacity_and_lengths(scheduler_async_case):
    expected, current = scheduler_async_case["expected"], np.array(scheduler_async_case["current_confidences"])
    table, rows = _table(scheduler_async_case["sps"]), scheduler_async_case["stale_confidences"]
    found = admit_async(np.array([[np.nan] * current.shape[1] if row is None else row for row in rows]), current, table)
    assert (found.lengths_R.tolist(), found.batch_tokens) == (expected["lengths"], expected["batch_tokens"])
    assert found.theta == pytest.approx(expected["predicted_theta"], rel=1e-10)
    stale = np.array([[1.0] * current.shape[1] if row is None else row for row in rows])
    theta = walk(survival(stale), table)[1]
    assert theta.tolist() == pytest.approx(expected["capacity_thetas"], rel=1e-10)
    assert int(theta.argmax()) == expected["capacity"]


@pytest.mark.parametrize("seed", SEEDS)
def test_async_admission_on_random_confidences_equals_the_loop(seed):
    _, confidence, stale, table = _random(seed)
    lengths, thetas = oracles.async_admission(stale.tolist(), confidence.tolist(), lambda b: float(table.sps(b)))
    found = admit_async(stale, confidence, table)
    assert (found.lengths_R.tolist(), found.theta) == (lengths, max(thetas))


@pytest.mark.parametrize("seed", SEEDS)
def test_async_capacity_ignores_current_confidences(seed):
    generator, confidence, stale, table = _random(seed)
    found = admit_async(stale, np.maximum(confidence, 0.1), table)
    other = admit_async(stale, generator.uniform(0.1, 1.0, confidence.shape), table)
    assert (other.batch_tokens, other.theta) == (found.batch_tokens, found.theta)


@pytest.mark.parametrize("seed", SEEDS)
def test_async_promise_is_at_least_that_of_every_other_policy(seed):
    """On one history the global search cannot lose: not to Algorithm 1 in front of a stair, nor to a fixed length."""
    _, confidence, _, table = _random(seed)
    best = admit_async(confidence, confidence, table).theta
    for name, policy in policies(table, lengths=range(1, 8), thresholds=(0.3, 0.7, 0.9)).items():
        assert policy(confidence).theta <= best * (1 + 1e-12), name


def test_async_admission_with_a_history_of_another_shape_is_refused():
    table = SpsTable((1, 2), (0.0, 0.0), (0.01, 0.02))
    with pytest.raises(ValueError, match=r"stale_RK: shape \(1, 2\) .* \(2, 2\).*Fix"):
        admit_async(np.ones((1, 2)), np.ones((2, 2)), table)


def test_async_admission_with_a_hole_in_a_history_is_refused():
    table = SpsTable((1, 2), (0.0, 0.0), (0.01, 0.02))
    with pytest.raises(ValueError, match="must be a probability"):
        admit_async(np.array([[0.5, np.nan]]), np.ones((1, 2)), table)


# --- static policies --------------------------------------------------------------------------------------------------------

STATIC = SpsTable((1, 10), (0.25, 0.25), (0.25, 0.25))  # 2 steps per second at every size
CONFIDENCE = np.array([[0.5, 0.75, 0.25], [0.75, 0.5, 0.5]])


def _found(policy):
    found = policy(CONFIDENCE)
    return found.lengths_R.tolist(), found.theta, found.batch_tokens


def test_static_policies_have_their_lengths_and_predicted_theta():
    assert _found(none(STATIC)) == ([0, 0], 2 * 2.0, 2)
    assert _found(fixed(1, STATIC)) == ([1, 1], 2 * (2 + 0.5 + 0.75), 4)
    assert _found(fixed(5, STATIC)) == _found(verify_all(STATIC)) == ([3, 3], 2 * (2 + 0.5 + 0.375 + 0.09375 + 0.75 + 0.375 + 0.1875), 8)
    assert _found(threshold(0.5, STATIC)) == ([2, 3], 2 * (2 + 0.5 + 0.375 + 0.75 + 0.375 + 0.1875), 7)
    assert _found(threshold(0.6, STATIC)) == ([0, 1], 2 * (2 + 0.75), 3)


def test_threshold_policy_verifies_what_the_threshold_sweep_verifies():
    confidence = np.random.default_rng(0).uniform(0, 1, (50, 7))
    verified, _, _ = truncate_by_threshold([7] * 50, [False] * 50, confidence.tolist(), 0.4)
    assert threshold(0.4, STATIC)(confidence).lengths_R.tolist() == verified


def test_policies_of_a_report_are_named_in_order():
    named = policies(STATIC, lengths=(1, 2), thresholds=(0.5,))
    assert list(named) == ["none", "fixed_1", "fixed_2", "threshold_0.5", "verify_all", "scheduler"]
    assert _found(named["scheduler"]) == ([3, 3], _found(verify_all(STATIC))[1], 8)


def test_static_policies_with_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"policy fixed: length -1 .*Fix"):
        fixed(-1, STATIC)
    with pytest.raises(ValueError, match=r"policy threshold: 1\.5 .*Fix"):
        threshold(1.5, STATIC)


# --- SPS table --------------------------------------------------------------------------------------------------------------

REFUSALS = {"bad_timing": "must be finite and positive", "too_few_probes": "at least 2 distinct sizes", "flat": "times the fastest"}


def test_sps_table_of_a_case_has_its_medians_lookups_and_verdict(sps_case):
    expected = sps_case["expected"]
    tokens, seconds = ([float(t[name]) for t in sps_case["timings"]] for name in ("batch_tokens", "seconds"))
    arguments = [int(x) for x in tokens], [0.0] * len(seconds), seconds
    if expected["verdict"] == "rejected":
        with pytest.raises(ValueError, match=f"sps.*{REFUSALS[expected['reason']]}.*Fix"):
            SpsTable.from_timings(*arguments)
        return
    table, queries = SpsTable.from_timings(*arguments), np.array(sps_case["queries"])
    probes = np.array(table.batch_tokens)
    assert list(table.batch_tokens) == expected["probes"]
    assert table.verify_seconds == pytest.approx(expected["median_seconds"], rel=1e-12)
    assert table.sps(probes).tolist() == pytest.approx(expected["sglang"]["sample_steps_per_sec"], rel=1e-10)
    assert (1e3 / table.sps(queries)).tolist() == pytest.approx(expected["tensorrt_llm_lookup"], rel=1e-10)
    floored = probes[np.maximum(np.searchsorted(probes, queries, side="right") - 1, 0)]  # an engine that does not interpolate
    assert table.sps(floored).tolist() == pytest.approx(expected["sglang_lookup"], rel=1e-10)


def test_sps_table_keeps_draft_and_verify_apart_and_adds_them():
    table = SpsTable.from_timings([4, 2, 2, 2], [0.25, 0.125, 9.0, 0.125], [0.5, 0.125, 0.125, 9.0])
    assert (table.batch_tokens, table.draft_seconds, table.verify_seconds) == ((2, 4), (0.125, 0.25), (0.125, 0.5))
    assert table.sps(np.array([[1, 2], [3, 9]])).tolist() == [[4.0, 4.0], [2.0, pytest.approx(1 / 0.75)]]
    assert float(table.sps(4)) == 1 / 0.75


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (((1, 2), (0.0,), (0.1, 0.2)), "sps: 2 batch_tokens, 1 draft_seconds, 2 verify_seconds"),
        (((2, 1), (0.0, 0.0), (0.1, 0.2)), r"sps\.batch_tokens: \[2, 1\] must be ascending"),
        (((), (), ()), r"sps\.batch_tokens: \[\] must be ascending and not empty"),
        (((0, 1), (0.0, 0.0), (0.1, 0.2)), r"sps\.batch_tokens: 0 must be at least 1"),
        (((1, 2), (0.0, -0.1), (0.1, 0.2)), r"sps\.draft_seconds: -0\.1 at 2 batch_tokens, must be finite and positive or 0"),
        (((1, 2), (0.0, 0.0), (0.1, float("inf"))), r"sps\.verify_seconds: inf at 2 batch_tokens"),
    ],
)
def test_sps_table_of_impossible_columns_is_refused(columns, message):
    with pytest.raises(ValueError, match=f"{message}.*Fix"):
        SpsTable(*columns)


# --- several steps at once, and whether to draft ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_walks_and_lengths_of_several_steps_at_once_are_those_of_each_step(seed):
    generator = np.random.default_rng(seed)
    confidence_SRK = generator.choice([0.0, 0.3, 0.5, 0.5, 0.9, 1.0], (7, 5, 4))  # full of ties
    table = SpsTable((1, 9, 25), (0.0,) * 3, (0.01, *generator.uniform(0.01, 0.03, 2)))
    survival_SRK = confidence_SRK.cumprod(axis=-1)
    falling_SN, theta = walk(survival_SRK, table)
    early_S, global_S = early_stop(falling_SN, theta), theta.argmax(axis=-1)
    for s, confidence_RK in enumerate(confidence_SRK):
        one = admit(confidence_RK, table)
        assert (early_S[s], theta[s, early_S[s]]) == (one.lengths_R.sum(), one.theta)
        assert (admitted_lengths(survival_SRK, falling_SN, early_S)[s] == one.lengths_R).all()
        other = admit_async(confidence_RK, confidence_RK, table)
        num_S = np.minimum(global_S, np.count_nonzero(falling_SN, axis=-1))
        assert (admitted_lengths(survival_SRK, falling_SN, num_S)[s] == other.lengths_R).all()
