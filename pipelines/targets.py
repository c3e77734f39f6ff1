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

from pipelines.config import PROJECT_ROOT, HubSource, LocalSource, RandomSource, TargetConfig
from pipelines.dag import canonical, digest

IDENTITY = "identity.json"
HUB_PREFIX = "hub://"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def _existing(source: LocalSource) -> Path:
    folder = PROJECT_ROOT / source.path
    if not (folder / "config.json").is_file():
        raise ValueError(f"target.source.path: {source.path!r} holds no model (no config.json in {folder}). Fix: make setup, or give the folder of a Hugging Face model")
    return folder


def read_identity(folder: Path) -> dict[str, str]:
    """The sidecar; computed and written on first use, which reads the weights once."""
    sidecar = folder / IDENTITY
    if not sidecar.is_file():
        found = {"format_version": 1, "weights_sha256": _sha256(sorted(folder.glob("*.safetensors"))), "tokenizer_sha256": _sha256([folder / "tokenizer.json"])}
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
    _make_random(target.source, aside)
    read_identity(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def _make_random(source: RandomSource, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<|mask|>", "<|pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=special[:3])
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=source.width, num_hidden_layers=source.num_layers, num_attention_heads=source.num_heads,
        num_key_value_heads=source.num_kv_heads, intermediate_size=source.mlp_width, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=0, pad_token_id=3, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(source.seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Like a trained model it must never say its mask token: width 0 carries a positive constant through every layer,
        # which only the logits of special tokens other than the stop token read, and read as very unlikely.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        for token in (0, 2, 3):
            model.lm_head.weight[token] = 0.0
            model.lm_head.weight[token, 0] = -1000.0
    model.to(torch.bfloat16).save_pretrained(folder)


