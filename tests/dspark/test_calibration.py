"""Sequential Temperature Scaling and the metrics of predicted survivals: the cases, plain loops, and scikit-learn."""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.optimize
import sklearn.metrics

from dspark.calibration import GRID, Calibration, fit, outcomes, pad, quality, sigmoid, survival
from dspark.metrics import METRICS, auroc, brier, ece, ece_floor, ece_mass, estimates, reliability, resample

# --- plain loops ------------------------------------------------------------------------------------------------------


def _loop_ece(probabilities, labels, num_bins=15):
    if not probabilities:
        return None
    bins = [[] for _ in range(num_bins)]
    for p, y in zip(probabilities, labels, strict=True):
        bins[min(int(p * num_bins), num_bins - 1)].append((p, y))
    parts = [len(b) / len(probabilities) * abs(sum(p for p, _ in b) / len(b) - sum(y for _, y in b) / len(b)) for b in bins if b]
    return sum(parts)


def _loop_brier(probabilities, labels):
    return sum((p - y) ** 2 for p, y in zip(probabilities, labels, strict=True)) / len(labels) if labels else None


def _loop_auroc(probabilities, labels):
    positive, negative = ([p for p, y in zip(probabilities, labels, strict=True) if y == label] for label in (1, 0))
    if not positive or not negative:
        return None
    return sum((p > q) + 0.5 * (p == q) for p in positive for q in negative) / (len(positive) * len(negative))


