"""Two drivers of one store: who may work in a folder, and which of its contents may be gone on from."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dspark.storage import LocalStorage
from pipelines import lease as lease_module
from pipelines.dag import DAMAGED, RECORD, Verdict
from pipelines.lease import LEASE, Lease

ELSEWHERE = "another-host"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "folder"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "POLL_SECONDS", 0.02)


@pytest.fixture
def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def alive_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def hold(storage: LocalStorage, pid: int, host: str | None = None, work: str = "w", age_seconds: float = 0.0) -> None:
    """Leaves a lease as another driver would have left it."""
    held = {"host": host or socket.gethostname(), "pid": pid, "token": "other", "work": work, "heartbeat": time.time() - age_seconds}
    storage.put(LEASE, json.dumps(held).encode())


def take(
    storage: LocalStorage,
    notes: list[str] | None = None,
    work: str = "w",
    is_finished: bool = False,
    anew: bool = False,
    judge: Callable[[], Verdict] | None = None,
) -> Lease:
    return Lease(storage, work, judge or (lambda: Verdict(is_finished, "")), (notes if notes is not None else []).append, anew)


def read_lease(storage: LocalStorage) -> Mapping[str, Any]:
    return json.loads(storage.read(LEASE))


# --- who may work ---------------------------------------------------------------------------------------------------


def test_lease_on_an_empty_folder_names_its_holder_and_is_gone_afterwards(storage: LocalStorage) -> None:
    with take(storage):
        held = read_lease(storage)
        assert (held["host"], held["pid"], held["work"]) == (socket.gethostname(), os.getpid(), "w")
        assert abs(held["heartbeat"] - time.time()) < 5
    assert storage.list() == []


def test_lease_of_a_process_that_is_gone_is_taken_over_at_once(storage: LocalStorage, gone_pid: int) -> None:
    hold(storage, gone_pid)
    notes: list[str] = []
    started = time.monotonic()
    with take(storage, notes):
        assert read_lease(storage)["pid"] == os.getpid()
    assert time.monotonic() - started < 1
    assert notes == []


def test_lease_of_a_process_that_lives_is_waited_for(storage: LocalStorage, alive_pid: int) -> None:
    hold(storage, alive_pid)
    notes: list[str] = []
    threading.Timer(0.5, lambda: storage.remove(LEASE)).start()
    started = time.monotonic()
    with take(storage, notes):
        assert time.monotonic() - started >= 0.5
        assert read_lease(storage)["pid"] == os.getpid()
    assert len(notes) == 1
    assert f"process {alive_pid} on {socket.gethostname()}: waiting" in notes[0]


def test_lease_of_another_host_is_waited_for_whatever_its_pid(storage: LocalStorage, gone_pid: int) -> None:
    hold(storage, gone_pid, host=ELSEWHERE)
    threading.Timer(0.3, lambda: storage.remove(LEASE)).start()
    started = time.monotonic()
    with take(storage):
        assert time.monotonic() - started >= 0.3


def test_lease_with_an_old_heartbeat_is_taken_over_at_once(storage: LocalStorage, alive_pid: int) -> None:
    for host in (socket.gethostname(), ELSEWHERE):
        hold(storage, alive_pid, host=host, age_seconds=lease_module.LEASE_EXPIRES_SECONDS + 1)
        started = time.monotonic()
        with take(storage):
            assert time.monotonic() - started < 1


def test_lease_of_a_host_whose_clock_is_ahead_expires_when_it_beats_no_more(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LEASE_EXPIRES_SECONDS", 0.4)
    hold(storage, 1, host=ELSEWHERE, age_seconds=-3600)
    started = time.monotonic()
    with take(storage):
        assert 0.4 <= time.monotonic() - started < 2


def test_lease_beats_while_it_is_held(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    with take(storage):
        first = read_lease(storage)["heartbeat"]
        time.sleep(0.3)
        assert read_lease(storage)["heartbeat"] > first
    time.sleep(0.15)
    assert not storage.exists(LEASE), "a beat after the end brought the lease back"


def test_lease_beat_over_a_store_that_fails_once_goes_on(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    notes: list[str] = []
    with take(storage, notes):
        put, failures = storage.put, iter([True])

        def flaky(name: str, data: bytes) -> None:
            if next(failures, False):
                raise OSError("the store stumbled")
            put(name, data)

        monkeypatch.setattr(storage, "put", flaky)
        first = read_lease(storage)["heartbeat"]
        time.sleep(0.4)
        assert read_lease(storage)["heartbeat"] > first
    assert len(notes) == 1
    assert "the store stumbled" in notes[0]


def test_lease_that_another_process_took_over_is_not_taken_back(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, alive_pid: int
) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    notes: list[str] = []
    with take(storage, notes):
        hold(storage, alive_pid)
        time.sleep(0.3)
    assert read_lease(storage)["pid"] == alive_pid
    assert len(notes) == 1
    assert "took this folder over" in notes[0]


def test_lease_taken_by_many_at_once_is_held_by_one_after_the_other(storage: LocalStorage) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with take(LocalStorage(storage.uri)):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.1)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_lease_given_up_by_an_error_is_free_at_once_and_keeps_its_work(storage: LocalStorage) -> None:
    def fail() -> None:
        with take(storage):
            storage.put("receipt", b"1")
            raise RuntimeError("cause")

    with pytest.raises(RuntimeError, match="cause"):
        fail()
    held = read_lease(storage)
    assert (held["work"], held["heartbeat"]) == ("w", 0.0)
    started = time.monotonic()
    with take(storage):
        assert time.monotonic() - started < 1
        assert storage.exists("receipt")


def test_lease_end_over_a_broken_store_keeps_the_error_of_the_step(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(name: str, data: bytes) -> None:
        raise OSError("the store is gone")

    def fail() -> None:
        with take(storage):
            monkeypatch.setattr(storage, "put", put)
            raise RuntimeError("cause")

    with pytest.raises(RuntimeError, match="cause"):
        fail()


# --- which contents may be gone on from -----------------------------------------------------------------------------


def fill(storage: LocalStorage, *names: str) -> None:
    for name in names:
        storage.put(name, b"x")


def test_lease_on_a_folder_begun_for_the_same_work_keeps_its_receipts(storage: LocalStorage, gone_pid: int) -> None:
    fill(storage, "shard-0", "shard-0.receipt")
    hold(storage, gone_pid, work="w")
    with take(storage, work="w"):
        assert storage.list() == [LEASE, "shard-0", "shard-0.receipt"]


def test_lease_on_a_folder_begun_for_other_work_empties_it(storage: LocalStorage, gone_pid: int) -> None:
    fill(storage, "shard-0", "deep/shard-1")
    hold(storage, gone_pid, work="other inputs")
    with take(storage, work="w"):
        assert storage.list() == [LEASE]
        assert read_lease(storage)["work"] == "w"


def test_lease_on_a_folder_that_nobody_began_empties_it(storage: LocalStorage) -> None:
    fill(storage, "left by something")
    with take(storage):
        assert storage.list() == [LEASE]


def test_lease_on_a_finished_folder_keeps_it(storage: LocalStorage) -> None:
    fill(storage, RECORD, "weights")
    with take(storage, is_finished=True):
        assert storage.list() == [LEASE, RECORD, "weights"]


def test_lease_anew_empties_even_a_finished_folder(storage: LocalStorage, gone_pid: int) -> None:
    fill(storage, RECORD, "weights")
    hold(storage, gone_pid, work="w")
    with take(storage, is_finished=True, anew=True):
        assert storage.list() == [LEASE]


def test_lease_anew_after_waiting_keeps_what_the_other_has_just_made(storage: LocalStorage, alive_pid: int) -> None:
    hold(storage, alive_pid, work="w")
    fill(storage, RECORD, "weights")
    threading.Timer(0.2, lambda: storage.remove(LEASE)).start()
    with take(storage, is_finished=True, anew=True):
        assert storage.list() == [LEASE, RECORD, "weights"]


def test_lease_on_a_folder_with_a_record_that_is_no_hit_empties_it(storage: LocalStorage, gone_pid: int) -> None:
    fill(storage, RECORD, "shard-0.receipt")  # killed after the record, then shard-0 was lost
    hold(storage, gone_pid, work="w")
    with take(storage, work="w", is_finished=False):
        assert storage.list() == [LEASE]


def test_lease_killed_while_it_empties_is_emptied_further_by_the_next(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a folder's receipts must never pass for its own: not even when the work they are of comes back."""
    fill(storage, RECORD, "shard-0", "shard-0.receipt", "shard-1", "shard-1.receipt")
    hold(storage, os.getpid(), work="old", age_seconds=99)
    remove, removed = storage.remove, []

    def die_at_the_third(name: str) -> None:
        if len(removed) == 2:
            raise KeyboardInterrupt
        removed.append(name)
        remove(name)

    monkeypatch.setattr(storage, "remove", die_at_the_third)
    with pytest.raises(KeyboardInterrupt), take(storage, work="new"):
        pass
    monkeypatch.undo()
    assert removed[0] == RECORD, "a folder that is emptied must lose its record first"
    with take(storage, work="old"):
        assert storage.list() == [LEASE]


