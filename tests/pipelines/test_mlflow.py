"""What a pipeline run leaves in MLflow: a real sqlite store, read back through a client of its own."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dspark.storage import LocalStorage
from pipelines.backends import mlflow as backend
from pipelines.backends.mlflow import MlflowTracker
from pipelines.dag import Artifact, Outcome, Resources, Step
from pipelines.runner import LocalExecutor, Progress, StepFailed, Work, plan, run

PROJECT_ROOT = Path(__file__).resolve().parents[2]
FAKE_MODULE = "fake_tracked_stage"


@dataclass(frozen=True)
class Training:
    lr: float
    names: tuple[str, ...] = ("a",)


def train(config: Training, inputs: Mapping[str, Artifact], out: LocalStorage, work: Work) -> Outcome:
    for done in range(1, 4):
        work.report(Progress(done, 3, "steps", {"loss": 1.0 / done, "train/lr": config.lr}))
    out.put("weights", b"w")
    out.put("figures/curve.png", b"\x89PNG")
    return Outcome({"weights": "0" * 64}, {"accepted_length": 1.9, "tau@math": 2.0}, ("figures/curve.png",))


def fail(config: Training, inputs: Mapping[str, Artifact], out: LocalStorage, work: Work) -> Outcome:
    work.report(Progress(1, 3, "steps", {"loss": 9.0}))
    work.report(Progress(2, 3, "steps", {"loss": 8.0}))
    raise RuntimeError("out of paper")


def interrupt(config: Training, inputs: Mapping[str, Artifact], out: LocalStorage, work: Work) -> Outcome:
    raise KeyboardInterrupt


class Screen:
    def started(self, step: Step, reason: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def finished(self, step: Step, record: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables, made once: that takes seconds. Its folder does not exist before."""
    folder = tmp_path_factory.mktemp("mlflow") / "deep" / "below"
    MlflowTracker(f"sqlite:///{folder}/mlflow.db", "other", str(folder / "artifacts")).begin({})
    return folder / "mlflow.db"


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def tracker(uri: str, tmp_path: Path) -> MlflowTracker:
    return MlflowTracker(uri, "dspark", str(tmp_path / "mlflow-artifacts"))


@pytest.fixture(autouse=True)
def _fakes_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FAKE_MODULE, sys.modules[__name__])


def make_step(function: str = "train", config: Any = Training(6e-4)) -> Step:
    return Step("train", 1, f"{FAKE_MODULE}:{function}", config, {}, Artifact, "label", Resources("/target"))


def drive(tracker: MlflowTracker, tmp_path: Path, step: Step, config: Mapping[str, Any] | None = None) -> None:
    """A driver: begin, run, end, as __main__ does it."""
    root = LocalStorage(str(tmp_path / "artifacts"))
    tracker.begin(config or {"stage": {"train": {"lr": 6e-4}}})
    error: BaseException | None = None
    try:
        run(plan([step], root), root, LocalStorage, LocalExecutor(), tracker, Screen())
    except BaseException as caught:
        error = caught
    tracker.end(error)


