"""The confidence head once more, on texts that are new to the drafter.

A drafter that goes over few prompts many times drafts the texts that it knows better than new ones, and its confidence head, trained on
the same rows, expects so much of every text. Temperatures cannot mend that: they only pull towards one half. So after training the
head's one linear layer is fitted again on the select rows, all else kept: a logistic regression of the acceptance probability c*_k
(Eq. 8) on the features [h_k ; W_1[x_{k-1}]], with a ridge on the standardised weights, by Newton's method.

Departs from the paper, which trains on 1.3 million prompts and has no need of it. Shapes: M rows, F features; see drafters/base.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.base import TrainingBatch
from dspark.drafters.dflash import DFlash
from dspark.losses import target_probs

RIDGE = 0.003  # times the number of rows
NUM_NEWTON_STEPS = 12
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Refit:
    """Mean binary cross-entropy of the select rows: of the head as it was trained, and of heads fitted on the other half of them."""

    num_rows: int
    bce_before: float
    bce_after: float

    @property
    def is_better(self) -> bool:
        return self.bce_after < self.bce_before


@torch.no_grad()
def refit_confidence(drafter: DFlash, batches: Iterable[TrainingBatch]) -> Refit:
    """Fits the confidence head, in place; it stays as it was where the fit is no better. ValueError with fewer than 4 rows that count."""
    head = drafter.confidence_head
    assert head is not None
    parts = [_rows(drafter, batch) for batch in batches]
    feature_MF, accept_M = (torch.cat(columns) for columns in zip(*parts, strict=True))
    if len(accept_M) < 4:
        raise ValueError(
            f"stage.train.refit_confidence: {len(accept_M)} rows of the select split count, 4 are the least. "
            "Fix: more prompts in that split (stage.prompts.limits.select), or stage.train.refit_confidence=false"
        )
    accept_M = accept_M.double()
    before = _bce(_logits(feature_MF, head.proj.weight[0].double(), float(head.proj.bias)), accept_M)
    half = len(accept_M) // 2
    halves = slice(None, half), slice(half, None)
    crossed = [_logits(feature_MF[other], *fit_logistic(feature_MF[part], accept_M[part])) for other, part in (halves, halves[::-1])]
    found = Refit(len(accept_M), before, _bce(torch.cat(crossed), accept_M))
    if found.is_better:
        weight_F, bias = fit_logistic(feature_MF, accept_M)
        head.proj.weight.copy_(weight_F[None])
        head.proj.bias.fill_(bias)
    return found


def fit_logistic(feature_MF: Tensor, label_M: Tensor) -> tuple[Tensor, float]:
    """Weights [F] and bias of the logistic regression of labels in 0 .. 1, fp64; a few rows at a time are fp64, too."""
    mean_F = feature_MF.mean(0, dtype=torch.float64)
    variance_F = sum(((part.double() - mean_F).square().sum(0) for part in feature_MF.split(CHUNK_ROWS)), torch.zeros_like(mean_F))
    std_F = (variance_F / len(feature_MF)).sqrt().clamp_min(1e-6)
    ridge_F = torch.full((len(std_F) + 1,), RIDGE * len(label_M), dtype=torch.float64, device=std_F.device)
    ridge_F[-1] = 0.0
    weight_F = torch.zeros_like(ridge_F)
    for _ in range(NUM_NEWTON_STEPS):
        gradient_F, curvature_FF = ridge_F * weight_F, ridge_F.diag()
        for part_CF, label_C in zip(feature_MF.split(CHUNK_ROWS), label_M.split(CHUNK_ROWS), strict=True):
            x_CF = torch.cat([(part_CF.double() - mean_F) / std_F, torch.ones_like(label_C)[:, None]], dim=1)
            p_C = (x_CF @ weight_F).sigmoid()
            gradient_F = gradient_F + x_CF.T @ (p_C - label_C)
            curvature_FF = curvature_FF + (x_CF * (p_C * (1.0 - p_C)).clamp_min(1e-6)[:, None]).T @ x_CF
        weight_F = weight_F - torch.linalg.solve(curvature_FF, gradient_F)
    weight_F, bias = weight_F[:-1] / std_F, weight_F[-1]
    return weight_F, float(bias - mean_F @ weight_F)


def _rows(drafter: DFlash, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Features [M, F] and c* [M] of the rows that count, teacher-forced."""
    assert drafter.confidence_head is not None
    found: list[Tensor] = []
    hook = drafter.confidence_head.register_forward_pre_hook(lambda head, inputs: found.append(head.features(*inputs)))
    output, draft, valid = drafter(batch), drafter.head, batch.valid_BAK
    hook.remove()
    hidden_MD, target = output.hidden_BAKD[valid], batch.target_rows()
    bias_MR = None if output.bias_BAKR is None else output.bias_BAKR[valid]
    accept = []
    for start in range(0, len(hidden_MD), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        probs_CW = draft.logits(hidden_MD[part], None if bias_MR is None else bias_MR[part]).softmax(-1)
        accept.append(torch.minimum(probs_CW, target_probs(target[part], draft, slice(None))).sum(-1))
    return found[0][valid], torch.cat(accept) if accept else hidden_MD.new_zeros(0)


def _logits(feature_MF: Tensor, weight_F: Tensor, bias: float) -> Tensor:
    return torch.cat([part.double() @ weight_F + bias for part in feature_MF.split(CHUNK_ROWS)])


def _bce(logit_M: Tensor, label_M: Tensor) -> float:
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logit_M, label_M))
