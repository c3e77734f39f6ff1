"""The drafters: training pass against a dense oracle, what a block may see, and the decoding pass against the training pass."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.blocks import attention_mask
from dspark.drafters.base import INIT_STD, ContextRows, PackedContext, TrainingBatch
from dspark.sampling import BlockDraw, Noise, Sampling, distribution
from dspark.step import Step
from tests import oracles
from tests.dspark import tiny

KINDS = ["dflash", "dspark", "gated", "rnn", "headless"]
RECURRENT = ["eagle3", "mtp"]
OFFSET = dataclasses.replace(tiny.SHAPE, norm_weight_offset=1.0)
K, L, D = tiny.BLOCK, len(tiny.TAPPED), tiny.SHAPE.width


def _batch(anchors_BA, num_tokens, seed=0, num_tapped=L, block_size=K):
    """A batch of blocks with random states and previous tokens; all rows count. The anchor tokens are those of the context."""
    generator, B, A = np.random.default_rng(seed), len(anchors_BA), len(anchors_BA[0])
    sizes = (B, num_tokens, num_tapped, D), (B, A, block_size, D), (B, A, block_size)
    normal = [torch.from_numpy(generator.normal(0.0, 1.0, size)) for size in sizes]
    previous, label = (torch.from_numpy(generator.integers(0, tiny.MASK, (B, A, block_size))) for _ in range(2))
    next_tokens, anchors = torch.from_numpy(generator.integers(0, tiny.MASK, (B, num_tokens))), torch.tensor(anchors_BA)
    previous[..., 0] = next_tokens.gather(1, (anchors - 1).clamp_min(0))
    valid = torch.ones(B, A, block_size, dtype=torch.bool)
    return TrainingBatch(tiny.packed(normal[0], next_tokens), anchors, previous, label, valid, normal[2] + 5.0, normal[1])


def _recurrent_batch(kind, anchors_BA, num_tokens, seed=0):
    return _batch(anchors_BA, num_tokens, seed, len(tiny.tapped_layers(kind)), tiny.CONFIGS[kind].block_size)


@pytest.mark.parametrize("shape", [tiny.SHAPE, tiny.CAPPED], ids=["plain", "soft_capped"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_pass_equals_the_dense_oracle(kind, draft_ids, shape):
    drafter, batch = tiny.drafter(kind, draft_ids, shape), _batch([[2, 3, 7], [0, 5, 6]], num_tokens=7)
    output = drafter(batch)
    for b in range(2):
        anchors = batch.anchors_BA[b].tolist()
        mask = attention_mask(np.array(anchors), 7, K)
        wanted = oracles.drafter_rows(drafter, tiny.contexts(batch)[0][b], anchors, batch.previous_BAK[b].tolist(), mask)
        assert torch.allclose(tiny.draft_logits(drafter, batch)[b], wanted.logits_AKW, atol=1e-10)
        if kind != "dflash":
            assert torch.allclose(output.confidence_logits_BAK[b], wanted.confidence_AK, atol=1e-10)
    assert (output.confidence_logits_BAK is None) == (kind == "dflash")


def test_block_of_the_1_plus_n_layout_predicts_from_its_mask_rows_alone():
    drafter, batch, anchors = tiny.drafter("one_plus_n"), _batch([[2, 3, 7]], num_tokens=7), [2, 3, 7]
    mask = attention_mask(np.array(anchors), 7, K + 1)
    wanted = oracles.drafter_rows(drafter, batch.context.tapped_SLD, anchors, batch.previous_BAK[0].tolist(), mask)
    output = drafter(batch)
    assert torch.allclose(tiny.draft_logits(drafter, batch)[0], wanted.logits_AKW, atol=1e-10)
    assert torch.allclose(output.confidence_logits_BAK[0], wanted.confidence_AK, atol=1e-10)
    assert not torch.allclose(tiny.draft_logits(tiny.drafter("dspark"), batch)[0], wanted.logits_AKW, atol=1e-4)


def test_row_of_a_sliding_layer_sees_the_window_before_its_own_position():
    drafter, batch, anchors, T = tiny.drafter("sliding"), _batch([[2, 3, 7]], num_tokens=7), [2, 3, 7], 7
    whole = attention_mask(np.array(anchors), T, K)
    near = whole.copy()
    for row, (a, k) in enumerate((a, k) for a in anchors for k in range(K)):
        near[row, :T] = [t < a and a + k - t < 3 for t in range(T)]  # the window of 3 counts the row's own position
    assert near[:, :T].sum(1).tolist() == [2, 1, 0, 0] * 3
    wanted = oracles.drafter_rows(drafter, batch.context.tapped_SLD, anchors, batch.previous_BAK[0].tolist(), whole, near)
    assert torch.allclose(tiny.draft_logits(drafter, batch)[0], wanted.logits_AKW, atol=1e-10)
    assert not torch.allclose(tiny.draft_logits(tiny.drafter("dspark"), batch)[0], wanted.logits_AKW, atol=1e-4)


@pytest.mark.parametrize("shape", [tiny.SHAPE, tiny.CAPPED, OFFSET], ids=["plain", "soft_capped", "norm_offset"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_training_pass_of_a_recurrent_drafter_equals_the_oracle_step_by_step(kind, draft_ids, shape):
    drafter, batch = tiny.drafter(kind, draft_ids, shape), _recurrent_batch(kind, [[2, 3, 7], [1, 5, 6]], num_tokens=7)
    logits = tiny.draft_logits(drafter, batch)
    for b in range(2):
        tapped, next_tokens = (x[b] for x in tiny.contexts(batch))
        given = next_tokens.tolist(), batch.anchors_BA[b].tolist(), batch.previous_BAK[b].tolist()
        assert torch.allclose(logits[b], oracles.recurrent_rows(drafter, tapped, *given), atol=1e-10)


@pytest.mark.parametrize("kind", [*KINDS, *RECURRENT])
def test_packed_sequences_give_what_each_gives_alone(kind):
    """Values and gradients; lengths from none at all to the longest, contexts end where the last block hangs."""
    drafter, K = tiny.drafter(kind), tiny.CONFIGS[kind].block_size
    whole = _recurrent_batch(kind, [[2, 9, 4], [3, 1, 2], [0, 0, 0], [6, 6, 5]], num_tokens=9)
    tapped, next_tokens = tiny.contexts(whole)
    lengths = whole.anchors_BA.amax(1).tolist()

    def batch(rows):
        parts = [x[b, : lengths[b]] for x in (tapped, next_tokens) for b in rows]
        context = PackedContext.of(torch.cat(parts[: len(rows)]), torch.cat(parts[len(rows) :]), [lengths[b] for b in rows])
        fields = (whole.anchors_BA, whole.previous_BAK, whole.label_BAK, whole.valid_BAK, whole.log_sum_exp_BAK, whole.final_BAKD)
        return TrainingBatch(context, *(field[rows] for field in fields))

    def logits_and_gradients(rows):
        drafter.zero_grad()
        logits = tiny.draft_logits(drafter, batch(rows))
        (logits * torch.sin(torch.arange(logits[0].numel(), dtype=logits.dtype)).view(logits[0].shape)).sum().backward()
        return logits.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in drafter.parameters()]

    together, gradients = logits_and_gradients([0, 1, 2, 3])
    alone = [logits_and_gradients([b]) for b in range(4)]
    assert torch.allclose(together, torch.cat([logits for logits, _ in alone]), atol=1e-12)
    for found, *parts in zip(gradients, *(each for _, each in alone), strict=True):
        assert torch.allclose(found, sum(parts), atol=1e-11)
    assert together.shape[:3] == (4, 3, K)
    assert len(batch([0, 1, 2, 3]).context.tapped_SLD) == sum(lengths) == 18 < tapped[..., 0, 0].numel()


@pytest.mark.parametrize("kind", ["dspark", *RECURRENT])
@pytest.mark.parametrize("rope", tiny.ROPES.values(), ids=tiny.ROPES)
def test_training_pass_with_the_rotary_embedding_of_a_target_equals_the_oracle(rope, kind):
    drafter = tiny.drafter(kind, tiny.REDUCED, dataclasses.replace(tiny.SHAPE, rope=rope))
    batch = _recurrent_batch(kind, [[2, 7, 5]], num_tokens=7)
    anchors, previous = batch.anchors_BA[0].tolist(), batch.previous_BAK[0].tolist()
    if kind == "dspark":
        mask = attention_mask(np.array(anchors), 7, K)
        wanted = oracles.drafter_rows(drafter, batch.context.tapped_SLD, anchors, previous, mask).logits_AKW
    else:
        wanted = oracles.recurrent_rows(drafter, batch.context.tapped_SLD, batch.context.next_tokens_S.tolist(), anchors, previous)
    found = tiny.draft_logits(drafter, batch)
    assert torch.allclose(found[0], wanted, atol=1e-10)
    assert not torch.allclose(found, tiny.draft_logits(tiny.drafter(kind, tiny.REDUCED), batch), atol=1e-4)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(RECURRENT),
    anchors=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    position=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_state_or_token_changed_moves_exactly_the_blocks_of_a_recurrent_drafter_that_have_seen_it(kind, anchors, position, seed):
    drafter, batch = tiny.drafter(kind), _recurrent_batch(kind, [anchors], num_tokens=9, seed=seed)
    before = tiny.draft_logits(drafter, batch)
    batch.context.tapped_SLD[position] += 1.0
    moved = (tiny.draft_logits(drafter, batch) != before)[0].any(-1).any(-1).tolist()
    assert moved == [position < anchor for anchor in anchors]
    batch.context.tapped_SLD[position] -= 1.0
    before = tiny.draft_logits(drafter, batch)
    batch.context.next_tokens_S[position] = (batch.context.next_tokens_S[position] + 1) % tiny.MASK
    moved = (tiny.draft_logits(drafter, batch) != before)[0].any(-1).any(-1).tolist()
    # The row before the anchor is fed the anchor token, which the block has of its own.
    assert all(position < anchor for anchor, has_moved in zip(anchors, moved, strict=True) if has_moved)
    if not (kind == "mtp" and position == 0):  # whose embedding is zero
        assert all(has_moved for anchor, has_moved in zip(anchors, moved, strict=True) if position < anchor - 1)


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_proposal_of_a_recurrent_drafter_equals_its_training_pass_teacher_forced_to_its_tokens(kind, draft_ids, mode):
    drafter, anchors = tiny.drafter(kind, draft_ids), [3, 9, 1, 6]
    batch = _recurrent_batch(kind, [[a] for a in anchors], num_tokens=10)
    context = _context(drafter, batch, [4, 1, 5])
    proposal, probs_BKW = _propose(drafter, context, batch, anchors, mode, 0.8)
    batch.previous_BAK[:, 0, 1:] = proposal.tokens_BK[:, :-1]
    logits_BKW = tiny.draft_logits(drafter, batch)[:, 0]
    if mode == "greedy":
        assert torch.equal(proposal.tokens_BK, drafter.draft_ids_W[logits_BKW.argmax(-1)])
    else:
        assert torch.allclose(probs_BKW, distribution(logits_BKW, 0.8), atol=1e-12)
    assert proposal.confidence_logits_BK is None
    some, _ = _propose(drafter, context.rows(torch.tensor([2, 0])), _rows(batch, [2, 0]), [1, 3], "greedy", 1.0)
    whole, _ = _propose(drafter, context, batch, anchors, "greedy", 1.0)
    assert torch.equal(some.tokens_BK, whole.tokens_BK[[2, 0]])


def _rows(batch, rows):
    return dataclasses.replace(batch, previous_BAK=batch.previous_BAK[rows])


@pytest.mark.parametrize("kind", RECURRENT)
def test_padding_anchors_of_a_recurrent_drafter_leave_gradients_finite(kind):
    drafter, batch = tiny.drafter(kind), _recurrent_batch(kind, [[4, 0], [0, 0]], num_tokens=4)
    batch.valid_BAK[0, 1:], batch.valid_BAK[1] = False, False
    batch.label_BAK[~batch.valid_BAK] = -1
    tiny.losses(drafter, batch).total.backward()
    assert all(torch.isfinite(p.grad).all() for p in drafter.parameters())


@pytest.mark.parametrize("shape", [tiny.SHAPE, tiny.CAPPED], ids=["plain", "soft_capped"])
def test_target_distribution_over_a_reduced_vocabulary_keeps_its_full_normaliser(shape):
    drafter, batch = tiny.drafter("dspark", tiny.REDUCED, shape), _batch([[2, 3]], num_tokens=3)
    logits = oracles.soft_cap(batch.final_BAKD @ tiny.tables(shape).lm_head_VD.T, shape.logit_soft_cap)
    batch.log_sum_exp_BAK = logits.logsumexp(-1)
    found = tiny.target_probs(drafter, batch)
    assert torch.allclose(found, logits.softmax(-1)[..., tiny.REDUCED], atol=1e-13)
    assert found.sum(-1).min() < 0.5


def _with_logits(batch, shape, num_best=None):
    """The batch with the target's log-sum-exp; with `num_best`, its best logits in place of its final states."""
    logits = oracles.soft_cap(batch.final_BAKD @ tiny.tables(shape).lm_head_VD.T, shape.logit_soft_cap)
    batch = dataclasses.replace(batch, log_sum_exp_BAK=logits.logsumexp(-1))
    if num_best is None:
        return batch
    best = logits.topk(num_best)
    return dataclasses.replace(batch, final_BAKD=None, top_ids_BAKC=best.indices, top_logits_BAKC=best.values)


