"""Draws and the rejection test: `verify` integrated exactly over its uniforms, and counted over many random ones."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from dspark.sampling import DRAFT, VERIFY, Noise, distribution, draw, race, residual, verify
from tests import oracles


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _cells(edges):
    """(midpoint, width) of the cells between sorted edges in [0, 1]."""
    edges = sorted({0.0, 1.0, *(e for e in edges if 0.0 < e < 1.0)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges) if high - low > 1e-12]


def _integrate(p_draft, p_target, length_of):
    """Exact distribution of (emitted sequence, accepted count) of one round in which `length_of(x)` tokens are verified.

    What `verify` accepts is piecewise constant in each uniform, with breakpoints at acceptance probabilities; a grid is added so
    that a wrong `verify` cannot hide between them. What it draws from is integrated by its probabilities.
    """
    grid = [i / 20 for i in range(1, 20)]
    K, vocabulary = len(p_draft), range(len(p_target[0]))
    emitted, accepted = defaultdict(float), [0.0] * (K + 1)
    for length, sequences in itertools.groupby(sorted(itertools.product(vocabulary, repeat=K), key=length_of), key=length_of):
        rows = []
        for x in sequences:
            drawn = math.prod(p_draft[k][v] for k, v in enumerate(x))
            if drawn > 0:
                tests = [_cells([p_target[k][x[k]] / p_draft[k][x[k]], *grid[::9]]) for k in range(length)]
                rows += [(x, [u for u, _ in cells], drawn * math.prod(w for _, w in cells)) for cells in itertools.product(*tests)]
        result = _verify([x for x, _, _ in rows], p_draft, p_target, length, _tensor([u for _, u, _ in rows]).view(len(rows), length))
        next_probs = result.next_probs_BV / result.next_probs_BV.sum(-1, keepdim=True)
        for (x, _, weight), count, probs in zip(rows, result.num_accepted_B.tolist(), next_probs.tolist(), strict=True):
            for following, prob in enumerate(probs):
                emitted[*x[:count], following] += weight * prob
            accepted[count] += weight
    return dict(emitted), accepted


def _verify(blocks, p_draft, p_target, length, uniform):
    """`verify` of whole blocks of which so many tokens are verified."""
    tokens, num_rows = torch.tensor([list(x) for x in blocks], dtype=torch.long), len(blocks)
    draft = _tensor(p_draft).expand(num_rows, -1, -1)
    target = _tensor(p_target)[: length + 1].repeat(num_rows, 1)
    uniform = torch.cat([uniform, torch.zeros(num_rows, tokens.shape[1] - length, dtype=uniform.dtype)], dim=1)
    return verify(tokens, draft, torch.arange(len(p_target[0])), torch.full((num_rows,), length), target, uniform)


def _check(emitted, accepted, p_target, expected):
    wanted = {tuple(sequence["tokens"]): sequence["prob"] for sequence in expected["sequences"]}
    assert {tokens: p for tokens, p in emitted.items() if p > 1e-13} == pytest.approx(wanted, abs=1e-10)
    assert accepted == pytest.approx(expected["accepted_count"], abs=1e-10)
    assert sum(len(tokens) * p for tokens, p in emitted.items()) == pytest.approx(expected["expected_emitted"], abs=1e-9)
    first = [sum(p for tokens, p in emitted.items() if tokens[0] == v) for v in range(len(p_target[0]))]
    assert first == pytest.approx(expected["first_token"], abs=1e-10)
    assert (oracles.distance_from_target(emitted, p_target) < 1e-10) == expected["lossless"]


def test_verification_of_a_case_integrates_to_its_distribution(rejection_case):
    p_draft, p_target, expected = rejection_case["p_draft"], rejection_case["p_target"], rejection_case["expected"]
    if rejection_case["kind"] == "fixed":
        for by_length in expected["by_length"]:
            emitted, accepted = _integrate(p_draft, p_target, lambda _, length=by_length["length"]: length)
            _check(emitted, accepted, p_target, by_length)
    else:
        lengths = rejection_case["lengths_by_first_token"]
        emitted, accepted = _integrate(p_draft, p_target, lambda x: lengths[x[0]])
        _check(emitted, accepted, p_target, expected["by_rule"])
        # A length that looked at its own token is biased, and the check must see it.
        assert (oracles.distance_from_target(emitted, p_target) > 0.1) == (rejection_case["kind"] == "retrospective")


def test_residual_of_a_case_equals_its_normalised_rows(rejection_case):
    for p_target, p_draft, expected in zip(
        rejection_case["p_target"], rejection_case["p_draft"], rejection_case["expected"]["residual"], strict=False
    ):
        left = residual(_tensor(p_target), _tensor(p_draft))
        assert (left / left.sum()).tolist() == pytest.approx(p_target if expected is None else expected, abs=1e-10)


def _noises(num, seed):
    generator = np.random.default_rng(seed)
    return lambda size: torch.from_numpy(generator.exponential(size=(num, size)))


def _sample(p_draft, p_target, length_of, num_rounds, seed):
    """First tokens of many rounds, drawn and verified by the code, each completed to two tokens by the target."""
    noise, uniform = _noises(num_rounds, seed), torch.rand(num_rounds, len(p_draft), generator=torch.Generator().manual_seed(seed))
    V, K = len(p_target[0]), len(p_draft)
    tokens = torch.stack([race(_tensor(p_draft)[k].expand(num_rounds, -1), noise(V)) for k in range(K)], dim=1)
    correction, second_noise = noise(V), noise(V)
    joint = np.zeros((V, V))
    for length in range(K + 1):
        chosen = torch.tensor([length_of(x) == length for x in tokens.tolist()])
        if chosen.any():
            result = _verify(tokens[chosen].tolist(), p_draft, p_target, length, uniform[chosen, :length])
            following = race(result.next_probs_BV, correction[chosen])
            emitted = torch.cat([tokens[chosen, :length], torch.zeros(int(chosen.sum()), 2, dtype=torch.long)], dim=1)
            emitted.scatter_(1, result.num_accepted_B[:, None], following[:, None])
            plain = race(_tensor(p_target)[1].expand(len(emitted), -1), second_noise[chosen])
            second = torch.where(result.num_accepted_B > 0, emitted[:, 1], plain)
            np.add.at(joint, (emitted[:, 0].numpy(), second.numpy()), 1)
    return joint


def test_verification_of_random_rounds_follows_the_target(rejection_case):
    p_draft, p_target = rejection_case["p_draft"], rejection_case["p_target"]
    lengths = rejection_case.get("lengths_by_first_token")
    counts = _sample(p_draft, p_target, (lambda x: lengths[x[0]]) if lengths else len, 20_000, seed=11)
    wanted = np.outer(p_target[0], p_target[1])
    if rejection_case["kind"] == "retrospective":
        assert oracles.fit(counts.ravel(), wanted.ravel()) < 1e-9
    else:
        assert oracles.fit(counts.ravel(), wanted.ravel()) > 1e-3


def test_verification_without_the_residual_is_flagged_as_biased(monkeypatch):
    """The negative control of the statistical test itself."""
    p_draft, p_target = [[0.5, 0.3, 0.2]], [[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]]
    wanted = np.outer(*p_target).ravel()
    assert oracles.fit(_sample(p_draft, p_target, len, 20_000, seed=3).ravel(), wanted) > 1e-3
    monkeypatch.setattr("dspark.sampling.residual", lambda target, draft: target)
    assert oracles.fit(_sample(p_draft, p_target, len, 20_000, seed=3).ravel(), wanted) < 1e-9


def test_verification_with_a_reduced_draft_vocabulary_follows_the_target():
    draft_ids, p_target, num_rounds = torch.tensor([1, 3]), [0.4, 0.1, 0.2, 0.3], 20_000
    draft = _tensor([[0.7, 0.3]]).expand(num_rounds, 1, 2)
    tokens = draft_ids[race(draft[:, 0], _noises(num_rounds, 5)(2))][:, None]
    uniform = torch.rand(num_rounds, 1, generator=torch.Generator().manual_seed(5))
    result = verify(
        tokens, draft, draft_ids, torch.ones(num_rounds, dtype=torch.long), _tensor([p_target, p_target]).repeat(num_rounds, 1), uniform
    )
    first = torch.where(result.num_accepted_B == 1, tokens[:, 0], race(result.next_probs_BV, _noises(num_rounds, 6)(4)))
    assert oracles.fit(np.bincount(first, minlength=4), np.array(p_target)) > 1e-3
    assert result.num_accepted_B.double().mean() == pytest.approx(0.1 + 0.3, abs=0.02)
    assert result.target_prob_BK[:, 0].tolist() == [p_target[token] for token in tokens[:, 0].tolist()]


def test_verification_stops_at_the_first_rejection_and_at_the_verified_length():
    """Three requests of which 3, 1 and 0 tokens are verified: their rows of the target lie one after the other."""
    draft = _tensor([[[0.5, 0.5]] * 3]).expand(3, -1, -1)
    target = _tensor([[0.5, 0.5], [0.0, 1.0], [0.5, 0.5], [0.25, 0.75], [1.0, 0.0], [0.2, 0.8], [0.3, 0.7]])
    result = verify(torch.zeros(3, 3, dtype=torch.long), draft, torch.arange(2), torch.tensor([3, 1, 0]), target, torch.zeros(3, 3))
    assert result.num_accepted_B.tolist() == [1, 1, 0]
    assert result.next_probs_BV.tolist() == [[0.0, 0.5], [0.2, 0.8], [0.3, 0.7]]
    assert result.target_prob_BK.tolist() == [[0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_point_mass_that_is_rejected_leaves_the_target_without_its_token():
    target = _tensor([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]]).repeat(2, 1)
    result = verify(torch.tensor([[1], [1]]), None, torch.arange(3), torch.tensor([1, 1]), target, _tensor([[0.49], [0.51]]))
    assert result.num_accepted_B.tolist() == [1, 0]
    assert result.next_probs_BV.tolist() == [[1.0, 0.0, 0.0], [0.25, 0.0, 0.25]]
    assert result.draft_prob_BK.tolist() == [[1.0], [1.0]]


def test_verification_of_equal_distributions_accepts_for_every_uniform():
    probs = torch.rand(4000, 1, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = race(probs[:, 0], _noises(4000, 0)(7).float())[:, None]
    lengths, highest = torch.ones(4000, dtype=torch.long), torch.full((4000, 1), 1.0 - 2.0**-24)
    target = probs.expand(-1, 2, -1).reshape(8000, 7)
    assert verify(tokens, probs, torch.arange(7), lengths, target, highest).num_accepted_B.min() == 1


def test_verification_with_a_wider_target_than_drafter_precision_runs():
    target = _tensor([[0.0, 1.0], [1.0, 0.0]])
    result = verify(torch.tensor([[0]]), torch.tensor([[[0.5, 0.5]]]), torch.arange(2), torch.tensor([1]), target, torch.tensor([[0.5]]))
    assert (result.num_accepted_B.item(), result.next_probs_BV.tolist()) == (0, [[0.0, 0.5]])


def test_races_follow_unnormalised_weights_and_never_take_a_zero():
    weights = _tensor([3.0, 0.0, 1.0, 6.0])
    noise = torch.from_numpy(np.stack([Noise(1, "a").exponentials(VERIFY, i, 0, 4) for i in range(30_000)]))
    assert oracles.fit(np.bincount(race(weights.expand(30_000, -1), noise), minlength=4), weights.numpy() / 10) > 1e-3


def test_noise_depends_on_seed_request_purpose_and_position_alone():
    first = Noise(1, "a")
    first.uniforms(0, 3), first.exponentials(DRAFT, 5, 0, 8)  # what was asked before does not matter
    again = Noise(1, "a")
    assert np.array_equal(first.exponentials(VERIFY, 9, 0, 8), again.exponentials(VERIFY, 9, 0, 8))
    assert first.uniforms(60, 10) == [*again.uniforms(60, 2), *again.uniforms(62, 8)]
    others = [Noise(2, "a"), Noise(1, "b")]
    drawn = [tuple(n.exponentials(p, q, k, 8)) for n in (first, *others) for p in (DRAFT, VERIFY) for q in (8, 9) for k in (0, 1)]
    assert len(set(drawn)) == len(drawn)
    assert len({n.uniforms(9, 1)[0] for n in (first, *others)}) == 3


def test_races_over_a_large_vocabulary_never_take_what_all_but_cannot_be():
    """Random numbers of fp32's 23 bits are 0 so often that one in 200 of these would come from the tail."""
    probs, noise = torch.full((1, 49_152), 1e-9 / 49_140), Noise(3, "tail")
    probs[0, :12] = 1.0 / 12
    assert max(int(draw(probs, [noise], VERIFY, [position])) for position in range(3000)) < 12