def _mass_bins(probabilities, num_bins=15):
    """The bin of each from its rank; equal ones all have that of the last of them."""
    return [(sum(q <= p for q in probabilities) - 1) * num_bins // len(probabilities) for p in probabilities]


def _loop_ece_of_bins(bins, probabilities, labels):
    gaps = [abs(sum(p - y for b, p, y in zip(bins, probabilities, labels, strict=True) if b == wanted)) for wanted in set(bins)]
    return sum(gaps) / len(labels) if labels else None


def _loop_ece_mass(probabilities, labels):
    return _loop_ece_of_bins(_mass_bins(probabilities), probabilities, labels)


LOOPS = {"ece": _loop_ece, "ece_mass": _loop_ece_mass, "brier": _loop_brier, "auroc": _loop_auroc}


def _loop_fit(logits, accepted, proposed, grid):
    """(temperatures, ECE before, ECE after, every ECE of the grid) by the definition."""

    def c(z, temperature):
        return 1.0 / (1.0 + math.exp(-z / temperature))

    temperatures, before, after, landscape = [], [], [], []
    for k in range(1, len(logits[0]) + 1):
        rows = [n for n in range(len(logits)) if proposed[n] >= k]
        labels = [1 if accepted[n] >= k else 0 for n in rows]

        def value(chosen, rows=rows, labels=labels):
            return _loop_ece([math.prod(c(logits[n][i], t) for i, t in enumerate(chosen)) for n in rows], labels)

        values = {t: value([*temperatures, t]) for t in grid}
        tied = [t for t in grid if values[t] <= min(values.values()) + 1e-12]
        best = min(tied, key=lambda t: (round(abs(math.log(t)), 9), t))
        before.append(value([1.0] * k))
        after.append(values[best])
        landscape.append(values)
        temperatures.append(best)
    return temperatures, before, after, landscape


def _rounds(seed, num_rounds=60, block_size=4, scale=1.7, is_coarse=False, has_cuts=True):
    """Rounds of an overconfident head; a coarse one has few distinct logits, 0 among them, so that grid values tie."""
    generator = np.random.default_rng(seed)
    true_NK = generator.normal(0.8, 1.2, (num_rounds, block_size))
    logits_NK = np.round(true_NK) if is_coarse else true_NK
    is_kept_NK = generator.random((num_rounds, block_size)) < sigmoid(logits_NK)
    accepted_N = np.cumprod(is_kept_NK, axis=1).sum(1)
    proposed_N = np.full(num_rounds, block_size)
    if has_cuts:  # at a stop token that was accepted
        is_cut_N = (generator.random(num_rounds) < 0.3) & (accepted_N > 0)
        proposed_N = np.where(is_cut_N, accepted_N, block_size)
    return logits_NK * scale, accepted_N, proposed_N


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_of_a_case_have_its_values(calibration_metrics_case):
    columns = calibration_metrics_case["probabilities"], calibration_metrics_case["outcomes"]
    expected, num_bins = calibration_metrics_case["expected"], calibration_metrics_case["bins"]
    for name, value in (("ece", ece(*columns, num_bins)), ("brier", brier(*columns)), ("auroc", auroc(*columns))):
        assert value == (None if expected[name] is None else pytest.approx(expected[name], abs=1e-10)), name
    found = [dataclasses.asdict(b) for b in reliability(*columns, num_bins)]
    assert found == [pytest.approx(b, abs=1e-10) for b in expected["occupied_bins"]]


@pytest.mark.parametrize("seed", range(4))
def test_metrics_of_random_predictions_equal_scikit_learn(seed):
    generator = np.random.default_rng(seed)
    probability_N = generator.random(300).round(1 + seed % 2)  # many ties
    outcome_N = (generator.random(300) < probability_N).astype(int)
    assert auroc(probability_N, outcome_N) == pytest.approx(sklearn.metrics.roc_auc_score(outcome_N, probability_N), abs=1e-12)
    assert brier(probability_N, outcome_N) == pytest.approx(sklearn.metrics.brier_score_loss(outcome_N, probability_N), abs=1e-12)


def test_metrics_of_no_predictions_are_none():
    assert (ece([], []), ece_mass([], []), brier([], []), auroc([], []), ece_floor([]), reliability([], [])) == (*[None] * 5, [])


@pytest.mark.parametrize("digits", [1, 2, 12])
def test_ece_of_equal_mass_bins_equals_the_loop(digits):
    generator = np.random.default_rng(digits)
    for num_predictions in (1, 7, 15, 200):
        probability_N = generator.random(num_predictions).round(digits)
        outcome_N = (generator.random(num_predictions) < 0.3).astype(int)
        wanted = _loop_ece_mass(probability_N.tolist(), outcome_N.tolist())
        assert ece_mass(probability_N, outcome_N) == pytest.approx(wanted, abs=1e-12)


def test_ece_of_equal_mass_bins_sees_what_one_bin_of_equal_width_hides():
    """Survivals of 0.01 and 0.05 that are really 0.05 and 0.01: their mean is right."""
    probability_N = np.repeat([0.01, 0.05], 100)
    outcome_N = np.concatenate([np.arange(100) < 5, np.arange(100) < 1]).astype(float)
    assert ece(probability_N, outcome_N) == pytest.approx(0.0, abs=1e-12)
    assert ece_mass(probability_N, outcome_N) == pytest.approx(0.04)


@pytest.mark.parametrize(("num_rounds", "scale"), [(30, 1.0), (500, 1.0), (8000, 1.0), (500, 0.03)])
def test_ece_floor_is_what_true_predictions_come_to(num_rounds, scale):
    generator = np.random.default_rng(0)
    probability_N = generator.random(num_rounds) * scale
    drawn = [ece(probability_N, (generator.random(num_rounds) < probability_N).astype(float)) for _ in range(400)]
    assert ece_floor(probability_N) == pytest.approx(np.mean(drawn), rel=0.06)


def test_ece_floor_of_rare_survivors_is_not_above_what_they_can_come_to():
    """One bin of n predictions p: the gap is at most that of 'none survives' and of 'one does', about 2 n p."""
    assert ece_floor([1e-4] * 10) == pytest.approx(2e-4, rel=1e-3)
    assert ece_floor([0.0, 1.0]) == 0.0


def test_ece_of_logits_is_refused():
    with pytest.raises(ValueError, match=r"-1.0 .. 2.5 leaves \[0, 1\].*not confidence logits"):
        ece([2.5, -1.0], [1, 0])


def test_quality_of_cut_rounds_counts_each_position_on_its_own_rounds():
    logits_NK, accepted_N, proposed_N = _rounds(0)
    survival_NK, outcome_NK = survival(logits_NK), outcomes(accepted_N, 4, proposed_N)
    for k, found in enumerate(quality(survival_NK, outcome_NK)):
        rows = [n for n in range(len(proposed_N)) if proposed_N[n] >= k + 1]
        columns = [float(survival_NK[n, k]) for n in rows], [int(accepted_N[n] >= k + 1) for n in rows]
        assert (found.num_rounds, found.num_survivors) == (len(rows), sum(columns[1]))
        assert [getattr(found, name) for name in METRICS] == pytest.approx([loop(*columns) for loop in LOOPS.values()], abs=1e-12)
        assert sum(b.count for b in found.reliability) == len(rows)


# --- the fit ----------------------------------------------------------------------------------------------------------


def test_fit_of_a_case_has_its_temperatures(sts_case):
    points = sts_case["grid"]["points"]
    low, high = math.log10(sts_case["grid"]["start"]), math.log10(sts_case["grid"]["stop"])
    assert pytest.approx([10.0 ** (low + (high - low) * i / (points - 1)) for i in range(points)], rel=1e-12) == list(GRID)
    found, expected = fit(sts_case["logits"], sts_case["accepted_lengths"], num_bins=sts_case["bins"]), sts_case["expected"]
    assert list(found.temperatures_K) == pytest.approx(expected["temperatures"], rel=1e-10)
    assert list(found.ece_before_K) == pytest.approx(expected["ece_before"], abs=1e-10)
    assert list(found.ece_after_K) == pytest.approx(expected["ece_after"], abs=1e-10)
    assert found.num_rounds == len(sts_case["logits"])


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_fit_of_random_rounds_equals_the_loop(seed, is_coarse):
    logits_NK, accepted_N, proposed_N = _rounds(seed, is_coarse=is_coarse, num_rounds=8 if is_coarse else 60)
    proposed_N[0] = 4  # some round reaches the last position
    found = fit(logits_NK, accepted_N, proposed_N=proposed_N)
    temperatures, before, after, landscape = _loop_fit(logits_NK.tolist(), accepted_N.tolist(), proposed_N.tolist(), GRID)
    assert list(found.temperatures_K) == temperatures
    assert list(found.ece_before_K) == pytest.approx(before, abs=1e-12)
    assert list(found.ece_after_K) == pytest.approx(after, abs=1e-12)
    for values, kept in zip(landscape, after, strict=True):
        assert kept <= values[1.0] + 1e-12  # never worse than to leave this position as it is


def test_fit_of_logits_zero_ties_everywhere_and_keeps_one():
    assert fit(np.zeros((5, 3)), [0, 1, 2, 3, 3]).temperatures_K == (1.0, 1.0, 1.0)


def test_fit_of_tied_reciprocals_takes_the_lower_one():
    """Logits 3 and -b, one bin: the ECE is |sigmoid(3/T) - sigmoid(b/T)| / 2, and b makes those of T = 1/2 and 2 equal."""

    def gap(b, temperature):
        return float(sigmoid(np.array(3.0 / temperature)) - sigmoid(np.array(b / temperature)))

    b = scipy.optimize.brentq(lambda b: gap(b, 0.5) - gap(b, 2.0), 0.1, 2.9, xtol=1e-15)
    assert abs(gap(b, 0.5) - gap(b, 2.0)) < 1e-12
    assert gap(b, 1.0) > gap(b, 2.0) + 0.01
    for grid in ((0.5, 1.0, 2.0), (2.0, 1.0, 0.5)):
        assert fit([[3.0], [-b]], [1, 0], grid=grid, num_bins=1).temperatures_K == (0.5,)


def test_fit_of_calibrated_rounds_stays_near_one():
    logits_NK, accepted_N, _ = _rounds(1, num_rounds=100_000, block_size=3, scale=1.0, has_cuts=False)
    found = fit(logits_NK, accepted_N)
    assert all(abs(math.log10(t)) <= 0.05 + 1e-9 for t in found.temperatures_K)  # one step of the grid
    assert max(found.ece_before_K) < 0.01


def test_fit_of_overconfident_rounds_finds_the_scale_and_helps_on_other_rounds():
    logits_NK, accepted_N, _ = _rounds(2, num_rounds=50_000, block_size=3, scale=2.0, has_cuts=False)
    found = fit(logits_NK[:25_000], accepted_N[:25_000])
    assert all(abs(math.log10(t / 2.0)) <= 0.051 for t in found.temperatures_K)
    outcome_NK = outcomes(accepted_N[25_000:], 3)
    before, after = (quality(f(logits_NK[25_000:]), outcome_NK) for f in (survival, found.survival))
    assert all(b.ece > 0.03 and a.ece < 0.012 for b, a in zip(before, after, strict=True))


def test_fit_of_more_rounds_than_a_block_equals_one_block(monkeypatch):
    logits_NK, accepted_N, proposed_N = _rounds(4, num_rounds=1000)
    found = fit(logits_NK, accepted_N, proposed_N=proposed_N)
    monkeypatch.setattr("dspark.calibration.BLOCK_ROUNDS", 64)
    blocked = fit(logits_NK, accepted_N, proposed_N=proposed_N)
    assert blocked.temperatures_K == found.temperatures_K
    assert blocked.ece_after_K == pytest.approx(found.ece_after_K, abs=1e-12)


def test_fit_of_too_few_rounds_keeps_that_position_and_says_so():
    logits_NK, accepted_N, proposed_N = _rounds(5, num_rounds=400, scale=3.0, has_cuts=False)
    proposed_N = np.where(np.arange(400) < 99, 4, 2)
    accepted_N = np.minimum(accepted_N, proposed_N)
    found = fit(logits_NK, accepted_N, proposed_N=proposed_N, min_rounds=100)
    assert found.fallback_positions == (3, 4)
    assert found.temperatures_K[2:] == (1.0, 1.0) != found.temperatures_K[:2]
    whole = fit(logits_NK, accepted_N, proposed_N=proposed_N, min_rounds=99)
    assert whole.fallback_positions == ()
    assert whole.temperatures_K[:2] == found.temperatures_K[:2]
    assert whole.temperatures_K[2] != 1.0
    outcome_NK = outcomes(accepted_N, 4, proposed_N)
    assert found.ece_after_K == pytest.approx([q.ece for q in quality(found.survival(logits_NK), outcome_NK)], abs=1e-12)


def test_fit_of_a_position_that_was_never_proposed_keeps_it():
    found = fit(GOOD, [1, 1, 0], proposed_N=[1, 1, 1])
    assert (found.fallback_positions, found.temperatures_K[1], found.ece_before_K[1], found.ece_after_K[1]) == ((2,), 1.0, 0.0, 0.0)
    assert Calibration.from_json(found.to_json(), 2) == found


def test_fit_of_cut_rounds_does_not_read_behind_the_cut():
    logits_NK, accepted_N, proposed_N = _rounds(3)
    cut_NK = pad([row[:n] for row, n in zip(logits_NK.tolist(), proposed_N, strict=True)], 4)
    assert np.isnan(cut_NK).any()
    found = fit(cut_NK, accepted_N, proposed_N=proposed_N)
    assert found == fit(logits_NK, accepted_N, proposed_N=proposed_N)
    assert found != fit(logits_NK, accepted_N)  # there they would count as rejections
    assert np.array_equal(np.isnan(found.survival(cut_NK)), np.isnan(cut_NK))


NAN, GOOD = math.nan, [[1.0, 2.0], [0.5, 1.0], [0.0, -1.0]]


@pytest.mark.parametrize(
    ("logits", "accepted", "settings", "message"),
    [
        ([[1.0, NAN], *GOOD[1:]], [1, 0, 0], {}, r"logits\[0\]\[1\]: nan is not finite"),
        ([*GOOD[:2], [-math.inf, 0.0]], [1, 0, 0], {}, r"logits\[2\]\[0\]: -inf is not finite"),
        (GOOD, [1, 3, 0], {}, r"accepted\[1\]: 3: an integer in 0 .. 2"),
        (GOOD, [1, -1, 0], {}, r"accepted\[1\]: -1: an integer in 0 .. 2"),
        (GOOD, [1, 0.5, 0], {}, r"accepted\[1\]: 0.5: an integer in 0 .. 2"),
        (GOOD, [2, 1, 0], {"proposed_N": [1, 2, 2]}, r"accepted\[0\]: 2: an integer in 0 .. 1"),
        (GOOD, [2, 1, 0], {"proposed_N": [2, 3, 2]}, r"proposed\[1\]: 3: an integer in 0 .. 2"),
        (GOOD, [2, 1, 0], {"proposed_N": [2, 2]}, r"accepted, proposed: shapes \(3,\), \(2,\)"),
        (GOOD, [1, 0], {}, r"logits.shape: \(3, 2\): \[N, K\] with N = 2"),
        ([1.0, 2.0], [1, 0], {}, r"logits.shape: \(2,\)"),
        (np.zeros((0, 2)), [], {}, r"logits.shape: \(0, 2\)"),
        (GOOD, [1, 1, 0], {"grid": (0.5, 2.0)}, r"grid: .* 1.0 among them"),
        (GOOD, [1, 1, 0], {"grid": (-1.0, 1.0)}, r"grid: .* above 0"),
        (GOOD, [1, 1, 0], {"num_bins": 0}, r"num_bins: 0: at least 1"),
    ],
)
def test_fit_of_wrong_rounds_is_refused(logits, accepted, settings, message):
    with pytest.raises(ValueError, match=rf"{message}.*Fix: "):
        fit(logits, accepted, **settings)


def test_pad_of_a_row_longer_than_the_block_is_refused():
    with pytest.raises(ValueError, match=r"rows\[1\]: 3 values: at most the block size 2.*Fix"):
        pad([[1.0], [1.0, 2.0, 3.0]], 2)


# --- the calibration --------------------------------------------------------------------------------------------------

CALIBRATION = Calibration((1.5, 0.5, 2.0), (0.2, 0.1, 0.1), (0.01, 0.02, 0.03), 640, 15, GRID)


@pytest.mark.filterwarnings("error")
def test_survivals_of_any_logits_fall_with_position_and_stay_in_the_unit_interval():
    logits = np.random.default_rng(0).normal(0.0, 1.0, (2, 50, 3)) * 10.0 ** np.arange(5).reshape(5, 1, 1, 1)
    assert np.abs(logits).max() > 1e4
    found = CALIBRATION.survival(logits)
    assert found.shape == logits.shape
    assert ((found >= 0.0) & (found <= 1.0)).all()
    assert (np.diff(found, axis=-1) <= 0.0).all()
    assert np.array_equal(found, CALIBRATION.confidence(logits).cumprod(-1))


def test_confidence_of_a_logit_divides_by_its_own_temperature():
    found = CALIBRATION.confidence([3.0, 1.0, -4.0])
    assert found == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))])


