"""The whole pipeline on a random tiny target: in one process, and on real Ray, vLLM, DeepSpeed and MLflow."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark.release import check_release
from dspark.storage import LocalStorage
from pipelines.config import PROJECT_ROOT

SECOND_HALF = ["trace", "calibrate", "profile_sps", "schedule", "publish"]
STEPS = ["prompts", "regenerate", "cache_targets", "train", "evaluate", *SECOND_HALF]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
DRIVER = ("-m", "pipelines")
# The tiny cache is one unit of usual size: this driver cuts it into several.
DRIVER_OF_SMALL_UNITS = (
    "-c",
    "import sys; from pipelines.__main__ import command_line; from pipelines.stages import cache_targets; "
    "cache_targets.SHARD_BYTES = 30_000; sys.exit(command_line())",
)


def start(root: Path, *overrides: str, driver: tuple[str, str] = DRIVER) -> subprocess.Popen[str]:
    command = [sys.executable, *driver, "experiment=tiny", f"cluster.root={root}", *overrides]
    return subprocess.Popen(command, cwd=PROJECT_ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pipeline(root: Path, *overrides: str, status: int = 0, driver: tuple[str, str] = DRIVER) -> str:
    process = start(root, *overrides, driver=driver)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == status, output
    return output


def verdicts(output: str) -> dict[str, str]:
    """What the plan says of each step."""
    return {m[1]: m[2] for m in re.finditer(r"^(\w+)\s+(hit|run)\b", output, re.MULTILINE)}


def records(root: Path) -> dict[str, dict]:
    return {path.parent.parent.name: json.loads(path.read_text()) for path in root.glob("*/*/record.json")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which the local trunk has run once."""
    root = tmp_path_factory.mktemp("trunk")
    output = pipeline(root)
    assert verdicts(output) == dict.fromkeys(STEPS, "run")
    return root


def test_trunk_local_run_makes_every_artifact_with_its_record(finished: Path) -> None:
    made = records(finished)
    assert sorted(made) == sorted(STEPS)
    report = json.loads(next(finished.glob("evaluate/*/report.json")).read_text())
    assert report["lossless"]["num_wrong"] == 0
    assert report["lossless"]["num_prompts"] == 4
    assert report["skipped_by_reason"] == {}
    assert set(report["settings"]) == {"t0-greedy", "t0-greedy-no_markov", "t1-probabilistic"}
    assert all(1.0 <= report["settings"][name]["test"]["all"]["accepted_length"] <= 5.0 for name in report["settings"])
    check_release(LocalStorage(str(next(finished.glob("publish/*/release")))))
    calibration = json.loads(next(finished.glob("calibrate/*/report.json")).read_text())
    assert list(calibration["settings"]) == ["t0-greedy", "t1-probabilistic"]
    assert calibration["setting"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "draft_mode": "greedy"}
    traced = {path.name for path in finished.glob("trace/*/*.parquet")}
    assert {"rounds-0-test-0000.parquet", "rounds-1-test-0000.parquet", "positions-0-test-0000.parquet"} <= traced
    assert "positions-1-test-0000.parquet" not in traced
    scheduled = json.loads(next(finished.glob("schedule/*/report.json")).read_text())
    kinds = {"raw", "global", "platt", "isotonic", "sts", "oracle"}
    assert {(row["confidences"], row["num_requests"]) for row in scheduled["rows"]} == {(c, n) for c in (*kinds, None) for n in (1, 4, 16)}
    assert {(row["policy"], row["confidences"]) for row in scheduled["calibration"]} >= {("scheduler_async", kind) for kind in kinds}
    assert all(len(row["throughput_tokens_per_second_by_k"]) == 5 for row in scheduled["static"])
    assert {check["name"] for check in scheduled["checks"]} == {
        "scheduler_async_or_none_over_static",
        "scheduler_or_none_over_static",
        "scheduler_async_over_static",
        "scheduler_over_static",
        "scheduler_over_static_linear",
        "oracle_over_every_policy",
        "budget_rise",
        "budget_rise_linear",
    }
    assert made["train"]["inputs"]["cache"]["payload_sha256"] == made["cache_targets"]["payload_sha256"]
    assert not list(finished.rglob("*.partial"))
    assert not list(finished.rglob("lease.json"))


