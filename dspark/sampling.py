"""Distributions, draws and the rejection test of speculative decoding (§2 of the paper).

The emitted text has exactly the target's distribution as long as the *same* probability tensor draws a draft token and
tests it. So everything here works on one fp32 (or fp64) distribution, to which temperature, top-k and top-p have been applied,
the same way on both sides; temperature 0 and greedy drafting are point masses.

A token is drawn by a race of exponentials, argmax_v p_v / E_v, with E keyed by request, position and token (`Noise`). The batch
that a request happens to be in changes its probabilities by rounding alone, and that changes a race only where two tokens all
but tie; an inverse CDF, which adds up the vocabulary, would turn it into another token far more often. A position may be drafted
from several anchors, and each time with other noise: verified lengths may depend on the confidences of earlier drafts, which
depend on the tokens drafted then, and must know nothing of the present ones.

Shapes: B requests, K drafted tokens, S rows of all requests, V target vocabulary, W draft vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

DRAFT, VERIFY, ACCEPT = 0, 1, 2  # what a random number decides
UNIFORMS_AT_ONCE = 64
LEAST_FP32 = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Sampling:
    """`mode` probabilistic: drafts are drawn like the target's tokens; greedy: the draft's best token, p_d is a point mass.

    top_k 0 and top_p 1 keep the whole vocabulary.
    """

    mode: Literal["probabilistic", "greedy"]
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def has_point_drafts(self) -> bool:
        return self.mode == "greedy" or self.temperature == 0.0

    def probs(self, logits: Tensor) -> Tensor:
        return distribution(logits, self.temperature, self.top_k, self.top_p)


def distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """softmax(logits / temperature) over the last dimension, at least fp32; a point mass on the argmax at temperature 0.

    top_k: all below the k-th highest are left out. top_p: all that are not needed to reach this mass from the highest down.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0.0:
        return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
    wide = wide / temperature
    if 0 < top_k < wide.shape[-1]:
        wide = wide.masked_fill(wide < wide.topk(top_k).values[..., -1:], -torch.inf)
    probs = wide.softmax(-1)
    if top_p < 1.0:
        falling, order = probs.sort(-1, descending=True)
        is_left_out = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, falling.cumsum(-1) - falling >= top_p)
        probs = probs.masked_fill(is_left_out, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


class Noise:
    """A request's random numbers, each keyed by what it decides; the same in any batch and round."""

    def __init__(self, seed: int, request_id: str) -> None:
        digest = hashlib.sha256(f"{seed}/{request_id}".encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype=np.uint64)
        self._uniforms: dict[int, np.ndarray] = {}

    def exponentials(self, purpose: int, position: int, k: int, size: int) -> np.ndarray:
        """E_v of the race at a position, or of the k-th token drafted from an anchor there; fp32."""
        return exponentials(self.generator(purpose, position, k), (size,))

    def uniforms(self, position: int, size: int) -> list[float]:
        """Of the tests of the tokens at this position and the following ones."""
        return [self._uniform(position + i) for i in range(size)]

    def _uniform(self, position: int) -> float:
        block = position // UNIFORMS_AT_ONCE
        if block not in self._uniforms:
            self._uniforms[block] = self.generator(ACCEPT, block).random(UNIFORMS_AT_ONCE)
        return float(self._uniforms[block][position % UNIFORMS_AT_ONCE])

    def generator(self, purpose: int, position: int, k: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key, counter=[0, k, position, purpose]))


