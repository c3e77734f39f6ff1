"""The loss against the cases, a reduced draft vocabulary against a loop over the whole one, and chunks against dense autograd."""

import math

import numpy as np
import pytest
import torch

from dspark.config import LossConfig
from dspark.drafters.base import BlockOutput, DraftHead, PackedContext, TrainingBatch
from dspark.losses import TILE_IDS, Denominators, block_losses, loss_weights
from tests import oracles


def _batch(label_BAK, valid_BAK, log_sum_exp_BAK=None, final_BAKD=None):
    """Only what the loss reads of a batch is real."""
    nothing = torch.zeros(0)
    anchors = torch.zeros(label_BAK.shape[:2], dtype=torch.long)
    context = PackedContext.of(nothing, nothing, [0] * len(anchors))
    return TrainingBatch(
        context, anchors, nothing, label_BAK, valid_BAK, nothing if log_sum_exp_BAK is None else log_sum_exp_BAK, final_BAKD
    )


def _plain_head(num_ids, ids=None):
    """A head whose logits are the hidden state itself."""
    return DraftHead(torch.eye(num_ids, dtype=torch.float64), None, torch.arange(num_ids) if ids is None else ids, None)


def _run(draft_logits, confidence_logits, target_logits, label, valid, draft_ids, config, chunk_rows=2, denominators=None):
    """Losses and weights of blocks [A, K, ...], as a batch of one sequence. The states are the logits themselves."""
    normaliser = target_logits.logsumexp(-1)
    batch = _batch(label[None], valid[None], normaliser[None], target_logits[..., draft_ids][None])
    head = _plain_head(len(draft_ids), draft_ids)
    weights = loss_weights(batch, head, config, torch.float64)
    output = BlockOutput(draft_logits[None], None, None if confidence_logits is None else confidence_logits[None])
    whole = Denominators(weights.sum, weights.sum_ce) if denominators is None else denominators
    return block_losses(output, batch, head, weights, whole, config, chunk_rows), weights


def _case(case):
    names = ("draft_logits", "target_logits", "confidence_logits")
    draft, target, confidence = (torch.tensor(case[name], dtype=torch.float64) for name in names)
    config = LossConfig(case["alphas"]["ce"], 0.0, case["alphas"]["tv"], case["alphas"]["confidence"], case["gamma"])
    draft.requires_grad_()
    confidence.requires_grad_()
    label, valid = torch.tensor(case["labels"]), torch.tensor(case["valid"], dtype=torch.bool)
    losses, weights = _run(draft, confidence, target, label, valid, torch.arange(draft.shape[-1]), config)
    return draft, confidence, losses, weights


def test_loss_terms_of_a_case_have_its_values(losses_case):
    _, _, losses, weights = _case(losses_case)
    expected = losses_case["expected"]
    assert float(weights.sum) == pytest.approx(expected["weight_sum"], abs=1e-10)
    assert torch.allclose(weights.weight_BAK[0], torch.tensor(expected["weights"], dtype=torch.float64), atol=1e-10)
    for term, denominator in (("ce", weights.sum_ce), ("tv", weights.sum), ("confidence", weights.sum)):
        value = getattr(losses, term).item() / (denominator.item() or 1.0)
        assert value == pytest.approx(expected[term], rel=1e-9, abs=1e-10), term
    assert losses.total.item() == pytest.approx(expected["total"], rel=1e-9, abs=1e-10)


def test_acceptance_of_a_case_has_its_sums_and_expected_length(losses_case):
    _, _, losses, _ = _case(losses_case)
    expected = losses_case["expected"]
    assert losses.accept_K.tolist() == pytest.approx(expected["accept_rate_sums"], abs=1e-10)
    assert losses.count_K.tolist() == expected["accept_rate_counts"]
    if expected["expected_accepted_length"] is None:
        assert (float(losses.num_blocks), float(losses.accepted_length)) == (0.0, 0.0)
    else:
        assert 1.0 + float(losses.accepted_length / losses.num_blocks) == pytest.approx(expected["expected_accepted_length"], abs=1e-10)


