"""The methods that Sequential Temperature Scaling is measured against: plain loops, scipy and scikit-learn."""

import math

import numpy as np
import pytest
import scipy.optimize
import sklearn.isotonic

from dspark.baselines import METHODS, RIDGE, Curve, Isotonic, Linear, cross_fitted, fit_all, fit_isotonic, fit_platt
from dspark.calibration import GRID, Calibration, fit, outcomes, quality, sigmoid, survival
from dspark.metrics import ece


def _rounds(seed, num_rounds=3000, slope=(2.0, 1.5, 3.0), intercept=(-1.0, 0.5, 0.0), has_cuts=True):
    """Logits that are `slope` times and `intercept` beside those of the true conditional acceptance."""
    generator = np.random.default_rng(seed)
    true_NK = generator.normal(0.8, 1.2, (num_rounds, len(slope)))
    accepted_N = np.cumprod(generator.random(true_NK.shape) < sigmoid(true_NK), axis=1).sum(1)
    proposed_N = np.full(num_rounds, len(slope))
    if has_cuts:  # at a stop token that was accepted
        proposed_N = np.where((generator.random(num_rounds) < 0.3) & (accepted_N > 0), accepted_N, len(slope))
    return true_NK * slope + intercept, accepted_N, proposed_N


def _tries(k, logits_NK, accepted_N, proposed_N):
    """Logit and outcome of the drafts that were reached at position k, from 1."""
    rows = [n for n in range(len(accepted_N)) if proposed_N[n] >= k and accepted_N[n] >= k - 1]
    return np.array([logits_NK[n, k - 1] for n in rows]), np.array([float(accepted_N[n] >= k) for n in rows])


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_every_method_gives_confidences_and_survivals_that_fall_with_position():
    rounds = _rounds(0)
    methods = fit_all(*rounds, min_rounds=100)
    assert tuple(methods) == METHODS == ("raw", "global", "platt", "isotonic", "sts")
    logits = np.random.default_rng(1).normal(0.0, 1.0, (2, 50, 3)) * 10.0 ** np.arange(5).reshape(5, 1, 1, 1)
    logits[0, 0, 0, 2] = np.nan  # behind a cut
    for name, method in methods.items():
        confidence, found = method.confidence(logits), method.survival(logits)
        assert confidence.shape == found.shape == logits.shape
        assert np.isnan(confidence).sum() == np.isnan(found).sum() == 1
        assert np.nanmin(confidence) >= 0.0, name
        assert np.nanmax(confidence) <= 1.0, name
        assert found == pytest.approx(confidence.cumprod(-1), nan_ok=True)
        assert (np.diff(found, axis=-1)[~np.isnan(found[..., 1:])] <= 0.0).all()
        assert method.fallback_positions == ()
        with pytest.raises(ValueError, match=r"logits.shape: \(5, 2\): the last dimension is the block size 3.*Fix"):
            method.survival(np.zeros((5, 2)))


def test_raw_is_what_the_drafter_predicts_and_sts_is_the_fit_that_is_served():
    logits_NK, accepted_N, proposed_N = _rounds(1)
    methods = fit_all(logits_NK, accepted_N, proposed_N, num_bins=10, min_rounds=50)
    assert np.array_equal(methods["raw"].confidence(logits_NK), sigmoid(logits_NK))
    assert methods["sts"] == fit(logits_NK, accepted_N, proposed_N=proposed_N, num_bins=10, min_rounds=50)


def test_every_fit_is_better_than_the_head_on_other_rounds():
    """Logits whose scale and offset are wrong by position: Platt knows this form, and its error is near the floor."""
    methods = fit_all(*_rounds(2, num_rounds=40_000))
    logits_NK, accepted_N, proposed_N = _rounds(3, num_rounds=40_000)
    outcome_NK = outcomes(accepted_N, 3, proposed_N)
    found = {name: quality(method.survival(logits_NK), outcome_NK) for name, method in methods.items()}
    mean = {name: np.mean([q.ece for q in positions]) for name, positions in found.items()}
    assert mean["raw"] > 0.06
    assert mean["sts"] < mean["global"] < mean["raw"]
    for name in ("platt", "isotonic"):
        assert mean[name] < 2.5 * np.mean([q.ece_floor for q in found[name]])


