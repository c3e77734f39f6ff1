"""Where bytes live: the `Storage` protocol and its local implementation.

Every artifact, shard and checkpoint of the project is read and written through this handful of operations, so that a
folder and an object store behave alike. The contract is what both can honour:

* `put` is atomic: a name either holds all of its bytes or does not exist. Nobody ever sees a half-written object.
* There are no directories, only names with slashes; `list` walks a prefix.
* Nothing relies on conditional writes or on renames, which not every object store has.

    storage = LocalStorage("artifacts/corpus/small-1a2b3c4d")
    storage.put("shard-00000.arrow", data)
    storage.list("shard-")            # ["shard-00000.arrow"]

The implementation for object stores is `pipelines.backends.object_store`.
"""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol


class Storage(Protocol):
    """A flat namespace of objects below one root uri."""

    uri: str

    def open(self, name: str) -> BinaryIO:
        """Opens an object for reading. FileNotFoundError when it does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """All bytes of an object. FileNotFoundError when it does not exist."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Writes an object whole; it replaces an older one of that name."""
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


class LocalStorage:
    """Objects as files below a local folder. Writes go aside and are renamed, since a local file is visible while it grows."""

    TEMPORARY_SUFFIX = ".partial"

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

    def put(self, name: str, data: bytes) -> None:
        with self._aside(name) as file:
            file.write(data)

    def put_file(self, name: str, path: Path) -> None:
        with path.open("rb") as source, self._aside(name) as file:
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

    @contextlib.contextmanager
    def _aside(self, name: str) -> Iterator[BinaryIO]:
        """A temporary file beside its destination: renamed on success, removed on failure."""
        destination = self.path(name)
        temporary = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}{self.TEMPORARY_SUFFIX}")
        _refuse_file(destination.parent)
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open("wb")
        except PermissionError as error:
            raise _no_place(destination.parent, "permission denied") from error
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(destination)
        finally:
            temporary.unlink(missing_ok=True)


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
