"""Training from states that are computed while it reads them, and not kept: a bounded window of shards between the two.

The order of rows is known before any state is (`RowOrder`), so the engines capture rows in the very order in which training
first uses them. Rows of one *unit* become one shard of the ordinary layout (dspark/cache.py) below `stream/` of the training's
folder. The select rows come first and stay; then the window holds the units that training needs next, as many as fit, and
each is removed once every rank has used it for the last time. What training sees is what a stored cache would give it.

    driver                                        each rank
    Window.begin()  -> what is wanted next        StreamedRows.read(draws)   waits for the unit's receipt
    Window.made(...)                              StreamedRows.used(16)      -> rank-00000-000000016.json
    removes what is not wanted any more

A rank that starts again from a checkpoint says so in the same way; what it needs once more is made once more, and what does not
fit beside it goes. A driver that starts again finds the units of the interrupted one. `engines.json` is there as long as
somebody makes units: without it, waiting for one is over.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from dspark.cache import NUM_READERS, CacheRow, ShardReader
from dspark.data import RowDraw, RowOrder
from dspark.data import Unit as OrderUnit
from dspark.storage import LocalStorage, Storage
from pipelines.backends.object_store import open_storage
from pipelines.runner import Failed, Work
from pipelines.sizing import FRAMING_BYTES
from pipelines.sizing import units as words
from pipelines.stages.cache_targets import MAX_POISONED_FRACTION, SHARD_BYTES, CorpusRow, Made, Settings, Unit, cut

FOLDER = "stream"
ENGINES = "engines.json"
SHARD_HEAD_BYTES = 6000  # of a shard and its receipt, whatever its rows are
POLL_SECONDS = 0.02  # at first; a wait is found to be over after another tenth of it, at most
MAX_POLL_SECONDS = 1.0
WAIT_SECONDS = 1800.0  # for one unit


@dataclass(frozen=True)
class StreamPlan:
    """What driver and ranks agree on: the rows of both splits, and the order of those that are trained on."""

    train: tuple[CorpusRow, ...]
    select: tuple[CorpusRow, ...]
    order: RowOrder

    @staticmethod
    def of(rows: Sequence[CorpusRow], window_shards: int, row_uses: int, seed: int) -> "StreamPlan":
        """`rows`: of the corpus, in its order. Shards are those that a stored cache would have."""
        shard_rows = [sum(row.split == "train" for row in unit.rows) for unit in cut(rows, SHARD_BYTES)]
        train, select = (tuple(row for row in rows if row.split == split) for split in ("train", "select"))
        return StreamPlan(train, select, RowOrder(shard_rows, window_shards, row_uses, seed))

    def units(self, unit_bytes: int) -> Iterator[OrderUnit]:
        return self.order.units([row.num_bytes for row in self.train], unit_bytes)

    def select_units(self, unit_bytes: int) -> list[Unit]:
        units = cut(self.select, unit_bytes)
        starts = [0, *accumulate(len(unit.rows) for unit in units)]
        return [Unit(f"select-{start:06d}-{len(unit.rows)}", unit.rows) for start, unit in zip(starts, units, strict=False)]


def unit_bytes(window_bytes: int) -> int:
    """A window holds several units, so that making one and using another go on together."""
    return min(SHARD_BYTES, max(window_bytes // 8, 1))


def unit_name(unit: OrderUnit) -> str:
    """Says which rows they are: of the same order, another width of the window may have cut others."""
    return f"unit-{unit.first_slot:09d}-{len(unit.rows)}"


# --- the ranks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A row of a shard that may not be there yet."""

    shard: str
    row_id: str
    index: int


