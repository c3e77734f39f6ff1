"""`make bench-live`: does the engine under load do what the replay says?

The prompts of the test split, decoded by the decoding engine in a closed loop of so many requests with the policies of the schedule
step: emitted tokens over the seconds of the steps in which every slot was full, prefills left out as in the replay, beside the
throughput that `schedule/*/report.json` predicts from recorded rounds and profiled steps. Draws a figure.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark.calibration import Calibration
from dspark.decoding import DecodingConfig, Request, StepTimes, Verification, decode
from dspark.drafters.base import BlockDrafter
from dspark.layers import fast_dtype
from dspark.sampling import Sampling
from dspark.scheduler import DraftGate, admit, admit_async, static_policy
from dspark.step_cost import StepCost
from dspark.target import TargetModel
from pipelines.artifacts import Calibration as CalibrationArtifact
from pipelines.artifacts import ScheduleReport
from pipelines.backends.object_store import open_storage
from pipelines.config import PROJECT_ROOT, compose
from pipelines.figures import png
from pipelines.scheduling import CALIBRATED, SERVED
from pipelines.settings import ScheduleStage
from pipelines.stages.profile_sps import read_profile, step_profile
from pipelines.stages.schedule import ENGINE
from tests.bench_cache import machine
from tests.trained import Trained, planned_artifacts, trained_drafters

GOAL = 0.15  # of the prediction
NUM_WARMUP_STEPS = 20
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


def load(target: TargetModel, drafter: BlockDrafter | None, requests: Sequence[Request], config: DecodingConfig) -> Load:
    """`config.batch_size` of the requests at once, until they cannot fill the slots any more."""
    found = Load(config.batch_size)
    for num_done, _ in enumerate(decode(target, drafter, requests, config, found.on_step), 1):
        found.ended_at = None  # a prefill follows
        if num_done > len(requests) - config.batch_size:
            break
    return found


def prediction(report: Mapping[str, Any], num_requests: int, policy: str) -> Mapping[str, Any]:
    """The replay's row, of requests without history counted as 1.0 as the engine does it. SystemExit when it was not replayed."""
    rows = [
        r for r in report["rows"] if (r["num_requests"], r["policy"]) == (num_requests, policy) and r["confidences"] in (None, CALIBRATED)
    ]
    if not rows:
        raise SystemExit(f"--concurrency {num_requests}: not replayed. Fix: one of stage.schedule.concurrencies")
    ratio = next(
        (o["over_default"] for o in report["options"] if (o["num_requests"], o["policy"], o.get("new_requests")) == (num_requests, policy, "one")), 1.0
    )  # fmt: skip
    return {**rows[0], "throughput_tokens_per_second": rows[0]["throughput_tokens_per_second"] * ratio}


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
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--figure", type=Path, default=PROJECT_ROOT / "artifacts" / "live.png")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine(), flush=True)
    artifacts = planned_artifacts("train", "calibrate", "profile_sps", "schedule")
    stage = compose([])[0].stage.schedule
    trained: Trained = trained_drafters()[0]
    target, drafter = trained.load(fast_dtype())
    calibration = Calibration.from_json(open_storage(artifacts["calibrate"].uri).read(CalibrationArtifact.CALIBRATION), drafter.block_size)
    report = json.loads(open_storage(artifacts["schedule"].uri).read(ScheduleReport.REPORT))
    profile = step_profile(read_profile(artifacts["profile_sps"], {"block_size": drafter.block_size}), ENGINE)
    rows = []
    for num_requests in arguments.concurrency:
        num_prompts = arguments.prompts + 2 * num_requests * (num_requests > 1)
        known = trained.held_out.requests(10**6, ())
        requests = [replace(known[i % len(known)], id=str(i)) for i in range(num_prompts)]
        for policy in arguments.policies:
            predicted = prediction(report, num_requests, policy)
            cost = profile.at(predicted["mean_context_tokens"], num_requests)
            config = DecodingConfig(
                Sampling("greedy", 0.0), arguments.new_tokens, trained.held_out.stop_ids, num_requests, 0,
                verification=verification(policy, cost, num_requests, calibration, stage),
            )  # fmt: skip
            found = load(target, None if policy == "none" else drafter, requests, config)
            expected = predicted["throughput_tokens_per_second"]
            rows.append((num_requests, policy, found.throughput, expected))
            budget = statistics.fmean(found.budgets) / num_requests
            print(
                f"live  {num_requests:3d} at once  {policy:16s} {found.throughput:7.1f} tokens/s, replay {expected:7.1f} = {found.throughput / expected:.3f}"
                f"   budget {budget:.2f}, replay {predicted['mean_budget_tokens']:.2f}",
                flush=True,
            )
    arguments.figure.write_bytes(figure(rows))
    worst = max(abs(measured / expected - 1.0) for _, _, measured, expected in rows)
    print(f"live  largest difference {worst:.1%}: {'passes' if worst <= GOAL else 'FAILS'} ({GOAL:.0%}); figure: {arguments.figure}")
    sys.exit(worst > GOAL)


if __name__ == "__main__":
    main()
