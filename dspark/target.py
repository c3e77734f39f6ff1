"""The frozen target: hidden states and next-token logits, with a key/value cache that needs no roll-back.

`TransformersTarget` runs any causal language model of a known family with transformers, padding every request of a step to the
longest; `packed_target.PackedTarget` runs some families without. The cache writes at explicit positions and the mask is `key
position <= query position`: after a rejection the stale entries are simply invisible until the next round overwrites them, so
requests of one batch may verify and accept different numbers of tokens.

Shapes: R requests, S new tokens of all of them, T of the longest, P cached positions, L tapped layers, D width, V vocabulary,
G key/value heads, H width.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dspark.config import TargetShape
from dspark.drafters.base import FrozenTables
from dspark.families import target_shape
from dspark.layers import TILE_ROWS, rms_norm, soft_capped
from dspark.step import Step

EXP_SAFE = 64.0  # exp of twice as much, either way, leaves fp32


@dataclass
class TargetStates:
    """States of the S new tokens of a step. `final_SD` is what the LM head consumes (after the final norm)."""

    tapped_SLD: Tensor
    final_SD: Tensor


class TargetModel:
    """A target in this process."""

    device: torch.device
    shape: TargetShape

    def forward(self, step: Step, cache: "KeyValueCache") -> TargetStates:
        """Adds the step's tokens to the cache."""
        raise NotImplementedError

    def logits(self, final: Tensor) -> Tensor:
        """[..., D] -> next-token logits [..., V], at least fp32."""
        raise NotImplementedError

    def states(self, token_ids: Sequence[int]) -> TargetStates:
        """States of one whole sequence."""
        return self.forward(Step.of([token_ids], [0], [0], self.device), KeyValueCache(1, len(token_ids)))


@dataclass(frozen=True)
class TargetHead:
    """Everything a drafter or a capture needs of the target besides running it; read from its safetensors alone."""

    shape: TargetShape
    tables: FrozenTables

    @property
    def dtype(self) -> torch.dtype:
        return self.tables.norm_D.dtype

    @property
    def device(self) -> torch.device:
        return self.tables.norm_D.device

    def to(self, device: torch.device) -> "TargetHead":
        """With what makes logits and final states on this device; the embedding stays where it is."""
        tables = replace(self.tables, lm_head_VD=self.tables.lm_head_VD.to(device), norm_D=self.tables.norm_D.to(device))
        return replace(self, tables=tables)

    def normalise(self, hidden: Tensor) -> Tensor:
        """The target's final norm, for engines that return the state before it."""
        return rms_norm(hidden, self.tables.norm_D, self.shape.norm_epsilon, self.shape.norm_weight_offset)

    def logits(self, final: Tensor) -> Tensor:
        return self._logits_of(final, self.tables.lm_head_VD)

    def log_sum_exp(self, final_MD: Tensor) -> Tensor:
        """Of the logits of M states, [M]; a tile of the vocabulary at a time stays in the processor's cache.

        exp is taken of the logits as they are, which saves two passes over them. Where the result comes near fp32's range, as no
        trained model's does, it is done again with the largest taken off first.
        """
        sums = (self._logits_of(final_MD, tile_VD).exp_().sum(-1) for tile_VD in self.tables.lm_head_VD.split(TILE_ROWS))
        total = torch.stack(list(sums)).sum(0).log()
        return total if bool((total.abs() < EXP_SAFE).all()) else self.logits(final_MD).logsumexp(-1)

    def _logits_of(self, final: Tensor, table_VD: Tensor) -> Tensor:
        return shaped_logits(torch.nn.functional.linear(final, table_VD), self.shape)


def shaped_logits(product: Tensor, shape: TargetShape) -> Tensor:
    """Of states times the LM head: at least fp32, and soft-capped."""
    return soft_capped(product if product.dtype == torch.float64 else product.float(), shape.logit_soft_cap)


def read_shape(folder: Path) -> TargetShape:
    return target_shape(json.loads((folder / "config.json").read_text()))


