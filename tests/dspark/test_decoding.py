"""Speculative decoding on a tiny random Llama: the target's own text and distribution, whatever the drafter says.

The drafter is a DSpark whose Markov head holds the target's next-token logits of one-token contexts and whose backbone is
random: it is often right, often wrong, and its block logits depend on the whole context.
"""

import dataclasses
import math
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from dspark.calibration import sigmoid
from dspark.config import DFlashConfig, DSparkConfig, Eagle3Config, MtpConfig
from dspark.decoding import DecodingConfig, Request, Verification, decode
from dspark.draft_gate import DraftGate
from dspark.drafters import build_drafter
from dspark.drafters.base import ContextRows, PackedContext, TrainingBatch
from dspark.sampling import Sampling, distribution
from dspark.scheduler import SpsTable, admit, admit_async, fixed, static_policy, threshold
from dspark.step import Step
from dspark.target import KeyValueCache, TransformersTarget, load_head
from dspark.trace import every_position
from dspark.untrained import DraftModel, PromptLookup
from tests import oracles

TAPPED, K, V = (0, 1), 4, 64
REDUCED = torch.arange(0, V, 3)
FLOATS = ("draft_probs", "target_probs", "confidence_logits")


CONFIGS = {
    "dspark": DSparkConfig("dspark", 2, K, None, "markov", V, True, (), None),
    "rnn": DSparkConfig("dspark", 2, K, None, "rnn", 5, True, (), None),
    "dflash": DFlashConfig("dflash", 2, K, None, True, (), None),
    "one_plus_n": DFlashConfig("dflash", 2, K, None, False, (), None),
    "sliding": DFlashConfig("dflash", 2, K, None, True, (0,), 4),
    "eagle3": Eagle3Config("eagle3", K, None),
    "mtp": MtpConfig("mtp", 1, None),
}


@pytest.fixture(scope="module")
def target(tiny_target):
    return TransformersTarget(tiny_target, TAPPED, torch.float64, torch.device("cpu"))


def _target_of(tiny_target, kind):
    return TransformersTarget(tiny_target, (2,) if kind == "mtp" else TAPPED, torch.float64, torch.device("cpu"))


def _drafter(folder: Path, target, kind="dspark", draft_ids=None):
    head = load_head(folder, target.dtype)
    drafter = build_drafter(CONFIGS[kind], head.shape, target.tapped_layers, 63, head.tables, draft_ids).to(target.dtype)
    generator = np.random.default_rng(0)
    for _, parameter in sorted(drafter.named_parameters()):
        if parameter.dim() > 1:
            parameter.data.copy_(torch.from_numpy(generator.normal(0.0, 0.3, parameter.shape)))
    if kind == "dspark":
        drafter.norm.weight.data.fill_(0.2)  # the backbone disturbs the head's guess, it does not drown it
        logits_VV = torch.stack([target.logits(target.states([token]).final_SD)[0] for token in range(V)])
        drafter.markov_head.markov_w1.weight.data.copy_(torch.eye(V))
        drafter.markov_head.markov_w2.weight.data.copy_(logits_VV.T[drafter.draft_ids_W])
    return drafter


@pytest.fixture(scope="module")
def drafter(tiny_target, target):
    return _drafter(tiny_target, target)


REQUESTS = [
    Request(f"request-{i}", tuple(ids), domain="math", source="made up")
    for i, ids in enumerate([[3, 14, 15, 9, 26, 5], [35], [8, 9, 7, 9], [32, 38, 46, 26, 43, 38, 32, 7, 9], [50, 28, 8]])
]
CONFIG = DecodingConfig(Sampling("probabilistic", 1.0), max_new_tokens=24, stop_ids=(), batch_size=5, seed=3)


def _config(mode="probabilistic", temperature=1.0, **changes):
    return dataclasses.replace(CONFIG, sampling=Sampling(mode, temperature), **changes)


def _run(target, drafter, config, requests=REQUESTS):
    completions = list(decode(target, drafter, requests, config))
    assert sorted(c.request.id for c in completions) == sorted(r.id for r in requests)
    return {c.request.id: c for c in completions}


def _texts(completions):
    return {name: c.token_ids for name, c in completions.items()}


def _assert_same_round(a, b, tolerance=1e-9):
    """Equal but for rounding, which depends on the neighbours in a batch."""
    for name in FLOATS:
        assert getattr(a, name) == pytest.approx(getattr(b, name), abs=tolerance)
    blank = dict.fromkeys(FLOATS, ())
    assert dataclasses.replace(a, **blank) == dataclasses.replace(b, **blank)