def test_trunk_second_run_hits_everything_and_starts_nothing(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    output = pipeline(finished, "cluster=ray", "cluster.tracker=none")
    assert verdicts(output) == dict.fromkeys(STEPS, "hit")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before


def test_trunk_release_that_was_left_half_written_is_written_anew(finished: Path) -> None:
    place = next(finished.glob("publish/*/release"))
    whole = {path.name: path.read_bytes() for path in place.iterdir()}
    for path in (place.parent / "record.json", place / "checksums.json", place / "README.md"):
        path.unlink()
    (place / "lineage.json").write_bytes(b"{")
    assert verdicts(pipeline(finished)) == {**dict.fromkeys(STEPS, "hit"), "publish": "run"}
    assert {path.name: path.read_bytes() for path in place.iterdir()} == whole


def test_trunk_calibration_is_judged_by_rounds_alike_from_its_artifact_and_from_the_release(finished: Path) -> None:
    rounds = next(finished.glob("trace/*")) / "rounds-0-"
    reports = {}
    for words in ([], [f"release={next(finished.glob('publish/*/release'))}"]):
        process = start(finished, "mode=drift", f"rounds={rounds}", *words)
        output, _ = process.communicate(timeout=600)
        place = Path(re.findall(r"^refitted temperatures, report and figure: (.*)$", output, re.MULTILINE)[0])
        report = json.loads((place / "report.json").read_text())
        assert process.returncode == {"keep": 0, "recalibrate": 1}[report["verdict"]], output
        reports[report.pop("calibration")["uri"]] = report
    assert len(reports) == 2
    first, second = reports.values()
    assert first == second
    assert first["ece_now"]["all"]["num_requests"] == 12


def test_trunk_trains_from_a_lossy_compressed_cache(finished: Path, tmp_path: Path) -> None:
    for step in ("prompts", "regenerate"):
        shutil.copytree(finished / step, tmp_path / step)
    content = ["dtype=fp8", "logits=topk", "num_top_logits=128", "compression=zstd"]
    output = pipeline(tmp_path, *(f"stage.cache_targets.{setting}" for setting in content), "until=train")
    assert verdicts(output) == {"prompts": "hit", "regenerate": "hit", "cache_targets": "run", "train": "run"}
    lossy, exact = (json.loads(next(root.glob("cache_targets/*/manifest.json")).read_text()) for root in (tmp_path, finished))
    assert lossy["format"] == {"dtype": "fp8", "logits": "topk", "num_top_logits": 128, "compression": "zstd"}
    assert lossy["num_tokens"] == exact["num_tokens"]
    first = [json.loads(next(root.glob("train/*/curves.jsonl")).read_text().splitlines()[0]) for root in (tmp_path, finished)]
    # The same rows and anchors: an L1 distance of at most twice the mass beyond the best logits, and what fp8 does to the context.
    largest = lossy["exactness"]["largest_missing_mass"]
    assert 0 < largest < 0.5
    assert 0 < first[0]["loss_tv"] - first[1]["loss_tv"] < 2 * largest + 0.01
    assert first[0]["loss_ce"] == pytest.approx(first[1]["loss_ce"], rel=1e-3)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_trunk_trains_and_decodes_with_every_kind_of_drafter(finished: Path, tmp_path: Path, kind: str) -> None:
    for step in ("prompts", "regenerate", "cache_targets"):
        shutil.copytree(finished / step, tmp_path / step)
    output = pipeline(tmp_path, f"drafter={kind}", f"loss={kind}", "until=evaluate")
    of_last_layer = "run" if kind == "mtp" else "hit"
    assert verdicts(output) == {"prompts": "hit", "regenerate": "hit", "cache_targets": of_last_layer, "train": "run", "evaluate": "run"}
    report = json.loads(next(tmp_path.glob("evaluate/*/report.json")).read_text())
    assert report["lossless"]["num_equal"] == report["lossless"]["num_prompts"] > 0


def test_trunk_sweep_ends_with_a_table_and_one_point_that_fails_takes_nothing_from_the_others(finished: Path, tmp_path: Path) -> None:
    for step in ("prompts", "regenerate", "cache_targets"):
        shutil.copytree(finished / step, tmp_path / step)
    # Blocks of 40 tokens fit no response; none at all are refused before any work.
    words = ("until=evaluate", "stage.train.seed=0,1", "contender=dflash_ce,eagle3", "drafter.block_size=3,40,0", "-m")
    output = pipeline(tmp_path, *words, status=1)
    failed = re.findall(r"^failed: .*drafter.block_size=(\d+).*\n +cause +(.*)$", output, re.MULTILINE)
    assert sorted(size for size, _ in failed) == ["0"] * 4 + ["40"] * 4
    assert all("drafter.block_size" in cause for _, cause in failed)
    table = next(tmp_path.glob("sweeps/*/table.md")).read_text()
    rows = dict(re.findall(r"^\| (contender=\w+ drafter.block_size=\d+) \| (\d) \|", table, re.MULTILINE))
    assert rows == {f"contender={c} drafter.block_size={k}": "2" if k == 3 else "0" for c in ("dflash_ce", "eagle3") for k in (3, 40, 0)}
    kinds = [json.loads(path.read_text())["drafter"]["kind"] for path in tmp_path.glob("train/*/drafter/config.json")]
    assert sorted(kinds) == ["dflash"] * 2 + ["eagle3"] * 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/record.json")}
    again = pipeline(tmp_path, *(word.replace("3,40,0", "3") for word in words))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/record.json")} == before
    assert set(verdicts(again).values()) == {"hit"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stage.cache_targets.dtype=fp8", {"cache_targets", "train", "evaluate", *SECOND_HALF}),
        ("stage.cache_targets.compression=zstd", set()),
        ("stage.train.row_uses=2", {"train", "evaluate", *SECOND_HALF}),
        ("stage.evaluate.max_new_tokens=8", {"evaluate", "publish"}),
        ("stage.train.lr=2e-3", {"train", "evaluate", *SECOND_HALF}),
        ("stage.calibrate.num_bins=20", {"calibrate", "schedule", "publish"}),
        ("stage.schedule.num_steps=30", {"schedule", "publish"}),
        ("cluster.cpus_per_worker=1", {"profile_sps", "schedule", "publish"}),
        ("rebuild=[regenerate]", {"regenerate", "cache_targets", "train", "evaluate", *SECOND_HALF}),
        ("cluster.engine_workers=3", set()),
    ],
)
def test_trunk_plan_reruns_exactly_what_depends_on_a_change(finished: Path, override: str, expected: set[str]) -> None:
    output = pipeline(finished, "mode=plan", override)
    assert {step for step, verdict in verdicts(output).items() if verdict == "run"} == expected
    if expected and override.startswith("stage."):
        assert f"{override.split('=')[0]}:" in output
    if override.startswith("cluster.cpus"):
        assert re.search(r"stack\.num_threads: \d+ -> 1", output)


