"""The replay against hand examples, a loop over requests, and what must come out at the extremes."""

import dataclasses
import math

import numpy as np
import pytest

from dspark.calibration import GRID, Calibration, sigmoid
from dspark.rounds import Round
from dspark.simulate import ReplayConfig, ReplayText, replay, sweep, texts_from_rounds
from dspark.step_cost import StepCost
from tests import oracles

POLICIES = ["none", "fixed_1", "fixed_3", "threshold_0.5", "threshold_0.9", "verify_all", "scheduler", "scheduler_async"]
CONFIG = ReplayConfig(lengths=(1, 3), thresholds=(0.5, 0.9), num_steps=60, num_warmup_steps=20, seed=3)
COST = StepCost((1, 4, 16), (0.002, 0.003, 0.009), (1, 8, 16, 32, 128), (0.01, 0.012, 0.012, 0.02, 0.08))


def _texts(seed, num_texts=5, block_size=4, chance=0.7):
    """Random texts of 1 to 20 anchors; accepted tokens follow the confidences."""
    generator = np.random.default_rng(seed)
    texts = []
    for num_anchors in generator.integers(1, 21, num_texts):
        proposed = np.minimum(block_size, np.arange(num_anchors, 0, -1))
        confidence = generator.uniform(2 * chance - 1, 1.0, (num_anchors, block_size))
        is_accepted = np.logical_and.accumulate(generator.random(confidence.shape) < confidence, axis=1)
        is_proposed = np.arange(block_size) < proposed[:, None]
        texts.append(ReplayText(np.where(is_proposed, confidence, 0.0), (is_accepted & is_proposed).sum(axis=1)))
    return texts


def _step_seconds(cost, policy, num_requests, batch_tokens):
    draft = 0.0 if policy == "none" else np.interp(num_requests, cost.num_requests, cost.draft_seconds)
    return draft + np.interp(batch_tokens, cost.batch_tokens, cost.verify_seconds)


# --- by hand ----------------------------------------------------------------------------------------------------------------

# Six tokens after the prompt. verify_all rounds: anchor 0 (1 + 1 tokens), anchor 2 (2 + 1, the end).
HAND = ReplayText(np.array([[0.9, 0.1], [0.1, 0.1], [0.9, 0.9], [0.1, 0.1], [0.9, 0.0]]), np.array([1, 0, 2, 0, 1]))
HAND_COST = StepCost((1, 3), (0.5, 9.0), (1, 3), (1.0, 2.0))


@pytest.mark.parametrize(
    ("policy", "tokens", "batches", "seconds"),
    [
        ("none", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], 5 * 1.0),
        ("fixed_1", [2, 2, 1], [2, 2, 2], 3 * 2.0),  # at the last anchor the draft is the end: no bonus
        ("verify_all", [2, 3], [3, 3], 2 * 2.5),
        ("threshold_0.5", [2, 3], [2, 3], 2.0 + 2.5),
    ],
)
def test_replay_of_one_text_has_the_numbers_made_by_hand(policy, tokens, batches, seconds):
    config = ReplayConfig((1,), (0.5,), num_steps=len(tokens) * 4, num_warmup_steps=5, seed=0)
    found = replay([HAND], policy, HAND_COST, 1, config)
    assert (found.policy, found.num_requests, found.num_steps, found.num_tokens) == (policy, 1, len(tokens) * 4, sum(tokens) * 4)
    assert found.throughput_tokens_per_second == pytest.approx(sum(tokens) / seconds, rel=1e-12)
    assert found.tokens_per_second_per_user == found.throughput_tokens_per_second
    assert found.mean_budget_tokens == pytest.approx(np.mean(batches), rel=1e-12)
    assert found.mean_accepted_length == pytest.approx(np.mean(tokens), rel=1e-12)


@pytest.mark.parametrize("policy", ["fixed_3", "verify_all"])
def test_replay_at_a_text_end_verifies_and_emits_no_more_than_is_left(policy):
    text = ReplayText(np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]), np.array([0, 1]))  # a block of 3, two and one of them left
    found = replay([text], policy, dataclasses.replace(HAND_COST, batch_tokens=(1, 4)), 1, CONFIG)
    assert (found.mean_budget_tokens, found.mean_accepted_length) == ((3 + 2) / 2, 1.0)


