"""How many draft tokens of each request the target verifies: SPS table, Algorithm 1, its asynchronous form, static policies (§5).

A step of R requests that verifies B tokens in all, anchors included, is expected to emit tau = R + the sum of the admitted
survivals, so Theta = tau * sps(B) tokens per second. Both schedulers walk down the survivals and differ in where they stop:

    admit         at the first token that does not raise Theta. The decision about a token then depends on nothing that
                  follows it, which keeps the output lossless (Appendix A), but a step in the SPS curve can trap the walk
    admit_async   at the highest Theta of the whole walk, over confidences of earlier rounds: the lag is the causal barrier.
                  The current survivals only rank which tokens are verified

Equal survivals go to the lower request, then to the lower position; float64 throughout. `highest` is the ranking in torch, for
an engine that keeps survivals on its device.

Shapes: R requests, K drafted tokens, N = R * K slots by falling survival, P probes, B batch sizes in tokens.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MIN_TIME_RATIO = 1.05  # slowest over fastest probe; below it a profile did not respond to the batch size


@dataclass(frozen=True)
class SpsTable:
    """Engine steps per second by batch size: seconds of a step, in its two parts, at each probed number of verified tokens.

    Time is linear between probes, so a stair where an engine pads is two probes, n and n + 1: a floor lookup lost 6 % to the
    best fixed length. It is constant outside them, as engines read such a file: beyond the last probe a token looks free, so the
    probes must reach the largest R * (K + 1) that is served (`StepProfile.at` does). Valid for the one stack that it was measured on.
    """

    batch_tokens: tuple[int, ...]  # ascending; verified in one step, anchors included
    draft_seconds: tuple[float, ...]  # the draft pass of such a step; 0 where `verify_seconds` holds the whole step
    verify_seconds: tuple[float, ...]  # the target's forward and the overhead

    def __post_init__(self) -> None:
        _check_timings(self.batch_tokens, self.draft_seconds, self.verify_seconds)
        if not self.batch_tokens or (np.diff(self.batch_tokens) <= 0).any():
            raise ValueError(
                f"sps.batch_tokens: {list(self.batch_tokens)} must be ascending and not empty. Fix: build the table with SpsTable.from_timings"
            )

    @classmethod
    def from_timings(cls, batch_tokens: Sequence[int], draft_seconds: Sequence[float], verify_seconds: Sequence[float]) -> "SpsTable":
        """Medians of raw timings, one entry per measured step, repeated and in any order; neither smoothed nor made monotone.

        ValueError when a timing is no duration, when fewer than two batch sizes were probed, and when the whole step takes
        the same time at every one of them: a scheduler would then admit everything.
        """
        _check_timings(batch_tokens, draft_seconds, verify_seconds)
        batch_N, draft_N, verify_N = np.asarray(batch_tokens), np.asarray(draft_seconds), np.asarray(verify_seconds)
        probes = np.unique(batch_N)
        if len(probes) < 2:
            raise ValueError(
                f"sps.batch_tokens: {probes.tolist()} must hold at least 2 distinct sizes. Fix: probe from 1 to the largest batch that is served"
            )
        draft_P = np.array([np.median(draft_N[batch_N == probe]) for probe in probes])
        verify_P = np.array([np.median(verify_N[batch_N == probe]) for probe in probes])
        fastest, slowest = (draft_P + verify_P).min(), (draft_P + verify_P).max()
        if slowest / fastest < MIN_TIME_RATIO:
            raise ValueError(
                f"sps.verify_seconds: steps of {probes[0]} to {probes[-1]} tokens take {fastest:.6g} to {slowest:.6g} s, the slowest must be at "
                f"least {MIN_TIME_RATIO} times the fastest. Fix: check that the engine verifies as many tokens as requested, and probe larger batches"
            )
        return cls(tuple(probes.tolist()), tuple(draft_P.tolist()), tuple(verify_P.tolist()))

    @cached_property
    def _sps_B(self) -> np.ndarray:
        """Steps per second at 0, 1, ..., last probe: a scheduler looks thousands of sizes up in a step."""
        step_seconds_P = np.add(self.draft_seconds, self.verify_seconds)
        return 1.0 / np.interp(np.arange(self.batch_tokens[-1] + 1), self.batch_tokens, step_seconds_P)

    def sps(self, batch_tokens: int | np.ndarray) -> np.ndarray:
        """Steps per second when one step verifies this many tokens, an integer or an array of integers of any shape."""
        return self._sps_B.take(batch_tokens, mode="clip")

    def seconds(self, batch_tokens: int) -> float:
        """Of one such step."""
        return 1.0 / float(self.sps(batch_tokens))


@dataclass(frozen=True)
class Admission:
    """The first `lengths_R[r]` draft tokens of request r are verified, `batch_tokens` = R + their sum in all.

    `theta` is the throughput in tokens per second that the choice promises, on the confidences that it was made with.
    """

    lengths_R: np.ndarray
    theta: float
    batch_tokens: int


def survival(confidence_RK: np.ndarray) -> np.ndarray:
    """a_{r,j} = c_{r,1} * ... * c_{r,j}: probability that a token and all before it are accepted; never rises along a row."""
    confidence_RK = np.asarray(confidence_RK, dtype=np.float64)
    if not ((confidence_RK >= 0.0) & (confidence_RK <= 1.0)).all():
        found = f"{confidence_RK.min()} to {confidence_RK.max()}"
        raise ValueError(f"confidence_RK: {found}, each must be a probability, 0 to 1. Fix: pass sigmoid(logit / temperature)")
    return confidence_RK.cumprod(axis=1)


def walk(survival_RK: np.ndarray, sps: SpsTable) -> tuple[np.ndarray, np.ndarray]:
    """All survivals, falling (N entries), and Theta once the first 0, 1, ..., N of them are admitted (N + 1 entries).

    With [..., R, K], steps that have nothing to do with each other: [..., N] and [..., N + 1].
    """
    *steps, num_requests, block_size = survival_RK.shape
    falling_N = np.sort(survival_RK.reshape(*steps, -1), axis=-1)[..., ::-1]
    tau = np.concatenate([np.full((*steps, 1), float(num_requests)), falling_N], axis=-1).cumsum(axis=-1)
    return falling_N, tau * sps.sps(np.arange(num_requests, num_requests * (block_size + 1) + 1))


def early_stop(falling_N: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """How many survivals of a walk Algorithm 1 admits: the positive ones before the first that does not raise Theta; [...] of [..., N]."""
    is_stop_N = (theta[..., 1:] <= theta[..., :-1]) | (falling_N <= 0.0)
    is_end_N = np.concatenate([is_stop_N, np.ones((*is_stop_N.shape[:-1], 1), dtype=bool)], axis=-1)
    return is_end_N.argmax(axis=-1)


def admitted_lengths(survival_RK: np.ndarray, falling_N: np.ndarray, num_admitted: int | np.ndarray) -> np.ndarray:
    """Lengths when the `num_admitted` highest survivals are verified: all above the last of them, and the first of its equals.

    With [..., R, K], [..., N] and [...]: of each step, [..., R]. Only values were sorted: a stable argsort of 256 x 7 takes
    70 us, this a fraction. Rows never rise, so what is chosen is a prefix.
    """
    num_S = np.reshape(num_admitted, -1)
    if not num_S.any():
        return np.zeros(survival_RK.shape[:-1], dtype=np.int64)
    survival_SRK, falling_SN = survival_RK.reshape(-1, *survival_RK.shape[-2:]), falling_N.reshape(-1, falling_N.shape[-1])
    last_S = np.where(num_S > 0, falling_SN[np.arange(len(num_S)), num_S - 1], np.inf)
    is_chosen_SRK = survival_SRK >= last_S[:, None, None]
    lengths_SR = is_chosen_SRK.sum(axis=-1)
    tied_T = np.flatnonzero(lengths_SR.sum(axis=-1) > num_S)  # steps in which not all of the equals are wanted
    if len(tied_T):
        is_equal_TN = (survival_SRK[tied_T] == last_S[tied_T, None, None]).reshape(len(tied_T), -1)
        is_chosen_TN = is_chosen_SRK[tied_T].reshape(is_equal_TN.shape)
        num_equal_T = num_S[tied_T] - is_chosen_TN.sum(axis=-1) + is_equal_TN.sum(axis=-1)
        is_chosen_TN &= ~is_equal_TN | (is_equal_TN.cumsum(axis=-1) <= num_equal_T[:, None])
        lengths_SR[tied_T] = is_chosen_TN.reshape(-1, *survival_SRK.shape[1:]).sum(axis=-1)
    return lengths_SR.reshape(survival_RK.shape[:-1])


def admit(confidence_RK: np.ndarray, sps: SpsTable) -> Admission:
    """Algorithm 1: down the positive survivals until Theta does not rise (an equal Theta stops, too)."""
    survival_RK = survival(confidence_RK)
    falling_N, theta = walk(survival_RK, sps)
    num_admitted = int(early_stop(falling_N, theta))
    lengths_R = admitted_lengths(survival_RK, falling_N, num_admitted)
    return Admission(lengths_R, float(theta[num_admitted]), len(lengths_R) + num_admitted)


def admit_async(stale_RK: np.ndarray, confidence_RK: np.ndarray, sps: SpsTable) -> Admission:
    """§5.2: the number of tokens is the argmax of Theta over the confidences of an earlier round, the lowest on ties.

    stale_RK: rows matched by request, from two rounds ago in the paper; engines count the lag differently, so the caller
    keeps the history. A row of NaN is a request without history and counts as 1.0 throughout (vLLM's and SGLang's rule, not
    in the paper). Fewer tokens are verified when fewer current survivals are positive; `theta` stays the promise of the history.
    """
    stale_RK = np.asarray(stale_RK, dtype=np.float64)
    survival_RK = survival(confidence_RK)
    if stale_RK.shape != survival_RK.shape:
        raise ValueError(
            f"stale_RK: shape {stale_RK.shape} must be that of confidence_RK, {survival_RK.shape}. Fix: a row of NaN for a request without history"
        )
    has_history_R1 = ~np.isnan(stale_RK).all(axis=1, keepdims=True)
    _, theta = walk(survival(np.where(has_history_R1, stale_RK, 1.0)), sps)
    capacity = int(theta.argmax())
    num_admitted = min(capacity, int(np.count_nonzero(survival_RK)))
    lengths_R = admitted_lengths(survival_RK, np.sort(survival_RK, axis=None)[::-1], num_admitted)
    return Admission(lengths_R, float(theta[capacity]), len(lengths_R) + num_admitted)


def highest(survival_RK: Tensor, num_admitted: int | Tensor) -> Tensor:
    """Lengths [R] when the `num_admitted` highest positive survivals are verified, by the tie rule of `admit`: for an engine.

    Reads no value back to the host, so a budget on the device (a tensor of one element) stays there.
    """
    flat_N = survival_RK.flatten()
    order_N = flat_N.sort(descending=True, stable=True).indices  # stable: equals keep request order, then position order
    is_admitted_N = torch.arange(flat_N.numel(), device=flat_N.device) < num_admitted
    is_chosen_N = torch.zeros_like(is_admitted_N).scatter(0, order_N, is_admitted_N) & (flat_N > 0)
    return is_chosen_N.view_as(survival_RK).sum(dim=1)


class Policy(Protocol):
    """What a replay asks each round: how much of each request is verified."""

    def __call__(self, confidence_RK: np.ndarray, /) -> Admission: ...


def fixed(length: int, sps: SpsTable) -> Policy:
    """The first `length` tokens of every request, or all of a shorter block."""
    if length < 0:
        raise ValueError(f"policy fixed: length {length} must be at least 0. Fix: policy none, or a length of 1 to the block size")

    def policy(confidence_RK: np.ndarray, /) -> Admission:
        num_requests, block_size = confidence_RK.shape
        return _static(np.full(num_requests, min(length, block_size)), confidence_RK, sps)

    return policy


def none(sps: SpsTable) -> Policy:
    """No speculation: the target decodes one token per request and step."""
    return fixed(0, sps)


def threshold(minimum: float, sps: SpsTable) -> Policy:
    """The longest prefix of every request whose confidences (not survivals) all reach `minimum`."""
    if not 0.0 <= minimum <= 1.0:
        raise ValueError(f"policy threshold: {minimum} must be between 0 and 1. Fix: policy none verifies nothing, verify_all everything")

    def policy(confidence_RK: np.ndarray, /) -> Admission:
        return _static(np.logical_and.accumulate(confidence_RK >= minimum, axis=1).sum(axis=1), confidence_RK, sps)

    return policy


def verify_all(sps: SpsTable) -> Policy:
    """Every drafted token."""
    return threshold(0.0, sps)


def static_policy(name: str) -> Policy:
    """fixed_<tokens> or threshold_<confidence>: what chooses without a measured table. ValueError for another name."""
    kind, _, value = name.partition("_")
    free = SpsTable((1,), (0.0,), (1.0,))  # `theta` of what they admit means nothing
    if kind == "fixed" and value.isdecimal():
        return fixed(int(value), free)
    if kind == "threshold":
        with suppress(ValueError):
            return threshold(float(value), free)
    raise ValueError(f"policy: {name!r} must be fixed_<tokens> or threshold_<confidence, 0 to 1>. Fix: fixed_3, say")


def policies(sps: SpsTable, lengths: Sequence[int], thresholds: Sequence[float]) -> dict[str, Policy]:
    """The policies of a report by name, in its order. `admit_async` needs a history, so the caller binds it round by round."""
    return {
        "none": none(sps),
        **{f"fixed_{length}": fixed(length, sps) for length in lengths},
        **{f"threshold_{minimum:g}": threshold(minimum, sps) for minimum in thresholds},
        "verify_all": verify_all(sps),
        "scheduler": partial(admit, sps=sps),
    }


def _static(lengths_R: np.ndarray, confidence_RK: np.ndarray, sps: SpsTable) -> Admission:
    survival_RK = survival(confidence_RK)
    is_verified_RK = np.arange(survival_RK.shape[1]) < lengths_R[:, None]
    batch_tokens = len(lengths_R) + int(lengths_R.sum())
    return Admission(lengths_R, float((len(lengths_R) + survival_RK[is_verified_RK].sum()) * sps.sps(batch_tokens)), batch_tokens)


def _check_timings(batch_tokens: Sequence[int], draft_seconds: Sequence[float], verify_seconds: Sequence[float]) -> None:
    """ValueError unless the columns are of one length and every entry can be a number of tokens, or a duration."""
    if not len(batch_tokens) == len(draft_seconds) == len(verify_seconds):
        raise ValueError(
            f"sps: {len(batch_tokens)} batch_tokens, {len(draft_seconds)} draft_seconds, {len(verify_seconds)} verify_seconds must be as many. "
            "Fix: one entry of each per step"
        )
    for tokens, draft, verify in zip(batch_tokens, draft_seconds, verify_seconds, strict=True):
        if tokens < 1:
            raise ValueError(f"sps.batch_tokens: {tokens} must be at least 1, a step verifies an anchor. Fix: leave this probe out")
        for name, seconds, is_duration in (("draft_seconds", draft, draft >= 0.0), ("verify_seconds", verify, verify > 0.0)):
            if not (is_duration and np.isfinite(seconds)):
                rule = "must be finite and positive" + " or 0" * (name == "draft_seconds")
                raise ValueError(f"sps.{name}: {seconds} at {tokens} batch_tokens, {rule}. Fix: measure this step again")
