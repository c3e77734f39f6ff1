"""Block geometry for training: where blocks hang, what they predict, and what they may see (algorithms of §3 of the paper).

A block of K rows hangs on an *anchor* a. Row 0 is fed the anchor token, rows 1..K-1 the mask token, at positions
a..a+K-1; row k predicts token a+1+k. Every row sees the target's context at positions strictly before a (in a sliding layer: the
nearest of them) and all K rows of its own block, and nothing of any other block, however much blocks overlap.

    tokens   p p p r r r r r          loss mask 0 0 0 1 1 1 1 1
    a = 3          A m m m            labels    4 5 6 7

Shapes: A anchors, K block positions, T tokens.
"""

from dataclasses import dataclass

import numpy as np


def valid_anchors(loss_mask_T: np.ndarray) -> np.ndarray:
    """Positions whose own token and whose first label are supervised, ascending.

    The prompt's last token is no anchor: when serving, the first response token comes from the prefill.
    """
    mask = loss_mask_T.astype(bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


def draw_anchors(loss_mask_T: np.ndarray, num_anchors: int, generator: np.random.Generator) -> np.ndarray:
    """Up to `num_anchors` valid anchors, drawn without replacement, ascending."""
    candidates = valid_anchors(loss_mask_T)
    if len(candidates) > num_anchors:
        candidates = generator.choice(candidates, size=num_anchors, replace=False)
    return np.sort(candidates)


@dataclass(frozen=True)
class Blocks:
    """Labels of A blocks as token indices, -1 where the row does not count."""

    anchors_A: np.ndarray
    label_index_AK: np.ndarray  # a+1+k, or -1
    valid_AK: np.ndarray  # bool: this and every earlier label of the block is supervised and inside the sequence

    @property
    def target_row_AK(self) -> np.ndarray:
        """The target's output row that predicts the label (label - 1), or -1."""
        return np.where(self.valid_AK, self.label_index_AK - 1, -1)


def lay_blocks(loss_mask_T: np.ndarray, anchors_A: np.ndarray, block_size: int) -> Blocks:
    """Labels and validity of the blocks on the given anchors; a block counts up to its first unsupervised label."""
    num_tokens = len(loss_mask_T)
    index_AK = anchors_A[:, None] + 1 + np.arange(block_size)[None]
    inside_AK = index_AK < num_tokens
    supervised_AK = inside_AK & loss_mask_T.astype(bool)[np.where(inside_AK, index_AK, 0)]
    valid_AK = np.logical_and.accumulate(supervised_AK, axis=1)
    return Blocks(anchors_A, np.where(valid_AK, index_AK, -1), valid_AK)


def attention_mask(anchors_A: np.ndarray, num_tokens: int, block_size: int) -> np.ndarray:
    """The dense visibility [A*K, T + A*K] that `layers.attend` realises without ever building it; the tests' oracle."""
    num_blocks = len(anchors_A)
    context = np.arange(num_tokens)[None] < np.repeat(anchors_A, block_size)[:, None]
    own = np.kron(np.eye(num_blocks, dtype=bool), np.ones((block_size, block_size), dtype=bool))
    return np.concatenate([context, own], axis=1)
