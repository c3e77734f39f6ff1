"""What a sweep came to: a line for each point with its seeds pooled, and how it compares with the first on the same prompts.

A point is named by the overrides in which it differs from the others; those that end in `.seed` make repetitions of it.

    accepted length   of a decoding setting and source of prompts, pooled over the rounds of all seeds; ± the standard deviation
                      between seeds; in brackets the difference to the first point on the prompts that both decoded: a 95 %
                      bootstrap interval over prompts, alike for both, and seeds (metrics.bootstrap_difference)
    teacher-forced    expected accepted length on the select rows at temperature 1: mean ± standard deviation between seeds

Both files, `sweeps/<hash of the command>/table.md` and `.png`, are made from records and rounds alone.
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
    """One point of the sweep: of each seed the drafter's metrics, and its counts by decoding setting and source."""

    name: str
    drafters: list[Mapping[str, float]] = field(default_factory=list)
    counts: dict[str, list[Counts]] = field(default_factory=lambda: defaultdict(list))


def report(
    runs: Sequence[tuple[Sequence[str], Mapping[str, Artifact]]], root: Storage, command: Sequence[str]
) -> tuple[list[str], list[list[str]], str]:
    """Columns, rows and the folder of the files, from (overrides, artifacts) of every run; a run that failed has no artifacts."""
    points = _points(runs)
    settings = sorted({setting for point in points for setting in point.counts})
    columns = ["", "seeds", "trained parameters", "teacher-forced", *(f"accepted length, {setting}" for setting in settings)]
    rows = [_row(point, points[0], settings) for point in points]
    folder = f"sweeps/{hashlib.sha256(repr(list(command)).encode()).hexdigest()[:8]}"
    lines = ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)]
    root.put(f"{folder}/table.md", "\n".join(lines).encode() + b"\n")
    if settings:
        root.put(f"{folder}/table.png", _figure(points, settings))
    return columns, rows, f"{root.uri}/{folder}"


def _points(runs: Sequence[tuple[Sequence[str], Mapping[str, Artifact]]]) -> list[Point]:
    shared = set.intersection(*(set(overrides) for overrides, _ in runs))
    points: dict[str, Point] = {}
    for overrides, artifacts in runs:
        name = " ".join(word for word in overrides if word not in shared and not word.partition("=")[0].endswith(".seed")) or "all"
        point = points.setdefault(name, Point(name))
        for artifact in artifacts.values():
            if isinstance(artifact, Drafter):
                point.drafters.append(artifact.record["metrics"])
            if isinstance(artifact, EvalReport):
                for setting, counts in _counts(artifact).items():
                    point.counts[setting].append(counts)
    return list(points.values())


def _counts(evaluated: Artifact) -> dict[str, Counts]:
    """Of each decoding setting and source, named as in the report: the tokens and the rounds of every request."""
    storage, found = open_storage(evaluated.uri), defaultdict[str, Counts](dict)
    for name in evaluated.record["files"]:
        if name.startswith(EvalReport.ROUNDS):
            for r in from_parquet(storage.read(name)):
                counts = found[f"{r.setting}/{r.source}"]
                tokens, rounds = counts.get(r.request_id, (0, 0))
                counts[r.request_id] = tokens + r.accepted + (not r.ended_by_stop), rounds + 1
    return found


def _accepted_length(counts: Sequence[Counts]) -> float:
    totals = [count for each in counts for count in each.values()]
    return sum(tokens for tokens, _ in totals) / sum(rounds for _, rounds in totals)


def _row(point: Point, first: Point, settings: Sequence[str]) -> list[str]:
    sizes = sorted({int(metrics["num_parameters"]) for metrics in point.drafters})
    row = [point.name, str(len(point.drafters)), " / ".join(f"{size:,}" for size in sizes)]
    teacher_forced = [metrics["select_accepted_length"] for metrics in point.drafters]
    row.append(_spread(statistics.fmean(teacher_forced), teacher_forced) if teacher_forced else "")
    for setting in settings:
        ours, theirs = point.counts[setting], first.counts[setting]
        text = _spread(_accepted_length(ours), [_accepted_length([counts]) for counts in ours]) if ours else ""
        both = sorted(set.intersection(*(set(counts) for counts in (*ours, *theirs)))) if ours and theirs else []
        if both and point is not first:
            low, high = bootstrap_difference(_columns(ours, both), _columns(theirs, both))
            text += f" [{low:+.3f}, {high:+.3f}]"
        row.append(text)
    return row


def _columns(seeds: Sequence[Counts], requests: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and rounds, a line for each seed."""
    tokens, rounds = ([[counts[request][i] for request in requests] for counts in seeds] for i in (0, 1))
    return tokens, rounds


def _spread(pooled: float, values: Sequence[float]) -> str:
    return f"{pooled:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{pooled:.3f}"


def _figure(points: Sequence[Point], settings: Sequence[str]) -> bytes:
    """A dot for each seed, a bar for the pooled figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(settings) + 2, 0.45 * len(points) + 1.4), layout="constrained")
    for axes, setting in zip(figure.subplots(1, len(settings), squeeze=False, sharey=True)[0], settings, strict=True):
        for place, point in enumerate(points):
            if counts := point.counts[setting]:
                axes.plot([_accepted_length([each]) for each in counts], [place] * len(counts), "o", markersize=5, alpha=0.6)
                axes.plot([_accepted_length(counts)], [place], "|", markersize=18, color="black")
        axes.set(title=setting, xlabel="accepted length", yticks=range(len(points)), yticklabels=[point.name for point in points])
        axes.grid(alpha=0.3)
        axes.yaxis.set_inverted(True)
    return png(figure)
