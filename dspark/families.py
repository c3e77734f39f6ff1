"""Model families as data: what differs between targets, and how to read a target's config.json.

A family is a row of `FAMILIES`; nothing else in the project knows model types. Unknown families and rope types are errors:
a drafter trained on a guess looks healthy and is never accepted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.config import TargetShape


@dataclass(frozen=True)
class Family:
    """`norm_weight_offset`: RMSNorm multiplies by (offset + weight). `scales_embedding`: inputs are times sqrt(width)."""

    norm_weight_offset: float = 0.0
    scales_embedding: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma3_text": Family(norm_weight_offset=1.0, scales_embedding=True),
    "gemma4_text": Family(scales_embedding=True),
}


def target_shape(config: Mapping[str, Any]) -> TargetShape:
    """Reads config.json (a nested `text_config` wins). ValueError on an unknown family or rotary embedding."""
    config = config.get("text_config", config)
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        raise ValueError(
            f"target config.json: model_type {model_type!r} is not a known family ({', '.join(FAMILIES)}). Fix: add a row to dspark/families.py"
        )
    family = FAMILIES[model_type]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    is_per_layer_type = any(isinstance(value, Mapping) for value in rope.values())
    if is_per_layer_type or kind != "default" or rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(
            f"target config.json: rope {dict(rope)} is not supported, only the default rotary embedding is. Fix: use a target without rope scaling"
        )
    return TargetShape(
        model_type=model_type,
        num_layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_width=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        mlp_width=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config["rope_theta"],
        embedding_scale=math.sqrt(config["hidden_size"]) if family.scales_embedding else 1.0,
        norm_weight_offset=family.norm_weight_offset,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )


def check_tapped_layers(tapped_layers: tuple[int, ...], num_layers: int, drafter_kind: str) -> None:
    """Tapped layer l is the residual stream after decoder layer l (0-based). The last layer's is what MTP reads, and nothing
    else may: engines disagree on whether it is taken before or after the final norm."""
    if drafter_kind == "mtp":
        if tapped_layers != (num_layers - 1,):
            raise ValueError(
                f"target.tapped_layers: {list(tapped_layers)}: an mtp drafter reads the target's last layer alone. Fix: target.tapped_layers=[{num_layers - 1}]"
            )
        return
    if (
        not tapped_layers
        or list(tapped_layers) != sorted(set(tapped_layers))
        or tapped_layers[0] < 0
        or tapped_layers[-1] >= num_layers - 1
    ):
        example = sorted({max(min(layer, num_layers - 2), 0) for layer in (1, num_layers // 2, num_layers - 3)})
        raise ValueError(
            f"target.tapped_layers: {list(tapped_layers)} must be distinct, ascending and between 0 and {num_layers - 2} "
            f"(the target has {num_layers} layers, the last is not tapped). Fix: for example {example}"
        )
