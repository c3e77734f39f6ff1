"""The evaluation report, its figures and its headline, from decoding rounds alone (schema: dspark/rounds.py).

    report = make_report(rounds, views, set_aside, commits, lossless, serving)
    figures(report)                        # name -> png

A new view needs no new decoding: the rounds of a finished evaluation are in its Parquet files, and `Views` says how to look
at them. `report.json`, schema version 3: `definitions`; `settings`: decoding setting -> source -> domain -> summary;
`benchmark_means`; `benchmark_commits` of those from the Hub; `lossless`; `serving` (pipelines/serving.py); `skipped`, every prompt
that was set aside with its place and reason, and their number by reason.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipelines.benchmarks import DOMAINS
from pipelines.figures import png

if TYPE_CHECKING:
    from dspark.rounds import Round

SCHEMA_VERSION = 3
TEST = "test"  # the source that is the project's own split; every other one is a benchmark
MATH_AND_CODE = "math+code"

DEFINITIONS = {
    "accepted_length": "mean over rounds of accepted + 1 (bonus or correction); a round ended by an accepted stop token emits none",
    "prefix_survival": "per position k: rounds with accepted >= k / rounds with proposed >= k",
    "conditional_acceptance": "per position k: rounds with accepted >= k / rounds with proposed >= k and accepted >= k-1",
    "interval": "95 % bootstrap interval over prompts, all turns of a prompt together",
    "context_buckets": "accepted length of the rounds whose anchor's position is in [from_tokens, below_tokens)",
    "threshold_sweep": "each round of the one pass that verified whole blocks, cut to its longest prefix whose every raw confidence "
    "sigmoid(logit) reaches the threshold: drafted tokens verified and rejected a round, accepted length and accepted / verified. A round "
    "cut before its accepted stop token emits a bonus again; a stored round ends at its stop token, so tokens verified behind it do not "
    "count. An estimate over the anchors that this pass visited: decoding with the threshold would go on at other anchors after a cut. "
    "null without a confidence head, and where not all was verified",
    "serving": "a vLLM server's own counts (url: null for one of the step's own; another one is asked with rebuild=[evaluate]) on the prompts of this evaluation, first turns, greedy, beside decoding them here with the same "
    "drafter: drafts are rounds in which something was proposed, accepted_length is accepted / drafts + 1, prefix_survival by draft, "
    "difference of accepted / drafts, served over offline - 1. vLLM counts tokens accepted behind a stop token, too",
    "benchmark_means": "unweighted mean over benchmarks of their accepted lengths, as in the paper; the test split is none",
    "skipped": "prompts set aside: source, row of the file or data set from 1 (null: test split), turn, reason; setting where a later "
    "turn depends on the answers decoded so",
}


@dataclass(frozen=True)
class Views:
    """How the rounds are looked at."""

    context_edges_tokens: tuple[int, ...]
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class SetAside:
    """A prompt that was not decoded. `turn` from 1; `setting` "" where the reason does not depend on one."""

    source: str
    row: int | None
    id: str
    turn: int
    setting: str
    reason: str
    detail: str


def make_report(
    rounds: Sequence["Round"],
    views: Views,
    set_aside: Sequence[SetAside],
    commits: Mapping[str, str],
    lossless: Mapping[str, Any] | None,
    serving: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Acceptance by setting, source and domain, pooled over rounds. What is set aside alike in several settings counts once."""
    groups: dict[tuple[str, str], dict[str, list[Round]]] = defaultdict(lambda: defaultdict(list))
    for r in rounds:
        for domain in {"all", r.domain}:
            groups[r.setting, r.source][domain].append(r)
    settings: dict[str, Any] = {}
    for setting, source in sorted(groups, key=lambda group: (group[0], _place(group[1]))):
        domains = groups[setting, source]
        if domains.keys() >= {"math", "code"}:
            domains[MATH_AND_CODE] = [*domains["math"], *domains["code"]]
        settings.setdefault(setting, {})[source] = {
            domain: _summary(members, views) for domain, members in sorted(domains.items(), key=_all_first)
        }
    distinct = list(dict.fromkeys(set_aside))
    return {
        "schema_version": SCHEMA_VERSION,
        "definitions": DEFINITIONS,
        "settings": settings,
        "benchmark_means": {setting: means for setting, sources in settings.items() if (means := _benchmark_means(sources))},
        "benchmark_commits": dict(commits),
        "lossless": lossless,
        "serving": serving,
        "skipped": [asdict(item) for item in distinct],
        "skipped_by_reason": dict(sorted(Counter(item.reason for item in distinct).items())),
    }


def _place(source: str) -> tuple[int, str]:
    """The test split, then the paper's benchmarks in its order, then others by name."""
    return ([TEST, *DOMAINS].index(source) if source in (TEST, *DOMAINS) else len(DOMAINS) + 1, source)