# --- temperature 0 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "draft_ids"),
    [("dspark", None), ("dspark", REDUCED), ("rnn", None), ("dflash", None), ("eagle3", REDUCED), ("mtp", None)],
    ids=["dspark", "reduced", "rnn", "dflash", "eagle3", "mtp"],
)
def test_text_at_temperature_zero_equals_plain_greedy_and_transformers(tiny_target, kind, draft_ids, batch_size, mode):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float64).eval()
    target, config = _target_of(tiny_target, kind), _config(mode, 0.0, batch_size=batch_size)
    plain = _texts(_run(target, None, config))
    speculative = _run(target, _drafter(tiny_target, target, kind, draft_ids), config)
    assert _texts(speculative) == plain
    for request in REQUESTS:
        prompt = torch.tensor([request.prompt_ids])
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert plain[request.id] == generated[0, prompt.shape[1] :].tolist()
    if kind == "dspark" and draft_ids is None:  # else this test would only see rejections
        accepted = [r.accepted for c in speculative.values() for r in c.rounds]
        assert {0, K} <= set(accepted)


# --- temperature 1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_speculative", [True, False], ids=["speculative", "plain"])
def test_samples_in_batches_of_one_and_five_are_equal_by_request_id(tiny_target, dtype, is_speculative):
    target = TransformersTarget(tiny_target, TAPPED, dtype, torch.device("cpu"))
    drafter = _drafter(tiny_target, target) if is_speculative else None
    one, five = (_run(target, drafter, _config(batch_size=n)) for n in (1, 5))
    turned = _run(target, drafter, _config(batch_size=2), REQUESTS[::-1])
    assert _texts(one) == _texts(five) == _texts(turned)
    assert len({tuple(c.token_ids) for c in one.values()}) == len(REQUESTS)
    for name, completion in one.items():
        for a, b in zip(completion.rounds, five[name].rounds, strict=True):
            _assert_same_round(a, b, 1e-9 if dtype == torch.float64 else 1e-4)


def test_samples_of_another_seed_or_id_differ(target, drafter):
    first, other = _texts(_run(target, drafter, _config())), _texts(_run(target, drafter, _config(seed=4)))
    assert all(first[name] != other[name] for name in first)
    twins = [dataclasses.replace(REQUESTS[0], id=name) for name in "ab"]
    assert len({tuple(text) for text in _texts(_run(target, drafter, _config(), twins)).values()}) == 2


PROMPT, NUM_SAMPLES = (3, 14, 15), 3000


@pytest.fixture(scope="module")
def exact(target):
    """The target's probability of the first two tokens after PROMPT, and of the second and third, [V, V] each."""

    def following(prefixes):
        step = Step.of(prefixes, [0] * len(prefixes), range(len(prefixes)), target.device)
        states = target.forward(step, KeyValueCache(len(prefixes), len(prefixes[0])))
        return distribution(target.logits(states.final_SD[step.starts_R + step.lengths_R - 1]), 1.0)

    first = following([PROMPT])[0]
    second = following([[*PROMPT, a] for a in range(V)])
    third = following([[*PROMPT, a, b] for a in range(V) for b in range(V)]).view(V, V, V)
    pair = first[:, None] * second
    return pair.numpy(), (pair[..., None] * third).sum(0).numpy()


def _pairs(target, drafter, mode):
    """Counts of the first two, and of the second and third tokens over many requests of one prompt."""
    requests = [Request(f"sample-{i}", PROMPT) for i in range(NUM_SAMPLES)]
    completions = decode(target, drafter, requests, _config(mode, max_new_tokens=3, batch_size=500))
    texts = np.array([c.token_ids for c in completions])
    counts = np.zeros((2, V, V))
    for i in range(2):
        np.add.at(counts[i], (texts[:, i], texts[:, i + 1]), 1)
    return counts


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
def test_speculative_tokens_at_temperature_one_follow_the_targets_distribution(target, drafter, exact, mode):
    for counts, wanted in zip(_pairs(target, drafter, mode), exact, strict=True):
        assert oracles.fit(counts.ravel(), wanted.ravel()) > 1e-3
        assert oracles.fit(counts.sum(0), wanted.sum(0)) > 1e-3


