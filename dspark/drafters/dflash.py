"""DFlash: a block-parallel drafter conditioned on the target's hidden states (Eq. 2-3). DSpark is this plus two heads.

A block at anchor position a is fed the anchor token's embedding, then mask embeddings, at positions from a on. In the
anchor-first layout (DeepSpec's) it has K rows, and row k predicts token a+1+k; in the 1+N layout (z-lab's,
`sample_from_anchor` false) it has K+1, of which the anchor's predicts nothing and the one at position a+k token a+k.
H_ctx = RMSNorm(W_c [tapped states]) feeds the keys and values of every layer, unchanged, so that when decoding the context
is projected once per token and only the block is recomputed.

The released checkpoints' parameter names are kept. Shapes: see drafters/base.py.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from dspark.config import DFlashConfig, DSparkConfig, TargetShape
from dspark.drafters.base import (
    BlockOutput,
    Choose,
    ContextRows,
    DraftContext,
    Drafter,
    DraftHead,
    FrozenTables,
    Proposal,
    TrainingBatch,
)
from dspark.drafters.heads import ConfidenceHead, MarkovHead
from dspark.layers import DrafterLayer, Linear, RMSNorm, Rotation, product


class DFlash(Drafter):
    """The backbone, and decoding with whatever heads a subclass adds to it."""

    MATRICES = ("fc.", "layers.")
    config: DFlashConfig | DSparkConfig
    markov_head: MarkovHead | None
    confidence_head: ConfidenceHead | None

    def make_parameters(self, shape: TargetShape, tables: FrozenTables) -> None:
        self.fc = Linear(len(self.tapped_layers) * shape.width, shape.width)
        self.hidden_norm = RMSNorm(shape.width, shape.norm_epsilon)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(self.config.num_layers))
        self.norm = RMSNorm(shape.width, shape.norm_epsilon)
        self.markov_head = self.confidence_head = None
        self.is_markov_ablated = False  # measurement only: drafts without the bias, confidences unchanged

    @property
    def head(self) -> DraftHead:
        has_bias = self.markov_head is not None and not self.is_markov_ablated
        bias_weight_WR = self.markov_head.markov_w2.weight if self.markov_head is not None and has_bias else None
        return DraftHead(self.lm_head_WD, bias_weight_WR, self.draft_ids_W, self.shape.logit_soft_cap)

    # --- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: TrainingBatch) -> BlockOutput:
        packed = batch.context
        context = [(packed.padded(k), packed.padded(v)) for k, v in self._context(packed.tapped_SLD, packed.positions_S)]
        hidden_BAKD = self._blocks(batch.previous_BAK[..., 0], batch.anchors_BA, context)
        step = self.markov_head.block(batch.previous_BAK, hidden_BAKD) if self.markov_head is not None else None
        return BlockOutput(hidden_BAKD, step.bias if step else None, self._confidence(hidden_BAKD, step.embedded if step else None))

    # --- decoding -----------------------------------------------------------------------------------------------------

    def new_context(self, num_slots: int, max_length: int) -> DraftContext:
        size = (num_slots, max_length, self.shape.num_kv_heads, self.shape.head_width)
        blank = [self.lm_head_WD.new_zeros(size) for _ in range(2 * len(self.layers))]
        return DraftContext(blank[::2], blank[1::2])

    @torch.no_grad()
    def extend_context(self, context: DraftContext, rows: ContextRows) -> None:
        place = rows.step.slot_S, rows.step.positions_S
        for i, (keys, values) in enumerate(self._context(rows.tapped_SLD.to(self.dtype), rows.step.positions_S)):
            context.keys[i][place], context.values[i][place] = keys, values

    @torch.no_grad()
    def propose(self, context: DraftContext, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, choose: Choose) -> Proposal:
        """One parallel pass, then the sequential head token by token."""
        B, S = len(anchor_tokens_B), int(anchor_positions_B.max())
        known = [(k[:B, :S], v[:B, :S]) for k, v in zip(context.keys, context.values, strict=True)]
        hidden_BKD = self._blocks(anchor_tokens_B[:, None], anchor_positions_B[:, None], known)[:, 0]
        head, previous_B, step, tokens, embedded = self.head, anchor_tokens_B, None, [], []
        base_BKW = head.logits(hidden_BKD)
        for k in range(self.config.block_size):
            logits_BW = base_BKW[:, k]
            if self.markov_head is not None:
                step = self.markov_head.step(previous_B, hidden_BKD[:, k], step.state if step else None)
                embedded.append(step.embedded)
                logits_BW = logits_BW if head.bias_weight_WR is None else logits_BW + product(step.bias, head.bias_weight_WR)
            previous_B = self.draft_ids_W[choose(k, logits_BW)]
            tokens.append(previous_B)
        confidence_BK = self._confidence(hidden_BKD, torch.stack(embedded, dim=1) if embedded else None)
        return Proposal(torch.stack(tokens, dim=1), confidence_BK)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation.at(positions, self.shape.rope, self.dtype)

    def _context(self, tapped: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [..., G, H] of H_ctx for each layer, from states [..., L, D]."""
        hidden = self.hidden_norm(self.fc(tapped.flatten(-2)))
        rotation = self._rotation(positions)
        return [layer.self_attn.keys_values(hidden, rotation) for layer in cast(Iterable[DrafterLayer], self.layers)]

    def _visible(self, num_context: int, anchors_BA: Tensor) -> list[Tensor]:
        """Of each layer, what a row sees of the context: all before the anchor, [B, A, 1, T], or what of it the window before
        the row's own position reaches, [B, A, K, T]."""
        position_T = torch.arange(num_context, device=anchors_BA.device)
        whole = position_T < anchors_BA[..., None, None]
        window = self.config.sliding_window
        if window is None:
            return [whole] * len(self.layers)
        near = whole & (position_T > self._row_positions(anchors_BA)[..., None] - window)
        return [near if i in self.config.sliding_layers else whole for i in range(len(self.layers))]

    def _blocks(self, anchor_tokens_BA: Tensor, anchors_BA: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The backbone's output after its final norm, [B, A, K, D], from each layer's keys and values [B, T, G, H]."""
        positions_BAK = self._row_positions(anchors_BA)
        token_BAK = torch.full_like(positions_BAK, self.mask_token_id)
        token_BAK[..., 0] = anchor_tokens_BA
        x_BAKD, rotation = self.embed(token_BAK), self._rotation(positions_BAK)
        visible = self._visible(context[0][0].shape[1], anchors_BA)
        for layer, keys_values, visible_BAKT in zip(self.layers, context, visible, strict=True):
            x_BAKD = layer(x_BAKD, rotation, keys_values, visible_BAKT)
        return self.norm(x_BAKD[..., -self.config.block_size :, :])

    def _row_positions(self, anchors_BA: Tensor) -> Tensor:
        """[B, A, K], or K+1 with a row that the anchor has for itself."""
        num_rows = self.config.block_size + (not self.config.sample_from_anchor)
        return anchors_BA[..., None] + torch.arange(num_rows, device=anchors_BA.device)

    def _confidence(self, hidden: Tensor, embedded: Tensor | None) -> Tensor | None:
        return None if self.confidence_head is None else self.confidence_head(hidden, embedded)
