"""How large a cache will be: the formula by hand, where its lengths come from, and what is refused before anything begins."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dspark.storage import LocalStorage
from pipelines import __main__ as command
from pipelines import flow, runner, sizing
from pipelines.config import PROJECT_ROOT, compose
from pipelines.dag import RECORD, RECORD_SCHEMA_VERSION, fingerprint, identity
from pipelines.screen import RichScreen
from pipelines.settings import CacheTargetsStage, Settings
from pipelines.sizing import CacheSize, Rows, corpus_rows, estimate, measure, require_room, units

STAGE = CacheTargetsStage(
    engine="vllm", dtype="bf16", logits="final", num_top_logits=10, mode="store", compression="none",
    max_bytes=None, window_bytes=50_000, assumed_prompt_tokens=45, assumed_response_tokens=110,
)  # fmt: skip
ROWS = Rows(100, 3_000, 5_000, "exact, the corpus is there")  # with width 8 and 3 layers:
BF16 = (8_000 - 200) * 3 * 16 + 5_000 * 16 + 4 * 5_000 + 5 * 8_000 + 100 * 1200  # 634,400
FP8 = (8_000 - 200) * 3 * 9 + 5_000 * 9 + 4 * 5_000 + 5 * 8_000 + 100 * 1200  # 435,600
LARGE = 10**15


class Store(LocalStorage):
    """A folder on a disk with this much room."""

    def __init__(self, uri: object, free_bytes: int | None = LARGE) -> None:
        super().__init__(str(uri))
        self._free_bytes = free_bytes

    def free_bytes(self) -> int | None:
        return self._free_bytes


def sized(stage: CacheTargetsStage = STAGE, free_bytes: int | None = LARGE, stored_bytes: int = 0) -> CacheSize:
    return replace(measure(stage, 8, 3, ROWS, Store("/nowhere", free_bytes)), stored_bytes=stored_bytes)


# --- the formula ------------------------------------------------------------------------------------------------------


def test_measure_is_the_formula_by_hand_in_every_form() -> None:
    size = sized()
    assert size.forms == {
        "bf16 final": 634_400,
        "fp8 final": 435_600,
        "bf16 topk": (8_000 - 200) * 3 * 16 + 5_000 * 10 * 8 + 180_000,  # the rest is the same
        "fp8 topk": (8_000 - 200) * 3 * 9 + 5_000 * 10 * 8 + 180_000,
    }
    assert (BF16, FP8) == (634_400, 435_600)
    assert size.deepspec_bytes == 8_000 * (6 + 2 * 8 * 4)
    assert size.tokens == 8_000


def test_measure_of_one_token_rows_stores_no_state_before_the_first() -> None:
    size = measure(STAGE, 8, 3, Rows(2, 1, 1, ""), Store("/nowhere"))
    assert size.forms["bf16 final"] == 16 + 4 + 10 + 2400


@pytest.mark.parametrize(("dtype", "logits"), [("bf16", "final"), ("fp8", "final"), ("bf16", "topk"), ("fp8", "topk")])
def test_measure_marks_the_form_of_the_settings(dtype: Any, logits: Any) -> None:
    assert sized(replace(STAGE, dtype=dtype, logits=logits)).chosen == f"{dtype} {logits}"


def test_deepspec_cache_of_qwen3_4b_is_its_published_bytes_per_token() -> None:
    assert measure(STAGE, 2560, 5, Rows(1, 400, 600, ""), Store("/nowhere")).deepspec_bytes == 1000 * 30_726


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1.0 kB"), (30_726, "30.7 kB"), (999_950_000, "1.0 GB"), (38e12, "38.0 TB"), (2.5e15, "2.5 PB")],
)
def test_units_are_decimal(num_bytes: float, shown: str) -> None:
    assert units(num_bytes) == shown


# --- where the lengths come from --------------------------------------------------------------------------------------


@cache
def tiny(*overrides: str) -> Settings:
    return compose(["experiment=tiny", *overrides])[0]


def estimated(settings: Settings, root: Path, free_bytes: int | None = LARGE) -> CacheSize | None:
    store = Store(root, free_bytes)
    return estimate(settings, runner.plan(flow.build(settings), store, settings.rebuild), store)


def put_record(settings: Settings, root: Path, name: str, **metrics: float) -> None:
    """As if the step had finished; its input's payload is the one that this function gives every record."""
    step = next(step for step in flow.build(settings) if step.name == name)
    record: Mapping[str, Any] = {
        "schema_version": RECORD_SCHEMA_VERSION, "fingerprint": fingerprint(step), "identity": identity(step), "files": {},
        "inputs": {name: {"payload_sha256": "p"} for name in step.inputs}, "payload_sha256": "p", "metrics": metrics, "figures": [],
        "provenance": {"finished_at": "2026-01-01"}, "mlflow_run_id": None,
    }  # fmt: skip
    LocalStorage(str(root)).put(f"{step.folder}/{RECORD}", json.dumps(record).encode())


