"""A process that makes a target cache is killed again and again, on a local disk and on an object store.

After every kill all that can be read is whole: each file is, byte for byte, the one that an undisturbed run writes. In the
end nothing is lost, nothing is there twice, and nothing of the killed writers is left. The states are recorded ones
(recorded.py); everything else is real, and dies by SIGKILL.
"""

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from dspark.cache import MANIFEST, CacheReader, checksum
from dspark.storage import LocalStorage, Storage
from pipelines import dag
from pipelines.backends.object_store import open_storage
from pipelines.dag import RECORD, Step
from pipelines.flow import CacheContent, CacheTargetsConfig
from pipelines.lease import LEASE
from pipelines.stages.cache_targets import cache_identity
from pipelines.targets import TargetIdentity
from tests.pipelines import recorded
from tests.s3_servers import Fault, FaultProxy, JuicefsGateway

LARGE = 14_500  # tokens of an answer whose states take 11 MB: an upload in several parts
LENGTHS = tuple(LARGE if i == 20 else 1800 if i % 40 == 11 else 180 + i % 37 for i in range(100))
ANSWERS = recorded.Answers(LENGTHS, first_token=0, vocab_size=22, max_length_tokens=16_384)
CONFIG = CacheTargetsConfig(CacheContent("transformers", "bf16", "final", 0), TargetIdentity("noise", "w", "t", "c"), (0, 1), 128, 22)
UNIT_BYTES = 400_000  # two rows, most of them
PART_BYTES = 5 << 20  # of an upload: the least that S3 takes
NUM_KILLS = 20
MIN_IN_UPLOAD = 5
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.0005  # shorter than a shard is written

CONTEXT = multiprocessing.get_context("forkserver")  # what all processes import is imported once
CONTEXT.set_forkserver_preload(["tests.pipelines.recorded"])


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    folder = tmp_path_factory.mktemp("recorded")
    recorded.record_states(folder, ANSWERS, CONFIG)
    return recorded.recipe(ANSWERS, CONFIG, folder)


