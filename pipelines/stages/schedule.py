"""schedule: replays the test texts under every policy at every concurrency, with the steps that profile_sps measured.

Closed loop (dspark/simulate.py), once with the drafter's raw confidences and once with calibrated ones; static policies that
read no confidence give the same rows in both. `report.json` holds a row a policy and concurrency, `throughput.png` throughput
and budget against concurrency (the paper's Figure 8), `pareto.png` throughput against the speed that one user sees (Figure 7).
Costs are those of the decoding engine behind the mean context of these texts; they are not a promise for another one.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dspark.storage import Storage
from pipelines.artifacts import Calibration, ScheduleReport
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.figures import png
from pipelines.flow import ScheduleConfig
from pipelines.runner import Progress, Work
from pipelines.stages.profile_sps import read_profile, step_profile
from pipelines.stages.trace import read_rounds

FIGURES = ("throughput.png", "pareto.png")
ENGINE = "decoding"


def run(config: ScheduleConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    from dspark import calibration, simulate

    stage = config.schedule
    fitted = calibration.Calibration.from_json(open_storage(inputs["calibration"].uri).read(Calibration.CALIBRATION), config.block_size)
    drafter_sha256 = inputs["rounds"].record["inputs"]["drafter"]["payload_sha256"]
    profile = read_profile(inputs["profile"], {"drafter_sha256": drafter_sha256, "block_size": config.block_size})
    costs = step_profile(profile, ENGINE)
    rounds = read_rounds(inputs["rounds"], "positions", "test")
    context_tokens = statistics.fmean(r.context_length_tokens for r in rounds)
    replay = simulate.ReplayConfig(
        stage.fixed_lengths, stage.thresholds, stage.num_steps, stage.num_warmup_steps, stage.seed, stage.lag_rounds
    )
    rows, kinds = [], {"raw": calibration.sigmoid, "calibrated": fitted.confidence}
    for confidences, confidence in kinds.items():
        texts = simulate.texts_from_rounds(rounds, config.block_size, confidence)
        for num_requests in stage.concurrencies:
            found = simulate.sweep(texts, costs.at(context_tokens, num_requests), (num_requests,), replay)
            rows += [{"confidences": confidences, **asdict(row)} for row in found]
            work.report(
                Progress(len({(r["confidences"], r["num_requests"]) for r in rows}), len(kinds) * len(stage.concurrencies), "replays")
            )
    report = {
        "schema_version": 1,
        "engine": ENGINE,
        "sps_identity": profile["identity"],
        "context_tokens": context_tokens,
        "num_texts": len(texts),
        "rows": rows,
        "definitions": {
            "throughput_tokens_per_second": "emitted tokens over the measured seconds of the steps (draft + verification)",
            "mean_budget_tokens": "verified tokens per request and step, the anchor included",
        },
    }
    out.put(ScheduleReport.REPORT, json.dumps(report, indent=1).encode())
    shown = _shown(rows)
    out.put(FIGURES[0], _figure_throughput(shown))
    out.put(FIGURES[1], _figure_pareto(shown))
    return Outcome(file_checksums(out, [ScheduleReport.REPORT, *FIGURES]), _headline(rows), FIGURES)


def _headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the calibrated scheduler gains over no drafting and over verifying everything; then the throughput of every policy."""
    metrics = {}
    found = {(r["confidences"], r["policy"], r["num_requests"]): r["throughput_tokens_per_second"] for r in rows}
    for num_requests in sorted({r["num_requests"] for r in rows}):
        ours = found["calibrated", "scheduler", num_requests]
        for other in ("none", "verify_all"):
            metrics[f"scheduler_over_{other}_at_{num_requests}"] = ours / found["calibrated", other, num_requests]
    for (confidences, policy, num_requests), throughput in found.items():
        metrics[f"{confidences}/{policy}/tokens_per_second_at_{num_requests}"] = throughput
    return metrics


def _shown(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Lines of the figures: calibrated rows by policy, and the scheduler on raw confidences beside them."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["confidences"] == "calibrated" or row["policy"] == "scheduler":
            lines.setdefault(row["policy"] + (" (raw)" if row["confidences"] == "raw" else ""), []).append(row)
    return {name: sorted(members, key=lambda row: row["num_requests"]) for name, members in lines.items()}


_SCHEDULERS = {"scheduler": ("black", "-"), "scheduler (raw)": ("black", ":"), "scheduler_async": ("tab:red", "-")}


def _style(name: str) -> dict[str, Any]:
    if name not in _SCHEDULERS:
        return {"linewidth": 1.0, "linestyle": "--"}
    colour, line = _SCHEDULERS[name]
    return {"linewidth": 2.2, "color": colour, "linestyle": line, "zorder": 3}


def _figure_throughput(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    columns = (("throughput_tokens_per_second", "tokens/s"), ("mean_budget_tokens", "verified tokens per request and step"))
    for ax, (key, label) in zip(figure.subplots(1, 2), columns, strict=True):
        for name, rows in lines.items():
            ax.plot([r["num_requests"] for r in rows], [r[key] for r in rows], marker="o", markersize=3, label=name, **_style(name))
        ax.set(xlabel="concurrent requests", ylabel=label)
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    return png(figure)


def _figure_pareto(lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    ax = figure.subplots()
    for name, rows in lines.items():
        x, y = ([r[key] for r in rows] for key in ("tokens_per_second_per_user", "throughput_tokens_per_second"))
        ax.plot(x, y, marker="o", markersize=3, label=name, **_style(name))
    ax.set(xlabel="tokens/s of one user", ylabel="tokens/s in all", title="each point a concurrency", xscale="log")
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3)
    return png(figure)
