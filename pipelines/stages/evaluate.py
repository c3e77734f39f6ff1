"""evaluate: decodes the test prompts and the benchmarks with the drafter, losslessly, and reports what was accepted.

Units of work are a setting (temperature, draft mode, ablation) and a chunk of prompts; a unit counts once its rounds file
has its receipt, so that a killed evaluation decodes at most the unfinished chunks again. A last unit decodes some prompts in
fp32 at temperature 0 with and without the drafter and compares the texts. `report.json` and the figures are computed from the
rounds alone (pipelines/evaluation.py). A bad row of a benchmark, a prompt that it holds twice and a prompt that leaves no room
for its answer are set aside and counted, with file, row and reason.
"""

import json
import random
import string
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dspark.rounds import from_parquet, setting_name
from dspark.storage import Storage
from pipelines.artifacts import EvalReport, PromptSet
from pipelines.backends.object_store import open_storage
from pipelines.benchmarks import PAPER_SUBSET_SEED, HubBenchmark
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.decoder import Decoder, DecoderSettings, put_rounds
from pipelines.evaluation import SetAside, Views, figures, headline, make_report, request_id
from pipelines.flow import BenchmarkIdentity, EvaluateConfig
from pipelines.runner import Progress, Work
from pipelines.settings import DecodingSetting
from pipelines.stages.prompts import parse_prompt_file, parse_row, prompt_id

if TYPE_CHECKING:
    from dspark.decoding import Completion, Request

MARGIN = 1e-4  # two greedy texts may part where the two best logits are closer than this
CHUNK_BATCHES = 2  # batches of prompts a unit of work


@dataclass(frozen=True)
class Settings:
    decoder: DecoderSettings
    precision: str
    has_all_turns: bool
    out_uri: str


Prompt = dict[str, Any]  # id, turns, system, domain, source, row
Conversation = tuple[Prompt, list[str]]  # with the target's answers so far


@dataclass(frozen=True)
class Unit:
    """`setting` None is the losslessness check."""

    name: str
    setting: DecodingSetting | None
    prompts: tuple[Prompt, ...]