@cache
def tiny_corpus() -> str:
    return next(step for step in flow.build(tiny()) if step.name == "regenerate").folder


def put_receipt(root: Path, number: int, **counts: int) -> None:
    LocalStorage(str(root)).put(f"{tiny_corpus()}/rows-{number:05d}.json", json.dumps({"name": f"rows-{number:05d}", **counts}).encode())


def test_estimate_without_anything_made_assumes_lengths_and_takes_the_limits_as_the_most(tmp_path: Path) -> None:
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert (size.rows.count, size.rows.prompt_tokens, size.rows.response_tokens) == (32, 32 * 45, 32 * 24)
    for part in ("at most", "stage.prompts.limits", "assumed", "assumed_prompt_tokens=45", "stage.regenerate.max_new_tokens=24"):
        assert part in size.rows.how


def test_estimate_with_more_tokens_allowed_than_assumed_takes_what_is_assumed(tmp_path: Path) -> None:
    size = estimated(tiny("stage.regenerate.max_new_tokens=300"), tmp_path)
    assert size is not None
    assert size.rows.response_tokens == 32 * 110
    assert "max_new_tokens" not in size.rows.how


def test_estimate_of_a_small_file_counts_no_more_prompts_than_it_has(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"turns": [str(i)], "domain": "chat"}) + "\n" for i in range(5)) + "\n")
    settings = tiny(f"data.uris=[{tmp_path}/mine.jsonl]", "~stage.prompts.limits.train")
    size = estimated(settings, tmp_path / "root")
    assert size is not None
    assert size.rows.count == 5


def test_estimate_with_finished_prompts_counts_those_that_will_be_answered(tmp_path: Path) -> None:
    put_record(tiny(), tmp_path, "prompts", train=20.0, select=7.0, calibrate=4.0, test=8.0, train_math=20.0, dropped_duplicate=1.0)
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert size.rows.count == 27
    assert "at most" not in size.rows.how


def test_estimate_with_an_unfinished_corpus_measures_on_its_shards(tmp_path: Path) -> None:
    put_record(tiny(), tmp_path, "prompts", train=24.0, select=8.0)
    put_receipt(tmp_path, 0, num_prompts=8, num_rows=12, num_prompt_tokens=600, num_response_tokens=120)
    put_receipt(tmp_path, 2, num_prompts=8, num_rows=8, num_prompt_tokens=400, num_response_tokens=200)
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert (size.rows.count, size.rows.prompt_tokens, size.rows.response_tokens) == (40, 2000, 640)
    assert size.rows.how == "measured on 20 rows of the unfinished corpus"


def test_estimate_of_a_corpus_with_many_shards_reads_a_few_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        put_receipt(tmp_path, number, num_prompts=8, num_rows=8, num_prompt_tokens=8 * number, num_response_tokens=80)
    reads: list[str] = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, name: reads.append(name) or read(self, name))
    size = estimated(tiny(), tmp_path)
    assert size is not None
    read_receipts = [name for name in reads if "/rows-" in name]
    assert len(read_receipts) == 15  # every seventh
    assert size.rows.prompt_tokens == 32 * 49  # their mean number
    assert size.rows.how.startswith("at most (stage.prompts.limits), measured on 120 rows")


def test_estimate_with_receipts_of_an_earlier_version_assumes(tmp_path: Path) -> None:
    put_receipt(tmp_path, 0, num_prompts=8, num_rows=12, num_response_tokens=120)
    put_receipt(tmp_path, 1, num_prompts=8, num_rows=0, num_prompt_tokens=0, num_response_tokens=0)
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert "assumed" in size.rows.how


