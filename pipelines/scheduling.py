"""What a replay says: every policy at every concurrency, what calibration is worth, and the checks that scheduling must pass.

`make_report` replays and computes the report, `headline` the metrics of the run, `figures` its figures. Confidences are named as
by `dspark.baselines.fit_all` ("raw", "sts", ...), and "oracle" for those that know the outcome: 1 for an accepted token, else 0.
Policies that read no confidences have null there. The policy "oracle" is another thing: it knows the outcomes of the whole step
and takes what is best for it, where a scheduler with oracle confidences keeps its own rules (early stop, budget of earlier
rounds, a draft pass in every step).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pipelines.figures import png

if TYPE_CHECKING:
    from dspark.simulate import ReplayConfig, ReplayText
    from dspark.step_cost import StepCost

CALIBRATED = "sts"  # what a release is served with
SERVED = "scheduler_async_or_none"
LOSSLESS = ("scheduler", "scheduler_or_none", "scheduler_async", SERVED)
COMPARED = ("scheduler", "scheduler_async", SERVED)  # with every kind of confidences, with intervals
SEARCHES = ("scheduler", "scheduler_async", "scheduler_global")
LEAST_STEPS = 30  # of a replay of resampled texts
LEAST_RATIO = 0.99  # to the best static policy, and of the oracle to any other
MOST_RISE_TOKENS = 0.1  # of the budget, from one concurrency to the next
FIGURES = ("pareto.png", "budget.png", "calibration.png")

Row = Mapping[str, Any]


def make_report(
    texts: "Mapping[str, Sequence[ReplayText]]",
    cost_of: "Callable[[int], StepCost]",
    concurrencies: Sequence[int],
    config: "ReplayConfig",
    num_resamples: int,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Of the same texts by kind of confidences, CALIBRATED and "raw" among them; `progress` gets the number of concurrencies done."""
    report: dict[str, Any] = {"schema_version": 3, "calibrated": CALIBRATED, "served": SERVED, "num_texts": len(texts[CALIBRATED])}
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in ("rows", "calibration", "static", "oracle", "tables", "options")}
    for done, num_requests in enumerate(concurrencies, 1):
        cost = cost_of(num_requests)
        rows = _rows(texts, cost, num_requests, config)
        parts["rows"] += rows
        parts["calibration"] += _calibration(texts, cost, num_requests, config, num_resamples, rows)
        parts["static"].append(_static(num_requests, rows))
        parts["oracle"].append(_oracle(num_requests, rows))
        parts["tables"] += _tables(texts[CALIBRATED], cost, num_requests, config, rows)
        parts["options"] += _options(texts, cost, num_requests, config, rows)
        progress(done)
    return {**report, **parts, "checks": _checks(parts), "definitions": DEFINITIONS}


DEFINITIONS = {
    "rows": {
        "throughput_tokens_per_second": "emitted tokens over the measured seconds of the steps (draft + verification)",
        "mean_budget_tokens": "verified tokens per request and step, the anchor included",
        "drafting_share": "steps with a draft pass / steps",
        "mean_context_tokens": "of the live slots",
    },
    "calibration": "the same scheduler on other confidences; 95 % percentile intervals over resamples of the texts, over_raw paired. "
    "A resample is replayed for about one pass over its texts, estimates for stage.schedule.num_rounds at least",
    "static": "fixed k by throughput, 0 is no drafting; a drafter of blocks drafts all K whatever k is. recommended_k: the best, for engines "
    "that cannot schedule",
    "oracle": "the step-wise best admission that knows the outcomes, over the scheduler as served and over the best static policy, less 1",
    "tables": "what stairs of the costs do to calibrated schedulers. measured: the costs as they are; linear: the nearest ones without stairs; "
    "padded: each step takes as long as the next larger measured size, as with CUDA graphs. loss: of Algorithm 1, which stops early, 1 - its "
    "throughput over that of the global search on the same current confidences, which is not lossless. budget: mean_budget_tokens as served",
    "options": "the same policy with another setting, over its default",
    "served": "what is recommended: the asynchronous scheduler that leaves out a draft pass that does not pay. Engines of today draft in every "
    "step, as scheduler and scheduler_async do here",
    "checks": "value against bound. Schedulers that may leave out the draft pass over every static policy, others over those that draft; on the "
    "linear costs, too, where neither an early stop nor a budget that rises has a stair for its reason. is_unimodal: with R requests of mean "
    "survivals Theta has one peak, so that an early stop finds it",
}


