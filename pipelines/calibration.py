"""The calibration report, its figures and its headline, from decoding rounds alone (schema: dspark/rounds.py).

    fitted, found = analyse(calibrate_rounds, test_rounds, block_size, stage)    # of one decoding setting
    report = make_report({setting: found, ...})                                  # the first is the one that is served
    figures(report), headline(report)

`report.json`, schema version 2: `definitions`; `served`, the first setting; `setting`, how that one draws: temperature, top_k, top_p,
draft mode; `settings`: decoding setting -> what was fitted, and on which rounds its methods (dspark/baselines.py) were measured:
`test` -> domain -> view, and `cross_fitted`, a view of all rounds. A view holds for every method each position's metrics with
their intervals and their mean over positions, and the change from every other method to STS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipelines.evaluation import prompt_of
from pipelines.figures import png
from pipelines.settings import CalibrateStage

if TYPE_CHECKING:
    from dspark.calibration import Calibration
    from dspark.rounds import Round

SCHEMA_VERSION = 2
METHODS_FIGURE = "methods.png"
NAN = float("nan")

DEFINITIONS = {
    "survival": "probability that the first k drafted tokens are all accepted; outcome: accepted >= k, where proposed >= k",
    "methods": "raw: the head as it is; global: one temperature; platt: slope and intercept a position; isotonic: a rising function a "
    "position; sts: a temperature a position, fitted in turn on the survival",
    "test": "fitted on the rounds of the calibrate split, measured on those of the test split: no prompt in common",
    "cross_fitted": "calibrate and test prompts dealt into num_folds folds, each fold measured with fits on the others. Its AUROC ranks the folds "
    "together, which lowers it where their fits are unlike",
    "ece": "expected calibration error over num_bins bins of equal width, a fraction",
    "ece_mass": "the same over bins of equally many rounds",
    "ece_floor": "the ece to be expected of these predictions if they were true, rounds taken as independent: what this number of rounds resolves",
    "interval": "low, high: 95 % bootstrap over prompts; null with a single prompt. Of ece and ece_mass 2 * estimate - percentile, cut at 0, since "
    "noise raises an ECE and does so again in a resample: it may lie below the estimate. Of all else percentiles",
    "change": "sts - other method on the same resamples; of ECE read the sign of the interval only",
    "positions_worse": "where the whole interval of the change of ece from raw to sts on the test rounds is above 0",
    "fallback_positions": "proposed in fewer than min_rounds rounds of the fit (platt, isotonic: or never reached): as the head predicts",
}


def analyse(
    calibrate: Sequence["Round"], test: Sequence["Round"], block_size: int, stage: CalibrateStage
) -> "tuple[Calibration, dict[str, Any]]":
    """Every method fitted on the calibrate rounds of one setting and measured on its test rounds."""
    import numpy as np

    from dspark import baselines, calibration

    fit_on, held_out, pooled = (_columns(rounds, block_size) for rounds in (calibrate, test, [*calibrate, *test]))
    methods = baselines.fit_all(*fit_on[:3], num_bins=stage.num_bins, min_rounds=stage.min_rounds)
    fitted, platt, scaled = methods["sts"], methods["platt"], methods["global"]
    assert isinstance(fitted, calibration.Calibration)
    assert isinstance(platt, baselines.Linear)
    assert isinstance(scaled, baselines.Linear)
    logits_NK, accepted_N, proposed_N, prompts = held_out
    outcome_NK = calibration.outcomes(accepted_N, block_size, proposed_N)
    survivals = {name: method.survival(logits_NK) for name, method in methods.items()}
    domains = np.array([r.domain for r in test])
    views = {"all": _view(survivals, outcome_NK, prompts, stage, has_reliability=True)}
    for domain in sorted(set(domains.tolist())):
        is_here = domains == domain
        views[domain] = _view({name: a_NK[is_here] for name, a_NK in survivals.items()}, outcome_NK[is_here], prompts[is_here], stage)
    changes = views["all"]["change"]["ece"]["raw"]["position_K"]
    num_folds = min(stage.num_folds, len(set(pooled[3].tolist())))
    crossed = baselines.cross_fitted(*pooled, num_folds=num_folds, num_bins=stage.num_bins, min_rounds=stage.min_rounds)
    return fitted, {
        "num_rounds": {"calibrate": len(calibrate), "test": len(test)},
        "num_prompts": {"calibrate": len(set(fit_on[3].tolist())), "test": len(set(prompts.tolist()))},
        "num_folds": num_folds,
        "temperatures": fitted.temperatures_K,
        "positions_at_the_end_of_the_grid": [k for k, t in enumerate(fitted.temperatures_K, 1) if t in (fitted.grid[0], fitted.grid[-1])],
        "positions_worse": [k for k, change in enumerate(changes, 1) if change["low"] is not None and change["low"] > 0.0],
        "fallback_positions": {name: method.fallback_positions for name, method in methods.items()},
        "fits": {"global": {"temperature": 1.0 / scaled.slope_K[0]}, "platt": {"slope": platt.slope_K, "intercept": platt.intercept_K}},
        "test": views,
        "cross_fitted": _view(crossed, calibration.outcomes(pooled[1], block_size, pooled[2]), pooled[3], stage),
    }


def _columns(rounds: Sequence["Round"], block_size: int) -> tuple[Any, Any, Any, Any]:
    """(logits [N, K], accepted [N], proposed [N], prompt [N])."""
    import numpy as np

    from dspark.calibration import pad

    logits_NK = pad([r.confidence_logits for r in rounds], block_size)
    accepted_N, proposed_N = np.array([r.accepted for r in rounds]), np.array([r.proposed for r in rounds])
    return logits_NK, accepted_N, proposed_N, np.array([prompt_of(r.request_id) for r in rounds])


def _view(
    survivals: Mapping[str, Any], outcome_NK: Any, prompts: Any, stage: CalibrateStage, has_reliability: bool = False
) -> dict[str, Any]:
    from dspark.calibration import quality
    from dspark.metrics import METRICS, estimates, resample

    num_prompts = len(set(prompts.tolist()))
    num_resamples = stage.num_resamples if num_prompts > 1 else 0
    methods, values = {}, {}
    for name, survival_NK in survivals.items():
        positions = [asdict(q) for q in quality(survival_NK, outcome_NK, stage.num_bins)]
        mean: dict[str, Any] = {}
        for metric in METRICS:
            value_SK = resample(metric, survival_NK, outcome_NK, prompts, num_bins=stage.num_bins, num_resamples=num_resamples)
            values[name, metric] = value_SK
            found = estimates(value_SK, is_ece=metric in ("ece", "ece_mass"))
            mean[metric] = asdict(found.mean)
            for position, estimate in zip(positions, found.position_K, strict=True):
                position[metric] = asdict(estimate)
        floors = [p["ece_floor"] for p in positions]
        mean["ece_floor"] = None if None in floors else sum(floors) / len(floors)
        if not has_reliability:
            for position in positions:
                del position["reliability"]
        methods[name] = {"positions": positions, "mean": mean}
    change = {
        metric: {name: asdict(estimates(values["sts", metric] - values[name, metric])) for name in survivals if name != "sts"}
        for metric in METRICS
    }
    return {"num_rounds": len(outcome_NK), "num_prompts": num_prompts, "methods": methods, "change": change}


def make_report(settings: Mapping[str, Mapping[str, Any]], served: Mapping[str, Any]) -> dict[str, Any]:
    """`settings`: name -> what `analyse` found, that of the served one first; `served`: how it draws."""
    return {
        "schema_version": SCHEMA_VERSION,
        "definitions": DEFINITIONS,
        "served": next(iter(settings)),
        "setting": served,
        "settings": settings,
    }


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """Of the served setting on its test rounds: means over positions by method, STS against the raw head; ECE and T of each position."""
    found = report["settings"][report["served"]]
    view = found["test"]["all"]
    methods, change = view["methods"], view["change"]["ece"]["raw"]["mean"]
    metrics = {f"ece_{name}": methods[name]["mean"]["ece"]["estimate"] for name in ("raw", "sts")}
    metrics |= {f"ece_change_{end}": change[end] for end in ("low", "high")}
    metrics["ece_floor"] = methods["sts"]["mean"]["ece_floor"]
    for metric in ("ece", "ece_mass", "brier", "auroc"):
        metrics |= {f"{metric}_{name}": method["mean"][metric]["estimate"] for name, method in methods.items()}
    metrics["temperatures_at_the_end_of_the_grid"] = float(len(found["positions_at_the_end_of_the_grid"]))
    metrics["positions_worse"] = float(len(found["positions_worse"]))
    metrics["fallback_positions"] = float(len(found["fallback_positions"]["sts"]))
    for k, temperature in enumerate(found["temperatures"], 1):
        metrics[f"temperature_{k}"] = temperature
        metrics |= {f"position_{k}/ece_{name}": methods[name]["positions"][k - 1]["ece"]["estimate"] for name in ("raw", "sts")}
    return {name: value for name, value in metrics.items() if value is not None}


# --- figures --------------------------------------------------------------------------------------------------------


def figures(report: Mapping[str, Any]) -> dict[str, bytes]:
    """The methods beside each other, and the reliability diagrams of every setting."""
    found = {METHODS_FIGURE: _methods(report["settings"])}
    return found | {f"reliability-{name}.png": _reliability(setting) for name, setting in report["settings"].items()}


def _methods(settings: Mapping[str, Any]) -> bytes:
    """A row a setting: mean ECE over positions of every method with its interval, on the test rounds and cross-fitted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.2 * len(settings)), layout="constrained")
    panels = (("ece", "bins of equal width"), ("ece_mass", "bins of equally many rounds"))
    for (name, setting), axes in zip(settings.items(), figure.subplots(len(settings), 2, squeeze=False), strict=True):
        views = (("test rounds", setting["test"]["all"]), ("cross-fitted", setting["cross_fitted"]))
        for ax, (metric, title) in zip(axes, panels, strict=True):
            for offset, (label, view) in zip((-0.1, 0.1), views, strict=True):
                means = [_numbers(method["mean"][metric]) for method in view["methods"].values()]
                points = ax.plot([x + offset for x in range(len(means))], [y for y, _, _ in means], "o", markersize=5, label=label)
                ends = [low for _, low, _ in means], [high for _, _, high in means]
                ax.vlines([x + offset for x in range(len(means))], *ends, color=points[0].get_color(), linewidth=1.2)
            floor = setting["test"]["all"]["methods"]["sts"]["mean"]["ece_floor"]
            if metric == "ece" and floor is not None:
                ax.axhline(floor, color="grey", linewidth=0.8, linestyle="--", label="true predictions, test rounds")
            names = list(setting["test"]["all"]["methods"])
            ax.set_xticks(range(len(names)), names)
            ax.set(title=f"{name}, {title}", ylabel="mean ECE over positions", ylim=(0, None))
            ax.grid(alpha=0.3, axis="y")
        axes[1].legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return png(figure)