def test_survival_of_another_block_size_is_refused():
    with pytest.raises(ValueError, match=r"logits.shape: \(5, 2\): the last dimension is the block size 3.*Fix"):
        CALIBRATION.survival(np.zeros((5, 2)))


def test_json_of_a_calibration_reads_back_and_has_the_keys_of_sglang():
    written = json.loads(CALIBRATION.to_json())
    assert written["temperatures"] == [1.5, 0.5, 2.0]
    assert {"num_samples", "ece_before", "ece_after"} <= set(written)
    assert Calibration.from_json(json.dumps(written | {"dataset": "held-out"}), block_size=3) == CALIBRATION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": None}, "temperatures: None: a list of numbers"),
        ({"temperatures": [1.0, "2", 1.0]}, "temperatures: .* a list of numbers"),
        ({"temperatures": [1.0, 2.0]}, "temperatures: .* one temperature for each of the 3 drafted positions"),
        ({"temperatures": [1.0, 0.0, 1.0]}, "temperatures: .* above 0 and finite"),
        ({"temperatures": [1.0, NAN, 1.0]}, "temperatures: .* above 0 and finite"),
        ({"ece_before": 0.1}, "ece_before: 0.1: a list of numbers"),
        ({"ece_after": [0.1, 0.1]}, "ece_after: .* a fraction for each of the 3 temperatures"),
        ({"ece_after": [0.1, 0.1, 3.0]}, "ece_after: .* a fraction for each of the 3 temperatures"),
        ({"num_samples": True}, "num_samples: True: an integer"),
        ({"num_bins": 0}, "num_bins: 0: at least 1"),
        ({"grid": []}, "grid: .* at least one number"),
        ({"fallback_positions": None}, "fallback_positions: None: a list of numbers"),
        ({"fallback_positions": [2]}, r"fallback_positions: \[2\]: positions of the block whose temperature is 1"),
        ({"fallback_positions": [4]}, r"fallback_positions: \[4\]: positions of the block"),
    ],
)
def test_json_with_a_wrong_value_is_refused(change, message):
    with pytest.raises(ValueError, match=rf"{message}.*Fix: "):
        Calibration.from_json(json.dumps(json.loads(CALIBRATION.to_json()) | change), block_size=3)


