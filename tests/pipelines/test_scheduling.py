"""The schedule's report on replays whose outcome is known."""

import numpy as np
import pytest

from dspark.simulate import ReplayConfig, ReplayText, replay
from dspark.step_cost import StepCost
from pipelines.scheduling import CALIBRATED, FIGURES, SERVED, figures, headline, make_report

CONFIG = ReplayConfig(
    thresholds=(0.5,),
    num_steps=80,
    num_warmup_steps=20,
    num_rounds=400,
    seed=0,
    lag_rounds=2,
    new_requests="mean",
    skips_by="outcomes",
    window_rounds=32,
    probe_share=0.005,
)
# Verification costs next to nothing up to 16 tokens and much beyond; a draft pass is cheap with few requests.
COST = StepCost((1, 8, 16), (0.001, 0.001, 0.02), (1, 8, 16, 80), (0.01, 0.0101, 0.013, 0.1))
CONCURRENCIES = (1, 8, 16)


def _texts(seed: int, sharpness: float) -> list[ReplayText]:
    """Confidences are true with sharpness 1 and overconfident below it."""
    generator, texts = np.random.default_rng(seed), []
    for num_anchors in generator.integers(20, 60, 12):
        true = generator.uniform(0.2, 1.0, (num_anchors, 4))
        is_proposed = np.arange(4) < np.arange(num_anchors, 0, -1)[:, None]
        is_accepted = np.logical_and.accumulate((generator.random(true.shape) < true) & is_proposed, axis=1)
        texts.append(ReplayText(np.where(is_proposed, true**sharpness, 0.0), is_accepted.sum(axis=1), 10))
    return texts


@pytest.fixture(scope="module")
def report() -> dict:
    texts = {"raw": _texts(1, 0.1), CALIBRATED: _texts(1, 1.0)}
    texts["oracle"] = [text.with_true_confidences() for text in texts["raw"]]
    done: list[int] = []
    found = make_report(texts, lambda num_requests: COST, CONCURRENCIES, CONFIG, 20, done.append)
    assert done == [1, 2, 3]
    return found


def test_report_recommends_the_fastest_fixed_length_of_each_concurrency(report: dict) -> None:
    for row in report["static"]:
        names = ["none", "fixed_1", "fixed_2", "fixed_3", "fixed_4"]
        found = [replay(_texts(1, 1.0), name, COST, row["num_requests"], CONFIG).throughput_tokens_per_second for name in names]
        assert row["throughput_tokens_per_second_by_k"] == found
        assert row["recommended_k"] == int(np.argmax(found))
        assert row["over_none"] == pytest.approx(max(found) / found[0], rel=1e-12)
    assert [row["recommended_k"] for row in report["static"]] == [4, 1, 0]


def test_report_says_that_true_confidences_pay_and_how_sure_it_is(report: dict) -> None:
    rows = {(r["policy"], r["confidences"], r["num_requests"]): r for r in report["calibration"]}
    gain = rows["scheduler_async", CALIBRATED, 16]["over_raw"]
    assert 1.0 < gain["low"] <= gain["estimate"] <= gain["high"] < 2.0
    assert rows["scheduler_async", "raw", 16]["over_raw"] == {"estimate": 1.0, "low": 1.0, "high": 1.0}
    for r in (r for r in rows.values() if r["policy"] != SERVED):
        low, high = r["interval"]
        assert low < high
        assert r["throughput_tokens_per_second"] == pytest.approx((low + high) / 2, rel=0.1)


def test_report_checks_are_ratios_of_its_rows(report: dict) -> None:
    found = {(r["policy"], r["confidences"], r["num_requests"]): r["throughput_tokens_per_second"] for r in report["rows"]}
    checks = {(c["name"], c["num_requests"]): c for c in report["checks"]}
    for num_requests in CONCURRENCIES:
        check = checks[f"{SERVED}_over_static", num_requests]
        static = ["none", *(f"fixed_{k}" for k in range(1, 5)), "verify_all", "threshold_0.5"]
        best = max(found[name, CALIBRATED if "threshold" in name else None, num_requests] for name in static)
        assert check["value"] == pytest.approx(found[SERVED, CALIBRATED, num_requests] / best, rel=1e-12)
        assert check["is_ok"] == (check["value"] >= check["bound"] == 0.99)
        drafting = max(found[name, CALIBRATED if "threshold" in name else None, num_requests] for name in static[1:])
        plain = checks["scheduler_async_over_static", num_requests]["value"]
        assert plain == pytest.approx(found["scheduler_async", CALIBRATED, num_requests] / drafting, rel=1e-12)
        gap = next(r["gap"] for r in report["oracle"] if r["num_requests"] == num_requests)
        assert gap == pytest.approx(found["oracle", None, num_requests] / found[SERVED, CALIBRATED, num_requests] - 1, rel=1e-12)
    assert checks[f"{SERVED}_over_static", 16]["is_ok"]
    assert headline(report)["checks_failed"] == sum(not c["is_ok"] for c in report["checks"])


def test_report_shows_what_a_stair_costs_the_early_stop(report: dict) -> None:
    rows = {(r["num_requests"], r["table"]): r for r in report["tables"]}
    # Padded steps of 9 to 16 tokens cost alike: the first token alone does not pay.
    assert rows[8, "padded"]["loss"] > 0.1 > rows[8, "measured"]["loss"]
    for num_requests in CONCURRENCIES:
        linear = rows[num_requests, "linear"]
        assert linear["is_unimodal"]
        assert abs(linear["loss"]) < 0.02
        found = replay(_texts(1, 1.0), SERVED, COST.linear(), num_requests, CONFIG)
        assert linear["budget"] == found.mean_budget_tokens
    checks = {(c["name"], c["num_requests"]): c for c in report["checks"]}
    assert all(checks["scheduler_over_static_linear", num_requests]["is_ok"] for num_requests in CONCURRENCIES)
    assert all(checks["budget_rise_linear", num_requests]["is_ok"] for num_requests in (8, 16))


def test_report_has_its_figures(report: dict) -> None:
    drawn = figures(report)
    assert tuple(drawn) == FIGURES
    assert all(data.startswith(b"\x89PNG") for data in drawn.values())
    assert drawn == figures(report)
    short = {**report, "rows": [r for r in report["rows"] if r["policy"] != "fixed_3"]}  # blocks of 1 or 2
    assert tuple(figures(short)) == FIGURES
