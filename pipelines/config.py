"""The border where YAML becomes frozen dataclasses: the only file that imports hydra, omegaconf or pydantic.

Hydra composes `conf/`, this file resolves it once and validates it into `settings.py`. Beyond it there is no DictConfig, no
default and no unchecked type. A wrong key, type or value is answered with its dotted path, the value, the rule and the fix.
"""

import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from dspark.config import CONFIGS, DFlashConfig, DSparkConfig, LossConfig, MtpConfig, TrainingConfig
from dspark.families import check_tapped_layers
from pipelines import settings as records
from pipelines.benchmarks import HUB, ON_HUB
from pipelines.settings import SPLITS, STEPS, Settings

PROJECT_ROOT = Path(__file__).resolve().parents[1]
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}

# The records know nothing of pydantic: unknown keys are errors in each of them, and unions are told apart by their kind.
for _record in (*CONFIGS.values(), LossConfig, TrainingConfig, *records.RECORDS):
    with_config(ConfigDict(extra="forbid"))(_record)
for _record, _name in ((records.TargetConfig, "source"), (Settings, "drafter"), (Settings, "data")):
    _field = next(field for field in dataclasses.fields(_record) if field.name == _name)
    _field.type = Annotated[_field.type, Field(discriminator="kind")]


def hydra_main(function: Callable[[dict[str, Any], list[str]], None]) -> None:
    """The command line: composes `conf/` with its overrides and calls `function` with the plain config and, for each point of
    a sweep, the overrides that make it.

    Hydra's own flags (--help, -m for sweeps, --cfg) work as everywhere; what cannot be composed is a ValueError.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig

    if not any(word.startswith("-") for word in sys.argv[1:]):
        function(compose(sys.argv[1:])[1], [])
        return

    _register()

    @hydra.main(version_base="1.3", config_path=str(PROJECT_ROOT / "conf"), config_name="config")
    def main(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        is_point = hydra_config.mode == RunMode.MULTIRUN
        function(_plain(composed), list(hydra_config.overrides.task) if is_point else [])

    main()


def compose(overrides: list[str]) -> tuple[Settings, dict[str, Any]]:
    """Settings from a list of overrides, and the plain config that they come from."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    _register()
    with initialize_config_dir(version_base="1.3", config_dir=str(PROJECT_ROOT / "conf")):
        try:
            plain = _plain(hydra_compose("config", overrides))
        except HydraException as error:
            raise ValueError(_explain_composition(error, _plain(hydra_compose("config")))) from None
    return validate(plain), plain


def _register() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("default_experiment", default_experiment, replace=True)


def default_experiment() -> str:
    """`small`, and on a processor that would emulate bf16, several times slower than fp32, `small_fp32`."""
    flags = set(CPU_INFO.read_text().split()) if CPU_INFO.is_file() else set[str]()
    return "small" if flags & BF16_FLAGS else "small_fp32"


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
    if isinstance(settings.drafter, MtpConfig):
        settings = dataclasses.replace(
            settings, target=dataclasses.replace(settings.target, tapped_layers=(settings.target.num_layers - 1,))
        )
    check_tapped_layers(settings.target.tapped_layers, settings.target.num_layers, settings.drafter.kind)
    return settings


def _explain(error: dict[str, Any], plain: Mapping[str, Any]) -> str:
    """dotted path, value, rule, fix."""
    kinds = {"local", "hub", "random", "files", *CONFIGS}
    location = [part for part in error["loc"] if part not in kinds or not isinstance(part, str)]
    path = ".".join(str(part) for part in location)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(location, plain)
    if error["type"] == "missing":
        return f"{path}: missing. Fix: give it a value, for example {path}=..."
    return f"{path}: {error['input']!r} is not valid: {error['msg']}. Fix: {path}=<a valid value>"


def require(holds: bool, path: str, value: object, rule: str, fix: str) -> None:
    if not holds:
        raise ValueError(f"{path}: {value!r}: {rule}. Fix: {fix}")


