"""The contract of a place that holds bytes, on an S3 server (moto, on loopback), and what happens when S3 has trouble."""

import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.storage import LocalStorage, Storage
from pipelines.backends import object_store
from pipelines.backends.object_store import ObjectStorage, open_storage
from pipelines.dag import Artifact, Outcome, Resources, Step, file_checksums
from pipelines.runner import LocalExecutor, NullTracker, Work, plan, run

BUCKET = "drafters"
KEYS = {
    "AWS_ACCESS_KEY_ID": "an-id",
    "AWS_SECRET_ACCESS_KEY": "a-very-secret-word",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3(server_url: str, environment: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", server_url)
    client = boto3.client("s3")
    if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture
def storage(s3: Any, request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"s3://{BUCKET}/{request.node.name}/")


# --- uris -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["{}/a b", "file://{}/a%20b", "file://localhost{}/a%20b"])
def test_open_storage_of_a_local_place_is_a_local_storage(uri: str, tmp_path: Path) -> None:
    storage = open_storage(uri.format(tmp_path))
    assert isinstance(storage, LocalStorage)
    assert storage.uri == str(tmp_path / "a b")


def test_open_storage_of_a_bucket_is_an_object_storage_without_a_request(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with storage.open("a/b") as file:
        assert file.read() == b"12"
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


@pytest.mark.parametrize("name", ["missing", "folder", "folder/object/below"])
def test_read_of_no_object_raises_file_not_found(storage: Storage, name: str) -> None:
    storage.put("folder/object", b"x")
    assert not storage.exists(name)
    for read in (storage.read, storage.open, storage.size_bytes):
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


def test_list_of_more_than_a_thousand_objects_is_complete(storage: Storage, s3: Any) -> None:
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    names = [f"shard-{index:05}" for index in range(1203)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: s3.put_object(Bucket=BUCKET, Key=f"{prefix}/deep/{name}", Body=b""), names))
    assert storage.list("deep/shard-") == [f"deep/{name}" for name in names]
    assert len(storage.list()) == 1203


def test_list_leaves_out_the_folder_marks_of_other_tools(storage: Storage, s3: Any) -> None:
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    for key in (f"{prefix}/", f"{prefix}/folder/"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"")
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


def test_put_makes_no_folder_object(storage: Storage, s3: Any) -> None:
    storage.put("a/b/c", b"x")
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]] == [f"{prefix}/a/b/c"]


