"""Ray's map: a worker that dies with an item, one that cannot be built, and an item that is at fault."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.dag import Resources
from pipelines.runner import Failed, Progress

pytestmark = pytest.mark.ray
HERE = "tests.pipelines.test_ray"


class Fragile:
    """Its process dies with the item "kill"; "bad" is an item's own fault."""

    def __init__(self, settings: str) -> None:
        if settings == "unbuildable":
            raise RuntimeError("no room for the engine")

    def __call__(self, item: Any) -> Any:
        if item == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "bad":
            raise ValueError("target.mask_token_id: 7 occurs in row 3")
        return item * 2


@pytest.fixture(scope="module")
def work() -> Iterator[Any]:
    from pipelines.backends.ray import RayExecutor, RayWork

    reports: list[Progress] = []
    yield RayWork(Resources("/target", num_workers=1, num_cpus=1, max_attempts=2), reports.append, None)
    RayExecutor(None).close()


def test_map_with_failed_items_kept_gives_every_other_result(work: Any) -> None:
    results = list(work.map(f"{HERE}:Fragile", "", ["a", None, "kill", "b", "c"], keep_failed=True))
    (failed,) = [result for result in results if isinstance(result, Failed)]
    assert failed.item == "kill"
    assert "died" in failed.cause
    assert sorted(result for result in results if not isinstance(result, Failed)) == ["aa", "bb", "cc"]


def test_map_gives_up_on_an_item_that_ends_its_workers(work: Any) -> None:
    with pytest.raises(RuntimeError, match="Fragile failed 2 times"):
        list(work.map(f"{HERE}:Fragile", "", ["a", "kill"]))


def test_map_of_a_worker_that_cannot_be_built_is_an_error_though_failed_items_are_kept(work: Any) -> None:
    with pytest.raises(RuntimeError, match="no room for the engine"):
        list(work.map(f"{HERE}:Fragile", "unbuildable", ["a", "b"], keep_failed=True))


def test_map_hands_an_items_own_error_on_at_once(work: Any) -> None:
    with pytest.raises(ValueError, match=r"target\.mask_token_id: 7 occurs in row 3"):
        list(work.map(f"{HERE}:Fragile", "", ["a", "bad", "b"], keep_failed=True))


def test_engines_beside_a_gang_are_as_many_as_fit_and_refused_when_none_does(work: Any) -> None:
    list(work.map(f"{HERE}:Fragile", "", [1]))  # joins the cluster
    num_cpus = len(os.sched_getaffinity(0))
    assert work.beside(Resources("/target", num_workers=1000, num_cpus=1)).resources.num_workers == num_cpus - 1
    with pytest.raises(
        ValueError, match=rf"cluster.engine_workers: an engine takes {num_cpus} CPUs and 1 training workers 1 each, .*Fix: smaller"
    ):
        work.beside(Resources("/target", num_workers=1, num_cpus=num_cpus))
