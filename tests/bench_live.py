"""`make bench-live`: does the engine under load do what the replay says?

Prompts of the test split, decoded by the decoding engine in a closed loop of so many requests with the policies of the schedule step:
emitted tokens over the seconds of the steps in which every slot was full, prefills left out as in the replay, beside what the replay
predicts from the recorded blocks of the same texts and steps that were timed just before each policy, as profile_sps times them: a shared
machine changes its pace between a pipeline and a benchmark. What the replay says by the stored profile stands behind it. Draws a figure.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from dspark.calibration import Calibration
from dspark.decoding import DecodingConfig, Request, StepTimes, Verification, decode
from dspark.draft_gate import DraftGate
from dspark.drafters.base import BlockDrafter
from dspark.profiling import timed_steps
from dspark.sampling import Sampling
from dspark.scheduler import admit, admit_async, static_policy
from dspark.simulate import ReplayText, mean_context_tokens, replay, texts_from_rounds
from dspark.step_cost import StepCost, StepProfile
from dspark.target import TargetModel
from dspark.training import DTYPES
from pipelines.artifacts import Calibration as CalibrationArtifact
from pipelines.backends.object_store import open_storage
from pipelines.config import PROJECT_ROOT, compose
from pipelines.dag import Artifact
from pipelines.figures import png
from pipelines.scheduling import SERVED
from pipelines.settings import ProfileSpsStage, ScheduleStage
from pipelines.stages.profile_sps import read_profile, step_profile, step_sizes
from pipelines.stages.schedule import ENGINE, replay_config
from pipelines.stages.trace import read_rounds
from tests.bench_cache import machine
from tests.trained import Trained, planned_artifacts, trained_drafters

GOAL = 0.15  # of the prediction
NUM_WARMUP_STEPS = 20
NUM_REPEATS = 4  # of the timed steps before each policy
POLICIES = ("none", "fixed_1", "fixed_3", "verify_all", "scheduler", "scheduler_async", SERVED)


@dataclass
class Load:
    """The steps of a decoding in which all slots were full, those that follow a prefill without what lies between."""

    num_requests: int
    num_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    ended_at: float | None = None  # of the step before, None if requests began since
    num_steps: int = 0

    def on_step(self, times: StepTimes) -> None:
        now, parts = time.perf_counter(), times.draft_seconds + times.verify_seconds
        self.num_steps += 1
        if times.num_requests == self.num_requests and self.num_steps > NUM_WARMUP_STEPS:
            self.num_tokens += times.num_emitted
            self.seconds.append(parts)
            self.budgets.append(times.batch_tokens)
            if self.ended_at is not None:
                self.overheads.append(now - self.ended_at - parts)
        self.ended_at = time.perf_counter()

    @property
    def throughput(self) -> float:
        overhead = statistics.fmean(self.overheads) if self.overheads else 0.0
        return self.num_tokens / (sum(self.seconds) + overhead * len(self.seconds))

    @property
    def accepted_length(self) -> float:
        return self.num_tokens / (self.num_requests * len(self.seconds))

    @property
    def budget(self) -> float:
        return statistics.fmean(self.budgets) / self.num_requests


def verification(policy: str, cost: StepCost, num_requests: int, calibration: Calibration, stage: ScheduleStage) -> Verification:
    """The policy of that name as the engine runs it."""
    if policy in ("none", "verify_all"):
        return Verification()
    sps, plain_sps = (cost.table(num_requests, is_drafting=drafts) for drafts in (True, False))
    if policy == "scheduler":
        return Verification(policy, partial(admit, sps=sps), calibration.confidence)
    if policy in ("scheduler_async", SERVED):
        gate = partial(DraftGate, plain_sps.seconds, stage.lag_rounds, stage.window_rounds, stage.probe_share)
        new_gate = gate if policy == SERVED else None
        return Verification(policy, partial(admit_async, sps=sps), calibration.confidence, stage.lag_rounds, new_gate)
    return Verification(policy, static_policy(policy))


def timed_cost(
    target: TargetModel, drafter: BlockDrafter, texts: Sequence[ReplayText], num_requests: int, stage: ProfileSpsStage
) -> StepCost:
    """Of steps behind the mean context of the texts, as they are now."""
    context_tokens, timings = mean_context_tokens(texts), []
    for repeat in range(NUM_REPEATS):
        order = step_sizes(stage, num_requests, drafter.block_size, 0)
        random.Random(repeat).shuffle(order)
        timings += timed_steps(target, drafter, round(context_tokens), num_requests, order, repeat)
    return StepProfile.of(timings).at(context_tokens, num_requests)


def load(target: TargetModel, drafter: BlockDrafter | None, requests: Sequence[Request], config: DecodingConfig) -> Load:
    """`config.batch_size` of the requests at once, until they cannot fill the slots any more."""
    found = Load(config.batch_size)
    for num_done, _ in enumerate(decode(target, drafter, requests, config, found.on_step), 1):
        found.ended_at = None  # a prefill follows
        if num_done > len(requests) - config.batch_size:
            break
    return found


def recorded(trace: Artifact, block_size: int, calibration: Calibration) -> dict[str, ReplayText]:
    """By the prompt's id, the blocks at every anchor of its text."""
    rounds = read_rounds(trace, "positions", "test")
    names = dict.fromkeys(r.request_id.rpartition("/")[2] for r in rounds)
    return dict(zip(names, texts_from_rounds(rounds, block_size, calibration.confidence), strict=True))


