"""Every setting of the pipeline, as frozen dataclasses without defaults (those live once, in `conf/`).

Standard library only. `config.py` fills them from YAML and the command line; whoever reads a setting takes its type from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dspark.config import DrafterConfig, TrainingConfig

STEPS = (
    "prompts", "regenerate", "cache_targets", "train", "evaluate",
    "trace", "calibrate", "profile_sps", "schedule", "publish",
)  # fmt: skip
SPLITS = ("train", "select", "calibrate", "test")


# --- target ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalSource:
    """A Hugging Face folder on disk; relative paths start at the project's root."""

    kind: Literal["local"]
    path: str


@dataclass(frozen=True)
class HubSource:
    """A model of the Hugging Face Hub at a fixed revision, fetched by the workers."""

    kind: Literal["hub"]
    repository: str
    revision: str


@dataclass(frozen=True)
class RandomSource:
    """A Llama of random weights with a byte tokenizer, made on the spot; for tests."""

    kind: Literal["random"]
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    mlp_width: int
    seed: int


@dataclass(frozen=True)
class SamplingConfig:
    """The target's recommended sampling. top_p 1.0 and top_k 0 switch these filters off."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class TargetConfig:
    """`width` of its hidden states and `num_layers`: a plan needs them, and reads no model."""

    name: str
    source: LocalSource | HubSource | RandomSource
    width: int
    num_layers: int
    tapped_layers: tuple[int, ...]  # of an mtp drafter the last layer alone, whatever stands here
    mask_token_id: int
    sampling: SamplingConfig
    max_length_tokens: int


# --- data and stages ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileData:
    """JSONL files, one {"turns": [...], "domain": ..., "system"?: ..., "template"?: ...} a line."""

    kind: Literal["files"]
    name: str
    uris: tuple[str, ...]


@dataclass(frozen=True)
class HubData:
    """A conversation data set of the Hugging Face Hub, loaded with `datasets`; `domains` maps its source column."""

    kind: Literal["hub"]
    name: str
    repository: str
    revision: str
    split: str
    max_rows: int
    domains: Mapping[str, str]


@dataclass(frozen=True)
class PromptsStage:
    """`fractions` split by hash of the prompt id (or template); `limits` cap a split, filled by `mix` of domains."""

    fractions: Mapping[str, float]
    limits: Mapping[str, int]
    mix: Mapping[str, float]


@dataclass(frozen=True)
class RegenerateStage:
    engine: Literal["vllm", "transformers"]
    max_new_tokens: int
    shard_prompts: int


@dataclass(frozen=True)
class CacheTargetsStage:
    """What is stored, and (never part of a fingerprint) how and where to: `mode` and everything after it.

    `dtype` fp8 is lossy (dspark/states.py). `logits` topk stores the target's `num_top_logits` best logits instead of its
    final state. `stream` keeps nothing: states pass through `window_bytes` while training reads them.
    """

    engine: Literal["vllm", "transformers"]
    dtype: Literal["bf16", "fp8"]
    logits: Literal["final", "topk"]
    num_top_logits: int
    mode: Literal["store", "stream"]
    compression: Literal["none", "zstd"]
    max_bytes: int | None
    window_bytes: int
    assumed_prompt_tokens: int  # mean of a row, for a plan that has nothing to measure yet
    assumed_response_tokens: int


@dataclass(frozen=True)
class DecodingSetting:
    """One way of decoding prompts. `ablation`: draft with the Markov head's bias switched off.

    `policy`, how much of each draft is verified: verify_all, fixed_<tokens> or threshold_<raw confidence>. The last three have
    defaults, since a setting is a line in a list, which composition cannot complete.
    """

    temperature: float
    draft_mode: Literal["probabilistic", "greedy"]
    ablation: Literal["no_markov"] | None
    top_k: int = 0
    top_p: float = 1.0
    policy: str = "verify_all"


@dataclass(frozen=True)
class ServingStage:
    """What a vLLM server is measured with, at temperature 0. ngram: its prompt lookup beside ours, n-grams of `min_ngram` to `max_ngram`
    tokens; dspark: the trained drafter. `tolerance`: of the relative difference in accepted tokens a draft."""

    method: Literal["ngram", "dspark"]
    num_speculative_tokens: int
    min_ngram: int
    max_ngram: int
    tolerance: float


@dataclass(frozen=True)
class EvaluateStage:
    """`benchmarks`: name -> JSONL uri, or `hub` for one of pipelines/benchmarks.py; decoded beside the test split.

    `engine` vllm measures a server beside what is decoded here, as `serving` says; without it `serving` is not looked at.
    `turns` first is the mode of the paper's tables; all goes on with the target's own answers, as they were decoded.
    `context_edges_tokens` and `thresholds` are views of the same rounds.
    """

    engine: Literal["decoding", "vllm"]
    serving: ServingStage | None
    max_new_tokens: int
    batch_size: int
    precision: Literal["bf16", "fp32"]
    seed: int
    settings: tuple[DecodingSetting, ...]
    num_lossless_prompts: int
    max_prompts_per_source: int
    benchmarks: Mapping[str, str] | None
    turns: Literal["first", "all"]
    context_edges_tokens: tuple[int, ...]
    thresholds: tuple[float, ...]  # of the conditional confidence


@dataclass(frozen=True)
class TraceStage:
    """The first of `settings` is what serving will do: it is calibrated, replayed by schedule and published. Of others calibrate reports."""

    settings: tuple[DecodingSetting, ...]
    max_new_tokens: int
    batch_size: int
    precision: Literal["bf16", "fp32"]
    seed: int


@dataclass(frozen=True)
class CalibrateStage:
    num_bins: int
    min_rounds: int  # of the calibrate split; a position with fewer keeps its raw confidences
    num_folds: int  # of prompts, for the cross-fitted table
    num_resamples: int  # of prompts, for the intervals


@dataclass(frozen=True)
class ProfileSpsStage:
    """`batch_tokens`: verified in one step, anchors included; of R requests the grid's sizes from R to R * (K + 1), and these two."""

    engines: tuple[Literal["decoding", "vllm"], ...]
    batch_tokens: tuple[int, ...]
    num_requests: tuple[int, ...]
    context_tokens: tuple[int, ...]
    num_repeats: int
    max_spread: float  # interquartile range over median, of four fifths of all sizes at least
    min_rank_correlation: float  # of time with size, in the steps of the most requests
    precision: Literal["bf16", "fp32"]
    seed: int


