"""Whether a step begins with a draft pass, decided before it; not in the paper, whose engines draft in every step.

    gate.opens(R)                           # draft now?
    gate.observe(R, num_tokens, seconds)    # what the step came to

A draft pass is paid for whether its tokens are verified or not, so with many requests in a step no drafting may beat any
admission. A step with a draft pass loses its seconds less those that its tokens would have taken without drafting; the mean of
that over about `window_rounds` rounds of requests says whether the next step drafts (`is_drafting`). A step enters the mean
`lag_rounds` steps later. Lossless, since the mean holds only what earlier rounds came to.

Shapes: S gates, L steps of lag.
"""

from collections.abc import Callable

import numpy as np


class DraftGate:
    """`plain_seconds`: of a step of R requests without a draft pass. `shape`: of independent gates, elementwise (S)."""

    def __init__(
        self, plain_seconds: Callable[[int], float], lag_rounds: int, window_rounds: int, probe_share: float, shape: tuple[int, ...] = ()
    ) -> None:
        self._plain_seconds, self._window_rounds, self._probe_share = plain_seconds, window_rounds, probe_share
        self._lost_LS, self._has_drafted_LS = np.zeros((lag_rounds, *shape)), np.zeros((lag_rounds, *shape), dtype=bool)
        # Of the mean, a quotient of two sums that forget at the same pace. It begins as if some rounds had lost nothing: fewer, and the
        # chance of the first ones would close the gate for long; more, and where drafting never pays the start would cost too much.
        self._lost_S, self._weight_S = np.zeros(shape), np.full(shape, 1.0 - self._kept(max(window_rounds // 2, 1)))
        self._num_skipped_S, self._num_steps = np.zeros(shape, dtype=np.int64), 0

    def opens(self, num_requests: int, lost_seconds_S: np.ndarray | None = None) -> np.ndarray:
        """`lost_seconds_S`: what the step of `lag_rounds` ago was to lose, if it is known otherwise than by what was observed."""
        slot = self._num_steps % len(self._lost_LS)
        if lost_seconds_S is not None:
            self._lost_LS[slot] = lost_seconds_S
        kept, is_new_S = self._kept(num_requests), self._has_drafted_LS[slot]
        self._lost_S = np.where(is_new_S, kept * self._lost_S + (1.0 - kept) * self._lost_LS[slot], self._lost_S)
        self._weight_S = np.where(is_new_S, kept * self._weight_S + (1.0 - kept), self._weight_S)
        mean_lost_S = self._lost_S / self._weight_S
        opens_S = np.asarray(is_drafting(mean_lost_S, self._num_skipped_S, self._plain_seconds(num_requests), self._probe_share))
        self._num_skipped_S = np.where(opens_S, 0, self._num_skipped_S + 1)
        self._has_drafted_LS[slot] = opens_S
        return opens_S

    def observe(self, num_requests: int, num_tokens: float | np.ndarray, seconds: float | np.ndarray) -> None:
        """The end of the step: the tokens it emitted, and how long it took."""
        self._lost_LS[self._num_steps % len(self._lost_LS)] = self.lost(num_requests, num_tokens, seconds)
        self._num_steps += 1

    def _kept(self, num_rounds: int) -> float:
        """Of a sum, after so many more rounds."""
        return (1.0 - 1.0 / self._window_rounds) ** num_rounds

    def lost(self, num_requests: int, num_tokens: float | np.ndarray, seconds: float | np.ndarray) -> float | np.ndarray:
        """Seconds that a step took longer than its tokens would have taken without drafting."""
        return seconds - num_tokens * (self._plain_seconds(num_requests) / num_requests)


def is_drafting(
    mean_lost_seconds: float | np.ndarray, num_skipped: int | np.ndarray, plain_seconds: float, probe_share: float
) -> bool | np.ndarray:
    """By the mean that draft passes lost lately, beside steps without one of `plain_seconds` each. Of numbers, or elementwise of arrays.

    Where nothing is lost the next step drafts. Else it does not - and since steps that do not show nothing, one drafts all the same
    as soon as what it will lose is `probe_share` of the time of the `num_skipped` steps since the last that did. So looking again
    costs that share of the throughput, no more, and is frequent where the two are nearly even. The mean begins at 0, which drafts.
    """
    return mean_lost_seconds <= probe_share * num_skipped * plain_seconds
