"""Training from states that are computed while it reads them, and not kept: a bounded window of shards between the two.

The order of rows is known before any state is (`RowOrder`), so the engines capture rows in the very order in which training
first uses them. Rows of one *unit* become one shard of the ordinary layout (dspark/cache.py) below `stream/` of the training's
folder; the driver begins a unit when it fits beside what is there, and removes it when every rank has used it for the last
time. The select rows come first and stay. What training sees is what a stored cache of the same order would give it.

    driver                                        each rank
    Window.begin()  -> units that fit             StreamedRows.read(draws)   waits for the unit's receipt
    Window.made(...)                              StreamedRows.used(slot)    -> rank-00000.json
    removes units that all ranks are through with

A rank that starts again from a checkpoint says so in its file; units that it needs once more are made once more. A driver
that starts again finds the units of the interrupted one. Trouble of an engine is left in `failed.json` for the ranks to find.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dspark.cache import CacheRow, ShardReader
from dspark.data import RowDraw, RowOrder
from dspark.data import Unit as OrderUnit
from dspark.storage import Storage
from pipelines.backends.object_store import open_storage
from pipelines.runner import Failed, Work
from pipelines.sizing import units as words
from pipelines.stages.cache_targets import SHARD_BYTES, CorpusRow, Made, Settings, Unit, cut

FOLDER = "stream"
FAILED = "failed.json"
POLL_SECONDS = 0.1
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


# --- the ranks ------------------------------------------------------------------------------------------------------


class _Shards:
    """Shards as they appear, by name."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._open: dict[str, ShardReader] = {}

    def read(self, name: str, row_id: str, index: int) -> CacheRow:
        """The row, waited for; the one before it when it was set aside, so that a batch keeps its size."""
        reader = self._open.get(name) or self._open.setdefault(name, self._wait(name))
        places = {entry.row_id: i for i, entry in enumerate(reader.entries)}
        if not places:
            raise ValueError(f"{self._storage.uri}/{name}.json: every row was set aside. Fix: look at their reasons there")
        return reader.read(places.get(row_id, min(max(index - 1, 0), len(places) - 1)))

    def drop(self, name: str) -> None:
        self._open.pop(name, None)

    def _wait(self, name: str) -> ShardReader:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return ShardReader(self._storage, json.loads(self._storage.read(f"{name}.json")))
            except FileNotFoundError:
                if self._storage.exists(FAILED):
                    raise ValueError(json.loads(self._storage.read(FAILED))["cause"]) from None
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self._storage.uri}/{name}: not made within {WAIT_SECONDS:.0f} s. Fix: look at the engines; the same command goes on"
                )
            time.sleep(POLL_SECONDS)


class StreamedRows:
    """The rows that are trained on (dspark.data.RowSource)."""

    def __init__(self, storage: Storage, plan: StreamPlan, unit_bytes: int, rank: int) -> None:
        self._storage, self._plan, self._rank = storage, plan, rank
        self._shards = _Shards(storage)
        self._units: Iterator[OrderUnit] = plan.units(unit_bytes)
        self._next: OrderUnit | None = None
        self._unit_of: dict[int, tuple[OrderUnit, int]] = {}  # row -> its newest unit, and its place there
        self._held: list[OrderUnit] = []

    def read(self, draws: Sequence[RowDraw]) -> list[CacheRow]:
        return [self._read(draw) for draw in draws]

    def _read(self, draw: RowDraw) -> CacheRow:
        while self._next is None or self._next.first_slot <= draw.slot:
            if self._next is not None:
                self._unit_of |= {row: (self._next, i) for i, row in enumerate(self._next.rows)}
                self._held.append(self._next)
            self._next = next(self._units)
        unit, index = self._unit_of[draw.row]
        return self._shards.read(unit_name(unit), self._plan.train[draw.row].row_id, index)

    def used(self, end_slot: int) -> None:
        through = [unit for unit in self._held if unit.end_slot <= end_slot]
        for unit in through:
            self._shards.drop(unit_name(unit))
        self._held = [unit for unit in self._held if unit.end_slot > end_slot]
        if through or not self._held:
            self._storage.put(f"rank-{self._rank:05d}.json", json.dumps({"end_slot": end_slot}).encode())


class StreamedSelect:
    """The select rows: made first, kept to the end."""

    def __init__(self, storage: Storage, plan: StreamPlan, unit_bytes: int) -> None:
        self._shards = _Shards(storage)
        self._places = [(unit.name, row.row_id, i) for unit in plan.select_units(unit_bytes) for i, row in enumerate(unit.rows)]

    def read(self, draws: Sequence[RowDraw]) -> list[CacheRow]:
        return [self._shards.read(*self._places[draw.row]) for draw in draws]

    def used(self, end_slot: int) -> None:
        """They are asked for again and again."""


def unit_name(unit: OrderUnit) -> str:
    """Says which rows they are: of the same order, another width of the window may have cut others."""
    return f"unit-{unit.first_slot:09d}-{len(unit.rows)}"


# --- the driver -----------------------------------------------------------------------------------------------------