def test_gradients_of_a_case_are_those_of_the_total(losses_case):
    draft, confidence, losses, _ = _case(losses_case)
    losses.total.backward()
    expected = losses_case["expected"]
    assert torch.allclose(confidence.grad, torch.tensor(expected["grad_confidence_logits"], dtype=torch.float64), atol=1e-10)
    if not losses_case.get("gradient_at_kink"):
        assert torch.allclose(draft.grad, torch.tensor(expected["grad_draft_logits"], dtype=torch.float64), atol=1e-10)


DRAFT_IDS = torch.tensor([1, 2, 4, 7])


def _reduced(seed=0, num_blocks=5, block_size=3, vocab_size=9):
    generator = np.random.default_rng(seed)
    draft = torch.from_numpy(generator.normal(0.0, 1.5, (num_blocks, block_size, len(DRAFT_IDS)))).requires_grad_()
    target = torch.from_numpy(generator.normal(0.0, 1.5, (num_blocks, block_size, vocab_size)))
    confidence = torch.from_numpy(generator.normal(0.0, 1.0, (num_blocks, block_size))).requires_grad_()
    label = torch.from_numpy(generator.integers(0, vocab_size, (num_blocks, block_size)))
    valid = torch.arange(block_size) < torch.from_numpy(generator.integers(0, block_size + 1, num_blocks))[:, None]
    label = torch.where(valid, label, -1)
    is_inside = torch.isin(label, DRAFT_IDS)
    assert (valid & is_inside).any()
    assert (valid & ~is_inside).any()
    return draft, target, confidence, label, valid


CONFIG = LossConfig(alpha_ce=0.1, alpha_soft_ce=0.0, alpha_tv=0.9, alpha_confidence=1.0, position_decay=2.5)


@pytest.mark.parametrize("seed", range(4))
def test_reduced_vocabulary_loss_equals_the_loop_over_the_whole_one(seed):
    draft, target, confidence, label, valid = _reduced(seed)
    losses, weights = _run(draft, confidence, target, label, valid, DRAFT_IDS, CONFIG)
    oracle = oracles.loss(draft.tolist(), target.tolist(), label.tolist(), confidence.tolist(), DRAFT_IDS.tolist(), CONFIG.position_decay)
    found = [x.item() for x in (losses.ce, losses.tv, losses.confidence, weights.sum, weights.sum_ce, losses.total)]
    total = oracle.total((CONFIG.alpha_ce, CONFIG.alpha_tv, CONFIG.alpha_confidence))
    wanted = [oracle.ce, oracle.tv, oracle.confidence, oracle.sum_weights, oracle.sum_weights_ce, total]
    assert found == pytest.approx(wanted, rel=1e-12)
    rates = [[row[k] or 0.0 for row in oracle.accept] for k in range(label.shape[1])]
    assert losses.accept_K.tolist() == pytest.approx([sum(row) for row in rates], rel=1e-12)
    assert 1.0 + float(losses.accepted_length / losses.num_blocks) == pytest.approx(oracle.accepted_length(), rel=1e-12)


def test_reduced_vocabulary_gradient_equals_central_differences():
    draft, target, confidence, label, valid = _reduced(1)
    _run(draft, confidence, target, label, valid, DRAFT_IDS, CONFIG)[0].total.backward()
    # The soft label is a constant: only CE and TV move with the draft logits.
    constant = LossConfig(CONFIG.alpha_ce, 0.0, CONFIG.alpha_tv, 0.0, CONFIG.position_decay)
    free = draft.detach().clone()

    def total():
        return _run(free, confidence, target, label, valid, DRAFT_IDS, constant)[0].total.item()

    for index in np.ndindex(*free.shape):
        assert float(draft.grad[index]) == pytest.approx(oracles.central_difference(total, free, index), abs=1e-7)