def test_put_file_in_several_parts_keeps_every_byte(storage: Storage, s3: Any, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(101 << 20)  # s3fs cuts from 100 MiB on
    (tmp_path / "big").write_bytes(data)
    storage.put_file("big", tmp_path / "big")
    prefix = storage.uri.removeprefix(f"s3://{BUCKET}/")
    assert s3.head_object(Bucket=BUCKET, Key=f"{prefix}/big")["ETag"].endswith('-3"'), "not a multipart upload"
    assert storage.size_bytes("big") == len(data)
    assert storage.read("big") == data


def test_put_file_of_a_missing_file_names_the_file(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        storage.put_file("name", tmp_path / "no-such-file")
    assert storage.list() == []


def test_open_reads_and_seeks_like_a_file(storage: Storage) -> None:
    data = random.Random(0).randbytes(3 * object_store.READ_BUFFER_BYTES // 2)
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
    data = random.Random(0).randbytes(2 * object_store.READ_BUFFER_BYTES + 5)
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


def test_storage_used_before_a_fork_works_in_the_child_and_in_the_parent(storage: Storage) -> None:
    storage.put("a", b"1")

    def child() -> None:
        assert storage.read("a") == b"1"
        storage.put("b", b"2")
        assert storage.list() == ["a", "b"]

    in_fork(child)
    assert storage.read("b") == b"2"


def test_storage_pickled_into_another_process_reads_the_same(storage: Storage) -> None:
    storage.put("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.uri == storage.uri
    assert copy.read("a") == b"1"


# --- mistakes -------------------------------------------------------------------------------------------------------


def every_operation(storage: Storage, path: Path) -> dict[str, Callable[[], object]]:
    path.write_bytes(b"x")
    return {
        "list": storage.list,
        "exists": lambda: storage.exists("a"),
        "read": lambda: storage.read("a"),
        "open": lambda: storage.open("a"),
        "size_bytes": lambda: storage.size_bytes("a"),
        "put": lambda: storage.put("a", b"x"),
        "put_file": lambda: storage.put_file("a", path),
    }


def test_missing_bucket_is_an_error_of_every_operation(s3: Any, server_url: str, tmp_path: Path) -> None:
    message = rf"^s3://no-such-bucket/prefix: there is no bucket no-such-bucket at {server_url}\. Fix: create it"
    for operation in every_operation(open_storage("s3://no-such-bucket/prefix"), tmp_path / "f").values():
        with pytest.raises(ValueError, match=message):
            operation()


def test_missing_credentials_are_an_error_that_names_the_variables(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"^cannot write s3://{BUCKET}/x/a: .*credentials.* Fix: set AWS_ACCESS_KEY_ID"):
        open_storage(f"s3://{BUCKET}/x").put("a", b"1")
    assert time.monotonic() - started < 5, "it was retried"


# --- trouble: a server whose answers are scripted -----------------------------------------------------------------------


class Scripted(ThreadingHTTPServer):
    """Answers the next status of `script` (0: drops the connection), then 200 with `body`; counts every request."""

    def __init__(self, script: list[int], body: bytes = b"content") -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.script, self.body, self.num_requests = script, body, 0
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


CODES = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.num_requests += 1
        status = self.server.script.pop(0) if self.server.script else 200
        if status == 0:
            self.close_connection = True
            self.connection.close()
            return
        error = f"<Error><Code>{CODES.get(status)}</Code><Message>scripted</Message></Error>".encode()
        body = error if status != 200 else self.server.body if self.command in ("GET", "HEAD") else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def scripted(environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[int]], tuple[Scripted, Storage]]]:
    monkeypatch.setattr(object_store, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setitem(object_store.S3_CONFIG, "retries", {"total_max_attempts": 1})  # botocore's pause is a second
    servers: list[Scripted] = []

    def start(script: list[int]) -> tuple[Scripted, Storage]:
        servers.append(Scripted(script))
        monkeypatch.setenv("AWS_ENDPOINT_URL", servers[-1].url)
        return servers[-1], open_storage("s3://bucket/x")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("trouble", [[503] * 3, [500] * 3, [0] * 3, [503, 0, 500]], ids=str)
def test_put_over_transient_trouble_is_tried_again(scripted: Any, trouble: list[int]) -> None:
    server, storage = scripted(list(trouble))
    storage.put("a", b"1")
    assert server.num_requests == len(trouble) + 1


@pytest.mark.parametrize("trouble", [[503] * 3, [500] * 3, [0] * 3], ids=str)
def test_read_over_transient_trouble_is_tried_again(scripted: Any, trouble: list[int]) -> None:
    _, storage = scripted(list(trouble))
    assert storage.read("a") == b"content"


def test_read_of_an_open_file_over_transient_trouble_is_tried_again(scripted: Any) -> None:
    server, storage = scripted([])
    file = storage.open("a")
    server.script = [503, 500, 0]
    assert file.read() == b"content"


def test_trouble_that_lasts_ends_with_an_error_that_names_the_object(scripted: Any) -> None:
    server, storage = scripted([503] * 1000)
    with pytest.raises(OSError, match=rf"^cannot write s3://bucket/x/a: .*\({object_store.ATTEMPTS} attempts at {server.url}\)"):
        storage.put("a", b"1")
    assert server.num_requests == object_store.ATTEMPTS


def test_server_that_is_not_there_ends_with_an_error_that_names_it(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setitem(object_store.S3_CONFIG, "retries", {"total_max_attempts": 1})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match=r"^cannot write s3://bucket/x/a: .*http://127\.0\.0\.1:1"):
        open_storage("s3://bucket/x").put("a", b"1")


def test_denied_access_is_an_error_at_once_and_prints_no_secret(scripted: Any, tmp_path: Path) -> None:
    server, storage = scripted([])
    for name, operation in every_operation(storage, tmp_path / "f").items():
        server.script, server.num_requests = [403] * 100, 0
        with pytest.raises(
            ValueError, match=rf"^cannot [a-z ]+ s3://bucket/x.*: access is denied by {server.url} .*Fix: set AWS_ACCESS_KEY_ID"
        ) as caught:
            operation()
        assert server.num_requests == 1, name
        text = "".join(traceback.format_exception(caught.value))
        assert not [secret for secret in ("an-id", "a-very-secret-word") if secret in text]
