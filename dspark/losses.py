"""The training loss (Eq. 8-12) and its gradient, without [rows, vocabulary] logits of all rows.

Each term is sum(w * term) / sum(w) with w_k = exp(-k / gamma_loss) on rows that count, both sums running over every rank
and micro-batch of an optimiser step. The denominators come from the batches alone (`loss_weights`), before any forward; so
each row's share of the loss is known beforehand, and its gradient can be computed with its value:

    for `chunk_rows` rows at a time:
        z = cap(h W^T) + b W_2^T - log sum exp      logits of the draft, normalised in place
        t = softmax of the target's logits          with the full-vocabulary normaliser that the cache holds
        CE, soft CE, TV from z and t                p = exp(z) takes the place of z, the sign of p - t that of t
        g = dLoss/dz                                 in place of p: p * (a + b (s - sum s p)) - a [label], s = sign(p - t)
        dh += g W,  db += g W_2,  dW_2 += g^T b     the frozen head has no gradient

Two buffers [chunk_rows, W] and the gradient of W_2 are all that is held, and each product of the dense computation is made once. (Tiles of the
vocabulary over all rows would hold as little, but the sign needs both normalisers, and the gradient of W_2 the sum s p: the
draft's logits would be computed three times.)

With a reduced draft vocabulary the target keeps its full normaliser: its mass outside counts in L1 and lowers c*, and
cross-entropy is masked where the label is outside. Shapes: M rows, W draft vocabulary, B, A, K, D, R as in drafters/base.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.config import LossConfig
from dspark.drafters.base import BlockOutput, DraftHead, TargetRows, TrainingBatch
from dspark.layers import product_dtype, project, project_back, soft_capped


@dataclass
class LossWeights:
    """Row weights and their sums, the denominators: `sum_ce` leaves out labels outside the draft vocabulary."""

    weight_BAK: Tensor
    label_index_BAK: Tensor  # index into the draft vocabulary, -1 where the row does not count or the label is outside
    sum: Tensor
    sum_ce: Tensor


def loss_weights(batch: TrainingBatch, head: DraftHead, config: LossConfig, dtype: torch.dtype) -> LossWeights:
    """w_k on valid rows (k counted from 0), and labels as draft-vocabulary indices."""
    K = batch.valid_BAK.shape[-1]
    decay_K = torch.exp(-torch.arange(K, dtype=dtype, device=batch.valid_BAK.device) / config.position_decay)
    weight_BAK, index_BAK = batch.valid_BAK * decay_K, head.index(batch.label_BAK)
    is_inside_BAK = batch.valid_BAK & (index_BAK >= 0)
    return LossWeights(weight_BAK, index_BAK.where(is_inside_BAK, -1), weight_BAK.sum(), (weight_BAK * is_inside_BAK).sum())


@dataclass
class Denominators:
    """Sums of row weights over the whole optimiser step; a term without any weighted row is 0."""

    sum: Tensor
    sum_ce: Tensor


@dataclass
class Losses:
    """`total`: this batch's part of the step's loss, with gradient. The rest: sums over its rows, without."""

    total: Tensor
    ce: Tensor
    soft_ce: Tensor
    tv: Tensor
    confidence: Tensor
    accepted_length: Tensor  # over blocks with a valid row, of sum_k prod_{i<=k} c*_i
    num_blocks: Tensor
    accept_K: Tensor  # over valid rows, of c* = 1 - L1 / 2
    count_K: Tensor

    def sums(self) -> Tensor:
        """Everything but the total, [6 + 2 K], to be added up over micro-batches and ranks."""
        scalars = (self.ce, self.soft_ce, self.tv, self.confidence, self.accepted_length, self.num_blocks)
        return torch.cat([torch.stack(scalars), self.accept_K, self.count_K])


def block_losses(
    output: BlockOutput,
    batch: TrainingBatch,
    head: DraftHead,
    weights: LossWeights,
    denominators: Denominators,
    config: LossConfig,
    chunk_rows: int,
) -> Losses:
    """The loss of the rows that count, Eq. 12.

    With no valid row every sum is 0 and still depends on every parameter, so that a rank without work takes part in the
    backward pass.
    """
    valid = batch.valid_BAK
    weight_M, label_M = weights.weight_BAK[valid], weights.label_index_BAK[valid]
    is_inside_M = label_M >= 0
    shares_3M = torch.stack(
        [
            _share(config.alpha_ce, weight_M * is_inside_M, denominators.sum_ce),
            _share(config.alpha_soft_ce, weight_M, denominators.sum),
            _share(config.alpha_tv, weight_M, denominators.sum),
        ]
    )
    bias_MR = None if output.bias_BAKR is None else output.bias_BAKR[valid]
    rows = _Rows(
        batch.target_rows(), label_M.clamp_min(0), shares_3M, head, chunk_rows, config.alpha_soft_ce > 0.0, torch.is_grad_enabled()
    )
    total, (ce_M, soft_ce_M, l1_M) = _Distances.apply(output.hidden_BAKD[valid], bias_MR, head.bias_weight_WR, rows)
    accept_M = (1.0 - 0.5 * l1_M).clamp(0.0, 1.0)
    confidence_M = torch.zeros_like(accept_M)
    if output.confidence_logits_BAK is not None:
        logit_M = output.confidence_logits_BAK[valid]
        confidence_M = torch.nn.functional.binary_cross_entropy_with_logits(logit_M, accept_M, reduction="none")
        total = total + (_share(config.alpha_confidence, weight_M, denominators.sum) * confidence_M).sum()
    accept_BAK = torch.zeros_like(weights.weight_BAK).masked_scatter_(valid, accept_M.to(weights.weight_BAK.dtype))
    return Losses(
        total,
        ce=(weight_M * is_inside_M * ce_M).sum(),
        soft_ce=(weight_M * soft_ce_M).sum(),
        tv=(weight_M * l1_M).sum(),
        confidence=(weight_M * confidence_M.detach()).sum(),
        accepted_length=accept_BAK.cumprod(-1).sum(),
        num_blocks=valid.any(-1).sum().to(accept_BAK.dtype),
        accept_K=accept_BAK.sum((0, 1)),
        count_K=valid.sum((0, 1)).to(accept_BAK.dtype),
    )


def _share(alpha: float, weight_M: Tensor, denominator: Tensor) -> Tensor:
    return weight_M * (alpha / denominator.clamp_min(torch.finfo(denominator.dtype).tiny))


def loss_bytes(chunk_rows: int, head: DraftHead) -> int:
    """What `block_losses` holds at its peak beside its inputs and the gradients of its rows."""
    num_ids, size = len(head.weight_WD), 8 if head.weight_WD.dtype == torch.float64 else 4
    rank = 0 if head.bias_weight_WR is None else head.bias_weight_WR.shape[1]
    return size * num_ids * (2 * chunk_rows + rank)


@dataclass
class _Rows:
    target: TargetRows
    label_M: Tensor
    shares_3M: Tensor  # how much of the loss one unit of a row's CE, soft CE and L1 is
    head: DraftHead
    chunk_rows: int
    has_soft_ce: bool
    has_gradient: bool


class _Bias:
    """B_k = W_2 b_k of some rows at a time, and the gradients of both."""

    def __init__(self, rows_MR: Tensor, weight_WR: Tensor, dtype: torch.dtype) -> None:
        self._rows_MR, self._weight_WR = rows_MR.to(dtype), weight_WR
        self._d_rows_MR = torch.empty_like(rows_MR)
        self._d_weight_WR: Tensor | None = None

    def logits(self, part: slice) -> Tensor:
        return project(self._rows_MR[part], self._weight_WR)

    def backward(self, g_CW: Tensor, part: slice) -> None:
        g, rows = g_CW.to(self._rows_MR.dtype), self._rows_MR[part]
        self._d_rows_MR[part] = project_back(g, self._weight_WR)
        if self._d_weight_WR is None:
            self._d_weight_WR = torch.zeros_like(self._weight_WR, dtype=g_CW.dtype)
        if g.dtype == self._d_weight_WR.dtype:
            self._d_weight_WR.addmm_(g.T, rows)
        else:
            self._d_weight_WR += g.T @ rows

    def gradients(self) -> tuple[Tensor, Tensor]:
        weight = torch.zeros_like(self._weight_WR) if self._d_weight_WR is None else self._d_weight_WR.to(self._weight_WR.dtype)
        return self._d_rows_MR, weight


class _Distances(torch.autograd.Function):
    """The rows' part of the loss, and its terms [3, M]; the gradient is made with the value, and scaled in `backward`."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, bias_MR: Tensor | None, bias_weight_WR: Tensor | None, rows: _Rows) -> tuple[Tensor, ...]:
        dtype = product_dtype(hidden_MD.dtype)
        hidden, d_hidden = hidden_MD.to(dtype), torch.empty_like(hidden_MD)
        bias = None if bias_MR is None or bias_weight_WR is None else _Bias(bias_MR, bias_weight_WR, dtype)
        terms_3M = torch.empty_like(rows.shares_3M)
        for start in range(0, len(hidden), rows.chunk_rows):
            part = slice(start, start + rows.chunk_rows)
            z_CW, slope_CW, cap = project(hidden[part], rows.head.weight_WD), None, rows.head.soft_cap
            if cap is not None:
                z_CW = soft_capped(z_CW, cap)
                slope_CW = 1.0 - (z_CW / cap) ** 2
            if bias:
                z_CW += bias.logits(part)
            terms_3M[:, part], g_CW = _terms(z_CW, rows, part)
            if g_CW is None:
                continue
            if bias:
                bias.backward(g_CW, part)
            d_hidden[part] = project_back((g_CW if slope_CW is None else slope_CW.mul_(g_CW)).to(dtype), rows.head.weight_WD)
        ctx.gradients = d_hidden, *(bias.gradients() if bias else (None, None))
        ctx.mark_non_differentiable(terms_3M)
        return (rows.shares_3M * terms_3M).sum(), terms_3M

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: they are as large as the parameters
        return *(None if g is None else g.mul_(grad.to(g.dtype)) for g in gradients), None