def test_reduced_vocabulary_with_every_label_outside_keeps_tv_and_drops_ce():
    draft, target, confidence, label, valid = _reduced(2)
    label = torch.where(valid, 0, -1)
    losses, weights = _run(draft, confidence, target, label, valid, DRAFT_IDS, CONFIG)
    losses.total.backward()
    assert (losses.ce.item(), weights.sum_ce.item()) == (0.0, 0.0)
    assert losses.total.item() == pytest.approx((0.9 * losses.tv + losses.confidence).item() / weights.sum.item())
    assert torch.isfinite(draft.grad).all()


def test_loss_without_confidence_head_leaves_its_term_out():
    draft, target, _, label, valid = _reduced(3)
    losses, weights = _run(draft, None, target, label, valid, DRAFT_IDS, CONFIG)
    assert losses.confidence.item() == 0.0
    assert losses.total.item() == pytest.approx(0.1 * (losses.ce / weights.sum_ce).item() + 0.9 * (losses.tv / weights.sum).item())


def test_position_weights_start_at_one_and_decay_by_position():
    label = torch.zeros(1, 4, dtype=torch.long)
    weights = loss_weights(_batch(label[None], label[None] == 0), _plain_head(3), CONFIG, torch.float64)
    assert weights.weight_BAK[0, 0].tolist() == pytest.approx([1.0, math.exp(-0.4), math.exp(-0.8), math.exp(-1.2)])


def test_split_batches_with_global_denominators_give_the_loss_of_the_whole():
    draft, target, confidence, label, valid = _reduced(0)
    whole, weights = _run(draft, confidence, target, label, valid, DRAFT_IDS, CONFIG)
    everything = Denominators(weights.sum, weights.sum_ce)
    totals = []
    for part in (slice(0, 1), slice(1, 5)):  # few rows against many: a mean of means would differ
        losses, _ = _run(draft[part], confidence[part], target[part], label[part], valid[part], DRAFT_IDS, CONFIG, denominators=everything)
        totals.append(losses.total.item())
    assert sum(totals) == pytest.approx(whole.total.item(), rel=1e-12)


# --- in chunks, with the head inside ------------------------------------------------------------------------------------


SOFT = LossConfig(alpha_ce=0.1, alpha_soft_ce=0.3, alpha_tv=0.9, alpha_confidence=1.0, position_decay=2.5)


def _problem(seed, dtype=torch.float64, cap=None, is_reduced=False, rank=3, B=2, A=3, K=4, V=29, D=8):
    """Blocks with a head and a sequential head's bias; some rows do not count."""
    generator = np.random.default_rng(seed)

    def normal(*size, scale=1.0):
        return torch.from_numpy(generator.normal(0.0, scale, size)).to(dtype)

    table, ids = normal(V, D), torch.from_numpy(np.sort(generator.choice(V, V - 9, replace=False))) if is_reduced else torch.arange(V)
    weight = normal(len(ids), rank) if rank else None
    head = DraftHead(table[ids], weight, ids, cap)
    final, label = normal(B, A, K, D), torch.from_numpy(generator.integers(0, V, (B, A, K)))
    valid = torch.arange(K) < torch.from_numpy(generator.integers(0, K + 1, (B, A)))[..., None]
    logits = oracles.soft_cap(final.double() @ table.double().T, cap).to(torch.float64 if dtype == torch.float64 else torch.float32)
    batch = _batch(label.where(valid, -1), valid, logits.logsumexp(-1), final)
    leaves = [normal(B, A, K, D), normal(B, A, K, rank) if rank else None, weight, normal(B, A, K).to(logits.dtype)]
    return batch, head, [None if leaf is None else leaf.requires_grad_() for leaf in leaves]


