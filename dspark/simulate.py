"""Replay of recorded held-out texts under a verification policy and the step costs of a stack: throughput against concurrency (§5).

Of a text that the target itself sampled, a round was recorded at every anchor p: the block drafted there and how many of its
tokens the text accepts, drawn by the coupling of rejection sampling (`dspark.trace.every_position`). So a round at p that
verifies l tokens accepts min(accepted, l) of them, emits the text's next one and goes on at an anchor whose round is recorded,
too: for a policy that does not look ahead the replay has the law of decoding, and at temperature 0 it is decoding. One
liberty: blocks end with their text, so nothing is verified behind a stop token that decoding could not know yet.

    texts = texts_from_rounds(rounds, block_size, calibration.confidence)    # or calibration.sigmoid for raw confidences
    rows = sweep(texts, cost, concurrencies=(1, 4, 16), config)

R slots play the texts, one round a step; a slot whose text ended takes its next one. Prefill is not part of it. A step costs a
draft pass over R requests, even when no draft token is verified, and a verification of B tokens; policy "none" does not draft.

Shapes: R requests (slots), K drafted tokens, A anchors of a text, N texts, P anchors of all texts, S steps, L rounds of history.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.calibration import pad
from dspark.rounds import Round
from dspark.scheduler import admit_async, policies
from dspark.step_cost import StepCost

RECORDED_POLICY = "every_position"  # of the rounds that were drafted at every anchor
NO_DRAFT = "none"
ASYNC = "scheduler_async"


@dataclass(frozen=True)
class ReplayText:
    """The blocks drafted at the anchors of one text: all of its tokens but the last, in order. ValueError on impossible ones.

    A block ends with the text: only `proposed_A` of its positions can be verified, and the confidence of those behind them is 0.
    """

    confidence_AK: np.ndarray
    accepted_A: np.ndarray  # leading drafted tokens that equal the text that follows

    def __post_init__(self) -> None:
        shape, num_anchors = self.confidence_AK.shape, len(self.accepted_A)
        if len(shape) != 2 or not num_anchors or shape[0] != num_anchors:
            raise ValueError(
                f"text.confidence: shape {shape} must be [A, K] with A = {num_anchors} accepted, none 0. Fix: a row per anchor"
            )
        is_wrong_A = (self.accepted_A < 0) | (self.accepted_A > self.proposed_A)
        if is_wrong_A.any():
            p = int(is_wrong_A.argmax())
            raise ValueError(
                f"text.accepted[{p}]: {self.accepted_A[p]} must be 0 to {self.proposed_A[p]}, the block size or what is left of the text. "
                "Fix: cut the round at the text's end"
            )
        is_proposed_AK = np.arange(shape[1]) < self.proposed_A[:, None]
        is_wrong_AK = ~((self.confidence_AK >= 0.0) & (self.confidence_AK <= is_proposed_AK))
        if is_wrong_AK.any():
            p, k = np.argwhere(is_wrong_AK)[0]
            raise ValueError(
                f"text.confidence[{p}, {k}]: {self.confidence_AK[p, k]} must be a probability, 0 to 1, and 0 behind the {self.proposed_A[p]} "
                "tokens proposed. Fix: pass sigmoid(logit / temperature), and 0 behind the text's end"
            )

    @property
    def remaining_A(self) -> np.ndarray:
        """Tokens of the text behind each anchor."""
        return np.arange(len(self.accepted_A), 0, -1)

    @property
    def proposed_A(self) -> np.ndarray:
        return np.minimum(self.confidence_AK.shape[1], self.remaining_A)


def texts_from_rounds(rounds: Sequence[Round], block_size: int, confidence: Callable[[np.ndarray], np.ndarray]) -> list[ReplayText]:
    """The texts of the rounds whose policy is "every_position", by request, in order of first appearance; others are left out.

    confidence: logits [A, K] to probabilities, elementwise. ValueError when a text has holes.
    """
    rounds_of: dict[str, list[Round]] = defaultdict(list)
    for r in rounds:
        if r.policy == RECORDED_POLICY:
            rounds_of[r.request_id].append(r)
    if not rounds_of:
        raise ValueError(f"rounds.policy: none of {len(rounds)} rounds has {RECORDED_POLICY!r}. Fix: trace a block at every anchor")
    return [_text(sorted(rows, key=lambda r: r.context_length_tokens), block_size, confidence) for rows in rounds_of.values()]


def _text(rows: Sequence[Round], block_size: int, confidence: Callable[[np.ndarray], np.ndarray]) -> ReplayText:
    for i, r in enumerate(rows):
        num_proposed = min(block_size, len(rows) - i)
        for name, found, expected in (
            ("round_index", r.round_index, i),
            ("proposed", r.proposed, num_proposed),
            ("number of confidence_logits", len(r.confidence_logits), num_proposed),
        ):
            if found != expected:
                raise ValueError(
                    f"rounds of {r.request_id!r}: {name} {found} at anchor {i} must be {expected}, a replay needs one block of {block_size} at "
                    "every anchor of a text, cut at its end. Fix: pass all rounds of one drafter with a confidence head"
                )
    confidence_AK = confidence(pad([r.confidence_logits for r in rows], block_size))
    is_proposed_AK = np.arange(block_size) < np.array([[r.proposed] for r in rows])
    return ReplayText(np.where(is_proposed_AK, confidence_AK, 0.0), np.array([r.accepted for r in rows]))


@dataclass(frozen=True)
class ReplayConfig:
    lengths: tuple[int, ...]  # of the policies fixed_*
    thresholds: tuple[float, ...]  # of the policies threshold_*
    num_steps: int  # counted ones
    num_warmup_steps: int  # before them, not counted
    seed: int
    lag_rounds: int = 2  # age of the confidences that the asynchronous scheduler takes its budget from (§5.2)

    def __post_init__(self) -> None:
        for name, least in (("num_steps", 1), ("num_warmup_steps", 0), ("lag_rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"replay.{name}: {getattr(self, name)} must be at least {least}. Fix: raise it")


@dataclass(frozen=True)
class ReplayResult:
    """One policy at one concurrency. Tokens are those that the rounds emitted: no prompt, no first token of a text."""

    policy: str
    num_requests: int
    throughput_tokens_per_second: float  # emitted tokens over the seconds of all counted steps
    tokens_per_second_per_user: float  # that over num_requests
    mean_budget_tokens: float  # verified tokens per request and step, its anchor included: 1 without speculation
    mean_accepted_length: float  # emitted tokens per request and step, the bonus included; a round at a text's end may have none
    num_steps: int
    num_tokens: int


def replay(texts: Sequence[ReplayText], policy: str, cost: StepCost, num_requests: int, config: ReplayConfig) -> ReplayResult:
    """The texts played in a closed loop of `num_requests` slots; `policy` is a name of `scheduler.policies` or "scheduler_async".

    A slot starts at an anchor drawn from all of them (no lock-step), then repeats a shuffled order of its own; with one seed
    both are the same for every policy. ValueError for an unknown policy and for sizes that the cost was not measured at.
    """
    _check(texts, cost, num_requests)
    sps = cost.table(num_requests, is_drafting=policy != NO_DRAFT)
    synchronous = policies(sps, config.lengths, config.thresholds)
    if policy not in (*synchronous, ASYNC):
        raise ValueError(f"policy: {policy!r} must be one of {[*synchronous, ASYNC]}. Fix: add its length or threshold to the config")
    confidence_PK = np.concatenate([text.confidence_AK for text in texts])
    accepted_P = np.concatenate([text.accepted_A for text in texts])
    proposed_P = np.concatenate([text.proposed_A for text in texts])
    remaining_P = np.concatenate([text.remaining_A for text in texts])
    start_N = np.flatnonzero(np.r_[True, remaining_P[:-1] == 1])

    generator = np.random.default_rng(config.seed)
    anchor_R = generator.integers(len(accepted_P), size=num_requests)
    start_RN = generator.permuted(np.tile(start_N, (num_requests, 1)), axis=1)
    num_ended_R = np.zeros(num_requests, dtype=np.int64)
    history_LRK = np.full((config.lag_rounds, num_requests, confidence_PK.shape[1]), np.nan)
    batch_tokens_S, emitted_S = np.zeros((2, config.num_warmup_steps + config.num_steps), dtype=np.int64)
    for step in range(len(emitted_S)):
        confidence_RK, remaining_R = confidence_PK[anchor_R], remaining_P[anchor_R]
        stale_RK = history_LRK[step % config.lag_rounds]  # written that many steps ago, overwritten below
        admission = admit_async(stale_RK, confidence_RK, sps) if policy == ASYNC else synchronous[policy](confidence_RK)
        verified_R = np.minimum(admission.lengths_R, proposed_P[anchor_R])  # static policies do not know where a block is cut
        emitted_R = np.minimum(np.minimum(accepted_P[anchor_R], verified_R) + 1, remaining_R)  # no bonus after the last token
        batch_tokens_S[step], emitted_S[step] = num_requests + verified_R.sum(), emitted_R.sum()
        stale_RK[:] = confidence_RK
        anchor_R += emitted_R
        ended = np.flatnonzero(emitted_R == remaining_R)
        anchor_R[ended] = start_RN[ended, num_ended_R[ended] % len(texts)]
        num_ended_R[ended] += 1
        history_LRK[:, ended] = np.nan

    batch_tokens_S, num_tokens = batch_tokens_S[config.num_warmup_steps :], int(emitted_S[config.num_warmup_steps :].sum())
    throughput = num_tokens / float((1.0 / sps.sps(batch_tokens_S)).sum())
    budget, accepted_length = float(batch_tokens_S.mean()) / num_requests, num_tokens / (num_requests * config.num_steps)
    return ReplayResult(policy, num_requests, throughput, throughput / num_requests, budget, accepted_length, config.num_steps, num_tokens)


def sweep(texts: Sequence[ReplayText], cost: StepCost, concurrencies: Sequence[int], config: ReplayConfig) -> list[ReplayResult]:
    """Every policy at every concurrency: concurrencies as given, within one the order of a report, "scheduler_async" last."""
    names = [*policies(cost.table(1), config.lengths, config.thresholds), ASYNC]
    return [replay(texts, name, cost, num_requests, config) for num_requests in concurrencies for name in names]


def _check(texts: Sequence[ReplayText], cost: StepCost, num_requests: int) -> None:
    block_sizes = sorted({text.confidence_AK.shape[1] for text in texts})
    if len(block_sizes) != 1:
        raise ValueError(f"texts: block sizes {block_sizes} must be exactly one. Fix: pass at least one text, all of one drafter")
    if num_requests < 1:
        raise ValueError(f"num_requests: {num_requests} must be at least 1. Fix: leave this concurrency out")
    largest = num_requests * (1 + block_sizes[0])
    for name, needed, probes in (("num_requests", num_requests, cost.num_requests), ("batch_tokens", largest, cost.batch_tokens)):
        if needed > probes[-1]:
            raise ValueError(
                f"cost.{name}: probed to {probes[-1]}, {num_requests} requests of up to {1 + block_sizes[0]} tokens need {needed}; beyond the "
                "last probe all is free. Fix: profile larger steps, or leave this concurrency out"
            )