def _rows(texts: "Mapping[str, Sequence[ReplayText]]", cost: "StepCost", num_requests: int, config: "ReplayConfig") -> list[dict[str, Any]]:
    from dspark.simulate import ORACLE, policy_names, sweep

    names = policy_names(texts[CALIBRATED][0].confidence_AK.shape[1], config.thresholds)
    reading = [name for name in names if name.startswith(("threshold", "scheduler"))]
    blind = [name for name in names if name not in reading]
    assert ORACLE in blind
    jobs: list[tuple[str | None, Sequence[ReplayText], Sequence[str]]] = [(None, texts[CALIBRATED], blind)]
    jobs += [(kind, found, reading if kind in ("raw", CALIBRATED) else LOSSLESS) for kind, found in texts.items()]
    return [
        {"confidences": kind, **asdict(row)}
        for kind, found, policies in jobs
        for row in sweep(found, cost, (num_requests,), config, policies)
    ]


def _throughput(rows: Sequence[Row], policy: str, confidences: str | None) -> float:
    return next(r["throughput_tokens_per_second"] for r in rows if (r["policy"], r["confidences"]) == (policy, confidences))


def _best_static(rows: Sequence[Row], *, is_drafting: bool = False) -> tuple[str, float]:
    """The fastest policy that does not schedule, thresholds on calibrated confidences among them; or the fastest that drafts."""
    others = ("scheduler", "oracle", *["none"] * is_drafting)
    static = [r for r in rows if r["confidences"] in (None, CALIBRATED) and not r["policy"].startswith(others)]
    best = max(static, key=lambda r: r["throughput_tokens_per_second"])
    return best["policy"], best["throughput_tokens_per_second"]


