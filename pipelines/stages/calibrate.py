"""calibrate: fits Sequential Temperature Scaling on the rounds of the calibrate split and reports it on those of the test split.

`calibration.json` holds the temperatures (dspark/calibration.py, the form that SGLang reads); `report.json` ECE, AUROC and
Brier per position before and after, with paired bootstrap intervals over prompts; `reliability.png` the diagrams. A fit holds
for the drafter, the draft mode and the temperature of the trace.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark.rounds import Round
from dspark.storage import Storage
from pipelines.artifacts import Calibration
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.figures import png
from pipelines.flow import CalibrateConfig
from pipelines.runner import Progress, Work
from pipelines.stages.trace import read_rounds

FIGURE = "reliability.png"
MEASURES = ("ece", "brier", "auroc")


def run(config: CalibrateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    import numpy as np

    from dspark import calibration
    from dspark.metrics import paired_bootstrap

    stage, K = config.calibrate, config.block_size
    work.report(Progress(0, 3, "parts"))

    def columns(rounds: Sequence[Round]) -> tuple[Any, Any, Any]:
        logits_NK = calibration.pad([r.confidence_logits for r in rounds], K)
        return logits_NK, np.array([r.accepted for r in rounds]), np.array([r.proposed for r in rounds])

    logits_NK, accepted_N, proposed_N = columns(read_rounds(inputs["rounds"], "rounds", "calibrate"))
    fitted = calibration.fit(logits_NK, accepted_N, proposed_N=proposed_N, num_bins=stage.num_bins, min_rounds=stage.min_rounds)
    out.put(Calibration.CALIBRATION, fitted.to_json().encode())
    work.report(Progress(1, 3, "parts"))

    test = read_rounds(inputs["rounds"], "rounds", "test")
    logits_NK, accepted_N, proposed_N = columns(test)
    outcome_NK = calibration.outcomes(accepted_N, K, proposed_N)
    before_NK, after_NK = calibration.survival(logits_NK), fitted.survival(logits_NK)
    prompt_N = [r.request_id for r in test]
    intervals = {
        name: paired_bootstrap(before_NK, after_NK, outcome_NK, prompt_N, name, num_bins=stage.num_bins, num_resamples=stage.num_resamples)
        for name in MEASURES
    }
    work.report(Progress(2, 3, "parts"))
    quality = {
        name: [asdict(q) for q in calibration.quality(survival_NK, outcome_NK, stage.num_bins)]
        for name, survival_NK in (("before", before_NK), ("after", after_NK))
    }
    at_the_end = [k + 1 for k, t in enumerate(fitted.temperatures_K) if t in (fitted.grid[0], fitted.grid[-1])]
    report = {
        "schema_version": 1,
        "setting": {name: getattr(test[0], name) for name in ("temperature", "top_k", "top_p", "draft_mode")},
        "temperatures": fitted.temperatures_K,
        "positions_at_the_end_of_the_grid": at_the_end,
        "num_rounds": {"calibrate": fitted.num_rounds, "test": len(test)},
        "num_prompts_test": len(set(prompt_N)),
        "test": quality,
        "change": {name: asdict(interval) for name, interval in intervals.items()},
        "definitions": {
            "survival": "probability that the first k drafted tokens are all accepted; outcome: accepted >= k, where proposed >= k",
            "change": "after - before on the test rounds, 95 % paired bootstrap interval over prompts; of ECE read the sign only",
        },
    }
    out.put(Calibration.REPORT, json.dumps(report, indent=1).encode())
    out.put(FIGURE, _figure(quality, fitted.temperatures_K))
    work.report(Progress(3, 3, "parts"))
    names = [Calibration.CALIBRATION, Calibration.REPORT, FIGURE]
    return Outcome(file_checksums(out, names), _headline(report, quality), (FIGURE,))


def _headline(report: Mapping[str, Any], quality: Mapping[str, Any]) -> dict[str, float]:
    """Means over positions, before and after, with the interval of their change; ECE and temperature of each position."""
    metrics: dict[str, float] = {}
    for measure in MEASURES:
        for when, positions in quality.items():
            values = [q[measure] for q in positions if q[measure] is not None]
            if values:
                metrics[f"{measure}_{when}"] = sum(values) / len(values)
        change = report["change"][measure]["mean"]
        metrics |= {f"{measure}_change_{end}": change[end] for end in ("low", "high") if change[end] is not None}
    metrics["temperatures_at_the_end_of_the_grid"] = float(len(report["positions_at_the_end_of_the_grid"]))
    for k, temperature in enumerate(report["temperatures"], 1):
        metrics[f"temperature_{k}"] = temperature
        for when, positions in quality.items():
            if positions[k - 1]["ece"] is not None:
                metrics[f"position_{k}/ece_{when}"] = positions[k - 1]["ece"]
    return metrics


def _figure(quality: Mapping[str, Any], temperatures: Sequence[float]) -> bytes:
    """One column a position: predicted survival against the share that survived, before and after, and the counts below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.3 * len(temperatures) + 0.6, 4.2), layout="constrained")
    axes = figure.subplots(2, len(temperatures), squeeze=False, sharex=True, height_ratios=(3, 1))
    for k, temperature in enumerate(temperatures):
        top, bottom = axes[0][k], axes[1][k]
        top.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
        for when, colour in (("before", "tab:orange"), ("after", "tab:blue")):
            bins = [b for b in quality[when][k]["reliability"] if b["count"]]
            ece = quality[when][k]["ece"]
            label = f"{when}: ECE {100 * ece:.1f} %" if ece is not None else when
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