# --- mending --------------------------------------------------------------------------------------------------------

WHOLE = ["b.arrow", "b.json", LEASE, "manifest.json"]  # what stays of the folder below when a and c are damaged


@pytest.fixture
def damaged_folder(storage: LocalStorage) -> LocalStorage:
    """A finished cache of three shards, two of which are said to be damaged."""
    fill(storage, RECORD, "manifest.json", *(f"{name}.{kind}" for name in "abc" for kind in ("arrow", "json")))
    storage.put(DAMAGED, json.dumps({"files": ["a.arrow", "c.arrow"]}).encode())
    return storage


def judged(storage: LocalStorage) -> Verdict:
    """As dag.judge does."""
    if not storage.exists(RECORD):
        return Verdict(False, "never made")
    noted = json.loads(storage.read(DAMAGED))["files"] if storage.exists(DAMAGED) else []
    lost = {*noted, *(f"{name}.arrow" for name in "abc" if not storage.exists(f"{name}.arrow"))}
    return Verdict(not lost, "", damaged=tuple(sorted(lost)))


def test_lease_on_a_damaged_folder_removes_the_damaged_files_their_receipts_and_the_record(damaged_folder: LocalStorage) -> None:
    with take(damaged_folder, judge=lambda: judged(damaged_folder)):
        assert damaged_folder.list() == WHOLE
        assert read_lease(damaged_folder)["work"] == "w"


