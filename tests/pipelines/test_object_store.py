"""The contract of a place that holds bytes on a real S3 server, and what happens when server, network or writer have trouble."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, Timer
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest

from dspark.storage import LocalStorage, Storage
from pipelines.backends.object_store import ObjectStorage, UploadTimeoutError, open_storage
from pipelines.dag import Artifact, Outcome, Resources, Step, file_checksums
from pipelines.runner import LocalExecutor, NullTracker, Work, plan, run
from tests.s3_servers import Fault, FaultProxy, JuicefsGateway, boto_client, moto_server

PROJECT_ROOT = Path(__file__).resolve().parents[2]
BUCKET = "drafters"


def random_bytes(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


@pytest.fixture
def storage(s3: JuicefsGateway, request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"s3://{BUCKET}/{request.node.name}/")


def prefix(storage: Storage) -> str:
    return storage.uri.removeprefix(f"s3://{BUCKET}/")


# --- uris -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["{}/a b", "file://{}/a%20b", "file://localhost{}/a%20b"])
def test_open_storage_of_a_local_place_is_a_local_storage(uri: str, tmp_path: Path) -> None:
    storage = open_storage(uri.format(tmp_path))
    assert isinstance(storage, LocalStorage)
    assert storage.uri == str(tmp_path / "a b")


def test_open_storage_of_a_bucket_is_an_object_storage_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens there
    storage = open_storage("s3://bucket/a/b/")
    assert isinstance(storage, ObjectStorage)
    assert storage.uri == "s3://bucket/a/b"


def test_open_storage_with_credentials_in_the_uri_refuses_and_does_not_print_them() -> None:
    with pytest.raises(ValueError, match=r"holds credentials\. Fix: leave them out") as caught:
        open_storage("s3://id:geheim@bucket/x")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(("uri", "message"), [("s3://", "names no bucket"), ("file://host/x", "names no host")])
def test_open_storage_of_an_incomplete_uri_says_what_is_missing(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{uri}: .*{message}.* Fix: "):
        open_storage(uri)


def test_open_storage_of_an_unknown_scheme_says_so() -> None:
    with pytest.raises(ValueError, match=r"^gopher9://x/y: .*Fix: use s3://"):
        open_storage("gopher9://x/y").list()


def test_open_storage_of_another_scheme_of_fsspec_keeps_the_contract() -> None:
    storage = open_storage("memory://test-object-store/root")
    storage.put("a/b", b"12")
    assert storage.list() == ["a/b"]
    assert (storage.read("a/b"), storage.exists("a"), storage.size_bytes("a/b")) == (b"12", False, 2)
    assert storage.read_range("a/b", 1, 2) == b"2"
    with pytest.raises(ValueError, match="holds 2"):
        storage.read_range("a/b", 1, 3)
    with storage.open("a/b") as file:
        assert file.read() == b"12"
    assert (storage.sweep(), storage.free_bytes()) == (0, None)
    storage.remove("a/b")
    storage.remove("a/b")
    assert storage.list() == []


# --- the contract ---------------------------------------------------------------------------------------------------


def test_put_then_read_returns_the_bytes(storage: Storage) -> None:
    storage.put("folder/name", b"old")
    storage.put("folder/name", b"new")
    assert storage.read("folder/name") == b"new"
    assert storage.size_bytes("folder/name") == 3
    assert storage.exists("folder/name")
    assert storage.free_bytes() is None


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 128, 1000])
def test_read_of_any_size_is_every_byte(storage: Storage, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(ObjectStorage, "PART_BYTES", 64)
    data = random_bytes(num_bytes)
    storage.put("name", data)
    assert storage.read("name") == data
    for start, end in ((0, num_bytes), (0, min(64, num_bytes)), (num_bytes // 3, num_bytes), (num_bytes, num_bytes)):
        assert storage.read_range("name", start, end) == data[start:end]


@pytest.mark.parametrize(("start", "end"), [(3, 10), (0, 200), (5, 6), (7, 10)])
def test_read_range_beyond_the_end_is_an_error_at_once(storage: Storage, monkeypatch: pytest.MonkeyPatch, start: int, end: int) -> None:
    monkeypatch.setattr(ObjectStorage, "PART_BYTES", 64)
    storage.put("name", b"12345")
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"/name: bytes {start} to {end} were asked for, but it holds 5\. Fix: "):
        storage.read_range("name", start, end)
    assert time.monotonic() - started < ObjectStorage.FIRST_PAUSE_SECONDS, "it was retried"


def test_read_of_an_object_that_is_replaced_meanwhile_refuses_a_mixture(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStorage, "PART_BYTES", 64)
    storage.put("name", random_bytes(100))
    get = ObjectStorage._part

    def get_then_replace(self: ObjectStorage, name: str, start: int, end: int) -> Any:
        part = get(self, name, start, end)
        self.put("name", random_bytes(101)[:100])
        return part

    monkeypatch.setattr(ObjectStorage, "_part", get_then_replace)
    with pytest.raises(OSError, match=r"/name: it was replaced meanwhile\. Fix: "):
        storage.read("name")


@pytest.mark.parametrize("name", ["missing", "folder", "folder/object/below"])
def test_read_of_no_object_raises_file_not_found(storage: Storage, name: str) -> None:
    storage.put("folder/object", b"x")
    assert not storage.exists(name)
    for read in (storage.read, storage.open, storage.size_bytes, lambda name: storage.read_range(name, 0, 1)):
        with pytest.raises(FileNotFoundError, match=name):
            read(name)


def test_remove_of_a_missing_object_is_no_error(storage: Storage) -> None:
    storage.put("a", b"x")
    storage.remove("a")
    storage.remove("a")
    assert storage.list() == []


def test_list_follows_prefixes_and_not_folders(storage: Storage) -> None:
    names = ["train/x-1/record.json", "train/x-2/record.json", "train/y", "trainer/z", "a"]
    for name in names:
        storage.put(name, b"")
    assert storage.list() == sorted(names)
    assert storage.list("train") == ["train/x-1/record.json", "train/x-2/record.json", "train/y", "trainer/z"]
    assert storage.list("train/") == ["train/x-1/record.json", "train/x-2/record.json", "train/y"]
    assert storage.list("train/x-2") == ["train/x-2/record.json"]
    assert storage.list("none/at/all") == []


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    with moto_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        client = boto_client(environment)
        urlopen(Request(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()  # its objects are the process's
        client.create_bucket(Bucket=BUCKET)
        yield client


def test_list_of_more_than_a_thousand_objects_is_complete(moto: Any) -> None:
    from moto.s3.models import s3_backends

    storage = open_storage(f"s3://{BUCKET}/x")
    names = [f"shard-{index:05}" for index in range(1203)]
    for name in names:  # into the server's memory, since a request for each takes long
        s3_backends["123456789012"]["aws"].put_object(BUCKET, f"x/deep/{name}", b"")
    page = moto.list_objects_v2(Bucket=BUCKET)
    assert (page["KeyCount"], page["IsTruncated"]) == (1000, True)
    assert storage.list() == [f"deep/{name}" for name in names]


def test_put_of_many_parts_is_one_commit(moto: Any, tmp_path: Path) -> None:
    storage, data = open_storage(f"s3://{BUCKET}/x"), random_bytes((33 << 20) + 5)
    (tmp_path / "big").write_bytes(data)
    storage.put("bytes", data)
    storage.put_file("file", tmp_path / "big")
    for name in ("bytes", "file"):
        assert moto.head_object(Bucket=BUCKET, Key=f"x/{name}")["ETag"].endswith('-3"'), "not a multipart upload"
        assert storage.read(name) == data
    assert moto.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_list_leaves_out_the_folder_marks_of_other_tools(storage: Storage, s3: JuicefsGateway) -> None:
    for key in (f"{prefix(storage)}/", f"{prefix(storage)}/folder/"):
        boto_client(s3.environment).put_object(Bucket=BUCKET, Key=key, Body=b"")
    storage.put("folder/a", b"")
    assert storage.list() == ["folder/a"]


def test_list_sees_what_another_process_has_just_written_and_removed(storage: Storage) -> None:
    other = open_storage(storage.uri)
    assert storage.list() == []
    other.put("a", b"1")
    assert storage.list() == ["a"]
    assert storage.exists("a")
    other.put("a", b"22")
    assert (storage.read("a"), storage.size_bytes("a")) == (b"22", 2)
    other.remove("a")
    assert storage.list() == []
    assert not storage.exists("a")


def test_put_makes_no_folder_object(moto: Any) -> None:
    open_storage(f"s3://{BUCKET}/x").put("a/b/c", b"x")
    assert [entry["Key"] for entry in moto.list_objects_v2(Bucket=BUCKET)["Contents"]] == ["x/a/b/c"]


def test_put_file_of_a_missing_file_names_the_file(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        storage.put_file("name", tmp_path / "no-such-file")
    assert storage.list() == []


def test_open_reads_and_seeks_like_a_file(storage: Storage) -> None:
    data = random_bytes(3 * ObjectStorage.READ_BUFFER_BYTES // 2)
    storage.put("name", data)
    with storage.open("name") as file:
        assert file.read(10) == data[:10]
        assert file.seek(-7, os.SEEK_END) == len(data) - 7
        assert file.read() == data[-7:]
        assert file.read() == b""
        file.seek(1000)
        assert file.tell() == 1000
        assert file.read() == data[1000:]


def test_open_reads_all_in_few_requests(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(2 * ObjectStorage.READ_BUFFER_BYTES + 5)
    storage.put("name", data)
    ranges: list[tuple[int, int]] = []
    read_range = ObjectStorage.read_range
    monkeypatch.setattr(ObjectStorage, "read_range", lambda self, name, *span: ranges.append(span) or read_range(self, name, *span))
    with storage.open("name") as file:
        assert file.read() == data
    assert ranges == [(0, len(data))]
    with storage.open("name") as file:
        assert b"".join(iter(lambda: file.read(100_000), b"")) == data
    assert len(ranges) == 1 + 3


def test_open_is_read_by_pyarrow(storage: Storage) -> None:
    import pyarrow as pa

    table = pa.table({"a": list(range(1000))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    storage.put("shard.arrow", sink.getvalue().to_pybytes())
    with storage.open("shard.arrow") as file:
        assert pa.ipc.open_file(file).read_all() == table


def write_text(config: str, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    out.put("text", config.encode())
    return Outcome(file_checksums(out, ["text"]))


def test_recipe_on_an_object_store_is_made_once_and_leaves_only_its_artifacts(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fake_stored_stage", sys.modules[__name__])
    first = Step("first", 1, "fake_stored_stage:write_text", "a", {}, Artifact, "x", Resources("/t"))
    steps = [first, Step("second", 1, "fake_stored_stage:write_text", "b", {"first": first}, Artifact, "x", Resources("/t"))]
    screen = SimpleNamespace(started=lambda *_: None, progress=lambda *_: None, finished=lambda *_: None, note=lambda *_: None)
    made = run(plan(steps, storage), storage, open_storage, LocalExecutor(), NullTracker(), screen)
    assert storage.list() == sorted(f"{step.folder}/{name}" for step in steps for name in ("record.json", "text"))
    assert made["second"].uri == f"{storage.uri}/{steps[1].folder}"
    assert [item.verdict.is_hit for item in plan(steps, storage)] == [True, True]
    changed = [replace(first, config="c")]
    assert plan(changed, storage)[0].verdict.reason == 'config: "a" -> "c"'


# --- processes ------------------------------------------------------------------------------------------------------


def in_fork(function: Callable[[], object], timeout_seconds: float = 30.0) -> None:
    """Runs `function` in a forked child; fails when it raises, or hangs."""
    process_id = os.fork()
    if process_id == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        finished, status = os.waitpid(process_id, os.WNOHANG)
        if finished:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(process_id, 9)
    os.waitpid(process_id, 0)
    raise AssertionError("the forked child hangs")


def test_storage_used_before_a_fork_works_in_the_child_and_in_the_parent(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStorage, "PART_BYTES", 64)  # the threads that fetch parts are the child's own
    storage.put("a", random_bytes(1000))
    assert storage.read("a") == random_bytes(1000)

    def child() -> None:
        assert storage.read("a") == random_bytes(1000)
        storage.put("b", b"2")
        assert storage.list() == ["a", "b"]

    in_fork(child)
    assert storage.read("b") == b"2"


def test_storage_pickled_into_another_process_reads_the_same(storage: Storage) -> None:
    storage.put("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.uri == storage.uri
    assert copy.read("a") == b"1"


def test_storage_used_first_by_many_threads_at_once_reads_right(storage: Storage) -> None:
    storage.put("a", b"1")
    fresh = open_storage(storage.uri)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: fresh.read("a"), range(4))) == [b"1"] * 4


# --- mistakes -------------------------------------------------------------------------------------------------------


def every_operation(storage: Storage, path: Path) -> dict[str, Callable[[], object]]:
    path.write_bytes(b"x")
    return {
        "list": storage.list,
        "exists": lambda: storage.exists("a"),
        "read": lambda: storage.read("a"),
        "read_range": lambda: storage.read_range("a", 0, 1),
        "open": lambda: storage.open("a"),
        "size_bytes": lambda: storage.size_bytes("a"),
        "put": lambda: storage.put("a", b"x"),
        "put_file": lambda: storage.put_file("a", path),
    }


def test_missing_bucket_is_an_error_of_every_operation_and_is_not_asked_for_again(s3_proxy: FaultProxy, tmp_path: Path) -> None:
    message = rf"^s3://no-such-bucket/prefix: there is no bucket no-such-bucket at {s3_proxy.url}\. Fix: create it"
    for name, operation in every_operation(open_storage("s3://no-such-bucket/prefix"), tmp_path / "f").items():
        s3_proxy.heal()
        with pytest.raises(ValueError, match=message):
            operation()
        assert s3_proxy.num_requests <= 4, name


def test_missing_credentials_are_an_error_that_names_the_variables(s3: JuicefsGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"^cannot write s3://{BUCKET}/x/a: .*credentials.* Fix: set AWS_ACCESS_KEY_ID"):
        open_storage(f"s3://{BUCKET}/x").put("a", b"1")
    assert time.monotonic() - started < 5, "it was retried"


def test_wrong_secret_is_an_error_after_one_request_and_prints_no_secret(
    s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-word")
    message = rf"^cannot [a-z ]+ s3://{BUCKET}/x.*: access is denied by {s3_proxy.url} .*Fix: set AWS_ACCESS_KEY_ID"
    for name, operation in every_operation(open_storage(f"s3://{BUCKET}/x"), tmp_path / "f").items():
        s3_proxy.heal()
        with pytest.raises(ValueError, match=message) as caught:
            operation()
        assert s3_proxy.num_requests == 1, name
        text = "".join(traceback.format_exception(caught.value))
        assert not [secret for secret in (JuicefsGateway.KEY, "not-the-right-word") if secret in text]


# --- trouble on the way -----------------------------------------------------------------------------------------------


@pytest.fixture
def quick(s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Storage:
    """A storage behind the proxy, with short pauses; every request of the client is one of its own attempts."""
    monkeypatch.setattr(ObjectStorage, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(ObjectStorage, "PART_BYTES", 1 << 20)
    monkeypatch.setitem(ObjectStorage.S3_CONFIG, "retries", {"total_max_attempts": 1})
    return open_storage(f"s3://{BUCKET}/{request.node.name}")


SMALL, LARGE = 300_000, 3_300_000  # one part of a read, and four
TROUBLE = {
    "cut": Fault("GET", after_bytes=100_000),
    "cut in silence": Fault("GET", after_bytes=100_000, is_silent=True),
    "reset": Fault("GET", after_bytes=100_000, is_reset=True),
    "reset at once": Fault("GET", after_bytes=0, is_reset=True),
    "500": Fault("GET", status=500),
    "503": Fault("GET", status=503),
}


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
def test_read_over_passing_trouble_is_asked_again_and_right(quick: Storage, s3_proxy: FaultProxy, trouble: str, num_bytes: int) -> None:
    data = random_bytes(num_bytes)
    quick.put("a", data)
    for read in (
        lambda: quick.read("a"),
        lambda: quick.read_range("a", 5, num_bytes - 7),
        lambda: quick.open("a").read(),
    ):
        s3_proxy.heal()
        s3_proxy.add(replace(TROUBLE[trouble], times=3))
        result = read()
        assert result in (data, data[5:-7])
        assert len([method for method, _ in s3_proxy.requests if method == "GET"]) == 3 + -(-num_bytes // (1 << 20)), "no trouble was met"


@pytest.mark.parametrize("trouble", TROUBLE)
def test_read_over_lasting_trouble_ends_with_an_error_that_names_the_object(quick: Storage, s3_proxy: FaultProxy, trouble: str) -> None:
    quick.put("a", random_bytes(SMALL))
    s3_proxy.heal()
    s3_proxy.add(TROUBLE[trouble])
    arrived = "100,000 of 300,000 bytes arrived" if "cut" in trouble or trouble == "reset" else ""
    with pytest.raises(OSError, match=rf"^cannot read {quick.uri}/a: {arrived}.*\(5 attempts at {s3_proxy.url}\)$".replace("[", r"\[")):
        quick.read("a")
    assert s3_proxy.num_requests == ObjectStorage.ATTEMPTS


def test_read_of_parts_over_lasting_trouble_does_not_ask_for_every_part(quick: Storage, s3_proxy: FaultProxy) -> None:
    quick.put("a", random_bytes(12 << 20))
    s3_proxy.heal()
    s3_proxy.add(Fault("GET", times=1))
    s3_proxy.add(Fault("GET", status=503))
    with pytest.raises(OSError, match="5 attempts"):
        quick.read("a")
    assert s3_proxy.num_requests <= 1 + ObjectStorage.ATTEMPTS * 2 * ObjectStorage.PARALLEL_PARTS


@pytest.mark.parametrize("limit", ["read_timeout", "PART_SECONDS"])
def test_read_of_an_answer_that_does_not_come_is_asked_again(
    quick: Storage, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "PART_SECONDS":
        monkeypatch.setattr(ObjectStorage, limit, 0.3)
    else:
        monkeypatch.setitem(ObjectStorage.S3_CONFIG, limit, 0.3)
    quick.put("a", random_bytes(SMALL))
    s3_proxy.add(Fault("GET", seconds=30.0, times=2))
    started = time.monotonic()
    assert quick.read("a") == random_bytes(SMALL)
    assert 0.6 <= time.monotonic() - started < 5


def test_read_of_a_slow_answer_waits_for_it(quick: Storage, s3_proxy: FaultProxy) -> None:
    quick.put("a", b"1")
    s3_proxy.heal()
    s3_proxy.add(Fault("GET", seconds=0.5, times=1))
    assert quick.read("a") == b"1"
    assert s3_proxy.num_requests == 1


@pytest.mark.parametrize(
    "fault", [Fault("PUT", status=503), Fault("PUT", status=500), Fault("PUT", after_bytes=70_000, is_reset=True)], ids=str
)
def test_put_over_passing_trouble_is_tried_again_and_right(quick: Storage, s3_proxy: FaultProxy, fault: Fault) -> None:
    s3_proxy.add(replace(fault, times=3))
    quick.put("a", random_bytes(SMALL))
    assert [method for method, _ in s3_proxy.requests] == ["PUT"] * 4
    assert quick.read("a") == random_bytes(SMALL)


def test_put_over_lasting_trouble_ends_with_an_error_and_shows_nothing(quick: Storage, s3_proxy: FaultProxy) -> None:
    s3_proxy.add(Fault("PUT", after_bytes=70_000, is_reset=True))
    with pytest.raises(OSError, match=r"^cannot write s3://drafters/.*/a: .*\(5 attempts at http"):
        quick.put("a", random_bytes(SMALL))
    assert s3_proxy.num_requests <= 2 * ObjectStorage.ATTEMPTS  # aiohttp sends once more where a connection breaks before the answer
    assert quick.list() == []
    assert not quick.exists("a")


@pytest.mark.parametrize("num_bytes", [SMALL, 33 << 20])
def test_put_that_hangs_ends_at_its_deadline_and_shows_nothing(
    quick: Storage, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(ObjectStorage, "UPLOAD_SECONDS", 1.0)
    monkeypatch.setattr(ObjectStorage, "UPLOAD_BYTES_PER_SECOND", 1e9)
    s3_proxy.add(Fault("PUT", seconds=60.0))  # the body is not even taken
    started = time.monotonic()
    with pytest.raises(UploadTimeoutError, match=rf"/a: {num_bytes:,} bytes did not arrive within 1 seconds at {s3_proxy.url}\. Fix: "):
        quick.put("a", random_bytes(num_bytes))
    assert 1.0 <= time.monotonic() - started < 4
    s3_proxy.heal()
    assert quick.list() == []
    quick.put("a", b"again")
    assert quick.read("a") == b"again"


def test_server_that_is_not_there_ends_with_an_error_that_names_it(quick: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match=r"^cannot write s3://drafters/x/a: .*http://127\.0\.0\.1:1"):
        open_storage(f"s3://{BUCKET}/x").put("a", b"1")


# --- the end of a writer, and of the server -----------------------------------------------------------------------------


BIG = 64 << 20  # four parts of an upload

KILLED_IN_PUT = """
import sys
from pathlib import Path
from pipelines.backends.object_store import open_storage
open_storage(sys.argv[1]).put_file("big", Path(sys.argv[2]))
"""


@pytest.fixture
def big(tmp_path: Path) -> Path:
    (tmp_path / "big").write_bytes(random_bytes(BIG))
    return tmp_path / "big"


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_put_file_of_many_parts_appears_whole_or_not_at_all(storage: Storage, big: Path) -> None:
    seen, is_over = set(), Event()

    def watch() -> None:
        other = open_storage(storage.uri)
        while not is_over.is_set():
            seen.add(tuple((name, other.size_bytes(name)) for name in other.list()))

    watcher = Thread(target=watch)
    watcher.start()
    wait_for(lambda: seen)
    storage.put_file("big", big)
    is_over.set()
    watcher.join()
    assert seen <= {(), (("big", BIG),)}
    assert () in seen
    assert storage.read("big") == big.read_bytes()


def test_put_file_killed_in_the_middle_shows_nothing_and_the_next_one_succeeds(
    storage: Storage, s3_proxy: FaultProxy, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_proxy.add(Fault("PUT", times=2))
    s3_proxy.add(Fault("PUT", seconds=60.0))
    writer = subprocess.Popen([sys.executable, "-c", KILLED_IN_PUT, storage.uri, str(big)], cwd=PROJECT_ROOT)
    try:
        wait_for(lambda: len([path for method, path in s3_proxy.requests if method == "PUT" and "partNumber" in path]) == 4)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    s3_proxy.heal()
    assert storage.list() == []
    assert not storage.exists("big")
    assert storage.sweep() == 0, "it may be the upload of a living writer"
    monkeypatch.setattr(ObjectStorage, "STALE_UPLOAD_SECONDS", -1)
    assert open_storage(f"{storage.uri}-other").sweep() == 0
    assert storage.sweep() == 1
    assert storage.sweep() == 0
    storage.put_file("big", big)
    assert storage.read("big") == big.read_bytes()


def test_read_and_put_while_the_server_is_killed_and_restarted_succeed(
    juicefs: JuicefsGateway, storage: Storage, s3_proxy: FaultProxy, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStorage, "FIRST_PAUSE_SECONDS", 0.3)
    storage.put("before", b"kept")
    s3_proxy.add(Fault("PUT", times=2))
    s3_proxy.add(Fault("PUT", seconds=1.0, times=2))  # the upload is in its middle when the server dies
    restart = Thread(
        target=lambda: (wait_for(lambda: any("partNumber" in path for _, path in s3_proxy.requests)), juicefs.kill(), juicefs.start())
    )
    restart.start()
    storage.put_file("big", big)
    restart.join()
    assert storage.read("big") == big.read_bytes()
    juicefs.kill()
    Timer(0.3, juicefs.start).start()
    assert storage.read("before") == b"kept"
    assert storage.list() == ["before", "big"]
