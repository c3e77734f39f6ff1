"""The table of a sweep, against figures counted by hand from the rounds."""

from pathlib import Path

import pytest

from dspark.rounds import Round, to_parquet
from dspark.storage import LocalStorage
from pipelines import sweep
from pipelines.artifacts import Drafter, EvalReport

# prompt -> accepted tokens of each round, of two drafters with two seeds
ROUNDS = {
    ("big", 0): {"a": [1, 2], "b": [0, 3]},
    ("big", 1): {"a": [2, 2, 1], "b": [0]},
    ("small", 0): {"a": [0, 0], "b": [1]},
    ("small", 1): {"a": [1], "b": [0, 0]},
}


def rounds(accepted: dict[str, list[int]], temperature: float) -> list[Round]:
    return [
        Round(f"test/{prompt}", "math", "test", i, temperature, "greedy", "", "verify_all", 9, 5, (7,) * 4, (0.5,) * 4, (0.5,) * 4, (), 4, n, 8, False)
        for prompt, lengths in accepted.items()
        for i, n in enumerate(lengths)
    ]  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> list:
    found = []
    for (name, seed), accepted in ROUNDS.items():
        folder = tmp_path / f"evaluate-{name}-{seed}"
        LocalStorage(str(folder)).put("rounds.parquet", to_parquet(rounds(accepted, 0.0)))
        overrides = ["experiment=compare", f"contender={name}", f"stage.train.seed={seed}"]
        trained = {"metrics": {"num_parameters": 1200.0, "select_accepted_length": 1.5 + seed}}
        evaluated = EvalReport(str(folder), {"files": {"rounds.parquet": "", "report.json": ""}, "metrics": {}})
        found.append((overrides, {"train": Drafter(str(tmp_path), trained), "evaluate": evaluated}))
    return found


def test_sweep_pools_seeds_and_compares_with_the_first_on_the_same_prompts(runs: list, tmp_path: Path) -> None:
    columns, rows, uri = sweep.report(runs, LocalStorage(str(tmp_path)))
    assert columns == ["", "seeds", "trained parameters", "teacher-forced", "accepted length, T = 0", "difference"]
    # With its bonus tokens, big emits 10 and 9 tokens in 4 + 4 rounds: 2.5 and 2.25; small 4 and 4 in 3 + 3.
    assert rows[0] == ["contender=big", "2", "1,200", "2.000 ± 0.707", "2.375 ± 0.177", ""]
    # Of prompt a: 4/3 - 13/5, of prompt b: 4/3 - 6/3; every fourth resample draws one of them twice.
    assert rows[1] == ["contender=small", "2", "1,200", "2.000 ± 0.707", "1.333 ± 0.000", "[-1.267, -0.667]"]
    lines = Path(uri, "table.md").read_text().splitlines()
    assert [line.strip("| ").split(" | ")[0] for line in lines[2:]] == ["contender=big", "contender=small"]
    assert Path(uri, "table.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_without_evaluation_shows_what_training_told(runs: list, tmp_path: Path) -> None:
    trained = [(overrides, {"train": artifacts["train"]}) for overrides, artifacts in runs]
    columns, rows, uri = sweep.report(trained, LocalStorage(str(tmp_path)))
    assert columns == ["", "seeds", "trained parameters", "teacher-forced"]
    assert rows[1] == ["contender=small", "2", "1,200", "2.000 ± 0.707"]
    assert not Path(uri, "table.png").exists()


def test_sweep_of_prompts_that_differ_compares_those_that_both_decoded(runs: list, tmp_path: Path) -> None:
    for overrides, artifacts in runs:
        if "contender=small" in overrides:
            LocalStorage(artifacts["evaluate"].uri).put("rounds.parquet", to_parquet(rounds({"a": [0], "c": [3]}, 0.0)))
    _, rows, _ = sweep.report(runs, LocalStorage(str(tmp_path)))
    assert rows[1][4:] == ["2.500 ± 0.000", "[-1.600, -1.600]"]
