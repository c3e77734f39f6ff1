"""Lossless speculative decoding: draft a block, verify as much of it as pays in one target forward, accept a prefix, repeat.

`decode` is the one function from prompts to texts and rounds; evaluation, tracing and plain generation (no drafter) all
go through it. A round of one request whose last token x_0 sits at position a:

    drafter  sees the context of positions < a, drafts x_1..x_K
    policy   from the confidences of all requests of the step, how many tokens l <= K of each are verified
    target   one forward over x_0..x_l at positions a..a+l of every request, without padding
    verify   accepts a prefix, draws the correction or bonus: the next x_0
    context  tapped states of the accepted positions go into the drafter's context

`batch_size` slots are kept full: a finished request's slot goes to the next prompt at once, and when none is left the last slot
moves into the gap, so that the caches of the live requests are always their first rows. Every random number is keyed by request
and position (`sampling.Noise`). Shapes: B requests, K drafted tokens, S tokens of a step.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.calibration import sigmoid
from dspark.draft_gate import DraftGate
from dspark.drafters.base import BlockDrafter, ContextRows, Proposal
from dspark.rounds import VERIFY_ALL, Round
from dspark.sampling import VERIFY, BlockDraw, Noise, Sampling, draw, verify
from dspark.scheduler import Admission
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel, TargetStates

PREFILL_TOKENS = 8192  # of the prompts that begin in one step; a longer prompt begins alone


@dataclass(frozen=True)
class Request:
    """`id`: of its own among the requests of a `decode`, the key of its random numbers."""

    id: str
    prompt_ids: tuple[int, ...]
    domain: str = ""
    source: str = ""


@dataclass(frozen=True)
class Verification:
    """How much of each draft is verified: `choose` of dspark/scheduler.py on `confidence(logits)`; without it, everything.

    With `lag_rounds`, `choose` is asynchronous: it is handed each request's confidences of so many rounds ago, NaN where there
    are none, and the present ones. A drafter without a confidence head counts as certain. `new_gate`: a gate for a decoding, which
    may leave out the draft pass of a step.
    """

    name: str = VERIFY_ALL
    choose: Callable[..., Admission] | None = None
    confidence: Callable[[np.ndarray], np.ndarray] = sigmoid
    lag_rounds: int = 0
    new_gate: Callable[[], DraftGate] | None = None


@dataclass(frozen=True)
class DecodingConfig:
    sampling: Sampling
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    batch_size: int
    seed: int
    variant: str = ""  # copied into the rounds
    verification: Verification = Verification()


@dataclass
class Completion:
    """A finished request: its tokens (a stop token included) and, with a drafter, its rounds."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"  # or "stop"
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class StepTimes:
    """What one step of the engine took, and what came of it."""

    num_requests: int
    batch_tokens: int  # verified, anchors included
    num_emitted: int
    draft_seconds: float
    verify_seconds: float  # the target's forward, the test, and the drafter's context


def decode(
    target: TargetModel,
    drafter: BlockDrafter | None,
    requests: Sequence[Request],
    config: DecodingConfig,
    on_step: Callable[[StepTimes], None] | None = None,
) -> Iterator[Completion]:
    """Completions as they finish. Requests begin in the order of falling prompt lengths: neighbours are padded to each other."""
    empty = [request.id for request in requests if not request.prompt_ids]
    if empty:
        raise ValueError(f"request {empty[0]}: the prompt has no tokens. Fix: leave it out, a chat template always renders some")
    if len({request.id for request in requests}) < len(requests):
        twice = next(request.id for i, request in enumerate(requests) if request.id in {r.id for r in requests[:i]})
        raise ValueError(f"request {twice}: its id is there twice, and would draw the same tokens. Fix: give each request an id of its own")
    if requests:
        yield from _Engine(target, drafter, requests, config, on_step).run()


class _Live:
    """A request that is being decoded. Its last token, the anchor, is in no cache yet."""

    def __init__(self, request: Request, config: DecodingConfig, block_size: int) -> None:
        self.completion, self.noise = Completion(request), Noise(config.seed, request.id)
        self.anchor_token, self.position = -1, len(request.prompt_ids)
        lag = config.verification.lag_rounds
        self.past_confidences = deque([np.full(block_size, np.nan)] * lag, maxlen=lag)
        self._config = config

    def emit(self, tokens: Sequence[int]) -> int:
        """Appends tokens up to the first stop token or the limit; returns how many."""
        text = self.completion.token_ids
        before = len(text)
        for token in tokens:
            if self.is_done:
                break
            text.append(token)
            if token in self._config.stop_ids:
                self.completion.finish_reason = "stop"
        return len(text) - before

    @property
    def is_done(self) -> bool:
        return self.completion.finish_reason == "stop" or len(self.completion.token_ids) == self._config.max_new_tokens


