"""EAGLE-3: one layer on [embedding ; state], whose first state is a projection of the tapped layers.

As DeepSpec's baseline: attention is fed [norm(embedding) ; norm(state)] of width 2D, the residual is the un-normed state, the
state that goes on is the layer's output before the final norm; embedding and LM head are the target's. Tensor names are
those of vLLM's EAGLE-3 classes. Shapes: see drafters/base.py.
"""

import torch
from torch import Tensor, nn

from dspark.config import Eagle3Config, TargetShape
from dspark.drafters.base import FrozenTables
from dspark.drafters.recurrent import Recurrent, RecurrentLayer
from dspark.layers import Linear, RMSNorm


class Eagle3Layer(RecurrentLayer):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__(shape, 2 * shape.width)
        self.input_layernorm = RMSNorm(shape.width, shape.norm_epsilon)
        self.hidden_norm = RMSNorm(shape.width, shape.norm_epsilon)


class Eagle3(Recurrent):
    MATRICES = ("fc.", "layers.")
    config: Eagle3Config

    def make_parameters(self, shape: TargetShape, tables: FrozenTables) -> None:
        super().make_parameters(shape, tables)
        self.fc = Linear(len(self.tapped_layers) * shape.width, shape.width)
        self.layers = nn.ModuleList([Eagle3Layer(shape)])

    @property
    def layer(self) -> Eagle3Layer:  # type: ignore[override]
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def first_state(self, tapped: Tensor) -> Tensor:
        return self.fc(tapped.flatten(-2))

    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], dim=-1), state