# --- against a loop ---------------------------------------------------------------------------------------------------------


def _lengths(policy, stale, confidence, sps):
    """What a policy verifies of each request, before blocks are cut."""
    kind, _, value = policy.partition("_")
    if policy == "scheduler":
        return oracles.admission(confidence, sps)[0]
    if policy == "scheduler_async":
        return oracles.async_admission([[1.0] * len(confidence[0]) if row is None else row for row in stale], confidence, sps)[0]
    if kind == "threshold":
        return [next((k for k, c in enumerate(row) if c < float(value)), len(row)) for row in confidence]
    return [{"none": 0, "verify": len(row)}.get(kind) if kind != "fixed" else min(int(value), len(row)) for row in confidence]


def _loop(texts, policy, cost, num_requests, config):
    """(tokens, seconds, verified tokens with anchors), request by request. Draws starts, then orders, as the replay does."""
    generator = np.random.default_rng(config.seed)
    anchors = [(n, p) for n, text in enumerate(texts) for p in range(len(text.accepted_A))]
    slots = [anchors[i] for i in generator.integers(len(anchors), size=num_requests)]
    orders = generator.permuted(np.tile(np.arange(len(texts)), (num_requests, 1)), axis=1).tolist()
    histories, num_ended = [[] for _ in slots], [0] * num_requests
    table = cost.table(num_requests, is_drafting=policy != "none")
    tokens = seconds = budget = 0
    for step in range(config.num_warmup_steps + config.num_steps):
        confidence = [texts[n].confidence_AK[p].tolist() for n, p in slots]
        stale = [history[-config.lag_rounds] if len(history) >= config.lag_rounds else None for history in histories]
        lengths = _lengths(policy, stale, confidence, lambda batch_tokens: float(table.sps(batch_tokens)))
        batch_tokens, emitted = 0, 0
        for r, (n, p) in enumerate(slots):
            left = len(texts[n].accepted_A) - p
            verified = min(lengths[r], left)
            num_tokens = min(min(int(texts[n].accepted_A[p]), verified) + 1, left)
            batch_tokens, emitted = batch_tokens + 1 + verified, emitted + num_tokens
            histories[r].append(confidence[r])
            slots[r] = n, p + num_tokens
            if num_tokens == left:
                slots[r], histories[r] = (orders[r][num_ended[r] % len(texts)], 0), []
                num_ended[r] += 1
        if step >= config.num_warmup_steps:
            tokens, budget = tokens + emitted, budget + batch_tokens
            seconds += _step_seconds(cost, policy, num_requests, batch_tokens)
    return tokens, seconds, budget


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_replay_of_random_texts_equals_the_loop(policy, seed):
    num_requests, config = 1 + 3 * seed, dataclasses.replace(CONFIG, seed=seed, lag_rounds=1 + seed % 3)
    texts = _texts(seed)
    found = replay(texts, policy, COST, num_requests, config)
    tokens, seconds, budget = _loop(texts, policy, COST, num_requests, config)
    assert found.num_tokens == tokens
    assert found.mean_budget_tokens == pytest.approx(budget / (num_requests * config.num_steps), rel=1e-12)
    assert found.mean_accepted_length == pytest.approx(tokens / (num_requests * config.num_steps), rel=1e-12)
    assert found.throughput_tokens_per_second == pytest.approx(tokens / seconds, rel=1e-12)
    assert found.tokens_per_second_per_user == pytest.approx(tokens / seconds / num_requests, rel=1e-12)


def test_verify_all_accepts_what_a_plain_walk_of_the_texts_accepts():
    texts, num_rounds, num_tokens = _texts(8), 0, 0
    for text in texts:
        p = 0
        while p < len(text.accepted_A):
            p += int(text.accepted_A[p]) + 1
            num_rounds += 1
        num_tokens += len(text.accepted_A)
    config = dataclasses.replace(CONFIG, num_steps=num_rounds, num_warmup_steps=20)  # one pass over the slot's order
    assert replay(texts, "verify_all", COST, 1, config).num_tokens == num_tokens


def test_lag_of_the_asynchronous_scheduler_reaches_its_budget():
    texts = _texts(4, num_texts=20)
    budgets = {
        replay(texts, "scheduler_async", COST, 8, dataclasses.replace(CONFIG, lag_rounds=lag)).mean_budget_tokens for lag in (1, 2, 3)
    }
    assert len(budgets) == 3