def _check_decoding(settings: Settings) -> None:
    drafter, evaluated, traced = settings.drafter, settings.stage.evaluate.settings, settings.stage.trace.settings
    lists = {"stage.evaluate.settings": evaluated, "stage.trace.settings": traced}
    for path, listed in lists.items():
        require(len(set(listed)) == len(listed), path, f"{len(listed)} settings", "two are the same", "name each once")
    fix = "stage.trace.settings=[{temperature: 0, draft_mode: greedy, ablation: null}]"
    require(len(traced) > 0, "stage.trace.settings", list(traced), "the first is the one that is served", fix)
    for path, setting in ((f"{path}.{i}", setting) for path, listed in lists.items() for i, setting in enumerate(listed)):
        require(setting.temperature >= 0, f"{path}.temperature", setting.temperature, "must be at least 0", f"{path}.temperature=0")
        require(setting.top_k >= 0, f"{path}.top_k", setting.top_k, "must be at least 0, which is no filter", f"{path}.top_k=0")
        require(
            0 < setting.top_p <= 1, f"{path}.top_p", setting.top_p, "must be above 0 and at most 1, which is no filter", f"{path}.top_p=1"
        )
        is_filtered = setting.top_k > 0 or setting.top_p < 1
        rule = "temperature 0 takes the best token whatever top_k and top_p are"
        require(setting.temperature > 0 or not is_filtered, path, setting, rule, "top_k: 0 and top_p: 1.0, or a temperature")
        fixed, threshold = re.fullmatch(r"fixed_(\d+)", setting.policy), re.fullmatch(r"threshold_(\d+(?:\.\d+)?)", setting.policy)
        is_known = setting.policy == "verify_all" or bool(fixed and int(fixed[1]) >= 1) or bool(threshold and float(threshold[1]) <= 1)
        rule = "must be verify_all, fixed_<tokens> or threshold_<confidence, 0 to 1>"
        require(is_known, f"{path}.policy", setting.policy, rule, f"{path}.policy=fixed_{drafter.block_size}")
        has_confidences = isinstance(drafter, DSparkConfig)
        rule = f"a {drafter.kind} drafter has no confidences"
        require(not threshold or has_confidences, f"{path}.policy", setting.policy, rule, f"{path}.policy=fixed_1, or drafter=dspark")
    for i, setting in enumerate(traced):
        path, rule = f"stage.trace.settings.{i}", "the release is served whole, so it is calibrated whole"
        require(setting.ablation is None, f"{path}.ablation", setting.ablation, rule, f"{path}.ablation=null")
        rule = "a calibration is fitted on whole blocks"
        require(setting.policy == "verify_all", f"{path}.policy", setting.policy, rule, f"{path}.policy=verify_all")


def _check_serving(settings: Settings) -> None:
    """Of the server that an evaluation measures, if it does."""
    serving, drafter, cluster, path = settings.stage.evaluate.serving, settings.drafter, settings.cluster, "stage.evaluate.serving"
    if settings.stage.evaluate.engine != "vllm":
        return
    require(serving is not None, path, serving, "stage.evaluate.engine=vllm measures what it says", "see conf/stage/evaluate.yaml")
    assert serving is not None
    k, grams = serving.num_speculative_tokens, (serving.min_ngram, serving.max_ngram)
    require(k >= 1, f"{path}.num_speculative_tokens", k, "must be at least 1", f"{path}.num_speculative_tokens=4")
    rule = "must be 1 or more, and at most max_ngram"
    require(1 <= grams[0] <= grams[1], f"{path}.min_ngram", grams[0], rule, f"{path}.min_ngram=2 {path}.max_ngram=4")
    require(serving.tolerance > 0, f"{path}.tolerance", serving.tolerance, "must be above 0", f"{path}.tolerance=0.05")
    url = cluster.serving_url
    is_url = url is None or url.startswith(("http://", "https://"))
    require(is_url, "cluster.serving_url", url, "must begin with http:// or https://", "cluster.serving_url=http://127.0.0.1:8000")
    if serving.method == "dspark":
        has_gpu = cluster.gpus_per_worker >= 1 or url is not None
        fix = f"{path}.method=ngram, cluster.gpus_per_worker=1, or cluster.serving_url of a server that has one"
        require(has_gpu, f"{path}.method", "dspark", "vLLM runs DSpark on a GPU alone, and cluster.gpus_per_worker is 0", fix)
        require(isinstance(drafter, DSparkConfig), f"{path}.method", "dspark", f"the drafter is {drafter.kind}", "drafter=dspark")
        rule = f"the drafter drafts blocks of drafter.block_size = {drafter.block_size} here"
        require(k == drafter.block_size, f"{path}.num_speculative_tokens", k, rule, f"{path}.num_speculative_tokens={drafter.block_size}")