def test_speculative_tokens_without_the_residual_fail_the_same_test(target, drafter, exact, monkeypatch):
    """The negative control: a correction drawn from the target itself is biased, and the counts show it."""
    monkeypatch.setattr("dspark.sampling.residual", lambda target_probs, draft_probs: target_probs)
    counts = _pairs(target, drafter, "probabilistic")
    assert oracles.fit(counts[0].ravel(), exact[0].ravel()) < 1e-9


# --- how much is verified -------------------------------------------------------------------------------------------------

SPS = SpsTable((1, 40), (0.0, 0.0), (1.0, 9.0))
POLICIES = {
    "none": Verification("none", fixed(0, SPS)),
    "fixed_2": Verification("fixed_2", fixed(2, SPS)),
    "threshold": Verification("threshold", threshold(0.5, SPS)),
    "scheduler": Verification("scheduler", partial(admit, sps=SPS)),
    "scheduler_async": Verification("scheduler_async", partial(admit_async, sps=SPS), lag_rounds=2),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_text_at_temperature_zero_is_the_same_whatever_is_verified(target, drafter, policy):
    """Seven requests in three slots, which finish at different rounds: verified lengths differ within a step."""
    requests = [*REQUESTS, *(dataclasses.replace(r, id=f"again-{r.id}", prompt_ids=r.prompt_ids[::-1]) for r in REQUESTS[:2])]
    config = _config("greedy", 0.0, batch_size=3, max_new_tokens=17, stop_ids=(7,))
    drafted = _run(target, drafter, dataclasses.replace(config, verification=POLICIES[policy]), requests)
    assert _texts(drafted) == _texts(_run(target, None, config, requests))
    rounds = [r for c in drafted.values() for r in c.rounds]
    assert {r.policy for r in rounds} == {policy}
    assert all(len(r.draft_tokens) == len(r.target_probs) == r.proposed >= r.accepted for r in rounds)
    lengths = {r.proposed for r in rounds if not r.ended_by_stop}
    assert lengths == {"none": {0}, "fixed_2": {2}}.get(policy, lengths)
    assert policy in ("none", "fixed_2") or len(lengths) > 1


def test_threshold_verifies_the_prefix_whose_calibrated_confidences_reach_it(target, drafter):
    verification = Verification("threshold", threshold(0.6, SPS), confidence=lambda logits: sigmoid(logits / 3.0))
    whole = _run(target, drafter, _config(max_new_tokens=2))  # one round a request, at the same anchor
    cut = _run(target, drafter, _config(max_new_tokens=2, verification=verification))
    for name, completion in whole.items():
        (uncut,), (r,) = completion.rounds, cut[name].rounds
        below = [k for k, logit in enumerate(uncut.confidence_logits) if 1 / (1 + math.exp(-logit / 3.0)) < 0.6]
        assert r.proposed == (below[0] if below else K)
        assert (r.accepted, r.draft_tokens) == (min(uncut.accepted, r.proposed), uncut.draft_tokens[: r.proposed])


@pytest.mark.parametrize(
    ("name", "same"), [("fixed_2", fixed(2, SPS)), ("threshold_0.45", threshold(0.45, SPS)), ("threshold_1", threshold(1, SPS))]
)
def test_policy_of_a_setting_chooses_as_the_one_with_a_table(name, same):
    confidence_RK = np.random.default_rng(0).random((50, 4))
    assert static_policy(name)(confidence_RK).lengths_R.tolist() == same(confidence_RK).lengths_R.tolist()


@pytest.mark.parametrize(
    "name", ["verify_all", "fixed_", "fixed_-1", "fixed_1.5", "threshold_1.5", "threshold_nan", "threshold_x", "scheduler"]
)
def test_policy_that_needs_more_than_its_name_is_refused(name):
    with pytest.raises(ValueError, match=rf"policy: '{name}' must be .* Fix:"):
        static_policy(name)


def test_asynchronous_lengths_come_from_the_confidences_of_earlier_rounds(target, drafter):
    seen = []

    def choose(stale_RK, confidence_RK):
        seen.append((stale_RK.copy(), confidence_RK.copy()))
        return admit_async(stale_RK, confidence_RK, SPS)

    _run(target, drafter, _config(verification=Verification("async", choose, lag_rounds=2), max_new_tokens=8), REQUESTS[:1])
    assert len(seen) > 3
    for i, (stale, _) in enumerate(seen):
        assert np.isnan(stale).all() if i < 2 else np.array_equal(stale, seen[i - 2][1])


class EveryThird(DraftGate):
    """Opens at every third step, whatever that came to."""

    def __init__(self):
        super().__init__(float, 1, 1, 0.0)
        self.seen = []

    def opens(self, num_requests, lost_seconds_S=None):
        return np.array(len(self.seen) % 3 == 0)

    def observe(self, num_requests, num_tokens, seconds):
        self.seen.append((num_requests, num_tokens, seconds))


def test_steps_before_which_the_gate_is_closed_draft_nothing_and_change_no_text(target, drafter):
    config, gates, known = _config("greedy", 0.0, batch_size=5, max_new_tokens=17, stop_ids=()), [], []

    def new_gate():
        gates.append(EveryThird())
        return gates[-1]

    def choose(stale_RK, confidence_RK):
        known.append((stale_RK.copy(), confidence_RK.copy()))
        return admit_async(stale_RK, confidence_RK, SPS)

    gated = Verification("gated", choose, lag_rounds=2, new_gate=new_gate)
    drafted = _run(target, drafter, dataclasses.replace(config, verification=gated))
    assert _texts(drafted) == _texts(_run(target, None, config))
    (gate,) = gates
    assert len(known) == len(gate.seen[::3])
    assert sum(num_tokens for _, num_tokens, _ in gate.seen) == sum(len(c.token_ids) - 1 for c in drafted.values())
    assert sum(num_requests for num_requests, _, _ in gate.seen) == sum(len(c.rounds) for c in drafted.values())
    assert all(seconds > 0 for _, _, seconds in gate.seen)
    rounds = [r for c in drafted.values() for r in c.rounds]
    assert any(r.proposed for r in rounds)
    assert not any(r.proposed for r in rounds if r.round_index % 3)
    assert np.isnan(known[0][0]).all()
    assert np.array_equal(known[1][0], known[0][1])  # two steps before the fourth, the first's were the latest


def test_gate_asks_no_drafter_when_there_is_none(target):
    config = _config("greedy", 0.0, verification=Verification(new_gate=lambda: pytest.fail("a gate was made")))
    assert _texts(_run(target, None, config)) == _texts(_run(target, None, _config("greedy", 0.0)))


def test_step_times_count_every_token_once(target, drafter):
    steps = []
    completions = list(decode(target, drafter, REQUESTS, _config(batch_size=2, verification=POLICIES["fixed_2"]), steps.append))
    assert sum(s.num_emitted for s in steps) == sum(len(c.token_ids) - 1 for c in completions)  # the first is the prefill's
    assert sum(s.num_requests for s in steps) == sum(len(c.rounds) for c in completions)
    assert all(s.batch_tokens == 3 * s.num_requests and min(s.draft_seconds, s.verify_seconds) > 0 for s in steps)


# --- drafters without training --------------------------------------------------------------------------------------------


def test_the_target_as_its_own_draft_model_is_always_accepted(tiny_target, target):
    own = DraftModel(TransformersTarget(tiny_target, (0,), torch.float64, torch.device("cpu")), 3, V)
    for config in (_config("greedy", 0.0, batch_size=2), _config("probabilistic", 0.9, batch_size=2)):
        completions = _run(target, own, config)
        assert all(r.accepted == r.proposed == 3 for c in completions.values() for r in c.rounds)
        assert config.sampling.temperature > 0 or _texts(completions) == _texts(_run(target, None, config))


def test_prompt_lookup_drafts_what_followed_the_earliest_longest_match():
    lookup, rows = PromptLookup(4, 2, 3, V), np.random.default_rng(0).integers(0, 3, (200, 12)).tolist()
    context, step = lookup.new_context(200, 12), Step.of([row[:-1] for row in rows], [0] * 200, range(200), torch.device("cpu"))
    lookup.extend_context(context, ContextRows(step, torch.zeros(0), step.tokens_S))
    anchors = torch.tensor([row[-1] for row in rows])
    proposal = lookup.propose(context, anchors, torch.full((200,), 11), lambda _k, logits: logits.argmax(-1))
    for row, drafted, length in zip(rows, proposal.tokens_BK.tolist(), proposal.lengths_B.tolist(), strict=True):
        wanted = []
        for n in (3, 2):
            starts = [i for i in range(len(row) - n) if row[i : i + n] == row[-n:]]
            if starts:
                wanted = row[starts[0] + n :][:4]
                break
        assert drafted[:length] == wanted
    assert {0, 1, 4} <= set(proposal.lengths_B.tolist())


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
def test_prompt_lookup_keeps_the_text_of_plain_greedy_decoding(target, mode):
    requests = [Request(f"{i}", tuple(row)) for i, row in enumerate(np.random.default_rng(1).integers(0, 4, (6, 20)).tolist())]
    config = _config(mode, 0.0, batch_size=4)
    drafted = _run(target, PromptLookup(4, 1, 3, V), config, requests)
    assert _texts(drafted) == _texts(_run(target, None, config, requests))
    assert len({r.proposed for c in drafted.values() for r in c.rounds}) > 2
    assert any(r.accepted for c in drafted.values() for r in c.rounds)


# --- rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_add_up_to_the_text(target, drafter, temperature):
    for completion in _run(target, drafter, _config(temperature=temperature, max_new_tokens=25)).values():
        text = [completion.token_ids[0]]
        for i, r in enumerate(completion.rounds):
            assert (r.round_index, r.anchor_token, r.request_id) == (i, text[-1], completion.request.id)
            assert r.context_length_tokens == len(completion.request.prompt_ids) + len(text) - 1
            assert (r.domain, r.source, r.temperature, r.policy) == ("math", "made up", temperature, "verify_all")
            assert len(r.draft_tokens) == len(r.draft_probs) == len(r.target_probs) == len(r.confidence_logits) == r.proposed == K
            assert not r.ended_by_stop
            text += [*r.draft_tokens[: r.accepted], r.next_token]
        assert text[:25] == completion.token_ids
        emitted = sum(r.accepted + 1 for r in completion.rounds)
        last = completion.rounds[-1].accepted + 1  # only the last round may be cut by the limit
        assert emitted - last < len(completion.token_ids) - 1 <= emitted
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 25)


