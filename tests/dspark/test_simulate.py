"""The replay against hand examples, a loop over requests, and what must come out at the extremes."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest

from dspark.calibration import GRID, Calibration, sigmoid
from dspark.rounds import Round
from dspark.simulate import (
    ReplayConfig,
    ReplayText,
    mean_context_tokens,
    policy_names,
    ratio,
    replay,
    resample,
    resampled,
    sweep,
    texts_from_rounds,
)
from dspark.step_cost import StepCost

STATIC = ["none", "fixed_1", "fixed_2", "fixed_3", "fixed_4", "threshold_0.5", "threshold_0.9", "verify_all"]
SCHEDULERS = ["scheduler", "scheduler_or_none", "scheduler_async", "scheduler_async_or_none", "scheduler_global", "oracle"]
POLICIES = [*STATIC, *SCHEDULERS]
CONFIG = ReplayConfig(
    thresholds=(0.5, 0.9),
    num_steps=60,
    num_warmup_steps=20,
    num_rounds=1,
    seed=3,
    lag_rounds=2,
    new_requests="one",
    skips_by="outcomes",
    window_rounds=16,
    probe_share=0.05,
)
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
        texts.append(ReplayText(np.where(is_proposed, confidence, 0.0), (is_accepted & is_proposed).sum(axis=1), 30))
    return texts


def _step_seconds(cost, policy, num_requests, batch_tokens):
    draft = 0.0 if policy == "none" else np.interp(num_requests, cost.num_requests, cost.draft_seconds)
    return draft + np.interp(batch_tokens, cost.batch_tokens, cost.verify_seconds)


# --- by hand ----------------------------------------------------------------------------------------------------------------

# Six tokens after the prompt. verify_all rounds: anchor 0 (1 + 1 tokens), anchor 2 (2 + 1, the end).
HAND = ReplayText(np.array([[0.9, 0.1], [0.1, 0.1], [0.9, 0.9], [0.1, 0.1], [0.9, 0.0]]), np.array([1, 0, 2, 0, 1]), 7)
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
    config = dataclasses.replace(CONFIG, thresholds=(0.5,), num_steps=len(tokens) * 4, num_warmup_steps=5)
    found = replay([HAND], policy, HAND_COST, 1, config)
    assert (found.policy, found.num_requests, found.num_steps, found.num_tokens) == (policy, 1, len(tokens) * 4, sum(tokens) * 4)
    assert found.throughput_tokens_per_second == pytest.approx(sum(tokens) / seconds, rel=1e-12)
    assert found.tokens_per_second_per_user == found.throughput_tokens_per_second
    assert found.mean_budget_tokens == pytest.approx(np.mean(batches), rel=1e-12)
    assert found.mean_accepted_length == pytest.approx(np.mean(tokens), rel=1e-12)
    assert found.drafting_share == (policy != "none")
    assert found.mean_context_tokens == pytest.approx(7 + np.mean([sum(tokens[:i]) for i in range(len(tokens))]), rel=1e-12)


@pytest.mark.parametrize("policy", ["fixed_3", "verify_all"])
def test_replay_at_a_text_end_verifies_and_emits_no_more_than_is_left(policy):
    text = ReplayText(np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]), np.array([0, 1]), 0)  # a block of 3, two and one of them left
    found = replay([text], policy, dataclasses.replace(HAND_COST, batch_tokens=(1, 4)), 1, CONFIG)
    assert (found.mean_budget_tokens, found.mean_accepted_length) == ((3 + 2) / 2, 1.0)


# --- against a loop ---------------------------------------------------------------------------------------------------------


def _sps(table, batch_tokens):
    return float(table.sps(batch_tokens))


def _survivals(confidences):
    return [math.prod(confidences[: k + 1]) for k in range(len(confidences))]


def _search(rows, sps, is_early_stop):
    """(admitted, tokens that this promises) of a walk down the survivals of these requests."""
    tau, best, admitted, falling = [float(len(rows))], None, 0, sorted((a for row in rows for a in row), reverse=True)
    for a in falling:
        tau.append(tau[-1] + a)
    theta = [tokens * sps(len(rows) + m) for m, tokens in enumerate(tau)]
    if is_early_stop:
        while admitted < len(falling) and falling[admitted] > 0 and theta[admitted + 1] > theta[admitted]:
            admitted += 1
    else:
        best = max(theta)
        admitted = theta.index(best)
    return admitted, tau[admitted]


def _admit(rows, number):
    """Lengths when the `number` highest positive survivals are verified."""
    order = sorted(((-a, r, k) for r, row in enumerate(rows) for k, a in enumerate(row) if a > 0))
    lengths = [0] * len(rows)
    for _, r, _ in order[:number]:
        lengths[r] += 1
    return lengths


class _Loop:
    """One scheduler, request by request: what was shown in each step, and what it decides."""

    def __init__(self, policy, sps, plain, num_requests, block_size, config):
        self.policy, self.sps, self.plain, self.R, self.K, self.config = policy, sps, plain, num_requests, block_size, config
        self.latest, self.history = [None] * num_requests, [[] for _ in range(num_requests)]
        self.drafted, self.lost = [], []
        self.kept = (1 - 1 / config.window_rounds) ** num_requests
        self.sums, self.weight, self.skipped = [0.0] * block_size, 0.0, 0
        self.lost_sum, self.lost_weight = 0.0, 1 - (1 - 1 / config.window_rounds) ** (config.window_rounds // 2)

    def __call__(self, rows):
        L, is_early = self.config.lag_rounds, "async" not in self.policy
        has_news = len(self.drafted) >= L and self.drafted[-L]
        stale = [history[-L] if len(history) >= L else None for history in self.history]
        if has_news:
            known = [row for row in stale if row is not None]
            self.sums = [self.kept * x + sum(row[k] for row in known) for k, x in enumerate(self.sums)]
            self.weight = self.kept * self.weight + len(known)
        mean = [x / self.weight for x in self.sums] if self.config.new_requests == "mean" and self.weight else [1.0] * self.K
        stale = [mean if row is None else row for row in stale]
        drafts = True
        if self.policy.endswith("or_none"):
            if has_news:
                lost = self.lost[-L]
                if self.config.skips_by == "confidences":
                    admitted, tokens = _search(stale, self.sps, is_early)
                    lost = 1 / self.sps(self.R + admitted) - tokens / (self.R * self.plain(self.R))
                self.lost_sum = self.kept * self.lost_sum + (1 - self.kept) * lost
                self.lost_weight = self.kept * self.lost_weight + 1 - self.kept
            drafts = self.lost_sum / self.lost_weight <= self.config.probe_share * self.skipped / self.plain(self.R)
            self.skipped = 0 if drafts else self.skipped + 1
        if drafts:
            self.latest = rows
        self.latest = list(self.latest)
        for history, row in zip(self.history, self.latest, strict=True):
            history.append(row)
        self.drafted.append(drafts)
        number, _ = _search(stale if "async" in self.policy else rows, self.sps, is_early)
        return _admit(rows, number) if drafts else [0] * self.R, drafts

    def observe(self, tokens, seconds, ended):
        self.lost.append(seconds - tokens / (self.R * self.plain(self.R)))
        for r in ended:
            self.latest[r], self.history[r] = None, []


def _oracle(useful, most, sps, plain, num_requests):
    """The verified tokens beyond the anchors that are best for a step of which `useful` ones emit a token, and whether it drafts."""
    theta = [(num_requests + min(m, useful)) * sps(num_requests + m) for m in range(most + 1)]
    best = theta.index(max(theta))
    return (best, True) if theta[best] > num_requests * plain(num_requests) else (0, False)


def _loop(texts, policy, cost, num_requests, config):
    """(tokens, seconds, verified tokens with anchors), request by request. Draws starts, then orders, as the replay does."""
    generator = np.random.default_rng((config.seed, 0))
    anchors = [(n, p) for n, text in enumerate(texts) for p in range(len(text.accepted_A))]
    slots = [anchors[i] for i in generator.integers(len(anchors), size=num_requests)]
    orders = generator.permuted(np.tile(np.arange(len(texts)), (num_requests, 1)), axis=1).tolist()
    num_ended = [0] * num_requests
    sps, plain = (partial(_sps, cost.table(num_requests, is_drafting=drafts)) for drafts in (True, False))
    block_size = texts[0].confidence_AK.shape[1]
    scheduler = _Loop(policy, sps, plain, num_requests, block_size, config)
    tokens = seconds = budget = 0
    for step in range(config.num_warmup_steps + config.num_steps):
        rows = [texts[n].confidence_AK[p].tolist() for n, p in slots]
        left = [len(texts[n].accepted_A) - p for n, p in slots]
        accepted = [int(texts[n].accepted_A[p]) for n, p in slots]
        kind, _, value = policy.partition("_")
        drafts = policy != "none"
        if policy == "oracle":
            useful = [min(a, room - 1) for a, room in zip(accepted, left, strict=True)]
            proposed = [min(block_size, room) for room in left]
            number, drafts = _oracle(sum(useful), sum(proposed), sps, plain, num_requests)
            lengths = [min(u, x) for u, x in zip(useful, _admit([[1.0] * u for u in useful], number), strict=True)]
            spare = number - sum(lengths)  # emits nothing, wherever it goes
        elif policy == "scheduler_global":
            rows = [_survivals(row) for row in rows]
            lengths = _admit(rows, _search(rows, sps, False)[0])
        elif kind == "scheduler":
            lengths, drafts = scheduler([_survivals(row) for row in rows])
        elif kind == "threshold":
            lengths = [next((k for k, c in enumerate(row) if c < float(value)), len(row)) for row in rows]
        else:
            lengths = [{"none": 0, "verify": block_size}.get(kind) if kind != "fixed" else min(int(value), block_size)] * num_requests
        batch_tokens, emitted, ended = spare if policy == "oracle" else 0, 0, []
        for r, (n, p) in enumerate(slots):
            verified = min(lengths[r], left[r])
            num_tokens = min(min(accepted[r], verified) + 1, left[r])
            batch_tokens, emitted = batch_tokens + 1 + verified, emitted + num_tokens
            slots[r] = n, p + num_tokens
            if num_tokens == left[r]:
                slots[r] = orders[r][num_ended[r] % len(texts)], 0
                num_ended[r] += 1
                ended.append(r)
        step_seconds = _step_seconds(cost, "none" if not drafts else policy, num_requests, batch_tokens)
        if kind == "scheduler" and policy != "scheduler_global":
            scheduler.observe(emitted, step_seconds, ended)
        if step >= config.num_warmup_steps:
            tokens, budget, seconds = tokens + emitted, budget + batch_tokens, seconds + step_seconds
    return tokens, seconds, budget


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_replay_of_random_texts_equals_the_loop(policy, seed):
    options = {"new_requests": ("one", "mean")[seed % 2], "skips_by": ("outcomes", "confidences")[seed // 2 % 2]}
    num_requests, config = 1 + 3 * seed, dataclasses.replace(CONFIG, seed=seed, lag_rounds=1 + seed % 3, **options)
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
    texts = [ReplayText(np.zeros((9, 4)), np.zeros(9, dtype=np.int64), 0)]
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


def test_verify_all_is_the_fixed_length_of_a_whole_block():
    whole, fixed = (replay(_texts(3), policy, COST, 5, CONFIG) for policy in ("verify_all", "fixed_4"))
    assert dataclasses.replace(fixed, policy="verify_all") == whole


@pytest.mark.parametrize("seed", range(20))
def test_oracle_makes_the_most_of_a_step_whatever_the_table(seed):
    generator = np.random.default_rng(seed)
    jagged = dataclasses.replace(
        COST, verify_seconds=tuple(generator.uniform(0.005, 0.05, 5)), draft_seconds=tuple(generator.uniform(0, 0.02, 3))
    )
    texts, config = _texts(seed, num_texts=9), dataclasses.replace(CONFIG, num_steps=1, num_warmup_steps=0, seed=seed)
    for num_requests in (1, 6, 16):  # of one step: the policies stand at the same anchors
        by_name = {row.policy: row.throughput_tokens_per_second for row in sweep(texts, jagged, [num_requests], config)}
        assert by_name["oracle"] >= max(by_name.values()) * (1 - 1e-12)
        assert by_name["oracle"] > by_name["verify_all"] or by_name["oracle"] == by_name["verify_all"] > by_name["none"]


def test_early_stop_is_trapped_by_a_stair_and_the_global_search_is_not():
    texts = [ReplayText(np.minimum(0.95, np.arange(20, 0, -1)[:, None] > np.arange(4)), np.minimum(4, np.arange(20, 0, -1)), 0)]
    cost = dataclasses.replace(COST, batch_tokens=(4, 20, 40, 128), verify_seconds=(0.01, 0.03, 0.04, 0.09)).padded()
    trapped, found = (replay(texts, name, cost, 4, CONFIG) for name in ("scheduler", "scheduler_global"))
    assert trapped.mean_budget_tokens == 1.0
    assert found.throughput_tokens_per_second > 1.5 * trapped.throughput_tokens_per_second
    step = 0.003 + 0.03  # of 17 to 20 tokens, as of 20
    assert replay(texts, "fixed_4", cost, 4, CONFIG).throughput_tokens_per_second == pytest.approx(20 / step, rel=1e-12)


def test_a_draft_pass_that_never_pays_is_skipped_but_for_the_share_of_looking():
    useless = [ReplayText(np.minimum(0.9, np.arange(30, 0, -1)[:, None] > np.arange(4)), np.zeros(30, dtype=np.int64), 0)] * 3
    config = dataclasses.replace(CONFIG, num_steps=2000, probe_share=0.01)
    by_name = {row.policy: row for row in sweep(useless, COST, [8], config)}
    plain = by_name["none"].throughput_tokens_per_second
    for name in ("scheduler_or_none", "scheduler_async_or_none"):
        assert 0.985 * plain < by_name[name].throughput_tokens_per_second < plain
        assert 0.0 < by_name[name].drafting_share < 0.1
        assert by_name[name.removesuffix("_or_none")].drafting_share == 1.0
    promised = dataclasses.replace(config, skips_by="confidences")  # overconfident
    assert replay(useless, "scheduler_or_none", COST, 8, promised).drafting_share == 1.0


def test_a_draft_pass_that_pays_is_never_skipped():
    good = [ReplayText((np.arange(30, 0, -1)[:, None] > np.arange(4)) * 0.9, np.minimum(4, np.arange(30, 0, -1)), 0)] * 3
    for name in ("scheduler", "scheduler_async"):
        always, choosing = (replay(good, policy, COST, 2, CONFIG) for policy in (name, f"{name}_or_none"))
        assert dataclasses.replace(choosing, policy=name) == always


# --- samples of the texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fixed_2", "scheduler_async_or_none"])
def test_samples_of_the_texts_are_replayed_as_the_texts_are(policy):
    texts = _texts(9, num_texts=6)
    config = dataclasses.replace(CONFIG, num_rounds=4 * 60 * 3)  # three replays a sample
    everything = replay(texts, policy, COST, 4, config)
    assert everything.num_steps == 3 * 60
    sample = [2, 2, 5, 0, 5, 5]
    drawn = resampled(texts, policy, COST, 4, config, np.array([sample]))
    assert drawn[0] == pytest.approx(replay([texts[n] for n in sample], policy, COST, 4, config).throughput_tokens_per_second, rel=1e-12)
    both = resampled(texts, policy, COST, 4, config, np.array([range(6), sample]))
    assert both[0] == pytest.approx(everything.throughput_tokens_per_second, rel=1e-12)
    assert both[0] != both[1]


def test_samples_are_drawn_with_replacement_and_paired_ratios_know_it():
    text_BN = resample(5, 2000, seed=1)
    assert text_BN.shape == (2000, 5)
    assert np.bincount(text_BN.ravel()) / text_BN.size == pytest.approx(np.full(5, 0.2), abs=0.02)
    assert (np.sort(text_BN) == np.arange(5)).all(axis=1).mean() == pytest.approx(math.factorial(5) / 5**5, abs=0.02)
    theirs_B = np.linspace(1.0, 9.0, 201)
    found = ratio(3.0, 2.0, 1.5 * theirs_B, theirs_B)  # the samples differ, the ratio does not
    assert (found.estimate, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5), rel=1e-12)
    spread = ratio(1.0, 1.0, np.linspace(0.0, 2.0, 201), np.ones(201))
    assert (spread.low, spread.high) == pytest.approx((0.05, 1.95), rel=1e-12)


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
    assert first.context_A.tolist() == [30, 31, 32]
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
        (
            [ROUNDS[1], ROUNDS[2], dataclasses.replace(ROUNDS[0], context_length_tokens=40)],
            "context_length_tokens 40 at anchor 2 must be 32",
        ),
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
        ReplayText(np.array(confidence), np.array(accepted), 0)


def test_true_confidences_are_the_outcomes_and_the_context_counts_on():
    text = HAND.with_true_confidences()
    assert text.confidence_AK.tolist() == [[1, 0], [0, 0], [1, 1], [0, 0], [1, 0]]
    assert (text.context_A.tolist(), mean_context_tokens([text, HAND])) == ([7, 8, 9, 10, 11], 9.0)


def test_policies_are_every_length_and_every_threshold():
    assert policy_names(4, (0.5, 0.9)) == POLICIES


@pytest.mark.parametrize(
    "changes",
    [{"num_steps": 0}, {"num_warmup_steps": -1}, {"num_rounds": 0}, {"lag_rounds": 0}, {"window_rounds": 0}, {"probe_share": -0.1}],
)
def test_impossible_replay_settings_are_refused(changes):
    ((name, value),) = changes.items()
    least = 0 if name == "probe_share" else value + 1
    with pytest.raises(ValueError, match=rf"replay\.{name}: {value} must be at least {least}.*Fix"):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("texts", "policy", "num_requests", "message"),
    [
        ([], "none", 1, r"texts: block sizes \[\] must be exactly one"),
        ([*_texts(0), HAND], "none", 1, r"block sizes \[2, 4\]"),
        (_texts(0), "fixed_5", 1, r"policy: 'fixed_5' must be one of \['none', 'fixed_1'.*'scheduler_global', 'oracle'\]"),
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
