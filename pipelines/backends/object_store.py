"""Places that hold bytes, by uri: `s3://bucket/prefix` and every other fsspec scheme, or a local folder.

    storage = open_storage("s3://drafters/artifacts")      # the `Storage` contract of dspark/storage.py
    storage.put("train/dspark-1a2b3c4d/record.json", data)

The only file that imports fsspec and s3fs, and only once an object store is asked for. What it adds to them:

* No directories: nothing is made before it is written (a store throttles many workers that make the same "folder").
* No cached listings: what another process wrote is seen at once.
* Transient trouble is retried here, around whole operations, with a growing pause and an end. The libraries' own retries
  are cut to one (for the parts of a large upload), since retries inside of retries multiply. A missing object, a denied
  access or a wrong uri is never retried.
* Every byte that was asked for, or an error: what a server calls the end of an answer is compared with the object's size.
* Large objects travel in parts: read in parallel, each part with its own retries; written as a multipart upload, which
  shows nothing before its commit.
* Nothing waits for ever: each answer has a time-out, and each put a deadline that grows with its bytes.
* A fresh client in every process: s3fs hangs when it is used after a fork, and it cannot be pickled into a worker.
* Credentials come from the environment only (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a role; and
  AWS_ENDPOINT_URL for another server than Amazon's). One in a uri is refused, and none is ever printed.
"""

import contextlib
import errno
import io
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar, cast
from urllib.parse import unquote, urlsplit

from dspark.storage import LocalStorage, Storage, beyond_end

T = TypeVar("T")

# What another attempt changes, and what it does not. The names are botocore's, which is not imported for their sake.
TRANSIENT_MODULES = ("aiohttp", "http")
TRANSIENT_NAMES = {"HTTPClientError", "ConnectionError", "ResponseParserError", "IncompleteReadError"}
TRANSIENT_CODES = {"IncompleteBody", "BadDigest"}  # an upload that was damaged on its way


class UploadTimeoutError(TimeoutError):
    """An upload that was not over at its deadline."""


LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, UploadTimeoutError)
LASTING_ERRNO = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.EMSGSIZE, getattr(errno, "EREMCHG", errno.ENOENT)}
DENIED_NAMES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError", "ProfileNotFound"}


def open_storage(uri: str) -> Storage:
    """The storage behind a uri. A relative path counts from the working directory, so callers make it absolute first."""
    parts = urlsplit(uri)
    if "://" not in uri:
        return LocalStorage(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"{uri}: a file uri names no host. Fix: file:///{parts.netloc}{parts.path}")
        return LocalStorage(unquote(parts.path))
    return ObjectStorage(uri)


@dataclass(frozen=True)
class _Part:
    """What a ranged request brought: pieces of bytes, the size of the whole object, and a mark that changes with its content."""

    pieces: list[bytes]
    size_bytes: int
    version: str