class _Engine:
    """Slot i of every cache belongs to `live[i]`."""

    def __init__(
        self,
        target: TargetModel,
        drafter: BlockDrafter | None,
        requests: Sequence[Request],
        config: DecodingConfig,
        on_step: Callable[[StepTimes], None] | None,
    ) -> None:
        self._target, self._drafter, self._config, self._on_step = target, drafter, config, on_step
        self._waiting = deque(sorted(requests, key=lambda request: -len(request.prompt_ids)))
        self._block_size = drafter.block_size if drafter is not None else 0
        num_slots = min(config.batch_size, len(requests))
        max_length = len(self._waiting[0].prompt_ids) + config.max_new_tokens + self._block_size
        self._cache = KeyValueCache(num_slots, max_length)
        self._context: Any = drafter.new_context(num_slots, max_length) if drafter is not None else None
        self._live: list[_Live] = []
        new_gate = config.verification.new_gate
        self._gate = new_gate() if new_gate is not None and drafter is not None else None

    @torch.inference_mode()
    def run(self) -> Iterator[Completion]:
        while self._waiting or self._live:
            if self._waiting and len(self._live) < self._config.batch_size:
                self._prefill(self._next_requests(self._config.batch_size - len(self._live)))
            else:
                self._round()
            yield from self._retire()

    def _next_requests(self, num_free: int) -> list[Request]:
        requests, num_tokens = [self._waiting.popleft()], 0
        while self._waiting and len(requests) < num_free:
            num_tokens += len(requests[-1].prompt_ids)
            if num_tokens + len(self._waiting[0].prompt_ids) > PREFILL_TOKENS:
                break
            requests.append(self._waiting.popleft())
        return requests

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Runs the prompts and draws each request's first token, which belongs to no round."""
        slots = range(len(self._live), len(self._live) + len(requests))
        new = [_Live(request, self._config, self._block_size) for request in requests]
        step = Step.of([request.prompt_ids for request in requests], [0] * len(new), list(slots), self._target.device)
        states = self._target.forward(step, self._cache)
        last_B = step.starts_R + step.lengths_R - 1
        probs_BV = self._config.sampling.probs(self._target.logits(states.final_SD[last_B]))
        next_B = self._draw(probs_BV, new, [r.position for r in new])
        self._extend(step, states, last_B, next_B)
        for live, token in zip(new, next_B.tolist(), strict=True):
            live.anchor_token = token
            live.emit([token])
        self._live += new

    def _round(self) -> None:
        """One step of all live requests."""
        started = self._now()
        live, B, device = self._live, len(self._live), self._target.device
        anchors_B = torch.tensor([r.anchor_token for r in live], device=device)
        positions_B = torch.tensor([r.position for r in live], device=device)
        block = BlockDraw(self._config.sampling, [r.noise for r in live], [r.position for r in live])
        proposal, ids_W = Proposal(anchors_B.new_zeros(B, 0)), anchors_B[:0]
        if self._drafter is not None and (self._gate is None or self._gate.opens(B)):
            proposal, ids_W = self._drafter.propose(self._context, anchors_B, positions_B, block), self._drafter.draft_ids_W
        K = proposal.tokens_BK.shape[1]
        lengths_B = self._lengths(proposal)
        drafted_at = self._now()
        column_L = torch.arange(K + 1, device=device)
        is_verified_BL = column_L <= lengths_B[:, None]
        tokens_BL, positions_BL = torch.cat([anchors_B[:, None], proposal.tokens_BK], dim=1), positions_B[:, None] + column_L
        step = Step(tokens_BL[is_verified_BL], positions_BL[is_verified_BL], torch.arange(B, device=device), lengths_B + 1)
        states = self._target.forward(step, self._cache)
        probs_SV = self._config.sampling.probs(self._target.logits(states.final_SD))
        verified = verify(proposal.tokens_BK, block.probs_BKW, ids_W, lengths_B, probs_SV, self._uniforms(K))
        accepted = verified.num_accepted_B.tolist()
        next_B = self._draw(verified.next_probs_BV, live, [r.position + n + 1 for r, n in zip(live, accepted, strict=True)])
        self._extend(step, states, step.starts_R + verified.num_accepted_B, next_B)
        columns = zip(
            live,
            proposal.tokens_BK.tolist(),
            verified.draft_prob_BK.tolist(),
            verified.target_prob_BK.tolist(),
            [[]] * B if proposal.confidence_logits_BK is None else proposal.confidence_logits_BK.tolist(),
            lengths_B.tolist(),
            accepted,
            next_B.tolist(),
            strict=True,
        )
        num_emitted = sum(self._finish(*row) for row in columns)
        ended_at = self._now()
        if self._gate is not None:
            self._gate.observe(B, num_emitted, ended_at - started)
        if self._on_step:
            self._on_step(StepTimes(B, len(step.tokens_S), num_emitted, drafted_at - started, ended_at - drafted_at))

    def _now(self) -> float:
        if self._on_step and self._target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _lengths(self, proposal: Proposal) -> Tensor:
        """How many drafted tokens of each request are verified."""
        B, K = proposal.tokens_BK.shape
        drafted_B = np.full(B, K) if proposal.lengths_B is None else proposal.lengths_B.numpy(force=True)
        verification = self._config.verification
        if K == 0 and self._drafter is not None:  # no draft pass: what is known of a request stays what it was
            for r in self._live:
                r.past_confidences.extend(list(r.past_confidences)[-1:])
        if K == 0 or verification.choose is None:
            return torch.from_numpy(drafted_B).to(self._target.device)
        logits_BK = proposal.confidence_logits_BK
        confidence_BK = np.ones((B, K)) if logits_BK is None else verification.confidence(logits_BK.double().numpy(force=True))
        confidence_BK = np.where(np.arange(K) < drafted_B[:, None], confidence_BK, 0.0)
        if verification.lag_rounds:
            admission = verification.choose(np.stack([r.past_confidences[0] for r in self._live]), confidence_BK)
            for r, row_K in zip(self._live, confidence_BK, strict=True):
                r.past_confidences.append(row_K)
        else:
            admission = verification.choose(confidence_BK)
        return torch.from_numpy(np.minimum(admission.lengths_R, drafted_B)).to(self._target.device)

    def _uniforms(self, K: int) -> Tensor:
        """Of the tests; a point mass needs none."""
        if self._config.sampling.temperature == 0.0:
            return torch.zeros(len(self._live), K, device=self._target.device)
        rows = [r.noise.uniforms(r.position + 1, K) for r in self._live]
        return torch.tensor(rows, dtype=torch.float64, device=self._target.device).view(len(rows), K)

    def _draw(self, probs_BV: Tensor, requests: Sequence[_Live], positions: Sequence[int]) -> Tensor:
        if self._config.sampling.temperature == 0.0:
            return probs_BV.argmax(-1)
        return draw(probs_BV, [r.noise for r in requests], VERIFY, positions)

    def _extend(self, step: Step, states: TargetStates, last_B: Tensor, anchors_B: Tensor) -> None:
        """Hands a step's states to the drafter; each request's new anchor stands after its row `last_B`."""
        if self._drafter is not None:
            self._drafter.extend_context(
                self._context, ContextRows(step, states.tapped_SLD, step.tokens_S.roll(-1).index_put((last_B,), anchors_B))
            )

    def _finish(
        self,
        live: _Live,
        drafted: list[int],
        draft_probs: list[float],
        target_probs: list[float],
        confidence_logits: list[float],
        proposed: int,
        accepted: int,
        following: int,
    ) -> int:
        """Stores the round, cut at an accepted stop token of the text, and emits its tokens; returns how many."""
        request, rounds = live.completion.request, live.completion.rounds
        in_text = drafted[: min(accepted, self._config.max_new_tokens - len(live.completion.token_ids))]  # the limit comes first behind it
        stop = next((i + 1 for i, token in enumerate(in_text) if token in self._config.stop_ids), None)
        emitted = [*drafted[:accepted], following][:stop]
        if self._drafter is not None:
            proposed, accepted = (proposed, accepted) if stop is None else (stop, stop)
            rounds.append(
                Round(
                    request_id=request.id,
                    domain=request.domain,
                    source=request.source,
                    round_index=len(rounds),
                    temperature=self._config.sampling.temperature,
                    top_k=self._config.sampling.top_k,
                    top_p=self._config.sampling.top_p,
                    draft_mode=self._config.sampling.mode,
                    variant=self._config.variant,
                    policy=self._config.verification.name,
                    context_length_tokens=live.position,
                    anchor_token=live.anchor_token,
                    draft_tokens=tuple(drafted[:proposed]),
                    draft_probs=tuple(draft_probs[:proposed]),
                    target_probs=tuple(target_probs[:proposed]),
                    confidence_logits=tuple(confidence_logits[:proposed]),
                    proposed=proposed,
                    accepted=accepted,
                    next_token=following if stop is None else None,
                    ended_by_stop=stop is not None,
                )
            )
        live.anchor_token, live.position = following, live.position + len(emitted)
        return live.emit(emitted)

    def _retire(self) -> Iterator[Completion]:
        """Takes finished requests out; the last live one moves into a gap."""
        for slot in reversed(range(len(self._live))):
            if self._live[slot].is_done:
                yield self._live[slot].completion
                last = self._live.pop()
                if slot < len(self._live):
                    self._live[slot] = last
                    for kept in (self._cache, self._context):
                        if kept is not None:
                            kept.move(len(self._live), slot, last.position)
