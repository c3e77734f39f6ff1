"""Block geometry: the cases, and loops over random masks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.blocks import attention_mask, draw_anchors, lay_blocks, valid_anchors
from tests import oracles


def test_blocks_of_a_case_give_its_labels_and_target_rows(blocks_case):
    mask, expected = np.array(blocks_case["loss_mask"]), blocks_case["expected"]
    blocks = lay_blocks(mask, np.array(blocks_case["anchors"]), blocks_case["block_size"])
    assert blocks.label_index_AK.tolist() == expected["labels"]
    assert blocks.valid_AK.astype(int).tolist() == expected["valid"]
    assert blocks.target_row_AK.tolist() == expected["target_logit_row"]


def test_valid_anchors_of_a_case_follow_the_strict_rule(blocks_case):
    expected = blocks_case["expected"]
    anchors = valid_anchors(np.array(blocks_case["loss_mask"])).tolist()
    assert anchors == expected["valid_anchors"]
    assert [int(a in anchors) for a in blocks_case["anchors"]] == expected["anchor_ok"]


def test_attention_mask_of_a_case_equals_its_rows_of_bits(blocks_case):
    mask = attention_mask(np.array(blocks_case["anchors"]), len(blocks_case["loss_mask"]), blocks_case["block_size"])
    assert ["".join(str(int(bit)) for bit in row) for row in mask] == blocks_case["expected"]["attention"]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 5))
def test_blocks_of_any_mask_equal_the_loop(loss_mask, block_size):
    anchors = np.arange(len(loss_mask))
    blocks = lay_blocks(np.array(loss_mask), anchors, block_size)
    assert blocks.label_index_AK.tolist() == [oracles.labels(loss_mask, a, block_size) for a in anchors]
    assert attention_mask(anchors, len(loss_mask), block_size).tolist() == oracles.visibility(anchors.tolist(), len(loss_mask), block_size)


def test_anchors_drawn_below_the_limit_are_all_of_them():
    assert draw_anchors(np.array([0, 1, 1, 1, 0, 1, 1]), 9, np.random.default_rng(0)).tolist() == [1, 2, 5]


def test_anchors_drawn_above_the_limit_are_distinct_ascending_valid_and_even():
    mask, counts = np.array([0, 0] + [1] * 11), np.zeros(13, dtype=int)
    for seed in range(600):
        anchors = draw_anchors(mask, 4, np.random.default_rng(seed))
        assert len(set(anchors.tolist())) == 4
        assert sorted(anchors.tolist()) == anchors.tolist()
        counts[anchors] += 1
    assert counts[:2].sum() == counts[12] == 0
    assert oracles.fit(counts, np.array([0, 0] + [0.1] * 10 + [0])) > 1e-3


def test_anchors_of_one_seed_are_the_same_twice():
    mask = np.ones(40)
    first, second = (draw_anchors(mask, 5, np.random.default_rng((3, 8))).tolist() for _ in range(2))
    assert first == second != draw_anchors(mask, 5, np.random.default_rng((3, 9))).tolist()