def run(config: EvaluateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    stage = config.evaluate
    rows = [json.loads(line) for line in open_storage(inputs["prompts"].uri).read(PromptSet.PROMPTS).splitlines()]
    prompts = [{**row, "source": "test", "row": None} for row in rows if row["split"] == "test"][: stage.max_prompts_per_source]
    lossless = tuple(prompts[: stage.num_lossless_prompts])
    set_aside: list[SetAside] = []
    for name, benchmark in config.benchmarks.items():
        found, bad = read_benchmark(name, benchmark, work.resources.files.get(name))
        prompts += found[: stage.max_prompts_per_source]
        set_aside += bad
    size = stage.batch_size * CHUNK_BATCHES
    units = [
        Unit(f"rounds-{_setting_name(setting)}-{i // size:04d}", setting, tuple(prompts[i : i + size]))
        for setting in stage.settings
        for i in range(0, len(prompts), size)
    ] + ([Unit("lossless", None, lossless)] if lossless else [])
    receipts = {u.name: json.loads(out.read(f"{u.name}.json")) for u in units if out.exists(f"{u.name}.json")}
    total, done = sum(len(u.prompts) for u in units), sum(len(u.prompts) for u in units if u.name in receipts)
    work.report(Progress(done, total, "prompts"))
    decoder = DecoderSettings.of(config, stage, work.resources.target_uri, inputs["drafter"].uri)
    settings = Settings(decoder, stage.precision, stage.turns == "all", out.uri)
    for receipt in work.map("pipelines.stages.evaluate:Evaluator", settings, [u for u in units if u.name not in receipts]):
        receipts[receipt["name"]] = receipt
        done += receipt["num_prompts"]
        work.report(Progress(done, total, "prompts", {"decoded_tokens_per_second": receipt["tokens_per_second"]}))
    rounds = [r for u in units if u.setting is not None for r in from_parquet(out.read(f"{u.name}.parquet"))]
    set_aside += [SetAside(**item) for u in units for item in receipts[u.name]["skipped"]]
    views = Views(stage.context_edges_tokens, stage.thresholds)
    report = make_report(rounds, views, receipts["lossless"]["lossless"] if lossless else None, set_aside)
    out.put(EvalReport.REPORT, json.dumps(report, indent=1).encode())
    shown = figures(report)
    for name, data in shown.items():
        out.put(name, data)
    names = [EvalReport.REPORT, *shown, *(f"{u.name}.parquet" for u in units if u.setting is not None)]
    return Outcome(file_checksums(out, names), headline(report), tuple(shown))


def read_benchmark(name: str, benchmark: BenchmarkIdentity, uri: str | None) -> tuple[list[Prompt], list[SetAside]]:
    """Its prompts in the paper's order, so that the first of them are the paper's subset, and what was set aside."""
    rows: Iterable[tuple[int, dict[str, Any] | str]]
    if benchmark.hub is not None:
        rows = hub_rows(_load(benchmark.hub), benchmark.hub, benchmark.domain)
    else:
        assert uri is not None
        rows = ((number, row) for number, _, row in parse_prompt_file(uri, benchmark.domain))
    prompts: dict[str, Prompt] = {}
    set_aside = []
    for number, row in rows:
        if isinstance(row, str):
            reason, _, detail = row.partition(" (")
            set_aside.append(SetAside(name, number, "", 1, "", reason, detail.removesuffix(")")))
            continue
        known = prompts.setdefault(prompt_id(row), {**row, "id": prompt_id(row), "source": name, "row": number})
        if known["row"] != number:
            set_aside.append(SetAside(name, number, known["id"], 1, "", "duplicate", f"of row {known['row']}"))
    found = list(prompts.values())
    random.Random(PAPER_SUBSET_SEED).shuffle(found)
    return found, set_aside


def _load(hub: HubBenchmark) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset

    if hub.files:
        uris = [f"hf://datasets/{hub.repository}@{hub.revision}/{file}" for file in hub.files]
        return load_dataset("json", data_files=uris, split=hub.split, streaming=True)
    return load_dataset(hub.repository, hub.subset, revision=hub.revision, split=hub.split, streaming=True)


def hub_rows(rows: Iterable[Mapping[str, Any]], hub: HubBenchmark, domain: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Number and prompt of each row, or what is wrong with it."""
    for number, row in enumerate(rows, 1):
        if hub.turns_column is not None:
            turns = row[hub.turns_column]
        else:
            prompt = hub.optional[1] if hub.optional and row[hub.optional[0]] else hub.prompt
            assert prompt is not None
            # A column without text stays what it is, so that the row is set aside instead of asking about "None".
            columns = {column for _, column, _, _ in string.Formatter().parse(prompt) if column}
            is_whole = all(isinstance(row[column], str) and row[column].strip() for column in columns)
            turns = [prompt.format(**row) if is_whole else ""]
        yield number, parse_row(json.dumps({"turns": turns}), domain)


def _setting_name(setting: DecodingSetting) -> str:
    return setting_name(setting.temperature, setting.draft_mode, setting.ablation or "")


def _name(prompt: Prompt) -> str:
    return request_id(prompt["source"], prompt["id"], 1)


class Evaluator:
    """Lives on one worker: target and drafter loaded once (the fp32 pair only when the losslessness check comes)."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._decoder, self._out = settings, Decoder(settings.decoder), open_storage(settings.out_uri)

    def __call__(self, unit: Unit) -> dict[str, Any]:
        started = time.monotonic()
        receipt: dict[str, Any] = {"name": unit.name, "num_prompts": len(unit.prompts)}
        if unit.setting is None:
            requests, set_aside = self._requests([(prompt, []) for prompt in unit.prompts], "")
            receipt["lossless"], num_tokens = self._check_lossless(list(requests.values()))
        else:
            completions, set_aside = self._decode(unit.prompts, unit.setting)
            receipt["sha256"] = put_rounds(self._out, f"{unit.name}.parquet", completions)
            num_tokens = sum(len(c.token_ids) for c in completions)
        receipt["skipped"] = [asdict(item) for item in set_aside]
        receipt["tokens_per_second"] = num_tokens / max(time.monotonic() - started, 1e-9)
        self._out.put(f"{unit.name}.json", json.dumps(receipt).encode())
        return receipt

    def _decode(self, prompts: Sequence[Prompt], setting: DecodingSetting) -> "tuple[list[Completion], list[SetAside]]":
        """Turn after turn, each of them for all prompts that have one."""
        completions: list[Completion] = []
        set_aside: list[SetAside] = []
        live: list[Conversation] = [(prompt, []) for prompt in prompts]
        while live:
            requests, late = self._requests(live, _setting_name(setting))
            found = {c.request.id: c for c in self._decoder.decode(list(requests.values()), setting, self._settings.precision)}
            completions += found.values()
            set_aside += late
            live = [
                (prompt, [*responses, self._decoder.tokenizer.text(found[requests[_name(prompt)].id].token_ids)])
                for prompt, responses in live
                if self._settings.has_all_turns and len(responses) + 1 < len(prompt["turns"]) and _name(prompt) in requests
            ]
        return completions, set_aside

    def _requests(self, live: "Sequence[Conversation]", setting: str) -> "tuple[dict[str, Request], list[SetAside]]":
        """The next turn of each conversation, by the name of its prompt, and those without room for an answer."""
        requests, set_aside = {}, []
        for prompt, responses in live:
            request, too_long = self._decoder.request(prompt, responses)
            if too_long is None:
                requests[_name(prompt)] = request
            else:
                turn = len(responses) + 1
                of_setting = setting if turn > 1 else ""
                set_aside.append(SetAside(prompt["source"], prompt["row"], prompt["id"], turn, of_setting, "prompt too long", too_long))
        return requests, set_aside

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
