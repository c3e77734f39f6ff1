"""Tiny random things that the tests of the library are made of. Numbers come from numpy seeds: equal on every machine.

A drafter of width 16 over 23 tokens, and a cache of sequences whose states are noise.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.cache import CacheFormat, CacheIdentity, CacheReader, CacheRow, num_tapped, supervised_rows, write_manifest, write_shard
from dspark.config import (
    DFlashConfig,
    DrafterConfig,
    DSparkConfig,
    Eagle3Config,
    LinearScaling,
    Llama3Scaling,
    LossConfig,
    MtpConfig,
    ProportionalScaling,
    Rope,
    TargetShape,
    TrainingConfig,
    YarnScaling,
)
from dspark.data import CachedRows, RowOrder
from dspark.drafters import build_drafter
from dspark.drafters.base import Drafter, FrozenTables, PackedContext, TrainingBatch
from dspark.losses import Denominators, Losses, block_losses, loss_weights
from dspark.losses import target_probs as losses_target_probs
from dspark.states import States, encode
from dspark.storage import LocalStorage, Storage
from dspark.training import Memory, TrainingData

SHAPE = TargetShape(
    model_type="llama", num_layers=6, width=16, num_heads=4, num_kv_heads=2, head_width=6, mlp_width=20, vocab_size=23,
    norm_epsilon=1e-5, rope=Rope(100.0, 6, None), embedding_scale=1.0, norm_weight_offset=0.0, logit_soft_cap=None,
)  # fmt: skip
# Of every kind one whose three pairs differ: of llama3's and yarn's, one is kept, one blended and one divided.
ROPES = {
    "linear": Rope(100.0, 6, LinearScaling("linear", 4.0)),
    "llama3": Rope(100.0, 6, Llama3Scaling("llama3", 8.0, 1.0, 4.0, 40)),
    "yarn": Rope(100.0, 6, YarnScaling("yarn", 4.0, 1.25, 4.0, 0.5, 30, truncate=False)),
    "yarn_truncated": Rope(100.0, 6, YarnScaling("yarn", 4.0, 1.25, 4.0, 0.5, 30, truncate=True)),
    "proportional": Rope(100.0, 6, ProportionalScaling("proportional", 2.0, 2)),
    "partial": Rope(100.0, 4, None),
    "partial_yarn": Rope(100.0, 4, YarnScaling("yarn", 4.0, 1.25, 4.0, 0.5, 30, truncate=False)),
}
CAPPED = dataclasses.replace(SHAPE, embedding_scale=4.0, logit_soft_cap=3.0)
TAPPED = (1, 3, 4)
BLOCK = 4
MASK = 22  # the mask token
REDUCED = torch.tensor([0, 2, 3, 5, 8, 11, 12, 17, 21])
IDENTITY = CacheIdentity("tiny", "a" * 64, "b" * 64, "c" * 64, TAPPED, SHAPE.width)
FORM = CacheFormat("bf16", "final", 0)
FP8 = CacheFormat("fp8", "final", 0)
TOPK = CacheFormat("bf16", "topk", 5)
ENGINE = "noise 1"
CONFIGS: dict[str, DrafterConfig] = {
    "dflash": DFlashConfig("dflash", 2, BLOCK, None, True, (), None),
    **{
        name: DSparkConfig("dspark", 2, BLOCK, None, head, rank, True, (), None)
        for name, head, rank in (("dspark", "markov", 5), ("gated", "gated", 5), ("rnn", "rnn", 5), ("headless", "none", 0))
    },
}
CONFIGS |= {"one_plus_n": DSparkConfig("dspark", 2, BLOCK, None, "markov", 5, False, (), None)}
CONFIGS |= {"sliding": DSparkConfig("dspark", 2, BLOCK, None, "markov", 5, True, (1,), 3)}
CONFIGS |= {"eagle3": Eagle3Config("eagle3", BLOCK, None), "mtp": MtpConfig("mtp", 1, None)}
TRAINING = TrainingConfig(
    lr=3e-3, muon_lr=None, num_steps=20, warmup_fraction=0.2, weight_decay=0.0, clip_norm=1.0, batch_sequences=4, num_anchors=6, precision="fp64", seed=7,
    window_shards=2, row_uses=1, select_every_steps=5, checkpoint_every_steps=10, refit_confidence=False, loss=LossConfig(alpha_ce=0.1, alpha_soft_ce=0.0, alpha_tv=0.9, alpha_confidence=1.0, position_decay=4.0),
)  # fmt: skip


def packed(tapped_BTLD: Tensor, next_tokens_BT: Tensor) -> PackedContext:
    """Contexts of equal length, one after the other."""
    return PackedContext.of(tapped_BTLD.flatten(0, 1), next_tokens_BT.flatten(), [tapped_BTLD.shape[1]] * len(tapped_BTLD))


def contexts(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """States [B, T, L, D] and following tokens [B, T] of a batch, padded."""
    return batch.context.padded(batch.context.tapped_SLD), batch.context.padded(batch.context.next_tokens_S)


def tapped_layers(kind: str) -> tuple[int, ...]:
    return (SHAPE.num_layers - 1,) if kind == "mtp" else TAPPED


MEMORY = Memory(micro_batch_sequences=4, loss_chunk_rows=5)


def losses(drafter: Drafter, batch: TrainingBatch, config: LossConfig = TRAINING.loss, chunk_rows: int = 5) -> Losses:
    """The loss of one batch, as if it were a whole step."""
    weights = loss_weights(batch, drafter.head, config, torch.float64)
    return block_losses(drafter(batch), batch, drafter.head, weights, Denominators(weights.sum, weights.sum_ce), config, chunk_rows)


def draft_logits(drafter: Drafter, batch: TrainingBatch) -> Tensor:
    """[B, A, K, W], in full."""
    output = drafter(batch)
    return drafter.head.logits(output.hidden_BAKD, output.bias_BAKR)


def target_probs(drafter: Drafter, batch: TrainingBatch) -> Tensor:
    """p_t over the draft vocabulary [B, A, K, W]; 0 on rows that do not count."""
    probs = drafter.lm_head_WD.new_zeros(*batch.valid_BAK.shape, len(drafter.draft_ids_W))
    probs[batch.valid_BAK] = losses_target_probs(batch.target_rows(), drafter.head, slice(None))
    return probs


def tables(shape: TargetShape = SHAPE, seed: int = 1) -> FrozenTables:
    generator = np.random.default_rng(seed)
    embedding, head = (torch.from_numpy(generator.normal(0.0, scale, (shape.vocab_size, shape.width))) for scale in (1.0, 0.5))
    return FrozenTables(embedding, head, torch.from_numpy(generator.normal(1.0, 0.3, shape.width)))


def drafter(kind: str, draft_ids: Tensor | None = None, shape: TargetShape = SHAPE, seed: int = 2) -> Drafter:
    """An fp64 drafter whose every parameter, norms and biases too, is random and far from its initial value."""
    model = build_drafter(CONFIGS[kind], shape, tapped_layers(kind), MASK, tables(shape), draft_ids).double()
    generator = np.random.default_rng(seed)
    for _, parameter in sorted(model.named_parameters()):
        centre, scale = (1.0, 0.3) if parameter.dim() == 1 and len(parameter) > 1 else (0.0, 0.3)
        parameter.data.copy_(torch.from_numpy(generator.normal(centre, scale, parameter.shape)))
    return model


def loss_mask(num_prompt: int, num_response: int, hole: Sequence[int] = ()) -> np.ndarray:
    mask = np.array([0] * num_prompt + [1] * num_response, dtype=np.uint8)
    mask[list(hole)] = 0
    return mask


def row(name: str, mask: np.ndarray, seed: int, split: str = "train", form: CacheFormat = FORM, shape: TargetShape = SHAPE) -> CacheRow:
    """A sequence with random tokens and states in a form of the cache; its log-sum-exp is that of `tables(shape)`."""
    generator = np.random.default_rng(seed)
    tapped, final = noise(generator, mask, shape)
    tokens = generator.integers(0, MASK, len(mask)).astype(np.int32)
    stored = encode(final, form.dtype) if form.logits == "final" else None
    logits_SV = (final.double() if stored is None else values(stored)) @ tables(shape).lm_head_VD.T
    if shape.logit_soft_cap is not None:
        logits_SV = shape.logit_soft_cap * torch.tanh(logits_SV / shape.logit_soft_cap)
    found = CacheRow(
        name, f"domain-{seed % 2}", split, f'{{"seed": {seed}}}', tokens, mask, encode(tapped, form.dtype),
        logits_SV.logsumexp(-1).numpy().astype(np.float32), stored,
    )  # fmt: skip
    if stored is None:
        best = logits_SV.topk(form.num_top_logits)
        found.top_ids_SC, found.top_logits_SC = best.indices.int().numpy(), best.values.float().numpy()
    return found


def noise(generator: np.random.Generator, mask: np.ndarray, shape: TargetShape = SHAPE) -> tuple[Tensor, Tensor]:
    """What a target might have computed for a sequence, bf16: tapped [P, L, D] and final [S, D]."""
    sizes = (num_tapped(mask), len(TAPPED), shape.width), (len(supervised_rows(mask)), shape.width)
    tapped, final = (torch.from_numpy(generator.normal(0.0, 1.0, size)).bfloat16() for size in sizes)
    return tapped, final


def values(states: States) -> Tensor:
    """What stored states are worth, in fp64, by torch's own types."""
    if states.exponents is None:
        return torch.from_numpy(states.codes.copy()).view(torch.bfloat16).double()
    scale = torch.from_numpy(states.exponents.astype(np.float64)).exp2()
    return torch.from_numpy(states.codes.copy()).view(torch.float8_e4m3fn).double() * scale[..., None]