def _all_first(item: tuple[str, Any]) -> tuple[bool, str]:
    return item[0] != "all", item[0]


def _summary(rounds: Sequence["Round"], views: Views) -> dict[str, Any]:
    from dspark.calibration import pad, sigmoid
    from dspark.metrics import acceptance, by_context_length, pooled_length, threshold_sweep
    from dspark.rounds import VERIFY_ALL

    accepted, ended_by_stop = [r.accepted for r in rounds], [r.ended_by_stop for r in rounds]
    block_size = max(r.proposed for r in rounds)
    found = acceptance([r.proposed for r in rounds], accepted, ended_by_stop, block_size)
    emitted = [r.accepted + (not r.ended_by_stop) for r in rounds]
    prompts = [prompt_of(r.request_id) for r in rounds]
    pooled = pooled_length(emitted, prompts)
    buckets = by_context_length([r.context_length_tokens for r in rounds], emitted, prompts, views.context_edges_tokens)
    sweep = None
    if all(r.confidence_logits and r.policy == VERIFY_ALL for r in rounds):
        confidence_NK = sigmoid(pad([r.confidence_logits for r in rounds], block_size))
        sweep = [asdict(point) for point in threshold_sweep(accepted, ended_by_stop, confidence_NK, views.thresholds)]
    return {
        **asdict(found),
        "accepted_length_interval": pooled.accepted_length_interval,
        "num_prompts": pooled.num_prompts,
        "context_buckets": [
            {"from_tokens": bucket.from_tokens, "below_tokens": bucket.below_tokens, **asdict(bucket.length)} for bucket in buckets
        ],
        "threshold_sweep": sweep,
    }


def request_id(source: str, prompt_id: str, turn: int) -> str:
    """`turn` from 1; a first turn has the prompt's own name."""
    return f"{source}/{prompt_id}" + (f"#{turn}" if turn > 1 else "")


def prompt_of(request: str) -> str:
    """The prompt that a request is a turn of."""
    return request.partition("#")[0]


def _benchmark_means(sources: Mapping[str, Any]) -> dict[str, float]:
    lengths: dict[str, list[float]] = defaultdict(list)
    for domains in (domains for source, domains in sources.items() if source != TEST):
        for domain, summary in domains.items():
            lengths[domain].append(summary["accepted_length"])
    return {domain: fmean(values) for domain, values in sorted(lengths.items(), key=_all_first)}


def headline(report: Mapping[str, Any]) -> dict[str, float]:
    """The figures for the summary and the tracker."""
    metrics = {
        f"{setting}/{source}/{domain}/accepted_length".replace("+", "_"): summary["accepted_length"]
        for setting, sources in report["settings"].items()
        for source, domains in sources.items()
        for domain, summary in domains.items()
    }
    for setting, means in report["benchmark_means"].items():
        metrics |= {f"{setting}/benchmark_means/{domain}/accepted_length".replace("+", "_"): mean for domain, mean in means.items()}
    if report["lossless"]:
        metrics |= {f"lossless_{key}": float(report["lossless"][key]) for key in ("num_prompts", "num_equal", "num_wrong")}
    if serving := report["serving"]:
        metrics |= {f"serving/{side}_accepted_length": serving[side]["accepted_length"] for side in ("served", "offline")}
        metrics |= {f"serving/{key}": float(serving[key]) for key in ("difference", "num_texts", "num_equal_texts")}
    metrics["prompts_skipped"] = float(len(report["skipped"]))
    return metrics | {f"prompts_skipped/{reason.replace(' ', '_')}": float(n) for reason, n in report["skipped_by_reason"].items()}


# --- figures --------------------------------------------------------------------------------------------------------

Lines = Mapping[str, Mapping[str, Any]]  # label -> summary
NAN = float("nan")


@dataclass(frozen=True)
class Panel:
    """What is drawn of a summary: (name on the x axis, y, low and high end of its interval) of each point, NaN where there is none."""

    x: str
    y: str
    points: Callable[[Mapping[str, Any]], list[tuple[str, float, float, float]]]
    bottom: float
    top: float | None


def figures(report: Mapping[str, Any]) -> dict[str, bytes]:
    """The paper's Table 1 as bars, Figure 2 (acceptance by position), Figure 5 (threshold sweep), and the context buckets."""
    rows = _rows(report)
    swept = [(title, {label: s for label, s in lines.items() if s["threshold_sweep"]}) for title, lines in rows]
    swept = [(title, lines) for title, lines in swept if lines]
    found = {}
    if rows:
        found["accepted_length.png"] = _bars(report)
        found["acceptance.png"] = _grid(rows, [_by_position("conditional_acceptance"), _by_position("prefix_survival")])
        found["context.png"] = _grid(rows, [Panel("position of the anchor, tokens", "accepted length", _context_points, 1, None)])
    if swept:
        panels = [
            _by_threshold("accepted_length", "accepted length", 1, None),
            _by_threshold("verified_tokens", "verified tokens a round", 0, None),
            _by_threshold("acceptance_rate", "accepted / verified", 0, 1),
        ]
        found["thresholds.png"] = _grid(swept, panels)
    return found


