"""What a step of an engine costs by its requests, the tokens that it verifies and the context behind them, measured (§5, SPS).

A step is the draft pass of R requests and the verification of B tokens. The target reads every request's cached keys, so the same
B takes longer with more requests and behind longer contexts: a measured `Curve` holds for one context length and one number of
requests, and `StepProfile.at` interpolates between curves.

    check_timings(timings, 0.3, 0.7)                     refuses what no table should be made of
    profile = StepProfile.of(timings)                    medians
    profile.at(context_tokens=300.0, num_requests=24)    a StepCost, what a replay or a scheduler reads

Shapes: C context lengths, R numbers of requests, B sizes of a step in tokens, N timings.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.scheduler import SpsTable

MAX_NOISY_SHARE = 0.2  # of all sizes


@dataclass(frozen=True)
class StepTiming:
    """One measured step. `overhead_seconds`: what of the whole step is neither of the other two. ValueError for no duration."""

    context_tokens: int
    num_requests: int
    batch_tokens: int  # verified, anchors included
    draft_seconds: float  # 0 where nothing is drafted
    verify_seconds: float
    overhead_seconds: float

    def __post_init__(self) -> None:
        for name, is_duration in (
            ("draft_seconds", self.draft_seconds >= 0.0),
            ("verify_seconds", self.verify_seconds > 0.0),
            ("overhead_seconds", self.overhead_seconds >= 0.0),
        ):
            if not (is_duration and np.isfinite(getattr(self, name))):
                rule = "must be finite and positive" + " or 0" * (name != "verify_seconds")
                raise ValueError(
                    f"timing.{name}: {getattr(self, name)} at {self.batch_tokens} batch_tokens, {rule}. Fix: measure this step again"
                )

    @property
    def whole_verify_seconds(self) -> float:
        """All of the step that is paid without drafting, too."""
        return self.verify_seconds + self.overhead_seconds


def random_lengths(batch_tokens: int, num_requests: int, block_size: int, generator: np.random.Generator) -> np.ndarray:
    """[R]: drafted tokens of each request in a step of so many tokens, anchors included, as uneven as those of a scheduler: an engine may
    pad what it does to the longest. Every choice among the blocks' tokens is as likely."""
    drafted = generator.permutation(num_requests * block_size)[: batch_tokens - num_requests]
    return np.bincount(drafted // block_size, minlength=num_requests)


def check_timings(timings: Sequence[StepTiming], max_spread: float, min_rank_correlation: float) -> None:
    """ValueError for timings that no scheduler should trust.

    At each context length the steps of the most requests, which weigh most in the engine, must take longer the more they verify:
    neither flat (`SpsTable.from_timings`) nor below that rank correlation of time with size (about 0 where an engine ignores it).
    And they must repeat: at most a fifth of all (context, requests, size) may have an interquartile range above `max_spread` times
    its median.
    """
    most = max((t.num_requests for t in timings), default=0)
    for context_tokens in sorted({t.context_tokens for t in timings}):
        largest = [t for t in timings if (t.context_tokens, t.num_requests) == (context_tokens, most)]
        sizes, seconds = [t.batch_tokens for t in largest], [t.whole_verify_seconds for t in largest]
        SpsTable.from_timings(sizes, [0.0] * len(largest), seconds)
        correlation = float(np.corrcoef(_ranks(sizes), _ranks(seconds))[0, 1])
        if correlation < min_rank_correlation:
            raise ValueError(
                f"sps.verify_seconds: the rank correlation with batch_tokens is {correlation:.2f} for {most} requests behind {context_tokens} "
                f"tokens, it must be at least {min_rank_correlation}. Fix: check that the engine verifies as many tokens as requested, and "
                "measure on a machine that does nothing else"
            )
    cells: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for t in timings:
        cells[t.context_tokens, t.num_requests, t.batch_tokens].append(t.draft_seconds + t.whole_verify_seconds)
    spreads = {cell: spread(seconds) for cell, seconds in cells.items()}
    noisy = [cell for cell, found in spreads.items() if found > max_spread]
    if len(noisy) > MAX_NOISY_SHARE * len(cells):
        context_tokens, num_requests, batch_tokens = worst = max(noisy, key=lambda cell: spreads[cell])
        raise ValueError(
            f"sps.max_spread: {max_spread}, but {len(noisy)} of {len(cells)} sizes have a larger interquartile range over median, most of all "
            f"{spreads[worst]:.2f} at {batch_tokens} batch_tokens of {num_requests} requests behind {context_tokens} tokens; at most "
            f"{MAX_NOISY_SHARE:.0%} may. Fix: measure on a machine that does nothing else, with more repeats"
        )


def spread(seconds: Sequence[float]) -> float:
    """Interquartile range over median."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Equals share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, measured on one stack: its draft pass by number of requests, its verification by number of tokens.

    Linear between the probes and constant outside them.
    """

    num_requests: tuple[int, ...]  # probes of the draft pass, ascending
    draft_seconds: tuple[float, ...]
    batch_tokens: tuple[int, ...]  # probes of the verification, ascending; anchors included
    verify_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        probes = self.num_requests
        if not probes or len(probes) != len(self.draft_seconds) or probes[0] < 1 or (np.diff(probes) <= 0).any():
            raise ValueError(
                f"cost.num_requests: {list(probes)} must be ascending from at least 1, with one draft_seconds each ({len(self.draft_seconds)} "
                "given). Fix: the median of each probed number of requests"
            )
        for num_requests in probes:
            self.table(num_requests)  # refuses what is no duration

    def table(self, num_requests: int, *, is_drafting: bool = True) -> SpsTable:
        """Steps per second of this many requests by verified tokens. The draft pass takes as long however many are admitted."""
        draft_seconds = float(np.interp(num_requests, self.num_requests, self.draft_seconds)) if is_drafting else 0.0
        return SpsTable(self.batch_tokens, (draft_seconds,) * len(self.batch_tokens), self.verify_seconds)

    def linear(self) -> "StepCost":
        """The nearest cost without stairs: linear in the tokens, least squares of the relative errors; nowhere below the cheapest probe."""
        tokens_B, seconds_B = np.array(self.batch_tokens), np.array(self.verify_seconds)
        (fixed, slope), *_ = np.linalg.lstsq(np.stack([1.0 / seconds_B, tokens_B / seconds_B], axis=1), np.ones(len(tokens_B)), rcond=None)
        return replace(self, verify_seconds=tuple(np.maximum(fixed + slope * tokens_B, seconds_B.min()).tolist()))

    def padded(self) -> "StepCost":
        """Of an engine that pads each step to the next probe, as CUDA graphs do: a staircase."""
        edges = sorted({1, *self.batch_tokens, *(size + 1 for size in self.batch_tokens[:-1])})
        seconds = [self.verify_seconds[bisect_left(self.batch_tokens, edge)] for edge in edges]
        return replace(self, batch_tokens=tuple(edges), verify_seconds=tuple(seconds))


@dataclass(frozen=True)
class Curve:
    """Medians of the steps of one number of requests behind one context length; `verify_seconds` with the overhead."""

    context_tokens: int
    num_requests: int
    draft_seconds: float
    batch_tokens: tuple[int, ...]  # ascending
    verify_seconds: tuple[float, ...]


@dataclass(frozen=True)
class StepProfile:
    """Curves of every probed context length and number of requests, ascending."""

    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        found = [(curve.context_tokens, curve.num_requests) for curve in self.curves]
        if not found or found != [(context, num) for context in self.context_tokens for num in self.num_requests]:
            raise ValueError(
                f"profile.curves: (context_tokens, num_requests) {found} must be every pair of them, ascending and not empty. Fix: measure each "
                "number of requests behind each context length"
            )

    @classmethod
    def of(cls, timings: Sequence[StepTiming]) -> "StepProfile":
        """Medians of raw timings in any order; neither smoothed nor made monotone."""
        cells: dict[tuple[int, int], dict[int, list[StepTiming]]] = defaultdict(lambda: defaultdict(list))
        for t in timings:
            cells[t.context_tokens, t.num_requests][t.batch_tokens].append(t)
        curves = []
        for (context_tokens, num_requests), by_size in sorted(cells.items()):
            draft_seconds = float(np.median([t.draft_seconds for found in by_size.values() for t in found]))
            verify_seconds = [float(np.median([t.whole_verify_seconds for t in by_size[size]])) for size in sorted(by_size)]
            curves.append(Curve(context_tokens, num_requests, draft_seconds, tuple(sorted(by_size)), tuple(verify_seconds)))
        return cls(tuple(curves))

    @property
    def context_tokens(self) -> list[int]:
        return sorted({curve.context_tokens for curve in self.curves})

    @property
    def num_requests(self) -> list[int]:
        return sorted({curve.num_requests for curve in self.curves})

    def at(self, context_tokens: float, num_requests: int) -> StepCost:
        """Costs of steps of this many requests behind this context; as measured where both were probed, else linear between.

        Numbers of requests are compared at equal tokens a request, so a stair of the engine in B is blurred between them: probe
        those that are served. Above the last probe time goes on as between the last two, and never falls; behind a context below
        the first it is the first's. ValueError below the fewest requests, and for others than the only ones that were probed.
        """
        probes = self.num_requests
        if num_requests < probes[0] or (len(probes) == 1 and num_requests != probes[0]):
            raise ValueError(
                f"num_requests: {num_requests} must be at least the fewest measured, and these are {probes}. Fix: profile this many, too"
            )
        # Ceiling, in integers: a size that was measured with this many requests stays itself.
        sizes = sorted({-(-num_requests * tokens // curve.num_requests) for curve in self.curves for tokens in curve.batch_tokens})
        by_context_C = [self._seconds(context, num_requests, np.array(sizes)) for context in self.context_tokens]
        draft_seconds, *verify_seconds = _along(self.context_tokens, by_context_C, context_tokens).tolist()
        return StepCost((num_requests,), (draft_seconds,), tuple(sizes), tuple(verify_seconds))

    def _seconds(self, context_tokens: int, num_requests: int, size_B: np.ndarray) -> np.ndarray:
        """[1 + B]: the draft pass, then the verification of each size."""
        curves = [curve for curve in self.curves if curve.context_tokens == context_tokens]
        by_requests_R = [
            np.r_[curve.draft_seconds, np.interp(size_B * (curve.num_requests / num_requests), curve.batch_tokens, curve.verify_seconds)]
            for curve in curves
        ]
        return _along(self.num_requests, by_requests_R, num_requests)


def _along(probes: Sequence[float], rows: Sequence[np.ndarray], x: float) -> np.ndarray:
    """The rows' values at x: linear between ascending probes and above the last (never below its row), the first row before it."""
    if len(probes) == 1 or x <= probes[0]:
        return rows[0]
    i = min(int(np.searchsorted(probes, x)), len(probes) - 1)
    share = (x - probes[i - 1]) / (probes[i] - probes[i - 1])
    mixed = (1.0 - share) * rows[i - 1] + share * rows[i]
    return np.maximum(mixed, rows[-1]) if share > 1.0 else mixed
