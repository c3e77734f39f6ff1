"""A target whose linear layers see the tokens of a step and nothing else ("ragged verification").

Requests that verify l draft tokens each cost the sum of 1 + l rows in every matrix product; padding them, as `TransformersTarget`
does, costs as many rows as all would have that verify the most. Only attention pads, in one call a layer for all requests.

Shapes: as in target.py, and N query heads, M = N / G of each key/value head, A = T * M rows of attention, E = N * H, C width of
queries, keys and values together, F width of the MLP.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dspark.layers import Rotation, as_columns, as_rows, product
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel, TargetStates, TransformersTarget, read_shape, shaped_logits

PACKED_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class _Layer:
    """Weights of a decoder layer. Matrices with the same input are one."""

    attention_norm_D: Tensor
    qkv_CD: Tensor
    qkv_bias_C: Tensor | None
    head_norm_NH: Tensor | None  # of the query heads, then of the key heads
    out_DE: Tensor
    mlp_norm_D: Tensor
    gate_up_FD: Tensor  # [2F, D]
    down_DF: Tensor

    @staticmethod
    def of(layer: Any, num_heads: int, num_kv_heads: int) -> "_Layer":
        """From transformers' module."""
        attention, mlp = layer.self_attn, layer.mlp
        inputs = attention.q_proj, attention.k_proj, attention.v_proj
        head_norm_NH = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm, num_heads), (attention.k_norm, num_kv_heads)
            head_norm_NH = torch.cat([norm.weight.expand(count, -1) for norm, count in norms])
        return _Layer(
            layer.input_layernorm.weight,
            torch.cat([part.weight for part in inputs]),
            None if attention.q_proj.bias is None else torch.cat([part.bias for part in inputs]),
            head_norm_NH,
            attention.o_proj.weight,
            layer.post_attention_layernorm.weight,
            torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight,
        )


class PackedTarget(TargetModel):
    """A target of `PACKED_FAMILIES`. `dtype` is its compute precision."""

    @torch.no_grad()
    def __init__(self, folder: Path, tapped_layers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        reason = obstacle(folder)
        if reason is not None:
            raise ValueError(f"{folder}/config.json: {reason}: PackedTarget cannot run it. Fix: use dspark.packed_target.load_target")
        self.shape = read_shape(folder)
        self.tapped_layers, self.dtype, self.device = tapped_layers, dtype, device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        body = model.get_decoder()
        self._embedding_VD, self._head_VD = body.embed_tokens.weight, model.get_output_embeddings().weight
        self._norm_D = body.norm.weight
        heads = self.shape.num_heads, self.shape.num_kv_heads
        self._layers = [_Layer.of(body.layers.pop(0), *heads) for _ in range(self.shape.num_layers)]  # never a second copy of them all

    @torch.no_grad()
    def forward(self, step: Step, cache: KeyValueCache) -> TargetStates:
        bias_R1AP = self._bias(cache.begin(step))
        rotation = Rotation.at(step.positions_S, self.shape.rope, self.dtype)
        x_SD, tapped = functional.embedding(step.tokens_S, self._embedding_VD), {}
        for index, layer in enumerate(self._layers):
            query_SNH, keys_SGH, values_SGH = self._heads(layer, self._normalise(x_SD, layer.attention_norm_D), rotation)
            mixed_SE = _attend(query_SNH, *cache.write(index, keys_SGH, values_SGH), bias_R1AP, step)
            x_SD = x_SD + product(mixed_SE, layer.out_DE)
            x_SD = x_SD + _mlp(layer, self._normalise(x_SD, layer.mlp_norm_D))
            if index in self.tapped_layers:
                tapped[index] = x_SD
        tapped_SLD = torch.stack([tapped[layer] for layer in self.tapped_layers], dim=1)
        return TargetStates(tapped_SLD, self._normalise(x_SD, self._norm_D))

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        return shaped_logits(product(final, self._head_VD), self.shape)

    def _bias(self, is_visible_R1TP: Tensor) -> Tensor:
        """What attention adds to its scores: the mask, once for each of the M rows into which a token's query heads fold."""
        bias_R1TP = torch.zeros(is_visible_R1TP.shape, dtype=self.dtype, device=self.device).masked_fill_(~is_visible_R1TP, -torch.inf)
        folds = self.shape.num_heads // self.shape.num_kv_heads
        return bias_R1TP[:, :, :, None].expand(-1, -1, -1, folds, -1).flatten(2, 3)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], None, self.shape.norm_epsilon) * weight  # rounded in between, as transformers does

    def _heads(self, layer: _Layer, x_SD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [S, heads, H]."""
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qkv_SC = product(x_SD, layer.qkv_CD)
        if layer.qkv_bias_C is not None:
            qkv_SC = qkv_SC + layer.qkv_bias_C
        heads = qkv_SC.reshape(len(x_SD), -1, self.shape.head_width)
        turned, values_SGH = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.head_norm_NH is not None:
            turned = self._normalise(turned, layer.head_norm_NH)
        turned = rotation.apply(turned)
        return turned[:, :num_heads], turned[:, num_heads:], values_SGH


def _attend(query_SNH: Tensor, keys_RGPH: Tensor, values_RGPH: Tensor, bias_R1AP: Tensor, step: Step) -> Tensor:
    """[S, E]. Rows are the T tokens' M query heads of one key/value head, so that keys are neither repeated nor looped over; they are
    contiguous, since the fused kernel refuses others."""
    R, G, _, H = keys_RGPH.shape
    query_RTGMH = step.padded(query_SNH).unflatten(2, (G, -1))
    rows_RGAH = query_RTGMH.transpose(1, 2).reshape(R, G, -1, H).contiguous()
    mixed_RGAH = functional.scaled_dot_product_attention(rows_RGAH, keys_RGPH, values_RGPH, attn_mask=bias_R1AP)
    return step.packed(mixed_RGAH.view(R, G, step.width, -1, H).transpose(1, 2).flatten(2))


def _mlp(layer: _Layer, x_SD: Tensor) -> Tensor:
    """Tokens are columns, and a single one a vector: so oneDNN's bf16 takes a tenth to a third less time."""
    gate, up = (layer.gate_up_FD @ as_columns(x_SD)).chunk(2)
    return as_rows(layer.down_DF @ (functional.silu(gate) * up), len(x_SD))


def obstacle(folder: Path) -> str | None:
    """What of a target `PackedTarget` does not compute."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(folder)
    if getattr(whole, "quantization_config", None):
        return "its weights are quantised"
    config = whole.get_text_config()
    if config.model_type not in PACKED_FAMILIES:
        return f"model_type {config.model_type!r} is none of {', '.join(PACKED_FAMILIES)}"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "some layers have a sliding window"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "attention_bias or mlp_bias is set"
    return None if config.hidden_act == "silu" else f"hidden_act {config.hidden_act!r} is not 'silu'"


def load_target(folder: Path, tapped_layers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TargetModel:
    """The fastest that runs it."""
    kind = PackedTarget if obstacle(folder) is None else TransformersTarget
    return kind(folder, tapped_layers, dtype, device)
