"""The loss against the cases, and a reduced draft vocabulary against a loop over the whole one."""

import math

import numpy as np
import pytest
import torch

from dspark.config import LossConfig
from dspark.drafters.base import BlockOutput, TrainingBatch
from dspark.losses import block_losses, loss_weights, total_loss
from tests import oracles


def _batch(label_BAK, valid_BAK):
    """Only what the loss reads of a batch is real."""
    nothing = torch.zeros(0)
    return TrainingBatch(nothing, torch.zeros(label_BAK.shape[:2], dtype=torch.long), nothing, label_BAK, valid_BAK, nothing, nothing)


def _run(draft_logits, confidence_logits, target_log_probs, label, valid, draft_ids, config):
    """Sums, weights and total of blocks [A, K, ...], as a batch of one sequence."""
    batch = _batch(label[None], valid[None])
    weights = loss_weights(batch, draft_ids, config, torch.float64)
    output = BlockOutput(draft_logits[None], None if confidence_logits is None else confidence_logits[None])
    sums = block_losses(output, target_log_probs[None], weights, batch.valid_BAK)
    return sums, weights, total_loss(sums, weights.sum, weights.sum_ce, config)


def _case(case):
    names = ("draft_logits", "target_logits", "confidence_logits")
    draft, target, confidence = (torch.tensor(case[name], dtype=torch.float64) for name in names)
    config = LossConfig(case["alphas"]["ce"], case["alphas"]["tv"], case["alphas"]["confidence"], case["gamma"])
    draft.requires_grad_()
    confidence.requires_grad_()
    label, valid = torch.tensor(case["labels"]), torch.tensor(case["valid"], dtype=torch.bool)
    sums, weights, total = _run(draft, confidence, target.log_softmax(-1), label, valid, torch.arange(draft.shape[-1]), config)
    return draft, confidence, sums, weights, total


def test_loss_terms_of_a_case_have_its_values(losses_case):
    _, _, sums, weights, total = _case(losses_case)
    expected = losses_case["expected"]
    assert float(weights.sum) == pytest.approx(expected["weight_sum"], abs=1e-10)
    assert torch.allclose(weights.weight_BAK[0], torch.tensor(expected["weights"], dtype=torch.float64), atol=1e-10)
    for term, denominator in (("ce", weights.sum_ce), ("tv", weights.sum), ("confidence", weights.sum)):
        value = getattr(sums, term).item() / (denominator.item() or 1.0)
        assert value == pytest.approx(expected[term], rel=1e-9, abs=1e-10), term
    assert total.item() == pytest.approx(expected["total"], rel=1e-9, abs=1e-10)


def test_acceptance_of_a_case_has_its_sums_and_expected_length(losses_case):
    _, _, sums, _, _ = _case(losses_case)
    expected = losses_case["expected"]
    assert sums.accept_sum_K.tolist() == pytest.approx(expected["accept_rate_sums"], abs=1e-10)
    assert sums.accept_count_K.tolist() == expected["accept_rate_counts"]
    if expected["expected_accepted_length"] is None:
        assert (float(sums.block_count), float(sums.accepted_length_sum)) == (0.0, 0.0)
    else:
        assert 1.0 + float(sums.accepted_length_sum / sums.block_count) == pytest.approx(expected["expected_accepted_length"], abs=1e-10)


def test_gradients_of_a_case_are_those_of_the_total(losses_case):
    draft, confidence, _, _, total = _case(losses_case)
    total.backward()
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


CONFIG = LossConfig(alpha_ce=0.1, alpha_tv=0.9, alpha_confidence=1.0, position_decay=2.5)


