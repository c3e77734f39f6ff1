"""A drafter's directory: `model.safetensors` and `config.json`, and the reading of both.

Tensor names are those of the released DSpark checkpoints (fc, hidden_norm, norm, layers.{i}.*, markov_head.*,
confidence_head.*); the target's embedding and LM head are not stored. A reduced draft vocabulary is stored as `d2t`, int64
*offsets*: target id = draft id + d2t[draft id]. config.json, format version 2: `format_version`, `drafter` (its config),
`target` (its shape and weights hash), `tapped_layers` with `layer_convention`, `mask_token_id`, `provenance`.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from dspark.cache import LAYER_CONVENTION
from dspark.config import CONFIGS
from dspark.drafters import build_drafter
from dspark.drafters.base import Drafter
from dspark.storage import Storage
from dspark.target import TargetHead

DRAFTER_FORMAT_VERSION = 2


def save_drafter(
    storage: Storage,
    folder: str,
    drafter: Drafter,
    weights: Mapping[str, Tensor],
    target_weights_sha256: str,
    provenance: Mapping[str, Any],
) -> list[str]:
    """Writes weights, then config; returns the file names."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    if len(drafter.draft_ids_W) < drafter.shape.vocab_size:
        tensors["d2t"] = drafter.draft_ids_W.cpu() - torch.arange(len(drafter.draft_ids_W))
    config = {
        "format_version": DRAFTER_FORMAT_VERSION,
        "drafter": dataclasses.asdict(drafter.config),
        "target": {**dataclasses.asdict(drafter.shape), "weights_sha256": target_weights_sha256},
        "tapped_layers": list(drafter.tapped_layers),
        "layer_convention": LAYER_CONVENTION,
        "mask_token_id": drafter.mask_token_id,
        "provenance": dict(provenance),
    }
    names = [f"{folder}/model.safetensors", f"{folder}/config.json"]
    storage.put(names[0], save_safetensors(tensors))
    storage.put(names[1], json.dumps(config, indent=1).encode())
    return names


def load_drafter(storage: Storage, folder: str, head: TargetHead, target_weights_sha256: str, dtype: torch.dtype) -> Drafter:
    """A drafter ready to draft for this target; ValueError when it was trained for another one."""
    config = json.loads(storage.read(f"{folder}/config.json"))
    if config["format_version"] != DRAFTER_FORMAT_VERSION:
        raise ValueError(
            f"{storage.uri}/{folder}: format version {config['format_version']}, this version reads {DRAFTER_FORMAT_VERSION}. Fix: train it again"
        )
    if config["target"]["weights_sha256"] != target_weights_sha256:
        raise ValueError(
            f"{storage.uri}/{folder}: trained for target weights {config['target']['weights_sha256'][:16]}, given {target_weights_sha256[:16]}. "
            "Fix: use the target that it was trained for; a drafter never works for another"
        )
    tensors = load_safetensors(storage.read(f"{folder}/model.safetensors"))
    offsets = tensors.pop("d2t", None)
    draft_ids = None if offsets is None else offsets + torch.arange(len(offsets))
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in config["drafter"].items()}
    drafter_config = CONFIGS[config["drafter"]["kind"]](**fields)
    drafter = build_drafter(drafter_config, head.shape, tuple(config["tapped_layers"]), config["mask_token_id"], head.tables, draft_ids)
    drafter.to(dtype).load_state_dict(tensors)
    return drafter.eval()
