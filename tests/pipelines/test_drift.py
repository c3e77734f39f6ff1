"""mode=drift keeps a calibration that holds, finds one that does not, refits it, and refuses rounds that cannot judge it.

Rounds are drawn from a head whose logit z at position k means an acceptance of sigmoid(z / T_k): the truth is known.
"""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark import calibration
from dspark.calibration import Calibration
from dspark.metrics import ece
from dspark.rounds import Round, to_parquet
from dspark.storage import LocalStorage
from pipelines import drift
from pipelines.__main__ import main
from pipelines.config import PROJECT_ROOT, compose
from pipelines.screen import RichScreen
from pipelines.settings import CalibrateStage

TEMPERATURES = (0.5, 1.0, 2.0, 1.5)
K = len(TEMPERATURES)
STAGE = CalibrateStage(num_bins=15, min_rounds=500, num_folds=5, num_resamples=150)


def draw(seed: int, num_requests: int = 150, distortion: float = 1.0, **changes) -> list[Round]:
    """Rounds of requests that differ in how predictable they are; `distortion`: what the head multiplies its logits by."""
    generator, rounds = np.random.default_rng(seed), []
    for request in range(num_requests):
        ease = generator.normal(0.3, 0.8)
        for i in range(20):
            true_K = ease + generator.normal(0.0, 1.0, K)
            is_accepted_K = generator.random(K) < 1.0 / (1.0 + np.exp(-true_K))
            accepted = K if is_accepted_K.all() else int(np.argmin(is_accepted_K))
            proposed = K if generator.random() < 0.95 else int(generator.integers(accepted, K + 1))
            logits = distortion * true_K * TEMPERATURES
            drawn = Round(
                f"{seed}-{request}", ("math", "chat")[request % 2], "live", i, 0.0, 0, 1.0, "greedy", "", "verify_all", 9 + i, 1, (2,) * proposed,
                (1.0,) * proposed, (1.0,) * proposed, tuple(logits[:proposed].tolist()), proposed, accepted, 3, False,
            )  # fmt: skip
            rounds.append(dataclasses.replace(drawn, **changes))
    return rounds


def columns(rounds):
    logits_NK = calibration.pad([r.confidence_logits for r in rounds], K)
    return logits_NK, calibration.outcomes([r.accepted for r in rounds], K, [r.proposed for r in rounds])


def released(folder: Path) -> Path:
    """What calibrate leaves: the true temperatures, and the ECE of test rounds."""
    fitted = Calibration(TEMPERATURES, (0.1,) * K, (0.01,) * K, 900, 15, calibration.GRID)
    logits_NK, outcome_NK = columns(draw(seed=99))
    positions = [{"ece": {"estimate": q.ece}} for q in calibration.quality(fitted.survival(logits_NK), outcome_NK)]
    view = {"methods": {"raw": None, "sts": {"positions": positions}}}
    report = {"schema_version": 2, "served": "t0-greedy", "settings": {"t0-greedy": {"test": {"all": view}}, "t1-greedy": None}}
    folder.mkdir()
    (folder / "calibration.json").write_text(fitted.to_json())
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture
def calibrated(tmp_path: Path) -> drift.Calibrated:
    return drift.read_calibrated(str(released(tmp_path / "calibrated")), K)


def judge(calibrated: drift.Calibrated, rounds: list[Round], tmp_path: Path) -> tuple[dict, Path]:
    place = tmp_path / "new" / "rounds-0000.parquet"
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(to_parquet(rounds))
    report, uri = drift.run(calibrated, drift.read_rounds(str(place)), STAGE, LocalStorage(str(tmp_path / "root")))
    return report, Path(uri)


# --- the verdict ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_drift_of_rounds_as_calibrated_keeps(calibrated: drift.Calibrated, tmp_path: Path, seed: int) -> None:
    report, _ = judge(calibrated, draw(seed, num_requests=(40, 150)[seed % 2]), tmp_path)
    assert (report["verdict"], report["reasons"]) == ("keep", [])


