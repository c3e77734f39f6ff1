"""The training loss: cross-entropy, total variation and confidence terms (Eq. 8-12), as sums that are divided once.

Each term is sum(w * term) / sum(w) with w_k = exp(-k / gamma_loss) on rows that count, both sums running over every rank
and micro-batch of an optimiser step. So this file returns numerators, and denominators come from the batch alone
(`loss_weights`), before any forward: the trainer reduces them first and divides by the global sums.

With a reduced draft vocabulary the target keeps its full normaliser: its mass outside counts in L1 and lowers c*, and
cross-entropy is masked where the label is outside. Shapes: M rows, W draft vocabulary, B, A, K as in drafters/base.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.config import LossConfig
from dspark.drafters.base import BlockOutput, TrainingBatch


@dataclass
class LossWeights:
    """Row weights and their sums, the denominators: `sum_ce` leaves out labels outside the draft vocabulary."""

    weight_BAK: Tensor
    label_index_BAK: Tensor  # index into the draft vocabulary, -1 where the row does not count or the label is outside
    sum: Tensor
    sum_ce: Tensor


def loss_weights(batch: TrainingBatch, draft_ids_W: Tensor, config: LossConfig, dtype: torch.dtype) -> LossWeights:
    """w_k on valid rows (k counted from 0), and labels as draft-vocabulary indices."""
    K = batch.valid_BAK.shape[-1]
    decay_K = torch.exp(-torch.arange(K, dtype=dtype, device=batch.valid_BAK.device) / config.position_decay)
    weight_BAK = batch.valid_BAK * decay_K
    index_BAK = torch.searchsorted(draft_ids_W, batch.label_BAK.clamp_min(0)).clamp_max(len(draft_ids_W) - 1)
    is_inside_BAK = batch.valid_BAK & (draft_ids_W[index_BAK] == batch.label_BAK)
    return LossWeights(weight_BAK, index_BAK.where(is_inside_BAK, -1), weight_BAK.sum(), (weight_BAK * is_inside_BAK).sum())


@dataclass
class LossSums:
    """Numerators of the loss terms (with gradient) and of the training metrics (without)."""

    ce: Tensor
    tv: Tensor
    confidence: Tensor
    accept_sum_K: Tensor  # sum over valid rows of c* = 1 - L1 / 2
    accept_count_K: Tensor
    accepted_length_sum: Tensor  # sum over blocks with a valid row of sum_k prod_{i<=k} c*_i
    block_count: Tensor


def block_losses(output: BlockOutput, target_log_probs_BAKW: Tensor, weights: LossWeights, valid_BAK: Tensor) -> LossSums:
    """Sums over the rows that count. target_log_probs_BAKW: log p_t over the draft vocabulary, normalised over the whole one.

    With no valid row every sum is 0 and still depends on every parameter, so that a rank without work takes part in the
    backward pass.
    """
    draft_log_probs_MW = output.draft_logits_BAKW[valid_BAK].log_softmax(-1)
    target_probs_MW = target_log_probs_BAKW[valid_BAK].exp()
    weight_M, label_M = weights.weight_BAK[valid_BAK], weights.label_index_BAK[valid_BAK]
    outside_M = (1.0 - target_probs_MW.sum(-1)).clamp_min(0.0)
    l1_M = (draft_log_probs_MW.exp() - target_probs_MW).abs().sum(-1) + outside_M
    ce_M = -draft_log_probs_MW.gather(-1, label_M.clamp_min(0)[:, None])[:, 0]
    accept_M = (1.0 - 0.5 * l1_M.detach()).clamp(0.0, 1.0)
    confidence = weight_M.sum() * 0.0
    if output.confidence_logits_BAK is not None:
        logit_M = output.confidence_logits_BAK[valid_BAK]
        confidence = (weight_M * torch.nn.functional.binary_cross_entropy_with_logits(logit_M, accept_M, reduction="none")).sum()
    accept_BAK = torch.zeros_like(weights.weight_BAK).masked_scatter_(valid_BAK, accept_M.to(weights.weight_BAK.dtype))
    return LossSums(
        ce=(weight_M * (label_M >= 0) * ce_M).sum(),
        tv=(weight_M * l1_M).sum(),
        confidence=confidence,
        accept_sum_K=accept_BAK.sum((0, 1)),
        accept_count_K=valid_BAK.sum((0, 1)).to(accept_BAK.dtype),
        accepted_length_sum=accept_BAK.cumprod(-1).sum(),
        block_count=valid_BAK.any(-1).sum().to(accept_BAK.dtype),
    )


def total_loss(sums: LossSums, sum_weights: Tensor, sum_weights_ce: Tensor, config: LossConfig) -> Tensor:
    """Eq. 12 with the denominators of the whole optimiser step; a term without any weighted row is 0."""

    def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
        return numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)

    return (
        config.alpha_ce * ratio(sums.ce, sum_weights_ce)
        + config.alpha_tv * ratio(sums.tv, sum_weights)
        + config.alpha_confidence * ratio(sums.confidence, sum_weights)
    )
