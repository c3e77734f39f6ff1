"""Training from a stream: the numbers of a stored cache, never more than the window in the store, and no end that hangs.

Only the engines are fakes (replay.py): they copy the rows of a stored cache, so that every number can be compared bit by
bit. Run as a script, this file is a driver that a test can kill: `python test_stream.py ROOT WORKER [OVERRIDES]`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.cache import CacheReader, CacheRow
from dspark.data import RowDraw
from dspark.storage import LocalStorage, Storage
from pipelines import flow, runner, stream, targets
from pipelines.backends.object_store import open_storage
from pipelines.config import PROJECT_ROOT, compose
from pipelines.dag import Artifact, Step, fingerprint
from pipelines.runner import LocalExecutor, LocalWork, NullTracker, StepFailed
from pipelines.stages import cache_targets
from pipelines.stages import train as train_stage
from pipelines.stages.cache_targets import Unit
from tests.pipelines.replay import CACHE_VARIABLE

SHARD_BYTES = 20_000  # two or three rows
WINDOW_BYTES = 250_000  # the training makes three times as much
REPLAY = "tests.pipelines.replay"
BATCH, NUM_STEPS = 4, 16  # 64 slots: the 24 rows are gone through more than twice
SMALL = [
    f"stage.train.num_steps={NUM_STEPS}", f"stage.train.batch_sequences={BATCH}", "stage.train.select_every_steps=4", "stage.train.checkpoint_every_steps=2",
    "stage.train.window_shards=2", f"stage.cache_targets.window_bytes={WINDOW_BYTES}",
]  # fmt: skip
STREAM, STORE = "stage.cache_targets.mode=stream", "stage.cache_targets.mode=store"


class Silent:
    """A screen that shows nothing."""

    def started(self, step: Step, reason: str) -> None: ...
    def progress(self, progress: runner.Progress) -> None: ...
    def finished(self, step: Step, record: Any) -> None: ...
    def note(self, text: str) -> None: ...


def steps(*overrides: str) -> list[Step]:
    """The recipe from the corpus to the drafter; the corpus is random tokens."""
    settings, _ = compose(["experiment=tiny", "until=train", *SMALL, *overrides])
    targets.ensure_made(settings.target)
    _, regenerate, cache, train = flow.build(settings)
    corpus = replace(regenerate, function=f"{REPLAY}:write_corpus", inputs={})
    cache = replace(cache, inputs={"corpus": corpus})
    return [corpus, cache, replace(train, inputs={"corpus": corpus, "cache": cache})]


def drive(root: Storage, *overrides: str) -> dict[str, Artifact]:
    planned = runner.plan(steps(*overrides), root)
    return runner.run(planned, root, open_storage, LocalExecutor(), NullTracker(), Silent())


def use_small_shards() -> None:
    stream.SHARD_BYTES = cache_targets.SHARD_BYTES = SHARD_BYTES
    runner.POLL_SECONDS = 0.01


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    before = stream.SHARD_BYTES, runner.POLL_SECONDS
    use_small_shards()
    yield
    stream.SHARD_BYTES = cache_targets.SHARD_BYTES = before[0]
    runner.POLL_SECONDS = before[1]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    """A root with a stored cache, and a drafter from it."""
    root = LocalStorage(str(tmp_path_factory.mktemp("stored")))
    drive(root, STORE)
    return root


@pytest.fixture
def root(stored: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """An empty root, whose engines replay the stored cache."""
    monkeypatch.setenv(CACHE_VARIABLE, cache_uri(stored))
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Replay")
    return LocalStorage(str(tmp_path / "root"))


def cache_uri(stored: Storage) -> str:
    return f"{stored.uri}/{steps(STORE)[1].folder}"


def curves(artifact: Artifact) -> bytes:
    return open_storage(artifact.uri).read(train_stage.CURVES)


def leftovers(root: Storage) -> list[Path]:
    return [
        path for path in Path(root.uri).glob("train/*/**/*") if path.is_file() and ("stream" in path.parts or path.suffix == ".partial")
    ]


@contextmanager
def watched(root: Storage) -> Iterator[dict[str, int]]:
    """How much lies in the stream's folder at most, and how much passed through it."""
    seen, sizes, is_over = {"peak": 0, "passed": 0, "largest": 0}, {}, threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            now = 0
            for path in Path(root.uri).glob("train/*/stream/*"):
                try:
                    size = path.stat().st_size
                except FileNotFoundError:
                    continue
                now += size
                if path.suffix == ".arrow":
                    sizes[path.name] = size
            seen["peak"] = max(seen["peak"], now)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield seen
    is_over.set()
    thread.join()
    seen["passed"], seen["largest"] = sum(sizes.values()), max(sizes.values(), default=0)