def test_stop_token_that_only_the_limit_keeps_out_of_the_text_ends_no_round(tiny_target, target):
    """The target drafts for itself, so that every draft is accepted: the limit falls before, at and behind an accepted stop token."""
    own = DraftModel(TransformersTarget(tiny_target, (0,), torch.float64, torch.device("cpu")), 3, V)
    (plain,) = _run(target, None, _config("greedy", 0.0, max_new_tokens=12), REQUESTS[:1]).values()
    place = next(i for i in range(2, 12) if (i - 1) % 4 in (1, 2) and plain.token_ids.index(plain.token_ids[i]) == i)  # inside a draft
    stop = plain.token_ids[place]
    first = place - (place - 1) % 4  # of the draft
    for limit in range(first + 1, place + 3):
        (completion,) = _run(target, own, _config("greedy", 0.0, max_new_tokens=limit, stop_ids=(stop,)), REQUESTS[:1]).values()
        is_in_text = limit > place
        last = completion.rounds[-1]
        assert completion.token_ids == plain.token_ids[: min(limit, place + 1)]
        assert completion.finish_reason == ("stop" if is_in_text else "length")
        assert last.ended_by_stop is is_in_text is (last.next_token is None)
        assert last.context_length_tokens == len(completion.request.prompt_ids) + first - 1
        assert last.accepted == last.proposed == (place - first + 1 if is_in_text else 3)


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_rounds_hold_the_probabilities_of_a_teacher_forced_pass(tiny_target, kind, mode):
    """The drafter's context, grown over rounds with rejections, padding and neighbours, equals the whole text's states."""
    target = _target_of(tiny_target, kind)
    drafter = _drafter(tiny_target, target, kind)
    num_drafted = drafter.config.block_size
    for completion in _run(target, drafter, _config(mode, 0.7)).values():
        text = [*completion.request.prompt_ids, *completion.token_ids]
        states = target.states(text)
        for r in completion.rounds:
            a = r.context_length_tokens
            previous = torch.tensor([[[r.anchor_token, *r.draft_tokens[:-1]]]])
            context = PackedContext.of(states.tapped_SLD[:a], torch.tensor(text[1 : a + 1]), [a])
            batch = TrainingBatch(context, torch.tensor([[a]]), previous, previous, previous >= 0, None, None)
            with torch.no_grad():
                output, temperature = drafter(batch), 0.7 if mode == "probabilistic" else 0.0
                p_draft = distribution(drafter.head.logits(output.hidden_BAKD, output.bias_BAKR)[0, 0], temperature)
            assert r.draft_probs == pytest.approx([float(p_draft[k, x]) for k, x in enumerate(r.draft_tokens)], abs=1e-9)
            logits = output.confidence_logits_BAK
            assert r.confidence_logits == pytest.approx([] if logits is None else logits[0, 0].tolist(), abs=1e-9)
            drafted = target.states([*text[: a + 1], *r.draft_tokens])
            p_target = distribution(target.logits(drafted.final_SD[a : a + num_drafted]), 0.7)
            assert r.target_probs == pytest.approx([float(p_target[k, x]) for k, x in enumerate(r.draft_tokens)], abs=1e-9)


