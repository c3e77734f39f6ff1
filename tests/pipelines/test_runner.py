"""The walk over a recipe: hits, what makes work run again, interruption and resume, two drivers, failures.

The steps are fakes in this file; store, records and leases are real. Run as a script, this file is a driver of its own
that a test can kill: `python test_runner.py ROOT SHARDS SECONDS_PER_SHARD [STEP_TO_REBUILD]`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dspark.storage import LocalStorage, Storage
from pipelines import lease
from pipelines.dag import RECORD, Artifact, Outcome, Resources, Step, file_checksums, fingerprint, read_record
from pipelines.lease import LEASE
from pipelines.runner import LocalExecutor, NullTracker, Planned, Progress, StepFailed, Work, plan, resolve, run

PROJECT_ROOT = Path(__file__).resolve().parents[2]

# --- fake steps: resolved by import path, like real ones --------------------------------------------------------------

FAKE_MODULE = "fake_stage"


@dataclass(frozen=True)
class Write:
    """A step that writes `text` (and its input's text) into `text.txt`."""

    text: str


@dataclass(frozen=True)
class Shards:
    """A step that writes one shard after the other, each with a time stamp, and goes on from those that are there."""

    count: int
    seconds: float


def write(config: Write, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    above = "".join(LocalStorage(artifact.uri).read("text.txt").decode() for artifact in inputs.values())
    out.put("text.txt", (above + config.text).encode())
    work.report(Progress(1, 1, "texts", {"length": len(config.text)}))
    return Outcome(file_checksums(out, ["text.txt"]), {"length": len(config.text)})


def fail(config: Write, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    out.put("half.txt", b"half")
    raise RuntimeError("out of paper")


def interrupt(config: Write, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    raise KeyboardInterrupt


def stumble(config: Shards, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    """Like `shards`, but stops after the first one when it begins in an empty folder."""
    is_new = not out.exists("shard-0.receipt")
    outcome = shards(replace(config, count=1) if is_new else config, inputs, out, work)
    if is_new:
        raise RuntimeError("out of paper")
    return outcome


def unserializable(config: Write, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    return Outcome({}, {"loss": "no number"})  # type: ignore[dict-item]


def shards(config: Shards, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    for index in range(config.count):
        if not out.exists(f"shard-{index}.receipt"):
            time.sleep(config.seconds)
            out.put(f"shard-{index}", str(time.time_ns()).encode())
            out.put(f"shard-{index}.receipt", b"1")
    return Outcome(file_checksums(out, [f"shard-{index}" for index in range(config.count)]))


class Doubler:
    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def __call__(self, item: int) -> int:
        return self.settings * item


def mapped(config: Write, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    out.put("text.txt", json.dumps(list(work.map(f"{FAKE_MODULE}:Doubler", 2, [1, 2, 3]))).encode())
    return Outcome(file_checksums(out, ["text.txt"]))


def make_step(name: str, config: Any = Write("x"), function: str = "write", **inputs: Step) -> Step:
    return Step(name, 1, f"{FAKE_MODULE}:{function}", config, inputs, Artifact, "label", Resources("/target"))


def drive(steps: list[Step], root: Storage, rebuild: tuple[str, ...] = (), **places: Any) -> dict[str, Artifact]:
    planned = plan(steps, root, rebuild)
    return run(planned, root, LocalStorage, LocalExecutor(), places.get("tracker", NullTracker()), places.get("screen", FakeScreen()))


@dataclass
class FakeScreen:
    begun: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def started(self, step: Step, reason: str) -> None:
        self.begun[step.name] = reason

    def progress(self, progress: Progress) -> None: ...

    def finished(self, step: Step, record: Mapping[str, Any]) -> None:
        self.done.append(step.name)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class FakeTracker(NullTracker):
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def hit(self, step: Step, record: Mapping[str, Any]) -> None:
        self.calls.append(("hit", step.name))

    def start(self, step: Step) -> str | None:
        self.calls.append(("start", step.name))
        return f"run-{step.name}"

    def progress(self, progress: Progress) -> None:
        self.calls.append(("progress", progress.done))

    def finish(self, outcome: Outcome, storage: Storage, record: Mapping[str, Any]) -> None:
        assert storage.exists(RECORD), "trouble with the tracker must not lose the record"
        self.calls.append(("finish", record["mlflow_run_id"]))


@pytest.fixture(autouse=True)
def _fakes_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FAKE_MODULE, sys.modules[__name__])
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.02)


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "root"))


def chain(first: str = "a", second: str = "b", third: str = "c") -> list[Step]:
    one = make_step("one", Write(first))
    two = make_step("two", Write(second), one=one)
    return [one, two, make_step("three", Write(third), two=two)]


def reasons(planned: list[Planned]) -> dict[str, str]:
    return {item.step.name: "hit" if item.verdict.is_hit else item.verdict.reason for item in planned}


# --- hits and what runs again ---------------------------------------------------------------------------------------


def test_run_of_a_new_recipe_makes_every_step_in_order(root: LocalStorage) -> None:
    screen = FakeScreen()
    artifacts = drive(chain(), root, screen=screen)
    assert screen.done == ["one", "two", "three"]
    assert LocalStorage(artifacts["three"].uri).read("text.txt") == b"abc"
    assert artifacts["two"].uri == f"{root.uri}/{chain()[1].folder}"


def test_run_a_second_time_makes_nothing(root: LocalStorage) -> None:
    first = drive(chain(), root)
    screen, tracker = FakeScreen(), FakeTracker()
    second = drive(chain(), root, screen=screen, tracker=tracker)
    assert second == first
    assert screen.begun == {}
    assert tracker.calls == [("hit", "one"), ("hit", "two"), ("hit", "three")]


def test_run_with_a_changed_setting_makes_what_depends_on_it(root: LocalStorage) -> None:
    drive(chain(), root)
    screen = FakeScreen()
    artifacts = drive(chain(second="B"), root, screen=screen)
    assert list(screen.begun) == ["two", "three"]
    assert LocalStorage(artifacts["three"].uri).read("text.txt") == b"aBc"
    assert set(reasons(plan(chain(), root)).values()) == {"hit"}, "what was made before is still there"


def test_run_with_other_resources_makes_nothing(root: LocalStorage) -> None:
    drive(chain(), root)
    steps = chain()
    moved = {step.name: replace(step, resources=Resources("s3://elsewhere", num_workers=8)) for step in steps}
    assert set(
        reasons(plan([replace(step, inputs={n: moved[s.name] for n, s in step.inputs.items()}) for step in moved.values()], root)).values()
    ) == {"hit"}


def test_plan_of_a_new_recipe_touches_nothing(root: LocalStorage) -> None:
    assert set(reasons(plan(chain(), root))) == {"one", "two", "three"}
    assert not Path(root.uri).exists()


def test_record_holds_identity_inputs_files_and_provenance(root: LocalStorage) -> None:
    artifacts = drive(chain(), root, tracker=FakeTracker())
    record = read_record(root, chain()[1].folder)
    assert record is not None
    assert record["fingerprint"] == fingerprint(chain()[1])
    assert record["identity"]["config"] == {"__type__": "Write", "text": "b"}
    one = artifacts["one"]
    assert record["inputs"] == {
        "one": {"step": "one", "fingerprint": one.fingerprint, "uri": one.uri, "payload_sha256": one.payload_sha256}
    }
    assert list(record["files"]) == ["text.txt"]
    assert record["metrics"] == {"length": 1.0}
    assert record["mlflow_run_id"] == "run-two"
    provenance = record["provenance"]
    assert provenance["resources"]["target_uri"] == "/target"
    assert provenance["wall_seconds"] >= 0
    assert provenance["cpu_seconds"] >= 0
    assert len(provenance["code_version"]) >= 7
    assert root.list(f"{chain()[1].folder}/") == [f"{chain()[1].folder}/{name}" for name in (RECORD, "text.txt")]


def test_record_where_git_is_not_installed_says_unknown(root: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert drive(chain(), root)["one"].record["provenance"]["code_version"] == "unknown"


def test_tracker_sees_start_progress_and_finish_of_each_step(root: LocalStorage) -> None:
    tracker = FakeTracker()
    drive(chain()[:1], root, tracker=tracker)
    assert tracker.calls == [("start", "one"), ("progress", 1), ("finish", "run-one")]


def test_run_when_the_tracker_fails_at_the_end_of_a_step_keeps_the_artifact(root: LocalStorage) -> None:
    class Broken(FakeTracker):
        def finish(self, outcome: Outcome, storage: Storage, record: Mapping[str, Any]) -> None:
            raise OSError("tracking server is gone")

    with pytest.raises(OSError, match="tracking server"):
        drive(chain()[:1], root, tracker=Broken())
    assert reasons(plan(chain()[:1], root)) == {"one": "hit"}


def test_local_map_gives_results_in_order(root: LocalStorage) -> None:
    artifacts = drive([make_step("mapped", function="mapped")], root)
    assert LocalStorage(artifacts["mapped"].uri).read("text.txt") == b"[2, 4, 6]"


def test_local_map_of_no_items_builds_no_worker() -> None:
    work = LocalExecutor().work(make_step("mapped"), lambda progress: None)
    assert list(work.map("no.such.module:Worker", None, [])) == []


def test_local_map_takes_an_item_when_it_needs_it_and_asks_again_where_there_is_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("pipelines.runner.time.sleep", waits.append)
    begun: list[int | None] = []

    def items() -> Iterator[int | None]:
        for item in (1, None, None, 2, None, 3):
            begun.append(item)
            yield item

    results = LocalExecutor().work(make_step("mapped"), lambda progress: None).map(f"{FAKE_MODULE}:Doubler", 2, items(), keep_failed=True)
    assert next(results) == 2
    assert begun == [1]
    assert list(results) == [4, 6]
    assert len(waits) == 3


def test_local_map_raises_what_an_item_raises_even_where_failed_items_are_kept() -> None:
    work = LocalExecutor().work(make_step("mapped"), lambda progress: None)
    with pytest.raises(TypeError):  # in one process there is no other worker to try
        list(work.map(f"{FAKE_MODULE}:Doubler", 2, [1, object()], keep_failed=True))


def test_resolve_of_a_path_gives_the_object() -> None:
    assert resolve(f"{FAKE_MODULE}:write") is write


# --- rebuild and payloads -------------------------------------------------------------------------------------------


def sharded_chain() -> list[Step]:
    """Its first step's content is random: a rebuild changes the payload under an equal fingerprint."""
    source = make_step("source", Shards(2, 0.0), "shards")
    return [source, make_step("count", Shards(1, 0.0), "shards", source=source)]


def test_rebuild_of_a_step_runs_it_and_what_follows(root: LocalStorage) -> None:
    before = drive(sharded_chain(), root)
    assert reasons(plan(sharded_chain(), root, ["source"])) == {"source": "rebuild=[source]", "count": "input source is made anew"}
    screen = FakeScreen()
    after = drive(sharded_chain(), root, rebuild=("source",), screen=screen)
    assert screen.begun == {"source": "rebuild=[source]", "count": "input source is made anew"}
    assert after["source"].payload_sha256 != before["source"].payload_sha256
    assert after["count"].record["inputs"]["source"]["payload_sha256"] == after["source"].payload_sha256
    assert set(reasons(plan(sharded_chain(), root)).values()) == {"hit"}


def test_rebuild_that_gives_the_same_content_ends_there(root: LocalStorage) -> None:
    drive(chain(), root)
    screen = FakeScreen()
    drive(chain(), root, rebuild=("one",), screen=screen)
    assert list(screen.begun) == ["one"]


def test_rebuild_over_a_damaged_record_makes_the_artifact(root: LocalStorage) -> None:
    drive(chain(), root)
    root.put(f"{chain()[2].folder}/{RECORD}", b"{")
    with pytest.raises(ValueError, match="not a record"):
        plan(chain(), root)
    drive(chain(), root, rebuild=("three",))
    assert set(reasons(plan(chain(), root)).values()) == {"hit"}


def test_input_with_another_payload_makes_what_follows_run_from_an_empty_folder(root: LocalStorage) -> None:
    drive(sharded_chain(), root)
    drive(sharded_chain()[:1], root, rebuild=("source",))  # somebody made only the source anew
    count = sharded_chain()[1]
    root.put(f"{count.folder}/left-over", b"of other inputs")
    stamp = root.read(f"{count.folder}/shard-0")
    assert reasons(plan(sharded_chain(), root)) == {"source": "hit", "count": "the payload of input source changed"}
    drive(sharded_chain(), root)
    assert root.list(f"{count.folder}/") == [f"{count.folder}/{name}" for name in (RECORD, "shard-0", "shard-0.receipt")]
    assert root.read(f"{count.folder}/shard-0") != stamp, "a receipt of other inputs was taken for one of these"


def test_step_interrupted_with_other_inputs_starts_from_an_empty_folder(root: LocalStorage) -> None:
    source = make_step("source", Shards(1, 0.0), "shards")
    steps = [source, make_step("count", Shards(2, 0.0), "stumble", source=source)]
    with pytest.raises(StepFailed):
        drive(steps, root)
    stamp = root.read(f"{steps[1].folder}/shard-0")
    with pytest.raises(StepFailed):  # it stumbles once more: what it finds is an empty folder
        drive(steps, root, rebuild=("source",))
    begun = root.read(f"{steps[1].folder}/shard-0")
    assert begun != stamp
    drive(steps, root)
    assert root.read(f"{steps[1].folder}/shard-0") == begun, "with the same inputs it goes on"


def test_artifact_with_a_lost_file_is_made_anew_from_an_empty_folder(root: LocalStorage) -> None:
    drive(sharded_chain(), root)
    source = sharded_chain()[0]
    stamp = root.read(f"{source.folder}/shard-0")
    root.remove(f"{source.folder}/shard-1")
    assert reasons(plan(sharded_chain(), root))["source"] == "file shard-1 is missing"
    drive(sharded_chain(), root)
    assert root.exists(f"{source.folder}/shard-1")
    assert root.read(f"{source.folder}/shard-0") != stamp, "its receipts say that nothing is missing: they cannot be trusted"


def test_run_where_the_folder_holds_a_record_for_another_fingerprint_refuses(root: LocalStorage) -> None:
    drive(chain(), root)
    name = f"{chain()[0].folder}/{RECORD}"
    root.put(name, json.dumps({**json.loads(root.read(name)), "fingerprint": "0" * 64}).encode())
    with pytest.raises(ValueError, match="shares only 8 digits"):
        drive(chain(), root)


# --- failures -------------------------------------------------------------------------------------------------------


def test_step_that_fails_names_itself_and_the_cause_and_keeps_its_parts(root: LocalStorage) -> None:
    steps = [*chain()[:1], make_step("broken", function="fail", one=chain()[0])]
    with pytest.raises(StepFailed, match="step broken failed: out of paper") as caught:
        drive(steps, root)
    assert caught.value.step.name == "broken"
    assert isinstance(caught.value.cause, RuntimeError)
    assert root.list(f"{steps[1].folder}/") == [f"{steps[1].folder}/{name}" for name in ("half.txt", LEASE)]
    assert reasons(plan(steps, root)) == {"one": "hit", "broken": "never made"}


def test_step_whose_function_does_not_exist_names_itself(root: LocalStorage) -> None:
    with pytest.raises(StepFailed, match=r"step typo failed: .*no_such"):
        drive([make_step("typo", function="no_such")], root)


def test_step_whose_metrics_are_no_numbers_fails_without_a_record(root: LocalStorage) -> None:
    step = make_step("odd", function="unserializable")
    with pytest.raises(StepFailed, match="step odd failed"):
        drive([step], root)
    assert not root.exists(f"{step.folder}/{RECORD}")


def test_executor_that_cannot_start_fails_the_step(root: LocalStorage) -> None:
    class NoCluster(LocalExecutor):
        def work(self, step: Step, report: Any) -> Any:
            raise ConnectionError("no cluster at this address")

    with pytest.raises(StepFailed, match="step one failed: no cluster"):
        run(plan(chain(), root), root, LocalStorage, NoCluster(), NullTracker(), FakeScreen())


def test_interrupt_passes_through_and_frees_the_folder(root: LocalStorage) -> None:
    step = make_step("stopped", function="interrupt")
    with pytest.raises(KeyboardInterrupt):
        drive([step], root)
    assert json.loads(root.read(f"{step.folder}/{LEASE}"))["heartbeat"] == 0.0


def test_run_into_a_root_below_a_regular_file_names_the_file_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"file is a regular file, not a folder\. Fix: .*cluster\.root"):
        drive(chain(), LocalStorage(str(tmp_path / "file" / "artifacts")))


# --- interruption and two drivers -----------------------------------------------------------------------------------


def start_driver(root: LocalStorage, count: int, seconds: float, *rebuild: str) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, root.uri, str(count), str(seconds), *rebuild]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def kill_after(driver: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, driver.communicate()
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()


@pytest.fixture
def slow_step() -> Step:
    return make_step("slow", Shards(6, 0.3), "shards")


@pytest.fixture
def killed_folder(root: LocalStorage, slow_step: Step) -> LocalStorage:
    """The folder of a driver that was killed after its second shard."""
    folder = LocalStorage(f"{root.uri}/{slow_step.folder}")
    kill_after(start_driver(root, 6, 0.3), lambda: folder.exists("shard-1.receipt"))
    return folder


def test_run_after_a_kill_goes_on_from_the_receipts(killed_folder: LocalStorage, root: LocalStorage, slow_step: Step) -> None:
    before = {name: killed_folder.read(name) for name in killed_folder.list() if name != LEASE}
    assert 4 <= len(before) < 12
    assert not killed_folder.exists(RECORD)
    started = time.monotonic()
    drive([slow_step], root)
    assert time.monotonic() - started < 6, "the lease of a process that is gone was waited for"
    after = {name: killed_folder.read(name) for name in killed_folder.list()}
    assert {name: after[name] for name in before} == before
    assert sorted(after) == sorted([RECORD, *(f"shard-{i}" for i in range(6)), *(f"shard-{i}.receipt" for i in range(6))])
    assert reasons(plan([slow_step], root)) == {"slow": "hit"}


def test_run_after_a_kill_and_a_new_input_payload_starts_from_an_empty_folder(
    killed_folder: LocalStorage, root: LocalStorage, slow_step: Step
) -> None:
    held = json.loads(killed_folder.read(LEASE))
    killed_folder.put(LEASE, json.dumps({**held, "work": "what it was with other input payloads"}).encode())
    stamp = killed_folder.read("shard-0")
    drive([slow_step], root)
    assert killed_folder.read("shard-0") != stamp


def test_rebuild_after_a_kill_starts_from_an_empty_folder(killed_folder: LocalStorage, root: LocalStorage, slow_step: Step) -> None:
    stamp = killed_folder.read("shard-0")
    drive([slow_step], root, rebuild=("slow",))
    assert killed_folder.read("shard-0") != stamp


def test_run_after_a_killed_rebuild_goes_on_with_the_rebuild(root: LocalStorage) -> None:
    step = make_step("slow", Shards(3, 0.3), "shards")
    folder = LocalStorage(drive([step], root)["slow"].uri)
    old = folder.read("shard-0")
    kill_after(start_driver(root, 3, 0.3, "slow"), lambda: folder.exists("shard-0.receipt") and folder.read("shard-0") != old)
    begun = folder.read("shard-0")
    drive([step], root)
    assert folder.read("shard-0") == begun


def test_two_drivers_make_the_artifact_once(root: LocalStorage, slow_step: Step) -> None:
    drivers = [start_driver(root, 3, 0.3) for _ in range(2)]
    printed = [driver.communicate(timeout=60) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], printed
    made = [json.loads(out)["made"] for out, _ in printed]
    assert made[0] == made[1], "each shard holds the time it was written: two drivers wrote it"


def test_driver_that_waited_takes_the_other_ones_artifact_as_a_hit(root: LocalStorage) -> None:
    step = make_step("slow", Shards(2, 0.3), "shards")
    screens, trackers = [FakeScreen(), FakeScreen()], [FakeTracker(), FakeTracker()]
    threads = [
        threading.Thread(target=drive, args=([step], root), kwargs={"screen": s, "tracker": t})
        for s, t in zip(screens, trackers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(screen.done) for screen in screens) == [0, 1]
    waiter = screens.index(next(screen for screen in screens if not screen.done))
    assert trackers[waiter].calls == [("hit", "slow")]
    assert len(screens[waiter].notes) == 1
    assert "waiting for it" in screens[waiter].notes[0]


if __name__ == "__main__":
    sys.modules[FAKE_MODULE] = sys.modules["__main__"]
    made = drive(
        [make_step("slow", Shards(int(sys.argv[2]), float(sys.argv[3])), "shards")], LocalStorage(sys.argv[1]), tuple(sys.argv[4:])
    )
    print(json.dumps({"made": made["slow"].payload_sha256}))
