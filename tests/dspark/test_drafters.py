"""The drafters: training pass against a dense oracle, what a block may see, and the decoding pass against the training pass."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.blocks import attention_mask
from dspark.drafters.base import DraftSampling, TrainingBatch
from dspark.drafters.dflash import INIT_STD
from dspark.sampling import distribution, draw
from tests import oracles
from tests.dspark import tiny

K, L, D = tiny.BLOCK, len(tiny.TAPPED), tiny.SHAPE.width


def _batch(anchors_BA, num_tokens, seed=0):
    """A batch of blocks with random states and previous tokens; all rows count."""
    generator, B, A = np.random.default_rng(seed), len(anchors_BA), len(anchors_BA[0])
    normal = [torch.from_numpy(generator.normal(0.0, 1.0, size)) for size in ((B, num_tokens, L, D), (B, A, K, D), (B, A, K))]
    previous, label = (torch.from_numpy(generator.integers(0, tiny.MASK, (B, A, K))) for _ in range(2))
    valid = torch.ones(B, A, K, dtype=torch.bool)
    return TrainingBatch(normal[0], torch.tensor(anchors_BA), previous, label, valid, normal[1], normal[2] + 5.0)


@pytest.mark.parametrize("shape", [tiny.SHAPE, tiny.CAPPED], ids=["plain", "soft_capped"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_pass_equals_the_dense_oracle(kind, draft_ids, shape):
    drafter, batch = tiny.drafter(kind, draft_ids, shape), _batch([[2, 3, 7], [0, 5, 6]], num_tokens=7)
    output = drafter(batch)
    for b in range(2):
        anchors = batch.anchors_BA[b].tolist()
        mask = attention_mask(np.array(anchors), 7, K)
        wanted = oracles.drafter_rows(drafter, batch.tapped_BTLD[b], anchors, batch.previous_BAK[b].tolist(), mask)
        assert torch.allclose(output.draft_logits_BAKW[b], wanted.logits_AKW, atol=1e-10)
        if kind == "dspark":
            assert torch.allclose(output.confidence_logits_BAK[b], wanted.confidence_AK, atol=1e-10)
    assert (output.confidence_logits_BAK is None) == (kind == "dflash")


@pytest.mark.parametrize("shape", [tiny.SHAPE, tiny.CAPPED], ids=["plain", "soft_capped"])
def test_target_distribution_over_a_reduced_vocabulary_keeps_its_full_normaliser(shape):
    drafter, batch = tiny.drafter("dspark", tiny.REDUCED, shape), _batch([[2, 3]], num_tokens=3)
    logits = oracles.soft_cap(batch.final_BAKD @ tiny.tables(shape).lm_head_VD.T, shape.logit_soft_cap)
    batch.log_sum_exp_BAK = logits.logsumexp(-1)
    found = drafter.target_log_probs(batch).exp()
    assert torch.allclose(found, logits.softmax(-1)[..., tiny.REDUCED], atol=1e-13)
    assert found.sum(-1).min() < 0.5


_anchors = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(anchors=_anchors, position=st.integers(0, 8), layer=st.integers(0, L - 1), seed=st.integers(0, 99))
def test_tapped_state_changed_anywhere_moves_exactly_the_blocks_anchored_after_it(anchors, position, layer, seed):
    drafter, batch = tiny.drafter("dspark"), _batch([anchors], num_tokens=9, seed=seed)
    before = drafter(batch)
    batch.tapped_BTLD[0, position, layer] += 1.0
    after = drafter(batch)
    for i, anchor in enumerate(anchors):
        same = [torch.equal(getattr(before, f)[0, i], getattr(after, f)[0, i]) for f in ("draft_logits_BAKW", "confidence_logits_BAK")]
        assert same == [position >= anchor] * 2
        if position < anchor:  # every row of the block sees the context
            assert (before.draft_logits_BAKW[0, i] != after.draft_logits_BAKW[0, i]).any(-1).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(anchors=st.lists(st.integers(0, 9), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_block_changed_in_an_overlapping_neighbourhood_leaves_the_others_alone(anchors, seed):
    drafter, batch = tiny.drafter("dspark"), _batch([anchors], num_tokens=9, seed=seed)
    before = drafter(batch).draft_logits_BAKW
    batch.previous_BAK[0, 0] = (batch.previous_BAK[0, 0] + 1) % tiny.MASK
    after = drafter(batch).draft_logits_BAKW
    assert torch.equal(before[0, 1:], after[0, 1:])
    assert not torch.equal(before[0, 0], after[0, 0])


def test_markov_bias_of_a_row_depends_on_its_own_previous_token_alone():
    drafter, batch = tiny.drafter("dspark"), _batch([[4]], num_tokens=4)
    before = drafter(batch)
    batch.previous_BAK[0, 0, 2] = (batch.previous_BAK[0, 0, 2] + 1) % tiny.MASK
    after = drafter(batch)
    assert (before.draft_logits_BAKW[0, 0] != after.draft_logits_BAKW[0, 0]).any(-1).tolist() == [False, False, True, False]
    assert (before.confidence_logits_BAK[0, 0] != after.confidence_logits_BAK[0, 0]).tolist() == [False, False, True, False]


def _context(drafter, tapped, pieces):
    """The draft context, added in pieces of these lengths."""
    context, start = drafter.new_context(len(tapped), tapped.shape[1] + K + 1), 0
    for length in pieces:
        positions = torch.arange(start, start + length).expand(len(tapped), -1)
        drafter.extend_context(context, tapped[:, start : start + length], positions)
        start += length
    return context


def _draws(uniform_BK):
    return lambda k, probs_BW: draw(probs_BW, uniform_BK[:, k])


def _propose(drafter, context, batch, anchors, mode, temperature):
    uniform = torch.rand(len(anchors), K, generator=torch.Generator().manual_seed(4))
    return drafter.propose(context, batch.previous_BAK[:, 0, 0], torch.tensor(anchors), DraftSampling(mode, temperature), _draws(uniform))


@pytest.mark.parametrize("mode", ["probabilistic", "greedy"])
@pytest.mark.parametrize("draft_ids", [None, tiny.REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_proposal_equals_the_training_pass_teacher_forced_to_its_tokens(kind, draft_ids, mode):
    drafter, anchors = tiny.drafter(kind, draft_ids), [3, 9, 1, 6]
    batch = _batch([[a] for a in anchors], num_tokens=10)
    context = _context(drafter, batch.tapped_BTLD, [4, 1, 5])
    proposal = _propose(drafter, context, batch, anchors, mode, 0.8)
    batch.previous_BAK[:, 0, 1:] = proposal.tokens_BK[:, :-1]
    output = drafter(batch)
    temperature = 0.0 if mode == "greedy" else 0.8
    assert torch.allclose(proposal.probs_BKW, distribution(output.draft_logits_BAKW[:, 0], temperature), atol=1e-12)
    if kind == "dspark":
        assert torch.allclose(proposal.confidence_logits_BK, output.confidence_logits_BAK[:, 0], atol=1e-12)
    assert (proposal.confidence_logits_BK is None) == (kind == "dflash")
    assert torch.isin(proposal.tokens_BK, drafter.draft_ids_W).all()
    if mode == "greedy":
        assert torch.equal(proposal.tokens_BK, drafter.draft_ids_W[output.draft_logits_BAKW[:, 0].argmax(-1)])


def test_proposal_with_stale_context_at_and_after_the_anchor_ignores_it():
    drafter, anchors = tiny.drafter("dspark"), [3, 9, 1, 6]
    batch = _batch([[a] for a in anchors], num_tokens=10)
    clean = _propose(drafter, _context(drafter, batch.tapped_BTLD, [10]), batch, anchors, "probabilistic", 1.0)
    context = _context(drafter, batch.tapped_BTLD, [10])
    garbage = torch.full((4, K + 1, L, D), 7.0, dtype=torch.float64)
    drafter.extend_context(context, garbage, torch.tensor(anchors)[:, None] + torch.arange(K + 1))
    stale = _propose(drafter, context, batch, anchors, "probabilistic", 1.0)
    assert torch.equal(clean.tokens_BK, stale.tokens_BK)
    assert torch.equal(clean.probs_BKW, stale.probs_BKW)
    drafter.extend_context(context, garbage[:, :1], torch.tensor(anchors)[:, None] - 1)
    assert not torch.allclose(clean.probs_BKW, _propose(drafter, context, batch, anchors, "probabilistic", 1.0).probs_BKW)


def test_proposal_after_selecting_requests_equals_theirs_before():
    drafter, anchors = tiny.drafter("dspark"), [3, 9, 1]
    batch = _batch([[a] for a in anchors], num_tokens=10)
    context = _context(drafter, batch.tapped_BTLD, [10])
    whole = _propose(drafter, context, batch, anchors, "greedy", 1.0)
    context.select(torch.tensor([2, 0]))
    some = drafter.propose(
        context, batch.previous_BAK[[2, 0], 0, 0], torch.tensor([1, 3]), DraftSampling("greedy", 1.0), _draws(torch.zeros(2, K))
    )
    assert torch.equal(some.tokens_BK, whole.tokens_BK[[2, 0]])
    assert torch.allclose(some.confidence_logits_BK, whole.confidence_logits_BK[[2, 0]], atol=1e-12)


def test_markov_ablation_drops_the_bias_and_keeps_the_confidence():
    drafter, batch = tiny.drafter("dspark"), _batch([[4]], num_tokens=4)
    whole = drafter(batch)
    bias = drafter.markov_head.bias(drafter.markov_head.embed(batch.previous_BAK))
    drafter.is_markov_ablated = True
    ablated = drafter(batch)
    assert torch.allclose(whole.draft_logits_BAKW - bias, ablated.draft_logits_BAKW, atol=1e-12)
    assert torch.equal(whole.confidence_logits_BAK, ablated.confidence_logits_BAK)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_frozen_tables_are_no_parameters_and_not_in_the_state_dict(kind):
    drafter = tiny.drafter(kind, tiny.REDUCED)
    names = {name for name, _ in drafter.named_parameters()}
    assert set(drafter.state_dict()) == names
    assert not any("embedding_VD" in name or "lm_head" in name or "draft_ids" in name for name in names)
    heads = {name.split(".")[0] for name in names} - {"fc", "hidden_norm", "norm", "layers"}
    assert heads == ({"markov_head", "confidence_head"} if kind == "dspark" else set())
    drafter(_batch([[4]], num_tokens=4)).draft_logits_BAKW.sum().backward()
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
