"""What a person sees, with a terminal and without one."""

import io
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelines import screen as screen_module
from pipelines.artifacts import Corpus, Drafter
from pipelines.dag import Artifact, Resources, Step, Verdict
from pipelines.runner import Planned, Progress, StepFailed
from pipelines.screen import RichScreen

PROJECT_ROOT = Path(__file__).resolve().parents[2]
ROOT = "/somewhere/with [brackets]/artifacts"


def make_step(name: str, artifact: type[Artifact] = Artifact) -> Step:
    return Step(name, 1, f"stages.{name}:run", {}, {}, artifact, "small", Resources("/target"))


def make_record(**metrics: float) -> dict[str, Any]:
    return {"metrics": metrics, "provenance": {"wall_seconds": 95.04, "cpu_seconds": 3725.0, "load_average": 1.96}}


PLANNED = [
    Planned(make_step("regenerate", Corpus), Verdict(True, "made 2026-01-01", make_record())),
    Planned(make_step("train", Drafter), Verdict(False, "rebuild=[train]")),
]
TRAIN = PLANNED[1].step


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> RichScreen:
    """Pytest's captured output is no terminal."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    screen = RichScreen()
    screen.plan([], ROOT)
    return screen


def make_terminal() -> tuple[RichScreen, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, highlight=False, markup=False, emoji=False, color_system=None)
    screen = RichScreen(console=console)
    screen.plan([], ROOT)
    return screen, file


def lines_with(capsys: pytest.CaptureFixture[str], word: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if word in line]


# --- plan and summary -----------------------------------------------------------------------------------------------


def test_plan_shows_hit_or_run_reason_and_folder_of_each_step(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    plain.plan(PLANNED, ROOT)
    out = capsys.readouterr().out
    regenerate, train = (next(line.split() for line in out.splitlines() if line.startswith(name)) for name in ("regenerate", "train"))
    assert regenerate == ["regenerate", "hit", "made", "2026-01-01", PLANNED[0].step.folder]
    assert train == ["train", "run", "rebuild=[train]", TRAIN.folder], "square brackets are no markup"
    assert ROOT in out


def test_plan_with_a_long_reason_keeps_all_of_it(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "; ".join(f"stage.train.setting_{i}: {i} -> {i + 1}" for i in range(12))
    plain.plan([Planned(TRAIN, Verdict(False, reason))], ROOT)
    assert "".join(reason.split()) in "".join(capsys.readouterr().out.replace(TRAIN.folder, "").split()).replace("trainrun", "")


def test_summary_shows_what_was_made_what_it_cost_and_the_drafter(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    artifacts = {
        "regenerate": Corpus(f"{ROOT}/{PLANNED[0].step.folder}", make_record(rows=60.0)),
        "train": Drafter(f"{ROOT}/{TRAIN.folder}", make_record(loss=0.123456, tau=1.9, a=1.0, b=2.0, fifth=5.0)),
    }
    plain.started(TRAIN, "rebuild=[train]")
    plain.finished(TRAIN, artifacts["train"].record)
    capsys.readouterr()
    plain.summary(artifacts)
    out = capsys.readouterr().out.splitlines()
    regenerate, train = (next(line.split() for line in out if line.startswith(name)) for name in ("regenerate", "train"))
    assert regenerate == ["regenerate", "hit", "-", "-", "-", "rows=60", PLANNED[0].step.folder]
    assert train[:6] == ["train", "made", "95.0s", "1h", "02m", "2.0"]
    assert train[6:] == ["loss=0.1235", "tau=1.9", "a=1", "b=2", TRAIN.folder]
    assert f"drafter: {ROOT}/{TRAIN.folder}/drafter" in out


def test_summary_without_a_drafter_names_none(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    plain.summary({"regenerate": Corpus(f"{ROOT}/x", make_record())})
    assert "drafter" not in capsys.readouterr().out


def test_evaluation_shows_a_line_a_domain_and_what_was_set_aside(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    def summary(length: float, num_prompts: int) -> dict[str, Any]:
        return {"accepted_length": length, "accepted_length_interval": [length - 0.1, length + 0.1], "num_prompts": num_prompts}

    report = {
        "settings": {
            "t0-greedy": {"test": {"all": summary(3, 9), "math": summary(4, 5), "code": summary(2, 4)}},
            "t1-probabilistic": {"gsm8k": {"all": summary(5, 1300), "math": summary(5, 1300)}},
        },
        "benchmark_means": {"t1-probabilistic": {"all": 5.0}},
        "skipped": [{}, {}, {}],
        "skipped_by_reason": {"duplicate": 1, "prompt too long": 2},
    }
    plain.evaluation(report)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[:6] == [
        ["accepted", "length", "domain", "prompts", "t0-greedy", "t1-probabilistic"],
        ["test", "all", "9", "3.00", "[2.90,", "3.10]", "-"],
        ["test", "math", "5", "4.00", "[3.90,", "4.10]", "-"],
        ["test", "code", "4", "2.00", "[1.90,", "2.10]", "-"],
        ["gsm8k", "math", "1,300", "-", "5.00", "[4.90,", "5.10]"],
        ["mean", "of", "the", "benchmarks", "all", "-", "5.00"],
    ]
    assert " ".join(lines[-1]).startswith("set aside: 1 duplicate, 2 prompt too long (")


def test_calibration_shows_a_line_a_position_and_what_was_not_fitted(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    def estimate(value: float) -> dict[str, float | None]:
        return {"estimate": value, "low": value - 0.01, "high": value + 0.01}

    def method(ece: float) -> dict[str, Any]:
        positions = [
            {"num_rounds": 2000, "num_survivors": 500, "ece_floor": 0.0123, "ece": estimate(ece)},
            {"num_rounds": 0, "num_survivors": 0, "ece_floor": None, "ece": {"estimate": None, "low": None, "high": None}},
        ]
        return {"positions": positions, "mean": {"ece": estimate(ece), "ece_floor": 0.0123}}

    change = {"position_K": [estimate(-0.05), {"estimate": None, "low": None, "high": None}], "mean": estimate(-0.05)}
    found = {
        "temperatures": [1.5, 1.0],
        "num_rounds": {"calibrate": 1234, "test": 2000},
        "fallback_positions": {"raw": [], "sts": [2]},
        "test": {"all": {"methods": {"raw": method(0.08), "sts": method(0.03)}, "change": {"ece": {"raw": change}}}},
    }
    plain.calibration({"settings": {"t0-greedy": found}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[:4] == [
        ["ECE", "%,", "t0-greedy", "T", "rounds", "survived", "raw", "sts", "floor", "sts", "-", "raw"],
        ["position", "1", "1.50", "2,000", "0.250", "8.0", "3.0", "1.2", "-5.00", "[-6.00,", "-4.00]"],
        ["position", "2", "1.00", "0", "-", "-", "-", "-", "-"],
        ["mean", "8.0", "[7.0,", "9.0]", "3.0", "[2.0,", "4.0]", "1.2", "-5.00", "[-6.00,", "-4.00]"],
    ]
    assert " ".join(lines[4]).startswith("fitted on 1,234 rounds of other prompts")
    assert " ".join(lines[5]).startswith("positions not fitted (too few rounds")
    assert lines[5][-3:] == ["sts", "at", "2"]
    assert len(lines) == 6


def test_schedule_shows_a_line_a_concurrency_and_the_checks_that_failed(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"policy": "scheduler_async", "confidences": "sts"}
    report = {
        "served": "scheduler_async_or_none",
        "calibrated": "sts",
        "num_texts": 48,
        "static": [
            {"num_requests": n, "recommended_k": k, "throughput_tokens_per_second_by_k": x}
            for n, k, x in ((1, 1, [5, 9]), (8, 0, [70, 50]))
        ],
        "oracle": [{"num_requests": 1, "gap": 0.25}, {"num_requests": 8, "gap": 0.0}],
        "rows": [
            {**keys, "policy": policy, "num_requests": n, "throughput_tokens_per_second": x, "mean_budget_tokens": b}
            for policy, n, x, b in (
                ("scheduler", 1, 1, 1),
                ("scheduler_async_or_none", 1, 1200, 2.5),
                ("scheduler_async_or_none", 8, 69.6, 1),
            )
        ],
        "calibration": [{**keys, "num_requests": n, "over_raw": {"estimate": 1.02, "low": 0.99, "high": 1.05}} for n in (1, 8)],
        "checks": [
            {"name": "budget_rise", "num_requests": 8, "value": -1.5, "bound": 0.1, "is_ok": True},
            {"name": "scheduler_async_over_static", "num_requests": 8, "value": 0.9511, "bound": 0.99, "is_ok": False},
        ],
    }
    plain.schedule(report)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[1:3] == [
        ["1", "5", "9", "(k", "=", "1)", "1,200", "2.50", "+25.0", "%", "1.020", "[0.990,", "1.050]"],
        ["8", "70", "70", "(k", "=", "0)", "70", "1.00", "+0.0", "%", "1.020", "[0.990,", "1.050]"],
    ]
    assert [" ".join(line) for line in lines[4:]] == ["check scheduler_async_over_static at 8: 0.951, bound 0.99"]


# --- progress -------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(screen_module.time, "monotonic", lambda: self.now)


def test_progress_without_a_terminal_is_a_plain_line_every_ten_seconds(
    plain: RichScreen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    plain.started(TRAIN, "never made")
    for done in range(1, 251):
        clock.now += 0.1
        plain.progress(Progress(done, 600, "steps", {"loss": 2.0, "tau": 1.5}))
    lines = lines_with(capsys, "train:")
    assert lines[0] == "train: never made"
    assert len(lines) == 1 + 2
    assert lines[2] == "train: 200/600 steps  10 steps/s  ETA 40.0s  loss=2  tau=1.5"


def test_progress_of_resumed_work_counts_only_what_is_done_now() -> None:
    text = screen_module._pace(Progress(520, 1000, "rows"), deque([(0.0, 500), (10.0, 520)]))
    assert text == "520/1000 rows  2 rows/s  ETA 4m 00s"


def test_progress_that_is_slow_shows_seconds_each() -> None:
    assert screen_module._pace(Progress(2, 3, "shards"), deque([(0.0, 0), (60.0, 2)])) == "2/3 shards  30 s each  ETA 30.0s"


@pytest.mark.parametrize("progress", [Progress(5, 0, "rows"), Progress(5, 5, "rows")], ids=["no total", "all done"])
def test_progress_without_anything_left_shows_no_eta(progress: Progress) -> None:
    assert "ETA" not in screen_module._pace(progress, deque([(0.0, 0), (1.0, 5)]))


def test_progress_on_a_terminal_is_one_bar_that_ends_with_the_step() -> None:
    screen, file = make_terminal()
    screen.started(TRAIN, "never made")
    screen.progress(Progress(1, 4, "steps", {"loss": 2.0}))
    screen.progress(Progress(3, 4, "steps", {"loss": 1.0}))
    screen.note("a note [in brackets]")
    screen.finished(TRAIN, make_record(loss=1.0))
    out = file.getvalue()
    assert "3/4 steps" in out
    assert "loss=1" in out
    assert "a note [in brackets]" in out
    assert "train: done in 95.0s  loss=1" in out
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor stays hidden"


# --- when something fails -------------------------------------------------------------------------------------------


def make_failure(message: str = "row 7 [of 9]: no text") -> StepFailed:
    def run_stage() -> None:
        raise ValueError(message)

    try:
        run_stage()
    except ValueError as error:
        return StepFailed(TRAIN, error)
    raise AssertionError


def test_failure_names_step_cause_what_is_kept_and_the_command(
    plain: RichScreen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/pipelines/__main__.py", "experiment=small", "stage.train.lr=3e-4", "data.uris=[a b.jsonl]"])
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    plain.failure(make_failure())
    assert capsys.readouterr().out.splitlines() == [
        "step train failed",
        "  cause      ValueError: row 7 [of 9]: no text",
        f"  kept       {ROOT}/{TRAIN.folder} (its finished parts are not made again)",
        "  to go on   .venv/bin/python -m pipelines experiment=small stage.train.lr=3e-4 'data.uris=[a b.jsonl]'",
    ]


def test_failure_with_verbose_shows_the_last_frames(capsys: pytest.CaptureFixture[str]) -> None:
    RichScreen(is_verbose=True).failure(make_failure())
    out = capsys.readouterr().out
    assert "in run_stage" in out
    assert "raise ValueError(message)" in out


def test_failure_with_a_remote_traceback_fits_on_one_screen_and_keeps_its_end(
    plain: RichScreen, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.failure(make_failure("\n".join(["head", *(f"frame {i}" for i in range(200)), "the real cause"])))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert any("head" in line for line in lines)
    assert any("the real cause" in line for line in lines)


@pytest.mark.parametrize(
    ("rebuild", "shown"),
    [
        ("rebuild=[train]", []),
        ("rebuild=train", []),
        ("rebuild=[train, evaluate]", ["rebuild=[evaluate]"]),
        ("rebuild=[evaluate]", ["rebuild=[evaluate]"]),
    ],
)
def test_command_to_go_on_asks_for_no_rebuild_that_has_begun(rebuild: str, shown: list[str]) -> None:
    """Else the part that was made anew would be thrown away and made once more."""
    command = screen_module._command(["/x/pipelines/__main__.py", rebuild, "until=train"], ["train"])
    assert command.split()[1:] == ["-m", "pipelines", *(f"'{word}'" for word in shown), "until=train"]


def test_failure_after_a_bar_gives_the_cursor_back() -> None:
    screen, file = make_terminal()
    screen.started(TRAIN, "never made")
    screen.progress(Progress(1, 4, "steps"))
    screen.failure(make_failure())
    out = file.getvalue()
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")
    assert "step train failed" in out


def test_interrupted_says_what_stays_and_how_to_go_on(
    plain: RichScreen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "mode=run"])
    plain.interrupted()
    stopped, command = capsys.readouterr().out.splitlines()
    assert "what is finished stays" in stopped
    assert command.endswith(" run.py mode=run")


def test_config_error_prints_the_message_as_it_is(plain: RichScreen, capsys: pytest.CaptureFixture[str]) -> None:
    plain.config_error(ValueError("stage.train.lrr: unknown key [bold]. Fix: stage.train.lr"))
    assert capsys.readouterr().out == "error: stage.train.lrr: unknown key [bold]. Fix: stage.train.lr\n"


def test_screen_where_the_output_has_no_unicode_still_prints() -> None:
    code = (
        "from tests.pipelines import test_screen as t; from pipelines.screen import RichScreen; s = RichScreen();"
        "s.plan(t.PLANNED, '/γ'); s.started(t.TRAIN, 'never made'); s.note('a -> b'); s.failure(t.make_failure())"
    )
    environment = {"PYTHONIOENCODING": "ascii:backslashreplace", "PYTHONPATH": str(PROJECT_ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step train failed" in done.stdout