@pytest.mark.parametrize("text", ["", "{", "[1.0]"])
def test_json_that_is_no_object_is_refused(text):
    with pytest.raises(ValueError, match=r"calibration: .*a JSON object.*Fix: "):
        Calibration.from_json(text, block_size=3)


# --- the bootstrap ----------------------------------------------------------------------------------------------------


def _bootstrap_arguments(seed, num_rounds=40, num_prompts=9):
    logits_NK, accepted_N, proposed_N = _rounds(seed, num_rounds=num_rounds, is_coarse=True, block_size=3)
    prompts = [f"prompt-{i}" for i in np.random.default_rng(seed).integers(0, num_prompts, num_rounds)]
    return survival(logits_NK), survival(logits_NK, [1.6, 2.0, 2.5]), outcomes(accepted_N, 3, proposed_N), prompts


def _paired(metric, before_NK, after_NK, outcome_NK, prompts, **settings):
    before_SK, after_SK = (resample(metric, x, outcome_NK, prompts, **settings) for x in (before_NK, after_NK))
    return estimates(after_SK - before_SK)


def _loop_resample(metric, survival_NK, outcome_NK, prompts, num_resamples, seed):
    """Rounds of drawn prompts in a list, as often as drawn; rows of values by position, first of the data themselves."""
    names = sorted(set(prompts))
    draws = np.random.default_rng(seed).integers(0, len(names), size=(num_resamples, len(names)))
    kept_K = [[n for n in range(len(prompts)) if not math.isnan(outcome_NK[n, k])] for k in range(outcome_NK.shape[1])]
    bins_K = [dict(zip(kept, _mass_bins([float(survival_NK[n, k]) for n in kept]), strict=True)) for k, kept in enumerate(kept_K)]
    values = []
    for draw in [range(len(names)), *draws.tolist()]:
        rows = [n for i in draw for n in range(len(prompts)) if prompts[n] == names[i]]
        values.append([])
        for k, bins in enumerate(bins_K):
            kept = [n for n in rows if n in bins]
            columns = [float(survival_NK[n, k]) for n in kept], [int(outcome_NK[n, k]) for n in kept]
            value = _loop_ece_of_bins([bins[n] for n in kept], *columns) if metric == "ece_mass" else LOOPS[metric](*columns)
            values[-1].append(math.nan if value is None else value)
    return np.array(values)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(2))
