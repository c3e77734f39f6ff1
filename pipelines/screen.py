"""What a person sees: the plan, bars while steps run, a summary, and one screen when something fails.

    screen = RichScreen()
    screen.plan(planned, root.uri)                     # hit or run, and why; then .cache_size(size, stage)
    screen.summary(run(planned, root, ..., screen))    # or screen.failure(error), .config_error(error), .interrupted()

Without a terminal (a log file, CI) the bars become plain lines, one every 10 s. Texts are printed as they are: square
brackets in them (`rebuild=[train]`) are no markup.
"""

import shlex
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.artifacts import Drafter, Release
from pipelines.dag import Artifact, Step
from pipelines.runner import Planned, Progress, StepFailed
from pipelines.settings import CacheTargetsStage
from pipelines.sizing import CacheSize, units

if TYPE_CHECKING:
    from pipelines.verify import ShardReport

PLAIN_WIDTH = 160  # columns of a table where there is no terminal
PLAIN_LINE_SECONDS = 10.0
RATE_WINDOW_SECONDS = 60.0
NUM_METRICS = 4
NUM_FRAMES = 6
NUM_PROBLEMS = 5  # shown of one file
NUM_CAUSE_LINES = 12


class RichScreen:
    """runner.Screen on the standard output."""

    def __init__(self, is_verbose: bool = False, console: Console | None = None) -> None:
        self._is_verbose, self._root_uri = is_verbose, ""
        is_plain = not sys.stdout.isatty()
        self._console = console or Console(width=PLAIN_WIDTH if is_plain else None, highlight=False, markup=False, emoji=False)
        self._bar: bars.Progress | None = None
        self._step: Step | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._printed = 0.0
        self._begun: list[str] = []

    def plan(self, planned: Sequence[Planned], root_uri: str) -> None:
        self._root_uri = root_uri
        table = _table("step", "plan", "reason", "folder")
        for item in planned:
            word = Text("hit", "green") if item.verdict.is_hit else Text("run", "yellow")
            word = Text("stream", "cyan") if item.verdict.is_streamed else word
            table.add_row(item.step.name, word, item.verdict.reason, item.step.folder)
        self._console.print(table)
        self._line(f"folders are below {self._root_uri}")

    def cache_size(self, size: CacheSize, stage: CacheTargetsStage) -> None:
        """What the cache that is to be made will take, in every form, beside DeepSpec's for the same tokens."""
        rows, tokens = size.rows, size.tokens
        table = _table("target cache", "bytes/token", "total", "")
        for name, num_bytes in (*size.forms.items(), ("DeepSpec's", size.deepspec_bytes)):
            word = Text("chosen", "yellow") if name == size.chosen else Text("")
            table.add_row(name, f"{num_bytes / max(tokens, 1):,.0f}", units(num_bytes), word)
        self._line("")
        self._console.print(table)
        self._line(f"rows: {rows.count:,}  tokens: {tokens:,} ({rows.prompt_tokens:,} prompt + {rows.response_tokens:,} response)")
        self._line(f"how: {rows.how}")
        free = "unknown" if size.free_bytes is None else units(size.free_bytes)
        self._line(f"free space: {free}" + (f", beside {units(size.stored_bytes)} stored already" if size.stored_bytes else ""))
        if stage.mode == "stream":
            self._line(
                f"stream: nothing is stored; stage.cache_targets.window_bytes={stage.window_bytes} ({units(stage.window_bytes)}) are kept at most"
            )
        elif stage.compression != "none":
            self._line(f"before compression: {stage.compression} makes it smaller")

    def verified(self, reports: Sequence["ShardReport"]) -> None:
        """What was read again, and every damage, by shard and row."""
        self._stop_bar()
        table = _table("file", "rows", "tokens", "size", "target's best token first", "")
        for report in reports:
            word = Text(f"{len(report.problems)} problems", "bold red") if report.problems else Text("sound", "green")
            agreeing = f"{report.num_agreeing} of {report.num_compared}" if report.num_compared else ""
            counts = (f"{report.num_rows:,}", f"{report.num_tokens:,}", units(report.num_bytes)) if report.num_bytes else ("", "", "")
            table.add_row(report.file, *counts, agreeing, word)
        self._console.print(table)
        for report in reports:
            for row, problem in report.problems[:NUM_PROBLEMS]:
                self._line(f"  {report.file}  {row}  {_indented(problem)}", "red")
            if len(report.problems) > NUM_PROBLEMS:
                self._line(f"  {report.file}  and {len(report.problems) - NUM_PROBLEMS} more")
        damaged = [report.file for report in reports if report.problems]
        if damaged:
            self._line(f"damaged: {', '.join(damaged)}. Fix: the same command without mode=verify makes these anew and keeps the rest")
        else:
            self._line(f"sound: {sum(r.num_rows for r in reports):,} rows, {units(sum(r.num_bytes for r in reports))} read again")

    def status(self, planned: Sequence[Planned], root_uri: str, states: Mapping[str, str]) -> None:
        """What is there of each step; `states` says it of those that are not finished."""
        self._root_uri = root_uri
        table = _table("step", "state", "made", "metrics", "folder")
        for item in planned:
            step, record = item.step, item.verdict.record
            made, metrics = (record["provenance"]["finished_at"], _metrics(record["metrics"])) if record else ("-", "")
            table.add_row(step.name, "finished" if record else states[step.name], made, metrics, step.folder)
        self._console.print(table)
        self._line(f"folders are below {self._root_uri}")

    def started(self, step: Step, reason: str) -> None:
        self._stop_bar()
        self._step, self._printed = step, time.monotonic()
        self._samples.clear()
        self._begun.append(step.name)
        self._line(f"{step.name}: {reason}")

    def progress(self, progress: Progress) -> None:
        assert self._step is not None
        now = time.monotonic()
        self._samples.append((now, progress.done))
        while now - self._samples[0][0] > RATE_WINDOW_SECONDS and len(self._samples) > 2:
            self._samples.popleft()
        text = f"{_pace(progress, self._samples)}  {_metrics(progress.metrics)}".rstrip()
        if self._console.is_terminal:
            if self._bar is None:
                columns = (
                    bars.TextColumn("{task.description}", markup=False),
                    bars.BarColumn(),
                    bars.TextColumn("{task.fields[text]}", markup=False),
                )
                self._bar = bars.Progress(*columns, console=self._console, transient=True)
                self._bar.add_task(self._step.name, text="")
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], total=progress.total or None, completed=progress.done, text=text)
        elif now - self._printed >= PLAIN_LINE_SECONDS:
            self._printed = now
            self._line(f"{self._step.name}: {text}")

    def finished(self, step: Step, record: Mapping[str, Any]) -> None:
        self._stop_bar()
        self._line(f"{step.name}: done in {_seconds(record['provenance']['wall_seconds'])}  {_metrics(record['metrics'])}".rstrip())

    def note(self, text: str) -> None:
        self._line(text)

    def summary(self, artifacts: Mapping[str, Artifact]) -> None:
        """What is there now, what it cost, and where the drafter lies. A hit cost nothing today."""
        self._stop_bar()
        table = _table("step", "", "wall", "CPU", "load", "metrics", "folder")
        for name, artifact in artifacts.items():
            record, is_made = artifact.record, name in self._begun
            cost = record["provenance"]
            spent = (
                (_seconds(cost["wall_seconds"]), _seconds(cost["cpu_seconds"]), f"{cost['load_average']:.1f}")
                if is_made
                else ("-", "-", "-")
            )
            word = Text("made", "yellow") if is_made else Text("hit", "green")
            table.add_row(name, word, *spent, _metrics(record["metrics"]), artifact.uri.removeprefix(f"{self._root_uri}/"))
        self._console.print(table)
        self._line(f"folders are below {self._root_uri}")
        for artifact in artifacts.values():
            if isinstance(artifact, Drafter | Release):
                self._line(f"{artifact.noun.lower()}: {artifact.uri}/{artifact.FOLDER}")

    def evaluation(self, report: Mapping[str, Any]) -> None:
        """Accepted length with its interval for every source and domain, a column for each decoding setting, and what was set aside."""
        settings, benchmark_means = report["settings"], report["benchmark_means"]
        table = _table("accepted length", "domain", "prompts", *settings)
        table.columns[2].justify = "right"
        places = dict.fromkeys((source, domain) for found in settings.values() for source in found for domain in found[source])
        for source, domain in places:
            cells = [found.get(source, {}).get(domain) for found in settings.values()]
            if domain == "all" and sum(place[0] == source for place in places) == 2:
                continue  # the one domain that there is
            numbers = {cell["num_prompts"] for cell in cells if cell}
            table.add_row(source, domain, " / ".join(f"{n:,}" for n in sorted(numbers)), *(_length(cell) for cell in cells))
        for domain in dict.fromkeys(domain for means in benchmark_means.values() for domain in means):
            means = [benchmark_means.get(setting, {}).get(domain) for setting in settings]
            table.add_row("mean of the benchmarks", domain, "", *("-" if mean is None else f"{mean:.2f}" for mean in means))
        self._line("")
        self._console.print(table)
        self._line("bonus token included; in brackets 95 % bootstrap intervals over prompts")
        if report["skipped"]:
            counts = ", ".join(f"{number} {reason}" for reason, number in report["skipped_by_reason"].items())
            self._line(f"set aside: {counts} (skipped in report.json: source and row of each)", "yellow")

    def calibration(self, report: Mapping[str, Any]) -> None:
        """ECE of the survivals on the test rounds by position and method, what they resolve, and the change that STS makes."""
        for setting, found in report["settings"].items():
            view = found["test"]["all"]
            methods, change = view["methods"], view["change"]["ece"]["raw"]
            table = _table(f"ECE %, {setting}", "T", "rounds", "survived", *methods, "floor", "sts - raw")
            table.columns[0].no_wrap = True
            for k, temperature in enumerate(found["temperatures"]):
                sts = methods["sts"]["positions"][k]
                survived = f"{sts['num_survivors'] / sts['num_rounds']:.3f}" if sts["num_rounds"] else "-"
                cells = [_estimate(method["positions"][k]["ece"], ".1f", 100.0, has_interval=False) for method in methods.values()]
                floor = "-" if sts["ece_floor"] is None else f"{100 * sts['ece_floor']:.1f}"
                moved = _estimate(change["position_K"][k], ".2f", 100.0)
                table.add_row(f"position {k + 1}", f"{temperature:.2f}", f"{sts['num_rounds']:,}", survived, *cells, floor, moved)
            floor = methods["sts"]["mean"]["ece_floor"]
            means = [_estimate(method["mean"]["ece"], ".1f", 100.0) for method in methods.values()]
            table.add_row(
                "mean", "", "", "", *means, "-" if floor is None else f"{100 * floor:.1f}", _estimate(change["mean"], ".2f", 100.0)
            )
            self._line("")
            self._console.print(table)
            self._line(
                f"fitted on {found['num_rounds']['calibrate']:,} rounds of other prompts; in brackets 95 % bootstrap intervals over prompts"
            )
            short = [f"{name} at {', '.join(map(str, ks))}" for name, ks in found["fallback_positions"].items() if ks]
            if short:
                why = "too few rounds, stage.calibrate.min_rounds; raw confidences kept"
                self._line(f"positions not fitted ({why}): {'; '.join(short)}", "yellow")

    def drift(self, report: Mapping[str, Any], uri: str) -> None:
        """A calibration on new rounds, by position and domain, and the verdict."""
        now, temperatures, before = report["ece_now"], report["temperatures"], report["ece_at_calibration"]
        table = _table("position", "temperature", "refitted", "ECE at calibration", "ECE now", "change by refitting, held out")
        changes = [*report["change_by_refit"]["position_K"], report["change_by_refit"]["mean"]]
        rows = zip(temperatures["released"], temperatures["refitted"], before["position_K"], now["all"]["position_K"], strict=True)
        cells = [(str(k), f"{old:.2f}", f"{new:.2f}", ece, estimate) for k, (old, new, ece, estimate) in enumerate(rows, 1)]
        cells.append(("mean", "", "", before["mean"], now["all"]["mean"]))
        for (name, old, new, ece, estimate), change in zip(cells, changes, strict=True):
            table.add_row(name, old, new, "-" if ece is None else f"{ece:.3f}", _estimate(estimate, ".3f"), _estimate(change, "+.3f"))
        self._console.print(table)
        table = _table("domain", "rounds", "requests", "ECE now, mean over positions")
        for domain, found in now.items():
            table.add_row(domain, f"{found['num_rounds']:,}", f"{found['num_requests']:,}", _estimate(found["mean"], ".3f"))
        self._line("")
        self._console.print(table)
        self._line("in brackets 95 % bootstrap intervals over requests")
        self._line(f"verdict: {report['verdict']}", "bold yellow" if report["reasons"] else "bold green")
        for reason in report["reasons"]:
            self._line(f"  {reason}")
        self._line(f"refitted temperatures, report and figure: {uri}")

    def schedule(self, report: Mapping[str, Any]) -> None:
        """Throughput at every concurrency without drafting, with the best fixed length and as served, what is left to the oracle,
        what calibration changes, and the checks that failed."""
        served, calibrated = report["served"], report["calibrated"]
        columns = (
            "tokens/s of requests at once",
            "no drafting",
            "best fixed k",
            served,
            "its budget",
            "oracle",
            f"async: {calibrated} / raw",
        )
        table = _table(*columns)
        for static, oracle in zip(report["static"], report["oracle"], strict=True):
            num_requests, by_length = static["num_requests"], static["throughput_tokens_per_second_by_k"]
            row = next(
                r for r in report["rows"] if (r["policy"], r["confidences"], r["num_requests"]) == (served, calibrated, num_requests)
            )
            change = next(
                r["over_raw"]
                for r in report["calibration"]
                if (r["policy"], r["confidences"], r["num_requests"]) == ("scheduler_async", calibrated, num_requests)
            )
            best = f"{max(by_length):,.0f} (k = {static['recommended_k']})"
            cells = f"{row['throughput_tokens_per_second']:,.0f}", f"{row['mean_budget_tokens']:.2f}", f"{100 * oracle['gap']:+.1f} %"
            table.add_row(str(num_requests), f"{by_length[0]:,.0f}", best, *cells, _estimate(change, ".3f"))
        self._line("")
        self._console.print(table)
        self._line(f"replay of {report['num_texts']} texts; in brackets the 95 % bootstrap interval over them")
        for check in report["checks"]:
            if not check["is_ok"]:
                self._line(f"check {check['name']} at {check['num_requests']}: {check['value']:.3f}, bound {check['bound']}", "yellow")

    def sweep(self, columns: Sequence[str], rows: Sequence[Sequence[str]], uri: str) -> None:
        """What the points of a sweep came to, and where that is kept."""
        table = _table(*columns)
        for row in rows:
            table.add_row(*row)
        self._line("")
        self._console.print(table)
        self._line(f"kept in {uri}")

    def point_failed(self, overrides: Sequence[str], error: Exception) -> None:
        """One point of a sweep did not come to its end; the others go on."""
        self._stop_bar()
        cause = error.cause if isinstance(error, StepFailed) else error
        self._line(f"failed: {' '.join(overrides)}", "bold red")
        self._line(f"  cause      {_indented(_cause(cause))}")

    def failure(self, error: StepFailed) -> None:
        """One screen: which step, why, what is kept, and how to go on."""
        self._stop_bar()
        self._line(f"step {error.step.name} failed", "bold red")
        self._line(f"  cause      {_indented(_cause(error.cause))}")
        if self._is_verbose:
            frames = traceback.extract_tb(error.cause.__traceback__)[-NUM_FRAMES:]
            self._line("".join(traceback.format_list(frames)).rstrip())
        self._line(f"  kept       {self._root_uri}/{error.step.folder} (its finished parts are not made again)")
        self._line(f"  to go on   {_command(sys.argv, self._begun)}")

    def config_error(self, error: Exception) -> None:
        """A mistake in a setting or a place: its message names the field, the rule and the fix."""
        self._stop_bar()
        self._line(f"error: {_indented(str(error))}", "bold red")

    def interrupted(self) -> None:
        self._stop_bar()
        self._line("stopped; what is finished stays", "bold yellow")
        self._line(f"  to go on   {_command(sys.argv, self._begun)}")

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)  # paths and commands stay in one piece, to be copied


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ("step", ""))
    return table