def test_trunk_rebuild_makes_new_responses_and_everything_after_them(finished: Path) -> None:
    before = records(finished)
    pipeline(finished, "rebuild=[regenerate]", "until=train")
    after = records(finished)
    assert after["prompts"]["provenance"] == before["prompts"]["provenance"]
    for step in ("regenerate", "cache_targets", "train"):
        assert after[step]["payload_sha256"] != before[step]["payload_sha256"]
    assert verdicts(pipeline(finished, "mode=plan")) == {**dict.fromkeys(STEPS[:4], "hit"), **dict.fromkeys(STEPS[4:], "run")}


@pytest.mark.parametrize(
    ("overrides", "status", "expected"),
    [
        (["stage.train.lrr=1"], 2, "did you mean stage.train.lr"),
        (["data.uris=[does/not/exist.jsonl]"], 2, "data.uris"),
        (["target.mask_token_id=40"], 1, "target.mask_token_id"),
        (["drafter.block_size=60", "stage.schedule.concurrencies=[1]"], 1, "drafter.block_size"),
    ],
)
def test_trunk_bad_request_is_one_screen_with_field_and_fix(finished: Path, overrides: list[str], status: int, expected: str) -> None:
    output = pipeline(finished, *overrides, status=status)
    assert expected in output
    assert "Fix:" in output
    assert "Traceback" not in output
    assert output.count("\n") < 40


