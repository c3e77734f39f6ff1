"""Replay of recorded held-out texts under a verification policy and the step costs of a stack: throughput against concurrency (§5).

Of a text that the target itself sampled, a round was recorded at every anchor p: the block drafted there and how many of its
tokens the text accepts, drawn by the coupling of rejection sampling (`dspark.trace.every_position`). So a round at p that
verifies l tokens accepts min(accepted, l) of them, emits the text's next one and goes on at an anchor whose round is recorded,
too: for a policy that does not look ahead the replay has the law of decoding, and at temperature 0 it is decoding. One
liberty: blocks end with their text, so nothing is verified behind a stop token that decoding could not know yet.

    texts = texts_from_rounds(rounds, block_size, calibration.confidence)    # or calibration.sigmoid for raw confidences
    rows = sweep(texts, cost, concurrencies=(1, 4, 16), config)
    throughput_B = resampled(texts, "scheduler", cost, 16, config, resample(len(texts), 100, seed=0))

R slots play the texts, one round a step; a slot whose text ended takes its next one. Prefill is not part of it. A step costs a
draft pass over R requests, even when no draft token is verified, and a verification of B tokens; a step without drafting only
the latter. Policies:

    none, fixed_k, threshold_t, verify_all   static (dspark/scheduler.py); fixed_1 is what an engine does with an MTP-1 drafter
    scheduler                  Algorithm 1
    scheduler_async            the asynchronous scheduler: a global search over confidences of `lag_rounds` ago
    scheduler_or_none,         the same, and a step whose draft pass does not pay does without (`draft_gate.DraftGate`); what
    scheduler_async_or_none      decides it is as old as the asynchronous scheduler's budget. Not in the paper
    scheduler_global           the global search over current confidences. Not lossless (Appendix A): it prices the early stop
    oracle                     knows how much of each block is accepted: see ORACLE

Many replays of one policy go through numpy side by side; they have nothing to do with each other but their random numbers.

Shapes: R requests (slots), K drafted tokens, A anchors of a text, N texts, P anchors of all texts, S replays at once, L rounds
of history, B samples of the texts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from dspark.calibration import pad
from dspark.draft_gate import DraftGate
from dspark.metrics import Estimate
from dspark.rounds import Round
from dspark.scheduler import SpsTable, admitted_lengths, early_stop, policies, survival, walk
from dspark.step_cost import StepCost

RECORDED_POLICY = "every_position"  # of the rounds that were drafted at every anchor
NO_DRAFT = "none"

# Before each step the oracle knows how much of every block is accepted, and takes the admission - no draft pass among the
# choices - that emits the most tokens per second of this step. So no policy makes more of the same anchors in one step. Over
# a whole replay it is a yardstick and no proven bound: it does not plan ahead, and another policy comes to other anchors.
ORACLE = "oracle"


@dataclass(frozen=True)
class ReplayText:
    """The blocks drafted at the anchors of one text: all of its tokens but the last, in order. ValueError on impossible ones.

    A block ends with the text: only `proposed_A` of its positions can be verified, and the confidence of those behind them is 0.
    """

    confidence_AK: np.ndarray
    accepted_A: np.ndarray  # leading drafted tokens that equal the text that follows
    first_context_tokens: int  # before the first anchor: the prompt

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

    @property
    def context_A(self) -> np.ndarray:
        """Tokens before each anchor, in the target's cache."""
        return self.first_context_tokens + np.arange(len(self.accepted_A))

    def with_true_confidences(self) -> "ReplayText":
        """Confidences that know the outcome: 1 for every accepted token, else 0."""
        is_accepted_AK = np.arange(self.confidence_AK.shape[1]) < self.accepted_A[:, None]
        return replace(self, confidence_AK=is_accepted_AK.astype(np.float64))


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
            ("context_length_tokens", r.context_length_tokens, rows[0].context_length_tokens + i),
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
    accepted_A = np.array([r.accepted for r in rows])
    return ReplayText(np.where(is_proposed_AK, confidence_AK, 0.0), accepted_A, rows[0].context_length_tokens)