# --- what must come out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_requests", [1, 7])
def test_no_speculation_emits_one_token_per_request_and_step_and_drafts_nothing(num_requests):
    found = replay(_texts(1), "none", COST, num_requests, CONFIG)
    assert (found.mean_budget_tokens, found.mean_accepted_length, found.num_tokens) == (1.0, 1.0, num_requests * CONFIG.num_steps)
    assert found.tokens_per_second_per_user == pytest.approx(
        1.0 / np.interp(num_requests, COST.batch_tokens, COST.verify_seconds), rel=1e-12
    )


def test_policies_that_draft_pay_for_it_when_they_verify_nothing():
    texts = [ReplayText(np.zeros((9, 4)), np.zeros(9, dtype=np.int64))]
    by_name = {row.policy: row for row in sweep(texts, COST, [4], CONFIG)}
    seconds = 0.003 + np.interp(4, COST.batch_tokens, COST.verify_seconds)
    assert by_name["scheduler"].mean_budget_tokens == by_name["threshold_0.5"].mean_budget_tokens == 1.0
    assert by_name["scheduler"].tokens_per_second_per_user == pytest.approx(1.0 / seconds, rel=1e-12)
    assert by_name["none"].tokens_per_second_per_user > by_name["scheduler"].tokens_per_second_per_user


def test_sweep_has_a_row_per_concurrency_and_policy_equal_to_its_replay():
    texts = _texts(2)
    rows = sweep(texts, COST, [4, 1], CONFIG)
    assert [(row.num_requests, row.policy) for row in rows] == [(num, name) for num in (4, 1) for name in POLICIES]
    assert rows == [replay(texts, row.policy, COST, row.num_requests, CONFIG) for row in rows]
    assert rows != sweep(texts, COST, [4, 1], dataclasses.replace(CONFIG, seed=4))


def test_sweep_where_verification_is_free_verifies_all():
    flat = dataclasses.replace(COST, verify_seconds=(0.01,) * 5, draft_seconds=(0.001,) * 3)
    by_name = {row.policy: row.throughput_tokens_per_second for row in sweep(_texts(5, num_texts=40), flat, [16], CONFIG)}
    assert by_name["verify_all"] == by_name["scheduler"] == max(by_name.values())
    assert by_name["verify_all"] > by_name["fixed_1"] > by_name["none"]


def test_sweep_where_each_token_costs_its_time_and_few_survive_verifies_little():
    steep = dataclasses.replace(COST, verify_seconds=tuple(0.01 * tokens for tokens in COST.batch_tokens), draft_seconds=(0.0,) * 3)
    by_name = {row.policy: row for row in sweep(_texts(6, num_texts=40, chance=0.5), steep, [16], CONFIG)}
    assert by_name["scheduler"].mean_budget_tokens < 1.1
    for name in ("fixed_1", "verify_all"):
        assert by_name["scheduler"].throughput_tokens_per_second > by_name[name].throughput_tokens_per_second


# --- texts and settings --------------------------------------------------------------------------------------------------------


def _round(index, logits, accepted, **changes):
    values = {field.name: None for field in dataclasses.fields(Round)} | {"policy": "every_position", "temperature": 0.0}
    values |= {"request_id": "b", "round_index": index, "context_length_tokens": 30 + index, "confidence_logits": logits}
    return Round(**values | {"proposed": len(logits), "accepted": accepted} | changes)


ROUNDS = [_round(2, (1.0,), 1), _round(0, (2.0, -1.0), 0), _round(1, (0.5, 3.0), 2)]
OTHERS = [_round(0, (-2.0,), 0, request_id="a"), _round(0, (0.0, 0.0), 1, policy="verify_all")]


