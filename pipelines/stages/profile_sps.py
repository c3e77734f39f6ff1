"""profile_sps: how long an engine step takes, by the number of tokens that it verifies and of requests that it drafts for.

Repeated in random order after one warm-up of each, medians taken. A step of exactly B verified tokens is made

    decoding   by a forward over B / n requests of n tokens each (n <= K + 1 the largest that divides B) behind
               `context_tokens` cached ones, with logits, rejection test and the drafter's context; drafting (greedy) is timed
               apart, by number of requests. Left out: the bookkeeping of rounds on the host
    vllm       by prefilling prompts of B tokens in all, in one engine step, one token sampled for each; no drafting, and a
               prompt's own tokens as context

`timings.json` holds every measurement, `sps.json` the medians by engine, `sps.png` a figure. A table that is flat or whose
timings are no durations is refused (`SpsTable.from_timings`). Valid for the stack in its config alone.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dspark.storage import Storage
from pipelines.artifacts import SpsProfile
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.decoder import Decoder, DecoderSettings
from pipelines.figures import png
from pipelines.flow import ProfileSpsConfig
from pipelines.runner import Progress, Work
from pipelines.targets import local_folder

FIGURE = "sps.png"
PROMPT_TOKENS = 512  # longest prompt of a vLLM step


@dataclass(frozen=True)
class Settings:
    config: ProfileSpsConfig
    target_uri: str
    drafter_uri: str
    out_uri: str


def run(config: ProfileSpsConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    from dspark.scheduler import SpsTable

    stage = config.profile_sps
    settings = Settings(config, work.resources.target_uri, inputs["drafter"].uri, out.uri)
    timings: list[dict[str, Any]] = []
    work.report(Progress(0, len(stage.engines), "engines"))
    for i, engine in enumerate(stage.engines, 1):
        for found in work.map("pipelines.stages.profile_sps:Profiler", settings, [engine]):  # a worker of its own for each
            timings += found
        work.report(Progress(i, len(stage.engines), "engines"))
    out.put(SpsProfile.TIMINGS, json.dumps(timings).encode())
    profile: dict[str, dict[str, Any]] = {}
    for engine in stage.engines:
        parts: dict[str, Any] = {}
        for part, axis in (("verify", "batch_tokens"), ("draft", "num_requests")):
            rows = [t for t in timings if t["engine"] == engine and t["part"] == part]
            if rows:
                sizes, seconds = [t[axis] for t in rows], [t["seconds"] for t in rows]
                parts[part] = {axis: sorted(set(sizes)), "seconds": _medians(sizes, seconds)}
                if part == "verify":  # drafting may well take as long for any number of requests
                    SpsTable.from_timings(sizes, [0.0] * len(rows), seconds)
        profile[engine] = parts
    stack = config.stack
    record = {
        "schema_version": 1,
        "stack": {"device": stack.device, "num_threads": stack.num_threads, "packages": dict(stack.packages), "dtype": stage.precision},
        "context_tokens": stage.context_tokens,
        "engines": profile,
    }
    out.put(SpsProfile.SPS, json.dumps(record, indent=1).encode())
    out.put(FIGURE, _figure(timings, profile))
    metrics = {
        f"{engine}/{part}_milliseconds_{size}": 1000.0 * seconds
        for engine, parts in profile.items()
        for part, columns in parts.items()
        for size, seconds in zip(columns["batch_tokens" if part == "verify" else "num_requests"], columns["seconds"], strict=True)
    }
    return Outcome(file_checksums(out, [SpsProfile.TIMINGS, SpsProfile.SPS, FIGURE]), metrics, (FIGURE,))


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
        steps = self._decoding_steps() if engine == "decoding" else self._vllm_steps()
        for _, step in steps:
            step()
        timings = []
        order = [item for item in steps for _ in range(self._stage.num_repeats)]
        random.Random(self._stage.seed).shuffle(order)
        for size, step in order:
            started = time.perf_counter()
            step()
            timings.append({"engine": engine, **size, "seconds": time.perf_counter() - started})
        return timings

    def _decoding_steps(self) -> list[tuple[dict[str, Any], Callable[[], Any]]]:
        import torch

        from dspark.drafters.base import ContextRows
        from dspark.sampling import distribution, verify
        from dspark.step import Step
        from dspark.target import KeyValueCache

        stage, settings = self._stage, self._settings
        decoder = Decoder(DecoderSettings(settings.target_uri, settings.drafter_uri, settings.config.target.weights, 0, 0, 0, 0))
        target, drafter = decoder.models(stage.precision)
        K, context_tokens, device = drafter.block_size, stage.context_tokens, decoder.device
        token = int(drafter.draft_ids_W[0])

        def synchronise() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()

        def verification(batch_tokens: int) -> Callable[[], None]:
            num_requests, width = _shape(batch_tokens, K)
            cache, context = (
                KeyValueCache(num_requests, context_tokens + width),
                drafter.new_context(num_requests, context_tokens + width),
            )
            tokens = Step.of([[token] * width] * num_requests, [context_tokens] * num_requests, range(num_requests), device)
            drafted_BK, uniform_BK = tokens.tokens_S.view(num_requests, width)[:, 1:], torch.zeros(num_requests, width - 1, device=device)

            def step() -> None:
                states = target.forward(tokens, cache)
                probs_SV = distribution(target.logits(states.final_SD), 0.0)
                verify(drafted_BK, None, drafter.draft_ids_W, tokens.lengths_R - 1, probs_SV, uniform_BK)
                drafter.extend_context(context, ContextRows(tokens, states.tapped_SLD, tokens.tokens_S))
                synchronise()

            return step

        def drafting(num_requests: int) -> Callable[[], None]:
            context = drafter.new_context(num_requests, context_tokens + K)
            anchors_B = torch.full((num_requests,), context_tokens, device=device)
            tokens_B = torch.full_like(anchors_B, token)

            @torch.no_grad()
            def step() -> None:
                drafter.propose(context, tokens_B, anchors_B, lambda _, logits_BW: logits_BW.argmax(-1))
                synchronise()

            return step

        steps: list[tuple[dict[str, Any], Callable[[], Any]]] = []
        steps += [({"part": "verify", "batch_tokens": size}, verification(size)) for size in stage.batch_tokens]
        steps += [({"part": "draft", "num_requests": size}, drafting(size)) for size in stage.num_requests]
        return steps

    def _vllm_steps(self) -> list[tuple[dict[str, Any], Callable[[], Any]]]:
        from pipelines.backends.vllm import Prefiller

        engine = Prefiller(local_folder(self._settings.target_uri), self._stage.precision, PROMPT_TOKENS, max(self._stage.batch_tokens))
        return [({"part": "verify", "batch_tokens": size}, partial(engine.step, size)) for size in self._stage.batch_tokens]


def _shape(batch_tokens: int, block_size: int) -> tuple[int, int]:
    """(requests, tokens of each) of a decoding step of exactly so many tokens: as many tokens a request as divide it, up to K + 1."""
    width = max(n for n in range(1, block_size + 2) if batch_tokens % n == 0)
    return batch_tokens // width, width


def _medians(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    return [statistics.median(s for n, s in zip(sizes, seconds, strict=True) if n == size) for size in sorted(set(sizes))]


def read_profile(artifact: Artifact) -> dict[str, Any]:
    return json.loads(open_storage(artifact.uri).read(SpsProfile.SPS))


def _figure(timings: Sequence[Mapping[str, Any]], profile: Mapping[str, Any]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for ax, part, axis in zip(figure.subplots(1, 2), ("verify", "draft"), ("batch_tokens", "num_requests"), strict=True):
        for i, (engine, parts) in enumerate(profile.items()):
            if part in parts:
                rows = [t for t in timings if t["engine"] == engine and t["part"] == part]
                ax.plot([t[axis] for t in rows], [1000.0 * t["seconds"] for t in rows], ".", color=f"C{i}", alpha=0.4, markersize=4)
                ax.plot(parts[part][axis], [1000.0 * s for s in parts[part]["seconds"]], color=f"C{i}", label=engine)
        ax.set(xscale="log", yscale="log", xlabel=axis.replace("_", " "), ylabel="ms", title=f"{part} part of a step")
        ax.grid(alpha=0.3)
        ax.legend()
    return png(figure)