def read_runs(uri: str) -> tuple[Any, list[Any], list[Any]]:
    """A client, the parent runs and the child runs, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("dspark")
    runs = list(reversed(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])))
    return client, [r for r in runs if "mlflow.parentRunId" not in r.data.tags], [r for r in runs if "mlflow.parentRunId" in r.data.tags]


def read_artifact(client: Any, run_id: str, name: str) -> bytes:
    return Path(client.download_artifacts(run_id, name)).read_bytes()


# --- what is shown --------------------------------------------------------------------------------------------------


def test_run_that_makes_a_step_shows_config_curves_metrics_figures_and_record(tracker: MlflowTracker, uri: str, tmp_path: Path) -> None:
    drive(tracker, tmp_path, make_step(), {"stage": {"train": {"lr": 6e-4, "betas": [0.9, 0.95]}}, "until": None})
    client, [parent], [child] = read_runs(uri)

    assert parent.info.status == "FINISHED"
    assert json.loads(read_artifact(client, parent.info.run_id, "config.json"))["stage"]["train"]["betas"] == [0.9, 0.95]
    assert parent.data.params == {"stage.train.lr": "0.0006", "stage.train.betas": "[0.9, 0.95]", "until": "null"}

    assert (child.info.run_name, child.info.status) == ("train", "FINISHED")
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert child.data.tags["hit"] == "false"
    assert child.data.tags["folder"] == make_step().folder
    assert child.data.params["lr"] == "0.0006"
    curve = client.get_metric_history(child.info.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert child.data.metrics["accepted_length"] == 1.9
    assert child.data.metrics["tau_math"] == 2.0
    assert child.data.metrics["wall_seconds"] >= 0
    assert read_artifact(client, child.info.run_id, "figures/curve.png") == b"\x89PNG"
    record = json.loads(read_artifact(client, child.info.run_id, "record.json"))
    assert record["mlflow_run_id"] == child.info.run_id
    assert str(tmp_path / "mlflow-artifacts") in parent.info.artifact_uri


def test_hit_links_to_the_run_that_made_it_and_shows_its_metrics(tracker: MlflowTracker, uri: str, tmp_path: Path) -> None:
    drive(tracker, tmp_path, make_step())
    drive(MlflowTracker(uri, "dspark", str(tmp_path / "mlflow-artifacts")), tmp_path, make_step())
    _, parents, [made, hit] = read_runs(uri)
    assert hit.data.tags["hit"] == "true"
    assert hit.data.tags["made_by_run_id"] == made.info.run_id
    assert f"(#/experiments/{made.info.experiment_id}/runs/{made.info.run_id})" in hit.data.tags["mlflow.note.content"]
    assert hit.data.metrics == {"accepted_length": 1.9, "tau_math": 2.0}
    assert hit.data.tags["mlflow.parentRunId"] == parents[1].info.run_id
    assert {run.info.status for run in [*parents, made, hit]} == {"FINISHED"}


def test_hit_made_without_this_mlflow_says_so(tracker: MlflowTracker, uri: str) -> None:
    tracker.begin({})
    tracker.hit(make_step(), {"mlflow_run_id": None, "metrics": {}})
    tracker.hit(make_step(), {"mlflow_run_id": "0" * 32, "metrics": {}})
    _, _, hits = read_runs(uri)
    assert sorted(hit.data.tags["made_by_run_id"] for hit in hits) == ["0" * 32, "unknown"]
    assert all("does not know" in hit.data.tags["mlflow.note.content"] for hit in hits)


def test_curves_are_visible_while_the_step_runs_in_few_requests(tracker: MlflowTracker, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    log_batch = tracker._client.log_batch
    monkeypatch.setattr(
        tracker._client, "log_batch", lambda *a, metrics=(), **k: batches.append(len(metrics)) or log_batch(*a, metrics=metrics, **k)
    )
    tracker.begin({})
    run_id = tracker.start(make_step())
    monkeypatch.setattr(backend, "FLUSH_SECONDS", 0.3)
    batches.clear()
    for done in range(1, 601):
        tracker.progress(Progress(done, 600, "steps", {"loss": 1.0, "lr": 0.1}))
    assert sum(batches) < 1200, "nothing is left to be sent later, so each point was sent alone"
    time.sleep(backend.FLUSH_SECONDS + 2)
    tracker.progress(Progress(600, 600, "steps"))
    assert sum(batches) == 1200
    assert len(batches) <= 5
    assert max(batches) <= backend.METRICS_PER_BATCH
    client, _, _ = read_runs(uri)
    assert client.get_run(run_id).info.status == "RUNNING"
    assert [point.step for point in client.get_metric_history(run_id, "loss")] == list(range(1, 601))


# --- how runs end ---------------------------------------------------------------------------------------------------


def test_step_that_fails_leaves_failed_runs_with_the_error_and_its_last_points(tracker: MlflowTracker, uri: str, tmp_path: Path) -> None:
    drive(tracker, tmp_path, make_step("fail"))
    client, [parent], [child] = read_runs(uri)
    assert (parent.info.status, child.info.status) == ("FAILED", "FAILED")
    assert parent.data.tags["error"] == child.data.tags["error"] == "StepFailed: step train failed: out of paper"
    assert [point.value for point in client.get_metric_history(child.info.run_id, "loss")] == [9.0, 8.0]


def test_interrupt_leaves_killed_runs(tracker: MlflowTracker, uri: str, tmp_path: Path) -> None:
    drive(tracker, tmp_path, make_step("interrupt"))
    _, [parent], [child] = read_runs(uri)
    assert (parent.info.status, child.info.status) == ("KILLED", "KILLED")


def test_end_with_an_error_longer_than_a_tag_is_cut(tracker: MlflowTracker, uri: str) -> None:
    tracker.begin({})
    tracker.end(StepFailed(make_step(), RuntimeError("x" * 20_000)))
    _, [parent], _ = read_runs(uri)
    assert (parent.info.status, len(parent.data.tags["error"])) == ("FAILED", backend.TAG_CHARACTERS)


def test_end_before_begin_and_twice_is_no_error(tracker: MlflowTracker, uri: str) -> None:
    tracker.end(RuntimeError("the config was wrong"))
    tracker.begin({})
    tracker.end(None)
    tracker.end(RuntimeError("too late"))
    _, [parent], _ = read_runs(uri)
    assert parent.info.status == "FINISHED"


# --- limits and trouble ---------------------------------------------------------------------------------------------


def test_params_beyond_mlflows_limits_are_cut_and_whole_in_the_artifact(tracker: MlflowTracker, uri: str) -> None:
    config = {"template": "x" * 20_000, "k" * 400: 1, "odd[key]": "", "many": {f"f{i}": i for i in range(250)}}
    tracker.begin(config)
    client, [parent], _ = read_runs(uri)
    params = parent.data.params
    assert len(params["template"]) == backend.PARAM_CHARACTERS
    assert params["template"].endswith("x...")
    assert params["k" * backend.KEY_CHARACTERS] == "1"
    assert "odd_key_" in params
    assert len(params) == 253
    assert json.loads(read_artifact(client, parent.info.run_id, "config.json")) == config


def test_trouble_with_the_store_while_a_step_runs_is_a_warning_and_loses_no_point(
    tracker: MlflowTracker, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_batch, failures = tracker._client.log_batch, iter([True])

    def flaky(run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if metrics and next(failures, False):
            raise OSError("database is locked")
        log_batch(run_id, metrics=metrics, params=params)

    monkeypatch.setattr(tracker._client, "log_batch", flaky)
    with caplog.at_level(logging.WARNING, "pipelines.mlflow"):
        drive(tracker, tmp_path, make_step())
    client, _, [child] = read_runs(uri)
    assert child.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(child.info.run_id, "loss")] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == ["MLflow does not show the latest points of a curve: database is locked"]


def test_step_whose_run_cannot_be_opened_is_made_all_the_same(
    tracker: MlflowTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def create_run(*arguments: object, **options: object) -> None:
        raise OSError("server is gone")

    root = LocalStorage(str(tmp_path / "artifacts"))
    tracker.begin({})
    monkeypatch.setattr(tracker._client, "create_run", create_run)
    artifacts = run(plan([make_step()], root), root, LocalStorage, LocalExecutor(), tracker, Screen())
    assert artifacts["train"].record["mlflow_run_id"] is None
    assert "MLflow does not show the run of train: server is gone" in caplog.text


def test_experiment_that_was_deleted_is_restored(tracker: MlflowTracker, uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    drive(tracker, tmp_path, make_step())
    client = MlflowClient(uri)
    client.delete_experiment(client.get_experiment_by_name("dspark").experiment_id)
    drive(tracker, tmp_path, make_step())
    assert len(read_runs(uri)[1]) == 2  # MLflow brings its runs back too


def test_store_below_a_regular_file_names_the_setting_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"^cluster\.tracking_uri: .* cannot be used .* Fix: .*cluster\.tracker=none"):
        MlflowTracker(f"sqlite:///{tmp_path}/file/mlflow.db", "dspark", str(tmp_path))


def test_server_that_is_not_there_names_the_setting_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"^cluster\.tracking_uri: http://127\.0\.0\.1:1 cannot be used") as caught:
        MlflowTracker("http://me:geheim@127.0.0.1:1", "dspark", str(tmp_path)).begin({})
    assert "geheim" not in str(caught.value)


QUIET = """
import sys
sys.path.insert(0, sys.argv[1])
from pipelines.backends.mlflow import MlflowTracker
assert "mlflow" not in sys.modules
tracker = MlflowTracker(f"sqlite:///{sys.argv[2]}/new/mlflow.db", "dspark", sys.argv[2])
tracker.begin({"a": 1})
tracker.end(None)
import mlflow
assert mlflow.active_run() is None
assert "torch" not in sys.modules
"""


def test_tracker_on_a_new_store_prints_nothing_and_starts_no_active_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", QUIET, str(PROJECT_ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