# --- the same numbers, in a bounded store -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window_shards", "row_uses", "window_bytes"), [(2, 1, WINDOW_BYTES), (100, 1, WINDOW_BYTES), (1, 2, WINDOW_BYTES), (2, 3, 200_000)]
)
def test_stream_of_replayed_shards_gives_the_stored_curve_bit_by_bit_within_its_window(
    stored: Storage, root: Storage, window_shards: int, row_uses: int, window_bytes: int
) -> None:
    order = [f"stage.train.window_shards={window_shards}", f"stage.train.row_uses={row_uses}"]
    from_store = drive(stored, STORE, *order)["train"]
    with watched(root) as seen:
        from_stream = drive(root, STREAM, *order, f"stage.cache_targets.window_bytes={window_bytes}")["train"]
    assert curves(from_stream) == curves(from_store)
    assert from_stream.payload_sha256 == from_store.payload_sha256  # the drafter's weights, too
    assert len(curves(from_stream).splitlines()) == NUM_STEPS
    assert window_bytes / 2 < seen["peak"] <= window_bytes + seen["largest"]
    assert seen["passed"] > 1.3 * window_bytes, "everything fits: the window was never full"
    assert leftovers(root) == []
    assert not root.exists(f"{steps(STREAM)[1].folder}/record.json")
    assert from_stream.record["metrics"]["rows_set_aside"] == 0.0


def test_stream_of_the_real_engine_gives_the_stored_curve(stored: Storage, root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_stage, "CAPTURER", cache_targets.CAPTURER)
    assert curves(drive(root, STREAM)["train"]) == curves(drive(stored, STORE)["train"])


def test_stream_of_a_training_shorter_than_a_unit_ends(stored: Storage, root: Storage) -> None:
    short = ["stage.train.num_steps=1", "stage.cache_targets.window_bytes=10000000"]
    assert curves(drive(root, STREAM, *short)["train"]) == curves(drive(stored, STORE, *short)["train"])
    assert leftovers(root) == []


@pytest.mark.slow
def test_stream_through_an_object_store_gives_the_stored_curve(stored: Storage, root: Storage, s3: object) -> None:
    bucket = open_storage("s3://drafters/stream")
    made = drive(bucket, STREAM)["train"]
    assert curves(made) == curves(drive(stored, STORE)["train"])
    assert open_storage(made.uri).list("stream/") == []


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_plan_of_a_stream_says_so_and_makes_train_depend_on_the_corpus(root: Storage) -> None:
    planned = {item.step.name: item.verdict for item in runner.plan(steps(STREAM), root)}
    assert planned["cache_targets"].reason == "streamed, not kept"
    assert planned["cache_targets"].is_streamed
    drive(root, STREAM)
    assert all(item.verdict.is_hit for item in runner.plan(steps(STREAM), root))
    anew = {item.step.name: item.verdict for item in runner.plan(steps(STREAM), root, rebuild=["regenerate"])}
    assert not anew["train"].is_hit


def test_fingerprints_do_not_know_how_states_get_there() -> None:
    expected = [fingerprint(step) for step in steps(STORE)]
    for how in (STREAM, "stage.cache_targets.window_bytes=1", "stage.cache_targets.compression=zstd", "cluster.engine_workers=3"):
        assert [fingerprint(step) for step in steps(how)] == expected
    assert [fingerprint(step) for step in steps("stage.cache_targets.dtype=fp8")] != expected


def test_drafter_from_a_stream_is_a_hit_once_the_cache_is_stored(root: Storage) -> None:
    streamed = drive(root, STREAM)["train"]
    made = drive(root, STORE)
    assert made["cache_targets"].record["files"]
    assert made["train"].record == streamed.record


def test_drafter_from_a_stored_cache_is_a_hit_for_a_stream_as_long_as_the_cache_is_there(stored: Storage, root: Storage) -> None:
    drive(root, STORE)
    assert all(item.verdict.is_hit for item in runner.plan(steps(STREAM), root))
    root.remove(f"{steps(STORE)[1].folder}/record.json")
    verdict = runner.plan(steps(STREAM), root)[2].verdict
    assert (verdict.is_hit, verdict.reason) == (False, "the payload of input cache changed")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_window_smaller_than_a_step_is_refused_with_the_number_that_is_enough(stored: Storage, root: Storage) -> None:
    with pytest.raises(StepFailed, match=r"stage\.cache_targets\.window_bytes: 30000 .* is less than") as error:
        drive(root, STREAM, "stage.cache_targets.window_bytes=30000")
    assert isinstance(error.value.cause, ValueError)
    enough = re.search(r"Fix: (stage\.cache_targets\.window_bytes=\d+)", str(error.value))
    assert enough
    assert curves(drive(root, STREAM, enough[1])["train"]) == curves(drive(stored, STORE)["train"])