def test_ablated_rounds_carry_their_variant(target, drafter):
    completions = _run(target, drafter, _config(variant="no_markov", max_new_tokens=3))
    assert {r.variant for c in completions.values() for r in c.rounds} == {"no_markov"}


# --- where texts end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_token_ends_the_text_and_cuts_the_round_that_accepts_it(target, drafter, temperature):
    requests = [dataclasses.replace(REQUESTS[i % 5], id=f"{i}") for i in range(20)]
    free = _run(target, drafter, _config(temperature=temperature), requests)
    stop_ids = tuple(token for token, _ in Counter(t for c in free.values() for t in c.token_ids[1:]).most_common(4))
    stopped = _run(target, drafter, _config(temperature=temperature, stop_ids=stop_ids), requests)
    kinds = Counter()
    for name, completion in stopped.items():
        whole = free[name].token_ids
        end = next((i + 1 for i, token in enumerate(whole) if token in stop_ids), None)
        assert completion.token_ids == whole[:end]  # a request's stream does not depend on what ends it
        assert completion.finish_reason == ("length" if end is None else "stop")
        for i, (r, uncut) in enumerate(zip(completion.rounds, free[name].rounds, strict=False)):
            at = next((k + 1 for k, token in enumerate(uncut.draft_tokens[: uncut.accepted]) if token in stop_ids), None)
            assert r.ended_by_stop == (at is not None)
            if at is None:
                _assert_same_round(r, uncut)
                kinds["stop as next token"] += r.next_token in stop_ids
            else:
                assert i == len(completion.rounds) - 1
                columns = {name: getattr(uncut, name)[:at] for name in ("draft_tokens", *FLOATS)}
                _assert_same_round(r, dataclasses.replace(uncut, **columns, proposed=at, accepted=at, next_token=None, ended_by_stop=True))
                kinds["stop accepted"] += 1
                kinds["stop accepted and more after it"] += at < uncut.accepted
        if completion.finish_reason == "stop":
            assert len(completion.token_ids) - 1 == sum(r.accepted + (not r.ended_by_stop) for r in completion.rounds)
    assert min(kinds["stop accepted"], kinds["stop as next token"]) > 0, kinds
    assert temperature == 0.0 or kinds["stop accepted and more after it"] > 0, kinds