@pytest.mark.parametrize("distortion", [0.4, 2.5])
def test_drift_of_a_distorted_head_recalibrates_and_the_refit_is_better_on_other_rounds(
    calibrated: drift.Calibrated, tmp_path: Path, distortion: float
) -> None:
    report, place = judge(calibrated, draw(1, distortion=distortion), tmp_path)
    assert report["verdict"] == "recalibrate"
    assert len(report["reasons"]) == 2
    assert report["change_by_refit"]["mean"]["high"] < 0
    refit = Calibration.from_json((place / "calibration.json").read_bytes(), K)
    # Few rounds say anything of the deeper positions.
    assert refit.temperatures_K[:2] == pytest.approx([distortion * t for t in TEMPERATURES[:2]], rel=0.35)
    logits_NK, outcome_NK = columns(draw(2, distortion=distortion))
    old, new = ([q.ece for q in calibration.quality(of.survival(logits_NK), outcome_NK)] for of in (calibrated.calibration, refit))
    assert np.mean(new) < 0.5 * np.mean(old)


def test_drift_in_a_way_that_no_temperature_mends_is_found_all_the_same(calibrated: drift.Calibrated, tmp_path: Path) -> None:
    """Rounds in which every first token is rejected half of the time, whatever the head says."""
    generator = np.random.default_rng(0)
    rounds = [r if generator.random() < 0.5 else dataclasses.replace(r, accepted=0) for r in draw(3)]
    report, _ = judge(calibrated, rounds, tmp_path)
    assert report["verdict"] == "recalibrate"
    assert report["reasons"][0].startswith("the ECE is at least")


def test_drift_report_holds_the_ece_of_each_position_and_domain_and_beside_it_the_one_at_calibration(
    calibrated: drift.Calibrated, tmp_path: Path
) -> None:
    rounds = draw(4)
    report, place = judge(calibrated, rounds, tmp_path)
    assert json.loads(json.dumps(report)) == json.loads((place / "report.json").read_text())
    assert sorted(path.name for path in place.iterdir()) == ["calibration.json", "reliability.png", "report.json"]
    assert report["ece_at_calibration"]["position_K"] == calibrated.reference_K
    for domain, found in report["ece_now"].items():
        chosen = [r for r in rounds if domain in ("all", r.domain)]
        logits_NK, outcome_NK = columns(chosen)
        a_NK = calibrated.calibration.survival(logits_NK)
        for k, estimate in enumerate(found["position_K"]):
            is_proposed_N = ~np.isnan(outcome_NK[:, k])
            assert estimate["estimate"] == pytest.approx(ece(a_NK[is_proposed_N, k], outcome_NK[is_proposed_N, k]))
            assert estimate["low"] <= estimate["estimate"]
        assert found["mean"]["estimate"] == pytest.approx(np.mean([e["estimate"] for e in found["position_K"]]))
        assert (found["num_rounds"], found["num_requests"]) == (len(chosen), len({r.request_id for r in chosen}))


# --- what is read -----------------------------------------------------------------------------------------------------------


def test_rounds_are_read_of_a_file_a_folder_and_the_beginning_of_names(tmp_path: Path) -> None:
    for name, seed in (("rounds-t0-0000", 1), ("rounds-t0-0001", 2), ("rounds-t1-0000", 3)):
        (tmp_path / f"{name}.parquet").write_bytes(to_parquet(draw(seed, num_requests=1)))
    (tmp_path / "rounds-t0-0000.json").write_text("{}")
    for uri, seeds in ((tmp_path, "123"), (tmp_path / "rounds-t0", "12"), (tmp_path / "rounds-t1-0000.parquet", "3")):
        found = drift.read_rounds(str(uri))
        assert [r.request_id[0] for r in found.rounds[::20]] == list(seeds)
        assert len(found.files) == len(seeds)


