"""evaluate: decodes the test prompts (and benchmark files) with the drafter, losslessly, and reports what was accepted.

Units of work are a setting (temperature, draft mode, ablation) and a chunk of prompts; a unit counts once its rounds file
has its receipt. A last unit decodes some prompts in fp32 at temperature 0 with and without the drafter and compares the
texts. `report.json` is computed from the rounds alone (schema: dspark/rounds.py) and holds its own definitions;
`acceptance.png` shows acceptance by position; prompts that could not be decoded are in the report with their reason.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.metrics import Acceptance, acceptance, bootstrap_interval
from dspark.rounds import Round, from_parquet
from dspark.storage import Storage
from pipelines.artifacts import EvalReport, PromptSet
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.decoder import Decoder, DecoderSettings, put_rounds
from pipelines.figures import png
from pipelines.flow import EvaluateConfig
from pipelines.runner import Progress, Work
from pipelines.settings import DecodingSetting
from pipelines.stages.prompts import prompt_id, read_prompt_file

FIGURE = "acceptance.png"
MARGIN = 1e-4  # two greedy texts may part where the two best logits are closer than this
CHUNK_BATCHES = 2  # batches of prompts a unit of work

DEFINITIONS = {
    "accepted_length": "mean over rounds of accepted + 1 (bonus or correction); a round ended by an accepted stop token emits none",
    "prefix_survival": "per position k: rounds with accepted >= k / rounds with proposed >= k",
    "conditional_acceptance": "per position k: rounds with accepted >= k / rounds with proposed >= k and accepted >= k-1",
    "interval": "95 % bootstrap interval over prompts",
}


@dataclass(frozen=True)
class Settings:
    decoder: DecoderSettings
    precision: str
    out_uri: str


@dataclass(frozen=True)
class Unit:
    """`setting` None is the losslessness check."""

    name: str
    setting: DecodingSetting | None
    prompts: tuple[dict[str, Any], ...]


def run(config: EvaluateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    rows = [json.loads(line) for line in open_storage(inputs["prompts"].uri).read(PromptSet.PROMPTS).splitlines()]
    prompts = [{**row, "source": "test"} for row in rows if row["split"] == "test"][: config.evaluate.max_prompts_per_source]
    lossless = tuple(prompts[: config.evaluate.num_lossless_prompts])
    for name, uri in work.resources.files.items():
        prompts += [{**row, "id": prompt_id(row), "source": name} for row in read_prompt_file(uri, name)][
            : config.evaluate.max_prompts_per_source
        ]
    size = config.evaluate.batch_size * CHUNK_BATCHES
    units = [
        Unit(f"rounds-{setting_name(setting)}-{i // size:04d}", setting, tuple(prompts[i : i + size]))
        for setting in config.evaluate.settings
        for i in range(0, len(prompts), size)
    ] + ([Unit("lossless", None, lossless)] if lossless else [])
    receipts = {u.name: json.loads(out.read(f"{u.name}.json")) for u in units if out.exists(f"{u.name}.json")}
    total, done = sum(len(u.prompts) for u in units), sum(len(u.prompts) for u in units if u.name in receipts)
    work.report(Progress(done, total, "prompts"))
    stage = config.evaluate
    decoder = DecoderSettings.of(config, stage, work.resources.target_uri, inputs["drafter"].uri)
    settings = Settings(decoder, stage.precision, out.uri)
    for receipt in work.map("pipelines.stages.evaluate:Evaluator", settings, [u for u in units if u.name not in receipts]):
        receipts[receipt["name"]] = receipt
        done += receipt["num_prompts"]
        work.report(Progress(done, total, "prompts", {"decoded_tokens_per_second": receipt["tokens_per_second"]}))
    rounds = [r for u in units if u.setting is not None for r in from_parquet(out.read(f"{u.name}.parquet"))]
    report = make_report(rounds, [receipts[u.name] for u in units])
    out.put(EvalReport.REPORT, json.dumps(report, indent=1).encode())
    out.put(FIGURE, _figure(report))
    names = [EvalReport.REPORT, FIGURE, *(f"{u.name}.parquet" for u in units if u.setting is not None)]
    return Outcome(file_checksums(out, names), _headline(report), (FIGURE,))


def setting_name(setting: DecodingSetting) -> str:
    return f"t{setting.temperature:g}-{setting.draft_mode}" + (f"-{setting.ablation}" if setting.ablation else "")


class Evaluator:
    """Lives on one worker: target and drafter loaded once (the fp32 pair only when the losslessness check comes)."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._decoder, self._out = settings, Decoder(settings.decoder), open_storage(settings.out_uri)

    def __call__(self, unit: Unit) -> dict[str, Any]:
        started = time.monotonic()
        requests, skipped = self._decoder.requests(unit.prompts)
        receipt: dict[str, Any] = {"name": unit.name, "num_prompts": len(unit.prompts), "skipped": skipped}
        if unit.setting is None:
            receipt["lossless"], num_tokens = self._check_lossless(requests)
        else:
            completions = self._decoder.decode(requests, unit.setting, self._settings.precision)
            receipt["sha256"] = put_rounds(self._out, f"{unit.name}.parquet", completions)
            num_tokens = sum(len(c.token_ids) for c in completions)
        receipt["tokens_per_second"] = num_tokens / max(time.monotonic() - started, 1e-9)
        self._out.put(f"{unit.name}.json", json.dumps(receipt).encode())
        return receipt

    def _check_lossless(self, requests: list[Any]) -> tuple[dict[str, Any], int]:
        """Greedy text with and without the drafter, fp32; every place where they part, with its margin."""
        setting = DecodingSetting(0.0, "greedy", None)
        plain, drafted = (self._decoder.decode(requests, setting, "fp32", use_drafter) for use_drafter in (False, True))
        target, _ = self._decoder.models("fp32")
        partings: list[dict[str, Any]] = []
        for one, other in zip(plain, drafted, strict=True):
            if one.token_ids != other.token_ids:
                position = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b), 0)
                states = target.states([*one.request.prompt_ids, *one.token_ids[:position]])
                best = target.logits(states.final_SD[-1]).topk(2).values
                partings.append({"id": one.request.id, "position": position, "margin": float(best[0] - best[1])})
        num_tokens = sum(len(c.token_ids) for c in plain + drafted)
        num_wrong = sum(parting["margin"] > MARGIN for parting in partings)
        return {
            "num_prompts": len(requests),
            "num_equal": len(requests) - len(partings),
            "num_wrong": num_wrong,
            "partings": partings,
        }, num_tokens