def test_stop_token_from_the_prefill_ends_the_text_without_a_round(target, drafter):
    first = _run(target, drafter, _config(temperature=0.0, max_new_tokens=1))
    config = _config(temperature=0.0, stop_ids=tuple({c.token_ids[0] for c in first.values()}))
    for name, completion in _run(target, drafter, config).items():
        assert (completion.token_ids, completion.rounds, completion.finish_reason) == (first[name].token_ids, [], "stop")


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("is_speculative", [True, False], ids=["speculative", "plain"])
def test_limit_of_new_tokens_cuts_the_same_text(target, drafter, limit, is_speculative):
    model = drafter if is_speculative else None
    whole, cut = (_run(target, model, _config(max_new_tokens=n)) for n in (24, limit))
    for name, completion in cut.items():
        assert completion.token_ids == whole[name].token_ids[:limit]
        assert completion.finish_reason == "length"
        for a, b in zip(completion.rounds, whole[name].rounds, strict=False):
            _assert_same_round(a, b)
        assert bool(completion.rounds) == (is_speculative and limit > 1)


def test_request_without_prompt_tokens_is_refused_by_name(target, drafter):
    with pytest.raises(ValueError, match="request nothing: the prompt has no tokens"):
        list(decode(target, drafter, [*REQUESTS, Request("nothing", ())], CONFIG))


def test_a_request_that_is_there_twice_is_refused_by_name(target, drafter):
    with pytest.raises(ValueError, match="request request-2: its id is there twice"):
        list(decode(target, drafter, [*REQUESTS, REQUESTS[2]], CONFIG))