class _Shards:
    """Shards as they appear, by name."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._open: dict[str, tuple[ShardReader, dict[str, int]]] = {}  # with the place of each row
        self._pool = None if isinstance(storage, LocalStorage) else ThreadPoolExecutor(NUM_READERS)
        self._spare: CacheRow | None = None

    def read(self, places: Sequence[_Place]) -> list[CacheRow]:
        """The rows, waited for. In place of one that was set aside, so that a batch keeps its size: the one before it."""
        for name in dict.fromkeys(place.shard for place in places):
            self._shard(name)
        read = self._pool.map if self._pool else map
        rows = list(read(self._read, places))
        self._spare = next((row for row in rows if row is not None), self._spare)
        if self._spare is None:
            raise ValueError(f"{self._storage.uri}/{places[0].shard}.json: every row was set aside. Fix: look at their reasons there")
        return [row or self._spare for row in rows]

    def drop(self, name: str) -> None:
        self._open.pop(name, None)

    def _read(self, place: _Place) -> CacheRow | None:
        try:
            return self._row(place)
        except ValueError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self.drop(place.shard)  # it made way for a rank that went back to a checkpoint, and is made again
            return self._row(place)

    def _row(self, place: _Place) -> CacheRow | None:
        """None when the whole shard was set aside."""
        reader, rows = self._shard(place.shard)
        return reader.read(rows.get(place.row_id, min(max(place.index - 1, 0), len(rows) - 1))) if rows else None

    def _shard(self, name: str) -> tuple[ShardReader, dict[str, int]]:
        if name not in self._open:
            reader = ShardReader(self._storage, self._wait(f"{name}.json"))
            self._open[name] = reader, {entry.row_id: i for i, entry in enumerate(reader.entries)}
        return self._open[name]

    def _wait(self, receipt: str) -> Mapping[str, Any]:
        started = time.monotonic()
        while True:
            try:
                return json.loads(self._storage.read(receipt))
            except FileNotFoundError:
                if not self._storage.exists(ENGINES):
                    raise ValueError(f"{self._storage.uri}/{receipt}: the engines of the stream ended before it was made") from None
            waited = time.monotonic() - started
            if waited > WAIT_SECONDS:
                raise ValueError(
                    f"{self._storage.uri}/{receipt}: not made within {WAIT_SECONDS:.0f} s. Fix: look whether the engines of the stream run and "
                    "have room beside the training (cluster.engine_workers, cluster.cpus_per_worker); the same command goes on"
                )
            time.sleep(min(max(waited / 10, POLL_SECONDS), MAX_POLL_SECONDS))


class StreamedRows:
    """The rows that are trained on (dspark.data.RowSource)."""

    def __init__(self, storage: Storage, plan: StreamPlan, unit_bytes: int, rank: int) -> None:
        self._storage, self._plan, self._files = storage, plan, f"rank-{rank:05d}-"
        self._shards = _Shards(storage)
        self._units = plan.units(unit_bytes)
        self._next = next(self._units)
        self._held: list[OrderUnit] = []
        self._unit_of: dict[int, tuple[OrderUnit, int]] = {}  # row -> the newest unit that is held, and its place there
        self._has_begun = False

    def read(self, draws: Sequence[RowDraw]) -> list[CacheRow]:
        return self._shards.read([self._place(draw) for draw in draws])

    def used(self, end_slot: int) -> None:
        next_before = self._next
        while self._next.end_slot <= end_slot:  # from before the checkpoint, or of other ranks alone
            self._next = next(self._units)
        through = [unit for unit in self._held if unit.end_slot <= end_slot]
        self._held = [unit for unit in self._held if unit.end_slot > end_slot]
        for unit in through:
            self._shards.drop(unit_name(unit))
            for row in unit.rows:
                if self._unit_of[row][0] is unit:
                    del self._unit_of[row]
        if through or self._next is not next_before or not self._has_begun:
            self._say(end_slot)
            self._has_begun = True

    def _say(self, end_slot: int) -> None:
        """By the name of a file: not every store that is read while an object is replaced gives the old one or the new one."""
        name = f"{self._files}{end_slot:09d}.json"
        self._storage.put(name, b"{}")
        for old in self._storage.list(self._files):
            if old != name:
                self._storage.remove(old)

    def _place(self, draw: RowDraw) -> _Place:
        while self._next.first_slot <= draw.slot:
            self._held.append(self._next)
            self._unit_of |= {row: (self._next, i) for i, row in enumerate(self._next.rows)}
            self._next = next(self._units)
        unit, index = self._unit_of[draw.row]
        return _Place(unit_name(unit), self._plan.train[draw.row].row_id, index)


class StreamedSelect:
    """The select rows: made first, kept to the end."""

    def __init__(self, storage: Storage, plan: StreamPlan, unit_bytes: int) -> None:
        self._shards = _Shards(storage)
        self._places = [_Place(unit.name, row.row_id, i) for unit in plan.select_units(unit_bytes) for i, row in enumerate(unit.rows)]

    def read(self, draws: Sequence[RowDraw]) -> list[CacheRow]:
        return self._shards.read([self._places[draw.row] for draw in draws])

    def used(self, end_slot: int) -> None:
        """They are asked for again and again."""


# --- the driver -----------------------------------------------------------------------------------------------------


class _Over(Exception):  # noqa: N818 - nothing went wrong
    """Raised into the engines' loop when nobody reads any more, whatever they are at."""