def test_resample_equals_resampling_in_a_loop(metric, seed):
    _, survival_NK, outcome_NK, prompts = _bootstrap_arguments(seed)
    found = resample(metric, survival_NK, outcome_NK, prompts, num_resamples=60, seed=seed + 5)
    assert found == pytest.approx(_loop_resample(metric, survival_NK, outcome_NK, prompts, 60, seed + 5), abs=1e-12, nan_ok=True)


def test_estimates_are_the_rounds_themselves_and_percentiles_of_the_resamples():
    value_SK = np.random.default_rng(0).random((41, 3))
    value_SK[3, 1] = math.nan
    found = estimates(value_SK)
    columns = [*value_SK.T, np.array([sum(row) / 3 for row in value_SK])]
    for estimate, value_S in zip([*found.position_K, found.mean], columns, strict=True):
        wanted = (value_S[0], *np.percentile([x for x in value_S[1:] if not math.isnan(x)], [2.5, 97.5]))
        assert dataclasses.astuple(estimate) == pytest.approx(wanted, abs=1e-12)
    assert dataclasses.astuple(estimates(value_SK[:1]).mean) == (pytest.approx(value_SK[0].mean()), None, None)


def test_bootstrap_of_the_same_survivals_is_zero():
    before_NK, _, outcome_NK, prompts = _bootstrap_arguments(0)
    for metric in ("ece", "auroc"):
        found = _paired(metric, before_NK, before_NK.copy(), outcome_NK, prompts)
        assert {dataclasses.astuple(d) for d in (*found.position_K, found.mean)} == {(0.0, 0.0, 0.0)}