def test_top_k_and_top_p_keep_the_highest_and_renormalise():
    logits = _tensor([0.5, 0.1, 0.25, 0.15]).log()
    assert distribution(logits, 1.0, top_k=2).tolist() == pytest.approx([2 / 3, 0.0, 1 / 3, 0.0])
    assert distribution(logits, 1.0, top_p=0.75).tolist() == pytest.approx([2 / 3, 0.0, 1 / 3, 0.0])
    assert distribution(logits, 1.0, top_p=0.76).tolist() == pytest.approx([5 / 9, 0.0, 2.5 / 9, 1.5 / 9])
    assert distribution(logits, 1.0, top_p=0.01).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert distribution(logits, 1.0, top_k=9).tolist() == pytest.approx([0.5, 0.1, 0.25, 0.15])


def test_distribution_equals_a_softmax_of_scaled_logits():
    logits = [0.3, -1.0, 2.5, 2.4]
    assert distribution(_tensor(logits), 0.7).tolist() == pytest.approx(oracles.softmax([x / 0.7 for x in logits]))


def test_distribution_at_temperature_zero_is_a_point_mass_on_the_first_maximum():
    assert distribution(torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]), 0.0).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_distribution_of_half_precision_logits_is_fp32(temperature):
    assert distribution(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), temperature).dtype == torch.float32
