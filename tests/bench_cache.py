"""`make bench-cache`: what the target cache costs, each figure beside a plain way of moving the same bytes in the same run.

make bench-cache                          every part, on the newest cache below artifacts/
make bench-cache ARGS="size local"        some of them: size, local, s3, capture
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from dspark.cache import MANIFEST, CacheFormat, CacheIdentity, CacheReader, CacheRow, num_tapped, write_manifest, write_shard
from dspark.data import build_batch
from dspark.states import States, decode, encode
from dspark.storage import LocalStorage, Storage
from pipelines.backends.object_store import open_storage
from pipelines.config import PROJECT_ROOT

BATCH_ROWS, NUM_ANCHORS, BLOCK = 8, 24, 7
NUM_REPEATS = 3
CHUNK_BYTES = 1 << 23
CAPTURE_ROWS = 64  # about what a shard holds
S3_SHARDS = 3


def machine() -> str:
    """What a figure belongs to: commit, processor, threads, load."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    bf16 = "bf16" if torch.cpu._is_avx512_bf16_supported() else "no bf16"
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {bf16}"
    return f"commit {commit or 'unknown'}, {processor}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["size", "local", "s3", "capture"], help="size local s3 capture")
    parser.add_argument("--cache", type=Path, help="folder of a stored cache (default: the newest below artifacts/cache_targets)")
    arguments = parser.parse_args()
    folder = arguments.cache or newest(PROJECT_ROOT / "artifacts" / "cache_targets")
    manifest = json.loads((folder / MANIFEST).read_text())
    counts = f"{manifest['num_rows']} rows, {manifest['num_tokens']} tokens, {manifest['bytes'] / 1e6:.0f} MB"
    print(f"{machine()}; {folder.name}: {counts}")
    for part in arguments.parts:
        {"size": size, "local": local, "s3": s3, "capture": capture}[part](folder, open_cache(LocalStorage(str(folder))))


def newest(folder: Path) -> Path:
    found = sorted(folder.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit(f"{folder}: no stored cache. Fix: make pipeline ARGS=until=cache_targets")
    return found[-1].parent


def open_cache(storage: Storage) -> CacheReader:
    identity = json.loads(storage.read(MANIFEST))["identity"]
    return CacheReader(storage, CacheIdentity(**{**identity, "tapped_layers": tuple(identity["tapped_layers"])}))


# --- bytes a token ----------------------------------------------------------------------------------------------------


def size(folder: Path, cache: CacheReader) -> None:
    """Each form of the very rows of the cache, against 2 H (u L + s) and against DeepSpec's 6 + 2 H (L + 1)."""
    rows = [cache[i] for i in range(len(cache))]
    identity, tokens = cache.shards[0].identity, cache.manifest["num_tokens"]
    u, s = (
        sum(count(row) for row in rows) / tokens for count in (lambda row: num_tapped(row.loss_mask_T), lambda row: len(row.log_sum_exp_S))
    )
    bound = 2 * identity.width * (u * len(identity.tapped_layers) + s)
    print(f"\nbytes a token: u = {u:.3f} kept, s = {s:.3f} supervised, 2H(uL + s) = {bound:.0f}")
    for dtype in ("bf16", "fp8"):
        for compression in ("none", "zstd"):
            with tempfile.TemporaryDirectory() as place:
                manifest = rewrite(cache, LocalStorage(place), CacheFormat(dtype, "final", 0, compression))
            each = manifest["bytes_per_token"]
            print(
                f"  {dtype} {compression:5} {each:7.0f}  {each / bound:.4f} x 2H(uL + s)  {manifest['bytes'] / manifest['bytes_as_deepspec']:.3f} x DeepSpec's"
                + (
                    f"  relative error by layer {[round(e, 4) for e in manifest['exactness']['relative_error']]}"
                    if dtype == "fp8" and compression == "none"
                    else ""
                )
            )


def rewrite(cache: CacheReader, out: Storage, form: CacheFormat) -> dict:
    """The same rows in another form (from a bf16 cache)."""
    identity = cache.shards[0].identity
    receipts = [
        write_shard(
            out,
            shard.file.removesuffix(".arrow"),
            (in_form(shard.read(i), form) for i in range(len(shard.entries))),
            identity,
            form,
            "bench",
        )
        for shard in cache.shards
    ]
    return write_manifest(out, receipts, identity, form)


def in_form(row: CacheRow, form: CacheFormat) -> CacheRow:
    from dspark.cache import Exactness

    assert row.final_SD is not None
    tapped, final = as_tensor(row.tapped_PLD), as_tensor(row.final_SD)
    stored = encode(tapped, form.dtype), encode(final, form.dtype)
    changed = {"tapped_PLD": stored[0], "final_SD": stored[1], "exactness": Exactness.of(tapped, final, *stored)}
    return CacheRow(**{**vars(row), **changed})


def as_tensor(states: States) -> torch.Tensor:
    out = torch.empty(states.codes.shape, dtype=torch.bfloat16)
    decode(states, out)
    return out


# --- MB/s -------------------------------------------------------------------------------------------------------------


def local(folder: Path, cache: CacheReader) -> None:
    files = [folder / shard.file for shard in cache.shards]
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"\nlocal disk, {num_bytes / 1e6:.0f} MB, median of {NUM_REPEATS}, MB/s")
    rows = {shard.file: [shard.read(i) for i in range(len(shard.entries))] for shard in cache.shards}
    form, identity = cache.shards[0].form, cache.shards[0].identity
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:

        def write() -> None:
            for name, found in rows.items():
                write_shard(LocalStorage(place), name.removesuffix(".arrow"), found, identity, form, "bench")

        def copy() -> None:
            for path in files:
                shutil.copyfile(path, Path(place) / "copy")
                with (Path(place) / "copy").open("rb") as file:
                    os.fsync(file.fileno())

        compare("write shards", write, "cp + fsync", copy, num_bytes)
    rows.clear()
    cache.shards.clear()  # what is mapped stays in the page cache
    cache = None

    def from_file() -> None:
        for path in files:
            np.fromfile(path, np.uint8)

    compare("read into batches, first time", lambda: batches(folder), "np.fromfile", from_file, num_bytes)
    checked = open_cache(LocalStorage(str(folder)))
    read_batches(checked)
    compare("read into batches, once checked", lambda: read_batches(checked), "np.fromfile", from_file, num_bytes)
    checked.shards.clear()
    compare("read rows, mapped", lambda: mapped(folder), "8 MB buffer", lambda: raw_read(files), num_bytes)
    forget(files)
    compare(
        "read into batches, from the disk",
        lambda: batches(folder),
        "np.fromfile",
        lambda: [np.fromfile(p, np.uint8) for p in files] and None,
        num_bytes,
        lambda: forget(files),
    )


