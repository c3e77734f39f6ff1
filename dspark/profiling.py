"""Steps of the decoding engine, of exactly so many tokens, timed: what a step costs where `decoding.decode` itself runs it (§5, SPS).

Requests whose prompts are the beginnings of a made-up one are decoded at temperature 0 by a policy that hands out lengths. What is timed
is all of a real step: the drafter's pass, the policy, the target's forward, the test, the drafter's context and the rounds' bookkeeping.
Contexts and lengths differ from request to request, as those of a load do, since attention pads to the longest.
"""

import contextlib
import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dspark.decoding import DecodingConfig, Request, StepTimes, Verification, decode
from dspark.drafters.base import BlockDrafter
from dspark.sampling import Sampling
from dspark.scheduler import Admission
from dspark.step import Step
from dspark.step_cost import StepTiming, random_lengths
from dspark.target import KeyValueCache, TargetModel, TargetStates

GROWTH_TOKENS = 32  # contexts get longer by so much, then decoding begins anew


def timed_steps(
    target: TargetModel, drafter: BlockDrafter, context_tokens: int, num_requests: int, sizes: Sequence[int], seed: int
) -> list[StepTiming]:
    """A step for each size (R to R * (K + 1) tokens), in this order, behind contexts of half to one and a half times `context_tokens`, in
    the mean so many when a decoding begins and up to 32 more later.

    The first step of every decoding is not counted: it follows a prefill, and is a warm-up.
    """
    generator = np.random.default_rng(seed)
    lengths = [context_tokens * (2 * i + 1 + num_requests) // (2 * num_requests) for i in range(num_requests)]
    prompt = tuple(generator.integers(target.shape.vocab_size, size=lengths[-1]).tolist())
    requests = [Request(str(i), prompt[:length]) for i, length in enumerate(lengths)]
    script = _Script(context_tokens, num_requests, drafter.block_size, sizes, generator)
    verification = Verification("script", script.choose)
    growth = max(GROWTH_TOKENS, 4 * (drafter.block_size + 1))  # a few steps, even where every draft is accepted
    config = DecodingConfig(Sampling("greedy", 0.0), growth, (), num_requests, seed, verification=verification)
    while len(script.timings) < len(sizes):
        script.ended_at = None
        with contextlib.suppress(_EndError):
            list(decode(_CopiedPrompts(target), drafter, requests, config, script.on_step))
    return script.timings


class _EndError(Exception):
    """Ends a decoding before its texts do: all is measured, or a request whose drafts were accepted has ended before the others."""


class _Script:
    """Hands out lengths, and keeps what their steps took."""

    def __init__(
        self, context_tokens: int, num_requests: int, block_size: int, sizes: Sequence[int], generator: np.random.Generator
    ) -> None:
        self._context_tokens, self._num_requests, self._block_size = context_tokens, num_requests, block_size
        self._sizes, self._generator = sizes, generator
        self.timings: list[StepTiming] = []
        self.ended_at: float | None = None  # of the step before

    def choose(self, confidence_RK: np.ndarray) -> Admission:
        if len(confidence_RK) < self._num_requests:
            raise _EndError
        batch_tokens = self._sizes[len(self.timings)]
        return Admission(random_lengths(batch_tokens, self._num_requests, self._block_size, self._generator), 0.0, batch_tokens)

    def on_step(self, times: StepTimes) -> None:
        now, size = time.perf_counter(), self._sizes[len(self.timings)]
        if times.batch_tokens != size:
            raise RuntimeError(
                f"the engine verified {times.batch_tokens} tokens where {size} of {times.num_requests} requests were asked for"
            )
        if self.ended_at is not None:
            overhead_seconds = max(now - self.ended_at - times.draft_seconds - times.verify_seconds, 0.0)
            parts = times.draft_seconds, times.verify_seconds, overhead_seconds
            self.timings.append(StepTiming(self._context_tokens, times.num_requests, times.batch_tokens, *parts))
        if len(self.timings) == len(self._sizes):
            raise _EndError
        self.ended_at = time.perf_counter()


class _CopiedPrompts(TargetModel):
    """Computes the longest prompt of a step, of which all others are beginnings, and copies what it leaves in the cache: rounds read memory
    of their own."""

    def __init__(self, target: TargetModel) -> None:
        self._target, self.device, self.shape = target, target.device, target.shape

    def forward(self, step: Step, cache: KeyValueCache) -> TargetStates:
        if int(step.positions_S[0]) > 0:
            return self._target.forward(step, cache)
        first, *others = step.slots_R.tolist()
        longest, *lengths = step.lengths_R.tolist()  # requests begin in the order of falling lengths
        states = self._target.forward(Step.of([step.tokens_S[:longest].tolist()], [0], [first], self.device), cache)
        for slot, length in zip(others, lengths, strict=True):
            cache.move(first, slot, length)
        return TargetStates(states.tapped_SLD[step.column_S], states.final_SD[step.column_S])

    def logits(self, final: Tensor) -> Tensor:
        return self._target.logits(final)
