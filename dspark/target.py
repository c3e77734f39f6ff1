"""The frozen target: hidden states and next-token logits, with a key/value cache that needs no roll-back.

`TransformersTarget` runs any causal language model of a known family with transformers. Its cache writes at explicit
positions and its mask is `key position <= query position`: after a rejection the stale entries are simply invisible until
the next round overwrites them, so requests of one batch may accept different numbers of tokens.

Shapes: B requests, T new tokens, S cached positions, L tapped layers, D width, V vocabulary, G key/value heads, H width.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from dspark.config import TargetShape
from dspark.drafters.base import FrozenTables
from dspark.families import target_shape
from dspark.layers import TILE_ROWS, rms_norm, soft_capped

EXP_SAFE = 64.0  # exp of twice as much, either way, leaves fp32


@dataclass
class TargetStates:
    """States of T new tokens. `final_BTD` is what the LM head consumes (after the final norm)."""

    tapped_BTLD: Tensor
    final_BTD: Tensor


class TargetModel(Protocol):
    device: torch.device

    def new_cache(self, max_length: int) -> "KeyValueCache": ...

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, cache: "KeyValueCache") -> TargetStates:
        """Adds T tokens at the given positions (padding may hold any token at positions that later tokens overwrite)."""
        ...

    def logits(self, final: Tensor) -> Tensor:
        """[..., D] -> next-token logits [..., V], at least fp32."""
        ...


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
        return _logits(torch.nn.functional.linear(final, table_VD), self.shape)


def _logits(product: Tensor, shape: TargetShape) -> Tensor:
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
    """Keys and values [B, G, S, H] of each layer, written at the positions of the current forward. A layer's are made when it
    first brings some: heads may differ between layers."""

    is_compileable = False

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._positions_BT, self._length = torch.empty(0, 0, dtype=torch.long), 0

    def begin(self, positions_BT: Tensor) -> Tensor:
        """Announces the positions of the next forward and returns its visibility mask [B, 1, T, S']."""
        self._positions_BT, self._length = positions_BT, int(positions_BT.max()) + 1
        return (torch.arange(self._length, device=positions_BT.device) <= positions_BT[..., None])[:, None]

    def update(self, keys_BGTH: Tensor, values_BGTH: Tensor, layer: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer of transformers."""
        if layer not in self._layers:
            num_requests, num_heads, _, head_width = keys_BGTH.shape
            blank = keys_BGTH.new_zeros(2, num_requests, num_heads, self._max_length, head_width)
            self._layers[layer] = blank[0], blank[1]
        keys, values = self._layers[layer]
        rows = torch.arange(len(self._positions_BT), device=keys_BGTH.device)[:, None]
        keys[rows, :, self._positions_BT] = keys_BGTH.transpose(1, 2)
        values[rows, :, self._positions_BT] = values_BGTH.transpose(1, 2)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._length

    def select(self, rows: Tensor) -> None:
        """Keeps these requests, in this order."""
        self._layers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._layers.items()}


class TransformersTarget:
    """A target in this process. `dtype` is its compute precision."""

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

    def new_cache(self, max_length: int) -> KeyValueCache:
        return KeyValueCache(max_length)

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, cache: KeyValueCache) -> TargetStates:
        mask: Any = cache.begin(positions_BT)
        if self._window is not None:  # layers of two kinds; a finished mask is taken as it is, so both are made here
            is_near = torch.arange(mask.shape[-1], device=self.device) > positions_BT[:, None, :, None] - self._window
            mask = {"full_attention": mask, "sliding_attention": mask & is_near}
        output = self._body(input_ids=tokens_BT, attention_mask=mask, position_ids=positions_BT, past_key_values=cache, use_cache=True)
        return TargetStates(torch.stack([self._tapped[layer] for layer in self.tapped_layers], dim=2), output.last_hidden_state)

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        return _logits(self._model.get_output_embeddings()(final), self.shape)

    def states(self, token_ids: list[int]) -> TargetStates:
        """States of one whole sequence, without batch dimension: the reference capture."""
        tokens_BT = torch.tensor([token_ids], device=self.device)
        positions_BT = torch.arange(len(token_ids), device=self.device)[None]
        states = self.forward(tokens_BT, positions_BT, self.new_cache(len(token_ids)))
        return TargetStates(states.tapped_BTLD[0], states.final_BTD[0])