def _check(settings: Settings) -> None:
    """Rules between fields, checked before any work."""
    _check_decoding(settings)
    _check_serving(settings)
    stage, drafter, cluster = settings.stage, settings.drafter, settings.cluster
    require(settings.until is None or settings.until in STEPS, "until", settings.until, f"must be one of {', '.join(STEPS)}", "until=train")
    is_drift = settings.mode == "drift"
    require(
        not is_drift or settings.rounds is not None, "rounds", None, "mode=drift judges new rounds", "rounds=<file or folder of rounds>"
    )
    for path, uri in (("rounds", settings.rounds), ("release", settings.release)):
        require(is_drift or uri is None, path, uri, "only mode=drift reads it", f"mode=drift {path}={uri}")
    unknown = [name for name in settings.rebuild if name not in STEPS]
    require(not unknown, "rebuild", list(settings.rebuild), f"may only hold {', '.join(STEPS)}", "rebuild=[train]")
    for path, value in (
        ("drafter.num_layers", drafter.num_layers if isinstance(drafter, DFlashConfig | DSparkConfig) else 1),
        ("drafter.block_size", drafter.block_size),
        ("stage.train.num_steps", stage.train.num_steps),
    ):
        require(value >= 1, path, value, "must be at least 1", f"{path}=1")
    cache = stage.cache_targets
    for path, value, example in (
        ("target.width", settings.target.width, "<the target's hidden_size>"),
        ("stage.cache_targets.num_top_logits", cache.num_top_logits, "64"),
        ("stage.cache_targets.window_bytes", cache.window_bytes, "2000000000"),
        ("stage.cache_targets.assumed_prompt_tokens", cache.assumed_prompt_tokens, "45"),
        ("stage.cache_targets.assumed_response_tokens", cache.assumed_response_tokens, "110"),
    ):
        require(value >= 1, path, value, "must be at least 1", f"{path}={example}")
    require(
        cache.max_bytes is None or cache.max_bytes > 0,
        "stage.cache_targets.max_bytes",
        cache.max_bytes,
        "must be above 0, or null for no limit",
        "stage.cache_targets.max_bytes=null",
    )
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
    if isinstance(drafter, MtpConfig):
        require(drafter.block_size == 1, "drafter.block_size", drafter.block_size, "MTP-1 drafts one token", "drafter.block_size=1")
    if isinstance(drafter, DFlashConfig | DSparkConfig):
        sliding, example = list(drafter.sliding_layers), "drafter.sliding_layers=[0] drafter.sliding_window=512"
        is_ascending = sliding == sorted(set(sliding)) and all(0 <= layer < drafter.num_layers for layer in sliding)
        rule = f"must be ascending, distinct and from 0 to drafter.num_layers - 1 = {drafter.num_layers - 1}"
        require(is_ascending, "drafter.sliding_layers", sliding, rule, example)
        has_window = drafter.sliding_window is not None and drafter.sliding_window >= 1
        rule = "must be at least 1 position with drafter.sliding_layers, and null without"
        require(has_window if sliding else drafter.sliding_window is None, "drafter.sliding_window", drafter.sliding_window, rule, example)
    if isinstance(drafter, DSparkConfig):
        has_head = drafter.sequential_head != "none"
        require(
            drafter.markov_rank >= 1 if has_head else drafter.markov_rank == 0,
            "drafter.markov_rank",
            drafter.markov_rank,
            f"a {drafter.sequential_head} head needs rank 1 or more" if has_head else "must be 0 without a sequential head",
            "drafter.markov_rank=64, or drafter.sequential_head=none with rank 0, or drafter=dflash for no heads at all"
            if has_head
            else "drafter.markov_rank=0",
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
        ("stage.trace.max_new_tokens", stage.trace.max_new_tokens),
    ):
        require(
            1 <= value < settings.target.max_length_tokens,
            path,
            value,
            f"must be between 1 and target.max_length_tokens - 1 = {settings.target.max_length_tokens - 1}",
            f"{path}=128",
        )
    for path, sizes in (
        ("stage.profile_sps.batch_tokens", stage.profile_sps.batch_tokens),
        ("stage.profile_sps.num_requests", stage.profile_sps.num_requests),
        ("stage.profile_sps.context_tokens", stage.profile_sps.context_tokens),
        ("stage.schedule.concurrencies", stage.schedule.concurrencies),
    ):
        is_ascending = list(sizes) == sorted(set(sizes)) and bool(sizes) and sizes[0] >= 1
        require(is_ascending, path, list(sizes), "must be ascending, distinct and at least 1", f"{path}=[1,8,64,512]")
    most, reaches_schedule = (
        max(stage.schedule.concurrencies),
        settings.until is None or STEPS.index(settings.until) >= STEPS.index("schedule"),
    )
    profiled = stage.profile_sps.num_requests
    require(
        not (isinstance(drafter, DSparkConfig) and reaches_schedule)
        or profiled[0] <= min(stage.schedule.concurrencies) <= most <= profiled[-1],
        "stage.schedule.concurrencies",
        list(stage.schedule.concurrencies),
        f"a replay needs measured steps of as many requests, and stage.profile_sps.num_requests go from {profiled[0]} to {profiled[-1]}",
        f"stage.profile_sps.num_requests from {min(stage.schedule.concurrencies)} to {most}",
    )
    require(
        "decoding" in stage.profile_sps.engines,
        "stage.profile_sps.engines",
        list(stage.profile_sps.engines),
        "the schedule's replay needs the engine whose drafting is timed",
        "stage.profile_sps.engines=[decoding]",
    )
    for path, number, least in (
        ("stage.trace.batch_size", stage.trace.batch_size, 1),
        ("stage.calibrate.num_bins", stage.calibrate.num_bins, 1),
        ("stage.calibrate.num_folds", stage.calibrate.num_folds, 2),
        ("stage.calibrate.num_resamples", stage.calibrate.num_resamples, 1),
        ("stage.profile_sps.num_repeats", stage.profile_sps.num_repeats, 1),
        ("stage.profile_sps.max_spread", stage.profile_sps.max_spread, 0),
        ("stage.profile_sps.min_rank_correlation", stage.profile_sps.min_rank_correlation, -1),
        ("stage.schedule.num_steps", stage.schedule.num_steps, 1),
        ("stage.schedule.num_warmup_steps", stage.schedule.num_warmup_steps, 0),
        ("stage.schedule.num_rounds", stage.schedule.num_rounds, 1),
        ("stage.schedule.num_resamples", stage.schedule.num_resamples, 1),
        ("stage.schedule.lag_rounds", stage.schedule.lag_rounds, 1),
        ("stage.schedule.window_rounds", stage.schedule.window_rounds, 1),
        ("stage.schedule.probe_share", stage.schedule.probe_share, 0),
    ):
        require(number >= least, path, number, f"must be at least {least}", f"{path}={least}")
    for path, thresholds in (
        ("stage.schedule.thresholds", stage.schedule.thresholds),
        ("stage.evaluate.thresholds", stage.evaluate.thresholds),
    ):
        require(all(0.0 <= minimum <= 1.0 for minimum in thresholds), path, list(thresholds), "must be from 0 to 1", f"{path}=[0.5]")
    edges, path = stage.evaluate.context_edges_tokens, "stage.evaluate.context_edges_tokens"
    is_whole = edges[:1] == (0,) and list(edges) == sorted(set(edges))
    require(is_whole, path, list(edges), "must be ascending, distinct and begin with 0", f"{path}=[0,256,1024]")
    for name, uri in (stage.evaluate.benchmarks or {}).items():
        path = f"stage.evaluate.benchmarks.{name}"
        require(
            name != "test" and not {*"/#"} & {*name},
            path,
            uri,
            "`test` is the project's own split, and a name has no / or #",
            "give it another name",
        )
        require(
            uri != HUB or name in ON_HUB, path, uri, f"only {', '.join(ON_HUB)} are known there", "name one of these, or give a JSONL file"
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