class Window:
    """What is there, and what comes next. `num_slots`: of the whole training; `batch_slots`: of one step."""

    def __init__(self, storage: Storage, plan: StreamPlan, window_bytes: int, num_ranks: int, num_slots: int, batch_slots: int) -> None:
        self._storage, self._plan, self._window_bytes = storage, plan, window_bytes
        self._num_ranks, self._num_slots, self._batch_slots = num_ranks, num_slots, batch_slots
        self._source = plan.units(unit_bytes(window_bytes))
        self._units: list[OrderUnit] = []  # every one so far whose first slot is within the training
        self._sizes: dict[str, int] = {}  # of what is there or being made
        self._made: set[str] = set()
        self._is_whole = self._is_over = False
        for name in storage.list("rank-") + storage.list(FAILED):
            storage.remove(name)
        for name in storage.list():  # what an interrupted driver left
            if name.endswith(".json"):
                self._keep(name.removesuffix(".json"), json.loads(storage.read(name))["bytes"])
            elif not storage.exists(f"{name.removesuffix('.arrow')}.json"):
                storage.remove(name)

    def select_units(self) -> list[Unit]:
        """Those still to be made."""
        missing = [unit for unit in self._plan.select_units(unit_bytes(self._window_bytes)) if unit.name not in self._sizes]
        self._sizes |= {unit.name: sum(row.num_bytes for row in unit.rows) for unit in missing}
        return missing

    def begin(self) -> Iterator[Unit | None]:
        """Units in the order of their first use; None while there is nothing to begin. Ends with the training."""
        while not self._is_over:
            used = self._used()
            if used is None:  # a rank has yet to say where it begins
                yield None
                continue
            self._forget(used)
            unit = next((unit for unit in self._needed(used) if unit_name(unit) not in self._sizes), None)
            if unit is None or not self._has_room(unit, used):
                yield None
                continue
            rows = tuple(self._plan.train[row] for row in unit.rows)
            self._sizes[unit_name(unit)] = sum(row.num_bytes for row in rows)
            yield Unit(unit_name(unit), rows)

    def made(self, made: Made) -> None:
        self._keep(made.name, made.receipt["bytes"])

    def end(self) -> None:
        self._is_over = True

    def _keep(self, name: str, num_bytes: int) -> None:
        self._sizes[name] = num_bytes
        self._made.add(name)

    def _remove(self, unit: OrderUnit) -> None:
        for suffix in ("json", "arrow"):  # first the receipt: what is without one is not there
            self._storage.remove(f"{unit_name(unit)}.{suffix}")
        del self._sizes[unit_name(unit)]
        self._made.remove(unit_name(unit))

    def _used(self) -> int | None:
        """The slot up to which every rank is through; None when one has not said so."""
        ends = [json.loads(self._storage.read(name))["end_slot"] for name in self._storage.list("rank-")]
        return min(ends) if len(ends) == self._num_ranks else None

    def _needed(self, used: int) -> Iterator[OrderUnit]:
        """Units from the first that is not used up."""
        yield from (unit for unit in self._units if unit.end_slot > used)
        while not self._is_whole:
            unit = next(self._source)
            self._is_whole = unit.first_slot >= self._num_slots
            if not self._is_whole:
                self._units.append(unit)
                if unit.end_slot > used:
                    yield unit

    def _forget(self, used: int) -> None:
        for unit in self._units:
            if unit.end_slot <= used and unit_name(unit) in self._made:
                self._remove(unit)

    def _has_room(self, unit: OrderUnit, used: int) -> bool:
        """Whether a unit fits. One that the next step needs takes the place of later ones: a rank went back to a checkpoint.

        ValueError when one step needs more at once than the window holds: nobody could go on.
        """
        size, end = self._bytes(unit), used + self._batch_slots
        at_once = sum(self._bytes(u) for u in self._units if u.first_slot < end and u.end_slot > used)
        kept = sum(num_bytes for name, num_bytes in self._sizes.items() if name.startswith("select-"))
        if at_once + kept > self._window_bytes:
            raise ValueError(
                f"stage.cache_targets.window_bytes: {self._window_bytes} ({words(self._window_bytes)}) is less than what one step needs at once, "
                f"{words(at_once)} and {words(kept)} of select rows. Fix: stage.cache_targets.window_bytes={2 * (at_once + kept)}, "
                "or smaller stage.train.window_shards or stage.prompts.limits.select"
            )
        later = [u for u in reversed(self._units) if u.first_slot >= end and unit_name(u) in self._made]
        while unit.first_slot < end and later and sum(self._sizes.values()) + size > self._window_bytes:
            self._remove(later.pop(0))
        return sum(self._sizes.values()) + size <= self._window_bytes

    def _bytes(self, unit: OrderUnit) -> int:
        return sum(self._plan.train[row].num_bytes for row in unit.rows)


class Producers:
    """Runs the engines beside a training: `with Producers(...): work.gang(...)`."""

    def __init__(self, work: Work, settings: Settings, window: Window, worker: str) -> None:
        self._work, self._settings, self._window, self._worker = work, settings, window, worker
        self._storage = open_storage(settings.out_uri)
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> None:
        # In this thread: an executor may have to start first. Training needs these rows before anything else is worth making.
        self._make(self._window.select_units())
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._window.end()
        self._thread.join()

    def _produce(self) -> None:
        try:
            self._make(self._window.begin())
        except Exception as error:
            self._storage.put(FAILED, json.dumps({"cause": f"the engines of the stream failed: {error}"}).encode())

    def _make(self, units: "Sequence[Unit] | Iterator[Unit | None]") -> None:
        for result in self._work.map(self._worker, self._settings, units, keep_failed=True):
            if isinstance(result, Failed):
                raise RuntimeError(f"{result.item.name} ended every engine it was given to: {result.cause}")
            self._window.made(result)
