"""The sampler's promises, and collation against a plain loop."""

import numpy as np
import pytest
import torch

from dspark.blocks import draw_anchors
from dspark.data import build_batch, rows_of_step
from tests import oracles
from tests.dspark import tiny


def test_rows_of_ranks_are_disjoint_and_together_those_of_the_step():
    whole = rows_of_step(3, 50, 12, seed=5)
    ranks = [whole[rank::4] for rank in range(4)]
    assert sorted(d.row for part in ranks for d in part) == sorted(d.row for d in whole)
    assert len({d.row for d in whole}) == 12
    assert [len(part) for part in ranks] == [3] * 4


@pytest.mark.parametrize(("num_rows", "batch"), [(12, 4), (10, 4), (3, 8)], ids=["divides", "straddles", "smaller_than_a_batch"])
def test_rows_of_consecutive_steps_hold_every_row_once_an_epoch(num_rows, batch):
    drawn = [d for step in range(num_rows * 3) for d in rows_of_step(step, num_rows, batch, seed=1)]
    epochs = [[d.row for d in drawn[start : start + num_rows]] for start in range(0, len(drawn), num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert len({d.anchor_seed for d in drawn}) == len(drawn)  # a row seen again gets new anchors


def test_rows_of_a_step_are_a_function_of_seed_and_step():
    assert rows_of_step(7, 40, 8, seed=3) == rows_of_step(7, 40, 8, seed=3)
    assert rows_of_step(7, 40, 8, seed=3) != rows_of_step(7, 40, 8, seed=4)
    assert rows_of_step(7, 40, 8, seed=3) != rows_of_step(8, 40, 8, seed=3)


def _state(coded):
    return torch.from_numpy(coded.copy()).view(torch.bfloat16)


def test_batch_of_rows_equals_a_loop_over_blocks_and_labels():
    K, num_anchors = 4, 3
    sequences = [
        tiny.row("short", tiny.loss_mask(2, 3), 1), tiny.row("hole", tiny.loss_mask(1, 12, hole=[5, 6, 9]), 2),
        tiny.row("none", tiny.loss_mask(3, 1), 3), tiny.row("long", tiny.loss_mask(4, 14), 4), tiny.row("prompt", tiny.loss_mask(6, 0), 5),
    ]  # fmt: skip
    batch = build_batch([(row, (9, i)) for i, row in enumerate(sequences)], num_anchors, K)
    anchors = [draw_anchors(row.loss_mask_T, num_anchors, np.random.default_rng((9, i))).tolist() for i, row in enumerate(sequences)]
    assert [len(a) for a in anchors] == [2, 3, 0, 3, 0]
    num_counting = 0
    assert batch.tapped_BTLD.shape == (5, max(max(a, default=0) for a in anchors), len(tiny.TAPPED), tiny.SHAPE.width)
    for b, row in enumerate(sequences):
        mask, seen = row.loss_mask_T.tolist(), max(anchors[b], default=0)
        assert torch.equal(batch.tapped_BTLD[b, :seen], _state(row.tapped_PLD[:seen]))
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
                    assert torch.equal(batch.final_BAKD[b, i, k], _state(row.final_SD[slot]))
                    assert batch.log_sum_exp_BAK[b, i, k] == row.log_sum_exp_S[slot]
    assert num_counting == int(batch.valid_BAK.sum()) > 10


def test_batch_without_any_anchor_has_shapes_and_no_valid_row():
    batch = build_batch([(tiny.row("none", tiny.loss_mask(3, 1), 1), (0,)), (tiny.row("prompt", tiny.loss_mask(3, 0), 2), (1,))], 5, 4)
    assert batch.valid_BAK.shape == (2, 1, 4)
    assert not batch.valid_BAK.any()
    assert torch.isfinite(batch.tapped_BTLD).all()
    assert torch.isfinite(batch.final_BAKD).all()


def test_anchors_of_a_sequence_do_not_depend_on_its_neighbours():
    rows = tiny.rows(4, 0)
    together = build_batch([(row, (1, i)) for i, row in enumerate(rows)], 3, 4)
    for i, row in enumerate(rows):
        alone = build_batch([(row, (1, i))], 3, 4)
        assert torch.equal(alone.anchors_BA[0], together.anchors_BA[i, : alone.anchors_BA.shape[1]])
        assert torch.equal(alone.label_BAK[0], together.label_BAK[i, : alone.anchors_BA.shape[1]])


def test_batch_moved_to_a_compute_dtype_keeps_integers_and_widens_sums():
    batch = build_batch([(row, (1, i)) for i, row in enumerate(tiny.rows(2, 0))], 3, 4).to(torch.device("cpu"), torch.bfloat16)
    assert (batch.tapped_BTLD.dtype, batch.final_BAKD.dtype, batch.log_sum_exp_BAK.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert (batch.label_BAK.dtype, batch.valid_BAK.dtype) == (torch.int64, torch.bool)