@dataclass(frozen=True)
class ReplayConfig:
    thresholds: tuple[float, ...]  # of the policies threshold_*
    num_steps: int  # counted ones of each replay
    num_warmup_steps: int  # before them, not counted
    num_rounds: int  # of requests, counted, at least: with few slots so many replays are made of one policy
    seed: int
    lag_rounds: int  # age of the confidences that the asynchronous scheduler takes its budget from (§5.2)
    new_requests: Literal["mean", "one"]  # survivals assumed of requests without history: means of earlier rounds, or 1.0 (vLLM, SGLang)
    skips_by: Literal["outcomes", "confidences"]  # what drafting is worth: what drafted steps came to, or what their confidences promise
    window_rounds: int  # of requests, over which that and the mean are taken
    probe_share: float  # of the time, for draft passes that only look whether drafting pays again

    def __post_init__(self) -> None:
        least_of = {"num_steps": 1, "num_warmup_steps": 0, "num_rounds": 1, "lag_rounds": 1, "window_rounds": 1, "probe_share": 0}
        for name, least in least_of.items():
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
    drafting_share: float  # steps with a draft pass / steps
    mean_context_tokens: float  # of the live slots
    num_steps: int  # of all replays
    num_tokens: int


def mean_context_tokens(texts: Sequence[ReplayText]) -> float:
    """Over all anchors: the context that steps of these texts are behind, to take their cost at (`StepProfile.at`)."""
    return float(np.concatenate([text.context_A for text in texts]).mean())


def policy_names(block_size: int, thresholds: Sequence[float]) -> list[str]:
    """Every policy that can be replayed, in the order of a report."""
    static = [NO_DRAFT, *(f"fixed_{k}" for k in range(1, block_size + 1)), *(f"threshold_{t:g}" for t in thresholds), "verify_all"]
    return [*static, *_SCHEDULERS]


def replay(texts: Sequence[ReplayText], policy: str, cost: StepCost, num_requests: int, config: ReplayConfig) -> ReplayResult:
    """The texts played in a closed loop of `num_requests` slots; `policy` is one of `policy_names`.

    A slot starts at an anchor drawn from all of them (no lock-step), then repeats a shuffled order of its own; with one seed
    both are the same for every policy. ValueError for an unknown policy and for sizes that the cost was not measured at.
    """
    played = _play(texts, policy, cost, num_requests, config, np.arange(len(texts))[None])
    num_steps, num_tokens = played.tokens_S.size * config.num_steps, int(played.tokens_S.sum())
    throughput = num_tokens / float(played.seconds_S.sum())
    return ReplayResult(
        policy,
        num_requests,
        throughput,
        throughput / num_requests,
        mean_budget_tokens=float(played.batch_tokens_S.sum()) / (num_requests * num_steps),
        mean_accepted_length=num_tokens / (num_requests * num_steps),
        drafting_share=float(played.drafting_S.sum()) / num_steps,
        mean_context_tokens=float(played.context_S.sum()) / num_steps,
        num_steps=num_steps,
        num_tokens=num_tokens,
    )


def sweep(
    texts: Sequence[ReplayText], cost: StepCost, concurrencies: Sequence[int], config: ReplayConfig, names: Sequence[str] | None = None
) -> list[ReplayResult]:
    """Every policy (or those named) at every concurrency: concurrencies as given, within one the order of `policy_names`."""
    names = names or policy_names(texts[0].confidence_AK.shape[1], config.thresholds)
    return [replay(texts, name, cost, num_requests, config) for num_requests in concurrencies for name in names]


def resample(num_texts: int, num_resamples: int, seed: int) -> np.ndarray:
    """Bootstrap samples [B, N] of the numbers of the texts."""
    return np.random.default_rng(seed).integers(num_texts, size=(num_resamples, num_texts))


def resampled(
    texts: Sequence[ReplayText], policy: str, cost: StepCost, num_requests: int, config: ReplayConfig, text_BN: np.ndarray
) -> np.ndarray:
    """Throughput [B] on each sample of the texts, replayed as `replay` does; with one seed the slots' orders are the same for every policy."""
    played = _play(texts, policy, cost, num_requests, config, text_BN)
    tokens_B, seconds_B = (x.reshape(len(text_BN), -1).sum(axis=1) for x in (played.tokens_S, played.seconds_S))
    return tokens_B / seconds_B