def _calibration(
    texts: "Mapping[str, Sequence[ReplayText]]",
    cost: "StepCost",
    num_requests: int,
    config: "ReplayConfig",
    num_resamples: int,
    rows: Sequence[Row],
) -> list[dict[str, Any]]:
    """Throughput of each scheduler by confidences, and over that with raw ones."""
    import numpy as np

    from dspark.simulate import ratio, resample, resampled

    num_anchors = sum(len(text.accepted_A) for text in texts["raw"])
    # A sample is replayed for about one pass over its texts, behind a start that is no longer.
    num_steps = min(config.num_steps, max(LEAST_STEPS, num_anchors // num_requests))
    config = replace(config, num_steps=num_steps, num_warmup_steps=min(config.num_warmup_steps, num_steps), num_rounds=num_anchors)
    text_BN, found = resample(len(texts["raw"]), num_resamples, config.seed), []
    for policy in COMPARED:
        samples = {kind: resampled(of_kind, policy, cost, num_requests, config, text_BN) for kind, of_kind in texts.items()}
        raw = _throughput(rows, policy, "raw")
        for kind, throughput_B in samples.items():
            throughput = _throughput(rows, policy, kind)
            found.append(
                {
                    "num_requests": num_requests,
                    "policy": policy,
                    "confidences": kind,
                    "throughput_tokens_per_second": throughput,
                    "interval": np.percentile(throughput_B, [2.5, 97.5]).tolist(),
                    "over_raw": asdict(ratio(throughput, raw, throughput_B, samples["raw"])),
                }
            )
    return found


def _static(num_requests: int, rows: Sequence[Row]) -> dict[str, Any]:
    by_length = {0: _throughput(rows, "none", None)}
    by_length |= {int(r["policy"].split("_")[1]): r["throughput_tokens_per_second"] for r in rows if r["policy"].startswith("fixed_")}
    best, served = max(by_length, key=by_length.__getitem__), _throughput(rows, SERVED, CALIBRATED)
    return {
        "num_requests": num_requests,
        "recommended_k": best,
        "throughput_tokens_per_second_by_k": list(by_length.values()),
        "over_none": by_length[best] / by_length[0],
        "served_over_recommended": served / by_length[best],
    }


def _oracle(num_requests: int, rows: Sequence[Row]) -> dict[str, Any]:
    oracle, (static, throughput) = _throughput(rows, "oracle", None), _best_static(rows)
    gap = oracle / _throughput(rows, SERVED, CALIBRATED) - 1.0
    return {"num_requests": num_requests, "gap": gap, "best_static": static, "gap_of_best_static": oracle / throughput - 1.0}


def _tables(
    texts: "Sequence[ReplayText]", cost: "StepCost", num_requests: int, config: "ReplayConfig", rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """Calibrated; on the costs as they were measured, without stairs, and with one at every probe."""
    from dspark.simulate import policy_names, sweep

    names = [
        name for name in policy_names(texts[0].confidence_AK.shape[1], config.thresholds) if name not in ("oracle", "scheduler_or_none")
    ]
    found = []
    for table, other in {"measured": None, "linear": cost.linear(), "padded": cost.padded()}.items():
        if other is not None:
            rows = [{"confidences": CALIBRATED, **asdict(row)} for row in sweep(texts, other, (num_requests,), config, names)]
        early, stale, best = (_throughput(rows, name, CALIBRATED) for name in SEARCHES)
        static, throughput = _best_static(rows, is_drafting=True)
        found.append(
            {
                "num_requests": num_requests,
                "table": table,
                "is_unimodal": _is_unimodal(texts, other or cost, num_requests),
                "loss": 1.0 - early / best,
                "loss_of_async": 1.0 - stale / best,
                "best_static": static,
                "scheduler_over_best_static": early / throughput,
                "budget": _budget(rows),
            }
        )
    return found


def _budget(rows: Sequence[Row]) -> float:
    """As served."""
    return next(r["mean_budget_tokens"] for r in rows if (r["policy"], r["confidences"]) == (SERVED, CALIBRATED))


def _is_unimodal(texts: "Sequence[ReplayText]", cost: "StepCost", num_requests: int) -> bool:
    import numpy as np

    from dspark.scheduler import early_stop, survival, walk

    mean_K = survival(np.concatenate([text.confidence_AK for text in texts])).mean(axis=0)
    falling_N, theta = walk(np.tile(mean_K, (num_requests, 1)), cost.table(num_requests))
    return int(early_stop(falling_N, theta)) == int(theta.argmax())


def _options(
    texts: "Mapping[str, Sequence[ReplayText]]", cost: "StepCost", num_requests: int, config: "ReplayConfig", rows: Sequence[Row]
) -> list[dict[str, Any]]:
    from dspark.simulate import replay

    found = []
    jobs: list[tuple[str, str, dict[str, Any]]] = [
        ("scheduler_async", CALIBRATED, {"new_requests": "one" if config.new_requests == "mean" else "mean"}),
        *(("scheduler_async", CALIBRATED, {"lag_rounds": lag}) for lag in (1, 2, 4) if lag != config.lag_rounds),
        *((SERVED, kind, {"skips_by": "confidences" if config.skips_by == "outcomes" else "outcomes"}) for kind in ("raw", CALIBRATED)),
    ]
    for policy, kind, changes in jobs:
        throughput = replay(texts[kind], policy, cost, num_requests, replace(config, **changes)).throughput_tokens_per_second
        over_default = throughput / _throughput(rows, policy, kind)
        found.append({"num_requests": num_requests, "policy": policy, "confidences": kind, **changes, "over_default": over_default})
    return found


def _checks(parts: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = []

    def check(name: str, num_requests: int, value: float, *, least: float | None = None, most: float | None = None, **more: Any) -> None:
        is_ok = (least is None or value >= least) and (most is None or value <= most)
        checks.append({"name": name, "num_requests": num_requests, "value": value, "bound": least or most, "is_ok": is_ok, **more})

    before: dict[str, float] = {}
    for num_requests in dict.fromkeys(r["num_requests"] for r in parts["rows"]):
        rows = [r for r in parts["rows"] if r["num_requests"] == num_requests]
        tables = {r["table"]: r for r in parts["tables"] if r["num_requests"] == num_requests}
        is_unimodal = tables["measured"]["is_unimodal"]
        for policy in (SERVED, "scheduler_or_none", "scheduler_async", "scheduler"):
            static, throughput = _best_static(rows, is_drafting=policy in ("scheduler_async", "scheduler"))
            value = _throughput(rows, policy, CALIBRATED) / throughput
            check(f"{policy}_over_static", num_requests, value, least=LEAST_RATIO, best_static=static, is_unimodal=is_unimodal)
        linear = tables["linear"]
        value, static = linear["scheduler_over_best_static"], linear["best_static"]
        check("scheduler_over_static_linear", num_requests, value, least=LEAST_RATIO, best_static=static, is_unimodal=linear["is_unimodal"])
        others = max(r["throughput_tokens_per_second"] for r in rows if r["policy"] != "oracle" and r["confidences"] != "oracle")
        check("oracle_over_every_policy", num_requests, _throughput(rows, "oracle", None) / others, least=LEAST_RATIO)
        for name, table in (("budget_rise", "measured"), ("budget_rise_linear", "linear")):
            budget = tables[table]["budget"]
            if table in before:
                check(name, num_requests, budget - before[table], most=MOST_RISE_TOKENS)
            before[table] = budget
    return checks


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """The checks, what calibration gains and what the oracle would; then, by concurrency, what to serve and the throughput of every policy."""
    ratios = [check["value"] for check in report["checks"] if check["name"] == f"{SERVED}_over_static"]
    gains = [r["over_raw"]["estimate"] for r in report["calibration"] if (r["policy"], r["confidences"]) == ("scheduler_async", CALIBRATED)]
    metrics = {
        "checks_failed": float(sum(not check["is_ok"] for check in report["checks"])),
        "least_served_over_static": min(ratios),
        "least_calibrated_over_raw": min(gains),
        "most_calibrated_over_raw": max(gains),
    }
    for static, oracle in zip(report["static"], report["oracle"], strict=True):
        at = f"at_{static['num_requests']}"
        metrics[f"recommended_k_{at}"] = float(static["recommended_k"])
        metrics[f"served_over_recommended_k_{at}"] = static["served_over_recommended"]
        metrics[f"oracle_gap_{at}"] = oracle["gap"]
    for r in report["rows"]:
        name = "/".join(filter(None, (r["confidences"], r["policy"])))
        metrics[f"{name}/tokens_per_second_at_{r['num_requests']}"] = r["throughput_tokens_per_second"]
    return metrics


# --- figures ----------------------------------------------------------------------------------------------------------------

_STYLES: Mapping[str, Mapping[str, Any]] = {
    "none": {"color": "grey", "linestyle": "--"},
    "fixed_1": {"color": "tab:green", "linestyle": "--"},
    "fixed_3": {"color": "tab:olive", "linestyle": "--"},
    "verify_all": {"color": "tab:orange", "linestyle": "--"},
    "scheduler": {"color": "black", "linewidth": 1.8},
    "scheduler_async": {"color": "tab:blue", "linewidth": 1.8},
    SERVED: {"color": "tab:red", "linewidth": 2.4},
    "oracle": {"color": "tab:purple", "linestyle": ":"},
}


def figures(report: Mapping[str, Any]) -> dict[str, bytes]:
    lines = {name: [r for r in report["rows"] if r["policy"] == name and r["confidences"] in (None, CALIBRATED)] for name in _STYLES}
    lines = {name: rows for name, rows in lines.items() if rows}  # a short block has no fixed_3
    linear = [(r["num_requests"], r["budget"]) for r in report["tables"] if r["table"] == "linear"]
    drawn = _figure_pareto(lines), _figure_budget(lines, linear), _figure_calibration(report["calibration"])
    return dict(zip(FIGURES, drawn, strict=True))


def _figure_pareto(lines: Mapping[str, Sequence[Row]]) -> bytes:
    """After Figure 7 of the paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    ax = figure.subplots()
    for name, rows in lines.items():
        x, y = ([r[key] for r in rows] for key in ("tokens_per_second_per_user", "throughput_tokens_per_second"))
        ax.plot(x, y, marker="o", markersize=3, label=name, **_STYLES[name])
    ax.set(xlabel="tokens/s of one user", ylabel="tokens/s in all", title="each point a concurrency", xscale="log", yscale="log")
    ax.legend(fontsize=7)
    ax.grid(alpha=0.3)
    return png(figure)


def _figure_budget(lines: Mapping[str, Sequence[Row]], linear: Sequence[tuple[int, float]]) -> bytes:
    """After Figure 8 of the paper: the budget against concurrency, as served also on costs without stairs; beside it the throughput, over
    that without drafting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rows in lines.items():
        x = [r["num_requests"] for r in rows]
        plain = [r["throughput_tokens_per_second"] for r in lines["none"]]
        left.plot(x, [r["mean_budget_tokens"] for r in rows], marker="o", markersize=3, label=name, **_STYLES[name])
        over = [r["throughput_tokens_per_second"] / p for r, p in zip(rows, plain, strict=True)]
        right.plot(x, over, marker="o", markersize=3, label=name, **_STYLES[name])
    left.plot(*zip(*linear, strict=True), color=_STYLES[SERVED]["color"], linestyle=":", label="as served, costs without stairs")
    left.set(ylabel="verified tokens per request and step")
    left.legend(left.lines[-1:], [left.lines[-1].get_label()], fontsize=7)
    right.set(ylabel="throughput over no drafting")
    for ax in (left, right):
        ax.set(xlabel="concurrent requests")
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.3)
    right.legend(fontsize=7)
    return png(figure)


def _figure_calibration(rows: Sequence[Row]) -> bytes:
    """Does calibration pay? Throughput over that with raw confidences, by kind, with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(COMPARED), 3.8), layout="constrained")
    kinds = [kind for kind in dict.fromkeys(r["confidences"] for r in rows) if kind != "raw"]
    for ax, policy in zip(figure.subplots(1, len(COMPARED), sharey=True), COMPARED, strict=True):
        for i, kind in enumerate(kinds):
            found = [r for r in rows if (r["policy"], r["confidences"]) == (policy, kind)]
            x = [r["num_requests"] * 2.0 ** (0.12 * (i - len(kinds) / 2)) for r in found]
            low, middle, high = ([r["over_raw"][key] for r in found] for key in ("low", "estimate", "high"))
            ax.vlines(x, low, high, color=f"C{i}", alpha=0.6)
            ax.plot(x, middle, "o", color=f"C{i}", markersize=4, label=kind)
        ax.axhline(1.0, color="grey", linewidth=0.8)
        ax.set(title=policy, xlabel="concurrent requests")
        ax.set_xscale("log", base=2)
        ax.grid(alpha=0.3)
    figure.axes[0].set_ylabel("throughput over raw confidences")
    figure.axes[0].legend(fontsize=7)
    return png(figure)
