"""From cache rows to training batches: the order of rows, the collation of blocks, and reading ahead.

The rows of optimiser step s and the anchors drawn in them are functions of (seed, s) alone, and nothing else decides them:
a resumed run needs no sampler state, and another world size sees the same rows with the same anchors, since rank r takes
every world-size-th row of a step. Rows are shuffled at two levels, so that what is read at one time lies together: shards
are taken in random order, a window of them at a time, and inside a window the rows are shuffled.

    order = RowOrder([900, 900, 412], window_shards=8, row_uses=1, seed=0)     # rows of each shard
    order.draws(step=3, batch_sequences=512)                                   # -> row numbers, with their anchor seeds
    order.units([...bytes of each row...], unit_bytes)                         # the same rows in the order of their first use
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from dspark.blocks import draw_anchors, lay_blocks
from dspark.cache import CacheReader, CacheRow, supervised_rows
from dspark.drafters.base import PackedContext, TrainingBatch
from dspark.states import decode

T = TypeVar("T")


@dataclass(frozen=True)
class RowDraw:
    """One use of a row: its number, the slot of the endless order that it fills, and the seed of its anchors there."""

    row: int
    slot: int
    anchor_seed: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Rows that a stream makes at once: first needed at `first_slot`, for the last time before `end_slot`."""

    number: int
    rows: tuple[int, ...]
    first_slot: int
    end_slot: int


