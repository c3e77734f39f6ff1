"""Lossless speculative decoding: draft a block, verify it in one target forward, accept a prefix, repeat.

`decode` is the one function from prompts to texts and rounds; evaluation, tracing and plain generation (no drafter) all
go through it. A round of one request whose last token x_0 sits at position a:

    drafter  sees the context of positions < a, drafts x_1..x_K
    target   one forward over x_0..x_K at positions a..a+K
    verify   accepts a prefix, draws the correction or bonus: the next x_0
    context  tapped states of the accepted positions go into the drafter's context

Each request draws from a stream of its own, keyed by seed and request id. Shapes: B requests, K drafted tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.drafters.base import ContextRows, DraftContext, Drafter, DraftSampling
from dspark.rounds import Round
from dspark.sampling import distribution, draw, verify
from dspark.target import KeyValueCache, TargetModel, TargetStates


@dataclass(frozen=True)
class Request:
    id: str
    prompt_ids: tuple[int, ...]
    domain: str = ""
    source: str = ""


@dataclass(frozen=True)
class DecodingConfig:
    """`sampling.temperature` is the target's; `sampling.mode` says how the drafter draws."""

    sampling: DraftSampling
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    batch_size: int
    seed: int
    variant: str = ""  # copied into the rounds


@dataclass
class Completion:
    """A finished request: its tokens (a stop token included) and, with a drafter, its rounds."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"  # or "stop"
    rounds: list[Round] = field(default_factory=list)


def decode(target: TargetModel, drafter: Drafter | None, requests: Sequence[Request], config: DecodingConfig) -> Iterator[Completion]:
    """Completions as they finish. Requests are batched by prompt length; those that finish leave their batch."""
    empty = [request.id for request in requests if not request.prompt_ids]
    if empty:
        raise ValueError(f"request {empty[0]}: the prompt has no tokens. Fix: leave it out, a chat template always renders some")
    ordered = sorted(requests, key=lambda request: -len(request.prompt_ids))
    for start in range(0, len(ordered), config.batch_size):
        yield from _Batch(target, drafter, ordered[start : start + config.batch_size], config).run()


class _Batch:
    """Requests decoded together. Row i of every tensor belongs to `self.live[i]`."""

    def __init__(self, target: TargetModel, drafter: Drafter | None, requests: Sequence[Request], config: DecodingConfig) -> None:
        self.target, self.drafter, self.config, self.device = target, drafter, config, target.device
        self.live = [Completion(request) for request in requests]
        self.generators = [stream(config.seed, request.id) for request in requests]
        self.block_size = drafter.config.block_size if drafter is not None else 0
        longest = max(len(request.prompt_ids) for request in requests)
        max_length = longest + config.max_new_tokens + self.block_size + 1
        self.cache: KeyValueCache = target.new_cache(max_length)
        self.context: DraftContext | None = drafter.new_context(len(requests), max_length) if drafter is not None else None
        self.anchor_tokens_B, self.anchor_positions_B = self._prefill(longest)

    def run(self) -> Iterator[Completion]:
        yield from self._retire()
        while self.live:
            self._round()
            yield from self._retire()

    def _prefill(self, longest: int) -> tuple[Tensor, Tensor]:
        """Runs the prompts (padded on the right) and draws each request's first token, which belongs to no round."""
        lengths = [len(completion.request.prompt_ids) for completion in self.live]
        tokens_BT = torch.tensor(
            [[*c.request.prompt_ids, *[0] * (longest - n)] for c, n in zip(self.live, lengths, strict=True)], device=self.device
        )
        positions_BT = torch.arange(longest, device=self.device).expand(len(lengths), -1)
        states = self.target.forward(tokens_BT, positions_BT, self.cache)
        length_B = torch.tensor(lengths, device=self.device)
        logits_BV = self.target.logits(states.final_BTD[torch.arange(len(lengths)), length_B - 1])
        first_B = draw(distribution(logits_BV, self.config.sampling.temperature), self._uniforms(1)[:, 0])
        self._extend(states, tokens_BT, length_B - 1, first_B, positions_BT)
        for completion, token in zip(self.live, first_B.tolist(), strict=True):
            self._emit(completion, [token])
        return first_B, length_B

    def _extend(self, states: TargetStates, tokens_BT: Tensor, last_B: Tensor, anchor_B: Tensor, positions_BT: Tensor) -> None:
        """Hands new states to the drafter. Those behind `last_B`, after which the new anchor stands, are of padding or of rejected
        tokens: they lie at or beyond the anchor, where nobody looks."""
        if self.drafter is None or self.context is None:
            return
        following_BT = tokens_BT.roll(-1, dims=1)
        following_BT[torch.arange(len(last_B), device=self.device), last_B] = anchor_B
        self.drafter.extend_context(self.context, ContextRows(states.tapped_BTLD.to(self.drafter.dtype), following_BT, positions_BT))

    def _round(self) -> None:
        K, sampling = self.block_size, self.config.sampling
        uniform_BU = self._uniforms(2 * K + 1)
        tokens_BT, proposal = self.anchor_tokens_B[:, None], None
        if self.drafter is not None and self.context is not None:
            proposal = self.drafter.propose(
                self.context, self.anchor_tokens_B, self.anchor_positions_B, sampling, lambda k, probs_BW: draw(probs_BW, uniform_BU[:, k])
            )
            tokens_BT = torch.cat([tokens_BT, proposal.tokens_BK], dim=1)
        positions_BT = self.anchor_positions_B[:, None] + torch.arange(K + 1, device=self.device)
        states = self.target.forward(tokens_BT, positions_BT, self.cache)
        probs_BLV = distribution(self.target.logits(states.final_BTD), sampling.temperature)
        if self.drafter is None or self.context is None or proposal is None:
            next_B = draw(probs_BLV[:, 0], uniform_BU[:, 0])
            for completion, token in zip(self.live, next_B.tolist(), strict=True):
                self._emit(completion, [token])
            self.anchor_tokens_B, self.anchor_positions_B = next_B, self.anchor_positions_B + 1
            return
        verified = verify(proposal.tokens_BK, proposal.probs_BKW, self.drafter.draft_ids_W, probs_BLV, uniform_BU[:, K:])
        self._extend(states, tokens_BT, verified.num_accepted_B, verified.next_token_B, positions_BT)
        index_BK = torch.searchsorted(self.drafter.draft_ids_W, proposal.tokens_BK)
        draft_prob_BK = proposal.probs_BKW.gather(-1, index_BK[..., None])[..., 0]
        columns = zip(
            self.live,
            self.anchor_positions_B.tolist(),
            self.anchor_tokens_B.tolist(),
            proposal.tokens_BK.tolist(),
            draft_prob_BK.tolist(),
            verified.target_prob_BK.tolist(),
            proposal.confidence_logits_BK.tolist() if proposal.confidence_logits_BK is not None else [[]] * len(self.live),
            verified.num_accepted_B.tolist(),
            verified.next_token_B.tolist(),
            strict=True,
        )
        for completion, position, anchor, drafted, draft_probs, target_probs, logits, accepted, following in columns:
            self._record(completion, position, anchor, drafted, draft_probs, target_probs, logits, accepted, following)
        self.anchor_tokens_B = verified.next_token_B
        self.anchor_positions_B = self.anchor_positions_B + verified.num_accepted_B + 1

    def _record(
        self,
        completion: Completion,
        position: int,
        anchor: int,
        drafted: list[int],
        draft_probs: list[float],
        target_probs: list[float],
        confidence_logits: list[float],
        accepted: int,
        following: int,
    ) -> None:
        """Stores the round, cut at an accepted stop token, and emits its tokens."""
        stop = next((i + 1 for i, token in enumerate(drafted[:accepted]) if token in self.config.stop_ids), None)
        proposed, accepted = (len(drafted), accepted) if stop is None else (stop, stop)
        completion.rounds.append(
            Round(
                request_id=completion.request.id,
                domain=completion.request.domain,
                source=completion.request.source,
                round_index=len(completion.rounds),
                temperature=self.config.sampling.temperature,
                draft_mode=self.config.sampling.mode,
                variant=self.config.variant,
                policy="verify_all",
                context_length_tokens=position,
                anchor_token=anchor,
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
        self._emit(completion, drafted[:accepted] + ([following] if stop is None else []))

    def _emit(self, completion: Completion, tokens: list[int]) -> None:
        """Appends tokens up to the first stop token or the limit."""
        for token in tokens:
            if len(completion.token_ids) == self.config.max_new_tokens:
                return
            completion.token_ids.append(token)
            if token in self.config.stop_ids:
                completion.finish_reason = "stop"
                return

    def _retire(self) -> Iterator[Completion]:
        """Takes finished requests out of the batch."""
        is_done = [c.finish_reason == "stop" or len(c.token_ids) == self.config.max_new_tokens for c in self.live]
        if not any(is_done):
            return
        finished = [c for c, done in zip(self.live, is_done, strict=True) if done]
        rows = torch.tensor([i for i, done in enumerate(is_done) if not done], dtype=torch.long, device=self.device)
        self.live = [self.live[i] for i in rows.tolist()]
        self.generators = [self.generators[i] for i in rows.tolist()]
        self.anchor_tokens_B, self.anchor_positions_B = self.anchor_tokens_B[rows], self.anchor_positions_B[rows]
        self.cache.select(rows)
        if self.context is not None:
            self.context = self.context.rows(rows)
        yield from finished

    def _uniforms(self, num: int) -> Tensor:
        return torch.stack([torch.rand(num, generator=generator) for generator in self.generators]).to(self.device)


def stream(seed: int, request_id: str) -> torch.Generator:
    """A request's own random numbers, the same in any batch."""
    digest = hashlib.sha256(f"{seed}/{request_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
