"""The tables of a release are the measured steps, whole blocks verified."""

import pytest

from dspark.step_cost import Curve, StepProfile
from pipelines.stages.publish import _additive, _table

K = 4
CONTEXTS = (16, 64)


def draft_seconds(context: float, num_requests: int) -> float:
    return 0.001 + 0.0002 * num_requests + 0.00001 * context


def verify_seconds(context: float, num_requests: int, size: int) -> float:
    return 0.01 + 0.0005 * size + 0.00001 * context * num_requests


@pytest.mark.parametrize("probed", [(1, 4, 16), (4, 16)])
def test_tables_of_a_release_hold_whole_blocks_behind_the_context_of_the_replay(probed: tuple[int, ...]) -> None:
    curves = []
    for context in CONTEXTS:
        for n in probed:
            sizes = n, 3 * n, (K + 1) * n
            seconds = tuple(verify_seconds(context, n, size) for size in sizes)
            curves.append(Curve(context, n, draft_seconds(context, n), sizes, seconds))
    profile, context = StepProfile(tuple(curves)), 40.0
    table = _table(profile, context, K)
    assert table.batch_tokens == tuple(sorted({size for n in probed for size in (n, 3 * n, (K + 1) * n)}))
    blocks = {size: max(-(-size // (K + 1)), probed[0]) for size in table.batch_tokens}
    assert table.draft_seconds == pytest.approx([draft_seconds(context, n) for n in blocks.values()])
    assert table.verify_seconds == pytest.approx([verify_seconds(context, n, size) for size, n in blocks.items()])
    additive = _additive(profile, context, table)
    for n in probed:
        for size, num_blocks in blocks.items():
            assert additive.seconds(n, size) == pytest.approx(draft_seconds(context, n) + verify_seconds(context, num_blocks, size))
