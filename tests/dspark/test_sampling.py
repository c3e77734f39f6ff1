"""Draws and the rejection test: `verify` integrated exactly over its uniforms, and counted over many random ones."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from dspark.sampling import distribution, draw, residual, verify
from tests import oracles


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _cells(edges):
    """(midpoint, width) of the cells between sorted edges in [0, 1]."""
    edges = sorted({0.0, 1.0, *(e for e in edges if 0.0 < e < 1.0)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges) if high - low > 1e-12]


def _integrate(p_draft, p_target, length_of):
    """Exact distribution of (emitted sequence, accepted count) of one round in which `length_of(x)` tokens are verified.

    `verify` is piecewise constant in each uniform. Its only right breakpoints are acceptance probabilities and cumulative
    sums of target rows and residuals; a grid of twentieths is added so that a wrong `verify` cannot hide between them.
    """
    grid = [i / 20 for i in range(1, 20)]
    K, vocabulary = len(p_draft), range(len(p_target[0]))
    sums = [np.cumsum(row) for row in [*p_target, *(oracles.residual(t, d) for t, d in zip(p_target, p_draft, strict=False))]]
    last = _cells([*itertools.chain(*sums), *grid[::4]])
    emitted, accepted = defaultdict(float), [0.0] * (K + 1)
    for length, sequences in itertools.groupby(sorted(itertools.product(vocabulary, repeat=K), key=length_of), key=length_of):
        rows = []
        for x in sequences:
            drawn = math.prod(p_draft[k][v] for k, v in enumerate(x))
            if drawn > 0:
                tests = [_cells([p_target[k][x[k]] / p_draft[k][x[k]], *grid[::9]]) for k in range(length)]
                rows += [(x, [u for u, _ in cells], drawn * math.prod(w for _, w in cells)) for cells in itertools.product(*tests, last)]
        tokens = torch.tensor([x[:length] for x, _, _ in rows], dtype=torch.long).view(len(rows), length)
        draft = _tensor(p_draft)[:length].expand(len(rows), -1, -1)
        target = _tensor(p_target)[: length + 1].expand(len(rows), -1, -1)
        result = verify(tokens, draft, torch.arange(len(vocabulary)), target, _tensor([u for _, u, _ in rows]))
        for (x, _, weight), count, following in zip(rows, result.num_accepted_B.tolist(), result.next_token_B.tolist(), strict=True):
            emitted[*x[:count], following] += weight
            accepted[count] += weight
    return dict(emitted), accepted


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


def _sample(p_draft, p_target, length_of, num_rounds, seed):
    """First tokens of many rounds, drawn and verified by the code, each completed to two tokens by the target."""
    generator = torch.Generator().manual_seed(seed)
    K = len(p_draft)
    draft, target = (_tensor(p).expand(num_rounds, -1, -1) for p in (p_draft, p_target))
    uniform = torch.rand(num_rounds, 2 * K + 2, generator=generator)
    tokens = torch.stack([draw(draft[:, k], uniform[:, k]) for k in range(K)], dim=1)
    joint = np.zeros((len(p_target[0]),) * 2)
    for length in range(K + 1):
        chosen = torch.tensor([length_of(x) == length for x in tokens.tolist()])
        if chosen.any():
            rows = (tokens[chosen, :length], draft[chosen, :length], torch.arange(len(p_target[0])), target[chosen, : length + 1])
            result = verify(*rows, uniform[chosen, K : K + length + 1])
            emitted = torch.cat([tokens[chosen, :length], torch.zeros(int(chosen.sum()), 2, dtype=torch.long)], dim=1)
            emitted.scatter_(1, result.num_accepted_B[:, None], result.next_token_B[:, None])
            second = torch.where(result.num_accepted_B > 0, emitted[:, 1], draw(target[chosen, 1], uniform[chosen, -1]))
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
    draft_ids, p_target = torch.tensor([1, 3]), [0.4, 0.1, 0.2, 0.3]
    num_rounds, generator = 20_000, torch.Generator().manual_seed(5)
    uniform = torch.rand(num_rounds, 3, generator=generator)
    draft = _tensor([[0.7, 0.3]]).expand(num_rounds, 1, 2)
    tokens = draft_ids[draw(draft[:, 0], uniform[:, 0])][:, None]
    result = verify(tokens, draft, draft_ids, _tensor([p_target, p_target]).expand(num_rounds, 2, 4), uniform[:, 1:])
    first = torch.where(result.num_accepted_B == 1, tokens[:, 0], result.next_token_B)
    assert oracles.fit(np.bincount(first, minlength=4), np.array(p_target)) > 1e-3
    assert result.num_accepted_B.double().mean() == pytest.approx(0.1 + 0.3, abs=0.02)
    assert result.target_prob_BK[:, 0].tolist() == [p_target[token] for token in tokens[:, 0].tolist()]


def test_verification_stops_at_the_first_rejection():
    p = _tensor([[[0.5, 0.5]] * 3])
    target = _tensor([[[0.5, 0.5], [0.0, 1.0], [0.5, 0.5], [0.25, 0.75]]])
    result = verify(torch.tensor([[0, 0, 0]]), p, torch.arange(2), target, _tensor([[0.0, 0.0, 0.0, 0.0]]))
    assert (result.num_accepted_B.item(), result.next_token_B.item()) == (1, 1)
    assert result.target_prob_BK.tolist() == [[0.5, 0.0, 0.5]]


def test_verification_of_equal_distributions_accepts_for_every_uniform():
    probs = torch.rand(4000, 1, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    highest = torch.full((4000, 2), 1.0 - 2.0**-24)
    tokens = draw(probs[:, 0], highest[:, 0] * torch.linspace(0, 1, 4000))[:, None]
    assert verify(tokens, probs, torch.arange(7), probs.expand(-1, 2, -1), highest).num_accepted_B.min() == 1


def test_verification_with_a_wider_target_than_drafter_precision_runs():
    probs = torch.tensor([[[0.5, 0.5]]])
    result = verify(torch.tensor([[0]]), probs, torch.arange(2), _tensor([[[0.0, 1.0], [1.0, 0.0]]]), torch.tensor([[0.5, 0.5]]))
    assert (result.num_accepted_B.item(), result.next_token_B.item()) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 0.37, 12.0])
def test_draw_at_the_ends_of_the_interval_never_takes_a_zero(dtype, scale):
    probs = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.75, 0.0, 0.0], dtype=dtype) * scale
    ends = torch.tensor([0.0, 2.0**-30, 1.0 - 2.0**-24, 1.0 - 2.0**-53, 1.0], dtype=torch.float64)
    assert draw(probs.expand(5, -1), ends).tolist() == [2, 2, 4, 4, 4]


def test_draw_changes_token_exactly_where_the_cumulative_sum_does():
    probs = _tensor([0.125, 0.0, 0.5, 0.375]) * 3.0  # not normalised
    uniform = _tensor([0.0, 0.1249, 0.125, 0.6249, 0.625, 0.9999])
    assert draw(probs.expand(6, -1), uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_of_many_uniforms_follows_unnormalised_weights():
    weights = _tensor([3.0, 0.0, 1.0, 6.0])
    tokens = draw(weights.expand(30_000, -1), torch.rand(30_000, generator=torch.Generator().manual_seed(1)))
    assert oracles.fit(np.bincount(tokens, minlength=4), weights.numpy() / 10) > 1e-3


def test_draw_from_many_tiny_probabilities_never_takes_a_zero():
    """fp32 sums of 50,000 terms round: the last positive entry must still be reachable and the zeros after it not."""
    probs = torch.rand(50_000, generator=torch.Generator().manual_seed(2)) * 1e-6
    probs[::3] = 0.0
    probs[-100:] = 0.0
    tokens = draw(probs.expand(6, -1), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-24, 1.0]))
    assert (probs[tokens] > 0).all()


def test_distribution_equals_a_softmax_of_scaled_logits():
    logits = [0.3, -1.0, 2.5, 2.4]
    assert distribution(_tensor(logits), 0.7).tolist() == pytest.approx(oracles.softmax([x / 0.7 for x in logits]))


def test_distribution_at_temperature_zero_is_a_point_mass_on_the_first_maximum():
    assert distribution(torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]]), 0.0).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_distribution_of_half_precision_logits_is_fp32(temperature):
    assert distribution(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), temperature).dtype == torch.float32