def load_head(folder: Path, dtype: torch.dtype) -> TargetHead:
    """Embedding, LM head (the embedding when tied) and final norm of a Hugging Face folder."""
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: dict[str, Tensor] = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                for wanted in ("embed_tokens.weight", "lm_head.weight", "model.norm.weight", "language_model.norm.weight"):
                    if key == wanted or key.endswith(f".{wanted}"):
                        found[wanted.split(".")[-2]] = tensors.get_tensor(key).to(dtype)
    if "embed_tokens" not in found or "norm" not in found:
        raise ValueError(f"{folder}: no embedding or no final norm among its tensors. Fix: use a causal language model in safetensors form")
    tables = FrozenTables(found["embed_tokens"], found.get("lm_head", found["embed_tokens"]), found["norm"])
    return TargetHead(read_shape(folder), tables)


class KeyValueCache:
    """Keys and values [slots, P, G, H] of each layer, written at the positions of a step. A layer's are made when it first brings
    some: heads may differ between layers."""

    is_compileable = False

    def __init__(self, num_slots: int, max_length: int) -> None:
        self._size = num_slots, max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._step: Step | None = None

    def begin(self, step: Step) -> Tensor:
        """Announces the next forward and returns its visibility mask [R, 1, T, P'] (padding sees what a token there would)."""
        self._step, self._length = step, step.end
        return (torch.arange(self._length, device=step.positions_S.device) <= step.positions_RT[..., None])[:, None]

    def update(self, keys_RGTH: Tensor, values_RGTH: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer of transformers."""
        assert self._step is not None
        keys_RTGH, values_RTGH = keys_RGTH.transpose(1, 2), values_RGTH.transpose(1, 2)
        return self.write(layer, self._step.packed(keys_RTGH), self._step.packed(values_RTGH))

    def write(self, layer: int, keys_SGH: Tensor, values_SGH: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's keys and values of the step; returns those of its requests so far, [R, G, P', H]."""
        assert self._step is not None
        if layer not in self._layers:
            _, num_heads, head_width = keys_SGH.shape
            num_slots, max_length = self._size
            blank = keys_SGH.new_zeros(2, num_slots, max_length, num_heads, head_width)
            self._layers[layer] = blank[0], blank[1]
        keys, values = self._layers[layer]
        keys[self._step.slot_S, self._step.positions_S] = keys_SGH
        values[self._step.slot_S, self._step.positions_S] = values_SGH
        keys_RPGH, values_RPGH = (tensor[:, : self._length][self._step.slots] for tensor in (keys, values))
        return keys_RPGH.transpose(1, 2), values_RPGH.transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return self._length

    def move(self, source: int, target: int, length: int) -> None:
        """Puts what a slot holds of its first positions in another's place."""
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :length] = tensor[source, :length]


class TransformersTarget(TargetModel):
    """Any target. `dtype` is its compute precision."""

    def __init__(self, folder: Path, tapped_layers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.shape = read_shape(folder)
        self.tapped_layers, self.dtype, self.device = tapped_layers, dtype, device
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval().to(device)
        self._tapped: dict[int, Tensor] = {}
        body = self._model.get_decoder()
        has_window = "sliding_attention" in (getattr(body.config, "layer_types", None) or ())
        self._window: int | None = body.config.sliding_window if has_window else None
        for layer in tapped_layers:
            body.layers[layer].register_forward_hook(lambda _module, _inputs, output, layer=layer: self._keep(layer, output))
        self._body = body

    def _keep(self, layer: int, output: Any) -> None:
        self._tapped[layer] = output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def forward(self, step: Step, cache: KeyValueCache) -> TargetStates:
        mask: Any = cache.begin(step)
        if self._window is not None:  # layers of two kinds; a finished mask is taken as it is, so both are made here
            is_near = torch.arange(mask.shape[-1], device=self.device) > step.positions_RT[:, None, :, None] - self._window
            mask = {"full_attention": mask, "sliding_attention": mask & is_near}
        output = self._body(
            input_ids=step.padded(step.tokens_S), attention_mask=mask, position_ids=step.positions_RT, past_key_values=cache, use_cache=True
        )
        tapped_RTLD = torch.stack([self._tapped[layer] for layer in self.tapped_layers], dim=2)
        return TargetStates(step.packed(tapped_RTLD), step.packed(output.last_hidden_state))

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        return shaped_logits(self._model.get_output_embeddings()(final), self.shape)
