"""The table of a sweep, against figures counted by hand from the rounds."""

from pathlib import Path

import pytest

from dspark.rounds import Round, to_parquet
from dspark.storage import LocalStorage
from pipelines import sweep
from pipelines.artifacts import Drafter, EvalReport

GREEDY, DRAWN, OTHER = "t1-greedy/test", "t1-probabilistic/test", "t1-probabilistic/gsm8k"
# (contender, seed) -> setting and source -> prompt -> accepted tokens of each round
ROUNDS: dict[tuple[str, int], dict[str, dict[str, list[int]]]] = {
    ("big", 0): {GREEDY: {"a": [3, 3, 3, 3], "b": [3, 3]}},
    ("big", 1): {GREEDY: {"a": [2], "b": [1]}},
    ("small", 0): {GREEDY: {"a": [0, 0], "b": [1]}, DRAWN: {"a": [0]}, OTHER: {"z": [4]}},
    ("small", 1): {GREEDY: {"a": [1, 0], "b": [0, 0, 0]}, DRAWN: {"a": [2, 1, 2]}, OTHER: {"z": [4]}},
}
COMMAND = ["-m", "experiment=compare"]


def rounds(setting: str, prompt: str, accepted: list[int]) -> list[Round]:
    mode, source = setting.removeprefix("t1-").split("/")
    names = f"{source}/{prompt}", "math", source
    return [
        Round(*names, i, 1.0, 0, 1.0, mode, "", "verify_all", 9, 5, (7,) * 4, (0.5,) * 4, (0.5,) * 4, (), 4, n, 8, ended_by_stop=False)
        for i, n in enumerate(accepted)
    ]


@pytest.fixture
def runs(tmp_path: Path) -> list:
    found = []
    for (name, seed), settings in ROUNDS.items():
        folder = tmp_path / f"evaluate-{name}-{seed}"
        written = [
            r for setting, prompts in settings.items() for prompt, accepted in prompts.items() for r in rounds(setting, prompt, accepted)
        ]
        LocalStorage(str(folder)).put("rounds-0.parquet", to_parquet(written))
        LocalStorage(str(folder)).put("serving.parquet", to_parquet(rounds(GREEDY, "a", [4] * 9)))  # of another drafter
        overrides = ["experiment=compare", f"contender={name}", f"stage.train.seed={seed}"]
        trained = {"metrics": {"num_parameters": 1200.0, "select_accepted_length": 1.5 + seed}}
        evaluated = EvalReport(str(folder), {"files": {"rounds-0.parquet": "", "serving.parquet": "", "report.json": ""}, "metrics": {}})
        found.append((overrides, {"train": Drafter(str(tmp_path), trained), "evaluate": evaluated}))
    return found


def test_sweep_pools_rounds_of_all_seeds_and_compares_with_the_first_on_the_same_prompts(runs: list, tmp_path: Path) -> None:
    columns, rows, uri = sweep.report(runs, LocalStorage(str(tmp_path)), COMMAND)
    assert columns == ["", "seeds", "trained parameters", "teacher-forced", *(f"accepted length, {s}" for s in (GREEDY, OTHER, DRAWN))]
    # Each round has a bonus token. big: 24 tokens in 6 rounds, 5 in 2; pooled 29 / 8, which is not the mean of 4 and 2.5.
    assert rows[0] == ["contender=big", "2", "1,200", "2.000 ± 0.707", "3.625 ± 1.061", "", ""]
    # small: 4 tokens in 3 rounds, 6 in 5. What the first point did not decode has no difference.
    lengths = [row.partition(" [")[0] for row in rows[1][4:]]
    assert lengths == ["1.250 ± 0.094", "5.000 ± 0.000", "2.250 ± 1.179"]
    assert ["[" in row for row in rows[1][4:]] == [True, False, False]
    low, high = (float(x) for x in rows[1][4].partition("[")[2].rstrip("]").split(","))
    # Whatever is drawn, small's length is in [1, 1.5] and big's in [2, 4].
    assert -3.0 <= low < 4 / 3 - 29 / 8 < high <= -0.5
    lines = Path(uri, "table.md").read_text().splitlines()
    assert [line.strip("| ").split(" | ")[0] for line in lines[2:]] == ["contender=big", "contender=small"]
    assert Path(uri, "table.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_of_seeds_alone_is_one_line_without_a_difference(runs: list, tmp_path: Path) -> None:
    _, rows, _ = sweep.report(runs[:2], LocalStorage(str(tmp_path)), COMMAND)
    assert rows == [["all", "2", "1,200", "2.000 ± 0.707", "3.625 ± 1.061"]]


def test_sweep_without_evaluation_shows_what_training_told(runs: list, tmp_path: Path) -> None:
    trained = [(overrides, {"train": artifacts["train"]}) for overrides, artifacts in runs]
    columns, rows, uri = sweep.report(trained, LocalStorage(str(tmp_path)), COMMAND)
    assert columns == ["", "seeds", "trained parameters", "teacher-forced"]
    assert rows[1] == ["contender=small", "2", "1,200", "2.000 ± 0.707"]
    assert not Path(uri, "table.png").exists()


def test_sweep_shows_a_point_that_failed_and_compares_with_it_nothing(runs: list, tmp_path: Path) -> None:
    failed = [(overrides, {} if "contender=big" in overrides else artifacts) for overrides, artifacts in runs]
    _, rows, _ = sweep.report(failed, LocalStorage(str(tmp_path)), COMMAND)
    assert rows[0] == ["contender=big", "0", "", "", "", "", ""]
    assert rows[1][4:] == ["1.250 ± 0.094", "5.000 ± 0.000", "2.250 ± 1.179"]


def test_sweep_compares_the_prompts_that_both_decoded(runs: list, tmp_path: Path) -> None:
    written = rounds(GREEDY, "a", [0]) + rounds(GREEDY, "c", [3])
    for overrides, artifacts in runs:
        if "contender=small" in overrides:
            LocalStorage(artifacts["evaluate"].uri).put("rounds-0.parquet", to_parquet(written))
    _, rows, _ = sweep.report([runs[0], runs[2]], LocalStorage(str(tmp_path)), COMMAND)
    assert rows[1][4] == "2.500 [-3.000, -3.000]"  # of prompt a alone: 1 against 4
