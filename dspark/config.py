"""Every choice that decides what a drafter is, as frozen dataclasses without defaults (those live once, in `conf/`).

Standard library only: a plan hashes these records without importing torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DFlashConfig:
    """Block-parallel drafter without sequential or confidence head."""

    kind: Literal["dflash"]
    num_layers: int
    block_size: int  # K = gamma: draft tokens a block, in either layout
    draft_vocab_size: int | None  # most frequent response tokens kept; None = the target's whole vocabulary
    sample_from_anchor: bool  # the anchor's row predicts the first draft token; False (1+N): it predicts none, one row more does
    sliding_layers: tuple[int, ...]  # whose rows see, of the context, the last `sliding_window` positions up to their own
    sliding_window: int | None  # None without such layers


@dataclass(frozen=True)
class DSparkConfig:
    """The DFlash backbone plus a sequential head (Eq. 5-6) and the confidence head (Eq. 7)."""

    kind: Literal["dspark"]
    num_layers: int
    block_size: int
    draft_vocab_size: int | None
    sequential_head: Literal["markov", "gated", "rnn", "none"]
    markov_rank: int  # of the sequential head; 0 with none
    sample_from_anchor: bool  # these three as DFlashConfig's
    sliding_layers: tuple[int, ...]
    sliding_window: int | None


@dataclass(frozen=True)
class Eagle3Config:
    """One layer that drafts token by token on its own previous output; trained with as many steps of training-time test as a
    block has tokens."""

    kind: Literal["eagle3"]
    block_size: int
    draft_vocab_size: int | None


@dataclass(frozen=True)
class MtpConfig:
    """One transformer block on the target's final state and the next token's embedding. One draft token: MTP-1."""

    kind: Literal["mtp"]
    block_size: int
    draft_vocab_size: int | None


DrafterConfig = DFlashConfig | DSparkConfig | Eagle3Config | MtpConfig
CONFIGS: dict[str, type[DFlashConfig | DSparkConfig | Eagle3Config | MtpConfig]] = {
    "dflash": DFlashConfig, "dspark": DSparkConfig, "eagle3": Eagle3Config, "mtp": MtpConfig,
}  # fmt: skip


@dataclass(frozen=True)
class LossConfig:
    """Weights of Eq. 9-12. `position_decay` is gamma_loss in w_k = exp(-k / gamma_loss); DeepSpec's configs use 4.0.
    `alpha_soft_ce` weighs the cross-entropy against the target's whole distribution, EAGLE-3's loss."""

    alpha_ce: float
    alpha_soft_ce: float
    alpha_tv: float
    alpha_confidence: float
    position_decay: float


@dataclass(frozen=True)
class TrainingConfig:
    """The optimisation. Sequences are rows of the target cache; `num_anchors` counts per sequence."""

    lr: float  # AdamW
    muon_lr: float | None  # the backbone's matrices take Muon steps of this rate; None: AdamW for everything
    num_steps: int
    warmup_fraction: float
    weight_decay: float
    clip_norm: float | None  # of the gradient; None with Muon, whose steps do not depend on the gradient's size
    batch_sequences: int  # sequences an optimiser step, over all ranks and micro-batches
    num_anchors: int
    precision: Literal["bf16", "fp32", "fp64"]  # bf16: compute in bf16, master weights in fp32
    seed: int
    window_shards: int  # rows are shuffled among those of so many shards
    row_uses: int  # a window is gone through so often before the next one
    select_every_steps: int
    checkpoint_every_steps: int
    refit_confidence: bool  # after training, on the select rows (dspark/refit.py); without a confidence head nothing
    loss: LossConfig


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor`. The fields of a scaling have the names that transformers gives them in config.json."""

    rope_type: Literal["linear"]
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequencies that turn less than `low_freq_factor` times within the original context are divided by `factor`, those that
    turn more than `high_freq_factor` times are kept, and between them both are blended."""

    rope_type: Literal["llama3"]
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens


@dataclass(frozen=True)
class YarnScaling:
    """As Llama3Scaling between `beta_slow` and `beta_fast` turns, but blended by index; cos and sin are times `attention_factor`."""

    rope_type: Literal["yarn"]
    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int  # tokens
    truncate: bool  # whether the ends of the blend are whole indices


@dataclass(frozen=True)
class ProportionalScaling:
    """Frequencies divided by `factor`, and only the first `turned_pairs` pairs of a head turn at all (Gemma 4)."""

    rope_type: Literal["proportional"]
    factor: float
    turned_pairs: int


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | ProportionalScaling


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: a position turns components i and i + rotated_width / 2 of a head (NeoX style) by
    theta^(-2i / rotated_width) radians, scaled. Components from `rotated_width` on are not turned."""

    theta: float
    rotated_width: int
    scaling: RopeScaling | None  # None: the default rotary embedding


@dataclass(frozen=True)
class TargetShape:
    """Facts of a target that its drafter copies, read from the target's config.json (families.py)."""

    model_type: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    vocab_size: int
    norm_epsilon: float
    rope: Rope
    embedding_scale: float
    norm_weight_offset: float
    logit_soft_cap: float | None
