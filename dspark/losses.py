"""The training loss (Eq. 8-12) and its gradient, without [rows, vocabulary] logits of all rows.

Each term is sum(w * term) / sum(w) with w_k = exp(-k / gamma_loss) on rows that count, both sums running over every rank
and micro-batch of an optimiser step. The denominators come from the batches alone (`loss_weights`), before any forward; so
each row's share of the loss is known beforehand, and its gradient can be computed with its value. For `chunk_rows` rows at a
time, three passes over tiles of the vocabulary, which stay in the processor's cache from the product to the last sum:

    u = h W^T, kept;  z = cap(u) + b W_2^T;  log sum exp z
    p = softmax z,  t = the target's with the full-vocabulary normaliser that the cache holds;  CE, soft CE, TV
        r = p with the sign of t - p takes the place of u;  sum r
    g = dLoss/dz takes the place of r:  |r| (ce + soft mass(t) + tv sum r) - tv r - soft t - ce [label]

and then dh += g W,  db += g W_2,  dW_2 += g^T b for the whole chunk: the frozen head has no gradient. One buffer
[chunk_rows, W] in the precision of the products and the gradient of W_2 are all that is held; of the products of the dense
computation only b W_2^T is made twice, so that u needs no more digits than the product gave it. (Tiles over all rows at once
would compute h W^T three times: the sign needs both normalisers, and the gradient of W_2 the sum r.)

With a reduced draft vocabulary the target keeps its full normaliser: its mass outside counts in L1 and lowers c*, and
cross-entropy is masked where the label is outside. Shapes: M rows, C rows of a chunk, N ids of a tile, W draft vocabulary,
B, A, K, D, R as in drafters/base.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.config import LossConfig
from dspark.drafters.base import BlockOutput, DraftHead, TargetRows, TrainingBatch
from dspark.layers import product_dtype, project, project_back, soft_capped

TILE_IDS = {"cpu": 2048, "cuda": 16_384}  # ids of a tile: cache on a processor, few kernel launches on a GPU


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


def loss_bytes(chunk_rows: int, head: DraftHead, config: LossConfig) -> int:
    """What `block_losses` holds at its peak beside its inputs and the gradients of its rows."""
    num_ids, dtype = len(head.weight_WD), product_dtype(head.weight_WD.dtype)
    num_buffers = 1 + (head.soft_cap is not None) + (config.alpha_soft_ce > 0.0)
    rank = 0 if head.bias_weight_WR is None else head.bias_weight_WR.shape[1]
    wide = torch.promote_types(dtype, torch.float32).itemsize
    tiles = 6 * wide * chunk_rows * min(num_ids, TILE_IDS[head.weight_WD.device.type])
    return num_ids * (dtype.itemsize * num_buffers * chunk_rows + wide * rank) + tiles


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
    """B = b W_2^T, and the gradients of both."""

    def __init__(self, bias_MR: Tensor, weight_WR: Tensor) -> None:
        self._bias_MR, self._weight_WR = bias_MR.to(product_dtype(bias_MR.dtype)), weight_WR
        self._d_bias_MR = torch.zeros_like(bias_MR)
        self._d_weight_WR: Tensor | None = None

    def logits(self, part: slice, tile: slice) -> Tensor:
        return project(self._bias_MR[part], self._weight_WR[tile])

    def backward(self, g_CW: Tensor, part: slice, tiles: Iterable[slice]) -> None:
        if self._d_weight_WR is None:
            self._d_weight_WR = torch.zeros_like(self._weight_WR, dtype=torch.promote_types(self._weight_WR.dtype, torch.float32))
        self._d_bias_MR[part] = project_back(g_CW, self._weight_WR)
        for tile in tiles:
            self._d_weight_WR[tile] += g_CW[:, tile].T @ self._bias_MR[part]

    def gradients(self) -> tuple[Tensor, Tensor]:
        weight = torch.zeros_like(self._weight_WR) if self._d_weight_WR is None else self._d_weight_WR.to(self._weight_WR.dtype)
        return self._d_bias_MR, weight


class _Distances(torch.autograd.Function):
    """The rows' part of the loss, and its terms [3, M]; the gradient is made with the value, and scaled in `backward`."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, bias_MR: Tensor | None, bias_weight_WR: Tensor | None, rows: _Rows) -> tuple[Tensor, ...]:
        bias = None if bias_MR is None or bias_weight_WR is None else _Bias(bias_MR, bias_weight_WR)
        terms_3M, d_hidden_MD = torch.empty_like(rows.shares_3M), torch.zeros_like(hidden_MD)
        for start in range(0, len(hidden_MD), rows.chunk_rows):
            part = slice(start, start + rows.chunk_rows)
            chunk = _Chunk(hidden_MD[part], bias, rows, part)
            terms_3M[:, part] = chunk.terms()
            if rows.has_gradient:
                d_hidden_MD[part] = chunk.backward()
            del chunk  # before the next one's buffers
        ctx.gradients = d_hidden_MD, *(bias.gradients() if bias else (None, None))
        ctx.mark_non_differentiable(terms_3M)
        return (rows.shares_3M * terms_3M).sum(), terms_3M

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: they are as large as the parameters
        return *(None if g is None else g.mul_(grad.to(g.dtype)) for g in gradients), None