@pytest.mark.parametrize("min_rounds", [1, 500])
def test_too_few_rounds_leave_a_position_as_it_is(min_rounds):
    logits_NK, accepted_N, proposed_N = _rounds(4, num_rounds=800, has_cuts=False)
    accepted_N, proposed_N = np.minimum(accepted_N, 1), np.where(np.arange(800) < 300, 3, 2)
    proposed_N = np.maximum(proposed_N, accepted_N)
    methods = fit_all(logits_NK, accepted_N, proposed_N, min_rounds=min_rounds)
    # Nothing is accepted at position 2, so that position 3 is never reached; it is proposed 300 times.
    assert methods["platt"].intercept_K[1] < -1.0
    assert methods["platt"].fallback_positions == methods["isotonic"].fallback_positions == (3,)
    assert methods["sts"].fallback_positions == (() if min_rounds == 1 else (3,))
    for name in ("platt", "isotonic"):
        assert np.array_equal(methods[name].confidence(logits_NK)[:, 2], sigmoid(logits_NK[:, 2]))
        assert not np.allclose(methods[name].confidence(logits_NK)[:, 0], sigmoid(logits_NK[:, 0]))
    nothing = fit_all(logits_NK, accepted_N, proposed_N, min_rounds=801)
    for name in METHODS[1:]:
        assert nothing[name].fallback_positions == (1, 2, 3)
        assert nothing[name].confidence(logits_NK) == pytest.approx(sigmoid(logits_NK), abs=1e-15)


def test_cross_fitted_survivals_come_from_the_other_prompts():
    logits_NK, accepted_N, proposed_N = _rounds(5, num_rounds=900)
    prompt_N = np.array([f"prompt-{i}" for i in np.random.default_rng(0).integers(0, 10, 900)])
    found = cross_fitted(logits_NK, accepted_N, proposed_N, prompt_N, num_folds=3, seed=7)
    fold_of = dict(zip(sorted(set(prompt_N)), np.random.default_rng(7).permutation(10) % 3, strict=True))
    assert sorted(fold_of.values()) == [0] * 4 + [1] * 3 + [2] * 3
    fold_N = np.array([fold_of[prompt] for prompt in prompt_N])
    for fold in range(3):
        others, here = fold_N != fold, fold_N == fold
        fitted = fit_all(logits_NK[others], accepted_N[others], proposed_N[others])
        for name in METHODS:
            assert np.array_equal(found[name][here], fitted[name].survival(logits_NK[here])), name


@pytest.mark.parametrize("num_folds", [1, 4])
def test_cross_fitting_with_a_wrong_number_of_folds_is_refused(num_folds):
    logits_NK, accepted_N, proposed_N = _rounds(6, num_rounds=30)
    with pytest.raises(ValueError, match=f"num_folds: {num_folds}: from 2 to the number of prompts, 3.*Fix"):
        cross_fitted(logits_NK, accepted_N, proposed_N, np.arange(30) % 3, num_folds=num_folds)


# --- one temperature --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_global_temperature_has_the_least_mean_ece_of_the_grid(seed):
    logits_NK, accepted_N, proposed_N = _rounds(seed, num_rounds=300)
    values = {}
    for t in GRID:
        predicted_NK = survival(logits_NK, t)
        eces = [ece(predicted_NK[proposed_N >= k, k - 1], accepted_N[proposed_N >= k] >= k) for k in (1, 2, 3)]
        values[t] = sum(eces) / 3
    best = min(values, key=values.__getitem__)
    assert fit_all(logits_NK, accepted_N, proposed_N)["global"] == Linear((1 / best,) * 3, (0.0,) * 3)


def test_global_temperature_of_one_position_is_that_of_the_sequential_fit():
    logits_NK, accepted_N, proposed_N = _rounds(8, slope=(2.0,), intercept=(0.3,))
    methods = fit_all(logits_NK, accepted_N, proposed_N)
    sts = methods["sts"]
    assert isinstance(sts, Calibration)
    assert methods["global"] == Linear((1 / sts.temperatures_K[0],), (0.0,))


def test_global_temperature_of_logits_zero_ties_everywhere_and_keeps_one():
    assert fit_all(np.zeros((5, 2)), [0, 1, 2, 2, 0])["global"] == Linear((1.0, 1.0), (0.0, 0.0))


