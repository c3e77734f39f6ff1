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

import os
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
        return self.path(name).open("rb")

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        with self._aside(name) as temporary:
            with temporary.path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def put_file(self, name: str, path: Path) -> None:
        with path.open("rb") as source, self._aside(name) as temporary, temporary.path.open("wb") as file:
            while chunk := source.read(1 << 24):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def list(self, prefix: str = "") -> list[str]:
        names = (str(path.relative_to(self._root)) for path in self._files())
        return sorted(name for name in names if name.startswith(prefix) and not name.endswith(self.TEMPORARY_SUFFIX))

    def exists(self, name: str) -> bool:
        return self.path(name).is_file()

    def size_bytes(self, name: str) -> int:
        return self.path(name).stat().st_size

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        return (path for path in self._root.rglob("*") if path.is_file()) if self._root.is_dir() else iter(())

    def _aside(self, name: str) -> "_Aside":
        return _Aside(self.path(name), self.TEMPORARY_SUFFIX)


class _Aside:
    """A temporary file beside its destination: renamed on success, removed on failure."""

    def __init__(self, destination: Path, suffix: str) -> None:
        self._destination = destination
        self.path = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}{suffix}")

    def __enter__(self) -> "_Aside":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"cannot store {self._destination}: {error.filename} is a regular file, not a folder. "
                "Fix: choose another place, for example cluster.root=artifacts"
            ) from error
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.path.replace(self._destination)
        else:
            self.path.unlink(missing_ok=True)