def figure(rows: Sequence[tuple[int, str, float, float]]) -> bytes:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 4), layout="constrained")
    ax = drawn.subplots()
    for i, policy in enumerate(dict.fromkeys(row[1] for row in rows)):
        points = [(r, measured, predicted) for r, name, measured, predicted in rows if name == policy]
        ax.plot([p[0] for p in points], [p[2] for p in points], color=f"C{i}", linewidth=1.0, label=policy)
        ax.plot([p[0] for p in points], [p[1] for p in points], "o", color=f"C{i}", markersize=5)
    ax.set(xlabel="concurrent requests", ylabel="tokens/s", title="lines: replay, points: the engine under load")
    ax.set_xscale("log", base=2)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
    return png(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--prompts", type=int, default=12, help="at concurrency 1; of more at once, so many and 2 for each slot")
    parser.add_argument("--figure", type=Path, default=PROJECT_ROOT / "artifacts" / "live.png")
    parser.add_argument("--with", dest="overrides", nargs="+", default=[], help="overrides of the run whose drafter and profile are used")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine(), flush=True)
    artifacts = planned_artifacts("train", "trace", "calibrate", "profile_sps", overrides=arguments.overrides)
    stages = compose(arguments.overrides)[0].stage
    trained: Trained = trained_drafters([artifacts["train"].uri])[0]
    target, drafter = trained.load(DTYPES[stages.profile_sps.precision])
    calibration = Calibration.from_json(open_storage(artifacts["calibrate"].uri).read(CalibrationArtifact.CALIBRATION), drafter.block_size)
    text_of = recorded(artifacts["trace"], drafter.block_size, calibration)
    profile = step_profile(read_profile(artifacts["profile_sps"], {"block_size": drafter.block_size}), ENGINE)
    replays = replace(replay_config(stages.schedule), new_requests="one")  # as the engine does it
    known = [request for request in trained.held_out.requests(10**6, ()) if request.id in text_of]
    rows = []
    for num_requests in arguments.concurrency:
        num_prompts = arguments.prompts + 2 * num_requests * (num_requests > 1)
        requests = [replace(known[i % len(known)], id=str(i)) for i in range(num_prompts)]
        texts = [text_of[known[i % len(known)].id] for i in range(num_prompts)]
        stored = profile.at(mean_context_tokens(texts), num_requests)
        for policy in arguments.policies:
            cost = timed_cost(target, drafter, texts, num_requests, stages.profile_sps)
            config = DecodingConfig(
                Sampling("greedy", 0.0), stages.trace.max_new_tokens, trained.held_out.stop_ids, num_requests, 0,
                verification=verification(policy, cost, num_requests, calibration, stages.schedule),
            )  # fmt: skip
            found = load(target, None if policy == "none" else drafter, requests, config)
            expected, by_profile = (replay(texts, policy, steps, num_requests, replays) for steps in (cost, stored))
            rows.append((num_requests, policy, found.throughput, expected.throughput_tokens_per_second))
            print(
                f"live  {num_requests:3d} at once  {policy:24s} {found.throughput:6.1f} tokens/s, replay {expected.throughput_tokens_per_second:6.1f}"
                f" = {found.throughput / expected.throughput_tokens_per_second:.3f} (by the profile "
                f"{by_profile.throughput_tokens_per_second:.1f})   accepted length {found.accepted_length:.3f}, replay "
                f"{expected.mean_accepted_length:.3f}   verified a request {found.budget:.2f}, replay {expected.mean_budget_tokens:.2f}",
                flush=True,
            )
    arguments.figure.write_bytes(figure(rows))
    worst = max(abs(measured / expected - 1.0) for _, _, measured, expected in rows)
    print(f"live  largest difference {worst:.1%}: {'passes' if worst <= GOAL else 'FAILS'} ({GOAL:.0%}); figure: {arguments.figure}")
    sys.exit(worst > GOAL)


if __name__ == "__main__":
    main()