def test_prompts_beyond_what_one_step_may_begin_wait_and_keep_their_texts(target, drafter, monkeypatch):
    wanted = _texts(_run(target, drafter, _config()))
    monkeypatch.setattr("dspark.decoding.PREFILL_TOKENS", 8)
    assert _texts(_run(target, drafter, _config())) == wanted


def test_drafter_in_another_precision_than_its_target_decodes_the_same_greedy_text(tiny_target, target, drafter):
    config = _config(temperature=0.0, max_new_tokens=12)
    wanted = _texts(_run(target, None, config))
    for dtype in (torch.float32, torch.bfloat16):
        other = _drafter(tiny_target, target).to(dtype)
        assert _texts(_run(target, other, config)) == wanted
        assert all(len(c.token_ids) == 12 for c in _run(target, other, _config(max_new_tokens=12)).values())


# --- a block at every position ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [False, True], ids=["limit", "stop"])
@pytest.mark.parametrize(
    ("kind", "draft_ids"), [("dspark", REDUCED), ("dflash", None), ("eagle3", None)], ids=["reduced", "dflash", "eagle3"]
)
def test_blocks_at_every_position_are_the_rounds_that_decoding_makes_where_it_goes(tiny_target, target, kind, draft_ids, stop):
    """Where decoding passes, the recorded block is its round; where it does not, decoding the prompt up to there makes it."""
    drafter, config = _drafter(tiny_target, target, kind, draft_ids), _config("greedy", 0.0)
    if stop:
        text = _run(target, None, config)["request-0"].token_ids
        config = dataclasses.replace(config, stop_ids=(text[9],))
    for completion in _run(target, drafter, config).values():
        prompt, text = completion.request.prompt_ids, completion.token_ids
        found = every_position(target, drafter, completion, config)
        assert [r.context_length_tokens for r in found] == [len(prompt) + i for i in range(len(text) - 1)]
        assert all(r.proposed == min(K, len(text) - 1 - i) for i, r in enumerate(found))
        for r in completion.rounds:
            i = r.context_length_tokens - len(prompt)
            if i >= len(found):
                continue  # an anchor that is the text's last token, at the limit
            assert found[i].draft_tokens == r.draft_tokens[: found[i].proposed]
            assert found[i].confidence_logits == pytest.approx(r.confidence_logits[: found[i].proposed], abs=1e-9)
            assert found[i].accepted == min(r.accepted, found[i].proposed)
            assert found[i].ended_by_stop == r.ended_by_stop
        i = len(found) // 2
        from_there = Request("there", (*prompt, *text[:i]), "math", "made up")
        first = _run(target, drafter, config, [from_there])["there"].rounds[0]
        assert found[i].draft_tokens == first.draft_tokens[: found[i].proposed]
        assert found[i].accepted == min(first.accepted, found[i].proposed)


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
def test_blocks_at_every_position_of_sampled_texts_follow_the_law_of_decoding(tiny_target, target, mode):
    """At temperature 1, over texts of many requests with one prompt: what is recorded at the first anchor has the distribution of
    the round that decoding made there, in its drafted tokens and in how many were accepted."""
    drafter = _drafter(tiny_target, target, "dspark", REDUCED)
    requests = [Request(f"one of many {i}", (3, 14, 15), "math", "made up") for i in range(800)]
    config = _config(mode, 1.0, max_new_tokens=K + 2, batch_size=400)
    counts = {"accepted": ([], []), "first": ([], []), "second": ([], [])}
    for completion in _run(target, drafter, config, requests).values():
        recorded, made = every_position(target, drafter, completion, config)[0], completion.rounds[0]
        assert recorded.anchor_token == made.anchor_token
        assert completion.token_ids[1 : 1 + recorded.accepted] == list(recorded.draft_tokens[: recorded.accepted])
        for column, r in enumerate((made, recorded)):
            counts["accepted"][column].append(r.accepted)
            counts["first"][column].append(r.draft_tokens[0])
            counts["second"][column].append(r.draft_tokens[1])
    for name, (made, recorded) in counts.items():
        common = [value for value, number in Counter(made + recorded).items() if number >= 20]
        table = [[column.count(value) for value in common] for column in (made, recorded)]
        table = np.array([[*row, len(made) - sum(row)] for row in table])
        table = table[:, table.sum(0) > 0]
        assert table.shape[1] > 1
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-3, name
