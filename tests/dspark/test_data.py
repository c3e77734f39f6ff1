"""The order of rows and its units against loops over it, reading ahead, and collation against a plain loop."""

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.blocks import draw_anchors
from dspark.data import Ahead, CachedRows, RowOrder, build_batch, num_labels
from tests import oracles
from tests.dspark import tiny

# --- the order of rows --------------------------------------------------------------------------------------------------

SHARDS = [[5, 3, 4, 2], [7], [0, 4, 0, 3, 0], [1, 1, 1, 1, 1, 1]]
orders = pytest.mark.parametrize(
    ("shard_rows", "window_shards", "row_uses"), list(itertools.product(SHARDS, [1, 2, 8], [1, 3])), ids=lambda value: str(value)
)


def _slots(order, num_slots, start=0):
    """Rows of slots [start, start + num_slots), asked for one at a time."""
    return [order.draws(slot, 1)[0].row for slot in range(start, start + num_slots)]


def _shards_of_rows(shard_rows):
    return [shard for shard, num_rows in enumerate(shard_rows) for _ in range(num_rows)]


@orders
def test_order_is_a_function_of_its_seed(shard_rows, window_shards, row_uses):
    first, second = (RowOrder(shard_rows, window_shards, row_uses, seed=3) for _ in range(2))
    assert first.draws(2, 9) == second.draws(2, 9)
    other = RowOrder(shard_rows, window_shards, row_uses, seed=4)
    assert _slots(first, 60) != _slots(other, 60)
    assert not {d.anchor_seed for d in first.draws(0, 60)} & {d.anchor_seed for d in other.draws(0, 60)}


@orders
def test_draws_of_a_step_alone_are_its_slice_of_the_whole(shard_rows, window_shards, row_uses):
    whole = RowOrder(shard_rows, window_shards, row_uses, seed=1).draws(0, 210)
    assert [draw.slot for draw in whole] == list(range(210))
    for step in (29, 0, 13, 14):  # a new order each time, as after a resume
        assert RowOrder(shard_rows, window_shards, row_uses, seed=1).draws(step, 7) == whole[7 * step : 7 * step + 7]