@dataclass(frozen=True)
class ScheduleStage:
    """What the fields from `num_steps` on mean is said at `dspark.simulate.ReplayConfig`; `num_resamples`: of texts, for the intervals."""

    concurrencies: tuple[int, ...]
    thresholds: tuple[float, ...]
    num_resamples: int
    num_steps: int
    num_warmup_steps: int
    num_rounds: int
    lag_rounds: int
    new_requests: Literal["mean", "one"]
    skips_by: Literal["outcomes", "confidences"]
    window_rounds: int
    probe_share: float
    seed: int


@dataclass(frozen=True)
class PublishStage:
    name: str  # of the registered model


@dataclass(frozen=True)
class StageConfig:
    prompts: PromptsStage
    regenerate: RegenerateStage
    cache_targets: CacheTargetsStage
    train: TrainingConfig
    evaluate: EvaluateStage
    trace: TraceStage
    calibrate: CalibrateStage
    profile_sps: ProfileSpsStage
    schedule: ScheduleStage
    publish: PublishStage


# --- where it runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterConfig:
    """Where it runs: never part of a fingerprint."""

    executor: Literal["local", "ray"]
    address: str | None
    root: str
    tracker: Literal["mlflow", "none"]
    tracking_uri: str | None
    serving_url: str | None  # of a vLLM server that stage.evaluate.engine=vllm measures; null: one of the step's own
    engine_workers: int
    train_workers: int
    cpus_per_worker: int
    gpus_per_worker: int
    train_engine: Literal["local", "deepspeed"]
    zero_stage: Literal[0, 1, 2, 3]
    micro_batch_sequences: int
    loss_chunk_rows: int
    max_attempts: int


@dataclass(frozen=True)
class Settings:
    """`rounds` and `release` are read by mode=drift alone."""

    mode: Literal["run", "plan", "status", "verify", "drift"]
    rounds: str | None
    release: str | None
    until: str | None
    rebuild: tuple[str, ...]
    target: TargetConfig
    drafter: DrafterConfig
    data: FileData | HubData
    stage: StageConfig
    cluster: ClusterConfig


RECORDS = (
    LocalSource, HubSource, RandomSource, SamplingConfig, TargetConfig, FileData, HubData, PromptsStage, RegenerateStage,
    CacheTargetsStage, DecodingSetting, ServingStage, EvaluateStage, TraceStage, CalibrateStage, ProfileSpsStage, ScheduleStage,
    PublishStage, StageConfig, ClusterConfig, Settings,
)  # fmt: skip
