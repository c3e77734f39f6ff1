"""THE RECIPE: every step of the pipeline in reading order, with what it is made from.

    prompts ─▶ regenerate ─▶ cache_targets ─▶ train ─┬─▶ evaluate ──────────────────────────────┐
       │                                             ├─▶ trace ─▶ calibrate ─┬─▶ schedule ─┬─▶ publish
       └──── held-out prompts ──▶ evaluate, trace    └─▶ profile_sps ────────┘             ┘

A step's config holds exactly what decides its artifact, named as a user types it: the part called like the step is
`stage.<step>`, the rest are `target.*`, `drafter.*`, `data.*`. What only says where it runs is in its Resources. The second
half needs a confidence head: a drafter without one ends with its evaluation.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dspark.config import DrafterConfig, DSparkConfig, TrainingConfig
from pipelines import artifacts, targets
from pipelines import stack as stacks
from pipelines.backends.object_store import open_storage
from pipelines.benchmarks import DOMAINS, HUB, ON_HUB, HubBenchmark
from pipelines.config import PROJECT_ROOT
from pipelines.dag import Resources, Step
from pipelines.settings import (
    STEPS,
    CacheTargetsStage,
    CalibrateStage,
    EvaluateStage,
    FileData,
    HubData,
    ProfileSpsStage,
    PromptsStage,
    PublishStage,
    RegenerateStage,
    SamplingConfig,
    ScheduleStage,
    Settings,
    TraceStage,
)
from pipelines.targets import TargetIdentity


@dataclass(frozen=True)
class DataIdentity:
    """Prompt data by content: file name -> SHA-256, or a data set at a revision."""

    name: str
    files: Mapping[str, str]
    hub: HubData | None


@dataclass(frozen=True)
class PromptsConfig:
    prompts: PromptsStage
    data: DataIdentity


@dataclass(frozen=True)
class RegenerateConfig:
    regenerate: RegenerateStage
    target: TargetIdentity
    sampling: SamplingConfig
    max_length_tokens: int


@dataclass(frozen=True)
class CacheContent:
    """The part of stage.cache_targets that decides what is stored; the rest says how, and stays in the resources."""

    engine: str
    dtype: Literal["bf16", "fp8"]
    logits: Literal["final", "topk"]
    num_top_logits: int  # 0 with final

    @staticmethod
    def of(stage: CacheTargetsStage) -> "CacheContent":
        return CacheContent(stage.engine, stage.dtype, stage.logits, stage.num_top_logits if stage.logits == "topk" else 0)


@dataclass(frozen=True)
class CacheTargetsConfig:
    cache_targets: CacheContent
    target: TargetIdentity
    tapped_layers: tuple[int, ...]
    width: int
    mask_token_id: int


@dataclass(frozen=True)
class TrainConfig:
    train: TrainingConfig
    target: TargetIdentity
    tapped_layers: tuple[int, ...]
    width: int
    mask_token_id: int
    drafter: DrafterConfig


@dataclass(frozen=True)
class BenchmarkIdentity:
    """A benchmark by content: the SHA-256 of its file, or a data set of the Hub. `domain`: of rows that name none."""

    domain: str
    sha256: str | None
    hub: HubBenchmark | None


@dataclass(frozen=True)
class EvaluateConfig:
    evaluate: EvaluateStage
    target: TargetIdentity
    max_length_tokens: int
    benchmarks: Mapping[str, BenchmarkIdentity]


@dataclass(frozen=True)
class TraceConfig:
    trace: TraceStage
    target: TargetIdentity
    max_length_tokens: int


@dataclass(frozen=True)
class CalibrateConfig:
    calibrate: CalibrateStage
    block_size: int


@dataclass(frozen=True)
class ProfileSpsConfig:
    """The one step whose content is a measurement: the stack that it holds for is part of what it is."""

    profile_sps: ProfileSpsStage
    target: TargetIdentity
    block_size: int
    stack: stacks.Stack


@dataclass(frozen=True)
class ScheduleConfig:
    """`calibrate`: the other calibrations are fitted as the released one was."""

    schedule: ScheduleStage
    calibrate: CalibrateStage
    block_size: int


@dataclass(frozen=True)
class PublishConfig:
    publish: PublishStage
    target: TargetIdentity
    block_size: int


def build(settings: Settings) -> list[Step]:
    """The steps, wired, up to `until`. Reads only sidecars and prompt files."""
    target, stage, cluster = settings.target, settings.stage, settings.cluster
    identity = targets.identify(target)
    targets.check(target)
    drafter_name = f"{target.name}-{settings.drafter.kind}"
    here = Resources(target_uri=targets.uri(target), max_attempts=cluster.max_attempts)
    engines = replace(here, num_workers=cluster.engine_workers, num_cpus=cluster.cpus_per_worker, num_gpus=cluster.gpus_per_worker)
    gang = replace(
        engines,
        num_workers=cluster.train_workers,
        train_engine=cluster.train_engine,
        zero_stage=cluster.zero_stage,
        micro_batch_sequences=cluster.micro_batch_sequences,
        loss_chunk_rows=cluster.loss_chunk_rows,
    )
    data, data_uris = _identify_data(settings.data)
    places = stage.evaluate.benchmarks or {}
    benchmark_uris = {name: absolute(uri) for name, uri in places.items() if uri != HUB}
    benchmarks = {name: _identify_benchmark(name, benchmark_uris.get(name)) for name in places}

    # A drafter without a Markov head has nothing to switch off.
    has_markov = isinstance(settings.drafter, DSparkConfig)
    decoding = tuple(setting for setting in stage.evaluate.settings if has_markov or setting.ablation != "no_markov")

    prompts = Step(
        "prompts",
        1,
        "pipelines.stages.prompts:run",
        PromptsConfig(stage.prompts, data),
        {},
        artifacts.PromptSet,
        data.name,
        replace(here, files=data_uris),
    )
    regenerate = Step(
        "regenerate",
        1,
        "pipelines.stages.regenerate:run",
        RegenerateConfig(stage.regenerate, identity, target.sampling, target.max_length_tokens),
        {"prompts": prompts},
        artifacts.Corpus,
        target.name,
        engines,
    )
    cached, is_streamed = stage.cache_targets, stage.cache_targets.mode == "stream"
    if is_streamed:  # engines and training share the machines
        gang = replace(gang, cpu_share=0.5, num_producers=cluster.engine_workers)
    cache_targets = Step(
        "cache_targets",
        2,
        "pipelines.stages.cache_targets:run",
        CacheTargetsConfig(CacheContent.of(cached), identity, target.tapped_layers, target.width, target.mask_token_id),
        {"corpus": regenerate},
        artifacts.TargetCache,
        target.name,
        replace(engines, cache=cached),
        is_streamed,
    )
    train = Step(
        "train",
        3,
        "pipelines.stages.train:run",
        TrainConfig(stage.train, identity, target.tapped_layers, target.width, target.mask_token_id, settings.drafter),
        {"corpus": regenerate, "cache": cache_targets},
        artifacts.Drafter,
        drafter_name,
        replace(gang, cache=cached),
    )
    serving = stage.evaluate.serving if stage.evaluate.engine == "vllm" else None
    evaluate = Step(
        "evaluate",
        4,
        "pipelines.stages.evaluate:run",
        # Where a benchmark lies is not what it is: the stage's uris are replaced by checksums.
        EvaluateConfig(
            replace(stage.evaluate, settings=decoding, benchmarks=None, serving=serving), identity, target.max_length_tokens, benchmarks
        ),
        {"prompts": prompts, "drafter": train},
        artifacts.EvalReport,
        drafter_name,
        replace(engines, files=benchmark_uris, serving_url=cluster.serving_url),
    )
    steps = [prompts, regenerate, cache_targets, train, evaluate]
    if isinstance(settings.drafter, DSparkConfig):
        steps += _second_half(settings, identity, drafter_name, engines, here, prompts, train, evaluate)
    names = tuple(step.name for step in steps)
    assert names == STEPS[: len(names)]
    if settings.until and settings.until not in names:
        raise ValueError(
            f"until: {settings.until!r}: a {settings.drafter.kind} drafter has no confidence head, its last step is {names[-1]}. Fix: until={names[-1]}"
        )
    return steps[: names.index(settings.until) + 1] if settings.until else steps


def _second_half(
    settings: Settings,
    identity: TargetIdentity,
    label: str,
    engines: Resources,
    here: Resources,
    prompts: Step,
    train: Step,
    evaluate: Step,
) -> list[Step]:
    """From a trained drafter with a confidence head to its release."""
    stage, block_size = settings.stage, settings.drafter.block_size
    trace = Step(
        "trace",
        3,
        "pipelines.stages.trace:run",
        TraceConfig(stage.trace, identity, settings.target.max_length_tokens),
        {"prompts": prompts, "drafter": train},
        artifacts.Rounds,
        label,
        engines,
    )
    calibrate = Step(
        "calibrate",
        2,
        "pipelines.stages.calibrate:run",
        CalibrateConfig(stage.calibrate, block_size),
        {"rounds": trace},
        artifacts.Calibration,
        label,
        here,
    )
    profile_sps = Step(
        "profile_sps",
        5,
        "pipelines.stages.profile_sps:run",
        ProfileSpsConfig(stage.profile_sps, identity, block_size, stacks.probe(engines.num_cpus, engines.num_gpus)),
        {"drafter": train},
        artifacts.SpsProfile,
        label,
        replace(engines, num_workers=1),
    )
    schedule = Step(
        "schedule",
        4,
        "pipelines.stages.schedule:run",
        ScheduleConfig(stage.schedule, stage.calibrate, block_size),
        {"rounds": trace, "calibration": calibrate, "profile": profile_sps},
        artifacts.ScheduleReport,
        label,
        here,
    )
    publish = Step(
        "publish",
        2,
        "pipelines.stages.publish:run",
        PublishConfig(stage.publish, identity, block_size),
        {"drafter": train, "report": evaluate, "calibration": calibrate, "profile": profile_sps, "schedule": schedule},
        artifacts.Release,
        label,
        here,
    )
    return [trace, calibrate, profile_sps, schedule, publish]


def absolute(uri: str) -> str:
    """Relative paths start at the project's root, whatever the working directory of a worker is."""
    return uri if "://" in uri else str(PROJECT_ROOT / uri)


def _identify_data(data: FileData | HubData) -> tuple[DataIdentity, dict[str, str]]:
    if isinstance(data, HubData):
        return DataIdentity(data.name, {}, data), {}
    uris = {Path(uri).name: absolute(uri) for uri in data.uris}
    if len(uris) < len(data.uris) or not uris:
        raise ValueError(
            f"data.uris: {list(data.uris)} must name at least one file, each of another name. Fix: rename one, or see conf/data/bundled.yaml"
        )
    return DataIdentity(data.name, {name: _sha256("data.uris", uri) for name, uri in uris.items()}, None), uris


def _identify_benchmark(name: str, uri: str | None) -> BenchmarkIdentity:
    """A file where it has a uri, else the data set of its name."""
    domain = DOMAINS.get(name, name)
    if uri is None:
        return BenchmarkIdentity(domain, None, ON_HUB[name])
    return BenchmarkIdentity(domain, _sha256(f"stage.evaluate.benchmarks.{name}", uri), None)


def _sha256(field: str, uri: str) -> str:
    folder, _, name = uri.rpartition("/")
    try:
        return hashlib.sha256(open_storage(folder).read(name)).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ValueError(f"{field}: {uri} does not exist. Fix: give a JSONL file") from None
