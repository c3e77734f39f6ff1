"""Timed steps of the decoding engine: of the sizes that were asked for, as many as asked for, behind the contexts asked for."""

import dataclasses

import pytest
import torch

from dspark import profiling
from dspark.config import DSparkConfig
from dspark.decoding import DecodingConfig, Request, decode
from dspark.drafters import build_drafter
from dspark.profiling import GROWTH_TOKENS, timed_steps
from dspark.sampling import Sampling
from dspark.step import Step
from dspark.target import KeyValueCache, TransformersTarget, load_head
from dspark.untrained import DraftModel

K, CONTEXT_TOKENS = 4, 20


@pytest.fixture(scope="module")
def target(tiny_target):
    return TransformersTarget(tiny_target, (0, 1), torch.float64, torch.device("cpu"))


@pytest.fixture(scope="module")
def drafter(tiny_target, target):
    torch.manual_seed(0)
    head = load_head(tiny_target, target.dtype)
    config = DSparkConfig("dspark", 2, K, None, "markov", 5, True, (), None)
    return build_drafter(config, head.shape, target.tapped_layers, 63, head.tables, None).to(target.dtype)


class _Recorded:
    """The target, and what it was asked to compute: (requests, tokens, first positions) of each forward."""

    def __init__(self, target):
        self.device, self.shape, self.logits, self._target, self.steps = target.device, target.shape, target.logits, target, []

    def forward(self, step, cache):
        self.steps.append((len(step.lengths_R), len(step.tokens_S), step.positions_S[step.starts_R].tolist()))
        return self._target.forward(step, cache)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_timed_steps_are_those_that_the_engine_ran(target, drafter, num_requests):
    recorded = _Recorded(target)
    sizes = [num_requests, 5 * num_requests, num_requests + 1, 3 * num_requests] * 15  # more than one decoding's text
    timings = timed_steps(recorded, drafter, CONTEXT_TOKENS, num_requests, sizes, seed=0)
    assert [(t.context_tokens, t.num_requests, t.batch_tokens) for t in timings] == [(CONTEXT_TOKENS, num_requests, size) for size in sizes]
    assert all(t.draft_seconds > 0.0 and t.verify_seconds > 0.0 and t.overhead_seconds >= 0.0 for t in timings)
    prompts, rounds = ([s for s in recorded.steps if any(s[2]) == is_round] for is_round in (False, True))
    contexts = {1: [CONTEXT_TOKENS], 3: [26, 20, 13]}[num_requests]
    assert all(found == (1, contexts[0], [0]) for found in prompts)  # one request's, whatever their number
    assert len(prompts) > 1
    assert len(rounds) == len(sizes) + len(prompts)  # the first of each decoding is not counted
    assert all(num == num_requests for num, _, _ in rounds)
    assert all(
        context <= start <= context + GROWTH_TOKENS for _, _, found in rounds for context, start in zip(contexts, found, strict=True)
    )


def test_timed_steps_begin_anew_when_accepted_drafts_end_a_request_before_the_others(target):
    perfect = DraftModel(target, K, 64)
    sizes = [4, 20, 6, 12] * 5
    timings = timed_steps(target, perfect, CONTEXT_TOKENS, 4, sizes, seed=0)
    assert [(t.num_requests, t.batch_tokens) for t in timings] == [(4, size) for size in sizes]


def test_copied_prompts_leave_what_computing_each_leaves(target):
    ids, lengths, slots = list(range(10, 10 + CONTEXT_TOKENS)), [CONTEXT_TOKENS, 11, 7], [0, 1, 2]
    prompts, following = (
        Step.of([ids[:length] for length in lengths], [0] * 3, slots, target.device),
        Step.of([[1, 2], [3], [4, 5]], lengths, slots, target.device),
    )
    found = []
    for model in (target, profiling._CopiedPrompts(target)):
        cache = KeyValueCache(3, CONTEXT_TOKENS + 2)
        found.append([model.forward(prompts, cache), model.forward(following, cache)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.tapped_SLD, other.tapped_SLD)
        torch.testing.assert_close(one.final_SD, other.final_SD)


def test_time_of_a_slow_part_is_in_that_part(target, drafter, monkeypatch):
    """Half a second of waiting, seen by the clock of the engine and of the profiler alike."""
    clock = 0.0

    def passes(seconds, function):
        def slow(*arguments):
            nonlocal clock
            clock += seconds
            return function(*arguments)

        return slow

    monkeypatch.setattr("dspark.decoding.time.perf_counter", lambda: clock)
    recorded = _Recorded(target)
    recorded.forward = passes(2.0, recorded.forward)
    monkeypatch.setattr(drafter, "propose", passes(0.5, drafter.propose))
    timings = timed_steps(recorded, drafter, CONTEXT_TOKENS, 2, [2, 6, 10], seed=0)
    assert {(t.draft_seconds, t.verify_seconds, t.overhead_seconds) for t in timings} == {(0.5, 2.0, 0.0)}


def test_engine_that_verifies_another_number_is_found_out(target, drafter, monkeypatch):
    monkeypatch.setattr(
        profiling,
        "decode",
        lambda target, drafter, requests, config, on_step: decode(
            target,
            drafter,
            requests,
            dataclasses.replace(config, verification=dataclasses.replace(config.verification, choose=None)),
            on_step,
        ),
    )
    with pytest.raises(RuntimeError, match="verified 10 tokens where 4 of 2 requests were asked for"):
        timed_steps(target, drafter, CONTEXT_TOKENS, 2, [4], seed=0)


def test_text_of_timed_steps_is_the_targets(target, drafter):
    """Copied prompts change nothing of what is decoded."""
    requests = [Request(str(i), tuple(range(3, 3 + CONTEXT_TOKENS - 4 * i))) for i in range(3)]
    config = DecodingConfig(Sampling("greedy", 0.0), 12, (), 3, 0)
    texts = [[c.token_ids for c in decode(model, drafter, requests, config)] for model in (target, profiling._CopiedPrompts(target))]
    assert texts[0] == texts[1]
