"""`python -m pipelines [overrides]`: composes the config, plans, and runs what is missing.

A target cache that would not fit where it is to lie is refused here, before anything is begun (sizing.py).
Each point of a sweep (`-m`) is a run of its own; one that fails leaves the others alone, and a table of them all ends it (sweep.py).
Nothing heavy is imported before the plan is known: with nothing to do, neither torch nor Ray is ever loaded.
Exit status: 0 done, 1 a step failed, damage was found (mode=verify) or a calibration no longer holds (mode=drift: 0 is keep), 2 the
request itself is wrong, 130 interrupted.
"""

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.storage import Storage
from pipelines import flow, runner, sizing, targets
from pipelines.artifacts import Calibration, EvalReport, ScheduleReport
from pipelines.backends.object_store import open_storage
from pipelines.config import default_experiment, hydra_main, validate
from pipelines.dag import Artifact, read_record
from pipelines.lease import holder
from pipelines.screen import RichScreen
from pipelines.settings import Settings


def main(settings: Settings, plain: dict[str, Any], screen: RichScreen) -> tuple[int, Mapping[str, Artifact]]:
    """The exit status, and what was made or was there already."""
    steps = flow.build(settings)
    root = open_storage(flow.absolute(settings.cluster.root))
    planned = runner.plan(steps, root, settings.rebuild)
    if settings.mode == "status":
        screen.status(planned, root.uri, _states(planned, root))
        return 0, {}
    if settings.mode == "verify":
        return _verify(settings, planned, root, screen), {}
    if settings.mode == "drift":
        return _drift(settings, planned, root, screen), {}
    screen.plan(planned, root.uri)
    if size := sizing.estimate(settings, planned, root):
        screen.cache_size(size, settings.stage.cache_targets)
        sizing.require_room(size, settings.stage.cache_targets)
    if settings.mode == "plan":
        return 0, {}
    has_work = not all(item.verdict.is_hit for item in planned)
    if has_work:
        targets.ensure_made(settings.target)
    executor, tracker = _executor(settings, has_work), _tracker(settings, root.uri)
    error: BaseException | None = None
    try:
        tracker.begin(plain)
        artifacts = runner.run(planned, root, open_storage, executor, tracker, screen)
        screen.summary(artifacts)
        for artifact in artifacts.values():
            if isinstance(artifact, EvalReport):
                screen.evaluation(json.loads(open_storage(artifact.uri).read(artifact.REPORT)))
            elif isinstance(artifact, Calibration):
                screen.calibration(json.loads(open_storage(artifact.uri).read(artifact.REPORT)))
            elif isinstance(artifact, ScheduleReport):
                screen.schedule(json.loads(open_storage(artifact.uri).read(artifact.REPORT)))
    except BaseException as caught:
        error = caught
        raise
    finally:
        tracker.end(error)
        executor.close()
    return 0, artifacts


def _verify(settings: Settings, planned: Sequence[runner.Planned], root: Storage, screen: RichScreen) -> int:
    """Reads the target cache again; 1 when something in it is damaged."""
    from pipelines import verify

    steps = {item.step.name: item.step for item in planned}
    cache, corpus = ((steps[name], read_record(root, steps[name].folder)) for name in ("cache_targets", "regenerate"))
    for step, record in (cache, corpus):
        if record is None:
            raise ValueError(f"mode=verify: {root.uri}/{step.folder} holds no finished {step.artifact.noun}. Fix: run the pipeline first")
    artifacts = [step.artifact(f"{root.uri}/{step.folder}", record) for step, record in (cache, corpus) if record]
    executor = _executor(settings, has_work=True)
    try:
        screen.started(cache[0], f"verify {artifacts[0].uri}")
        work = executor.work(cache[0], screen.progress)
        reports = verify.run(cache[0], artifacts[0], artifacts[1], open_storage(artifacts[0].uri), work)
    finally:
        executor.close()
    screen.verified(reports)
    return int(any(report.problems for report in reports))