def ratio(ours: float, theirs: float, ours_B: np.ndarray, theirs_B: np.ndarray) -> Estimate:
    """One throughput over another, with the percentile interval over samples of the texts, the same for both."""
    low, high = np.percentile(ours_B / theirs_B, [2.5, 97.5])
    return Estimate(ours / theirs, float(low), float(high))


@dataclass(frozen=True)
class _Played:
    """Sums over the counted steps of each replay."""

    tokens_S: np.ndarray
    seconds_S: np.ndarray
    batch_tokens_S: np.ndarray
    drafting_S: np.ndarray
    context_S: np.ndarray


def _play(
    texts: Sequence[ReplayText], policy: str, cost: StepCost, num_requests: int, config: ReplayConfig, text_BN: np.ndarray
) -> _Played:
    """Each row of `text_BN` is replayed until it has config.num_rounds; its replays stand side by side in S."""
    _check(texts, policy, cost, num_requests, config)
    tables = [cost.table(num_requests, is_drafting=drafts) for drafts in (False, True)]  # of a step without, and with a draft pass
    confidence_PK = np.concatenate([text.confidence_AK for text in texts])
    accepted_P, proposed_P, remaining_P, context_P = (
        np.concatenate([getattr(text, name) for text in texts]) for name in ("accepted_A", "proposed_A", "remaining_A", "context_A")
    )
    scheduler, survival_PK = _SCHEDULERS.get(policy), survival(confidence_PK)
    if policy == ORACLE:
        survival_PK = _oracle_survivals(accepted_P, proposed_P, remaining_P, confidence_PK.shape[1])
    if scheduler is None:  # static policies do not know where a block is cut
        static = policies(tables[1], range(1, confidence_PK.shape[1] + 1), config.thresholds)[policy]
        verified_P = np.minimum(static(confidence_PK).lengths_R, proposed_P)

    num_replays = -(-config.num_rounds // (config.num_steps * num_requests))
    anchor_SR, start_SRN = _starts([len(text.accepted_A) for text in texts], text_BN.repeat(num_replays, axis=0), num_requests, config.seed)
    num_S = len(anchor_SR)
    state = None if scheduler is None else _State(scheduler, tables, (num_S, num_requests, confidence_PK.shape[1]), config)
    num_ended_SR = np.zeros_like(anchor_SR)
    is_drafting_S = np.full(num_S, policy != NO_DRAFT)
    sums = np.zeros((len(fields(_Played)), num_S))
    for step in range(config.num_warmup_steps + config.num_steps):
        if state is None:
            verified_SR = verified_P[anchor_SR]
        else:
            verified_SR, is_drafting_S = state.step(survival_PK[anchor_SR])
        remaining_SR = remaining_P[anchor_SR]
        emitted_SR = np.minimum(np.minimum(accepted_P[anchor_SR], verified_SR) + 1, remaining_SR)  # no bonus after the last token
        tokens_S, batch_tokens_S = emitted_SR.sum(axis=1), num_requests + verified_SR.sum(axis=1)
        seconds_S = 1.0 / np.where(is_drafting_S, tables[1].sps(batch_tokens_S), tables[0].sps(batch_tokens_S))
        if step >= config.num_warmup_steps:
            sums += tokens_S, seconds_S, batch_tokens_S, is_drafting_S, context_P[anchor_SR].mean(axis=1)
        anchor_SR += emitted_SR
        ended = np.nonzero(emitted_SR == remaining_SR)
        anchor_SR[ended] = start_SRN[(*ended, num_ended_SR[ended] % start_SRN.shape[-1])]
        num_ended_SR[ended] += 1
        if state is not None:
            state.observe(tokens_S, seconds_S, ended)
    return _Played(*sums)


def _oracle_survivals(accepted_P: np.ndarray, proposed_P: np.ndarray, remaining_P: np.ndarray, block_size: int) -> np.ndarray:
    """1 where verifying a token emits one more; next to nothing for the others, which a table with a dip may make worth verifying."""
    k = np.arange(block_size)
    num_useful_P = np.minimum(accepted_P, remaining_P - 1)  # the last token of a text is emitted without being verified, too
    return np.where(k < num_useful_P[:, None], 1.0, np.where(k < proposed_P[:, None], np.finfo(np.float64).tiny, 0.0))


def _starts(lengths: Sequence[int], text_SN: np.ndarray, num_requests: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each replay, by a generator of its own: the first anchor of every slot [S, R], and the starts of its texts to come [S, R, N]."""
    length_N = np.asarray(lengths)
    start_N = np.cumsum(length_N) - length_N
    anchors, orders = [], []
    for s, text_N in enumerate(text_SN):
        generator = np.random.default_rng((seed, s))
        end_N = np.cumsum(length_N[text_N])
        drawn_R = generator.integers(end_N[-1], size=num_requests)
        place_R = np.searchsorted(end_N, drawn_R, side="right")
        anchors.append(start_N[text_N[place_R]] + drawn_R - (end_N - length_N[text_N])[place_R])
        orders.append(generator.permuted(np.tile(start_N[text_N].astype(np.int32), (num_requests, 1)), axis=1))
    return np.stack(anchors), np.stack(orders)


@dataclass(frozen=True)
class _Scheduler:
    """`budget`: which confidences say how many tokens are verified; `skips`: what a decision not to draft is taken from."""

    is_early_stop: bool
    budget: Literal["stale", "current"]
    skips: Literal["never", "stale", "current"]


_SCHEDULERS = {
    "scheduler": _Scheduler(True, "current", "never"),
    "scheduler_or_none": _Scheduler(True, "current", "stale"),
    "scheduler_async": _Scheduler(False, "stale", "never"),
    "scheduler_async_or_none": _Scheduler(False, "stale", "stale"),
    "scheduler_global": _Scheduler(False, "current", "never"),
    ORACLE: _Scheduler(False, "current", "current"),
}


class _State:
    """A scheduler in S replays: what it remembers of earlier rounds, and what it decides from it.

    `history_LSRK[step % L]` holds what was known of each request L steps ago: the survivals of its last round with a draft
    pass, NaN if there was none. Means over rounds are quotients of two sums that forget at the same pace.
    """

    def __init__(self, scheduler: _Scheduler, tables: Sequence[SpsTable], shape: tuple[int, int, int], config: ReplayConfig) -> None:
        num_S, self._num_requests, block_size = shape
        self._scheduler, self._config, (self._plain_sps, self._sps) = scheduler, config, tables
        self._kept = (1.0 - 1.0 / config.window_rounds) ** self._num_requests  # of a sum, after a step of R rounds
        self._num_steps = 0
        self._latest_SRK, self._history_LSRK = np.full(shape, np.nan), np.full((config.lag_rounds, *shape), np.nan)
        self._has_drafted_LS = np.zeros((config.lag_rounds, num_S), dtype=bool)
        self._survival_SK, self._rounds_S = np.zeros((num_S, block_size)), np.zeros(num_S)
        self._gate = DraftGate(tables[0].seconds, config.lag_rounds, config.window_rounds, config.probe_share, (num_S,))

    def step(self, survival_SRK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengths [S, R] and whether there is a draft pass [S]; the survivals are those that it shows."""
        scheduler, slot = self._scheduler, self._num_steps % self._config.lag_rounds
        is_drafting_S = np.ones(len(survival_SRK), dtype=bool)
        promised_S = None  # that the step of which the confidences are loses
        is_by_confidences = scheduler.skips == "stale" and self._config.skips_by == "confidences"
        if scheduler.budget == "stale" or is_by_confidences:
            _, num_S, theta_S = self._best(self._stale(slot))
            if is_by_confidences:
                seconds_S = 1.0 / self._sps.sps(self._num_requests + num_S)
                promised_S = np.asarray(self._gate.lost(self._num_requests, theta_S * seconds_S, seconds_S))
        if scheduler.skips == "stale":
            is_drafting_S = self._gate.opens(self._num_requests, promised_S)
        self._latest_SRK[is_drafting_S] = survival_SRK[is_drafting_S]
        self._history_LSRK[slot], self._has_drafted_LS[slot] = self._latest_SRK, is_drafting_S
        if scheduler.budget == "current":
            falling_SN, num_S, theta_S = self._best(survival_SRK)
        else:
            falling_SN = np.sort(survival_SRK.reshape(len(survival_SRK), -1), axis=-1)[:, ::-1]
        if scheduler.skips == "current":
            is_drafting_S = theta_S > self._num_requests * self._plain_sps.sps(self._num_requests)
        num_S = np.where(is_drafting_S, np.minimum(num_S, np.count_nonzero(falling_SN, axis=-1)), 0)
        return admitted_lengths(survival_SRK, falling_SN, num_S), is_drafting_S

    def observe(self, tokens_S: np.ndarray, seconds_S: np.ndarray, ended: tuple[Any, ...]) -> None:
        """What the step came to; the requests of the slots `ended`, [S, R], are finished."""
        self._gate.observe(self._num_requests, tokens_S, seconds_S)
        self._num_steps += 1
        self._latest_SRK[ended] = np.nan
        self._history_LSRK[(slice(None), *ended)] = np.nan

    def _best(self, survival_SRK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each replay: falling survivals, how many of them are admitted, and the Theta that this promises."""
        falling_SN, theta = walk(survival_SRK, self._sps)
        if self._scheduler.budget == "current":  # a stale budget is cut to what can be verified later
            theta[:, 1:][falling_SN <= 0.0] = -np.inf
        num_S = early_stop(falling_SN, theta) if self._scheduler.is_early_stop else theta.argmax(axis=-1)
        return falling_SN, num_S, np.take_along_axis(theta, num_S[:, None], axis=-1)[:, 0]

    def _stale(self, slot: int) -> np.ndarray:
        """That slot of the history, requests without one filled in. What it shows for the first time goes into the mean before."""
        stale_SRK = self._history_LSRK[slot]
        is_missing_SR = np.isnan(stale_SRK[..., 0])
        assumed_SK = np.ones_like(self._survival_SK)
        if self._config.new_requests == "mean":
            for sum_S, value_S in ((self._survival_SK, np.nansum(stale_SRK, axis=1)), (self._rounds_S, (~is_missing_SR).sum(axis=1))):
                is_new_S = self._has_drafted_LS[slot]
                sum_S[is_new_S] = (self._kept * sum_S + value_S)[is_new_S]
            is_known_S = self._rounds_S > 0.0
            assumed_SK[is_known_S] = self._survival_SK[is_known_S] / self._rounds_S[is_known_S, None]
        stale_SRK[is_missing_SR] = assumed_SK[np.nonzero(is_missing_SR)[0]]
        return stale_SRK


def _check(texts: Sequence[ReplayText], policy: str, cost: StepCost, num_requests: int, config: ReplayConfig) -> None:
    block_sizes = sorted({text.confidence_AK.shape[1] for text in texts})
    if len(block_sizes) != 1:
        raise ValueError(f"texts: block sizes {block_sizes} must be exactly one. Fix: pass at least one text, all of one drafter")
    names = policy_names(block_sizes[0], config.thresholds)
    if policy not in names:
        raise ValueError(f"policy: {policy!r} must be one of {names}. Fix: name one of them, or add its threshold to the config")
    if num_requests < 1:
        raise ValueError(f"num_requests: {num_requests} must be at least 1. Fix: leave this concurrency out")
    largest = num_requests * (1 + block_sizes[0])
    for name, needed, probes in (("num_requests", num_requests, cost.num_requests), ("batch_tokens", largest, cost.batch_tokens)):
        if needed > probes[-1]:
            raise ValueError(
                f"cost.{name}: probed to {probes[-1]}, {num_requests} requests of up to {1 + block_sizes[0]} tokens need {needed}; beyond the "
                "last probe all is free. Fix: profile larger steps, or leave this concurrency out"
            )