@pytest.mark.parametrize("shape", [tiny.SHAPE, tiny.CAPPED], ids=["plain", "soft_capped"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
def test_target_distribution_from_best_logits_is_the_dense_one_at_their_ids_and_nothing_elsewhere(draft_ids, shape):
    drafter, batch = tiny.drafter("dspark", draft_ids, shape), _batch([[2, 3], [1, 4]], num_tokens=4)
    dense, best = tiny.target_probs(drafter, _with_logits(batch, shape)), _with_logits(batch, shape, num_best=6)
    found, num_kept, ids = tiny.target_probs(drafter, best), 0, drafter.draft_ids_W.tolist()
    for place in np.ndindex(2, 2, K):
        kept = best.top_ids_BAKC[place].tolist()
        for w, token in enumerate(ids):
            num_kept += token in kept
            assert float(found[(*place, w)]) == (pytest.approx(float(dense[(*place, w)]), abs=1e-12) if token in kept else 0.0)
    assert (num_kept == 6 * 16) == (draft_ids is None)  # of the best, some lie outside a reduced vocabulary
    assert num_kept > 16


def test_target_distribution_from_best_logits_survives_padding():
    """Rows that do not count hold id 0 again and again, with a logit of minus infinity."""
    drafter, batch = tiny.drafter("dspark", tiny.REDUCED), _with_logits(_batch([[2, 3]], num_tokens=3), tiny.SHAPE, num_best=4)
    batch.top_ids_BAKC[0, 1], batch.top_logits_BAKC[0, 1], batch.log_sum_exp_BAK[0, 1] = 0, -torch.inf, 0.0
    found = tiny.target_probs(drafter, batch)
    assert (found[0, 1] == 0.0).all()
    assert (found[0, 0] > 0.0).any()


@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
def test_loss_from_every_logit_equals_the_loss_from_final_states(draft_ids):
    drafter, batch = tiny.drafter("dspark", draft_ids), _batch([[2, 3], [1, 4]], num_tokens=4)
    gradients, totals = [], []
    for num_best in (None, tiny.SHAPE.vocab_size):
        given_batch = _with_logits(batch, tiny.SHAPE, num_best)
        drafter.zero_grad()
        total = tiny.losses(drafter, given_batch).total
        total.backward()
        totals.append(total.item())
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert totals[1] == pytest.approx(totals[0], rel=1e-12)
    assert torch.allclose(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(seed=st.integers(0, 9999), num_best=st.integers(1, tiny.SHAPE.vocab_size), scale=st.floats(0.0, 4.0), is_reduced=st.booleans())
def test_total_variation_from_best_logits_is_off_by_no_more_than_the_missing_mass(seed, num_best, scale, is_reduced):
    drafter, batch = tiny.drafter("dspark", tiny.REDUCED if is_reduced else None), _batch([[2]], num_tokens=2, seed=seed)
    batch = dataclasses.replace(batch, final_BAKD=batch.final_BAKD * scale)
    drafter.norm.weight.data *= 2.0  # a sharper draft
    best = _with_logits(batch, tiny.SHAPE, num_best)
    missing_K = 1.0 - (best.top_logits_BAKC - best.log_sum_exp_BAK[..., None]).exp().sum(-1)[0, 0]
    accepted = [
        tiny.losses(drafter, part).accept_K for part in (_with_logits(batch, tiny.SHAPE), best)
    ]  # one block: at every position 1 - TV of its only row
    apart_K = accepted[0] - accepted[1]
    assert (apart_K >= -1e-12).all()  # what is missing counts as rejected
    assert (apart_K <= missing_K + 1e-12).all()


_anchors = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@settings(max_examples=25)
@given(anchors=_anchors, position=st.integers(0, 8), layer=st.integers(0, L - 1), seed=st.integers(0, 99))
def test_tapped_state_changed_anywhere_moves_exactly_the_blocks_anchored_after_it(anchors, position, layer, seed):
    drafter, batch = tiny.drafter("dspark"), _batch([anchors], num_tokens=9, seed=seed)
    before = drafter(batch)
    batch.context.tapped_SLD[position, layer] += 1.0
    after = drafter(batch)
    for i, anchor in enumerate(anchors):
        same = [torch.equal(getattr(before, f)[0, i], getattr(after, f)[0, i]) for f in ("hidden_BAKD", "confidence_logits_BAK")]
        assert same == [position >= anchor] * 2
        if position < anchor:  # every row of the block sees the context
            assert (before.hidden_BAKD[0, i] != after.hidden_BAKD[0, i]).any(-1).all()


@settings(max_examples=15)
@given(anchors=st.lists(st.integers(0, 9), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_block_changed_in_an_overlapping_neighbourhood_leaves_the_others_alone(anchors, seed):
    drafter, batch = tiny.drafter("dspark"), _batch([anchors], num_tokens=9, seed=seed)
    before = tiny.draft_logits(drafter, batch)
    batch.previous_BAK[0, 0] = (batch.previous_BAK[0, 0] + 1) % tiny.MASK
    after = tiny.draft_logits(drafter, batch)
    assert torch.equal(before[0, 1:], after[0, 1:])
    assert not torch.equal(before[0, 0], after[0, 0])


def test_markov_bias_of_a_row_depends_on_its_own_previous_token_alone():
    drafter, batch = tiny.drafter("dspark"), _batch([[4]], num_tokens=4)
    before, logits = drafter(batch), tiny.draft_logits(drafter, batch)
    batch.previous_BAK[0, 0, 2] = (batch.previous_BAK[0, 0, 2] + 1) % tiny.MASK
    after = drafter(batch)
    assert (logits[0, 0] != tiny.draft_logits(drafter, batch)[0, 0]).any(-1).tolist() == [False, False, True, False]
    assert (before.confidence_logits_BAK[0, 0] != after.confidence_logits_BAK[0, 0]).tolist() == [False, False, True, False]


def _rows_at(tapped_BTLD, next_tokens_BT, first_positions):
    step = Step.of(next_tokens_BT.tolist(), first_positions, range(len(next_tokens_BT)), torch.device("cpu"))
    return ContextRows(step, tapped_BTLD.flatten(0, 1), next_tokens_BT.flatten())


def _context(drafter, batch, pieces):
    """The draft context, added in pieces of these lengths."""
    tapped, next_tokens = tiny.contexts(batch)
    num_rows, num_tokens = next_tokens.shape
    context, start = drafter.new_context(num_rows, num_tokens + K + 1), 0
    for length in pieces:
        part = slice(start, start + length)
        drafter.extend_context(context, _rows_at(tapped[:, part], next_tokens[:, part], [start] * num_rows))
        start += length
    return context


def _propose(drafter, context, batch, anchors, mode, temperature):
    """The proposal, and what its tokens were drawn from."""
    block = BlockDraw(Sampling(mode, temperature), [Noise(4, str(i)) for i in range(len(anchors))], anchors)
    proposal = drafter.propose(context, batch.previous_BAK[:, 0, 0], torch.tensor(anchors), block)
    return proposal, block.probs_BKW


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_proposal_equals_the_training_pass_teacher_forced_to_its_tokens(kind, draft_ids, mode):
    drafter, anchors = tiny.drafter(kind, draft_ids), [3, 9, 1, 6]
    batch = _batch([[a] for a in anchors], num_tokens=10)
    context = _context(drafter, batch, [4, 1, 5])
    proposal, probs_BKW = _propose(drafter, context, batch, anchors, mode, 0.8)
    batch.previous_BAK[:, 0, 1:] = proposal.tokens_BK[:, :-1]
    output = drafter(batch)
    if mode == "probabilistic":
        assert torch.allclose(probs_BKW, distribution(tiny.draft_logits(drafter, batch)[:, 0], 0.8), atol=1e-12)
    if kind != "dflash":
        assert torch.allclose(proposal.confidence_logits_BK, output.confidence_logits_BAK[:, 0], atol=1e-12)
    assert (proposal.confidence_logits_BK is None) == (kind == "dflash")
    assert torch.isin(proposal.tokens_BK, drafter.draft_ids_W).all()
    if mode == "greedy":
        assert torch.equal(proposal.tokens_BK, drafter.draft_ids_W[tiny.draft_logits(drafter, batch)[:, 0].argmax(-1)])


def test_proposal_with_stale_context_at_and_after_the_anchor_ignores_it():
    drafter, anchors = tiny.drafter("dspark"), [3, 9, 1, 6]
    batch = _batch([[a] for a in anchors], num_tokens=10)
    clean, clean_probs = _propose(drafter, _context(drafter, batch, [10]), batch, anchors, "probabilistic", 1.0)
    context = _context(drafter, batch, [10])
    garbage = torch.full((4, K + 1, L, D), 7.0, dtype=torch.float64)
    tokens = torch.zeros(4, K + 1, dtype=torch.long)
    drafter.extend_context(context, _rows_at(garbage, tokens, anchors))
    stale, stale_probs = _propose(drafter, context, batch, anchors, "probabilistic", 1.0)
    assert torch.equal(clean.tokens_BK, stale.tokens_BK)
    assert torch.equal(clean_probs, stale_probs)
    drafter.extend_context(context, _rows_at(garbage[:, :1], tokens[:, :1], [a - 1 for a in anchors]))
    assert not torch.allclose(clean_probs, _propose(drafter, context, batch, anchors, "probabilistic", 1.0)[1])


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_proposal_of_a_request_in_another_slot_is_the_same(kind):
    drafter, anchors = tiny.drafter(kind), [3, 9, 2]
    batch = (_recurrent_batch if kind == "eagle3" else lambda _, *args, **kwargs: _batch(*args, **kwargs))(
        kind, [[a] for a in anchors], num_tokens=10
    )
    context = _context(drafter, batch, [10])
    whole, _ = _propose(drafter, context, batch, anchors, "greedy", 1.0)
    copy = context.rows(torch.tensor([2, 0]))
    context.move(2, 0, 2)
    for some_context, rows in ((copy, [2, 0]), (context, [2, 1])):
        some, _ = _propose(drafter, some_context, _rows(batch, rows), [anchors[i] for i in rows], "greedy", 1.0)
        assert torch.equal(some.tokens_BK, whole.tokens_BK[rows])
        if kind == "dspark":
            assert torch.allclose(some.confidence_logits_BK, whole.confidence_logits_BK[rows], atol=1e-12)


def test_markov_ablation_drops_the_bias_and_keeps_the_confidence():
    drafter, batch = tiny.drafter("dspark"), _batch([[4]], num_tokens=4)
    whole, confidence = tiny.draft_logits(drafter, batch), drafter(batch).confidence_logits_BAK
    bias = drafter.markov_head.markov_w2(drafter.markov_head.markov_w1(batch.previous_BAK))
    drafter.is_markov_ablated = True
    assert torch.allclose(whole - bias, tiny.draft_logits(drafter, batch), atol=1e-12)
    assert torch.equal(confidence, drafter(batch).confidence_logits_BAK)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_frozen_tables_are_no_parameters_and_not_in_the_state_dict(kind):
    drafter = tiny.drafter(kind, tiny.REDUCED)
    names = {name for name, _ in drafter.named_parameters()}
    assert set(drafter.state_dict()) == names
    assert not any("embedding_VD" in name or "lm_head" in name or "draft_ids" in name for name in names)
    heads = {name.split(".")[0] for name in names} - {"fc", "hidden_norm", "norm", "layers"}
    assert heads == ({"markov_head", "confidence_head"} if kind == "dspark" else set())
    tiny.draft_logits(drafter, _batch([[4]], num_tokens=4)).sum().backward()
    assert drafter.embedding_VD.grad is drafter.lm_head_WD.grad is None


def test_reduced_vocabulary_indexes_markov_input_by_target_and_output_by_draft_ids():
    drafter = tiny.drafter("dspark", tiny.REDUCED)
    assert drafter.markov_head.markov_w1.weight.shape == (tiny.SHAPE.vocab_size, 5)
    assert drafter.markov_head.markov_w2.weight.shape == (len(tiny.REDUCED), 5)
    assert torch.equal(drafter.lm_head_WD, tiny.tables().lm_head_VD[tiny.REDUCED])


def test_initialisation_of_one_seed_is_reproducible_and_has_its_moments():
    first, second, other = tiny.drafter("dspark", seed=2), tiny.drafter("dspark", seed=3), tiny.drafter("dspark", seed=2)
    for drafter, seed in ((first, 5), (second, 5), (other, 6)):
        for module in drafter.modules():  # as built: norms are 1
            if hasattr(module, "epsilon"):
                module.weight.data.fill_(1.0)
        drafter.initialise(seed)
    states = [drafter.state_dict() for drafter in (first, second, other)]
    matrices = [name for name, tensor in states[0].items() if tensor.dim() > 1]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not any(torch.equal(states[0][name], states[2][name]) for name in matrices)
    pooled = torch.cat([states[0][name].flatten() for name in matrices])
    assert pooled.mean().abs() < 4 * INIT_STD / len(pooled) ** 0.5
    assert pooled.std() == pytest.approx(INIT_STD, rel=0.05)
    assert states[0]["confidence_head.proj.bias"].tolist() == [0.0]
    assert states[0]["norm.weight"].tolist() == [1.0] * D