@pytest.fixture(scope="module")
def undisturbed(steps: list[Step], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of the cache that one run without any trouble makes."""
    root = tmp_path_factory.mktemp("undisturbed")
    Life(str(root), steps).end()
    out = LocalStorage(f"{root}/{steps[1].folder}")
    sizes = [out.size_bytes(name) for name in out.list("shard-") if name.endswith(".arrow")]
    assert len(sizes) > 48
    assert max(sizes) > 2 * PART_BYTES
    return read_all(out)


class Life:
    """One process that runs the recipe."""

    def __init__(self, root_uri: str, steps: list[Step], environment: dict[str, str] | None = None) -> None:
        self._process: ForkServerProcess = CONTEXT.Process(
            target=recorded.make, args=(root_uri, steps, UNIT_BYTES, environment or {}, PART_BYTES)
        )
        self._process.start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert self._process.is_alive(), "it ended before it was killed"
            assert time.monotonic() < deadline, "what it was to be killed in did not happen"
            time.sleep(POLL_SECONDS)

    def kill(self, seconds: float = 0.0) -> None:
        """SIGKILL, a moment from now."""
        time.sleep(seconds)
        self._process.kill()
        self._process.join()
        assert self._process.exitcode == -9, "it ended before it was killed"

    def end(self) -> None:
        self._process.join(DEADLINE_SECONDS)
        assert self._process.exitcode == 0


def read_all(out: Storage) -> dict[str, bytes]:
    found = out.list()
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(found, pool.map(out.read, found), strict=True))


def require_whole(out: Storage, undisturbed: dict[str, bytes]) -> None:
    """Everything that is visible is what an undisturbed run writes, and a receipt has its shard."""
    found = read_all(out)
    json.loads(found.pop(LEASE, b"{}"))
    for name, data in found.items():
        assert data == undisturbed[name], f"{name}: {len(data)} bytes that no whole run writes"
        if name.startswith("shard-") and name.endswith(".json"):
            receipt = json.loads(data)
            shard = found[receipt["file"]]
            assert (len(shard), checksum(shard)) == (receipt["bytes"], receipt["checksum"])
    assert RECORD not in found


def require_finished(root: Storage, steps: list[Step], undisturbed: dict[str, bytes]) -> None:
    out = open_storage(f"{root.uri}/{steps[1].folder}")
    found = read_all(out)
    made = json.loads(found.pop(RECORD))
    whole = dict(undisturbed)
    assert made["payload_sha256"] == json.loads(whole.pop(RECORD))["payload_sha256"]
    assert found == whole
    rows = Counter(entry.row_id for entry in CacheReader(out, cache_identity(CONFIG)).entries)
    assert rows == Counter(row["row_id"] for row in recorded.corpus_rows(ANSWERS))
    corpus = dag.read_record(root, steps[0].folder)
    assert corpus is not None
    assert dag.judge(steps[1], root, {"corpus": corpus["payload_sha256"]}).is_hit


# --- on a local disk ----------------------------------------------------------------------------------------------------


def names(folder: Path, start: str, end: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(start) and name.endswith(end)] if folder.is_dir() else []


@pytest.mark.slow
def test_cache_killed_twenty_times_on_a_local_disk_is_whole_each_time_and_loses_no_row(
    steps: list[Step], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    moments, num_in_write = random.Random(1), 0
    root = LocalStorage(str(tmp_path))
    folder = tmp_path / steps[1].folder
    out = LocalStorage(str(folder))
    first_made: dict[str, int] = {}
    for kill in range(NUM_KILLS):
        life = Life(root.uri, steps)
        if kill % 2:  # while a shard is being written
            num_receipts = len(names(folder, "shard-", ".json")) + 1
            life.wait_for(lambda n=num_receipts: len(names(folder, "shard-", ".json")) >= n)
            life.wait_for(lambda: bool(partial_shards(folder)))
            life.kill()
        else:  # anywhere
            num_receipts = len(names(folder, "shard-", ".json")) + moments.randrange(0, 2)
            life.wait_for(lambda n=num_receipts: len(names(folder, "shard-", ".json")) >= n)
            life.kill(moments.uniform(0.0, 0.06))
        num_in_write += bool(partial_shards(folder))
        require_whole(out, undisturbed)
        for name in names(folder, "shard-", ".json"):
            assert first_made.setdefault(name, (folder / name).stat().st_mtime_ns) == (folder / name).stat().st_mtime_ns, "made twice"
    assert num_in_write >= MIN_IN_UPLOAD, f"only {num_in_write} of the kills were inside of a write"
    life = Life(root.uri, steps)
    life.wait_for((folder / MANIFEST).exists)  # and once more, before the record
    life.kill()
    require_whole(out, undisturbed)
    Life(root.uri, steps).end()
    require_finished(root, steps, undisturbed)
    assert {name: (folder / name).stat().st_mtime_ns for name in first_made} == first_made
    assert not list(tmp_path.rglob("*.partial"))


def partial_shards(folder: Path) -> list[str]:
    return [name for name in names(folder, "shard-", ".partial") if ".arrow." in name]


# --- on an object store -------------------------------------------------------------------------------------------------


@pytest.fixture
def proxied(s3: JuicefsGateway) -> Iterator[FaultProxy]:
    """The way of the processes that are killed; this one goes to the server itself."""
    proxy = FaultProxy(s3.url)
    yield proxy
    proxy.close()


def puts(proxy: FaultProxy, part: str) -> list[str]:
    return [path for method, path in list(proxy.requests) if method == "PUT" and part in path]


@pytest.mark.slow
def test_cache_killed_twenty_times_on_an_object_store_is_whole_each_time_and_loses_no_row(
    steps: list[Step], undisturbed: dict[str, bytes], s3: JuicefsGateway, proxied: FaultProxy
) -> None:
    moments, num_in_upload, num_in_parts = random.Random(2), 0, 0
    root = open_storage("s3://drafters/killed")
    out = open_storage(f"{root.uri}/{steps[1].folder}")
    environment = s3.environment | {"AWS_ENDPOINT_URL": proxied.url}
    for kill in range(NUM_KILLS):
        proxied.heal()
        life = Life(root.uri, steps, environment)
        if kill in (1, 2):  # in the middle of an upload in parts
            life.wait_for(lambda: bool(puts(proxied, "partNumber")))
            life.kill(moments.uniform(0.0, 0.01))
            num_in_parts += not [path for method, path in list(proxied.requests) if method == "POST" and "uploadId" in path]
        elif kill % 2:  # while the server holds back a shard
            life.wait_for(lambda: bool(receipts(proxied)))
            num_puts = len(puts(proxied, ""))
            proxied.add(Fault("PUT", times=1, seconds=DEADLINE_SECONDS))
            life.wait_for(lambda n=num_puts: len(puts(proxied, "")) > n)
            life.kill(moments.uniform(0.0, 0.05))
            num_in_upload += puts(proxied, "")[-1].endswith(".arrow")
        else:  # anywhere
            num_receipts = moments.randrange(0, 2)
            life.wait_for(lambda n=num_receipts: len(receipts(proxied)) >= n)
            life.kill(moments.uniform(0.0, 0.1))
        require_whole(out, undisturbed)
    assert num_in_parts >= 1, "no kill was inside of an upload in parts"
    assert num_in_upload >= MIN_IN_UPLOAD, f"only {num_in_upload} of the kills were inside of an upload"
    proxied.heal()
    life = Life(root.uri, steps, environment)
    life.wait_for(lambda: bool(puts(proxied, MANIFEST)))
    life.kill()
    require_whole(out, undisturbed)
    proxied.heal()
    Life(root.uri, steps, environment).end()
    require_finished(root, steps, undisturbed)


def receipts(proxy: FaultProxy) -> list[str]:
    return [path for path in puts(proxy, "/shard-") if path.endswith(".json")]
