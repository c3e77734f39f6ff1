"""From cache rows to training batches: a stateless sampler and the collation of blocks.

The rows of optimiser step s and the anchors drawn in them are functions of (seed, s) alone. A resumed run needs no sampler
state, and another world size sees the same rows with the same anchors: rank r takes every world-size-th of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.blocks import draw_anchors, lay_blocks
from dspark.cache import CacheRow, supervised_rows
from dspark.drafters.base import TrainingBatch


@dataclass(frozen=True)
class RowDraw:
    """A row of the cache and the seed of its anchors at this step."""

    row: int
    anchor_seed: tuple[int, ...]


def rows_of_step(step: int, num_rows: int, batch_sequences: int, seed: int) -> list[RowDraw]:
    """The sequences of one optimiser step: consecutive slots of an endless shuffle, a new permutation each epoch."""
    slots = range(step * batch_sequences, (step + 1) * batch_sequences)
    shuffled = {epoch: np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in {slot // num_rows for slot in slots}}
    return [RowDraw(int(shuffled[slot // num_rows][slot % num_rows]), (seed, slot)) for slot in slots]


def build_batch(rows: Sequence[tuple[CacheRow, tuple[int, ...]]], num_anchors: int, block_size: int) -> TrainingBatch:
    """Blocks of these rows (with their anchor seeds), contexts and anchors padded to the longest and the most."""
    laid = [
        lay_blocks(row.loss_mask_T, draw_anchors(row.loss_mask_T, num_anchors, np.random.default_rng(seed)), block_size)
        for row, seed in rows
    ]
    B, A, K = len(rows), max(max(len(b.anchors_A) for b in laid), 1), block_size
    # An anchor sees what lies strictly before it, so the context ends at the last anchor.
    T = max(max(int(b.anchors_A.max(initial=0)) for b in laid), 1)
    L, D = rows[0][0].tapped_PLD.shape[1:]
    tapped = torch.zeros(B, T, L, D, dtype=torch.bfloat16)
    anchors, previous = np.zeros((B, A), np.int64), np.zeros((B, A, K), np.int64)
    label, valid = np.full((B, A, K), -1, np.int64), np.zeros((B, A, K), bool)
    final = torch.zeros(B, A, K, D, dtype=torch.bfloat16)
    log_sum_exp = np.zeros((B, A, K), np.float32)
    for i, ((row, _), blocks) in enumerate(zip(rows, laid, strict=True)):
        a, kept = len(blocks.anchors_A), min(T, len(row.tapped_PLD))
        tapped[i, :kept] = as_bf16(row.tapped_PLD[:kept])
        anchors[i, :a], valid[i, :a] = blocks.anchors_A, blocks.valid_AK
        label[i, :a] = np.where(blocks.valid_AK, row.token_ids_T[blocks.label_index_AK], -1)
        # x_{k-1} is the token just before the label; the anchor token always exists, later ones where the row counts.
        before = np.concatenate([blocks.anchors_A[:, None], blocks.label_index_AK[:, :-1]], axis=1)
        previous[i, :a] = np.where(before >= 0, row.token_ids_T[before], 0)
        state = np.searchsorted(supervised_rows(row.loss_mask_T), blocks.target_row_AK)
        state = np.where(blocks.valid_AK, state, 0)
        final[i, :a] = as_bf16(row.final_SD)[torch.from_numpy(state)]
        log_sum_exp[i, :a] = row.log_sum_exp_S[state]
    return TrainingBatch(
        tapped,
        torch.from_numpy(anchors),
        torch.from_numpy(previous),
        torch.from_numpy(label),
        torch.from_numpy(valid),
        final,
        torch.from_numpy(log_sum_exp),
    )


def as_bf16(states: np.ndarray) -> Tensor:
    """A copy of uint16-coded bf16 states as a tensor."""
    return torch.from_numpy(states.copy()).view(torch.bfloat16)
