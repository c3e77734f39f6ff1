"""Where a target comes from and what identifies it. Planning reads a small sidecar, never weights.

`identity.json` (format version 1) stands beside a local model's weights: SHA-256 of weights, tokenizer and chat template.
It is written when the model is converted or made, or once, on first use, for a folder that has none.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dspark.families import target_shape
from pipelines.config import PROJECT_ROOT
from pipelines.dag import canonical, digest
from pipelines.runner import resolve
from pipelines.settings import HubSource, LocalSource, RandomSource, TargetConfig

IDENTITY = "identity.json"
HUB_PREFIX = "hub://"


@dataclass(frozen=True)
class TargetIdentity:
    """What the target is, hashed into every step that depends on it."""

    name: str
    weights: str
    tokenizer: str
    chat_template: str


def uri(target: TargetConfig) -> str:
    """Where workers find the model: a folder, or hub://repository@revision."""
    source = target.source
    if isinstance(source, HubSource):
        return f"{HUB_PREFIX}{source.repository}@{source.revision}"
    if isinstance(source, RandomSource):
        return str(PROJECT_ROOT / "models" / f"{target.name}-{digest(canonical(source))[:8]}")
    return str(PROJECT_ROOT / source.path)


def identify(target: TargetConfig) -> TargetIdentity:
    """The identity to hash. ValueError when a local folder is missing."""
    source = target.source
    if isinstance(source, HubSource):
        pinned = f"{source.repository}@{source.revision}"
        return TargetIdentity(target.name, pinned, pinned, pinned)
    if isinstance(source, RandomSource):
        made = digest(canonical(source))
        return TargetIdentity(target.name, made, made, made)
    found = read_identity(_existing(source))
    return TargetIdentity(target.name, found["weights_sha256"], found["tokenizer_sha256"], found["chat_template_sha256"])


def check(target: TargetConfig) -> None:
    """ValueError, with the fix, where a local model's config.json says that `target` is wrong about it. Of other models the
    workers check it."""
    path = Path(uri(target)) / "config.json"
    if not isinstance(target.source, LocalSource) or not path.is_file():
        return
    shape = target_shape(json.loads(path.read_text()))
    for name in ("width", "num_layers"):
        found, known = getattr(target, name), getattr(shape, name)
        if found != known:
            raise ValueError(f"target.{name}: {found}, the model's is {known}. Fix: target.{name}={known}")
    if not 0 <= target.mask_token_id < shape.vocab_size:
        raise ValueError(
            f"target.mask_token_id: {target.mask_token_id} is not a token of the target ({shape.vocab_size}). Fix: an unused special token"
        )


def _existing(source: LocalSource) -> Path:
    folder = PROJECT_ROOT / source.path
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"target.source.path: {source.path!r} holds no model (no config.json in {folder}). Fix: make setup, or give the folder of a Hugging Face model"
        )
    return folder


def read_identity(folder: Path) -> dict[str, str]:
    """The sidecar; computed and written on first use, which reads the weights once."""
    sidecar = folder / IDENTITY
    if not sidecar.is_file():
        found = {
            "format_version": 1,
            "weights_sha256": _sha256(sorted(folder.glob("*.safetensors"))),
            "tokenizer_sha256": _sha256([folder / "tokenizer.json"]),
        }
        template = folder / "chat_template.jinja"
        found["chat_template_sha256"] = _sha256([template if template.is_file() else folder / "tokenizer_config.json"])
        aside = sidecar.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(found, indent=1))
        aside.replace(sidecar)
    return json.loads(sidecar.read_text())


def _sha256(paths: list[Path]) -> str:
    result = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                result.update(chunk)
    return result.hexdigest()


def local_folder(target_uri: str) -> Path:
    """On a worker: the model's folder, fetched from the Hub when it lives there."""
    if not target_uri.startswith(HUB_PREFIX):
        return Path(target_uri)
    from huggingface_hub import snapshot_download

    repository, revision = target_uri.removeprefix(HUB_PREFIX).split("@")
    return Path(snapshot_download(repository, revision=revision))


def ensure_made(target: TargetConfig) -> None:
    """Makes a random target's folder unless it is there; other sources exist already."""
    folder = Path(uri(target))
    if not isinstance(target.source, RandomSource) or (folder / IDENTITY).is_file():
        return
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    resolve("pipelines.random_target:make")(target.source, aside)
    read_identity(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
