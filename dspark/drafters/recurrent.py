"""Drafters that go on token by token from a row of the context: EAGLE-3 (training-time test) and MTP.

Row i of the context is fed a state of the target after token i and the embedding of token i+1; one layer, causal over the
rows, predicts token i+2. A block hangs on the anchor a = i+1: its first row *is* the last row of its context, which has seen
the anchor token, and each further row is fed what the one before put out, and the token that it predicted. So a block of K
rows predicts the same labels a+1..a+K as a block of DSpark on that anchor, and all drafters train on one batch and one loss.

    step s of a block      embedding of token a+s, position a-1+s; state: of the target at a-1 (s = 0), else its own output
    attends to             the rows of the context before a, and its own rows of steps 1..s

In training the tokens are the true ones but the states are the drafter's own: what EAGLE-3 calls training-time test.
Shapes: see drafters/base.py.
"""

import torch
from torch import Tensor, nn

from dspark.config import Eagle3Config, MtpConfig, TargetShape
from dspark.drafters.base import (
    BlockOutput,
    Choose,
    ContextRows,
    DraftContext,
    Drafter,
    FrozenTables,
    Proposal,
    TrainingBatch,
)
from dspark.layers import MLP, BlockAttention, RMSNorm, Rotation, attend


class RecurrentLayer(nn.Module):
    """The one layer. `input_width`: what attention is fed, which need not be the width of the residual stream."""

    def __init__(self, shape: TargetShape, input_width: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape, input_width)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.mlp = MLP(shape.width, shape.mlp_width)

    def forward(
        self, x_BAD: Tensor, residual_BAD: Tensor, rotation: Rotation, own: list[tuple[Tensor, Tensor]], context: tuple[Tensor, Tensor], visible_BAKT: Tensor
    ) -> Tensor:  # fmt: skip
        """One step of every block; `own`: keys and values [B, A, G, H] of its earlier steps and of this one."""
        attention = self.self_attn
        query = attention.queries(x_BAD[:, :, None], rotation)
        size = (*x_BAD.shape[:2], 0, attention.num_kv_heads, attention.head_width)
        keys, values = (
            (torch.stack(part, dim=2) for part in zip(*own, strict=True)) if own else (query.new_empty(size), query.new_empty(size))
        )
        y_BAD = residual_BAD + attention.o_proj(attend(query, keys, values, *context, visible_BAKT))[:, :, 0]
        return y_BAD + self.mlp(self.post_attention_layernorm(y_BAD))


class Recurrent(Drafter):
    """Everything but what a row is fed: `first_state` and `enter` of a subclass, and its `layer`."""

    layer: RecurrentLayer
    config: Eagle3Config | MtpConfig

    def make_parameters(self, shape: TargetShape, tables: FrozenTables) -> None:
        self.norm = RMSNorm(shape.width, shape.norm_epsilon)

    def first_state(self, tapped: Tensor) -> Tensor:
        """What rows of the context are fed besides a token, [..., D], from states [..., L, D]."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What attention is fed, and the residual, of rows [...] with these embeddings and states [..., D]."""
        raise NotImplementedError

    def forward(self, batch: TrainingBatch) -> BlockOutput:
        packed = batch.context
        state_SD = self.first_state(packed.tapped_SLD)
        keys_SGH, values_SGH = self._context(state_SD, packed.next_tokens_S, packed.positions_S)
        block = _Block(self, (packed.padded(keys_SGH), packed.padded(values_SGH)), packed.padded(state_SD), batch.anchors_BA)
        rows = [block.step(batch.previous_BAK[..., k]) for k in range(self.config.block_size)]
        return BlockOutput(torch.stack(rows, dim=2), None, None)

    def new_context(self, num_slots: int, max_length: int) -> DraftContext:
        size, new = (num_slots, max_length), self.lm_head_WD.new_zeros
        heads = (self.shape.num_kv_heads, self.shape.head_width)
        return DraftContext([new(*size, *heads)], [new(*size, *heads)], new(*size, self.shape.width))

    @torch.no_grad()
    def extend_context(self, context: DraftContext, rows: ContextRows) -> None:
        place, positions_S = (rows.step.slot_S, rows.step.positions_S), rows.step.positions_S
        state_SD = self.first_state(rows.tapped_SLD.to(self.dtype))
        assert context.hidden_BSD is not None
        context.hidden_BSD[place] = state_SD
        context.keys[0][place], context.values[0][place] = self._context(state_SD, rows.next_tokens_S, positions_S)

    @torch.no_grad()
    def propose(self, context: DraftContext, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, choose: Choose) -> Proposal:
        B, S = len(anchor_tokens_B), int(anchor_positions_B.max())
        assert context.hidden_BSD is not None
        window = context.keys[0][:B, :S], context.values[0][:B, :S]
        block = _Block(self, window, context.hidden_BSD[:B, :S], anchor_positions_B[:, None])
        head, previous_B, tokens = self.head, anchor_tokens_B, []
        for k in range(self.config.block_size):
            previous_B = self.draft_ids_W[choose(k, head.logits(block.step(previous_B[:, None])[:, 0]))]
            tokens.append(previous_B)
        return Proposal(torch.stack(tokens, dim=1))

    def rotation(self, positions: Tensor) -> Rotation:
        return Rotation.at(positions, self.shape.rope, self.dtype)

    def _context(self, state: Tensor, next_tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., G, H] of the context's rows."""
        x, _ = self.enter(self.embed(next_tokens), state, positions)
        return self.layer.self_attn.keys_values(x, self.rotation(positions))


class _Block:
    """Blocks [B, A] in the middle of being drafted."""

    def __init__(self, drafter: Recurrent, context: tuple[Tensor, Tensor], state_BTD: Tensor, anchors_BA: Tensor) -> None:
        self._drafter, self._context, self._own = drafter, context, list[tuple[Tensor, Tensor]]()
        self._row_BA = (anchors_BA - 1).clamp_min(0)  # the anchor of padding is 0: its rows do not count, but must be finite
        positions_T = torch.arange(state_BTD.shape[1], device=anchors_BA.device)
        self._visible_BAKT = positions_T <= self._row_BA[..., None, None]
        self._state_BAD = state_BTD.gather(1, self._row_BA[..., None].expand(-1, -1, state_BTD.shape[-1]))
        self._num_steps = 0

    def step(self, token_BA: Tensor) -> Tensor:
        """Feeds the next token of every block; returns h_k after the final norm, [B, A, D]."""
        drafter, positions_BA = self._drafter, self._row_BA + self._num_steps
        rotation = drafter.rotation(positions_BA[..., None])
        x_BAD, residual_BAD = drafter.enter(drafter.embed(token_BA), self._state_BAD, positions_BA)
        if self._num_steps:  # the first row's keys and values are the context's
            keys, values = drafter.layer.self_attn.keys_values(x_BAD[:, :, None], rotation)
            self._own.append((keys[:, :, 0], values[:, :, 0]))
        self._state_BAD = drafter.layer(x_BAD, residual_BAD, rotation, self._own, self._context, self._visible_BAKT)
        self._num_steps += 1
        return drafter.norm(self._state_BAD)
