"""Where bytes live: the `Storage` protocol and its local implementation.

Every artifact, shard and checkpoint of the project is read and written through this handful of operations, so that a
folder and an object store behave alike. The contract is what both can honour:

* `put` is atomic: a name either holds all of its bytes or does not exist. Nobody ever sees a half-written object.
* There are no directories, only names with slashes; `list` walks a prefix.
* Nothing relies on conditional writes or on renames, which not every object store has.
* `read` and `read_range` return every byte that was asked for, or raise. A short answer is never passed on.
* A writer that is killed leaves nothing visible; `sweep` gives back the space of what it left behind.

    storage = LocalStorage("artifacts/corpus/small-1a2b3c4d")
    storage.put("shard-00000.arrow", data)
    storage.list("shard-")            # ["shard-00000.arrow"]

The implementation for object stores is `pipelines.backends.object_store`.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol


class Storage(Protocol):
    """A flat namespace of objects below one root uri."""

    uri: str

    def open(self, name: str) -> BinaryIO:
        """Opens an object for reading. FileNotFoundError when it does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """All bytes of an object. FileNotFoundError when it does not exist."""
        ...

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of an object. FileNotFoundError without the object, ValueError when it ends before `end`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Writes an object whole; it replaces an older one of that name. ValueError when the place is full or forbidden."""
        ...

    def put_file(self, name: str, path: Path) -> None:
        """Uploads a local file whole, without holding it in memory."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, sorted."""
        ...

    def exists(self, name: str) -> bool: ...

    def size_bytes(self, name: str) -> int: ...

    def remove(self, name: str) -> None:
        """Removes an object; a missing one is no error."""
        ...

    def sweep(self) -> int:
        """Removes what killed writers left below this root, which no other operation shows. Returns the number of leftovers."""
        ...

    def free_bytes(self) -> int | None:
        """Space left to write into; None where there is no such limit."""
        ...


class LocalStorage:
    """Objects as files below a local folder. Writes go aside and are renamed, since a local file is visible while it grows."""

    TEMPORARY_SUFFIX = ".partial"
    FULL: ClassVar = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota of this user on the disk is used up"}

    def __init__(self, uri: str) -> None:
        self.uri = str(Path(uri).absolute())
        self._root = Path(self.uri)

    def path(self, name: str) -> Path:
        """The local file behind a name, for readers that map files into memory."""
        return self._root / name

    def open(self, name: str) -> BinaryIO:
        try:
            return self.path(name).open("rb")
        except (NotADirectoryError, IsADirectoryError) as error:  # a part of the name is a file, or the name is a folder
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self.path(name))) from error

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        assert 0 <= start <= end, (start, end)
        with self.open(name) as file:
            file.seek(start)
            data = file.read(end - start)
            if len(data) < end - start:
                raise beyond_end(str(self.path(name)), start, end, os.fstat(file.fileno()).st_size)
        return data

    def put(self, name: str, data: bytes) -> None:
        with self._aside(name, len(data)) as file:
            file.write(data)

    def put_file(self, name: str, path: Path) -> None:
        with path.open("rb") as source, self._aside(name, os.fstat(source.fileno()).st_size) as file:
            shutil.copyfileobj(source, file, 1 << 24)

    def list(self, prefix: str = "") -> list[str]:
        folder, _, start = prefix.rpartition("/")
        names = []
        for parent, folders, files in os.walk(self._root / folder):
            if Path(parent) == self._root / folder:  # walk no folder that cannot hold a name of this prefix
                folders[:] = [name for name in folders if name.startswith(start)]
            names += [(Path(parent) / file).relative_to(self._root).as_posix() for file in files]
        return sorted(name for name in names if name.startswith(prefix) and not name.endswith(self.TEMPORARY_SUFFIX))

    def exists(self, name: str) -> bool:
        return self.path(name).is_file()

    def size_bytes(self, name: str) -> int:
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.path(name).unlink()

    def sweep(self) -> int:
        partial = [
            Path(parent) / name for parent, _, names in os.walk(self._root) for name in names if name.endswith(self.TEMPORARY_SUFFIX)
        ]
        return sum(_remove_dead(path) for path in partial)

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(_nearest_folder(self._root)).free

    @contextlib.contextmanager
    def _aside(self, name: str, num_bytes: int) -> Iterator[BinaryIO]:
        """A temporary file beside its destination: renamed on success, removed on failure. `num_bytes` only serves the error."""
        destination = self.path(name)
        folder = destination.parent
        _refuse_file(folder)
        temporary = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked(destination) as file:
                temporary = Path(file.name)
                yield file
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(destination)  # before the lock goes: an unlocked one is taken for a leftover
        except OSError as error:
            if error.errno in self.FULL:
                raise self._full(folder, error.errno, num_bytes) from error
            if isinstance(error, PermissionError) and temporary is None:
                raise _no_place(folder, "permission denied") from error
            raise
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def _locked(self, destination: Path) -> BinaryIO:
        """A new temporary file with a lock that the kernel drops when its writer dies: what `sweep` tells the dead by."""
        while True:
            file = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}{self.TEMPORARY_SUFFIX}").open("xb")
            with contextlib.suppress(OSError):  # a file system without locks, where `sweep` removes nothing
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file
            file.close()  # it was swept between its creation and its lock

    def _full(self, folder: Path, code: int, num_bytes: int) -> ValueError:
        needed = f"; {num_bytes:,} bytes are needed" if num_bytes else ""
        free = shutil.disk_usage(_nearest_folder(folder)).free
        return ValueError(
            f"cannot store in {folder}: {self.FULL[code]}{needed}, {free:,} are free. "
            "Fix: make room there, or choose another place, for example cluster.root=/a/larger/disk; what is complete is kept"
        )


def beyond_end(place: str, start: int, end: int, size_bytes: int) -> ValueError:
    """The error of a range that an object does not hold: the object, or what is known of its layout, is damaged."""
    return ValueError(
        f"{place}: bytes {start:,} to {end:,} were asked for, but it holds {size_bytes:,}. Fix: it is damaged, or what names this range is; make both again"
    )


def _remove_dead(path: Path) -> bool:
    """Removes a temporary file, unless its writer lives. Returns whether it did."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # being written, just renamed, another user's, or on a file system without locks, where nobody knows
        return False
    return True


def _nearest_folder(folder: Path) -> Path:
    return next(part for part in (folder, *folder.parents) if part.is_dir())


def _refuse_file(folder: Path) -> None:
    """ValueError when `folder` or something above it is a regular file, or may not be entered."""
    for part in (folder, *folder.parents):
        try:
            if part.is_dir():
                return
            is_file = part.is_file()  # not exists(): another writer may have made the folder since
        except PermissionError as error:
            raise _no_place(folder, f"no permission for {part.parent}") from error
        if is_file:
            raise _no_place(folder, f"{part} is a regular file, not a folder")


def _no_place(folder: Path, cause: str) -> ValueError:
    return ValueError(f"cannot store in {folder}: {cause}. Fix: choose another place, for example cluster.root=artifacts")