def batches(folder: Path) -> None:
    """Every row once, in the order of the files, checksums and all."""
    read_batches(open_cache(LocalStorage(str(folder))))


def mapped(folder: Path) -> None:
    """As far as a row's arrays: its bytes are gone through once, for the checksum."""
    cache = open_cache(LocalStorage(str(folder)))
    for i in range(len(cache)):
        cache[i]


def read_batches(cache: CacheReader) -> None:
    with ThreadPoolExecutor(cache.num_readers) as pool:
        read = pool.map if cache.num_readers > 1 else map
        for start in range(0, len(cache), BATCH_ROWS):
            rows = list(read(cache.__getitem__, range(start, min(start + BATCH_ROWS, len(cache)))))
            build_batch([(row, (i,)) for i, row in enumerate(rows)], NUM_ANCHORS, BLOCK)


def raw_read(files: Sequence[Path]) -> None:
    """Into one small buffer again and again: no memory is filled."""
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def forget(files: Sequence[Path]) -> None:
    """Drops the files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(
    name: str, ours: Callable[[], None], other: str, plain: Callable[[], None], num_bytes: int, before: Callable[[], None] = lambda: None
) -> None:
    """Both by turns, so that a noisy machine is noisy for both."""
    seconds: dict[str, list[float]] = {name: [], other: []}
    for _ in range(NUM_REPEATS):
        for label, function in ((name, ours), (other, plain)):
            before()
            started = time.perf_counter()
            function()
            seconds[label].append(time.perf_counter() - started)
    ours_rate, plain_rate = (num_bytes / statistics.median(seconds[label]) / 1e6 for label in (name, other))
    print(f"  {name:36} {ours_rate:8.0f}   {other:12} {plain_rate:8.0f}   ratio {ours_rate / plain_rate:.2f}")


def s3(folder: Path, cache: CacheReader) -> None:
    """A real S3 server on loopback, against s3fs by itself."""
    import s3fs

    from tests.s3_servers import JuicefsGateway

    with tempfile.TemporaryDirectory() as place:
        server = JuicefsGateway(Path(place))
        server.start()
        try:
            server.make_bucket("bench")
            os.environ.update(server.environment)
            store, plain = open_storage("s3://bench/cache"), s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
            shards = cache.shards[:S3_SHARDS]
            files = [folder / shard.file for shard in shards]
            num_bytes = sum(path.stat().st_size for path in files)
            print(f"\nS3 on loopback (juicefs), {num_bytes / 1e6:.0f} MB, median of {NUM_REPEATS}, MB/s")

            def put() -> None:
                for path in files:
                    store.put_file(path.name, path)

            def plain_put() -> None:
                for path in files:
                    plain.put_file(str(path), f"bench/plain/{path.name}")

            def plain_read() -> None:
                for path in files:
                    plain.cat_file(f"bench/cache/{path.name}")

            compare("upload shards", put, "s3fs put", plain_put, num_bytes)
            receipts = [json.loads(path.with_suffix(".json").read_text()) for path in files]
            for path in files:
                store.put_file(f"{path.stem}.json", path.with_suffix(".json"))
            write_manifest(store, receipts, shards[0].identity, shards[0].form)
            remote = open_cache(store)
            compare("read into batches", lambda: read_batches(remote), "s3fs cat", plain_read, num_bytes)
        finally:
            server.stop()


# --- capture ----------------------------------------------------------------------------------------------------------


def capture(folder: Path, cache: CacheReader) -> None:
    """Tokens/s of the engine with states taken out and stored, against its plain prefill of the same sequences.

    Each engine has a process of its own (two in one share vLLM's connector); they take turns.
    """
    numbers = np.linspace(0, len(cache) - 1, CAPTURE_ROWS).astype(int)
    num_tokens = sum(cache.entries[i].num_tokens for i in numbers)
    seconds: dict[str, list[float]] = {"prefill": [], "capture": [], "store": []}
    with ExitStack() as stack:
        engines = {}
        for kind in ("prefill", "capture"):
            pool = ProcessPoolExecutor(1, get_context("spawn"), _start_engine, (kind, folder, numbers.tolist()))
            engines[kind] = stack.enter_context(pool)
        for repeat in range(NUM_REPEATS + 1):
            for name, times in seconds.items():
                found = engines["prefill" if name == "prefill" else "capture"].submit(_timed, name).result()
                if repeat:  # the first warms up
                    times.append(found)
    prefill, taken, stored = (num_tokens / statistics.median(times) for times in seconds.values())
    print(f"\ncapture, {num_tokens} tokens, median of {NUM_REPEATS}, tokens/s")
    for name, rate in (("states taken out", taken), ("and stored, with log-sum-exp", stored)):
        print(f"  {name:36} {rate:8.0f}   {'prefill':12} {prefill:8.0f}   ratio {rate / prefill:.2f}")


_runs: dict[str, Callable[[], object]] = {}  # of this process


def _start_engine(kind: str, folder: Path, numbers: list[int]) -> None:
    from dspark.layers import fast_dtype
    from dspark.target import load_head
    from pipelines.backends.vllm import BATCH_TOKENS, ENGINE_DTYPE, Capture, Prefiller
    from pipelines.stages.cache_targets import cached_rows

    cache = open_cache(LocalStorage(str(folder)))
    model = next(path.parent for path in (PROJECT_ROOT / "models").glob("SmolLM2*/config.json"))
    rows = [cache[i] for i in numbers]
    sequences = [row.token_ids_T.tolist() for row in rows]
    longest, identity, form = max(map(len, sequences)), cache.shards[0].identity, cache.shards[0].form
    if kind == "prefill":
        plain = Prefiller(model, "bf16" if ENGINE_DTYPE == "bfloat16" else "fp32", longest, BATCH_TOKENS)
        _runs["prefill"] = lambda: plain.prefill(sequences)
        return
    head = load_head(model, fast_dtype())
    ours = Capture(model, identity.tapped_layers, head, longest)
    corpus = [
        {
            "row_id": r.row_id,
            "domain": r.domain,
            "split": r.split,
            "sampling": r.provenance,
            "token_ids": r.token_ids_T,
            "loss_mask": r.loss_mask_T,
        }
        for r in rows
    ]

    def store() -> None:
        found = cached_rows(corpus, ours.capture(sequences), head, form)
        with tempfile.TemporaryDirectory() as place:
            write_shard(LocalStorage(place), "shard-00000", found, identity, form, ours.version)

    _runs.update(capture=lambda: deque(ours.capture(sequences), maxlen=0), store=store)


def _timed(name: str) -> float:
    started = time.perf_counter()
    _runs[name]()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
