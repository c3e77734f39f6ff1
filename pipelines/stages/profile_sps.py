"""profile_sps: how long an engine's steps take, by the requests that they draft for, the tokens that they verify, and the context.

Every number of requests R behind every context length, in random order; of each, a step of every size, R to R * (K + 1) verified tokens,
in random order. All of that is repeated (large sizes half as often), so that a machine that changes its pace shows in every size, and
bends none of the curves. Which requests the tokens belong to is drawn anew for each step. A step is a real one of

    decoding   `dspark.decoding.decode` with the trained drafter (dspark/profiling.py), behind contexts of different lengths
    vllm       vLLM's own scheduler, model runner and rejection test on drafts without sense: it cannot run the drafter on a CPU,
               so nothing is drafted and `draft_seconds` are 0

`timings.json` holds every measurement in its parts: drafting, verification, and the overhead of what else the engine does in a
step. `sps.json` holds medians and spreads, and what they are valid for: `read_profile` compares it with what its reader has.
`sps.png` is a figure. Timings that are flat, noisy or do not respond to the size are refused (dspark/step_cost.py).
"""

import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dspark.storage import Storage
from pipelines.artifacts import SpsProfile
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.decoder import Decoder, DecoderSettings
from pipelines.figures import png
from pipelines.flow import ProfileSpsConfig
from pipelines.runner import Progress, Work
from pipelines.settings import ProfileSpsStage
from pipelines.targets import local_folder

if TYPE_CHECKING:
    from dspark.step_cost import StepProfile, StepTiming

FIGURE = "sps.png"
LARGE_TOKENS = 256  # steps of more are measured half as often


@dataclass(frozen=True)
class Settings:
    config: ProfileSpsConfig
    target_uri: str
    drafter_uri: str


