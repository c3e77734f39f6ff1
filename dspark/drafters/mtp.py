"""MTP: one transformer block on W [norm(embedding of token i+1) ; norm(final state after token i)], which predicts token i+2.

The static baseline of one draft token (MTP-1); tensor names are those of DeepSeek's MTP module. The final state is the
target's last layer's output, which must be the one tapped layer, after the target's own final norm. As in vLLM the embedding
at position 0 is zero. Shapes: see drafters/base.py.
"""

import torch
from torch import Tensor

from dspark.config import MtpConfig, TargetShape
from dspark.drafters.base import FrozenTables
from dspark.drafters.recurrent import Recurrent, RecurrentLayer
from dspark.layers import Linear, RMSNorm, rms_norm


class Mtp(Recurrent):
    MATRICES = ("eh_proj.", "mtp_block.")
    config: MtpConfig
    target_norm_D: Tensor

    def make_parameters(self, shape: TargetShape, tables: FrozenTables) -> None:
        super().make_parameters(shape, tables)
        self.register_buffer("target_norm_D", tables.norm_D, persistent=False)
        self.enorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.hnorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.eh_proj = Linear(2 * shape.width, shape.width)
        self.input_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.mtp_block = RecurrentLayer(shape, shape.width)

    @property
    def layer(self) -> RecurrentLayer:  # type: ignore[override]
        return self.mtp_block

    def first_state(self, tapped: Tensor) -> Tensor:
        return rms_norm(tapped[..., -1, :], self.target_norm_D, self.shape.norm_epsilon, self.shape.norm_weight_offset)

    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = embedded * (positions > 0)[..., None]
        residual = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], dim=-1))
        return self.input_layernorm(residual), residual