def test_lease_anew_on_a_damaged_folder_empties_it(damaged_folder: LocalStorage) -> None:
    with take(damaged_folder, judge=lambda: judged(damaged_folder), anew=True):
        assert damaged_folder.list() == [LEASE]


def test_lease_after_waiting_for_the_one_who_mended_removes_nothing(damaged_folder: LocalStorage, alive_pid: int) -> None:
    hold(damaged_folder, alive_pid)

    def mended() -> None:
        damaged_folder.remove(DAMAGED)
        damaged_folder.remove(LEASE)

    threading.Timer(0.2, mended).start()
    before = set(damaged_folder.list())
    with take(damaged_folder, judge=lambda: judged(damaged_folder)):
        assert set(damaged_folder.list()) == before - {DAMAGED}


@pytest.mark.parametrize("num_removed", range(6))
def test_lease_killed_while_it_mends_loses_nothing_else_and_forgets_no_damage(
    damaged_folder: LocalStorage, monkeypatch: pytest.MonkeyPatch, gone_pid: int, num_removed: int
) -> None:
    remove, left = damaged_folder.remove, []

    def die(name: str) -> None:
        left.append(read_lease(damaged_folder)["work"])
        if len(left) > num_removed:
            raise KeyboardInterrupt
        remove(name)

    monkeypatch.setattr(damaged_folder, "remove", die)
    with pytest.raises(KeyboardInterrupt), take(damaged_folder, judge=lambda: judged(damaged_folder)):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(lease_module, "SETTLE_SECONDS", 0.0)
    hold(damaged_folder, gone_pid, work=left[-1])  # as SIGKILL leaves it
    with take(damaged_folder, judge=lambda: judged(damaged_folder)):
        assert damaged_folder.list() == WHOLE