def test_estimate_with_a_finished_corpus_is_exact(tmp_path: Path) -> None:
    put_record(tiny(), tmp_path, "prompts", train=24.0, select=8.0)
    put_record(tiny(), tmp_path, "regenerate", rows=31.0, rows_dropped=1.0, response_tokens=700.0, prompt_tokens=2500.0)
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert size.rows == Rows(31, 2500, 700, "exact, the corpus is there")


def test_estimate_with_a_corpus_of_an_earlier_version_assumes_only_its_prompts(tmp_path: Path) -> None:
    put_record(tiny(), tmp_path, "prompts", train=24.0, select=8.0)
    put_record(tiny(), tmp_path, "regenerate", rows=31.0, response_tokens=700.0)
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert (size.rows.count, size.rows.prompt_tokens, size.rows.response_tokens) == (31, 31 * 45, 700)
    assert "prompts assumed" in size.rows.how


def test_estimate_with_a_finished_cache_is_none(tmp_path: Path) -> None:
    for name in ("prompts", "regenerate", "cache_targets"):
        put_record(tiny(), tmp_path, name, rows=31.0, response_tokens=700.0, prompt_tokens=2500.0)
    assert estimated(tiny(), tmp_path) is None
    again = estimated(tiny("rebuild=[cache_targets]"), tmp_path)
    assert again is not None
    assert again.rows.count == 31


def test_estimate_of_a_plan_that_ends_before_the_cache_is_none(tmp_path: Path) -> None:
    assert estimated(tiny("until=regenerate"), tmp_path) is None


def test_estimate_of_a_stream_is_that_of_a_training_that_will_run(tmp_path: Path) -> None:
    settings = tiny("stage.cache_targets.mode=stream")
    put_record(settings, tmp_path, "prompts", train=24.0, select=8.0)
    put_record(settings, tmp_path, "regenerate", rows=31.0, response_tokens=700.0, prompt_tokens=2500.0)
    steps, store = flow.build(settings), Store(tmp_path)
    by_name = {step.name: step for step in steps}
    store.put(f"{by_name['train'].folder}/stream/shard-00000.arrow", bytes(77))
    store.put(f"{by_name['train'].folder}/checkpoint", bytes(5))
    planned = runner.plan(steps, store)
    size = estimate(settings, planned, store)
    assert size is not None
    assert (size.rows.count, size.stored_bytes) == (31, 77)
    made = [replace(item, verdict=replace(item.verdict, is_hit=item.step.name == "train" or item.verdict.is_hit)) for item in planned]
    assert estimate(settings, made, store) is None
    assert estimated(tiny("stage.cache_targets.mode=stream", "until=cache_targets"), tmp_path) is None


def test_estimate_counts_what_an_interrupted_step_has_stored(tmp_path: Path) -> None:
    step = next(step for step in flow.build(tiny()) if step.name == "cache_targets")
    LocalStorage(str(tmp_path)).put(f"{step.folder}/shard-00000.arrow", bytes(1234))
    LocalStorage(str(tmp_path)).put(f"{step.folder}-other/shard-00000.arrow", bytes(99))
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert size.stored_bytes == 1234


def test_estimate_beside_a_driver_that_removes_files_counts_those_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = next(step for step in flow.build(tiny()) if step.name == "cache_targets")
    LocalStorage(str(tmp_path)).put(f"{step.folder}/shard-00000.arrow", bytes(1234))
    names = [f"{step.folder}/shard-00000.arrow", f"{step.folder}/shard-00001.arrow"]
    monkeypatch.setattr(Store, "list", lambda self, prefix="": [name for name in names if name.startswith(prefix)])
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert size.stored_bytes == 1234


def test_corpus_rows_of_real_metrics_are_the_rows_that_the_step_would_measure() -> None:
    assert corpus_rows({"rows": 2.0, "prompt_tokens": 30.0, "response_tokens": 9.0}, STAGE) == Rows(2, 30, 9, "exact, the corpus is there")


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(size: CacheSize, stage: CacheTargetsStage) -> str:
    with pytest.raises(ValueError, match="Fix:") as caught:
        require_room(size, stage)
    return str(caught.value)