def test_draws_of_ranks_are_disjoint_and_together_those_of_the_step():
    """Whatever the world size, a step has the same rows with the same anchors."""
    order = RowOrder([20, 20, 10], 2, 1, seed=5)
    whole = order.draws(3, 12)
    for world_size in (1, 2, 4):
        ranks = [order.draws(3, 12)[rank::world_size] for rank in range(world_size)]
        assert [len(part) for part in ranks] == [12 // world_size] * world_size
        assert sorted((d for part in ranks for d in part), key=lambda d: d.slot) == whole
    assert len({d.row for d in whole}) == 12


@orders
def test_each_pass_holds_every_row_once_for_each_use_with_new_anchors(shard_rows, window_shards, row_uses):
    order, num_rows = RowOrder(shard_rows, window_shards, row_uses, seed=1), sum(shard_rows)
    assert order.num_rows == num_rows
    length = num_rows * row_uses
    draws = order.draws(0, 3 * length)
    passes = [[d.row for d in draws[start : start + length]] for start in range(0, 3 * length, length)]
    assert all(sorted(rows) == sorted(list(range(num_rows)) * row_uses) for rows in passes)
    assert passes[0] != passes[1] != passes[2]
    assert len({d.anchor_seed for d in draws}) == len(draws)  # a row seen again gets new anchors


@orders
def test_rows_of_few_shards_at_a_time_are_in_use(shard_rows, window_shards, row_uses):
    order, shards = RowOrder(shard_rows, window_shards, row_uses, seed=2), _shards_of_rows(shard_rows)
    length = len(shards) * row_uses
    for start in range(0, 4 * length, length):
        seen = [shards[row] for row in _slots(order, length, start)]
        spans = {shard: (seen.index(shard), length - seen[::-1].index(shard)) for shard in set(seen)}
        open_shards = [sum(first <= slot < end for first, end in spans.values()) for slot in range(length)]
        assert max(open_shards) <= window_shards


@pytest.mark.parametrize("row_uses", [1, 2, 3])
@pytest.mark.parametrize("window_shards", [1, 2, 3])
def test_window_comes_whole_and_as_often_as_it_is_used_before_the_next_one(window_shards, row_uses):
    shard_rows = [16, 14, 15, 17, 13, 18]
    order, shards = RowOrder(shard_rows, window_shards, row_uses, seed=6), _shards_of_rows(shard_rows)
    slot, windows = 0, []
    for _ in range(2 * len(shard_rows) // window_shards):
        seen: list[int] = []
        while len({shards[row] for row in seen}) < window_shards or len(seen) < sum(shard_rows[s] for s in {shards[row] for row in seen}):
            seen += _slots(order, 1, slot + len(seen))
        uses = [_slots(order, len(seen), slot + use * len(seen)) for use in range(row_uses)]
        members = {shards[row] for row in seen}
        assert len(members) == window_shards
        assert all(sorted(use) == [row for row, shard in enumerate(shards) if shard in members] for use in uses)
        assert len({tuple(use) for use in uses}) == row_uses  # shuffled anew for each
        assert sorted(uses[0]) != uses[0]
        slot += row_uses * len(seen)
        windows.append(members)
    half = len(windows) // 2
    for one_pass in (windows[:half], windows[half:]):
        assert sorted(shard for members in one_pass for shard in members) == list(range(6))
    assert windows[:half] != windows[half:]  # shards are taken in another order each time


def test_rows_of_a_window_stand_at_every_place_of_it_equally_often():
    counts = np.zeros((6, 6), dtype=int)
    for seed in range(600):
        for slot, row in enumerate(_slots(RowOrder([2, 4], 2, 1, seed), 6)):
            counts[row, slot] += 1
    assert oracles.fit(counts.flatten(), np.full(36, 1 / 36)) > 1e-3


# --- units --------------------------------------------------------------------------------------------------------------


def _uses(order, num_rows, row_uses, num_passes):
    """By a scan of the draws: slots of every (pass, row)."""
    slots: dict[int, list[int]] = {}
    for draw in order.draws(0, num_passes * num_rows * row_uses):
        slots.setdefault(draw.row, []).append(draw.slot)
    return {(p, row): found[p * row_uses : (p + 1) * row_uses] for row, found in slots.items() for p in range(num_passes)}


def _check_units(shard_rows, window_shards, row_uses, seed, row_bytes, unit_bytes, num_passes=3):
    order, num_rows = RowOrder(shard_rows, window_shards, row_uses, seed), sum(shard_rows)
    uses = _uses(order, num_rows, row_uses, num_passes)
    expected = sorted(uses, key=lambda key: uses[key][0])  # every row of every pass once, in the order of its first use
    units, taken = [], 0
    for unit in order.units(row_bytes, unit_bytes):
        units.append(unit)
        taken += len(unit.rows)
        if taken >= len(expected):
            break
    assert [row for unit in units for row in unit.rows] == [row for _, row in expected]
    assert [unit.number for unit in units] == list(range(len(units)))
    start, ends = 0, []
    for unit in units:
        slots = [uses[key] for key in expected[start : start + len(unit.rows)]]
        start += len(unit.rows)
        assert unit.first_slot == min(min(found) for found in slots)
        ends.append(max(max(found) for found in slots) + 1)
        assert unit.end_slot >= ends[-1]  # it is kept until its last row has been used for the last time
    for unit, end in zip(units, ends, strict=True):
        # With one use a unit is let go at once; with several, with its whole window.
        window_end = max(e for u, e in zip(units, ends, strict=True) if u.end_slot == unit.end_slot)
        assert unit.end_slot == (end if row_uses == 1 else window_end)
    sizes = [sum(row_bytes[row] for row in unit.rows) for unit in units]
    assert all(size <= unit_bytes or len(unit.rows) == 1 for size, unit in zip(sizes, units, strict=True))
    return units, sizes


@orders
@pytest.mark.parametrize("unit_bytes", [1, 25, 1000])
def test_units_are_every_row_once_a_pass_in_the_order_of_first_use(shard_rows, window_shards, row_uses, unit_bytes):
    row_bytes = [10 + 3 * (row % 4) for row in range(sum(shard_rows))]
    units, _ = _check_units(shard_rows, window_shards, row_uses, 1, row_bytes, unit_bytes)
    if unit_bytes == 1:
        assert all(len(unit.rows) == 1 for unit in units)


@settings(max_examples=40)
@given(
    shard_rows=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(sum),
    window_shards=st.integers(1, 7),
    row_uses=st.integers(1, 3),
    seed=st.integers(0, 99),
    unit_bytes=st.integers(0, 60),
    data=st.data(),
)
def test_units_of_any_shards_and_sizes_keep_their_promises(shard_rows, window_shards, row_uses, seed, unit_bytes, data):
    num_rows = sum(shard_rows)
    row_bytes = data.draw(st.lists(st.integers(0, 40), min_size=num_rows, max_size=num_rows))
    _check_units(shard_rows, window_shards, row_uses, seed, row_bytes, unit_bytes)


def test_units_are_as_large_as_may_be():
    row_bytes = [7, 11, 13, 5, 17, 19, 3, 2, 23, 29]
    units, sizes = _check_units([4, 6], 2, 1, 0, row_bytes, 40)
    per_pass = list(itertools.takewhile(lambda unit: unit.end_slot <= 10, units))
    for unit, after, size in zip(per_pass, per_pass[1:], sizes, strict=False):
        assert size + row_bytes[after.rows[0]] > 40, unit
    assert max(sizes) <= 40


def test_units_of_a_window_end_with_it():
    """A window larger than a unit is several units; a unit never reaches into the next window."""
    units, _ = _check_units([3, 3, 3], 1, 2, 0, [10] * 9, 10**6, num_passes=1)
    assert [(len(unit.rows), unit.first_slot, unit.end_slot) for unit in units] == [(3, 0, 6), (3, 6, 12), (3, 12, 18)]
    units, _ = _check_units([3, 3, 3], 1, 2, 0, [10] * 9, 20, num_passes=1)
    assert [len(unit.rows) for unit in units] == [2, 1] * 3


# --- rows of a stored cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [lambda path: path, tiny.Remote], ids=["local", "remote"])
def test_rows_of_a_split_are_counted_by_shard_and_read_in_the_order_of_the_draws(tmp_path, place):
    sequences = tiny.rows(10, 5)
    sequences = [sequences[i] for i in (0, 10, 1, 2, 11, 12, 13, 14, 3, 4, 5, 6, 7, 8, 9)]
    cache = tiny.write_cache(place(tmp_path), sequences, rows_per_shard=4)
    train, select = CachedRows(cache, "train"), CachedRows(cache, "select")
    assert (train.shard_rows, select.shard_rows) == ([3, 0, 4, 3], [1, 4, 0, 0])
    assert [cache.entries[number].split for number in train.numbers] == ["train"] * 10
    draws = RowOrder(train.shard_rows, 2, 1, seed=0).draws(0, 25)
    assert [row.row_id for row in train.read(draws)] == [f"row-{draw.row}" for draw in draws]
    draws_of_select = RowOrder(select.shard_rows, 2, 1, seed=0).draws(0, 5)
    assert [row.row_id for row in select.read(draws_of_select)] == [f"row-{10 + draw.row}" for draw in draws_of_select]
    train.used(10**6)
    assert train.read(draws[:1])[0].row_id == f"row-{draws[0].row}"  # a stored cache keeps its rows


# --- reading ahead ------------------------------------------------------------------------------------------------------


def _settled(condition):
    """Waits until a condition holds, and then a little more for what must not come."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.02)


@pytest.mark.parametrize(("first", "end"), [(0, 7), (3, 9), (4, 5), (5, 5)])
@pytest.mark.parametrize("depth", [1, 2, 20])
def test_values_made_ahead_come_in_order_each_once(first, end, depth):
    made = []
    assert list(Ahead(lambda step: made.append(step) or 10 * step, first, end, depth)) == [10 * step for step in range(first, end)]
    assert made == list(range(first, end))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_values_are_made_so_many_steps_ahead_and_no_further(depth):
    made = []
    for asked, value in enumerate(Ahead(lambda step: made.append(step) or step, 0, 12, depth)):
        assert value == asked
        ahead = min(asked + depth, 11)
        _settled(lambda ahead=ahead: len(made) > ahead)
        assert made == list(range(ahead + 1))


def test_values_are_made_in_one_thread_beside_the_loop():
    threads = set(Ahead(lambda step: threading.get_ident(), 0, 9))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_error_of_a_step_is_raised_when_that_step_is_asked_for():
    def make(step):
        if step == 4:
            raise ValueError("row 17 is damaged")
        return step

    values = iter(Ahead(make, 0, 9, depth=3))
    seen = [next(values)]
    time.sleep(0.05)  # the error is there before its step is asked for
    seen += itertools.islice(values, 3)
    with pytest.raises(ValueError, match="row 17 is damaged"):
        next(values)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("leave", ["break", "error", "end"])
def test_loop_that_is_left_stops_the_thread(leave):
    before, made = set(threading.enumerate()), []

    def loop():
        for value in Ahead(lambda step: made.append(step) or step, 0, 10**6 if leave != "end" else 6):
            if value == 5 and leave == "break":
                break
            if value == 5 and leave == "error":
                raise KeyError

    if leave == "error":
        with pytest.raises(KeyError):
            loop()
    else:
        loop()
    _settled(lambda: not [thread for thread in threading.enumerate() if thread not in before])
    assert len(made) <= 8


def test_loop_that_is_left_makes_nothing_more_than_what_is_being_made():
    made, gate = [], threading.Event()

    def make(step):
        made.append(step)
        assert step == 0 or gate.wait(10)
        return step

    for _ in Ahead(make, 0, 100, depth=5):
        _settled(lambda: made == [0, 1])
        break
    gate.set()
    _settled(lambda: True)
    assert made == [0, 1]


# --- collation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tiny.FORM, tiny.FP8, tiny.TOPK], ids=["bf16", "fp8", "topk"])
def test_batch_of_rows_equals_a_loop_over_blocks_and_labels(form):
    K, num_anchors = 4, 3
    masks = {
        "short": tiny.loss_mask(2, 3), "hole": tiny.loss_mask(1, 12, hole=[5, 6, 9]), "none": tiny.loss_mask(3, 1), "long": tiny.loss_mask(4, 14),
        "prompt": tiny.loss_mask(6, 0),
    }  # fmt: skip
    sequences = [tiny.row(name, mask, i + 1, form=form) for i, (name, mask) in enumerate(masks.items())]
    batch = build_batch([(row, (9, i)) for i, row in enumerate(sequences)], num_anchors, K)
    anchors = [draw_anchors(row.loss_mask_T, num_anchors, np.random.default_rng((9, i))).tolist() for i, row in enumerate(sequences)]
    assert [len(a) for a in anchors] == [2, 3, 0, 3, 0]
    num_counting = 0
    ends = [max(a, default=0) for a in anchors]  # nothing sees a token at or after the last anchor
    tapped, next_tokens = tiny.contexts(batch)
    assert batch.context.tapped_SLD.shape == (sum(ends), len(tiny.TAPPED), tiny.SHAPE.width)
    assert tapped.shape[:2] == (5, max(ends))
    for b, row in enumerate(sequences):
        mask, seen = row.loss_mask_T.tolist(), ends[b]
        assert torch.equal(tapped[b, :seen].double(), tiny.values(row.tapped_PLD)[:seen])
        assert next_tokens[b, :seen].tolist() == row.token_ids_T[1 : seen + 1].tolist()
        assert not tapped[b, seen:].any()
        final_rows = [j for j in range(len(mask) - 1) if mask[j + 1]]
        for i in range(num_anchors):
            if i >= len(anchors[b]):
                assert not batch.valid_BAK[b, i].any()
                assert batch.anchors_BA[b, i] == 0
                assert batch.label_BAK[b, i].tolist() == [-1] * K
                continue
            a = anchors[b][i]
            assert batch.anchors_BA[b, i] == a
            assert batch.previous_BAK[b, i, 0] == row.token_ids_T[a]
            for k, position in enumerate(oracles.labels(mask, a, K)):
                assert batch.valid_BAK[b, i, k] == (position >= 0)
                assert batch.label_BAK[b, i, k] == (row.token_ids_T[position] if position >= 0 else -1)
                if position >= 0:
                    num_counting += 1
                    assert batch.previous_BAK[b, i, k] == row.token_ids_T[position - 1]
                    slot = final_rows.index(position - 1)  # the target's row that predicts the label
                    assert batch.log_sum_exp_BAK[b, i, k] == row.log_sum_exp_S[slot]
                    if form.logits == "final":
                        assert torch.equal(batch.final_BAKD[b, i, k].double(), tiny.values(row.final_SD)[slot])
                    else:
                        assert batch.top_ids_BAKC[b, i, k].tolist() == row.top_ids_SC[slot].tolist()
                        assert batch.top_logits_BAKC[b, i, k].tolist() == row.top_logits_SC[slot].tolist()
    assert num_counting == int(batch.valid_BAK.sum()) > 10
    assert (batch.final_BAKD is None, batch.top_ids_BAKC is None) == (form.logits == "topk", form.logits == "final")


def test_batch_without_any_anchor_has_shapes_and_no_valid_row():
    batch = build_batch([(tiny.row("none", tiny.loss_mask(3, 1), 1), (0,)), (tiny.row("prompt", tiny.loss_mask(3, 0), 2), (1,))], 5, 4)
    assert batch.valid_BAK.shape == (2, 1, 4)
    assert not batch.valid_BAK.any()
    assert batch.context.size == (2, 1)
    assert len(batch.context.tapped_SLD) == 0
    assert torch.isfinite(batch.final_BAKD).all()


def test_batch_of_best_logits_without_any_anchor_has_none_to_count():
    rows = [tiny.row("none", tiny.loss_mask(3, 1), 1, form=tiny.TOPK), tiny.row("prompt", tiny.loss_mask(3, 0), 2, form=tiny.TOPK)]
    batch = build_batch([(row, (0,)) for row in rows], 5, 4)
    assert batch.top_ids_BAKC.shape == batch.top_logits_BAKC.shape == (2, 1, 4, 5)
    assert (batch.top_logits_BAKC == -torch.inf).all()


def test_anchors_of_a_sequence_do_not_depend_on_its_neighbours():
    rows = tiny.rows(4, 0)
    together = build_batch([(row, (1, i)) for i, row in enumerate(rows)], 3, 4)
    for i, row in enumerate(rows):
        alone = build_batch([(row, (1, i))], 3, 4)
        assert torch.equal(alone.anchors_BA[0], together.anchors_BA[i, : alone.anchors_BA.shape[1]])
        assert torch.equal(alone.label_BAK[0], together.label_BAK[i, : alone.anchors_BA.shape[1]])


def test_batch_moved_to_a_compute_dtype_keeps_integers_and_widens_sums():
    batch = build_batch([(row, (1, i)) for i, row in enumerate(tiny.rows(2, 0))], 3, 4).to(torch.device("cpu"), torch.bfloat16)
    assert (batch.context.tapped_SLD.dtype, batch.final_BAKD.dtype, batch.log_sum_exp_BAK.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert (batch.label_BAK.dtype, batch.valid_BAK.dtype) == (torch.int64, torch.bool)
    assert batch.top_ids_BAKC is batch.top_logits_BAKC is None
    rows = tiny.rows(2, 0, tiny.TOPK)
    batch = build_batch([(row, (1, i)) for i, row in enumerate(rows)], 3, 4).to(torch.device("cpu"), torch.bfloat16)
    assert (batch.top_ids_BAKC.dtype, batch.top_logits_BAKC.dtype, batch.final_BAKD) == (torch.int64, torch.float32, None)


def test_tokens_that_are_labels_are_counted_once_however_many_blocks_predict_them():
    rows = [tiny.row("a", tiny.loss_mask(3, 9), 1), tiny.row("b", tiny.loss_mask(2, 3), 2)]
    assert num_labels(build_batch([(row, (0,)) for row in rows], 99, 4)) == 8 + 2  # all of both responses but their first tokens
    batch = build_batch([(row, (0,)) for row in rows], 1, 4)
    (a,), (b,) = batch.anchors_BA.tolist()
    assert num_labels(batch) == min(4, 11 - a) + min(4, 4 - b)