def _length(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "-"
    low, high = summary["accepted_length_interval"]
    return _estimate({"estimate": summary["accepted_length"], "low": low, "high": high}, ".2f")


def _estimate(found: Mapping[str, float | None], form: str, scale: float = 1.0, has_interval: bool = True) -> str:
    """A value with its interval, as far as they are there: `1.70 [1.62, 1.79]`."""
    value, low, high = (found[key] for key in ("estimate", "low", "high"))
    if value is None:
        return "-"
    interval = f" [{scale * low:{form}}, {scale * high:{form}}]" if has_interval and low is not None and high is not None else ""
    return f"{scale * value:{form}}{interval}"


def _pace(progress: Progress, samples: deque[tuple[float, int]]) -> str:
    """`120/600 steps  1.9 steps/s  ETA 4m 12s`: the rate of the last minute, so that resumed work does not count."""
    text = f"{progress.done}/{progress.total} {progress.unit}" if progress.total else f"{progress.done} {progress.unit}"
    (first_time, first), (last_time, last) = samples[0], samples[-1]
    if last > first and last_time > first_time:
        rate = (last - first) / (last_time - first_time)
        text += f"  {rate:.3g} {progress.unit}/s" if rate >= 0.1 else f"  {1 / rate:.3g} s each"
        text += f"  ETA {_seconds((progress.total - progress.done) / rate)}" if progress.total > progress.done else ""
    return text


def _metrics(metrics: Mapping[str, float]) -> str:
    shown = list(metrics.items())[:NUM_METRICS]
    return "  ".join(f"{name}={value:.4g}" for name, value in shown)


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s"


def _cause(error: BaseException) -> str:
    """The message, cut in its middle when it is longer than a screen: remote tracebacks have their point at the end."""
    lines = f"{type(error).__name__}: {error}".rstrip().splitlines()
    return "\n".join(lines if len(lines) <= NUM_CAUSE_LINES else [*lines[:3], "...", *lines[3 - NUM_CAUSE_LINES :]])


def _indented(text: str) -> str:
    return text.replace("\n", "\n             ")


def _command(argv: Sequence[str], begun: Sequence[str]) -> str:
    """The same command, less the rebuilds that have begun: what they left goes on instead of being made once more."""
    words = []
    for word in argv[1:]:
        if word.startswith("rebuild="):
            names = [name.strip() for name in word.removeprefix("rebuild=").strip("[]").split(",")]
            left = [name for name in names if name and name not in begun]
            if not left:
                continue
            word = f"rebuild=[{','.join(left)}]"
        words.append(word)
    program = Path(argv[0])
    python = Path(sys.executable)
    shown = str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else str(python)
    return shlex.join([shown, *(["-m", program.parent.name] if program.name == "__main__.py" else [argv[0]]), *words])