def test_trunk_store_below_a_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    output = pipeline(tmp_path / "file" / "root", status=2)
    assert "regular file" in output
    assert "cluster.root" in output
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("step", "mark"),
    [
        ("regenerate", "rows-00001.json"),
        ("cache_targets", "shard-00001.json"),
        ("train", "complete.json"),
        ("evaluate", "rounds-t0-greedy-0000.json"),
    ],
)
def test_trunk_killed_driver_goes_on_from_what_was_finished(tmp_path: Path, step: str, mark: str) -> None:
    """SIGKILL once the step has finished a part of its work; then the same command."""
    slow = ["stage.regenerate.shard_prompts=4", "stage.train.num_steps=60", f"until={step}"]
    process = start(tmp_path, *slow, driver=DRIVER_OF_SMALL_UNITS)
    deadline = time.monotonic() + 120
    while not list((tmp_path / step).rglob(mark)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert step not in records(tmp_path), "the step finished before it was killed"
    receipts = [path for path in (tmp_path / step).rglob("*.json") if path.name.startswith(("rows-", "shard-", "complete", "rounds-"))]
    parts = [p for r in receipts for p in (r, r.with_suffix(".parquet"), r.with_suffix(".arrow")) if p.is_file()]
    kept = {path: path.read_bytes() for path in parts}
    output = pipeline(tmp_path, *slow, driver=DRIVER_OF_SMALL_UNITS)
    assert verdicts(output)[step] == "run"
    if step == "train":
        assert len([line for line in next(tmp_path.glob("train/*/curves.jsonl")).read_text().splitlines()]) == 60
    else:
        assert {path: path.read_bytes() for path in kept} == kept
    assert step in records(tmp_path)


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_trunk_on_real_ray_vllm_deepspeed_and_mlflow(tmp_path: Path) -> None:
    overrides = [
        "cluster=ray",
        "cluster.tracker=mlflow",
        "stage.regenerate.engine=vllm",
        "stage.cache_targets.engine=vllm",
        "stage.train.precision=bf16",
        "stage.profile_sps.engines=[decoding,vllm]",
    ]
    pipeline(tmp_path, *overrides)
    made = records(tmp_path)
    assert sorted(made) == sorted(STEPS)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        runs = dict(database.execute("select run_uuid, name from runs").fetchall())
        curve = database.execute(
            "select count(*) from metrics where run_uuid = ? and key = 'loss'", (made["train"]["mlflow_run_id"],)
        ).fetchone()
        versions = database.execute("select name, source, run_id from model_versions").fetchall()
    assert {runs[made[step]["mlflow_run_id"]] for step in STEPS} == set(STEPS)
    folder = next(tmp_path.glob("publish/*"))
    assert versions == [("tiny-dspark", str(folder), made["publish"]["mlflow_run_id"])]
    assert set(json.loads(next(tmp_path.glob("profile_sps/*/sps.json")).read_text())["engines"]) == {"decoding", "vllm"}
    assert curve[0] >= 20
    output = pipeline(tmp_path, *overrides)
    assert verdicts(output) == dict.fromkeys(STEPS, "hit")