class RowOrder:
    """An endless order of rows. Each window of shards is gone through `row_uses` times, shuffled anew, before the next one."""

    def __init__(self, shard_rows: Sequence[int], window_shards: int, row_uses: int, seed: int) -> None:
        self._starts = np.concatenate([[0], np.cumsum(shard_rows)])
        self.num_rows, self._window_shards, self._row_uses, self._seed = int(self._starts[-1]), window_shards, row_uses, seed
        self._windows_of_pass = lru_cache(4)(self._draw_windows)
        self._shuffled = lru_cache(64)(self._shuffle)

    def draws(self, step: int, batch_sequences: int) -> list[RowDraw]:
        """The sequences of one optimiser step: consecutive slots."""
        slots = range(step * batch_sequences, (step + 1) * batch_sequences)
        return [RowDraw(self._row(slot), slot, (self._seed, slot)) for slot in slots]

    def units(self, row_bytes: Sequence[int], unit_bytes: int) -> Iterator[Unit]:
        """Every row of every window once, in the order of first use, cut so that no unit of several rows is above `unit_bytes`."""
        number, pass_start, passing = 0, 0, 0
        sizes = np.asarray(row_bytes)
        while True:
            ends, windows = self._windows_of_pass(passing)
            for window, rows in enumerate(windows):
                start = pass_start + (int(ends[window - 1]) if window else 0)
                first_use = rows[self._shuffled(passing, window, 0, len(rows))]
                begin = 0
                while begin < len(first_use):
                    fitting = int(np.searchsorted(np.cumsum(sizes[first_use[begin:]]), unit_bytes, side="right"))
                    end = begin + max(fitting, 1)
                    end = min(end, len(first_use))
                    end_slot = start + end if self._row_uses == 1 else pass_start + int(ends[window])
                    yield Unit(number, tuple(first_use[begin:end].tolist()), start + begin, end_slot)
                    number, begin = number + 1, end
            pass_start, passing = pass_start + int(ends[-1]), passing + 1

    def _row(self, slot: int) -> int:
        passing, left = divmod(slot, self.num_rows * self._row_uses)
        ends, windows = self._windows_of_pass(passing)
        window = int(np.searchsorted(ends, left, side="right"))
        use, index = divmod(left - (int(ends[window - 1]) if window else 0), len(windows[window]))
        return int(windows[window][self._shuffled(passing, window, use, len(windows[window]))[index]])

    def _draw_windows(self, passing: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Windows of one pass over the rows: the slot where each ends, and its rows."""
        shards = np.random.default_rng([self._seed, passing]).permutation(len(self._starts) - 1)
        rows = [np.arange(self._starts[s], self._starts[s + 1]) for s in shards]
        windows = [np.concatenate(rows[i : i + self._window_shards]) for i in range(0, len(rows), self._window_shards)]
        windows = [window for window in windows if len(window)]
        return np.cumsum([len(window) * self._row_uses for window in windows]), windows

    def _shuffle(self, passing: int, window: int, use: int, num_rows: int) -> np.ndarray:
        return np.random.default_rng([self._seed, passing, window, use]).permutation(num_rows)


class RowSource(Protocol):
    """Where training takes its rows from."""

    def read(self, draws: Sequence[RowDraw]) -> list[CacheRow]:
        """The rows of these draws, in their order. Waits for rows that are still being made."""
        ...

    def used(self, end_slot: int) -> None:
        """This rank will not ask again for a slot below `end_slot`."""
        ...


class CachedRows:
    """The rows of a split of a stored cache, several at once where each is a request over a network."""

    def __init__(self, cache: CacheReader, split: str) -> None:
        self._cache = cache
        self.numbers = [i for i, entry in enumerate(cache.entries) if entry.split == split]
        self.shard_rows = [sum(entry.split == split for entry in shard.entries) for shard in cache.shards]
        self._pool = ThreadPoolExecutor(cache.num_readers) if cache.num_readers > 1 else None

    def read(self, draws: Sequence[RowDraw]) -> list[CacheRow]:
        read = self._pool.map if self._pool else map
        return list(read(self._cache.__getitem__, [self.numbers[draw.row] for draw in draws]))

    def used(self, end_slot: int) -> None:
        """A stored cache keeps its rows."""


class Ahead(Generic[T]):
    """Values of consecutive steps, made in one background thread up to `depth` steps before they are asked for.

    The memory is that of depth + 1 values. An error of a step is raised when that step is asked for.
    """

    def __init__(self, make: Callable[[int], T], first_step: int, end_step: int, depth: int = 2) -> None:
        self._make, self._next_step, self._end_step, self._depth = make, first_step, end_step, depth
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[T]] = deque()

    def __iter__(self) -> Iterator[T]:
        try:
            while self._waiting or self._next_step < self._end_step:
                while len(self._waiting) <= self._depth and self._next_step < self._end_step:
                    self._waiting.append(self._pool.submit(self._make, self._next_step))
                    self._next_step += 1
                yield self._waiting.popleft().result()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def build_batch(rows: Sequence[tuple[CacheRow, tuple[int, ...]]], num_anchors: int, block_size: int) -> TrainingBatch:
    """Blocks of these rows (with their anchor seeds), contexts packed, anchors padded to the most."""
    laid = [
        lay_blocks(row.loss_mask_T, draw_anchors(row.loss_mask_T, num_anchors, np.random.default_rng(seed)), block_size)
        for row, seed in rows
    ]
    B, A, K = len(rows), max(max(len(b.anchors_A) for b in laid), 1), block_size
    # An anchor sees what lies strictly before it, so a context ends at the last anchor.
    ends = np.cumsum([0, *(int(blocks.anchors_A.max(initial=0)) for blocks in laid)])
    tapped = torch.empty(int(ends[-1]), *rows[0][0].tapped_PLD.codes.shape[1:], dtype=torch.bfloat16)
    next_tokens = np.zeros(int(ends[-1]), np.int64)
    anchors, previous = np.zeros((B, A), np.int64), np.zeros((B, A, K), np.int64)
    label, valid = np.full((B, A, K), -1, np.int64), np.zeros((B, A, K), bool)
    log_sum_exp = np.zeros((B, A, K), np.float32)
    logits = _TargetLogits(rows[0][0], (B, A, K))
    for i, ((row, _), blocks) in enumerate(zip(rows, laid, strict=True)):
        a, context = len(blocks.anchors_A), slice(ends[i], ends[i + 1])
        length = int(ends[i + 1] - ends[i])
        decode(row.tapped_PLD[:length], tapped[context])
        next_tokens[context] = row.token_ids_T[1 : length + 1]
        anchors[i, :a], valid[i, :a] = blocks.anchors_A, blocks.valid_AK
        label[i, :a] = np.where(blocks.valid_AK, row.token_ids_T[blocks.label_index_AK], -1)
        # x_{k-1} is the token just before the label; the anchor token always exists, later ones where the row counts.
        before = np.concatenate([blocks.anchors_A[:, None], blocks.label_index_AK[:, :-1]], axis=1)
        previous[i, :a] = np.where(before >= 0, row.token_ids_T[before], 0)
        state = np.searchsorted(supervised_rows(row.loss_mask_T), blocks.target_row_AK)
        state = np.where(blocks.valid_AK, state, 0)
        logits.add(i, row, state)
        log_sum_exp[i, :a] = row.log_sum_exp_S[state]
    return TrainingBatch(
        PackedContext.of(tapped, torch.from_numpy(next_tokens), np.diff(ends).tolist()),
        torch.from_numpy(anchors),
        torch.from_numpy(previous),
        torch.from_numpy(label),
        torch.from_numpy(valid),
        torch.from_numpy(log_sum_exp),
        logits.final,
        logits.top_ids,
        logits.top_logits,
    )


def num_labels(batch: TrainingBatch) -> int:
    """How many tokens the batch predicts, each counted once however many blocks do."""
    labels_BAK = batch.anchors_BA[..., None].numpy() + 1 + np.arange(batch.valid_BAK.shape[-1])
    return sum(len(np.unique(labels_AK[valid_AK])) for labels_AK, valid_AK in zip(labels_BAK, batch.valid_BAK.numpy(), strict=True))


class _TargetLogits:
    """What a batch keeps of the target's logits: its final state, or its best logits with their ids."""

    def __init__(self, row: CacheRow, shape_BAK: tuple[int, int, int]) -> None:
        self.final = self.top_ids = self.top_logits = None
        if row.final_SD is not None:
            # Zeros of numpy: torch would share them out among threads that compute meanwhile.
            self.final = torch.from_numpy(np.zeros((*shape_BAK, row.final_SD.codes.shape[-1]), np.int16)).view(torch.bfloat16)
        elif row.top_ids_SC is not None:
            self.top_ids = torch.zeros(*shape_BAK, row.top_ids_SC.shape[-1], dtype=torch.int64)
            self.top_logits = torch.full(self.top_ids.shape, -torch.inf)

    def add(self, i: int, row: CacheRow, state_AK: np.ndarray) -> None:
        a = len(state_AK)
        if self.final is not None and row.final_SD is not None:
            decode(row.final_SD[state_AK], self.final[i, :a])
        if self.top_ids is not None and self.top_logits is not None and row.top_ids_SC is not None and row.top_logits_SC is not None:
            self.top_ids[i, :a] = torch.from_numpy(row.top_ids_SC[state_AK].astype(np.int64))
            self.top_logits[i, :a] = torch.from_numpy(row.top_logits_SC[state_AK])