@pytest.mark.parametrize("content", [None, b"no parquet"])
def test_rounds_that_are_none_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content:
        (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"rounds: .*(no Parquet file with a round|a\.parquet)"):
        drift.read_rounds(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 1.0}, "decoded as t1-greedy, the calibration holds for t0-greedy alone. Fix:"),
        ({"draft_mode": "probabilistic"}, "decoded as t0-probabilistic, the calibration holds for t0-greedy alone"),
        ({"top_p": 0.9}, "decoded as t0-greedy-top_p0.9, the calibration holds for t0-greedy alone"),
        ({"policy": "fixed_2"}, "decoded as t0-greedy-fixed_2, the calibration holds for t0-greedy alone"),
        ({"variant": "no_markov"}, "decoded as t0-greedy-no_markov, the calibration"),
        ({"policy": "every_position"}, "a block of every position, which no decoding visits. Fix: rounds="),
        ({"confidence_logits": ()}, "0 confidence logits of . drafted tokens. Fix: rounds of a drafter with a confidence head"),
        ({"proposed": 2, "accepted": 1, "confidence_logits": (0.1, 0.1)}, "blocks of up to 2 tokens, the calibration is of 4"),
        ({"proposed": 5, "confidence_logits": (0.1,) * 5}, "blocks of up to 5 tokens, the calibration is of 4"),
    ],
    ids=["temperature", "draft mode", "filter", "policy", "ablation", "positions", "no head", "shorter", "longer"],
)  # fmt: skip
def test_drift_by_rounds_of_something_else_is_refused(calibrated: drift.Calibrated, tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(calibrated, draw(5, num_requests=30, **change), tmp_path)
    assert not (tmp_path / "root" / "drift").exists()


@pytest.mark.parametrize(("num_requests", "message"), [(20, "at least 500 "), (9, "of 9 requests")])
def test_drift_by_too_few_rounds_is_refused(calibrated: drift.Calibrated, tmp_path: Path, num_requests: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge(calibrated, draw(6, num_requests), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mode=drift"], "rounds: None: mode=drift judges new rounds. Fix: rounds="),
        (["rounds=here"], "rounds: 'here': only mode=drift reads it. Fix: mode=drift rounds=here"),
        (["release=there"], "release: 'there': only mode=drift reads it"),
    ],
)
def test_settings_of_drift_alone_are_refused_elsewhere(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        compose(overrides)


# --- the command line --------------------------------------------------------------------------------------------------------


def test_drift_from_the_command_line_says_its_verdict_by_its_exit_status(tmp_path: Path) -> None:
    folder, root = released(tmp_path / "release"), tmp_path / "root"
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({"calibration": report, "evaluation": {}}))  # as a release has it
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for distortion, status in ((1.0, 0), (2.5, 1)):
        rounds = tmp_path / f"{distortion}.parquet"
        rounds.write_bytes(to_parquet(draw(7, distortion=distortion)))
        command = [sys.executable, "-m", "pipelines", "experiment=tiny", "mode=drift", f"rounds={rounds}", f"release={folder}"]
        done = subprocess.run([*command, f"cluster.root={root}"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        assert f"verdict: {('keep', 'recalibrate')[status]}" in done.stdout
        assert re.search(r"^math +1,500 +75 +0\.\d{3} \[0\.\d{3}, 0\.\d{3}\]", done.stdout, re.MULTILINE)
    assert len(list(root.glob("drift/*/calibration.json"))) == 2
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_drift_without_a_calibration_is_refused(tmp_path: Path) -> None:
    settings, plain = compose(["experiment=tiny", "mode=drift", "rounds=here", f"cluster.root={tmp_path}"])
    with pytest.raises(ValueError, match=r"holds no finished calibration of this config\. Fix: run the pipeline first, or release="):
        main(settings, plain, RichScreen())
    with pytest.raises(ValueError, match=r"release: .* holds no calibration\.json with a report\.json"):
        drift.read_calibrated(str(tmp_path), None)


def test_drift_of_a_calibration_with_a_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    folder = released(tmp_path / "old")
    (folder / "report.json").write_text(json.dumps({"schema_version": 1}))
    with pytest.raises(ValueError, match=r"release: .*old: its calibration report has schema version 1, 2 is read here\. Fix: "):
        drift.read_calibrated(str(folder), K)