@pytest.mark.parametrize("seed", range(4))
def test_reduced_vocabulary_loss_equals_the_loop_over_the_whole_one(seed):
    draft, target, confidence, label, valid = _reduced(seed)
    sums, weights, total = _run(draft, confidence, target.log_softmax(-1)[..., DRAFT_IDS], label, valid, DRAFT_IDS, CONFIG)
    oracle = oracles.loss(draft.tolist(), target.tolist(), label.tolist(), confidence.tolist(), DRAFT_IDS.tolist(), CONFIG.position_decay)
    found = [x.item() for x in (sums.ce, sums.tv, sums.confidence, weights.sum, weights.sum_ce, total)]
    total = oracle.total((CONFIG.alpha_ce, CONFIG.alpha_tv, CONFIG.alpha_confidence))
    wanted = [oracle.ce, oracle.tv, oracle.confidence, oracle.sum_weights, oracle.sum_weights_ce, total]
    assert found == pytest.approx(wanted, rel=1e-12)
    rates = [[row[k] or 0.0 for row in oracle.accept] for k in range(label.shape[1])]
    assert sums.accept_sum_K.tolist() == pytest.approx([sum(row) for row in rates], rel=1e-12)
    assert 1.0 + float(sums.accepted_length_sum / sums.block_count) == pytest.approx(oracle.accepted_length(), rel=1e-12)


def test_reduced_vocabulary_gradient_equals_central_differences():
    draft, target, confidence, label, valid = _reduced(1)
    target_log_probs = target.log_softmax(-1)[..., DRAFT_IDS]
    _run(draft, confidence, target_log_probs, label, valid, DRAFT_IDS, CONFIG)[2].backward()
    # The soft label is a constant: only CE and TV move with the draft logits.
    constant = LossConfig(CONFIG.alpha_ce, CONFIG.alpha_tv, 0.0, CONFIG.position_decay)
    free = draft.detach().clone()

    def total():
        return _run(free, confidence, target_log_probs, label, valid, DRAFT_IDS, constant)[2].item()

    for index in np.ndindex(*free.shape):
        assert float(draft.grad[index]) == pytest.approx(oracles.central_difference(total, free, index), abs=1e-7)


def test_reduced_vocabulary_with_every_label_outside_keeps_tv_and_drops_ce():
    draft, target, confidence, label, valid = _reduced(2)
    label = torch.where(valid, 0, -1)
    sums, weights, total = _run(draft, confidence, target.log_softmax(-1)[..., DRAFT_IDS], label, valid, DRAFT_IDS, CONFIG)
    total.backward()
    assert (sums.ce.item(), weights.sum_ce.item()) == (0.0, 0.0)
    assert total.item() == pytest.approx((0.9 * sums.tv + sums.confidence).item() / weights.sum.item())
    assert torch.isfinite(draft.grad).all()


def test_loss_without_confidence_head_leaves_its_term_out():
    draft, target, _, label, valid = _reduced(3)
    sums, weights, total = _run(draft, None, target.log_softmax(-1)[..., DRAFT_IDS], label, valid, DRAFT_IDS, CONFIG)
    assert sums.confidence.item() == 0.0
    assert total.item() == pytest.approx(0.1 * (sums.ce / weights.sum_ce).item() + 0.9 * (sums.tv / weights.sum).item())


def test_position_weights_start_at_one_and_decay_by_position():
    label = torch.zeros(1, 4, dtype=torch.long)
    weights = loss_weights(_batch(label[None], label[None] == 0), torch.arange(3), CONFIG, torch.float64)
    assert weights.weight_BAK[0, 0].tolist() == pytest.approx([1.0, math.exp(-0.4), math.exp(-0.8), math.exp(-1.2)])


def test_split_batches_with_global_denominators_give_the_loss_of_the_whole():
    draft, target, confidence, label, valid = _reduced(0)
    target_log_probs = target.log_softmax(-1)[..., DRAFT_IDS]
    _, weights, whole = _run(draft, confidence, target_log_probs, label, valid, DRAFT_IDS, CONFIG)
    parts = [slice(0, 1), slice(1, 5)]  # few rows against many: a mean of means would differ
    totals = []
    for part in parts:
        sums, _, _ = _run(draft[part], confidence[part], target_log_probs[part], label[part], valid[part], DRAFT_IDS, CONFIG)
        totals.append(total_loss(sums, weights.sum, weights.sum_ce, CONFIG).item())
    assert sum(totals) == pytest.approx(whole.item(), rel=1e-12)