class ObjectStorage:
    """The `Storage` contract over fsspec. An object appears whole or not at all: every put is one upload that ends in one commit.

    What the constants bound: an operation is over after ATTEMPTS x 2 (the client's own) x the time-outs of S3_CONFIG; a part
    of a read after ATTEMPTS x PART_SECONDS, even from a server that trickles; a put after UPLOAD_SECONDS + bytes / UPLOAD_BYTES_PER_SECOND.
    """

    ATTEMPTS = 5
    FIRST_PAUSE_SECONDS = 0.5  # doubled after each attempt: 7.5 s in all
    S3_CONFIG: ClassVar = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "total_max_attempts": 2}}
    READ_BUFFER_BYTES = 4 << 20  # of an open file
    PART_BYTES = 32 << 20  # more parallel requests gain nothing on loopback, and smaller ones cost
    PART_SECONDS = 120.0
    PARALLEL_PARTS = 4
    UPLOAD_PART_BYTES = 16 << 20  # from twice as much on, an upload is a multipart upload
    UPLOAD_SECONDS = 120.0
    UPLOAD_BYTES_PER_SECOND = 1_000_000
    STALE_UPLOAD_SECONDS = 6 * 3600  # longer than the deadline of 20 GB

    def __init__(self, uri: str) -> None:
        self._scheme, _, place = uri.partition("://")
        if "@" in place.split("/")[0]:
            raise ValueError(f"a {self._scheme}:// uri holds credentials. Fix: leave them out, they come from the environment")
        self.uri = uri.rstrip("/")
        if self._scheme in ("s3", "s3a") and not place.strip("/"):
            raise ValueError(f"{uri}: names no bucket. Fix: s3://bucket/prefix")
        self._client: Any = None
        self._process_id = 0
        self._inherited: list[Any] = []
        self._root = ""
        self._is_bucket_known = False

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ObjectStorage, (self.uri,)

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Reader(self, name, self.size_bytes(name)), self.READ_BUFFER_BYTES))

    def read(self, name: str) -> bytes:
        first = self._part(name, 0, self.PART_BYTES)  # tells the size as well: a small object is one request
        return self._join(name, [first], self.PART_BYTES, first.size_bytes)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        assert 0 <= start <= end, (start, end)
        return self._join(name, [], start, end) if start < end else b""

    def put(self, name: str, data: bytes) -> None:
        self._upload(name, len(data), lambda fs, path, options: fs.pipe_file(path, data, **options))

    def put_file(self, name: str, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        self._upload(name, path.stat().st_size, lambda fs, remote, options: fs.put_file(str(path), remote, **options))

    def list(self, prefix: str = "") -> list[str]:
        folder, _, start = prefix.rpartition("/")
        narrowed = {"prefix": start} if self._is_s3 and start else {}
        try:
            found = self._try("list", folder, lambda fs, path: fs.find(path, **narrowed))
        except FileNotFoundError:
            return []
        names = (path.removeprefix(self._root).lstrip("/") for path in found)
        return sorted(name for name in names if name and name.startswith(prefix) and not name.endswith("/"))

    def exists(self, name: str) -> bool:
        try:
            return self._try("look up", name, lambda fs, path: fs.info(path))["type"] == "file"
        except FileNotFoundError:
            return False

    def size_bytes(self, name: str) -> int:
        info = self._try("look up", name, lambda fs, path: fs.info(path))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.uri}/{name}")
        return info["size"]

    def remove(self, name: str) -> None:
        try:
            self._try("remove", name, lambda fs, path: fs.rm_file(path))
        except FileNotFoundError:
            return

    def sweep(self) -> int:
        """Aborts multipart uploads that are older than any deadline: S3 does not tell whether a writer lives. A page of them a call."""

        def abort(fs: Any, root: str) -> int:
            bucket, _, prefix = root.partition("/")
            uploads = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/".lstrip("/")).get("Uploads", [])
            stale = [upload for upload in uploads if time.time() - upload["Initiated"].timestamp() > self.STALE_UPLOAD_SECONDS]
            for upload in stale:
                with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                    fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
            return len(stale)

        return self._try("sweep", "", abort) if self._is_s3 else 0

    def free_bytes(self) -> int | None:
        return None

    @property
    def _is_s3(self) -> bool:
        return self._scheme in ("s3", "s3a")

    def _filesystem(self) -> Any:
        """This process's client."""
        if self._client is None or self._process_id != os.getpid():
            # The parent's client is kept: collecting it would close connections on an event loop that does not run here.
            self._inherited += [self._client] if self._client else []
            client = _connect(self._scheme, self.uri, self.S3_CONFIG)
            self._root = client._strip_protocol(self.uri).rstrip("/")
            self._client, self._process_id = client, os.getpid()  # last: another thread takes a client for a ready one
        return self._client

    def _join(self, name: str, first: Sequence[_Part], start: int, end: int) -> bytes:
        """The bytes of `first`, then [start, end) of the object, fetched in parallel."""
        starts = range(start, end, self.PART_BYTES)

        def fetch(at: int) -> _Part:
            return self._part(name, at, min(at + self.PART_BYTES, end))

        if len(starts) > 1:
            self._filesystem()  # one for all threads
            with ThreadPoolExecutor(self.PARALLEL_PARTS) as pool:
                parts = [*first, *pool.map(fetch, starts)]
        else:
            parts = [*first, *map(fetch, starts)]
        if start < end and end > parts[-1].size_bytes:
            raise beyond_end(f"{self.uri}/{name}", start, end, parts[-1].size_bytes)
        if len({part.version for part in parts}) > 1:
            raise OSError(f"cannot read {self.uri}/{name}: it was replaced meanwhile. Fix: let one writer at a time use this place")
        return b"".join(piece for part in parts for piece in part.pieces)

    def _part(self, name: str, start: int, end: int) -> _Part:
        """Bytes [start, end), as far as the object goes: a part that ends before that is trouble, and is asked for again."""
        get = _get if self._is_s3 else _get_elsewhere
        return self._try("read", name, lambda fs, path: get(fs, path, start, end, self.PART_SECONDS))

    def _upload(self, name: str, num_bytes: int, send: Callable[[Any, str, dict[str, Any]], None]) -> None:
        """One upload with all its attempts, before its deadline."""
        seconds = self.UPLOAD_SECONDS + num_bytes / self.UPLOAD_BYTES_PER_SECOND
        deadline = time.monotonic() + seconds
        part_bytes = max(self.UPLOAD_PART_BYTES, math.ceil(num_bytes / 10_000))  # S3 takes 10,000 parts
        options: dict[str, Any] = {"chunksize": part_bytes, "max_concurrency": self.PARALLEL_PARTS} if self._is_s3 else {}

        def attempt(fs: Any, path: str) -> None:
            if self._is_s3:
                options["timeout"] = max(0.001, deadline - time.monotonic())
            try:
                send(fs, path, options)
            except TimeoutError as error:
                if time.monotonic() < deadline:
                    raise
                raise UploadTimeoutError(
                    f"cannot write {self.uri}/{name}: {num_bytes:,} bytes did not arrive within {seconds:,.0f} seconds at {self._server}. "
                    "Fix: see whether the server still answers and its disk has room, and run again; what is complete is kept"
                ) from error

        self._try("write", name, attempt)

    def _try(self, verb: str, name: str, operation: Callable[[Any, str], T]) -> T:
        """One whole operation, again while its trouble is transient. ValueError for what only the user can mend."""
        place = f"{self.uri}/{name}" if name else self.uri
        for attempt in range(1, self.ATTEMPTS + 1):
            try:
                fs = self._filesystem()
                return operation(fs, f"{self._root}/{name}" if name else self._root)
            except FileNotFoundError as error:
                self._require_bucket(error)
                raise FileNotFoundError(errno.ENOENT, "no such object", place) from error
            except Exception as error:
                if isinstance(error, PermissionError) or type(error).__name__ in DENIED_NAMES:
                    raise self._denied(verb, place, error) from error
                if not _is_transient(error):
                    raise
                if attempt == self.ATTEMPTS:
                    raise OSError(f"cannot {verb} {place}: {_words(error)} ({self.ATTEMPTS} attempts at {self._server})") from error
                time.sleep(self.FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.8, 1.2))
        raise AssertionError("the last attempt returns or raises")

    def _require_bucket(self, cause: Exception) -> None:
        """An object that is not there is an answer; a bucket that is not there is a mistake in a setting."""
        if not self._is_s3 or self._is_bucket_known:
            return
        bucket, _, prefix = self._root.partition("/")
        try:
            self._client.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
            self._is_bucket_known = True
        except FileNotFoundError:
            raise ValueError(
                f"{self.uri}: there is no bucket {bucket} at {self._server}. Fix: create it, or correct cluster.root or AWS_ENDPOINT_URL"
            ) from cause
        except PermissionError as error:
            raise self._denied("list", self.uri, error) from error
        except OSError:
            return  # trouble on the way; the question is asked again with the next missing object

    def _denied(self, verb: str, place: str, error: Exception) -> ValueError:
        return ValueError(
            f"cannot {verb} {place}: access is denied by {self._server} ({_words(error)}). "
            "Fix: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) to a user that may list, read and write there"
        )

    @property
    def _server(self) -> str:
        return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or f"the default {self._scheme} server"