def _terms(z_CW: Tensor, rows: _Rows, part: slice) -> tuple[Tensor, Tensor | None]:
    """CE, soft CE and L1 of some rows [3, C], and what their shares of the loss are worth to the draft's logits `z_CW`, which
    are used up."""
    label_C, (ce_C, soft_ce_C, tv_C) = rows.label_M[part], rows.shares_3M[:, part, None]
    z_CW -= z_CW.logsumexp(-1, keepdim=True)
    t_CW = target_probs(rows.target[part], rows.head)
    mass_C = t_CW.sum(-1)
    ce = -z_CW.gather(-1, label_C[:, None])[:, 0]
    soft_ce = -(t_CW[:, None] @ z_CW[..., None])[:, 0, 0]
    target_CW = t_CW.clone() if rows.has_gradient and rows.has_soft_ce else None
    p_CW, sign_CW = z_CW.exp_(), t_CW  # one takes the other's place
    sign_CW -= p_CW
    l1 = torch.linalg.vector_norm(sign_CW, 1, dim=-1) + (1.0 - mass_C).clamp_min(0.0)
    terms = torch.stack([ce, soft_ce, l1])
    if not rows.has_gradient:
        return terms, None
    sign_CW.sign_().neg_()
    balance_C = (p_CW[:, None] @ sign_CW[..., None])[:, 0]  # sum of s p
    g_CW = p_CW.mul_(sign_CW.mul_(tv_C).add_(ce_C + soft_ce_C * mass_C[:, None] - tv_C * balance_C))
    g_CW.scatter_add_(-1, label_C[:, None], -ce_C)
    if target_CW is not None:
        g_CW.addcmul_(target_CW, soft_ce_C, value=-1.0)
    return terms, g_CW


def target_probs(target: TargetRows, head: DraftHead) -> Tensor:
    """p_t over the draft vocabulary [C, W] with the full-vocabulary normaliser."""
    if target.final_MD is not None:
        logits = project(target.final_MD.to(product_dtype(target.final_MD.dtype)), head.weight_WD)
        return soft_capped(logits, head.soft_cap).sub_(target.log_sum_exp_M[:, None]).exp_()
    assert target.top_ids_MC is not None
    assert target.top_logits_MC is not None
    # Ids outside the draft vocabulary go to a place of their own, which is cut off.
    index = head.index(target.top_ids_MC)
    probs = (target.top_logits_MC - target.log_sum_exp_M[:, None]).exp()
    whole = probs.new_zeros(len(index), len(head.ids_W) + 1)
    return whole.scatter_(-1, index.where(index >= 0, len(head.ids_W)), probs)[:, :-1]
