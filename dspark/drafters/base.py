"""What every drafter is: its records and the interface that training and decoding use.

Shapes: B sequences or requests, T context tokens, S context tokens of all sequences together (of a DraftContext: the length
there is room for), L tapped layers, D width, A anchors, K block positions, G key/value heads, H head width, V target
vocabulary, W draft vocabulary (W = V unless it is reduced), C best logits kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig, TargetShape
from dspark.layers import product, soft_capped
from dspark.step import Step

INIT_STD = 0.02


@dataclass(frozen=True)
class FrozenTables:
    """What a drafter shares with its target and never trains."""

    embedding_VD: Tensor
    lm_head_VD: Tensor
    norm_D: Tensor  # weight of the final norm


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
class PackedContext:
    """What the blocks of B sequences may see: one sequence after the other, without padding. What is computed token by token
    (states, keys, values) is computed on these S tokens; a position counts from the start of its own sequence."""

    tapped_SLD: Tensor
    next_tokens_S: Tensor  # the token after each
    positions_S: Tensor
    places_S: Tensor  # its sequence * T + its position
    size: tuple[int, int]  # B, and T tokens of the longest, at least 1

    @staticmethod
    def of(tapped_SLD: Tensor, next_tokens_S: Tensor, lengths_B: Sequence[int]) -> "PackedContext":
        longest = max(1, *lengths_B)
        positions = [torch.arange(length) for length in lengths_B]
        places = [b * longest + position for b, position in enumerate(positions)]
        return PackedContext(tapped_SLD, next_tokens_S, torch.cat(positions), torch.cat(places), (len(lengths_B), longest))

    def padded(self, x_S: Tensor) -> Tensor:
        """[S, ...] -> [B, T, ...], zeros beyond the end of a sequence."""
        rest = x_S.shape[1:]
        return x_S.new_zeros(math.prod(self.size), *rest).index_copy(0, self.places_S, x_S).view(*self.size, *rest)

    def to(self, device: torch.device, dtype: torch.dtype) -> "PackedContext":
        next_tokens, positions, places = (x.to(device) for x in (self.next_tokens_S, self.positions_S, self.places_S))
        return PackedContext(self.tapped_SLD.to(device, dtype), next_tokens, positions, places, self.size)


@dataclass
class TrainingBatch:
    """Blocks of B sequences, padded to the most anchors."""

    context: PackedContext
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
            self.context.to(device, dtype),
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
        logits = product(hidden, self.weight_WD)
        logits = soft_capped(logits if logits.dtype == torch.float64 else logits.float(), self.soft_cap)
        if bias is None or self.bias_weight_WR is None:
            return logits
        return logits + product(bias, self.bias_weight_WR)

    def index(self, token_ids: Tensor) -> Tensor:
        """Target ids as indices of the draft vocabulary, -1 where they are outside or below 0."""
        index = torch.searchsorted(self.ids_W, token_ids.clamp_min(0)).clamp_max(len(self.ids_W) - 1)
        return index.where(self.ids_W[index] == token_ids, -1)


# Position k and the draft's logits there [B, W] -> the drafted tokens as draft-vocabulary indices [B].
Choose = Callable[[int, Tensor], Tensor]


@dataclass
class Proposal:
    """Drafted blocks. `lengths_B`: of those drafters that do not always have K tokens to propose."""

    tokens_BK: Tensor  # target ids
    confidence_logits_BK: Tensor | None = None
    lengths_B: Tensor | None = None


class DraftContext:
    """What a drafter keeps of the target's context, a tensor [slots, P, ...] each: keys and values of every layer, and, for drafters
    that go on from a row of the context, its state.

    Writing at explicit positions makes a roll-back unnecessary: entries at or beyond the anchor are never visible, and the
    next round overwrites them.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], hidden_BSD: Tensor | None = None) -> None:
        self.keys, self.values, self.hidden_BSD = keys, values, hidden_BSD

    def rows(self, rows: Tensor) -> "DraftContext":
        """A copy of these slots, in this order."""
        hidden = None if self.hidden_BSD is None else self.hidden_BSD[rows]
        return DraftContext([k[rows] for k in self.keys], [v[rows] for v in self.values], hidden)

    def move(self, source: int, target: int, length: int) -> None:
        """Puts what a slot holds of its first positions in another's place."""
        for tensor in (*self.keys, *self.values, *(() if self.hidden_BSD is None else (self.hidden_BSD,))):
            tensor[target, :length] = tensor[source, :length]


