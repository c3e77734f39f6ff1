"""An advisory lease on an artifact's folder: two drivers of one store do not do the same work twice.

Correctness never rests on it, since conditional writes are not safe on every store: it rests on shards with receipts and
on a record that is written last. The lease also remembers *which* work (fingerprint and the inputs' payloads) a folder was
begun for, so that an interrupted step goes on from its receipts and never from those of other inputs.

lease.json: `host`, `pid`, `token` (one per holder), `work` (empty while the folder is being emptied), `heartbeat` (seconds
since the epoch, renewed every 10 s; 0 = given up). Of two drivers that write it at once the last one holds it: each reads
it again a moment later, and waits when it finds the other's token.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspark.storage import Storage
from pipelines.dag import DAMAGED, RECORD, Verdict

LEASE = "lease.json"
HEARTBEAT_SECONDS = 10.0
LEASE_EXPIRES_SECONDS = 30.0
SETTLE_SECONDS = 0.25  # longer than a store takes between one driver's look at the lease and its write
POLL_SECONDS = 1.0


def holder(storage: Storage) -> str | None:
    """Who is making a folder, or began to, in words; None when nobody left a lease."""
    if not storage.exists(LEASE):
        return None
    held = json.loads(storage.read(LEASE))
    if not is_alive(held):
        return "interrupted; the same command goes on"
    return f"being made by process {held['pid']} on {held['host']}, heartbeat {time.time() - held['heartbeat']:.0f} s ago"


class Lease:
    """Advisory ownership of a folder: a heartbeat file, taken over when it is stale or its process on this host is gone.

    `work` identifies what the folder is being filled for. A folder begun for other work, or `anew`, is emptied - record
    first, so that it is never taken for whole - before it is used. Of a finished one that `judge` calls damaged in parts,
    these files and their receipts are removed, and the rest is kept, even by a holder that is killed on the way.
    """

    def __init__(self, storage: Storage, work: str, judge: Callable[[], Verdict], note: Callable[[str], None], anew: bool) -> None:
        self._storage, self._work, self._judge, self._note, self._anew = storage, work, judge, note, anew
        self._token, self._filled_for = uuid.uuid4().hex, ""
        self._stop, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "Lease":
        is_new = self._anew
        while True:
            held, has_waited = self._wait()
            is_new = is_new and not has_waited  # whoever held it before us has just made it anew
            self._write(held["work"] if held else "")
            time.sleep(SETTLE_SECONDS)
            if self._holds():
                break
        self._thread.start()
        try:
            # A record that is no hit, in a folder begun for this work: some of it was lost, so only a mended one is trusted.
            may_go_on = self._filled_for == self._work and not self._storage.exists(RECORD)
            if is_new:
                self._empty()
            elif not may_go_on and not (verdict := self._judge()).is_hit:  # asked now: somebody may have held it before us
                if verdict.damaged:
                    self._mend(verdict.damaged)
                else:
                    self._empty()
            self._write(self._work)
            self._storage.sweep()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(Exception):  # what was made stays made, what went wrong is told, and the lease expires by itself
            if not self._holds():
                return
            if kind is None:
                self._storage.remove(LEASE)
            else:
                self._write(self._filled_for, heartbeat=0.0)  # given up, but what is there stays good for a resume

    def _empty(self) -> None:
        self._write("")
        for name in sorted(set(self._storage.list()) - {LEASE}, key=lambda name: name != RECORD):
            self._storage.remove(name)

    def _mend(self, damaged: Sequence[str]) -> None:
        """Killed before the record goes, what is damaged is still noted or found missing; after it, the folder is one begun for this work."""
        self._write(self._work)
        for name in damaged:
            self._storage.remove(f"{name.rpartition('.')[0]}.json")
            self._storage.remove(name)
        self._storage.remove(DAMAGED)
        self._storage.remove(RECORD)

    def _wait(self) -> tuple[dict[str, Any] | None, bool]:
        """Returns the lease that may be taken over (None: there is none) and whether somebody had to finish first."""
        held, seen, has_waited = self._read(), time.monotonic(), False
        while held is not None and is_alive(held) and time.monotonic() - seen < LEASE_EXPIRES_SECONDS:
            if not has_waited:
                self._note(f"{self._storage.uri} is being made by process {held['pid']} on {held['host']}: waiting for it")
            has_waited = True
            time.sleep(POLL_SECONDS)
            last, held = held, self._read()
            seen = seen if held == last else time.monotonic()  # another host's clock may differ: a beat is a change
        return held, has_waited

    def _holds(self) -> bool:
        held = self._read()
        return held is not None and held["token"] == self._token

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._storage.read(LEASE))
        except FileNotFoundError:
            return None

    def _write(self, filled_for: str | None = None, heartbeat: float | None = None) -> None:
        with self._writing:
            self._filled_for = self._filled_for if filled_for is None else filled_for
            held = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token, "work": self._filled_for}
            self._storage.put(LEASE, json.dumps({**held, "heartbeat": time.time() if heartbeat is None else heartbeat}).encode())

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if not self._holds():
                    self._note(f"{self._storage.uri}: another process took this folder over, since no heartbeat was seen for long")
                    return
                self._write()
            except Exception as error:  # trouble with the store that lasts is told by the step itself
                self._note(f"{self._storage.uri}: no heartbeat, {error}")


def is_alive(held: Mapping[str, Any]) -> bool:
    """Does the holder still work, as far as its heartbeat and (on this host) its process say?"""
    if time.time() - held["heartbeat"] > LEASE_EXPIRES_SECONDS:
        return False
    if held["host"] != socket.gethostname():
        return True
    try:
        os.kill(held["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
