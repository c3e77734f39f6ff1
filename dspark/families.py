"""Model families as data: what differs between targets, and how to read a target's config.json.

A family is a row of `FAMILIES`; nothing else in the project knows model types. Unknown families and rope types are errors:
a drafter trained on a guess looks healthy and is never accepted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.config import LinearScaling, Llama3Scaling, ProportionalScaling, Rope, RopeScaling, TargetShape, YarnScaling


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
    "gemma4_unified_text": Family(scales_embedding=True),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


def target_shape(config: Mapping[str, Any]) -> TargetShape:
    """Reads config.json (a nested `text_config` wins). ValueError on an unknown family or rotary embedding."""
    config = config.get("text_config", config)
    model_type = config["model_type"]
    if model_type not in FAMILIES:
        raise ValueError(
            f"target config.json: model_type {model_type!r} is not a known family ({', '.join(FAMILIES)}). Fix: add a row to dspark/families.py"
        )
    family = FAMILIES[model_type]
    head_width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return TargetShape(
        model_type=model_type,
        num_layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_width=head_width,
        mlp_width=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_epsilon=config["rms_norm_eps"],
        rope=_rope(config, head_width),
        embedding_scale=math.sqrt(config["hidden_size"]) if family.scales_embedding else 1.0,
        norm_weight_offset=family.norm_weight_offset,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )


def _rope(config: Mapping[str, Any], head_width: int) -> Rope:
    """The target's rotary embedding, from transformers 5's `rope_parameters` or transformers 4's `rope_scaling` and `rope_theta`."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # where both are, transformers 5 takes the older
    rope = config.get(field) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        # One entry a layer type, as Gemma has it. The drafter's layers are full attention, so theirs is the one to copy.
        field, rope = f"{field}.full_attention", rope.get("full_attention")
        if not isinstance(rope, Mapping):
            raise _error(field, rope, "a mapping; the drafter copies the full-attention layers", "use a target that has such layers")
    defaults: dict[str, Any] = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
    defaults["original_max_position_embeddings"] = config.get("max_position_embeddings")
    outside = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    before = {"original_max_position_embeddings": config.get("original_max_position_embeddings")}  # transformers prefers the outer one
    given = {name: value for part in (defaults, outside, rope, before) for name, value in part.items() if value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise _error(f"{field}.rope_type", rope_type, f"one of {', '.join(ROPE_TYPES)}", "use a target with one of these")
    theta, part = _number(given, field, "rope_theta"), _number(given, field, "partial_rotary_factor")
    if rope_type == "proportional":  # whose heads are whole, and some of their pairs stand still
        factor, turned_pairs = _number({"factor": 1.0, **given}, field, "factor"), int(part * head_width // 2)
        if not 1 <= turned_pairs <= head_width // 2:
            rule = f"turns some, at most all, of a head's {head_width // 2} pairs, not {turned_pairs}"
            raise _error(f"{field}.partial_rotary_factor", part, rule, "correct config.json")
        return Rope(theta, head_width, ProportionalScaling("proportional", factor, turned_pairs))
    rotated_width = int(head_width * part)
    if rotated_width % 2 or not 2 <= rotated_width <= head_width:
        rule = f"turns an even number, at most all, of a head's {head_width} components, not {rotated_width}"
        raise _error(f"{field}.partial_rotary_factor", part, rule, "correct config.json")
    return Rope(theta, rotated_width, _scaling(rope_type, given, field))


def _scaling(rope_type: str, given: Mapping[str, Any], field: str) -> RopeScaling | None:
    if rope_type == "default":
        return None
    factor = _number(given, field, "factor")
    if rope_type == "linear":
        return LinearScaling("linear", factor)
    original_length = int(_number(given, field, "original_max_position_embeddings"))
    if rope_type == "llama3":
        low, high = _number(given, field, "low_freq_factor"), _number(given, field, "high_freq_factor")
        if low >= high:
            raise _error(f"{field}.high_freq_factor", high, f"above low_freq_factor, {low:g}", "correct config.json")
        return Llama3Scaling("llama3", factor, low, high, original_length)
    if "attention_factor" in given:
        attention_factor = _number(given, field, "attention_factor")
    elif given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = _mscale(factor, _number(given, field, "mscale")) / _mscale(factor, _number(given, field, "mscale_all_dim"))
    else:
        attention_factor = _mscale(factor, 1.0)
    fast, slow = _number(given, field, "beta_fast"), _number(given, field, "beta_slow")
    return YarnScaling("yarn", factor, attention_factor, fast, slow, original_length, given["truncate"])


def _mscale(factor: float, weight: float) -> float:
    """YaRN's factor on cos and sin for a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _number(given: Mapping[str, Any], field: str, name: str) -> float:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise _error(f"{field}.{name}", value, "a number above 0", "complete config.json")
    return float(value)


def _error(field: str, value: Any, rule: str, fix: str) -> ValueError:
    return ValueError(f"target config.json {field}: {value!r}: {rule}. Fix: {fix}")


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