@dataclass
class ContextRows:
    """Tokens that become context, and the target's states of them. `next_tokens_S`: the token after each, of the last verified one
    the new anchor. Tokens that were rejected lie at or beyond the anchor, where nobody looks."""

    step: Step
    tapped_SLD: Tensor
    next_tokens_S: Tensor


class BlockDrafter(Protocol):
    """What decoding asks of a drafter. B requests are the first B slots of the context."""

    @property
    def block_size(self) -> int: ...

    @property
    def draft_ids_W(self) -> Tensor:
        """Ascending target ids of the draft vocabulary."""
        ...

    def new_context(self, num_slots: int, max_length: int) -> Any: ...

    def extend_context(self, context: Any, rows: ContextRows) -> None:
        """Adds the context of verified tokens at their positions."""
        ...

    def propose(self, context: Any, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, choose: Choose) -> Proposal:
        """Drafts a block after each anchor, token by token as `choose` draws them."""
        ...


class Drafter(nn.Module):
    """A trainable module whose state dict holds nothing of the target.

    Embedding and LM head are the target's: frozen, shared, buffers that are not stored. A subclass defines the network:
    `forward` for training, and for decoding `new_context`, `extend_context` and `propose`.
    """

    MATRICES: tuple[str, ...]  # name prefixes of the matrices from hidden states to hidden states
    embedding_VD: Tensor
    lm_head_WD: Tensor
    draft_ids_W: Tensor

    def __init__(
        self,
        config: DrafterConfig,
        shape: TargetShape,
        tapped_layers: tuple[int, ...],
        mask_token_id: int,
        tables: FrozenTables,
        draft_ids: Tensor | None,
    ) -> None:
        """draft_ids: ascending target ids of the draft vocabulary, None for the whole vocabulary."""
        super().__init__()
        self.config, self.shape, self.tapped_layers, self.mask_token_id = config, shape, tapped_layers, mask_token_id
        draft_ids = torch.arange(shape.vocab_size) if draft_ids is None else draft_ids
        self.register_buffer("draft_ids_W", draft_ids, persistent=False)
        self.register_buffer("embedding_VD", tables.embedding_VD, persistent=False)
        is_whole = len(draft_ids) == shape.vocab_size
        self.register_buffer("lm_head_WD", tables.lm_head_VD if is_whole else tables.lm_head_VD[draft_ids], persistent=False)
        self.make_parameters(shape, tables)

    def make_parameters(self, shape: TargetShape, tables: FrozenTables) -> None:
        raise NotImplementedError

    @property
    def head(self) -> DraftHead:
        return DraftHead(self.lm_head_WD, None, self.draft_ids_W, self.shape.logit_soft_cap)

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head_WD.dtype

    def initialise(self, seed: int) -> None:
        """Normal(0, 0.02) matrices, zero biases, unit norms; the same for every world size."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, INIT_STD, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()

    def hidden_matrices(self) -> set[str]:
        """Names of the matrices from hidden states to hidden states: what Muon may orthogonalise. Heads and norms are not."""
        return {name for name, p in self.named_parameters() if p.dim() == 2 and name.startswith(self.MATRICES)}

    def embed(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.embedding_VD) * self.shape.embedding_scale

    def forward(self, batch: TrainingBatch) -> BlockOutput:
        """Teacher-forced predictions of every block row."""
        raise NotImplementedError

    def new_context(self, num_slots: int, max_length: int) -> DraftContext:
        raise NotImplementedError

    def extend_context(self, context: DraftContext, rows: ContextRows) -> None:
        raise NotImplementedError

    def propose(self, context: DraftContext, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, choose: Choose) -> Proposal:
        raise NotImplementedError