def _fused(batch, head, leaves, config, chunk_rows):
    hidden, bias, _, confidence = leaves
    weights = loss_weights(batch, head, config, confidence.dtype)
    whole = Denominators(weights.sum, weights.sum_ce)
    return block_losses(BlockOutput(hidden, bias, confidence), batch, head, weights, whole, config, chunk_rows)


def _gradients(total, leaves):
    found = iter(torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None]))
    return [None if leaf is None else next(found) for leaf in leaves]


@pytest.mark.parametrize(("chunk_rows", "tile_ids"), [(1, 5), (5, 3), (5, 1000), (1000, 4)])
@pytest.mark.parametrize("rank", [0, 3], ids=["no bias", "bias"])
@pytest.mark.parametrize("is_reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "soft_capped"])
def test_loss_in_chunks_and_tiles_and_its_gradients_equal_the_dense_autograd_loss(cap, is_reduced, rank, chunk_rows, tile_ids, monkeypatch):
    monkeypatch.setitem(TILE_IDS, "cpu", tile_ids)
    batch, head, leaves = _problem(3, cap=cap, is_reduced=is_reduced, rank=rank)
    losses = _fused(batch, head, leaves, SOFT, chunk_rows)
    dense = oracles.dense_loss(batch, head, *leaves, SOFT)
    assert losses.total.item() == pytest.approx(dense.item(), rel=1e-12)
    for found, wanted in zip(_gradients(losses.total, leaves), _gradients(dense, leaves), strict=True):
        assert (found is None and wanted is None) or torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_loss_in_chunks_in_low_precision_is_near_the_dense_one_in_fp64(dtype, close, monkeypatch):
    monkeypatch.setitem(TILE_IDS, "cpu", 50)
    batch, head, leaves = _problem(4, dtype=dtype, B=4, V=211, D=16)
    losses = _fused(batch, head, leaves, CONFIG, 7)
    wide = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_head = DraftHead(head.weight_WD.double(), wide[2], head.ids_W, None)
    dense = oracles.dense_loss(batch.to(torch.device("cpu"), torch.float64), wide_head, *wide, CONFIG)
    assert losses.total.item() == pytest.approx(dense.item(), rel=close)
    for found, wanted in zip(_gradients(losses.total, leaves), _gradients(dense, wide), strict=True):
        assert found.dtype in (dtype, torch.float32)
        assert float((found.double() - wanted).norm() / wanted.norm()) < close


def test_gradients_of_the_loss_in_chunks_equal_central_differences():
    batch, head, leaves = _problem(5)
    plain = LossConfig(0.1, 0.3, 0.9, 0.0, 2.5)  # the confidence label is a constant of the loss, not of its derivative
    gradients = torch.autograd.grad(_fused(batch, head, leaves, plain, 4).total, leaves[:3])

    def total():
        with torch.no_grad():
            return _fused(batch, head, leaves, plain, 4).total.item()

    for leaf, gradient in zip(leaves[:3], gradients, strict=True):
        for index in list(np.ndindex(*leaf.shape))[::5]:
            with torch.no_grad():
                assert float(gradient[index]) == pytest.approx(oracles.central_difference(total, leaf, index), abs=1e-7)


def test_loss_of_no_row_is_zero_and_has_a_zero_gradient_for_every_input():
    batch, head, leaves = _problem(6)
    batch.valid_BAK[:], batch.label_BAK[:] = False, -1
    losses = _fused(batch, head, leaves, SOFT, 4)
    assert losses.total.item() == 0.0
    assert not any(g.any() for g in _gradients(losses.total, leaves))


def test_loss_without_gradients_makes_none_and_has_the_same_value():
    batch, head, leaves = _problem(7)
    with torch.no_grad():
        losses = _fused(batch, head, leaves, SOFT, 4)
    assert losses.total.item() == pytest.approx(_fused(batch, head, leaves, SOFT, 4).total.item(), rel=1e-14)
    assert not losses.total.requires_grad
