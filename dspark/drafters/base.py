"""What every drafter is: its records and the interface that training and decoding use.

Shapes: B sequences or requests, T context tokens, L tapped layers, D width, A anchors, K block positions, G key/value
heads, H head width, V target vocabulary, W draft vocabulary (W = V unless it is reduced), C best logits kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig, TargetShape
from dspark.layers import soft_capped


@dataclass(frozen=True)
class FrozenTables:
    """What a drafter shares with its target and never trains."""

    embedding_VD: Tensor
    lm_head_VD: Tensor


@dataclass
class TargetRows:
    """The target's distribution at M rows: from its states after the final norm, or from its C best logits."""

    log_sum_exp_M: Tensor
    final_MD: Tensor | None
    top_ids_MC: Tensor | None
    top_logits_MC: Tensor | None

    def __getitem__(self, rows: slice) -> "TargetRows":
        final, ids, logits = (None if x is None else x[rows] for x in (self.final_MD, self.top_ids_MC, self.top_logits_MC))
        return TargetRows(self.log_sum_exp_M[rows], final, ids, logits)


@dataclass
class TrainingBatch:
    """Blocks of B sequences, padded to the longest context and the most anchors."""

    tapped_BTLD: Tensor
    anchors_BA: Tensor  # position of each anchor; 0 on padding, where no row is valid
    previous_BAK: Tensor  # ground-truth x_{k-1}, the anchor token for row 0 (teacher forcing); 0 on rows that do not count
    label_BAK: Tensor  # target ids; -1 on rows that do not count
    valid_BAK: Tensor  # bool
    log_sum_exp_BAK: Tensor  # of the target's logits over its whole vocabulary, fp32
    # What predicts the label: the target's state after its final norm, or its C best logits (-inf on padding) with their ids.
    final_BAKD: Tensor | None
    top_ids_BAKC: Tensor | None = None
    top_logits_BAKC: Tensor | None = None

    def target_rows(self) -> TargetRows:
        """The target at the rows that count, in order."""
        valid = self.valid_BAK
        final, ids, logits = (None if x is None else x[valid] for x in (self.final_BAKD, self.top_ids_BAKC, self.top_logits_BAKC))
        return TargetRows(self.log_sum_exp_BAK[valid], final, ids, logits)

    def to(self, device: torch.device, dtype: torch.dtype) -> "TrainingBatch":
        """Moves everything to a device, hidden states to the compute dtype."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return TrainingBatch(
            self.tapped_BTLD.to(device, dtype),
            self.anchors_BA.to(device),
            self.previous_BAK.to(device),
            self.label_BAK.to(device),
            self.valid_BAK.to(device),
            self.log_sum_exp_BAK.to(device, wide),
            None if self.final_BAKD is None else self.final_BAKD.to(device, dtype),
            None if self.top_ids_BAKC is None else self.top_ids_BAKC.to(device),
            None if self.top_logits_BAKC is None else self.top_logits_BAKC.to(device, wide),
        )


@dataclass
class BlockOutput:
    """Teacher-forced predictions of every block row, before any projection onto the vocabulary (`DraftHead.logits`)."""

    hidden_BAKD: Tensor  # h_k, the backbone's output after its final norm
    bias_BAKR: Tensor | None  # what W_2 turns into B_k; None without a sequential head
    confidence_logits_BAK: Tensor | None


@dataclass(frozen=True)
class DraftHead:
    """From a row to its logits over the draft vocabulary: U_k + B_k (Eq. 4).

    U_k is the target's LM head, frozen, on h_k, soft-capped like the target's logits; B_k is W_2, trained, on what the
    sequential head computed.
    """

    weight_WD: Tensor
    bias_weight_WR: Tensor | None
    ids_W: Tensor  # ascending target ids of the draft vocabulary
    soft_cap: float | None

    def logits(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., D] and [..., R] -> [..., W], at least fp32."""
        logits = nn.functional.linear(hidden, self.weight_WD)
        logits = soft_capped(logits if logits.dtype == torch.float64 else logits.float(), self.soft_cap)
        if bias is None or self.bias_weight_WR is None:
            return logits
        return logits + nn.functional.linear(bias, self.bias_weight_WR)

    def index(self, token_ids: Tensor) -> Tensor:
        """Target ids as indices of the draft vocabulary, -1 where they are outside or below 0."""
        index = torch.searchsorted(self.ids_W, token_ids.clamp_min(0)).clamp_max(len(self.ids_W) - 1)
        return index.where(self.ids_W[index] == token_ids, -1)


@dataclass(frozen=True)
class DraftSampling:
    """`probabilistic`: x_k ~ p_d at this temperature. `greedy`: x_k = argmax, p_d is a point mass."""

    mode: Literal["probabilistic", "greedy"]
    temperature: float


# Position k and its draft distribution p_d [B, W] -> the drafted tokens as draft-vocabulary indices [B].
Choose = Callable[[int, Tensor], Tensor]


@dataclass
class Proposal:
    """A drafted block. `probs_BKW` is the very tensor that the tokens were chosen from."""

    tokens_BK: Tensor  # target ids
    probs_BKW: Tensor
    confidence_logits_BK: Tensor | None


class DraftContext:
    """A drafter's keys and values of the target's context, cached per token: [B, S, G, H] for each layer.

    Writing at explicit positions makes a roll-back unnecessary: entries at or beyond the anchor are never visible, and the
    next round overwrites them.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys, self.values = keys, values

    def select(self, rows: Tensor) -> None:
        """Keeps these requests, in this order."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]


class Drafter(Protocol):
    """A trainable module whose state dict holds nothing of the target."""

    config: DrafterConfig
    shape: TargetShape
    tapped_layers: tuple[int, ...]
    mask_token_id: int

    @property
    def head(self) -> DraftHead: ...

    def __call__(self, batch: TrainingBatch) -> BlockOutput: ...
    def parameters(self) -> "nn.ParameterList": ...

    def new_context(self, num_requests: int, max_length: int) -> DraftContext: ...

    def extend_context(self, context: DraftContext, tapped_BTLD: Tensor, positions_BT: Tensor) -> None:
        """Adds the context of verified tokens at their positions."""
        ...

    def propose(
        self, context: DraftContext, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, sampling: DraftSampling, choose: Choose
    ) -> Proposal: ...