def rows(num_train: int = 8, num_select: int = 3, form: CacheFormat = FORM) -> list[CacheRow]:
    """Prompts of 2-5 tokens, responses of 6-13, one of them with a hole in its loss mask."""
    masks = [loss_mask(2 + i % 4, 6 + (5 * i) % 8, hole=[9] if i == 2 else []) for i in range(num_train + num_select)]
    return [row(f"row-{i}", mask, 100 + i, "train" if i < num_train else "select", form) for i, mask in enumerate(masks)]


class Remote:
    """A folder behind a storage that is not local: nothing can be mapped, and every range that is read is noted."""

    def __init__(self, folder: Path) -> None:
        self._inner, self.ranges = LocalStorage(str(folder)), []
        self.uri = f"remote://{folder.name}"

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        self.ranges.append((name, start, end))
        return self._inner.read_range(name, start, end)


def write_cache(
    place: Path | Storage,
    sequences: Sequence[CacheRow],
    rows_per_shard: int = 4,
    form: CacheFormat = FORM,
    identity: CacheIdentity = IDENTITY,
) -> CacheReader:
    storage = LocalStorage(str(place)) if isinstance(place, Path) else place
    starts = range(0, len(sequences), rows_per_shard)
    parts = [sequences[start : start + rows_per_shard] for start in starts]
    receipts = [write_shard(storage, f"shard-{i:05d}", part, identity, form, ENGINE) for i, part in enumerate(parts)]
    write_manifest(storage, receipts, identity, form)
    return CacheReader(storage, identity)


def training_data(cache: CacheReader, config: TrainingConfig = TRAINING) -> TrainingData:
    train, select = CachedRows(cache, "train"), CachedRows(cache, "select")
    order = RowOrder(train.shard_rows, config.window_shards, config.row_uses, config.seed)
    return TrainingData(order, train, select, len(select.numbers), BLOCK)
