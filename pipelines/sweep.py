"""What a sweep came to: a line for each point with its seeds pooled, and how it compares with the first on the same prompts.

A point is named by the overrides in which it differs from the others; those that end in `.seed` make repetitions of it.

    accepted length   pooled over the rounds of all seeds; ± the standard deviation between seeds
    difference        to the first point: 95 % bootstrap interval over prompts, drawn alike for both (metrics.bootstrap_difference)
    teacher-forced    expected accepted length on the select rows at temperature 1: mean ± standard deviation between seeds

Both files, `sweeps/<hash of the points>/table.md` and `.png`, are made from records and rounds alone.
"""

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark.metrics import bootstrap_difference
from dspark.rounds import from_parquet
from dspark.storage import Storage
from pipelines.artifacts import Drafter, EvalReport
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact
from pipelines.figures import png

Counts = dict[str, tuple[int, int]]  # request -> tokens emitted, rounds


@dataclass
class Point:
    """One point of the sweep: of each seed the drafter's metrics, and its counts by decoding setting."""

    name: str
    drafters: list[Mapping[str, float]] = field(default_factory=list)
    counts: dict[str, list[Counts]] = field(default_factory=lambda: defaultdict(list))

    def pooled(self, setting: str) -> dict[str, tuple[int, int]]:
        pooled: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for counts in self.counts[setting]:
            for request, (tokens, rounds) in counts.items():
                pooled[request] = pooled[request][0] + tokens, pooled[request][1] + rounds
        return pooled


def report(runs: Sequence[tuple[Sequence[str], Mapping[str, Artifact]]], root: Storage) -> tuple[list[str], list[list[str]], str]:
    """Columns, rows and the folder of the two files, from (overrides, artifacts) of every run."""
    points = _points(runs)
    settings = sorted({setting for point in points for setting in point.counts})
    columns = ["", "seeds", "trained parameters", "teacher-forced"]
    for setting in settings:
        columns += [f"accepted length, {setting}", "difference"]
    rows = [_row(point, points[0], settings) for point in points]
    folder = f"sweeps/{hashlib.sha256(repr(sorted(list(overrides) for overrides, _ in runs)).encode()).hexdigest()[:8]}"
    lines = ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)]
    root.put(f"{folder}/table.md", "\n".join(lines).encode() + b"\n")
    if settings:
        root.put(f"{folder}/table.png", _figure(points, settings))
    return columns, rows, f"{root.uri}/{folder}"


def _points(runs: Sequence[tuple[Sequence[str], Mapping[str, Artifact]]]) -> list[Point]:
    shared = set.intersection(*(set(overrides) for overrides, _ in runs))
    points: dict[str, Point] = {}
    for overrides, artifacts in runs:
        name = " ".join(word for word in overrides if word not in shared and not word.partition("=")[0].endswith(".seed"))
        point = points.setdefault(name, Point(name))
        for artifact in artifacts.values():
            if isinstance(artifact, Drafter):
                point.drafters.append(artifact.record["metrics"])
            if isinstance(artifact, EvalReport):
                for setting, counts in _counts(artifact).items():
                    point.counts[setting].append(counts)
    return list(points.values())


def _counts(evaluated: Artifact) -> dict[str, Counts]:
    """Of each decoding setting: the tokens and the rounds of every request."""
    storage, found = open_storage(evaluated.uri), defaultdict[str, Counts](dict)
    for name in evaluated.record["files"]:
        if name.endswith(".parquet"):
            for r in from_parquet(storage.read(name)):
                counts = found[f"T = {r.temperature:g}" + (f", {r.variant}" if r.variant else "")]
                tokens, rounds = counts.get(r.request_id, (0, 0))
                counts[r.request_id] = tokens + r.accepted + (not r.ended_by_stop), rounds + 1
    return found


def _lengths(point: Point, setting: str) -> list[float]:
    """The accepted length of each seed."""
    totals = [[sum(column) for column in zip(*counts.values(), strict=True)] for counts in point.counts[setting]]
    return [tokens / rounds for tokens, rounds in totals]


def _row(point: Point, first: Point, settings: Sequence[str]) -> list[str]:
    sizes = sorted({int(metrics["num_parameters"]) for metrics in point.drafters})
    row = [point.name, str(len(point.drafters)), " / ".join(f"{size:,}" for size in sizes)]
    row.append(_spread([metrics["select_accepted_length"] for metrics in point.drafters]))
    for setting in settings:
        ours, theirs = point.pooled(setting), first.pooled(setting)
        same = sorted(ours.keys() & theirs.keys())
        if not same:
            row += ["", ""]
            continue
        mean = sum(tokens for tokens, _ in ours.values()) / sum(rounds for _, rounds in ours.values())
        row.append(_spread(_lengths(point, setting), mean))
        mine, other = (([counts[r][0] for r in same], [counts[r][1] for r in same]) for counts in (ours, theirs))
        low, high = bootstrap_difference(mine, other)
        row.append("" if point is first else f"[{low:+.3f}, {high:+.3f}]")
    return row


def _spread(values: Sequence[float], mean: float | None = None) -> str:
    if not values:
        return ""
    text = f"{statistics.fmean(values) if mean is None else mean:.3f}"
    return f"{text} ± {statistics.stdev(values):.3f}" if len(values) > 1 else text


def _figure(points: Sequence[Point], settings: Sequence[str]) -> bytes:
    """A dot for each seed, a bar for the pooled figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(settings) + 2, 0.45 * len(points) + 1.4), layout="constrained")
    for axes, setting in zip(figure.subplots(1, len(settings), squeeze=False, sharey=True)[0], settings, strict=True):
        for place, point in enumerate(points):
            lengths = _lengths(point, setting)
            axes.plot(lengths, [place] * len(lengths), "o", markersize=5, alpha=0.6)
            if lengths:
                axes.plot([statistics.fmean(lengths)], [place], "|", markersize=18, color="black")
        axes.set(title=setting, xlabel="accepted length", yticks=range(len(points)), yticklabels=[point.name for point in points])
        axes.grid(alpha=0.3)
        axes.invert_yaxis()
    return png(figure)