@dataclass(frozen=True)
class _Sized:
    unit: Unit
    num_bytes: int  # at most, with its receipt
    end_slot: int = 0


def _row_bytes(rows: Sequence[CorpusRow]) -> np.ndarray:
    """Beside its states a row holds nine bytes a token and Arrow's framing."""
    return np.array([row.num_bytes * 17 // 16 + FRAMING_BYTES for row in rows], np.int64)


def _shard_bytes(row_bytes: np.ndarray) -> int:
    return SHARD_HEAD_BYTES + int(row_bytes.sum())


class Window:
    """What is there, and what comes next. `num_slots`: of the whole training; `batch_slots`: of one step.

    ValueError when the window cannot hold what one step of this training needs at once.
    """

    def __init__(self, storage: Storage, plan: StreamPlan, window_bytes: int, num_ranks: int, num_slots: int, batch_slots: int) -> None:
        self._storage, self._plan, self._window_bytes, self._num_ranks, self._num_slots = storage, plan, window_bytes, num_ranks, num_slots
        self._select = [_Sized(unit, _shard_bytes(_row_bytes(unit.rows))) for unit in plan.select_units(unit_bytes(window_bytes))]
        self._row_bytes = _row_bytes(plan.train)
        self._require_room(batch_slots)
        self._source, self._used = self._units(), 0
        self._coming: deque[_Sized] = deque()  # from the first unit that is not used up, as far as was looked
        self._sizes: dict[str, int] = {}  # of what is there or being made
        self._made: set[str] = set()
        self._is_over = False
        self.set_aside: set[str] = set()  # rows that the engines returned damaged
        self._take_over()

    def begin(self, num_engines: int) -> Iterator[Unit | None]:
        """What is wanted, in the order of its first use; None while there is nothing to begin, or as many are being made."""
        while not self._is_over:
            yield self._next(num_engines)
        raise _Over

    def made(self, made: Made) -> None:
        self._keep(made.name, made.receipt)
        if len(self.set_aside) > MAX_POISONED_FRACTION * (len(self._plan.train) + len(self._plan.select)):
            raise ValueError(
                f"{len(self.set_aside)} rows were set aside for what the engine returned, for example {made.receipt['dropped'][-1:]}. "
                f"Fix: look at the engine; {self._storage.uri}/{made.name}.json has more"
            )

    def end(self) -> None:
        self._is_over = True

    def _require_room(self, batch_slots: int) -> None:
        """Goes through the whole training once: units that a step reads, or that a later one reads again, are there together."""
        kept = sum(sized.num_bytes for sized in self._select)
        there: deque[tuple[int, int]] = deque()  # end slot and bytes; end slots ascend
        now = most = 0
        for unit in self._units():
            while there and there[0][0] <= unit.first_slot // batch_slots * batch_slots:
                now -= there.popleft()[1]
            there.append((unit.end_slot, self._bytes(unit)))
            now += there[-1][1]
            most = max(most, now)
        if most + kept > self._window_bytes:
            raise ValueError(
                f"stage.cache_targets.window_bytes: {self._window_bytes} ({words(self._window_bytes)}) is less than what training needs at once, "
                f"{words(most)} and {words(kept)} of select rows. Fix: stage.cache_targets.window_bytes={2 * (most + kept)}, "
                "or a smaller stage.train.window_shards (with row_uses above 1), stage.train.batch_sequences or stage.prompts.limits.select"
            )

    def _take_over(self) -> None:
        """Keeps what an interrupted driver left whole, as far as it fits; its ranks begin anew."""
        names = set(self._storage.list())
        for name in sorted(names):
            shard, _, suffix = name.rpartition(".")
            if suffix == "json" and f"{shard}.arrow" in names:
                self._keep(shard, json.loads(self._storage.read(name)))
                if sum(self._sizes.values()) > self._window_bytes:
                    self._remove(shard)
            elif suffix == "json" or f"{shard}.json" not in names:
                self._storage.remove(name)

    def _next(self, num_engines: int) -> Unit | None:
        used = self._slots_used()
        if used is None:  # a rank has yet to say where it begins
            return None
        wanted = self._wanted(used)
        for name in sorted(self._made - wanted.keys()):
            self._remove(name)
        sized = next((wanted[name] for name in wanted if name not in self._sizes), None)
        num_making = len(self._sizes) - len(self._made)
        if sized is None or num_making >= num_engines or sum(self._sizes.values()) + sized.num_bytes > self._window_bytes:
            return None
        self._sizes[sized.unit.name] = sized.num_bytes
        return sized.unit

    def _slots_used(self) -> int | None:
        """The slot up to which every rank is through; None when one has not said so."""
        said = [name.removesuffix(".json").split("-") for name in self._storage.list("rank-")]
        # A rank may have said two, for a moment: the lower one holds, whether it goes on or back.
        return min(int(slot) for _, _, slot in said) if len({rank for _, rank, _ in said}) == self._num_ranks else None

    def _wanted(self, used: int) -> dict[str, _Sized]:
        """The select rows, and units from the first that is not used up, as many as fit."""
        if used < self._used:  # the ranks went back to a checkpoint
            self._source = self._units()
            self._coming.clear()
        self._used = used
        while self._coming and self._coming[0].end_slot <= used:
            self._coming.popleft()
        room = self._window_bytes
        wanted = {}
        for sized in self._candidates(used):
            room -= sized.num_bytes
            if room < 0:
                break
            wanted[sized.unit.name] = sized
        return wanted

    def _candidates(self, used: int) -> Iterator[_Sized]:
        yield from self._select
        yield from self._coming
        for unit in self._source:
            if unit.end_slot > used:
                rows = tuple(self._plan.train[row] for row in unit.rows)
                self._coming.append(_Sized(Unit(unit_name(unit), rows), self._bytes(unit), unit.end_slot))
                yield self._coming[-1]

    def _units(self) -> Iterator[OrderUnit]:
        """Every one whose first slot is within the training."""
        units = self._plan.units(unit_bytes(self._window_bytes))
        return takewhile(lambda unit: unit.first_slot < self._num_slots, units)

    def _bytes(self, unit: OrderUnit) -> int:
        return _shard_bytes(self._row_bytes[list(unit.rows)])

    def _keep(self, name: str, receipt: Mapping[str, Any]) -> None:
        self._sizes[name] = receipt["bytes"] + len(json.dumps(receipt))
        self._made.add(name)
        self.set_aside |= {item["row_id"] for item in receipt["dropped"] if "is_poisoned" in item}

    def _remove(self, name: str) -> None:
        for suffix in ("json", "arrow"):  # first the receipt: what is without one is not there
            self._storage.remove(f"{name}.{suffix}")
        del self._sizes[name]
        self._made.remove(name)


class Producers:
    """Runs the engines beside a training: `with Producers(...) as window: work.gang(...)`. `work`: the engines' place."""

    def __init__(self, work: Work, settings: Settings, window: Window, worker: str) -> None:
        self._num_engines = work.resources.num_workers
        # One place more than there are engines, so that the window is asked, and can end it all, while each of them is busy.
        self._work = work.beside(replace(work.resources, num_workers=self._num_engines + 1))
        self._settings, self._window, self._worker = settings, window, worker
        self._storage = open_storage(settings.out_uri)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> Window:
        self._storage.put(ENGINES, b"{}")
        self._thread.start()
        return self._window

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._window.end()
        self._thread.join()
        if isinstance(error, Exception) and self._error is not None:
            raise self._error from error  # the ranks only saw that nothing came any more

    def _produce(self) -> None:
        try:
            for result in self._work.map(self._worker, self._settings, self._window.begin(self._num_engines), keep_failed=True):
                if isinstance(result, Failed):
                    raise RuntimeError(
                        f"the engines of the stream: {result.item.name} ended each one that it was given to: {result.cause}. "
                        "Fix: stage.cache_targets.mode=store finds the row that does it, and sets it aside"
                    )
                self._window.made(result)
        except _Over:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._storage.remove(ENGINES)