def exponentials(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """fp32 values, drawn with the 53 bits of a double: fp32's own are 0 once in 2^23, and a 0 wins every race of a large vocabulary."""
    return np.maximum(generator.standard_exponential(size), LEAST_FP32).astype(np.float32)


def race(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Index of the last dimension drawn from `probs`, which need not be normalised."""
    return (probs / exponentials).argmax(-1)


class BlockDraw:
    """Draws the blocks of B requests token by token (a `Choose`) and keeps what each was drawn from.

    `probs_BKW` is None when drafts are point masses.
    """

    def __init__(self, sampling: Sampling, noises: Sequence[Noise], positions: Sequence[int]) -> None:
        """positions: of the anchors."""
        self._sampling, self._noises, self._positions = sampling, noises, positions
        self._probs: list[Tensor] = []

    def __call__(self, k: int, logits_BW: Tensor) -> Tensor:
        if self._sampling.has_point_drafts:
            return logits_BW.argmax(-1)
        self._probs.append(self._sampling.probs(logits_BW))
        return draw(self._probs[-1], self._noises, DRAFT, self._positions, k)

    @property
    def probs_BKW(self) -> Tensor | None:
        return torch.stack(self._probs, dim=1) if self._probs else None


def draw(probs_BV: Tensor, noises: Sequence[Noise], purpose: int, positions: Sequence[int], k: int = 0) -> Tensor:
    """One token of each request (`Noise.exponentials`)."""
    size = probs_BV.shape[-1]
    rows = [noise.exponentials(purpose, position, k, size) for noise, position in zip(noises, positions, strict=True)]
    return race(probs_BV, torch.from_numpy(np.stack(rows)).to(probs_BV.device))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(p_t - p_d, 0), not normalised; the target itself where nothing is left (a rejection there is only rounding)."""
    left = (target_probs - draft_probs).clamp_min(0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target_probs)


@dataclass(frozen=True)
class Verification:
    """`num_accepted_B` drafted tokens survive; the next token is drawn from `next_probs_BV` (not normalised): the correction, or
    the bonus when all that were verified survive."""

    num_accepted_B: Tensor
    next_probs_BV: Tensor
    draft_prob_BK: Tensor  # p_d of each drafted token
    target_prob_BK: Tensor  # p_t of each verified one, given the drafted prefix; 0 behind them


def verify(
    draft_tokens_BK: Tensor,
    draft_probs_BKW: Tensor | None,
    draft_ids_W: Tensor,
    lengths_B: Tensor,
    target_probs_SV: Tensor,
    uniform_BK: Tensor,
) -> Verification:
    """Accepts x_k with probability min(1, p_t / p_d), left to right, of the first `lengths_B` drafted tokens of each request.

    draft_probs_BKW: what the tokens were drawn from, None for point masses on them. draft_ids_W: target id of each
    draft-vocabulary entry. target_probs_SV: one request's lengths + 1 rows after the other's. With K = 0 this is plain sampling.
    """
    B, K = draft_tokens_BK.shape
    rows_B = torch.arange(B, device=lengths_B.device)
    starts_B = (lengths_B + 1).cumsum(0) - (lengths_B + 1)
    is_verified_BK = torch.arange(K, device=lengths_B.device) < lengths_B[:, None]
    place_BK = (starts_B[:, None] + torch.arange(K, device=lengths_B.device)).where(is_verified_BK, 0)
    target_prob_BK = target_probs_SV[place_BK, draft_tokens_BK] * is_verified_BK
    draft_prob_BK = torch.ones_like(target_prob_BK)
    if draft_probs_BKW is not None:
        index_BK = torch.searchsorted(draft_ids_W, draft_tokens_BK.contiguous())
        draft_prob_BK = draft_probs_BKW.gather(-1, index_BK[..., None])[..., 0].to(target_prob_BK.dtype)
    is_accepted_BK = (uniform_BK.to(target_prob_BK.dtype) * draft_prob_BK < target_prob_BK) & is_verified_BK
    num_accepted_B = is_accepted_BK.long().cumprod(-1).sum(-1)
    next_probs_BV = target_probs_SV[starts_B + num_accepted_B]
    rejected = rows_B[num_accepted_B < lengths_B]
    if len(rejected):
        refused = num_accepted_B[rejected]
        draft_probs_V = torch.zeros_like(next_probs_BV[rejected])
        if draft_probs_BKW is None:
            draft_probs_V.scatter_(-1, draft_tokens_BK[rejected, refused][:, None], 1.0)
        else:
            draft_probs_V[:, draft_ids_W] = draft_probs_BKW[rejected, refused].to(draft_probs_V.dtype)
        next_probs_BV = next_probs_BV.index_put((rejected,), residual(next_probs_BV[rejected], draft_probs_V))
    return Verification(num_accepted_B, next_probs_BV, draft_prob_BK, target_prob_BK)