def run(config: ProfileSpsConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    from dspark.step_cost import StepProfile, StepTiming, check_timings, spread

    stage = config.profile_sps
    settings = Settings(config, work.resources.target_uri, inputs["drafter"].uri)
    timings: dict[str, list[StepTiming]] = {}
    work.report(Progress(0, len(stage.engines), "engines"))
    for i, engine in enumerate(stage.engines, 1):
        found = [rows for rows in work.map("pipelines.stages.profile_sps:Profiler", settings, [engine])]  # a worker of its own for each
        timings[engine] = [StepTiming(**row) for rows in found for row in rows]
        work.report(Progress(i, len(stage.engines), "engines"))
    raw = [{"engine": engine, **asdict(timing)} for engine, rows in timings.items() for timing in rows]
    out.put(SpsProfile.TIMINGS, json.dumps(raw).encode())  # before they are judged: a refused run can be looked at
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, rows in timings.items():
        check_timings(rows, stage.max_spread, stage.min_rank_correlation)
        curves[name] = []
        for curve in StepProfile.of(rows).curves:
            of_curve = [t for t in rows if (t.context_tokens, t.num_requests) == (curve.context_tokens, curve.num_requests)]
            by_size = [[t for t in of_curve if t.batch_tokens == size] for size in curve.batch_tokens]
            curves[name].append(
                {
                    **asdict(curve),
                    "overhead_seconds": [statistics.median(t.overhead_seconds for t in found) for found in by_size],
                    "verify_spread": [spread([t.whole_verify_seconds for t in found]) for found in by_size],
                }
            )
    record = {
        "schema_version": 2,
        "identity": _identity(config, inputs["drafter"]),
        "definitions": {
            "verify_seconds": "median of a step but for its drafting; overhead_seconds are the part of it outside of the verification",
            "verify_spread": "interquartile range over median",
            "context_tokens": "cached when a decoding began, mean over the requests (decoding: half to one and a half of it; vllm: all the "
            "same); it grows by 32 tokens at most (decoding), or by what the steps emit (vllm)",
        },
        "engines": curves,
    }
    out.put(SpsProfile.SPS, json.dumps(record, indent=1).encode())
    out.put(FIGURE, _figure(timings, {engine: StepProfile.of(rows) for engine, rows in timings.items()}))
    return Outcome(file_checksums(out, [SpsProfile.TIMINGS, SpsProfile.SPS, FIGURE]), _metrics(curves), (FIGURE,))


class Profiler:
    """One engine on one worker, alone on its device."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self._settings, self._stage = settings, settings.config.profile_sps
        stack = settings.config.stack
        if torch.cuda.is_available() != stack.has_gpu:
            word = "has no GPU" if stack.has_gpu else "has a GPU"
            raise ValueError(
                f"cluster.gpus_per_worker: {int(stack.has_gpu)}, but the worker {word}. Fix: cluster.gpus_per_worker={1 - stack.has_gpu}"
            )
        torch.set_num_threads(stack.num_threads)  # what the plan says is what is measured

    def __call__(self, engine: str) -> list[dict[str, Any]]:
        stage, generator = self._stage, random.Random(self._stage.seed)
        measure = self._decoding() if engine == "decoding" else self._vllm()
        pairs = list(itertools.product(stage.context_tokens, stage.num_requests))
        timings: list[dict[str, Any]] = []
        for repeat in range(stage.num_repeats):
            generator.shuffle(pairs)
            for context_tokens, num_requests in pairs:
                order = step_sizes(stage, num_requests, self._settings.config.block_size, repeat)
                generator.shuffle(order)
                timings += [asdict(timing) for timing in measure(context_tokens, num_requests, order)]
        return timings

    def _decoding(self) -> "Callable[[int, int, Sequence[int]], Iterable[StepTiming]]":
        from dspark.profiling import timed_steps

        settings, stage = self._settings, self._stage
        decoder = Decoder(DecoderSettings(settings.target_uri, settings.drafter_uri, settings.config.target.weights, 0, 0, 0, 0))
        target, drafter = decoder.models(stage.precision)
        seeds = itertools.count(stage.seed)
        return lambda context_tokens, num_requests, order: timed_steps(target, drafter, context_tokens, num_requests, order, next(seeds))

    def _vllm(self) -> "Callable[[int, int, Sequence[int]], Iterable[StepTiming]]":
        from dspark.step_cost import StepTiming
        from pipelines.backends.vllm import Verifier

        stage, K = self._stage, self._settings.config.block_size
        most_steps = max(len(step_sizes(stage, num_requests, K, 0)) for num_requests in stage.num_requests)
        max_length = max(stage.context_tokens) + (most_steps + 3) * (K + 1)
        engine = Verifier(local_folder(self._settings.target_uri), stage.precision, max_length, max(stage.num_requests), K)

        def measure(context_tokens: int, num_requests: int, order: Sequence[int]) -> "Iterable[StepTiming]":
            for step in engine.steps(context_tokens, num_requests, order):
                overhead_seconds = step.seconds - step.model_seconds
                yield StepTiming(context_tokens, num_requests, step.batch_tokens, 0.0, step.model_seconds, overhead_seconds)

        return measure


def step_sizes(stage: ProfileSpsStage, num_requests: int, block_size: int, repeat: int) -> list[int]:
    """Of the grid those that so many requests can verify, and always the most, the least and one more: where requests are not all of one
    length any more, an engine may take a stair. The large ones in every other repeat."""
    least, most = num_requests, num_requests * (block_size + 1)
    sizes = {least, least + 1, most, *(size for size in stage.batch_tokens if least < size < most)}
    return sorted(size for size in sizes if size <= LARGE_TOKENS or repeat % 2 == 0)


def _identity(config: ProfileSpsConfig, drafter: Artifact) -> dict[str, Any]:
    """What the costs are valid for."""
    stack = config.stack
    return {
        "target": config.target.name,
        "target_weights_sha256": config.target.weights,
        "drafter_sha256": drafter.payload_sha256,
        "block_size": config.block_size,
        "dtype": config.profile_sps.precision,
        "device": stack.device,
        "num_devices": 1,
        "num_threads": stack.num_threads,
        "packages": dict(stack.packages),
    }


def read_profile(artifact: Artifact, expected: Mapping[str, Any]) -> dict[str, Any]:
    """sps.json. ValueError unless its identity has these values: costs hold for what they were measured on, and nothing else."""
    profile = json.loads(open_storage(artifact.uri).read(SpsProfile.SPS))
    check_identity(profile["identity"], expected)
    return profile


def check_identity(identity: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if name not in identity or identity[name] != value:
            raise ValueError(
                f"sps.identity.{name}: measured with {identity.get(name)!r}, used with {value!r}: both must be the same. Fix: run the step "
                "profile_sps on what the costs are used for"
            )


def step_profile(profile: Mapping[str, Any], engine: str) -> "StepProfile":
    """What a scheduler reads of sps.json."""
    from dspark.step_cost import Curve, StepProfile

    return StepProfile(
        tuple(
            Curve(c["context_tokens"], c["num_requests"], c["draft_seconds"], tuple(c["batch_tokens"]), tuple(c["verify_seconds"]))
            for c in profile["engines"][engine]
        )
    )


def _metrics(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Of each curve the smallest and the largest step, in milliseconds, and its drafting."""
    metrics = {}
    for engine, found in curves.items():
        for curve in found:
            where = f"{curve['num_requests']}_requests_behind_{curve['context_tokens']}"
            metrics[f"{engine}/draft_milliseconds_{where}"] = 1000.0 * curve["draft_seconds"]
            for i in (0, -1):
                metrics[f"{engine}/verify_milliseconds_{curve['batch_tokens'][i]}_of_{where}"] = 1000.0 * curve["verify_seconds"][i]
        metrics[f"{engine}/median_spread"] = statistics.median(spread for curve in found for spread in curve["verify_spread"])
    return metrics


def _figure(timings: "Mapping[str, Sequence[StepTiming]]", profiles: "Mapping[str, StepProfile]") -> bytes:
    """Left a line for each number of requests, right one for each context length; points are single steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    verify, draft = figure.subplots(1, 2)
    kinds = [(engine, context) for engine, profile in profiles.items() for context in profile.context_tokens]
    for i, (engine, context_tokens) in enumerate(kinds):
        rows = [t for t in timings[engine] if t.context_tokens == context_tokens]
        curves = [curve for curve in profiles[engine].curves if curve.context_tokens == context_tokens]
        label, colour = f"{engine}, {context_tokens} tokens of context", f"C{i}"
        points: dict[str, Any] = {"linestyle": "", "marker": ".", "color": colour, "alpha": 0.3, "markersize": 4}
        verify.plot([t.batch_tokens for t in rows], [1000.0 * t.whole_verify_seconds for t in rows], **points)
        for curve in curves:
            milliseconds = [1000.0 * seconds for seconds in curve.verify_seconds]
            verify.plot(curve.batch_tokens, milliseconds, color=colour, linewidth=1.0, label=label if curve is curves[0] else None)
        if any(curve.draft_seconds for curve in curves):
            draft.plot([t.num_requests for t in rows], [1000.0 * t.draft_seconds for t in rows], **points)
            milliseconds = [1000.0 * curve.draft_seconds for curve in curves]
            draft.plot([curve.num_requests for curve in curves], milliseconds, color=colour, label=label)
    verify.set(xlabel="verified tokens, a line for each number of requests", title="verification and overhead of a step")
    draft.set(xlabel="requests", title="draft pass of a step")
    for ax in (verify, draft):
        ax.set(xscale="log", yscale="log", ylabel="ms")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    return png(figure)