class _Chunk:
    """Some rows of the loss: `terms`, and then `backward`, which uses up what the terms have left."""

    def __init__(self, hidden_CD: Tensor, bias: _Bias | None, rows: _Rows, part: slice) -> None:
        self._hidden_CD, self._bias = hidden_CD.to(product_dtype(hidden_CD.dtype)), bias
        self._head, self._part = rows.head, part
        self._target, self._label_C1, self._shares_3C1 = rows.target[part], rows.label_M[part, None], rows.shares_3M[:, part, None]
        self._u_CW = self._hidden_CD.new_empty(len(hidden_CD), len(rows.head.weight_WD))
        # Only a soft cap's slope needs u once r is there, only the gradient of soft CE needs t.
        self._r_CW = self._u_CW if rows.head.soft_cap is None else torch.empty_like(self._u_CW)
        self._t_CW = torch.empty_like(self._u_CW) if rows.has_gradient and rows.has_soft_ce else None

    def _tiles(self) -> Iterator[slice]:
        size = TILE_IDS[self._u_CW.device.type]
        return (slice(start, start + size) for start in range(0, self._u_CW.shape[1], size))

    def _logits(self, u_CN: Tensor, tile: slice) -> Tensor:
        """z of a tile; may take the place of u."""
        z_CN = soft_capped(u_CN, self._head.soft_cap)
        return z_CN.add_(self._bias.logits(self._part, tile)) if self._bias else z_CN

    def terms(self) -> Tensor:
        """CE, soft CE and L1 of the rows, [3, C]."""
        ce, soft_ce, l1, self._mass_C1, self._sum_r_C1 = torch.zeros_like(self._shares_3C1[0]).repeat(5, 1, 1)
        log_sum_C1 = torch.full_like(ce, -torch.inf)
        for tile in self._tiles():
            u_CN = project(self._hidden_CD, self._head.weight_WD[tile])
            self._u_CW[:, tile] = u_CN
            torch.logaddexp(log_sum_C1, self._logits(u_CN, tile).logsumexp(-1, keepdim=True), out=log_sum_C1)
        for tile in self._tiles():
            z_CN = self._logits(self._u_CW[:, tile].to(log_sum_C1.dtype, copy=True), tile).sub_(log_sum_C1)
            t_CN = target_probs(self._target, self._head, tile)
            index_C1 = self._label_C1 - tile.start
            is_here_C1 = (index_C1 >= 0) & (index_C1 < z_CN.shape[1])
            ce -= z_CN.gather(-1, index_C1.clamp(0, z_CN.shape[1] - 1)) * is_here_C1
            soft_ce -= torch.linalg.vecdot(t_CN, z_CN)[:, None]
            self._mass_C1 += t_CN.sum(-1, keepdim=True)
            if self._t_CW is not None:
                self._t_CW[:, tile] = t_CN
            p_CN, difference_CN = z_CN.exp_(), t_CN.sub_(z_CN)
            l1 += torch.linalg.vector_norm(difference_CN, 1, dim=-1, keepdim=True)
            r_CN = p_CN.copysign_(difference_CN)
            self._sum_r_C1 += r_CN.sum(-1, keepdim=True)
            self._r_CW[:, tile] = r_CN
        l1 += (1.0 - self._mass_C1).clamp_min(0.0)
        return torch.cat([ce, soft_ce, l1], -1).T

    def backward(self) -> Tensor:
        """The gradient of the rows' h [C, D]; those of the bias are left with it."""
        ce_C1, soft_ce_C1, tv_C1 = self._shares_3C1
        p_share_C1 = ce_C1 + soft_ce_C1 * self._mass_C1 + tv_C1 * self._sum_r_C1
        for tile in self._tiles():
            r_CN = self._r_CW[:, tile].to(p_share_C1.dtype)
            g_CN = r_CN.abs().mul_(p_share_C1).addcmul_(r_CN, tv_C1, value=-1.0)
            if self._t_CW is not None:
                g_CN.addcmul_(self._t_CW[:, tile].to(g_CN.dtype), soft_ce_C1, value=-1.0)
            self._r_CW[:, tile] = g_CN
        at_label = torch.arange(len(self._r_CW), device=self._r_CW.device), self._label_C1[:, 0]
        self._r_CW[at_label] -= ce_C1[:, 0].to(self._r_CW.dtype)  # (`scatter_add_` would copy the whole)
        if self._bias:
            self._bias.backward(self._r_CW, self._part, self._tiles())
        cap = self._head.soft_cap
        if cap is not None:
            for tile in self._tiles():
                self._r_CW[:, tile] *= 1.0 - (self._u_CW[:, tile] / cap).tanh_() ** 2
        return project_back(self._r_CW, self._head.weight_WD)


def target_probs(target: TargetRows, head: DraftHead, tile: slice) -> Tensor:
    """p_t over a tile of the draft vocabulary [C, N], with the full-vocabulary normaliser."""
    weight_ND = head.weight_WD[tile]
    if target.final_MD is not None:
        logits = project(target.final_MD.to(product_dtype(target.final_MD.dtype)), weight_ND)
        return soft_capped(logits, head.soft_cap).sub_(target.log_sum_exp_M[:, None]).exp_()
    assert target.top_ids_MC is not None
    assert target.top_logits_MC is not None
    # Ids outside the tile go to a place of their own, which is cut off.
    index, num_ids = head.index(target.top_ids_MC) - (tile.start or 0), len(weight_ND)
    probs = (target.top_logits_MC - target.log_sum_exp_M[:, None]).exp()
    whole = probs.new_zeros(len(index), num_ids + 1)
    return whole.scatter_(-1, index.where((index >= 0) & (index < num_ids), num_ids), probs)[:, :-1]
