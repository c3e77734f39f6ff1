"""Places that hold bytes, by uri: `s3://bucket/prefix` and every other fsspec scheme, or a local folder.

    storage = open_storage("s3://drafters/artifacts")      # the `Storage` contract of dspark/storage.py
    storage.put("train/dspark-1a2b3c4d/record.json", data)

The only file that imports fsspec and s3fs, and only once an object store is asked for. What it adds to them:

* No directories: nothing is made before it is written (a store throttles many workers that make the same "folder").
* No cached listings: what another process wrote is seen at once.
* Transient trouble is retried here, around whole operations, with a growing pause and an end. The libraries' own retries
  are cut to one (for the parts of a large upload), since retries inside of retries multiply. A missing object, a denied
  access or a wrong uri is never retried.
* A fresh client in every process: s3fs hangs when it is used after a fork, and it cannot be pickled into a worker.
* Credentials come from the environment only (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a role; and
  AWS_ENDPOINT_URL for another server than Amazon's). One in a uri is refused, and none is ever printed.
"""

import errno
import io
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote, urlsplit

from dspark.storage import LocalStorage, Storage

T = TypeVar("T")

ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.5  # doubled after each attempt: 7.5 s in all
READ_BUFFER_BYTES = 4 << 20
S3_CONFIG = {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard", "total_max_attempts": 2}}

# What another attempt changes, and what it does not. The names are botocore's, which is not imported for their sake.
TRANSIENT_MODULES = ("aiohttp", "http")
TRANSIENT_NAMES = {"HTTPClientError", "ConnectionError", "ResponseParserError", "IncompleteReadError"}
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
LASTING_ERRNO = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.EMSGSIZE, getattr(errno, "EREMCHG", errno.ENOENT)}
LASTING_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    "ProfileNotFound",
}


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


class ObjectStorage:
    """The `Storage` contract over fsspec. An object appears whole or not at all: every put is one upload that ends in one commit."""

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
        return cast(BinaryIO, io.BufferedReader(_Reader(self, name, self.size_bytes(name)), READ_BUFFER_BYTES))

    def read(self, name: str) -> bytes:
        return self._try("read", name, lambda fs, path: fs.cat_file(path))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of an object."""
        return self._try("read", name, lambda fs, path: fs.cat_file(path, start=start, end=end))

    def put(self, name: str, data: bytes) -> None:
        self._try("write", name, lambda fs, path: fs.pipe_file(path, data))

    def put_file(self, name: str, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        self._try("write", name, lambda fs, remote: fs.put_file(str(path), remote))

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

    @property
    def _is_s3(self) -> bool:
        return self._scheme in ("s3", "s3a")

    def _filesystem(self) -> Any:
        """This process's client."""
        if self._client is None or self._process_id != os.getpid():
            # The parent's client is kept: collecting it would close connections on an event loop that does not run here.
            self._inherited += [self._client] if self._client else []
            self._client, self._process_id = _connect(self._scheme, self.uri), os.getpid()
            self._root = self._client._strip_protocol(self.uri).rstrip("/")
        return self._client

    def _try(self, verb: str, name: str, operation: Callable[[Any, str], T]) -> T:
        """One whole operation, again while its trouble is transient. ValueError for what only the user can mend."""
        place = f"{self.uri}/{name}" if name else self.uri
        for attempt in range(1, ATTEMPTS + 1):
            try:
                fs = self._filesystem()
                return operation(fs, f"{self._root}/{name}" if name else self._root)
            except FileNotFoundError as error:
                self._require_bucket(error)
                raise FileNotFoundError(errno.ENOENT, "no such object", place) from error
            except Exception as error:
                if isinstance(error, PermissionError) or type(error).__name__ in LASTING_CREDENTIALS:
                    raise self._denied(verb, place, error) from error
                if not _is_transient(error):
                    raise
                if attempt == ATTEMPTS:
                    raise OSError(f"cannot {verb} {place}: {_words(error)} ({ATTEMPTS} attempts at {self._server})") from error
                time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.8, 1.2))
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


def _connect(scheme: str, uri: str) -> Any:
    import fsspec  # not at the top: opening a local folder costs nothing

    if scheme in ("s3", "s3a"):
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=S3_CONFIG)
        filesystem.retries = 1
        return filesystem
    try:
        return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{uri}: {error}. Fix: use s3://, file:// or a path, or install the package of this scheme") from error


def _is_transient(error: Exception) -> bool:
    if isinstance(error, LASTING):
        return False
    if isinstance(error, OSError):
        return error.errno not in LASTING_ERRNO
    kinds = type(error).__mro__
    return kinds[0].__module__.split(".")[0] in TRANSIENT_MODULES or any(kind.__name__ in TRANSIENT_NAMES for kind in kinds)


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
