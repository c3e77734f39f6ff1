"""The step calibrate on rounds whose true acceptance is known, and what it reports of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.baselines import METHODS, cross_fitted, fit_all
from dspark.calibration import Calibration, outcomes, pad, quality, sigmoid
from dspark.metrics import METRICS, estimates, resample
from dspark.rounds import Round, to_parquet
from dspark.storage import LocalStorage
from pipelines import artifacts
from pipelines.calibration import analyse, figures, headline, make_report
from pipelines.dag import Resources
from pipelines.flow import CalibrateConfig
from pipelines.runner import LocalWork, Progress
from pipelines.settings import CalibrateStage, DecodingSetting
from pipelines.stages import calibrate

K = 3
STAGE = CalibrateStage(num_bins=15, min_rounds=100, num_folds=4, num_resamples=40)
GREEDY, DRAWN = DecodingSetting(0.0, "greedy", None), DecodingSetting(1.0, "probabilistic", None)


def make_rounds(split: str, seed: int, scale: float, setting: DecodingSetting = GREEDY, num_prompts: int = 12) -> list[Round]:
    """40 of each prompt, with logits `scale` times those of the true acceptance; prompt 0 is the only one of its domain."""
    generator, made = np.random.default_rng(seed), []
    for prompt in range(num_prompts):
        domain = "chat" if prompt == 0 else "math" if prompt % 2 else "code"
        for i in range(40):
            true_K = generator.normal(0.8, 1.2, K)
            accepted = int(np.cumprod(generator.random(K) < sigmoid(true_K)).sum())
            is_cut = accepted > 0 and generator.random() < 0.1
            proposed = accepted if is_cut else K
            row = 0.0, (7,) * proposed, tuple((true_K * scale).tolist())[:proposed], (0.5,) * proposed
            made.append(
                Round(
                    f"{split}/p{prompt}", domain, split, i, setting.temperature, setting.top_k, setting.top_p, setting.draft_mode, "", "verify_all", 9, 5,
                    row[1], row[3], row[3], row[2], proposed, accepted, None if is_cut else 8, is_cut,
                )
            )  # fmt: skip
    return made


FIT_ON, TEST = make_rounds("calibrate", 0, 2.0), make_rounds("test", 1, 2.0)


def columns(rounds: list[Round]) -> tuple[Any, Any, Any]:
    return pad([r.confidence_logits for r in rounds], K), np.array([r.accepted for r in rounds]), np.array([r.proposed for r in rounds])


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return analyse(FIT_ON, TEST, K, STAGE)[1]


def close(estimate: Any) -> Any:
    return {name: None if value is None else pytest.approx(value, abs=1e-12) for name, value in vars(estimate).items()}


@pytest.mark.parametrize("domain", ["all", "math", "chat"])
def test_view_of_a_domain_is_that_of_its_test_rounds_under_the_fit_on_the_others(found: dict[str, Any], domain: str) -> None:
    methods = fit_all(*columns(FIT_ON), min_rounds=100)
    rounds = [r for r in TEST if domain in ("all", r.domain)]
    logits_NK, accepted_N, proposed_N = columns(rounds)
    outcome_NK, prompts = outcomes(accepted_N, K, proposed_N), [r.request_id for r in rounds]
    view = found["test"][domain]
    assert (view["num_rounds"], view["num_prompts"]) == (len(rounds), {"all": 12, "math": 6, "chat": 1}[domain])
    assert tuple(view["methods"]) == METHODS
    values: dict[tuple[str, str], Any] = {}
    for name, method in view["methods"].items():
        survival_NK = methods[name].survival(logits_NK)
        wanted = quality(survival_NK, outcome_NK)
        for metric in METRICS:
            values[name, metric] = resample(metric, survival_NK, outcome_NK, prompts, num_resamples=0 if domain == "chat" else 40)
            of = estimates(values[name, metric], is_ece=metric.startswith("ece"))
            assert method["mean"][metric] == close(of.mean)
            assert [position[metric] for position in method["positions"]] == [close(estimate) for estimate in of.position_K]
            values_K = [position[metric]["estimate"] for position in method["positions"]]
            assert values_K == pytest.approx([getattr(q, metric) for q in wanted], abs=1e-12)
            assert (method["mean"][metric]["low"] is None) == (domain == "chat")
        assert [position["ece_floor"] for position in method["positions"]] == [q.ece_floor for q in wanted]
        assert method["mean"]["ece_floor"] == pytest.approx(sum(q.ece_floor or 0.0 for q in wanted) / K)
        assert [position["num_survivors"] for position in method["positions"]] == [int((accepted_N >= k).sum()) for k in (1, 2, 3)]
    for metric, name in (("ece", "raw"), ("brier", "platt")):
        wanted_change = estimates(values["sts", metric] - values[name, metric])
        assert view["change"][metric][name]["mean"] == close(wanted_change.mean)
        assert view["change"][metric][name]["position_K"] == tuple(close(estimate) for estimate in wanted_change.position_K)


def test_cross_fitted_view_is_of_every_round_and_no_prompt_is_measured_by_a_fit_on_itself(found: dict[str, Any]) -> None:
    pooled = [*FIT_ON, *TEST]
    prompts = [r.request_id for r in pooled]
    crossed = cross_fitted(*columns(pooled), np.array(prompts), num_folds=4, min_rounds=100)
    _, accepted_N, proposed_N = columns(pooled)
    view = found["cross_fitted"]
    assert (view["num_rounds"], view["num_prompts"], found["num_folds"]) == (960, 24, 4)
    for name in METHODS:
        wanted = [q.ece for q in quality(crossed[name], outcomes(accepted_N, K, proposed_N))]
        assert [position["ece"]["estimate"] for position in view["methods"][name]["positions"]] == pytest.approx(wanted, abs=1e-12)


def test_report_of_an_overconfident_head_says_that_scaling_helps_and_what_was_fitted(found: dict[str, Any]) -> None:
    assert all(t > 1.0 for t in found["temperatures"])
    assert found["fits"]["global"]["temperature"] == pytest.approx(2.0, rel=0.3)
    assert found["fits"]["platt"]["slope"] == pytest.approx([0.5] * K, abs=0.15)
    assert found["fallback_positions"] == dict.fromkeys(METHODS, ())
    view = found["test"]["all"]
    assert view["change"]["ece"]["raw"]["mean"]["high"] < 0.0
    raw, sts = (view["methods"][name]["mean"] for name in ("raw", "sts"))
    assert sts["ece"]["estimate"] < 1.5 * sts["ece_floor"] < raw["ece"]["estimate"]
    metrics = headline(make_report({"t0-greedy": found}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "draft_mode": "greedy"}))
    assert list(metrics)[:4] == ["ece_raw", "ece_sts", "ece_change_low", "ece_change_high"]
    assert metrics["ece_sts"] == sts["ece"]["estimate"]
    assert metrics["ece_change_high"] == view["change"]["ece"]["raw"]["mean"]["high"]
    assert metrics["position_2/ece_raw"] == view["methods"]["raw"]["positions"][1]["ece"]["estimate"]
    assert metrics["fallback_positions"] == metrics["positions_worse"] == 0.0


def test_report_names_the_positions_where_sts_is_worse() -> None:
    """The fit is on heads that are overconfident, the test on one that is right: there every temperature above 1 does harm."""
    found = analyse(make_rounds("calibrate", 4, 4.0), make_rounds("test", 5, 1.0, num_prompts=60), K, STAGE)[1]
    changes = found["test"]["all"]["change"]["ece"]["raw"]["position_K"]
    assert found["positions_worse"] == [k for k in (1, 2, 3) if changes[k - 1]["low"] > 0.0]
    assert 1 in found["positions_worse"]
    assert headline(make_report({"t0-greedy": found}, {}))["positions_worse"] == len(found["positions_worse"])


def test_report_of_too_few_rounds_names_the_positions_that_are_not_fitted() -> None:
    num_rounds_K = [sum(r.proposed >= k for r in FIT_ON) for k in (1, 2, 3)]
    assert num_rounds_K[1] > num_rounds_K[2]
    fitted, found = analyse(FIT_ON, TEST, K, replace(STAGE, min_rounds=num_rounds_K[2] + 1, num_folds=99))
    assert fitted.fallback_positions == (3,) == found["fallback_positions"]["sts"] == found["fallback_positions"]["platt"]
    assert found["num_folds"] == 24  # a prompt a fold


def test_step_calibrates_the_served_setting_and_reports_every_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, files = LocalStorage(str(tmp_path / "rounds")), {}
    for number, (setting, scale) in enumerate(((DRAWN, 2.0), (GREEDY, 0.5))):
        for split, seed in (("calibrate", 2), ("test", 3)):
            rounds = make_rounds(split, seed, scale, setting)
            for part, members in enumerate((rounds[:200], rounds[200:])):
                name = f"rounds-{number}-{split}-{part:04d}.parquet"
                store.put(name, to_parquet(members))
                files[name] = ""
    out = LocalStorage(str(tmp_path / "out"))
    config = CalibrateConfig(STAGE, K)
    reported: list[Progress] = []
    monkeypatch.setattr(calibrate, "figures", lambda report: {"x.png": b"png"})
    outcome = calibrate.run(
        config, {"rounds": artifacts.Rounds(store.uri, {"files": files})}, out, LocalWork(Resources(""), reported.append)
    )
    report = json.loads(out.read("report.json"))
    assert list(report["settings"]) == ["t1-probabilistic", "t0-greedy"]
    assert report["served"] == "t1-probabilistic"
    assert report["setting"] == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "draft_mode": "probabilistic"}
    served, other = report["settings"].values()
    assert min(served["temperatures"]) > 1.0 > max(other["temperatures"])
    assert list(Calibration.from_json(out.read("calibration.json"), K).temperatures_K) == served["temperatures"]
    assert served["num_rounds"] == {"calibrate": 480, "test": 480}
    assert set(outcome.files) == {"calibration.json", "report.json", "x.png"}
    assert outcome.metrics["temperature_1"] == served["temperatures"][0]
    assert [(p.done, p.total) for p in reported] == [(0, 2), (1, 2), (2, 2)]


def test_figures_show_the_methods_and_the_reliability_of_every_setting(found: dict[str, Any]) -> None:
    report = make_report(
        {"t0-greedy": found, "t1-probabilistic": found}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "draft_mode": "greedy"}
    )
    shown = figures(report)
    assert sorted(shown) == ["methods.png", "reliability-t0-greedy.png", "reliability-t1-probabilistic.png"]
    assert all(data.startswith(b"\x89PNG") for data in shown.values())