def test_bootstrap_resamples_prompts_not_rounds():
    """Rounds of a prompt are all alike: a prompt of many rounds carries no more than one of few."""
    arguments = _bootstrap_arguments(1, num_prompts=6)
    repeated = [np.repeat(x, 20, axis=0) for x in arguments]
    found, wide = (_paired("brier", *x, seed=3) for x in (arguments, repeated))
    assert dataclasses.astuple(wide.mean) == pytest.approx(dataclasses.astuple(found.mean), abs=1e-12)


def test_bootstrap_of_a_metric_without_trials_is_none():
    arguments = _, _, outcome_NK, _ = _bootstrap_arguments(0)
    outcome_NK[:, 2] = np.where(np.isnan(outcome_NK[:, 2]), np.nan, 0.0)
    found = _paired("auroc", *arguments, num_resamples=20)
    assert dataclasses.astuple(found.position_K[2]) == (None, None, None)
    assert found.mean.estimate == pytest.approx(sum(p.estimate for p in found.position_K[:2]) / 2)
    outcome_NK[:, 2] = np.nan
    assert _paired("ece", *arguments, num_resamples=20).position_K[2].estimate is None


def test_resample_of_one_prompt_has_its_value_and_no_resamples():
    survival_NK, _, outcome_NK, _ = _bootstrap_arguments(0)
    found = resample("ece", survival_NK, outcome_NK, ["one"] * 40, num_resamples=0)
    assert found.tolist() == [pytest.approx([q.ece for q in quality(survival_NK, outcome_NK)])]


def test_resample_of_wrong_arguments_is_refused():
    survival_NK, _, outcome_NK, prompts = _bootstrap_arguments(0)
    for arguments, message in (
        (("ECE", survival_NK, outcome_NK, prompts), "metric: 'ECE' is none of ece, ece_mass, brier, auroc"),
        (("ece", survival_NK, outcome_NK, prompts[1:]), r"prompt: shape \(39,\) for 40 rounds"),
        (("ece", survival_NK, outcome_NK, ["one"] * 40), "of at least 2 prompts"),
        (("ece", survival_NK[:, :2], outcome_NK, prompts), r"survival: shape \(40, 2\) is not that of the outcomes"),
        (("ece", survival_NK * math.inf, outcome_NK, prompts), r"survival\[0\]\[0\]: inf is not finite"),
    ):
        with pytest.raises(ValueError, match=rf"{message}.*Fix: "):
            resample(*arguments)
