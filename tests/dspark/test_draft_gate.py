"""The gate before draft passes: what closes it, when it looks again, and that many are as many."""

import numpy as np
import pytest

from dspark.draft_gate import DraftGate, is_drafting


def test_drafting_is_skipped_where_it_loses_until_looking_again_is_worth_its_share():
    # A step that drafts loses 2 ms. At 1 % of 10 ms steps, 20 of them pay for one.
    assert [is_drafting(0.002, num_skipped, 0.01, 0.01) for num_skipped in (0, 19, 20)] == [False, False, True]
    assert is_drafting(0.0, 0, 0.01, 0.01)  # nothing known, or a tie
    assert is_drafting(-0.001, 0, 0.01, 0.0)
    assert not is_drafting(1e-9, 10**6, 0.01, 0.0)  # never looks again
    found = is_drafting(np.array([0.002, 0.002, -1.0]), np.array([19, 21, 0]), 0.01, 0.01)
    assert found.tolist() == [False, True, True]


def test_gate_closes_when_draft_passes_lose_and_a_step_counts_when_it_is_as_old_as_the_lag():
    gate = DraftGate(lambda num_requests: 0.01, lag_rounds=2, window_rounds=4, probe_share=0.05)
    opened = []
    for _ in range(40):  # 4 requests emit 5 tokens, 12.5 ms without drafting, in 15 ms; without a draft pass 4 in 10 ms
        is_open = bool(gate.opens(4))
        opened.append(is_open)
        gate.observe(4, 5 if is_open else 4, 0.015 if is_open else 0.01)
    assert opened[:3] == [True, True, False]  # the first is known after two
    looks = np.flatnonzero(opened[2:])
    assert 1 <= len(looks) < 12  # it looks again, now and then
    assert (np.diff(looks) > 1).all()
    for _ in range(60):
        is_open = bool(gate.opens(4))
        opened.append(is_open)
        gate.observe(4, 7 if is_open else 4, 0.015 if is_open else 0.01)  # 17.5 ms' worth
    assert opened[-20:] == [True] * 20


def test_gate_of_many_is_as_many_gates_and_a_promise_replaces_what_was_observed():
    lag = 3
    lost_TS = np.random.default_rng(0).normal(0.0, 0.01, (60, 3))
    many, promised, *single = (DraftGate(lambda n: 0.01 * n, lag, 16, 0.02, shape) for shape in ((3,), (), (), (), ()))
    for t, lost_S in enumerate(lost_TS):
        opened = many.opens(2).tolist()
        assert opened == [bool(gate.opens(2)) for gate in single]
        assert opened[0] == bool(promised.opens(2, lost_TS[t - lag, 0] if t >= lag else None))
        for gate, lost in ((many, lost_S), *zip(single, lost_S, strict=True)):
            assert gate.lost(2, 1.0, lost + 0.01) == pytest.approx(lost)  # a token is worth 10 ms
            gate.observe(2, 1.0, lost + 0.01)
        promised.observe(2, 0.0, 1e9)