class _Reader(io.RawIOBase):
    """An object as a file: each read is one ranged request, retried like every other operation."""

    def __init__(self, storage: ObjectStorage, name: str, size_bytes: int) -> None:
        self._storage, self._object, self._size_bytes, self._position = storage, name, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:  # the inherited one asks for 8 KiB at a time
        return self._next(self._size_bytes)

    def _next(self, num_bytes: int) -> bytes:
        end = min(self._position + num_bytes, self._size_bytes)
        data = self._storage.read_range(self._object, self._position, end) if end > self._position else b""
        self._position += len(data)
        return data


def _get(fs: Any, path: str, start: int, end: int, seconds: float) -> _Part:
    """One ranged request to S3. OSError with the number of bytes that came, when they are not those of the range."""
    from fsspec.asyn import sync

    async def get() -> _Part:
        bucket, key, _ = fs.split_path(path)
        try:
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        except OSError as error:
            if _code(error) != "InvalidRange":
                raise
            return _Part([], (await fs._info(path))["size"], "")  # the object ends before `start`, or is empty
        size = int(answer["ContentRange"].rpartition("/")[2]) if "ContentRange" in answer else answer["ContentLength"]
        pieces: list[bytes] = []
        cause = None
        try:
            async with answer["Body"] as body:
                while piece := await body.read(1 << 20):
                    pieces.append(piece)
        except Exception as error:
            if not _is_transient(error):
                raise
            cause = error
        received, wanted = sum(map(len, pieces)), min(end, size) - start
        if received != wanted:
            raise OSError(f"{received:,} of {wanted:,} bytes arrived ({_words(cause) if cause else 'and no more'})") from cause
        return _Part(pieces, size, answer["ETag"])

    return sync(fs.loop, get, timeout=seconds)


def _get_elsewhere(fs: Any, path: str, start: int, end: int, seconds: float) -> _Part:
    size = fs.info(path)["size"]
    data = fs.cat_file(path, start=start, end=min(end, size)) if start < size else b""
    if len(data) != max(0, min(end, size) - start):
        raise OSError(f"{len(data):,} bytes of {start:,} to {min(end, size):,} arrived")
    return _Part([data], size, "")


def _connect(scheme: str, uri: str, s3_config: dict[str, Any]) -> Any:
    import fsspec  # not at the top: opening a local folder costs nothing

    if scheme in ("s3", "s3a"):
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=s3_config)
        filesystem.retries = 1
        return filesystem
    try:
        return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{uri}: {error}. Fix: use s3://, file:// or a path, or install the package of this scheme") from error


def _code(error: Exception) -> str:
    """S3's own name of an error, from under the one that s3fs made of it."""
    return getattr(error.__cause__, "response", {}).get("Error", {}).get("Code", "")


def _is_transient(error: Exception) -> bool:
    if isinstance(error, LASTING):
        return False
    if isinstance(error, OSError):
        return error.errno not in LASTING_ERRNO or _code(error) in TRANSIENT_CODES
    kinds = type(error).__mro__
    return kinds[0].__module__.split(".")[0] in TRANSIENT_MODULES or any(kind.__name__ in TRANSIENT_NAMES for kind in kinds)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
