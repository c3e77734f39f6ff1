"""The border where YAML becomes frozen dataclasses: the only file that imports hydra, omegaconf or pydantic.

Hydra composes `conf/`, this file resolves it once and validates it. Beyond it there is no DictConfig, no default and no
unchecked type. A wrong key, type or value is answered with its dotted path, the value, the rule and the fix.
"""

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from dspark.config import DFlashConfig, DSparkConfig, LossConfig, TrainingConfig

PROJECT_ROOT = Path(__file__).resolve().parents[1]
STEPS = ("prompts", "regenerate", "cache_targets", "train", "evaluate")
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
    name: str
    source: Annotated[LocalSource | HubSource | RandomSource, Field(discriminator="kind")]
    tapped_layers: tuple[int, ...]
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
    engine: Literal["vllm", "transformers"]


@dataclass(frozen=True)
class DecodingSetting:
    """One way of decoding the test prompts. `ablation`: draft with the Markov head's bias switched off."""

    temperature: float
    draft_mode: Literal["probabilistic", "greedy"]
    ablation: Literal["no_markov"] | None


@dataclass(frozen=True)
class EvaluateStage:
    """`benchmarks`: name -> JSONL uri, decoded beside the test split; first turns only, as in the paper's tables."""

    max_new_tokens: int
    batch_size: int
    precision: Literal["bf16", "fp32"]
    seed: int
    settings: tuple[DecodingSetting, ...]
    num_lossless_prompts: int
    max_prompts_per_source: int
    benchmarks: Mapping[str, str]


@dataclass(frozen=True)
class StageConfig:
    prompts: PromptsStage
    regenerate: RegenerateStage
    cache_targets: CacheTargetsStage
    train: TrainingConfig
    evaluate: EvaluateStage


# --- where it runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterConfig:
    """Where it runs: never part of a fingerprint."""

    executor: Literal["local", "ray"]
    address: str | None
    root: str
    tracker: Literal["mlflow", "none"]
    tracking_uri: str | None
    engine_workers: int
    train_workers: int
    cpus_per_worker: int
    gpus_per_worker: int
    train_engine: Literal["local", "deepspeed"]
    zero_stage: Literal[0, 1, 2, 3]
    micro_batch_sequences: int
    max_attempts: int


@dataclass(frozen=True)
class Settings:
    mode: Literal["run", "plan", "status"]
    until: str | None
    rebuild: tuple[str, ...]
    target: TargetConfig
    drafter: Annotated[DFlashConfig | DSparkConfig, Field(discriminator="kind")]
    data: Annotated[FileData | HubData, Field(discriminator="kind")]
    stage: StageConfig
    cluster: ClusterConfig


# Unknown keys are errors in every record, also in those of the library, which knows nothing of pydantic.
for _record in (
    LocalSource, HubSource, RandomSource, SamplingConfig, TargetConfig, FileData, HubData, PromptsStage, RegenerateStage,
    CacheTargetsStage, DecodingSetting, EvaluateStage, StageConfig, ClusterConfig, DFlashConfig, DSparkConfig, LossConfig,
    TrainingConfig, Settings,
):  # fmt: skip
    with_config(ConfigDict(extra="forbid"))(_record)


def hydra_main(function: Callable[[Settings, dict[str, Any]], None]) -> None:
    """The command line: composes `conf/` with its overrides and calls `function` with the settings and the plain config.

    Hydra's own flags (--help, -m for sweeps, --cfg) work as everywhere; what cannot be composed is a ValueError.
    """
    import hydra
    from omegaconf import DictConfig

    if not any(word.startswith("-") for word in sys.argv[1:]):
        function(*compose(sys.argv[1:]))
        return

    @hydra.main(version_base="1.3", config_path=str(PROJECT_ROOT / "conf"), config_name="config")
    def main(composed: DictConfig) -> None:
        plain = _plain(composed)
        function(validate(plain), plain)

    main()


def compose(overrides: list[str]) -> tuple[Settings, dict[str, Any]]:
    """Settings from a list of overrides, and the plain config that they come from."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_ROOT / "conf")):
        try:
            plain = _plain(hydra_compose("config", overrides))
        except HydraException as error:
            raise ValueError(_explain_composition(error, _plain(hydra_compose("config")))) from None
    return validate(plain), plain


def _explain_composition(error: Exception, plain: Mapping[str, Any]) -> str:
    """Hydra's refusal in our words: which key or choice, and what is known there."""
    text = str(error)
    if found := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(found[1].split("."), plain)
    if found := re.search(r"Could not find '([^']+)'", text):
        group, _, name = found[1].rpartition("/")
        known = sorted(path.stem for path in (PROJECT_ROOT / "conf" / group).glob("*.yaml"))
        near = difflib.get_close_matches(name, known, n=1)
        return f"{group}: {name!r} is not one of {', '.join(known)}. Fix: {group}={near[0] if near else known[0]}"
    return f"command line: {text}. Fix: overrides look like stage.train.lr=3e-4; python -m pipelines --help lists them"


def _unknown_key(location: Sequence[object], plain: Mapping[str, Any]) -> str:
    siblings: Any = plain
    for part in location[:-1]:
        items: Any = dict(enumerate(siblings)) if isinstance(siblings, list) else siblings
        siblings = items.get(part, {}) if isinstance(items, Mapping) else {}
    known = [str(key) for key in siblings if key != location[-1]] if isinstance(siblings, Mapping) else []
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    fix = f"did you mean {'.'.join(map(str, [*location[:-1], near[0]]))}?" if near else f"known here: {', '.join(known) or 'nothing'}"
    return f"{'.'.join(map(str, location))}: unknown key. Fix: {fix}"