def test_room_that_is_just_enough_is_enough() -> None:
    stage = replace(STAGE, max_bytes=BF16)
    require_room(sized(stage, free_bytes=BF16), stage)
    assert "max_bytes=634399" in refusal(sized(), replace(STAGE, max_bytes=BF16 - 1))
    assert "the free space, 634.4 kB" in refusal(sized(free_bytes=BF16 - 1), STAGE)


def test_refusal_where_fp8_fits_names_it_with_its_size() -> None:
    text = refusal(sized(), replace(STAGE, max_bytes=FP8))
    assert text == (
        "stage.cache_targets: its cache would take 634.4 kB (634400 bytes, bf16 final; 100 rows, exact, the corpus is there), "
        "above stage.cache_targets.max_bytes=435600. Fix: stage.cache_targets.dtype=fp8 (435.6 kB, lossy); "
        "or fewer tokens (stage.regenerate.max_new_tokens, stage.prompts.limits.train); "
        "or stage.cache_targets.mode=stream (keeps 50.0 kB at most)"
    )


def test_refusal_where_fp8_would_not_fit_either_does_not_offer_it() -> None:
    assert "dtype=fp8" not in refusal(sized(), replace(STAGE, max_bytes=FP8 - 1))
    assert "dtype=fp8" not in refusal(sized(free_bytes=FP8 - 1), replace(STAGE, max_bytes=FP8))


def test_refusal_of_fp8_itself_does_not_offer_it() -> None:
    stage = replace(STAGE, dtype="fp8", max_bytes=1000)
    text = refusal(sized(stage), stage)
    assert "dtype=fp8" not in text
    assert "window_bytes=1000 (keeps 1.0 kB at most)" in text, "a stream's window has to fit, too"


def test_refusal_above_both_limits_names_both() -> None:
    text = refusal(sized(free_bytes=FP8), replace(STAGE, max_bytes=FP8 + 5))
    assert "stage.cache_targets.max_bytes=435605 and the free space, 435.6 kB" in text
    assert "dtype=fp8 (435.6 kB" in text


def test_refusal_of_a_topk_cache_offers_fp8_of_the_same_logits() -> None:
    stage = replace(STAGE, logits="topk")
    size = sized(stage)
    assert f"dtype=fp8 ({units(size.forms['fp8 topk'])}" in refusal(size, replace(stage, max_bytes=size.forms["fp8 topk"]))


def test_room_counts_what_is_stored_already() -> None:
    require_room(sized(free_bytes=BF16 - 1000, stored_bytes=1000), STAGE)
    assert "beside the 999 B that are stored already" in refusal(sized(free_bytes=BF16 - 1000, stored_bytes=999), STAGE)


def test_free_space_that_is_unknown_refuses_nothing() -> None:
    require_room(sized(free_bytes=None), STAGE)
    assert "free space" not in refusal(sized(free_bytes=None), replace(STAGE, max_bytes=10))


def test_stream_is_refused_only_for_its_window() -> None:
    stage = replace(STAGE, mode="stream", max_bytes=50_000)
    require_room(sized(stage, free_bytes=50_000), stage)
    assert refusal(sized(stage), replace(stage, max_bytes=49_999)) == (
        "stage.cache_targets.window_bytes: 50000 (50.0 kB) is above stage.cache_targets.max_bytes=49999. "
        "Fix: stage.cache_targets.window_bytes=49999, or a larger max_bytes"
    )
    assert "free space, 50.0 kB" in refusal(sized(stage, free_bytes=49_999), stage)
    wide = replace(stage, max_bytes=None, window_bytes=10 * BF16)
    require_room(sized(wide, free_bytes=BF16), wide)  # the whole cache passes through less than its window


# --- the command ------------------------------------------------------------------------------------------------------


def pipeline(root: Path, *overrides: str) -> tuple[int, str]:
    words = [sys.executable, "-m", "pipelines", f"cluster.root={root}", *overrides]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def table(output: str) -> dict[str, list[str]]:
    """Cells of the table of forms."""
    rows = [line.split() for line in output.splitlines() if line.startswith(("bf16 ", "fp8 ", "DeepSpec's "))]
    return {" ".join(row[:2]) if row[0] != "DeepSpec's" else row[0]: row[2 if row[0] != "DeepSpec's" else 1 :] for row in rows}