def make_report(rounds: Sequence[Round], receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Acceptance by setting, source and domain, pooled over rounds."""
    groups: dict[tuple[str, str, str], list[Round]] = defaultdict(list)
    for r in rounds:
        for domain in (r.domain, "all", *(("math+code",) if r.domain in ("math", "code") else ())):
            groups[r.setting, r.source, domain].append(r)
    settings: dict[str, Any] = {}
    for (setting, source, domain), members in sorted(groups.items()):
        settings.setdefault(setting, {}).setdefault(source, {})[domain] = _summary(members)
    checks = [receipt["lossless"] for receipt in receipts if "lossless" in receipt]
    return {
        "schema_version": 1,
        "definitions": DEFINITIONS,
        "settings": settings,
        "lossless": checks[0] if checks else None,
        "skipped": [item for receipt in receipts for item in receipt["skipped"]],
    }


def _summary(rounds: Sequence[Round]) -> dict[str, Any]:
    block_size = max(r.proposed for r in rounds)
    found: Acceptance = acceptance(
        [r.proposed for r in rounds], [r.accepted for r in rounds], [r.ended_by_stop for r in rounds], block_size
    )
    emitted: dict[str, float] = defaultdict(float)
    counted: dict[str, float] = defaultdict(float)
    for r in rounds:
        emitted[r.request_id] += r.accepted + (not r.ended_by_stop)
        counted[r.request_id] += 1
    interval = bootstrap_interval(list(emitted.values()), list(counted.values()))
    return {**asdict(found), "accepted_length_interval": interval, "num_prompts": len(emitted)}


def _headline(report: Mapping[str, Any]) -> dict[str, float]:
    """The figures for the summary and the tracker."""
    metrics = {
        f"{setting}/{source}/{domain}/accepted_length".replace("+", "_"): summary["accepted_length"]
        for setting, sources in report["settings"].items()
        for source, domains in sources.items()
        for domain, summary in domains.items()
    }
    if report["lossless"]:
        metrics |= {f"lossless_{key}": float(report["lossless"][key]) for key in ("num_prompts", "num_equal", "num_wrong")}
    return metrics | {"prompts_skipped": float(len(report["skipped"]))}


def _figure(report: Mapping[str, Any]) -> bytes:
    """Conditional acceptance and prefix survival by position, one line a setting and domain."""
    from matplotlib.figure import Figure

    rows = [(name, sources["test"]) for name, sources in report["settings"].items() if "test" in sources]
    figure = Figure(figsize=(10, 3.4 * max(len(rows), 1)), layout="constrained")
    grid = figure.subplots(max(len(rows), 1), 2, squeeze=False, sharex=True, sharey=True)
    for (name, domains), axes in zip(rows, grid, strict=False):
        for ax, key in zip(axes, ("conditional_acceptance", "prefix_survival"), strict=True):
            for domain, summary in domains.items():
                if domain != "math+code":
                    style = {"linewidth": 2.2, "color": "black"} if domain == "all" else {"linewidth": 1.0}
                    ax.plot(range(1, len(summary[key]) + 1), summary[key], "o-", markersize=3, label=domain, **style)
            positions = range(1, max(len(summary[key]) for summary in domains.values()) + 1)
            ax.set(title=f"{name}: {key.replace('_', ' ')}", ylim=(0, 1), xlabel="position k", xticks=positions)
            ax.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
    return png(figure)