def test_window_that_cannot_hold_rows_until_their_last_use_is_refused_before_training(root: Storage) -> None:
    several = ["stage.train.row_uses=2", "stage.train.window_shards=100"]
    with pytest.raises(StepFailed, match=r"smaller stage\.train\.window_shards"):
        drive(root, STREAM, *several)
    assert not list(Path(root.uri).glob("train/*/checkpoints/*"))


def test_engine_that_fails_ends_the_training_with_its_cause(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Broken")
    started = time.monotonic()
    with pytest.raises(StepFailed, match="the oven is cold"):
        drive(root, STREAM)
    assert time.monotonic() - started < 60
    # The same command goes on where it stopped.
    kept = [name for name in root.list("train/") if name.endswith(".arrow")]
    assert kept
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Replay")
    assert len(curves(drive(root, STREAM)["train"]).splitlines()) == NUM_STEPS
    assert leftovers(root) == []


def test_engine_most_of_whose_rows_are_sound_only_loses_the_others(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Poisoned")
    made = drive(root, STREAM)["train"]
    assert made.record["metrics"]["rows_set_aside"] == 1.0
    assert np.isfinite([json.loads(line)["loss"] for line in curves(made).splitlines()]).all()


def test_engine_of_many_damaged_rows_ends_the_training(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Damaged")
    with pytest.raises(StepFailed, match=r"rows were set aside for what the engine returned.*NaN"):
        drive(root, STREAM)


def test_training_that_is_killed_goes_on_to_the_same_curve(stored: Storage, root: Storage) -> None:
    process = start_driver(root, f"{REPLAY}:Slow")
    deadline = time.monotonic() + 240
    while not (
        list(Path(root.uri).glob("train/*/checkpoints/*/complete.json")) and list(Path(root.uri).glob("train/*/stream/unit-*.arrow"))
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert leftovers(root)
    (Path(root.uri) / steps(STREAM)[2].folder / "stream/unit-000000000-7.arrow").write_bytes(b"half")  # no receipt followed it
    with watched(root) as seen:
        made = drive(root, STREAM)["train"]
    assert curves(made) == curves(drive(stored, STORE)["train"])
    assert seen["peak"] <= WINDOW_BYTES + seen["largest"]
    assert leftovers(root) == []


def test_failed_training_goes_on_with_another_window(stored: Storage, root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the wider one left is cut elsewhere, and may not fit."""
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Broken")
    with pytest.raises(StepFailed):
        drive(root, STREAM, "stage.cache_targets.window_bytes=400000")
    monkeypatch.setattr(train_stage, "CAPTURER", f"{REPLAY}:Replay")
    left = sum(path.stat().st_size for path in leftovers(root))
    assert left > 100_000
    with watched(root) as seen:
        made = drive(root, STREAM, "stage.cache_targets.window_bytes=200000")["train"]
    assert curves(made) == curves(drive(stored, STORE)["train"])
    assert seen["passed"]
    assert leftovers(root) == []


# --- ranks and engines by themselves ----------------------------------------------------------------------------------


class Streamed:
    """The parts of a streamed training, without the training."""

    def __init__(self, root: Storage, stored: Storage, num_ranks: int, num_slots: int = 64, window_bytes: int = WINDOW_BYTES) -> None:
        corpus, _, train = steps(STREAM)
        made = runner.run(runner.plan([corpus], root), root, open_storage, LocalExecutor(), NullTracker(), Silent())["regenerate"]
        resources = replace(train.resources, num_workers=num_ranks)
        cache = Artifact("", {"files": {}})
        self.settings = train_stage.Settings(train.config, resources.target_uri, made, cache, f"{root.uri}/{train.folder}", resources)
        self.plan = train_stage.stream_plan(self.settings)
        self.storage = open_storage(f"{self.settings.out_uri}/{stream.FOLDER}")
        self.window = stream.Window(self.storage, self.plan, window_bytes, num_ranks, num_slots, BATCH)
        self.unit_bytes = stream.unit_bytes(window_bytes)
        self.num_steps = num_slots // BATCH
        identity = cache_targets.cache_identity(train.config)
        reader = CacheReader(open_storage(cache_uri(stored)), identity)
        self._stored = {entry.row_id: reader[i] for i, entry in enumerate(reader.entries)}

    def producers(self, worker: str = "Replay", kind: type[LocalWork] = LocalWork) -> stream.Producers:
        resources = replace(self.settings.resources, num_workers=1)
        capture = cache_targets.capture_settings(train_stage.captured(self.settings), self.settings.corpus, resources, self.storage)
        return stream.Producers(kind(resources, lambda progress: None), capture, self.window, f"{REPLAY}:{worker}")

    def rank(self, rank: int) -> stream.StreamedRows:
        return stream.StreamedRows(self.storage, self.plan, self.unit_bytes, rank)

    def draws(self, step: int, rank: int = 0, num_ranks: int = 1) -> list[RowDraw]:
        return self.plan.order.draws(step, BATCH)[rank::num_ranks]

    def require(self, rows: Sequence[CacheRow], draws: Sequence[RowDraw]) -> None:
        """That these are the rows that the stored cache has for these draws."""
        for row, draw in zip(rows, draws, strict=True):
            expected = self._stored[self.plan.train[draw.row].row_id]
            assert row.row_id == expected.row_id
            assert np.array_equal(row.tapped_PLD.codes, expected.tapped_PLD.codes)
            assert np.array_equal(row.log_sum_exp_S, expected.log_sum_exp_S)

    def go_through(self, rank: int, num_ranks: int, first_step: int = 0, end_step: int | None = None, seconds: float = 0.0) -> None:
        rows = self.rank(rank)
        rows.used(first_step * BATCH)
        for step in range(first_step, self.num_steps if end_step is None else end_step):
            draws = self.draws(step, rank, num_ranks)
            self.require(rows.read(draws), draws)
            time.sleep(seconds)
            rows.used((step + 1) * BATCH)


@contextmanager
def concurrently(*calls: Any) -> Iterator[None]:
    """Runs these beside the body, and fails with the first of their errors."""
    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert errors == []
        assert not thread.is_alive(), "it waits for ever"


def test_ranks_of_different_speed_get_every_row_and_wait_for_the_slowest(root: Storage, stored: Storage) -> None:
    streamed = Streamed(root, stored, num_ranks=2)
    with watched(root) as seen, streamed.producers():
        fast, slow = (lambda: streamed.go_through(0, 2)), (lambda: streamed.go_through(1, 2, seconds=0.05))
        with concurrently(fast, slow):
            pass
    assert seen["passed"] > WINDOW_BYTES
    assert seen["peak"] <= WINDOW_BYTES + seen["largest"]


def test_rank_that_goes_back_to_the_start_gets_used_up_rows_once_more(root: Storage, stored: Storage) -> None:
    """Both were far on; what the second needs again takes the place of what lies ahead, which the first waits for."""
    streamed = Streamed(root, stored, num_ranks=2)
    with watched(root) as seen, streamed.producers():
        with concurrently(lambda: streamed.go_through(0, 2, end_step=10), lambda: streamed.go_through(1, 2, end_step=10)):
            pass
        assert not streamed.storage.exists(f"{stream.unit_name(next(streamed.plan.units(streamed.unit_bytes)))}.json")
        with concurrently(lambda: streamed.go_through(0, 2, first_step=10), lambda: streamed.go_through(1, 2, seconds=0.01)):
            pass
    assert seen["peak"] <= WINDOW_BYTES + seen["largest"]


def test_shard_that_is_removed_and_made_again_under_a_reader_is_read_anew(root: Storage, stored: Storage) -> None:
    streamed = Streamed(root, stored, num_ranks=1)
    rows = streamed.rank(0)
    rows.used(0)
    with streamed.producers():
        draws = streamed.draws(0)
        streamed.require(rows.read(draws), draws)
    shard = LocalStorage(streamed.storage.uri)
    files = {name: shard.read(name) for name in shard.list("unit-")}
    remote = stream.StreamedRows(Remote(shard), streamed.plan, streamed.unit_bytes, 0)
    shard.put(stream.ENGINES, b"{}")
    streamed.require(remote.read(draws), draws)
    for name in sorted(files, key=lambda name: name.endswith(".arrow")):
        shard.remove(name)

    def make_again() -> None:
        time.sleep(0.2)
        for name in sorted(files, key=lambda name: name.endswith(".json")):
            shard.put(name, files[name])

    with concurrently(make_again):
        streamed.require(remote.read(draws), draws)
    for name in files:
        shard.remove(name)
    shard.remove(stream.ENGINES)
    with pytest.raises(ValueError, match="the engines of the stream ended"):
        remote.read(draws)


class Remote:
    """A folder that is not local to its reader: every row is a read of its own."""

    def __init__(self, inner: LocalStorage) -> None:
        self._inner, self.uri = inner, "remote://stream"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_rank_does_not_collect_what_it_is_through_with(root: Storage, stored: Storage) -> None:
    streamed = Streamed(root, stored, num_ranks=1)
    with streamed.producers():
        rows = streamed.rank(0)
        rows.used(0)
        for step in range(streamed.num_steps):
            rows.read(streamed.draws(step))
            rows.used((step + 1) * BATCH)
            held = sum(len(unit.rows) for unit in rows._held)
            assert len(rows._unit_of) <= held <= 3 * BATCH
            assert len(streamed.window._coming) <= 20
    assert len(rows._shards._open) <= len(rows._held)


def test_interrupted_training_ends_its_engines_at_once_and_those_who_wait_for_them(root: Storage, stored: Storage) -> None:
    streamed = Streamed(root, stored, num_ranks=2)  # the second never begins: nothing is ever made
    rows, errors = streamed.rank(0), []

    def wait() -> None:
        rows.used(0)
        with pytest.raises(ValueError, match="the engines of the stream ended") as error:
            rows.read(streamed.draws(0))
        errors.append(error)

    def interrupt() -> None:
        with streamed.producers():
            time.sleep(0.3)
            raise KeyboardInterrupt

    started = time.monotonic()
    with concurrently(wait), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert errors
    assert time.monotonic() - started < 20
    assert not any("_produce" in thread.name for thread in threading.enumerate())


def test_engines_that_are_never_given_a_place_do_not_hold_up_the_end(root: Storage, stored: Storage) -> None:
    """Like actors that wait for CPUs of a full cluster: their items never come back, and the loop looks for others meanwhile."""
    streamed = Streamed(root, stored, num_ranks=1)
    ended = threading.Event()

    class Full(LocalWork):
        def map(self, worker: str, settings: Any, items: Any, keep_failed: bool = False) -> Iterator[Any]:
            running: list[Unit] = []
            try:
                while True:
                    if len(running) < self.resources.num_workers and (item := next(items)) is not None:
                        running.append(item)
                    time.sleep(0.01)
            finally:
                assert len(running) == 1, "more units were begun than there are engines"
                ended.set()
            yield

        def beside(self, resources: Any) -> "Full":
            return Full(resources, self.report)

    streamed.rank(0).used(0)
    with streamed.producers(kind=Full):
        time.sleep(0.2)
    assert ended.is_set()


def test_units_that_are_set_aside_whole_are_replaced_by_the_row_before(
    root: Storage, stored: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_POISONED_FRACTION", 1.0)
    streamed = Streamed(root, stored, num_ranks=1)
    read = []
    with streamed.producers("Hollow"):
        rows = streamed.rank(0)
        rows.used(0)
        for step in range(streamed.num_steps):
            read.append([row.row_id for row in rows.read(streamed.draws(step))])
            rows.used((step + 1) * BATCH)
    wanted = [[streamed.plan.train[draw.row].row_id for draw in streamed.draws(step)] for step in range(streamed.num_steps)]
    assert [len(ids) for ids in read] == [BATCH] * streamed.num_steps
    differing = {step for step in range(streamed.num_steps) if read[step] != wanted[step]}
    assert differing
    assert differing <= {4, 5, 6}  # slots 16 to 23, and what the last of these units holds beyond


def start_driver(root: Storage, worker: str, *overrides: str) -> "subprocess.Popen[str]":
    # As many threads as here: another number of them rounds otherwise.
    environment = {**os.environ, "PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, root.uri, worker, *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=PROJECT_ROOT)


@pytest.mark.ray
@pytest.mark.slow
def test_stream_on_real_ray_shares_the_machine_between_engine_and_training(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pipelines", "experiment=tiny", f"cluster.root={tmp_path}", "cluster=ray", "cluster.tracker=none", STREAM, "until=train",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "streamed, not kept" in done.stdout
    folder = next(tmp_path.glob("train/*"))
    record = json.loads((folder / "record.json").read_text())
    assert len((folder / "curves.jsonl").read_text().splitlines()) == 20
    assert (record["provenance"]["resources"]["cpu_share"], record["provenance"]["resources"]["num_producers"]) == (0.5, 1)
    assert leftovers(LocalStorage(str(tmp_path))) == []
    assert not list(tmp_path.glob("cache_targets/*/*"))


if __name__ == "__main__":
    use_small_shards()
    train_stage.CAPTURER = sys.argv[2]
    drive(LocalStorage(sys.argv[1]), STREAM, *sys.argv[3:])
