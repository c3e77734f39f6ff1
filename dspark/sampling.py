"""Distributions, draws and the rejection test of speculative decoding (§2 of the paper).

The emitted text has exactly the target's distribution as long as the *same* probability tensor draws a draft token and
tests it. So everything here works on one fp32 (or fp64) distribution; temperature 0 and greedy drafting are point masses
of the same form, not special cases. Randomness comes in as uniforms, so that a request's stream is its own.

Shapes: B requests, K drafted tokens, V target vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last dimension, at least fp32; a point mass on the argmax at temperature 0."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature == 0.0:
        return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
    return (wide / temperature).softmax(-1)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sample of the last dimension of `probs` (need not be normalised) with uniforms in [0, 1)."""
    cdf = probs.cumsum(-1)
    total = cdf[..., -1]
    # Rounding must not push the threshold onto the total: the first entry beyond it has positive probability.
    threshold = torch.minimum(uniform.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold[..., None], right=True)[..., 0]


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(p_t - p_d, 0), not normalised; the target itself where nothing is left (a rejection there is only rounding)."""
    left = (target_probs - draft_probs).clamp_min(0.0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target_probs)


@dataclass(frozen=True)
class Verification:
    """`num_accepted_B` drafted tokens survive; `next_token_B` is the correction, or the bonus when all survive."""

    num_accepted_B: Tensor
    next_token_B: Tensor
    target_prob_BK: Tensor  # p_t of each drafted token, given the drafted prefix


def verify(
    draft_tokens_BK: Tensor, draft_probs_BKW: Tensor, draft_ids_W: Tensor, target_probs_BLV: Tensor, uniform_BL: Tensor
) -> Verification:
    """Accepts x_k with probability min(1, p_t / p_d), left to right; draws the next token from the residual or p_t.

    draft_ids_W: target id of each draft-vocabulary entry. target_probs_BLV and uniform_BL have K+1 rows; the last uniform
    draws the next token. With K = 0 this is plain sampling.
    """
    B, K = draft_tokens_BK.shape
    rows = torch.arange(B, device=draft_tokens_BK.device)
    target_prob_BK = target_probs_BLV[:, :K].gather(-1, draft_tokens_BK[..., None])[..., 0]
    index_BK = torch.searchsorted(draft_ids_W, draft_tokens_BK.contiguous())
    draft_prob_BK = draft_probs_BKW.gather(-1, index_BK[..., None])[..., 0]
    is_accepted_BK = uniform_BL[:, :K].to(target_prob_BK.dtype) * draft_prob_BK < target_prob_BK
    num_accepted_B = is_accepted_BK.long().cumprod(-1).sum(-1)
    next_probs_BV = target_probs_BLV[rows, num_accepted_B]
    rejected = torch.nonzero(num_accepted_B < K)[:, 0]
    if len(rejected):
        draft_probs_V = torch.zeros_like(next_probs_BV[rejected])
        draft_probs_V[:, draft_ids_W] = draft_probs_BKW[rejected, num_accepted_B[rejected]].to(draft_probs_V.dtype)
        next_probs_BV = next_probs_BV.index_put((rejected,), residual(next_probs_BV[rejected], draft_probs_V))
    return Verification(num_accepted_B, draw(next_probs_BV, uniform_BL[:, K]), target_prob_BK)