@pytest.mark.parametrize("temperatures", [None, (2.0, 0.5)])
def test_texts_of_rounds_are_ordered_cut_and_calibrated(temperatures):
    calibration = temperatures and Calibration(temperatures, (0.0, 0.0), (0.0, 0.0), 1, 15, GRID)
    first, second = texts_from_rounds([*ROUNDS, *OTHERS], 2, calibration.confidence if calibration else sigmoid)
    T = temperatures or (1.0, 1.0)
    expected = [[1 / (1 + math.exp(-z / t)) for z, t in zip(row, T, strict=False)] for row in ((2.0, -1.0), (0.5, 3.0), (1.0,))]
    expected[2].append(0.0)
    assert first.confidence_AK == pytest.approx(np.array(expected), rel=1e-12)
    assert (first.accepted_A.tolist(), first.proposed_A.tolist()) == ([0, 2, 1], [2, 2, 1])
    assert second.confidence_AK == pytest.approx(np.array([[1 / (1 + math.exp(2.0 / T[0])), 0.0]]), rel=1e-12)


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        (OTHERS[1:], "none of 1 rounds has 'every_position'"),
        (ROUNDS[:2], "rounds of 'b': round_index 2 at anchor 1 must be 1"),
        ([ROUNDS[0], ROUNDS[2]], "round_index 1 at anchor 0 must be 0"),
        (ROUNDS[1:], "proposed 2 at anchor 1 must be 1"),
        ([*ROUNDS, ROUNDS[0]], "proposed 1 at anchor 2 must be 2"),
        ([dataclasses.replace(r, confidence_logits=()) for r in ROUNDS], "number of confidence_logits 0 at anchor 0 must be 2"),
    ],
)
def test_texts_of_rounds_that_are_no_whole_text_are_refused(rounds, message):
    with pytest.raises(ValueError, match=f"{message}.*Fix"):
        texts_from_rounds(rounds, 2, sigmoid)


@pytest.mark.parametrize(
    ("confidence", "accepted", "message"),
    [
        ([[0.5, 0.5]], [0, 0], r"shape \(1, 2\) must be \[A, K\] with A = 2"),
        (np.zeros((0, 2)), [], r"A = 0 accepted, none 0"),
        ([[0.5, 0.5], [0.5, 0.0]], [3, 0], r"accepted\[0\]: 3 must be 0 to 2"),
        ([[0.5, 0.5], [0.5, 0.0]], [0, 2], r"accepted\[1\]: 2 must be 0 to 1"),
        ([[0.5, 0.5], [0.5, 0.0]], [-1, 0], r"accepted\[0\]: -1"),
        ([[0.5, 1.5], [0.5, 0.0]], [0, 0], r"confidence\[0, 1\]: 1\.5 must be a probability"),
        ([[0.5, 0.5], [0.5, 0.5]], [0, 0], r"confidence\[1, 1\]: 0\.5 .* 0 behind the 1 tokens"),
        ([[np.nan, 0.5], [0.5, 0.0]], [0, 0], r"confidence\[0, 0\]: nan"),
    ],
)
def test_impossible_texts_are_refused(confidence, accepted, message):
    with pytest.raises(ValueError, match=f"text.*{message}.*Fix"):
        ReplayText(np.array(confidence), np.array(accepted))


@pytest.mark.parametrize("changes", [{"num_steps": 0}, {"num_warmup_steps": -1}, {"lag_rounds": 0}])
def test_impossible_replay_settings_are_refused(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=rf"replay\.{name}: {value} must be at least {value + 1}.*Fix"):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("texts", "policy", "num_requests", "message"),
    [
        ([], "none", 1, r"texts: block sizes \[\] must be exactly one"),
        ([*_texts(0), HAND], "none", 1, r"block sizes \[2, 4\]"),
        (_texts(0), "fixed_2", 1, r"policy: 'fixed_2' must be one of \['none', 'fixed_1'.*'scheduler_async'\]"),
        (_texts(0), "none", 0, "num_requests: 0 must be at least 1"),
        (_texts(0), "none", 17, r"cost\.num_requests: probed to 16, 17 requests of up to 5 tokens need 17"),
    ],
)
def test_replay_of_what_is_not_there_is_refused(texts, policy, num_requests, message):
    with pytest.raises(ValueError, match=f"{message}.*Fix"):
        replay(texts, policy, COST, num_requests, CONFIG)


def test_replay_of_steps_larger_than_the_profile_is_refused():
    cost = dataclasses.replace(COST, batch_tokens=(1, 8, 16, 32, 79))
    with pytest.raises(ValueError, match=r"cost\.batch_tokens: probed to 79, 16 requests of up to 5 tokens need 80.*Fix"):
        replay(_texts(0), "none", cost, 16, CONFIG)
