"""The contract of a place that holds bytes, on a local folder."""

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspark.storage import LocalStorage

PROJECT_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "root"))


def test_storage_uri_of_a_relative_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert LocalStorage("a/b").uri == str(tmp_path / "a/b")


def test_storage_put_then_read_returns_the_bytes(storage: LocalStorage) -> None:
    storage.put("folder/name", b"old")
    storage.put("folder/name", b"new")
    assert storage.read("folder/name") == b"new"
    assert storage.size_bytes("folder/name") == 3
    with storage.open("folder/name") as file:
        file.seek(1)
        assert file.read() == b"ew"


def test_storage_put_file_copies_every_byte(storage: LocalStorage, tmp_path: Path) -> None:
    data = os.urandom((1 << 24) + 17)  # more than one chunk
    (tmp_path / "source").write_bytes(data)
    storage.put_file("copy", tmp_path / "source")
    assert storage.read("copy") == data


@pytest.mark.parametrize("name", ["missing", "folder", "folder/object/below"])
def test_storage_read_of_no_object_raises_file_not_found(storage: LocalStorage, name: str) -> None:
    storage.put("folder/object", b"x")
    assert not storage.exists(name)
    for read in (storage.read, storage.open, storage.size_bytes, lambda name: storage.read_range(name, 0, 1)):
        with pytest.raises(FileNotFoundError):
            read(name)


@pytest.mark.parametrize(("start", "end"), [(0, 5), (0, 0), (5, 5), (1, 4)])
def test_storage_read_range_returns_the_bytes_between(storage: LocalStorage, start: int, end: int) -> None:
    storage.put("name", b"12345")
    assert storage.read_range("name", start, end) == b"12345"[start:end]


@pytest.mark.parametrize(("start", "end"), [(0, 6), (5, 6), (7, 9)])
def test_storage_read_range_beyond_the_end_says_what_it_holds(storage: LocalStorage, start: int, end: int) -> None:
    storage.put("name", b"12345")
    with pytest.raises(ValueError, match=rf"root/name: bytes {start} to {end} were asked for, but it holds 5\. Fix: "):
        storage.read_range("name", start, end)


def test_storage_remove_of_a_missing_object_is_no_error(storage: LocalStorage) -> None:
    storage.put("a", b"x")
    storage.remove("a")
    storage.remove("a")
    storage.remove("never/there")
    assert storage.list() == []


def test_storage_list_follows_prefixes_and_not_folders(storage: LocalStorage) -> None:
    names = ["train/x-1/record.json", "train/x-2/record.json", "train/y", "trainer/z", "a"]
    for name in names:
        storage.put(name, b"")
    assert storage.list() == sorted(names)
    assert storage.list("train") == ["train/x-1/record.json", "train/x-2/record.json", "train/y", "trainer/z"]
    assert storage.list("train/") == ["train/x-1/record.json", "train/x-2/record.json", "train/y"]
    assert storage.list("train/x-2") == ["train/x-2/record.json"]
    assert storage.list("none/at/all") == []


def test_storage_list_reads_only_the_folder_of_its_prefix(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train/a/1", "cache/a/1", "cache/b/1"):
        storage.put(name, b"")
    scanned: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scanned.append(os.path.relpath(path, storage.uri)) or scandir(path))
    assert storage.list("cache/a") == ["cache/a/1"]
    assert scanned == ["cache", "cache/a"]