def _drift(settings: Settings, planned: Sequence[runner.Planned], root: Storage, screen: RichScreen) -> int:
    """Judges a calibration by new rounds; 1 when it no longer holds."""
    from pipelines import drift

    assert settings.rounds is not None
    if settings.release is not None:
        calibrated = drift.read_calibrated(flow.absolute(settings.release), None)
    else:
        found = [item for item in planned if item.step.name == "calibrate" and item.verdict.record]
        if not found:
            raise ValueError(
                f"mode=drift: {root.uri} holds no finished calibration of this config. Fix: run the pipeline first, or release=<uri>"
            )
        calibrated = drift.read_calibrated(f"{root.uri}/{found[0].step.folder}", settings.drafter.block_size)
    report, uri = drift.run(calibrated, drift.read_rounds(flow.absolute(settings.rounds)), settings.stage.calibrate, root)
    screen.drift(report, uri)
    return int(report["verdict"] == drift.RECALIBRATE)


def _states(planned: Sequence[runner.Planned], root: Storage) -> dict[str, str]:
    """Of each unfinished step: its reason, or who works on it and how many parts are finished."""
    states = {}
    for item in (item for item in planned if not item.verdict.is_hit):
        storage = open_storage(f"{root.uri}/{item.step.folder}")
        parts = sum(name.endswith(".json") for name in storage.list()) - 1
        held = holder(storage)
        states[item.step.name] = f"{held}; {parts} finished parts" if held else item.verdict.reason
    return states


def _executor(settings: Settings, has_work: bool) -> runner.Executor:
    if settings.cluster.executor == "local" or not has_work:
        return runner.LocalExecutor()
    from pipelines.backends.ray import RayExecutor

    return RayExecutor(settings.cluster.address)


def _tracker(settings: Settings, root_uri: str) -> runner.Tracker:
    if settings.cluster.tracker == "none":
        return runner.NullTracker()
    from pipelines.backends.mlflow import MlflowTracker

    uri = settings.cluster.tracking_uri
    if uri is None and "://" in root_uri:
        raise ValueError(
            f"cluster.tracking_uri: null with the root {root_uri}: an object store cannot hold its database. Fix: set MLFLOW_TRACKING_URI, or cluster.tracker=none"
        )
    return MlflowTracker(
        uri or f"sqlite:///{root_uri}/mlflow.db", f"dspark-{settings.target.name}", f"{root_uri}/mlflow" if uri is None else None
    )


def command_line() -> int:
    screen = RichScreen()
    # A job in the background ignores Ctrl-C's signal, and a preempted one gets SIGTERM: both stop a run cleanly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    status = 0
    points: list[tuple[list[str], Mapping[str, Artifact]]] = []
    root = ""

    def run(plain: dict[str, Any], overrides: list[str]) -> None:
        nonlocal status, root
        artifacts: Mapping[str, Artifact] = {}
        try:
            settings = validate(plain)
            root = flow.absolute(settings.cluster.root)
            found, artifacts = main(settings, plain, screen)
        except (runner.StepFailed, ValueError, OSError) as error:
            if not overrides:
                raise
            screen.point_failed(overrides, error)
            found = 1
        status = max(status, found)
        if overrides:
            points.append((overrides, artifacts))

    if default_experiment() == "small_fp32" and not any(word.lstrip("+").startswith(("experiment=", "-")) for word in sys.argv[1:]):
        screen.note(
            "experiment small_fp32: this processor would emulate bf16, several times slower (experiment=small does so nevertheless)"
        )
    try:
        try:
            hydra_main(run)
        finally:  # what is finished of a sweep is shown, also when the rest is stopped
            if any(artifacts for _, artifacts in points):
                from pipelines import sweep

                screen.sweep(*sweep.report(points, open_storage(root), sys.argv[1:]))
    except runner.StepFailed as failed:
        screen.failure(failed)
        return 1
    except (ValueError, OSError) as error:
        screen.config_error(error)
        return 2
    except KeyboardInterrupt:
        screen.interrupted()
        return 130
    return status


if __name__ == "__main__":
    sys.exit(command_line())
