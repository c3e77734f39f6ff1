"""A release: the directory from which serving engines load a drafter. Layout and names are DeepSpec's `Qwen3DSparkModel`.

    model.safetensors  bf16: fc, hidden_norm, norm, layers.{i}.*, markov_head.markov_w1 and markov_w2, confidence_head.proj;
                       with a reduced draft vocabulary lm_head.weight [W, D] and d2t [W], int64 offsets, too
    config.json        all that an engine reads, at the top level: a missing key is a default that fails silently
                       (vLLM itself reads no `sts_temperatures`; pipelines/backends/vllm_plugin.py does)
    calibration.json   temperatures, and sps.json, sps_additive.json, sps_tensorrt.json, costs of a step: dspark/serving_files.py
    serving.json       method, number of drafted tokens and conventions; the vLLM version that this layout was tested with
    report.json, lineage.json, README.md      what was measured, what it was made of, and the model card
    checksums.json     file name -> SHA-256, written last: without it there is no release

Embedding and whole-vocabulary LM head are the target's and not stored: vLLM and SGLang share the target's tables, and a
copy (1.5 GB for Qwen3-4B) could only disagree. vLLM refuses a reduced draft vocabulary without its own LM head rows.

Shapes: D width, V target vocabulary, W draft vocabulary.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from dspark.cache import LAYER_CONVENTION
from dspark.calibration import Calibration
from dspark.config import DSparkConfig, ProportionalScaling
from dspark.drafters import build_drafter
from dspark.drafters.base import Drafter, FrozenTables
from dspark.families import check_tapped_layers, target_shape
from dspark.scheduler import SpsTable
from dspark.serving_files import CALIBRATION, SPS_FILES, AdditiveSps, check, read_json, read_sts, sps_files, write_json
from dspark.storage import Storage
from dspark.target import TargetHead

WEIGHTS, CONFIG, SERVING, REPORT = "model.safetensors", "config.json", "serving.json", "report.json"
FILES = (WEIGHTS, CONFIG, CALIBRATION, *SPS_FILES, SERVING, REPORT, "lineage.json", "README.md")
CHECKSUMS = "checksums.json"
VLLM_TESTED = "0.32.0"

# What config.json says of every drafter of this project. vLLM takes another architecture under the method dspark for
# DeepSeek-V4's, and drops the confidence head silently unless both of its keys are there.
_FIXED: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "bfloat16",
}
_KEYS = {
    *_FIXED, "block_size", "markov_rank", "mask_token_id", "target_layer_ids", "num_target_layers", "num_hidden_layers", "layer_types",
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps",
    "max_position_embeddings", "rope_parameters", "rope_theta", "sts_temperatures",
}  # fmt: skip


def write_release(
    storage: Storage,
    drafter: Drafter,
    head: TargetHead,
    target_config: Mapping[str, Any],
    calibration: Calibration,
    sps: SpsTable,
    additive: AdditiveSps,
    report: Mapping[str, Any],
    lineage: Mapping[str, Any],
    model_card: str,
) -> list[str]:
    """Writes a release where none is; returns the file names. `target_config` is the target's config.json.

    ValueError, and nothing is written, when a release or a part of one is there, when the drafter is not one that engines
    serve as DSpark, and when a file would break a rule of `check_release`.
    """
    found = [name for name in (*FILES, CHECKSUMS) if storage.exists(name)]
    if found:
        rule = "a release is never published over another one"
        raise _error(storage.uri, f"holds {', '.join(found)}", rule, "publish to an empty place, or remove the files of the old release")
    served = served_files(drafter, head, target_config)
    config = read_json(CONFIG, served[CONFIG]) | {"sts_temperatures": list(calibration.temperatures_K)}
    files = {
        **served,
        CONFIG: write_json(config),
        CALIBRATION: calibration.to_json().encode(),
        **sps_files(sps, additive, drafter.config.block_size),
        SERVING: write_json(_serving(config)),
        REPORT: write_json(report),
        "lineage.json": write_json(lineage),
        "README.md": model_card.encode(),
    }
    _check(files)
    for name in FILES:
        storage.put(name, files[name])
    storage.put(CHECKSUMS, write_json({name: hashlib.sha256(files[name]).hexdigest() for name in FILES}))
    return [*FILES, CHECKSUMS]


def served_files(drafter: Drafter, head: TargetHead, target_config: Mapping[str, Any]) -> dict[str, bytes]:
    """Name -> content of what an engine loads: the weights and config.json, without temperatures. ValueError when none serves this drafter as DSpark."""
    config = _config(drafter, head, target_config)
    return {WEIGHTS: save_safetensors(_tensors(drafter, head), metadata={"format": "pt"}), CONFIG: write_json(config)}


def check_release(storage: Storage) -> None:
    """ValueError unless every file is the one that was written and keeps the rules of the engines that read it."""
    if not storage.exists(CHECKSUMS):
        raise _error(storage.uri, f"no {CHECKSUMS}", "it is written last, so this is no whole release", "publish again, to an empty place")
    checksums = read_json(CHECKSUMS, storage.read(CHECKSUMS))
    if checksums.keys() != set(FILES):
        raise _error(CHECKSUMS, sorted(checksums), f"names {', '.join(FILES)}", "fetch the release again")
    files = {name: storage.read(name) for name in FILES if storage.exists(name)}
    for name in FILES:
        digest = hashlib.sha256(files[name]).hexdigest() if name in files else "missing"
        if digest != checksums[name]:
            raise _error(f"{storage.uri}/{name}", digest[:16], f"SHA-256 {checksums[name][:16]} ({CHECKSUMS})", "fetch the release again")
    _check(files)


# --- writing ------------------------------------------------------------------------------------------------------------


def _config(drafter: Drafter, head: TargetHead, target_config: Mapping[str, Any]) -> dict[str, Any]:
    config, shape = drafter.config, drafter.shape
    if not isinstance(config, DSparkConfig):
        raise _error(
            "drafter.kind", config.kind, "only dspark has the confidence head that a calibration is for", "publish a dspark drafter"
        )
    if config.sequential_head != "markov":
        raise _error(
            "drafter.sequential_head",
            config.sequential_head,
            "Qwen3DSparkModel knows the Markov head alone",
            "publish drafter.sequential_head=markov",
        )
    if not config.sample_from_anchor:
        rule = "a release is of the anchor-first layout, which both engines take for granted where a key is missing"
        raise _error("drafter.sample_from_anchor", False, rule, "publish a drafter with drafter.sample_from_anchor=true")
    if config.sliding_layers:
        rule = "unless told otherwise, engines run sliding layers of a DSpark drafter causally, which it was not trained for"
        raise _error("drafter.sliding_layers", list(config.sliding_layers), rule, "publish a drafter with drafter.sliding_layers=[]")
    if shape.embedding_scale != 1.0 or shape.logit_soft_cap is not None:
        found = f"embedding scale {shape.embedding_scale:g}, logit soft cap {shape.logit_soft_cap}"
        raise _error(
            f"target {shape.model_type}", found, "Qwen3DSparkModel applies neither", "use a target of the families llama, qwen2, qwen3"
        )
    rope = shape.rope
    if isinstance(rope.scaling, ProportionalScaling):
        rule = "Qwen3DSparkModel turns every pair of a head"
        raise _error(f"target {shape.model_type} rotary embedding", "proportional", rule, "use a target with another rotary embedding")
    if rope.rotated_width != shape.head_width:
        found = f"{rope.rotated_width} of {shape.head_width} components of a head"
        rule = "Qwen3DSparkModel turns whole heads (transformers' qwen3 ignores partial_rotary_factor, vLLM does not)"
        raise _error(f"target {shape.model_type} rotary embedding", found, rule, "use a target without partial_rotary_factor")
    for name, other in (("target_config", target_shape(target_config)), ("head.shape", head.shape)):
        if other != shape:
            raise _error(name, other, f"the target that the drafter was trained for, {shape}", "pass this target's")
    text = target_config.get("text_config", target_config)
    num_draft_ids = len(drafter.draft_ids_W)
    scaling = {} if rope.scaling is None else asdict(rope.scaling)
    return {
        **_FIXED,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": text["max_position_embeddings"],  # vLLM sizes its rotary table by it
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta, **scaling},  # transformers 5
        "rope_theta": rope.theta,  # transformers 4, which would take 10,000 without it
        **({"rope_scaling": scaling} if scaling else {}),  # transformers 4, which would not scale without it
        "num_target_layers": shape.num_layers,
        "target_layer_ids": list(drafter.tapped_layers),
        "mask_token_id": drafter.mask_token_id,
        "block_size": config.block_size,
        "markov_rank": config.markov_rank,
        **({"draft_vocab_size": num_draft_ids} if num_draft_ids < shape.vocab_size else {}),
    }


def _tensors(drafter: Drafter, head: TargetHead) -> dict[str, Tensor]:
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    ids_W = drafter.draft_ids_W.cpu()
    if len(ids_W) < drafter.shape.vocab_size:
        tensors["lm_head.weight"] = head.tables.lm_head_VD.cpu()[ids_W].bfloat16()
        tensors["d2t"] = ids_W - torch.arange(len(ids_W))
    return tensors


def _serving(config: Mapping[str, Any]) -> dict[str, Any]:
    conventions = {key: config[key] for key in ("sample_from_anchor", "target_layer_ids", "mask_token_id")}
    method = {"method": "dspark", "num_speculative_tokens": config["block_size"], **conventions}
    return {**method, "layer_convention": LAYER_CONVENTION, "vllm_tested": VLLM_TESTED}


# --- checking -----------------------------------------------------------------------------------------------------------


def _check(files: Mapping[str, bytes]) -> None:
    config = read_json(CONFIG, files[CONFIG])
    missing = _KEYS - config.keys()
    if missing:
        raise _error(CONFIG, f"without {', '.join(sorted(missing))}", "these keys stand at the top level", "publish again")
    for key, value in _FIXED.items():
        if config[key] != value:
            raise _error(f"{CONFIG} {key}", config[key], f"must be {value}", "publish again")
    if config["layer_types"] != ["full_attention"] * config["num_hidden_layers"]:
        raise _error(f"{CONFIG} layer_types", config["layer_types"], "full_attention for every layer", "publish again")
    if not 0 <= config["mask_token_id"] < config["vocab_size"]:
        rule = f"a token of the target's vocabulary of {config['vocab_size']}"
        raise _error(f"{CONFIG} mask_token_id", config["mask_token_id"], rule, "set target.mask_token_id and train again")
    check_tapped_layers(tuple(config["target_layer_ids"]), config["num_target_layers"], "dspark")
    _check_tensors(config, load_safetensors(files[WEIGHTS]))
    check(files, config["block_size"])
    temperatures = list(read_sts(files[CALIBRATION], config["block_size"]).temperatures_K)
    if config["sts_temperatures"] != temperatures:
        raise _error(f"{CONFIG} sts_temperatures", config["sts_temperatures"], f"those of {CALIBRATION}, {temperatures}", "publish again")


def _check_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    shape, num_draft_ids = target_shape(config), config.get("draft_vocab_size")
    expected_config = DSparkConfig(
        "dspark", config["num_hidden_layers"], config["block_size"], num_draft_ids, "markov", config["markov_rank"], True, (), None
    )
    target = replace(shape, num_layers=config["num_target_layers"])
    with torch.device("meta"):  # names and shapes without memory
        table = torch.empty(shape.vocab_size, shape.width)
        ids = None if num_draft_ids is None else torch.arange(num_draft_ids)
        tables = FrozenTables(table, table, table[0])
        drafter = build_drafter(expected_config, target, tuple(config["target_layer_ids"]), config["mask_token_id"], tables, ids)
    expected = {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    if num_draft_ids is not None:
        expected |= {"lm_head.weight": ((num_draft_ids, shape.width), torch.bfloat16), "d2t": ((num_draft_ids,), torch.int64)}
    for name in sorted(expected.keys() | tensors.keys()):
        found = (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else None
        if found != expected.get(name):
            raise _error(f"{WEIGHTS} {name}", found, f"must be {expected.get(name)} by {CONFIG}", "publish again")
    if num_draft_ids is not None:
        ids_W = tensors["d2t"] + torch.arange(num_draft_ids)
        if ids_W[0] < 0 or ids_W[-1] >= shape.vocab_size or not (ids_W.diff() > 0).all():
            raise _error(
                f"{WEIGHTS} d2t",
                tensors["d2t"].tolist()[:8],
                "offsets: id + d2t[id] ascend within the target's vocabulary",
                "publish again",
            )


def _error(field: str, value: Any, rule: str, fix: str) -> ValueError:
    return ValueError(f"{field}: {value}: {rule}. Fix: {fix}")