def _plain(composed: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def validate(plain: Mapping[str, Any]) -> Settings:
    """Plain data -> frozen dataclasses; ValueError lists every wrong field."""
    try:
        settings = TypeAdapter(Settings).validate_python(dict(plain))
    except ValidationError as error:
        raise ValueError("\n".join(_explain(dict(item), plain) for item in error.errors())) from None
    _check(settings)
    return settings


def _explain(error: dict[str, Any], plain: Mapping[str, Any]) -> str:
    """dotted path, value, rule, fix."""
    kinds = {"local", "hub", "random", "files", "dflash", "dspark"}
    location = [part for part in error["loc"] if part not in kinds or not isinstance(part, str)]
    path = ".".join(str(part) for part in location)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(location, plain)
    if error["type"] == "missing":
        return f"{path}: missing. Fix: give it a value, for example {path}=..."
    return f"{path}: {error['input']!r} is not valid: {error['msg']}. Fix: {path}=<a valid value>"


def _check(settings: Settings) -> None:
    """Rules between fields, checked before any work."""

    def require(holds: bool, path: str, value: object, rule: str, fix: str) -> None:
        if not holds:
            raise ValueError(f"{path}: {value!r}: {rule}. Fix: {fix}")

    stage, drafter, cluster, tapped = settings.stage, settings.drafter, settings.cluster, settings.target.tapped_layers
    require(settings.until is None or settings.until in STEPS, "until", settings.until, f"must be one of {', '.join(STEPS)}", "until=train")
    unknown = [name for name in settings.rebuild if name not in STEPS]
    require(not unknown, "rebuild", list(settings.rebuild), f"may only hold {', '.join(STEPS)}", "rebuild=[train]")
    require(
        bool(tapped) and list(tapped) == sorted(set(tapped)) and tapped[0] >= 0,
        "target.tapped_layers",
        list(tapped),
        "must be ascending and distinct, 0-based",
        "target.tapped_layers=[1,8,14]",
    )
    for path, value in (
        ("drafter.num_layers", drafter.num_layers),
        ("drafter.block_size", drafter.block_size),
        ("stage.train.num_steps", stage.train.num_steps),
    ):
        require(value >= 1, path, value, "must be at least 1", f"{path}=1")
    for name in ("lr", "muon_lr", "clip_norm", "batch_sequences", "num_anchors", "select_every_steps", "checkpoint_every_steps"):
        value = getattr(stage.train, name)
        require(value is None or value > 0, f"stage.train.{name}", value, "must be above 0", f"stage.train.{name}=<a positive number>")
    require(
        stage.train.muon_lr is None or stage.train.clip_norm is None,
        "stage.train.clip_norm",
        stage.train.clip_norm,
        "Muon's steps do not depend on the gradient's size, so nothing is clipped",
        "stage.train.clip_norm=null, or stage.train.muon_lr=null for AdamW alone",
    )
    require(
        0 <= stage.train.warmup_fraction < 1,
        "stage.train.warmup_fraction",
        stage.train.warmup_fraction,
        "must be in [0, 1)",
        "stage.train.warmup_fraction=0.04",
    )
    require(
        drafter.draft_vocab_size is None or drafter.draft_vocab_size >= 1,
        "drafter.draft_vocab_size",
        drafter.draft_vocab_size,
        "must be at least 1 or null",
        "drafter.draft_vocab_size=null",
    )
    if isinstance(drafter, DSparkConfig):
        require(
            drafter.markov_rank >= 1,
            "drafter.markov_rank",
            drafter.markov_rank,
            "a Markov head needs rank 1 or more",
            "drafter=dflash for a drafter without heads",
        )
    require(
        set(stage.prompts.fractions) == set(SPLITS),
        "stage.prompts.fractions",
        dict(stage.prompts.fractions),
        f"must name exactly {', '.join(SPLITS)}",
        "see conf/stage/prompts.yaml",
    )
    total = sum(stage.prompts.fractions.values())
    require(abs(total - 1.0) < 1e-6, "stage.prompts.fractions", total, "must add up to 1", "see conf/stage/prompts.yaml")
    for path, value in (
        ("stage.regenerate.max_new_tokens", stage.regenerate.max_new_tokens),
        ("stage.evaluate.max_new_tokens", stage.evaluate.max_new_tokens),
    ):
        require(
            1 <= value < settings.target.max_length_tokens,
            path,
            value,
            f"must be between 1 and target.max_length_tokens - 1 = {settings.target.max_length_tokens - 1}",
            f"{path}=128",
        )
    sampling = settings.target.sampling
    is_plain = sampling.top_p == 1.0 and sampling.top_k == 0
    require(
        stage.regenerate.engine == "vllm" or is_plain,
        "target.sampling",
        sampling,
        "the transformers engine knows no top_p or top_k",
        "stage.regenerate.engine=vllm",
    )
    require(
        cluster.train_engine == "local" or cluster.executor == "ray",
        "cluster.train_engine",
        cluster.train_engine,
        "DeepSpeed runs under Ray",
        "cluster=ray",
    )
    require(
        cluster.train_workers == 1 or cluster.train_engine == "deepspeed",
        "cluster.train_workers",
        cluster.train_workers,
        "several workers need DeepSpeed",
        "cluster.train_engine=deepspeed",
    )
    per_step = cluster.train_workers * min(cluster.micro_batch_sequences, max(stage.train.batch_sequences // cluster.train_workers, 1))
    require(
        stage.train.batch_sequences % per_step == 0,
        "stage.train.batch_sequences",
        stage.train.batch_sequences,
        f"must be a multiple of {per_step} (workers x micro-batch)",
        f"stage.train.batch_sequences={per_step}",
    )