def test_storage_put_that_fails_leaves_nothing_visible_and_keeps_the_old(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("name", b"old")
    with pytest.raises(TypeError):
        storage.put("name", "not bytes")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        storage.put_file("other", tmp_path / "no such file")
    assert storage.list() == ["name"]
    assert storage.read("name") == b"old"
    assert [path.name for path in Path(storage.uri).iterdir()] == ["name"]


KILLED_IN_PUT = """
import sys
from pathlib import Path
from dspark.storage import LocalStorage
fifo = Path(sys.argv[2])
LocalStorage(sys.argv[1]).put_file("name", fifo)  # blocks in the middle: the other end never closes
"""


def test_storage_put_killed_in_the_middle_leaves_nothing_visible(storage: LocalStorage, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", KILLED_IN_PUT, storage.uri, str(fifo)], cwd=PROJECT_ROOT)
    with fifo.open("wb", buffering=0) as source:
        source.write(b"x" * 1000)
        deadline = time.monotonic() + 20
        while not list(Path(storage.uri).glob("name.*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(Path(storage.uri).glob("name.*")), "the kill came before the write had begun"
    assert storage.list() == []
    assert not storage.exists("name")
    assert storage.sweep() == 1
    assert list(Path(storage.uri).iterdir()) == []
    storage.put("name", b"again")
    assert storage.read("name") == b"again"


def test_storage_sweep_spares_objects_and_writers_that_live(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("folder/object", b"x")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = subprocess.Popen([sys.executable, "-c", KILLED_IN_PUT, storage.uri, str(fifo)], cwd=PROJECT_ROOT)
    with fifo.open("wb", buffering=0) as source:
        source.write(b"x" * 1000)
        deadline = time.monotonic() + 20
        while not list(Path(storage.uri).glob("name.*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert storage.sweep() == 0
    assert writer.wait(20) == 0  # the other end is closed now
    assert storage.read("name") == b"x" * 1000
    assert storage.list() == ["folder/object", "name"]
    assert storage.sweep() == 0


def test_storage_sweep_where_files_have_no_locks_removes_nothing(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    storage.put("name", b"x")
    leftover = Path(storage.uri) / f"other.12345678{LocalStorage.TEMPORARY_SUFFIX}"
    leftover.write_bytes(b"x")
    assert storage.sweep() == 0
    assert leftover.exists()
    assert storage.read("name") == b"x"


def test_storage_put_whose_file_is_swept_before_it_is_locked_writes_another(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, num_swept = fcntl.flock, []

    def sweep_first(file: object, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        num_swept.append(storage.sweep())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    storage.put("name", b"x")
    assert num_swept == [1]
    assert storage.read("name") == b"x"
    assert [path.name for path in Path(storage.uri).iterdir()] == ["name"]


def test_storage_sweep_of_a_root_that_is_not_there_is_nothing(storage: LocalStorage) -> None:
    assert storage.sweep() == 0


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("way", ["put", "put_file"])
def test_storage_put_on_a_full_disk_names_place_and_bytes_and_leaves_nothing(small_disk: Path, tmp_path: Path, way: str) -> None:
    storage = LocalStorage(str(small_disk / "root"))
    storage.put("name", b"old")
    source = tmp_path / "source"
    source.write_bytes(b"x" * (2 << 20))
    put = {"put": lambda: storage.put("name", source.read_bytes()), "put_file": lambda: storage.put_file("name", source)}[way]
    with pytest.raises(ValueError, match=r"the disk is full; 2,097,152 bytes are needed, [\d,]+ are free\. Fix: make room") as caught:
        put()
    assert f"cannot store in {storage.uri}:" in str(caught.value)
    assert [path.name for path in Path(storage.uri).iterdir()] == ["name"]
    assert storage.read("name") == b"old"
    assert storage.free_bytes() > 900_000, "the temporary file still takes room"
    storage.put("name", b"x" * 500_000)
    assert storage.size_bytes("name") == 500_000


@pytest.mark.parametrize(("code", "cause"), [(errno.EDQUOT, "the quota of this user"), (errno.ENOSPC, "the disk is full")])
def test_storage_put_that_finds_no_room_at_its_end_names_the_cause(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, code: int, cause: str
) -> None:
    def no_room(descriptor: int) -> None:  # network file systems find out when they flush
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(ValueError, match=rf"^cannot store in {storage.uri}/folder: {cause}.*; 1 bytes are needed"):
        storage.put("folder/name", b"x")
    assert list(Path(storage.uri, "folder").iterdir()) == []


def test_storage_free_bytes_are_those_of_the_disk_below_a_root_that_is_not_made_yet(small_disk: Path) -> None:
    storage = LocalStorage(str(small_disk / "not" / "made"))
    assert 900_000 < storage.free_bytes() <= 1 << 20
    assert not (small_disk / "not").exists()


def test_storage_put_below_a_regular_file_names_the_file_and_the_fix(storage: LocalStorage) -> None:
    storage.put("file", b"x")
    with pytest.raises(ValueError, match=r"root/file is a regular file, not a folder\. Fix: .*cluster\.root=") as caught:
        storage.put("file/deep/below/name", b"y")
    assert f"cannot store in {storage.uri}/file/deep/below" in str(caught.value)
    assert storage.read("file") == b"x"


def test_storage_put_into_a_forbidden_folder_names_it_and_the_fix(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path, **options: bool) -> None:  # the tests may run as root, whom no mode of a folder stops
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", forbid)
    with pytest.raises(ValueError, match=rf"cannot store in {storage.uri}: permission denied\. Fix: "):
        storage.put("name", b"y")


def test_storage_pickled_into_another_process_reads_the_same(storage: LocalStorage) -> None:
    storage.put("a", b"x")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"x"