def _rows(report: Mapping[str, Any]) -> list[tuple[str, Lines]]:
    """A row of panels for each setting: its test split by domain, and its benchmarks."""
    rows: list[tuple[str, Lines]] = []
    for setting, sources in report["settings"].items():
        domains = {domain: summary for domain, summary in sources.get(TEST, {}).items() if domain != MATH_AND_CODE}
        benchmarks = {source: domains["all"] for source, domains in sources.items() if source != TEST}
        rows += [(f"{setting}, {what}", lines) for what, lines in (("test split", domains), ("benchmarks", benchmarks)) if lines]
    return rows


def _by_position(key: str) -> Panel:
    def points(summary: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
        return [(str(k), NAN if value is None else value, NAN, NAN) for k, value in enumerate(summary[key], 1)]

    return Panel("position k", key.replace("_", " "), points, 0, 1)


def _by_threshold(key: str, label: str, bottom: float, top: float | None) -> Panel:
    def points(summary: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
        return [(f"{p['threshold']:g}", NAN if p[key] is None else p[key], NAN, NAN) for p in summary["threshold_sweep"]]

    return Panel("confidence threshold", label, points, bottom, top)


def _context_points(summary: Mapping[str, Any]) -> list[tuple[str, float, float, float]]:
    buckets = summary["context_buckets"]
    while not buckets[-1]["num_rounds"]:
        buckets = buckets[:-1]
    names = [f"{b['from_tokens']}-{b['below_tokens'] or ''}" for b in buckets]
    return [
        (name, b["accepted_length"], *b["accepted_length_interval"]) if b["num_rounds"] else (name, NAN, NAN, NAN)
        for name, b in zip(names, buckets, strict=True)
    ]


def _grid(rows: Sequence[tuple[str, Lines]], panels: Sequence[Panel]) -> bytes:
    """Every panel for every row. The line of all domains is the thick one, and has its intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels) + 1.6, 3.3 * len(rows)), layout="constrained")
    for (title, lines), axes in zip(rows, figure.subplots(len(rows), len(panels), squeeze=False), strict=True):
        for ax, panel in zip(axes, panels, strict=True):
            names: list[str] = []
            for label, summary in lines.items():
                points = panel.points(summary)
                style = {"linewidth": 2.2, "color": "black", "zorder": 3} if label == "all" else {"linewidth": 1.2}
                ax.plot(range(len(points)), [y for _, y, _, _ in points], "o-", markersize=3, label=label, **style)
                if label == "all":
                    ax.vlines(range(len(points)), [low for *_, low, _ in points], [high for *_, high in points], color="black", linewidth=1)
                names = max(names, [name for name, *_ in points], key=len)
            ax.set(title=title, xlabel=panel.x, ylabel=panel.y)
            ax.set_xticks(range(len(names)), names, fontsize=8)
            ax.set_ylim(panel.bottom, panel.top)
            ax.grid(alpha=0.3)
        axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return png(figure)


def _bars(report: Mapping[str, Any]) -> bytes:
    """Accepted length with its interval, a group of bars for every source; of the test split for every domain."""
    from matplotlib.figure import Figure

    settings = report["settings"]
    places = dict.fromkeys(
        (source != TEST, source, domain)
        for sources in settings.values()
        for source, domains in sources.items()
        for domain in domains
        if (domain != MATH_AND_CODE if source == TEST else domain == "all")
    )
    figure = Figure(figsize=(max(0.9 * len(places) + 2, 6), 4), layout="constrained")
    ax, width = figure.subplots(), 0.8 / len(settings)
    for i, (setting, sources) in enumerate(settings.items()):
        shown = [
            (x + (i - (len(settings) - 1) / 2) * width, sources[source][domain])
            for x, (_, source, domain) in enumerate(places)
            if domain in sources.get(source, {})
        ]
        lengths = [s["accepted_length"] for _, s in shown]
        bars = ax.bar([x for x, _ in shown], lengths, width * 0.94, label=setting)
        spread = [[abs(s["accepted_length"] - s["accepted_length_interval"][side]) for _, s in shown] for side in (0, 1)]
        ax.errorbar([x for x, _ in shown], lengths, spread, fmt="none", ecolor="black", elinewidth=1)
        ax.bar_label(bars, [f"{length:.2f}" for length in lengths], fontsize=7, padding=8)
    ax.set_xticks(range(len(places)), [source if is_benchmark else f"test\n{domain}" for is_benchmark, source, domain in places])
    ax.tick_params(axis="x", labelrotation=30 if len(places) > 8 else 0)
    ax.set_ylabel("accepted length")
    ax.margins(y=0.15)
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3, axis="y")
    return png(figure)