# --- Platt ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_platt_has_the_maximum_of_the_likelihood_that_scipy_finds(seed):
    rounds = _rounds(seed, num_rounds=400)
    found = fit_all(*rounds)["platt"]
    for k in (1, 2, 3):
        logit_N, outcome_N = _tries(k, *rounds)

        def loss(weights, logit_N=logit_N, outcome_N=outcome_N):
            score_N = weights[0] * logit_N + weights[1]
            ridge = RIDGE / 2 * ((weights[0] - 1) ** 2 + weights[1] ** 2)
            return -np.sum(outcome_N * score_N - np.log1p(np.exp(score_N))) + ridge

        wanted = scipy.optimize.minimize(loss, [0.5, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000}).x
        assert (found.slope_K[k - 1], found.intercept_K[k - 1]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0, 1e4])
def test_platt_of_any_scale_converges(scale):
    """The gradient of the penalised likelihood is zero, even from a start where every probability is 0 or 1."""
    logits_NK, accepted_N, _ = _rounds(0, num_rounds=2000, slope=(1.0,), intercept=(0.7,), has_cuts=False)
    logit_N, outcome_N = logits_NK[:, 0] * scale, (accepted_N >= 1).astype(float)
    slope, intercept = fit_platt(logit_N, outcome_N)
    error_N = sigmoid(slope * logit_N + intercept) - outcome_N
    gradient = np.array([error_N @ logit_N + RIDGE * (slope - 1), error_N.sum() + RIDGE * intercept])
    assert np.abs(gradient) == pytest.approx(0.0, abs=1e-3 * max(scale, 1.0))


@pytest.mark.filterwarnings("error")
def test_platt_of_separable_outcomes_is_finite_and_steep():
    logit_N = np.array([-2.0, -1.0, 1.0, 2.0])
    slope, intercept = fit_platt(logit_N, (logit_N > 0).astype(float))
    assert 3.0 < slope < 100.0
    assert intercept == pytest.approx(0.0, abs=1e-6)
    slope, intercept = fit_platt(logit_N, np.zeros(4))
    assert math.isfinite(slope)
    assert intercept < -2.0


# --- isotonic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [0, 1, 12])
@pytest.mark.parametrize("seed", range(3))
def test_isotonic_equals_scikit_learn(seed, digits):
    generator = np.random.default_rng(seed)
    logit_N = generator.normal(0.0, 2.0, 500).round(digits)
    outcome_N = (generator.random(500) < sigmoid(np.sin(logit_N))).astype(float)
    curve = fit_isotonic(logit_N, outcome_N)
    oracle = sklearn.isotonic.IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(logit_N, outcome_N)
    asked = np.concatenate([logit_N, generator.normal(0.0, 4.0, 500)])
    found = Isotonic((curve,)).confidence(asked[:, None])[:, 0]
    assert found == pytest.approx(oracle.predict(asked), abs=1e-9)


@pytest.mark.parametrize(
    ("logits", "labels", "curve"),
    [
        ([0.0], [1.0], Curve((0.0,), (1.0,))),
        ([1.0, 1.0, 1.0], [1.0, 0.0, 0.0], Curve((1.0,), (1 / 3,))),
        ([1.0, 2.0], [0.0, 1.0], Curve((1.0, 2.0), (0.0, 1.0))),
        ([2.0, 1.0], [0.0, 1.0], Curve((1.0, 2.0), (0.5, 0.5))),
        # (1, 0) pools to 1/2, which no longer rises over the 0 behind it: all three are one pool.
        ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 1.0], Curve((1.0, 3.0, 4.0), (1 / 3, 1 / 3, 1.0))),
    ],
)
def test_isotonic_pools_what_falls(logits, labels, curve):
    assert fit_isotonic(np.array(logits), np.array(labels)) == curve


def test_isotonic_and_platt_read_the_drafts_that_were_reached():
    rounds = _rounds(9, num_rounds=500)
    methods = fit_all(*rounds)
    for k in (1, 2, 3):
        columns = _tries(k, *rounds)
        assert methods["isotonic"].curve_K[k - 1] == fit_isotonic(*columns)
        assert (methods["platt"].slope_K[k - 1], methods["platt"].intercept_K[k - 1]) == fit_platt(*columns)
