"""Shows every pipeline run in MLflow: one parent run, below it a child per step, named like the step.

    tracker = MlflowTracker("sqlite:////abs/artifacts/mlflow.db", "dspark", "/abs/artifacts/mlflow")

* parent: `config.json`, and the same flattened as parameters.
* a step that runs: its config as parameters, curves while it runs (at most one request every 2 s), and at its end its
  metrics, figures and `record.json`.
* a hit: tags `hit` and `made_by_run_id`, a note that links to the run that made it, and the metrics of its record.

Only the driver calls it. It uses a client of its own and no "active run". Trouble with MLflow while steps run is a warning:
no work is lost because a page that shows it could not be written. MLflow is imported when a tracker is made, since that
takes seconds.
"""

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dspark.storage import Storage
from pipelines.dag import RECORD, Outcome, Step, canonical, fingerprint
from pipelines.runner import Progress

LOG = logging.getLogger("pipelines.mlflow")
FLUSH_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 300.0
MOST_POINTS_KEPT = 100_000
# Limits of MLflow's API.
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
KEY_CHARACTERS, PARAM_CHARACTERS, TAG_CHARACTERS = 250, 6000, 8000


class MlflowTracker:
    """runner.Tracker over MLflow. ValueError from the constructor or `begin` when the tracking store cannot be used.

    `artifact_root`: where a new experiment keeps its files; None leaves the choice to the server.
    """

    def __init__(self, tracking_uri: str, experiment: str, artifact_root: str | None) -> None:
        # No usage reports, and no lines of its own between ours on the screen.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient, entities

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._uri = tracking_uri
        if tracking_uri.startswith("sqlite:///"):
            with self._clear_errors():
                Path(tracking_uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self._entities = entities
        with self._clear_errors():
            self._client = MlflowClient(tracking_uri)
        self._experiment_name, self._artifact_root = experiment, artifact_root
        self._experiment_id, self._parent_id = "", ""
        self._step_run_id: str | None = None
        self._points: list[Any] = []
        self._flushed, self._pause_seconds = 0.0, FLUSH_SECONDS

    def begin(self, config: Mapping[str, Any]) -> None:
        with self._clear_errors():
            self._experiment_id = self._experiment()
            name = time.strftime("%Y-%m-%d %H:%M:%S")
            self._parent_id = self._client.create_run(self._experiment_id, run_name=name).info.run_id
            text = _masked(json.dumps(config, indent=1, default=str))
            self._client.log_text(self._parent_id, text, "config.json")
            self._log_params(self._parent_id, json.loads(text))

    def hit(self, step: Step, record: Mapping[str, Any]) -> None:
        with self._warn(f"the hit of {step.name}"):
            made_by = record["mlflow_run_id"] or "unknown"
            note = f"Nothing was run: `{step.folder}` was {self._link(made_by)}."
            tags = {"hit": "true", "made_by_run_id": made_by, "mlflow.note.content": note}
            run_id = self._create_child(step, tags)
            self._log_metrics(run_id, record["metrics"])
            self._client.log_text(run_id, json.dumps(record, indent=1), RECORD)
            self._client.set_terminated(run_id, "FINISHED")

    def start(self, step: Step) -> str | None:
        self._step_run_id, self._points = None, []
        with self._warn(f"the run of {step.name}"):
            run_id = self._create_child(step, {"hit": "false"})
            self._step_run_id = run_id
            self._log_params(run_id, canonical(step.config))
        return self._step_run_id

    def progress(self, progress: Progress) -> None:
        if self._step_run_id is None:
            return
        now = _milliseconds()
        for name, value in progress.metrics.items():
            self._points.append(self._entities.Metric(_key(name), float(value), now, progress.done))
        if time.monotonic() - self._flushed >= self._pause_seconds:
            self._flush(self._step_run_id)

    def finish(self, outcome: Outcome, storage: Storage, record: Mapping[str, Any]) -> None:
        if self._step_run_id is None:
            return
        run_id, self._step_run_id = self._step_run_id, None
        self._flush(run_id)
        with self._warn("a step's results"):
            seconds = {name: record["provenance"][name] for name in ("wall_seconds", "cpu_seconds")}
            self._log_metrics(run_id, {**record["metrics"], **seconds})
            self._client.log_text(run_id, json.dumps(record, indent=1), RECORD)
            for name in outcome.figures:
                self._log_file(run_id, storage, name)
        if outcome.registered_model:
            with self._warn(f"the model version of {outcome.registered_model}"):
                self._register(outcome.registered_model, storage.uri, run_id, record["fingerprint"])
        with self._warn("the end of a step"):
            self._client.set_terminated(run_id, "FINISHED")

    def _register(self, name: str, source: str, run_id: str, fingerprint: str) -> None:
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name)
        self._client.create_model_version(name, source, run_id, tags={"fingerprint": fingerprint})

    def end(self, error: BaseException | None) -> None:
        """Closes what is open: FINISHED, KILLED after Ctrl-C, FAILED (with the error as a tag) otherwise."""
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        if self._step_run_id is not None:
            self._flush(self._step_run_id)
        open_runs = [run_id for run_id in (self._step_run_id, self._parent_id) if run_id]
        self._step_run_id, self._parent_id = None, ""
        for run_id in open_runs:
            with self._warn("the end of a run"):
                if error is not None:
                    self._client.set_tag(run_id, "error", _masked(f"{type(error).__name__}: {error}")[:TAG_CHARACTERS])
                self._client.set_terminated(run_id, status)

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment_name)
        if found is None:
            try:
                return self._client.create_experiment(self._experiment_name, artifact_location=self._artifact_root)
            except Exception:
                found = self._client.get_experiment_by_name(self._experiment_name)  # another driver made it meanwhile
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def _create_child(self, step: Step, tags: Mapping[str, str]) -> str:
        tags = {"mlflow.parentRunId": self._parent_id, "fingerprint": fingerprint(step), "folder": step.folder, **tags}
        return self._client.create_run(self._experiment_id, run_name=step.name, tags=tags).info.run_id

    def _link(self, made_by: str) -> str:
        try:
            experiment_id = self._client.get_run(made_by).info.experiment_id
        except Exception:  # another tracking store, or none, was used when it was made
            return f"made by run {made_by}, which this MLflow does not know"
        return f"made by [run {made_by}](#/experiments/{experiment_id}/runs/{made_by})"

    def _flush(self, run_id: str) -> None:
        """Sends the collected points; what could not be sent is tried again with later ones, ever more rarely."""
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        del self._points[:-MOST_POINTS_KEPT]
        with self._warn("the latest points of a curve"):
            while self._points:
                self._client.log_batch(run_id, metrics=self._points[:METRICS_PER_BATCH])
                del self._points[:METRICS_PER_BATCH]
            self._pause_seconds = FLUSH_SECONDS
        self._flushed = time.monotonic()

    def _log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        now = _milliseconds()
        points = [self._entities.Metric(_key(name), float(value), now, 0) for name, value in metrics.items()]
        for start in range(0, len(points), METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=points[start : start + METRICS_PER_BATCH])

    def _log_params(self, run_id: str, config: Mapping[str, Any]) -> None:
        params = [self._entities.Param(name, value) for name, value in _flatten(config).items()]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_BATCH])

    def _log_file(self, run_id: str, storage: Storage, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / PurePosixPath(name).name
            path.write_bytes(storage.read(name))
            self._client.log_artifact(run_id, str(path), str(PurePosixPath(name).parent).removeprefix(".") or None)

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"cluster.tracking_uri: {_masked(self._uri)} cannot be used ({_first_line(error)}). Fix: check cluster.tracking_uri, "
                "MLFLOW_TRACKING_URI and cluster.root, or go on without MLflow: cluster.tracker=none"
            ) from error

    @contextlib.contextmanager
    def _warn(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            LOG.warning("MLflow does not show %s: %s", what, _first_line(error))


def _flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Leaves as `a.b.c` -> text, within MLflow's limits; the whole of it is in config.json and record.json."""

    def leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and value:
            for key in value:
                yield from leaves(value[key], f"{path}.{key}" if path else str(key))
        elif path:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _key(path), text if len(text) <= PARAM_CHARACTERS else text[: PARAM_CHARACTERS - 3] + "..."

    return dict(leaves(config, ""))


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:KEY_CHARACTERS]


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _first_line(error: BaseException) -> str:
    return _masked((str(error) or type(error).__name__).splitlines()[0])


def _masked(text: str) -> str:
    """Less the user and password of a uri."""
    return re.sub(r"//[^/@\s]*@", "//", text)