def _numbers(estimate: Mapping[str, float | None]) -> tuple[float, float, float]:
    value, low, high = (estimate[key] for key in ("estimate", "low", "high"))
    return NAN if value is None else value, NAN if low is None else low, NAN if high is None else high


def _reliability(setting: Mapping[str, Any]) -> bytes:
    methods = setting["test"]["all"]["methods"]
    qualities = {name: [{**p, "ece": p["ece"]["estimate"]} for p in methods[name]["positions"]] for name in ("raw", "sts")}
    return reliability_figure(qualities, setting["temperatures"])


def reliability_figure(qualities: Mapping[str, Sequence[Mapping[str, Any]]], temperatures: Sequence[float]) -> bytes:
    """One column a position: predicted survival against the share that survived, of two calibrations, and the counts below.

    `qualities`: name -> `ece` and `reliability` of each position.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.3 * len(temperatures) + 0.6, 4.2), layout="constrained")
    axes = figure.subplots(2, len(temperatures), squeeze=False, sharex=True, height_ratios=(3, 1))
    for k, temperature in enumerate(temperatures):
        top, bottom = axes[0][k], axes[1][k]
        top.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
        for (name, positions), colour in zip(qualities.items(), ("tab:orange", "tab:blue"), strict=True):
            bins, ece = positions[k]["reliability"], positions[k]["ece"]
            label = f"{name}: ECE {100 * ece:.1f} %" if ece is not None else name
            top.plot(
                [b["mean_probability"] for b in bins], [b["mean_outcome"] for b in bins], "o-", markersize=3, color=colour, label=label
            )
            bottom.plot([b["mean_probability"] for b in bins], [b["count"] for b in bins], "o-", markersize=2, color=colour)
        top.set(title=f"position {k + 1}, T = {temperature:.2f}", ylim=(0, 1), xlim=(0, 1))
        top.legend(fontsize=7, loc="upper left")
        bottom.set(yscale="log", xlabel="predicted survival")
        for ax in (top, bottom):
            ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("share that survived")
    axes[1][0].set_ylabel("rounds")
    return png(figure)