@pytest.mark.parametrize("mode", ["plan", "run"])
def test_command_with_a_cache_above_its_limit_exits_2_and_begins_nothing(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "root"
    status, output = pipeline(root, "experiment=tiny", f"mode={mode}", "stage.cache_targets.max_bytes=1000")
    assert status == 2, output
    assert table(output)["bf16 final"][-1] == "chosen", "the report comes first"
    refused = output[output.index("error:") :]
    for part in (
        "stage.cache_targets.max_bytes=1000",
        "Fix:",
        "stage.regenerate.max_new_tokens",
        "stage.prompts.limits.train",
        "mode=stream",
    ):
        assert part in refused
    assert not root.exists()


def test_command_with_a_store_too_full_exits_2_with_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 20_000)
    monkeypatch.setattr(sys, "argv", ["__main__.py", "experiment=tiny", f"cluster.root={tmp_path}"])
    assert command.command_line() == 2
    output = capsys.readouterr().out
    assert "free space: 20.0 kB" in output
    assert "above the free space, 20.0 kB" in output
    assert not list(tmp_path.iterdir())


def test_command_in_stream_mode_says_what_is_kept_and_refuses_nothing(tmp_path: Path) -> None:
    overrides = (
        "mode=plan",
        "stage.cache_targets.mode=stream",
        "stage.cache_targets.max_bytes=1000",
        "stage.cache_targets.window_bytes=900",
    )
    status, output = pipeline(tmp_path, "experiment=tiny", *overrides)
    assert status == 0, output
    assert "window_bytes=900 (900 B) are kept at most" in output


def test_plan_of_the_paper_shows_deepspecs_38_tb_beside_ours(tmp_path: Path) -> None:
    status, output = pipeline(tmp_path, "experiment=paper_qwen3_4b", "mode=plan", "stage.cache_targets.max_bytes=20000000000000")
    # A row: 948 x 5 x 5,120 + 700 x 5,120 + 4 x 700 + 5 x 950 + 1,200 bytes of bf16, and 1,302,000 of them.
    assert table(output) == {
        "bf16 final": ["29,328", "36.3", "TB", "chosen"],
        "fp8 final": ["14,674", "18.2", "TB"],
        "bf16 topk": ["25,933", "32.1", "TB"],
        "fp8 topk": ["13,165", "16.3", "TB"],
        "DeepSpec's": ["30,726", "38.0", "TB"],
    }
    assert "rows: 1,302,000  tokens: 1,236,900,000 (325,500,000 prompt + 911,400,000 response)" in output
    assert "at most" in output
    assert status == 2
    assert "stage.cache_targets.max_bytes=20000000000000" in output[output.index("error:") :]


@pytest.mark.slow
def test_trunk_to_the_cache_gives_what_its_exact_plan_said(tmp_path: Path) -> None:
    """The formula against a cache that was really made."""
    status, output = pipeline(tmp_path, "experiment=tiny", "until=regenerate")
    assert status == 0, output
    metrics = json.loads(next(tmp_path.glob("regenerate/*/record.json")).read_text())["metrics"]
    size = estimated(tiny(), tmp_path)
    assert size is not None
    assert size.rows == Rows(
        int(metrics["rows"]), int(metrics["prompt_tokens"]), int(metrics["response_tokens"]), "exact, the corpus is there"
    )
    status, output = pipeline(tmp_path, "experiment=tiny", "until=cache_targets")
    assert status == 0, output
    assert "how: exact, the corpus is there" in output
    made = sum(path.stat().st_size for path in tmp_path.glob("cache_targets/*/shard-*.arrow"))
    assert made == pytest.approx(size.forms["bf16 final"], rel=0.05)


def test_screen_says_unknown_space_and_compression(capsys: pytest.CaptureFixture[str]) -> None:
    stage = replace(STAGE, compression="zstd")
    RichScreen().cache_size(sized(stage, free_bytes=None), stage)
    output = capsys.readouterr().out
    assert "free space: unknown" in output
    assert "before compression: zstd makes it smaller" in output
    assert "stream" not in output


def test_sizing_imports_no_heavy_library() -> None:
    code = "import sys; from pipelines import sizing; print([m for m in ('torch','numpy','pyarrow','s3fs','ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT_ROOT)
    assert done.stdout.strip() == "[]"
    assert sizing.__name__ == "pipelines.sizing"
