"""evaluate: decodes the test prompts and the benchmarks with the drafter, losslessly, and reports what was accepted.

Units of work are a decoding setting and a chunk of prompts; a unit counts once its rounds file has its receipt, so that a killed
evaluation decodes at most the unfinished chunks again. A last unit decodes some prompts in fp32 at temperature 0 with and without
the drafter and compares the texts. With the engine vllm another one decodes all first turns greedily with what `serving` names,
sends their token ids to a vLLM server and compares what both accepted (pipelines/serving.py); above the tolerance the step fails,
once its report is written, and asks the server again when it is run again.

`report.json` and the figures are computed from the rounds alone (pipelines/evaluation.py). A bad row of a benchmark, a prompt that
it holds twice and a prompt that leaves no room for its answer are set aside and counted, with file, row and reason. Data sets of the
Hub are loaded at the commits in `commits.json`, noted before the first load, so that what is resumed is what was begun.
"""

import json
import random
import string
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
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
from pipelines.serving import Drafts, Limits, Server, compare, own_server, speculation
from pipelines.settings import DecodingSetting, ServingStage
from pipelines.stages.prompts import parse_prompt_file, parse_row, prompt_id
from pipelines.targets import local_folder

if TYPE_CHECKING:
    from dspark.decoding import Completion, Request

GREEDY = DecodingSetting(0.0, "greedy", None)
LOSSLESS, SERVING = "lossless", "serving"  # units without a setting
COMMITS = "commits.json"
MARGIN = 1e-4  # two greedy texts may part where the two best logits are closer than this
CHUNK_BATCHES = 2  # batches of prompts a unit of work


@dataclass(frozen=True)
class Settings:
    decoder: DecoderSettings
    precision: str
    has_all_turns: bool
    serving: ServingStage | None
    serving_url: str | None
    target_name: str
    out_uri: str


Prompt = dict[str, Any]  # id, turns, system, domain, source, row
Conversation = tuple[Prompt, list[str]]  # with the target's answers so far


@dataclass(frozen=True)
class Unit:
    """`setting` None: the losslessness check, or the measured server."""

    name: str
    setting: DecodingSetting | None
    prompts: tuple[Prompt, ...]


def run(config: EvaluateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    stage = config.evaluate
    rows = [json.loads(line) for line in open_storage(inputs["prompts"].uri).read(PromptSet.PROMPTS).splitlines()]
    prompts = [{**row, "source": "test", "row": None} for row in rows if row["split"] == "test"][: stage.max_prompts_per_source]
    lossless = tuple(prompts[: stage.num_lossless_prompts])
    set_aside: list[SetAside] = []
    commits = _commits(config.benchmarks, out)
    for name, benchmark in config.benchmarks.items():
        found, bad = read_benchmark(name, benchmark, work.resources.files.get(name), commits.get(name))
        prompts += found[: stage.max_prompts_per_source]
        set_aside += bad
    size = stage.batch_size * CHUNK_BATCHES
    units = [
        Unit(f"{EvalReport.ROUNDS}{_setting_name(setting)}-{i // size:04d}", setting, tuple(prompts[i : i + size]))
        for setting in stage.settings
        for i in range(0, len(prompts), size)
    ]
    units += [Unit(LOSSLESS, None, lossless)] if lossless else []
    units += [Unit(SERVING, None, tuple(prompts))] if stage.serving and prompts else []
    receipts = {u.name: json.loads(out.read(f"{u.name}.json")) for u in units if out.exists(f"{u.name}.json")}
    total, done = sum(len(u.prompts) for u in units), sum(len(u.prompts) for u in units if u.name in receipts)
    work.report(Progress(done, total, "prompts"))
    if (
        stage.serving and work.resources.serving_url is not None and SERVING not in receipts
    ):  # a wrong one is refused before anything is decoded
        Server(work.resources.serving_url, config.target.name, stage.serving.num_speculative_tokens)
    decoder = DecoderSettings.of(config, stage, work.resources.target_uri, inputs["drafter"].uri)
    place = work.resources.serving_url
    settings = Settings(decoder, stage.precision, stage.turns == "all", stage.serving, place, config.target.name, out.uri)
    for receipt in work.map("pipelines.stages.evaluate:Evaluator", settings, [u for u in units if u.name not in receipts]):
        receipts[receipt["name"]] = receipt
        done += receipt["num_prompts"]
        work.report(Progress(done, total, "prompts", {"decoded_tokens_per_second": receipt["tokens_per_second"]}))
    rounds = [r for u in units if u.setting is not None for r in from_parquet(out.read(f"{u.name}.parquet"))]
    set_aside += [SetAside(**item) for u in units for item in receipts[u.name]["skipped"]]
    views = Views(stage.context_edges_tokens, stage.thresholds)
    checks = {name: receipts[name][name] if name in receipts else None for name in (LOSSLESS, SERVING)}
    report = make_report(rounds, views, set_aside, commits, **checks)
    out.put(EvalReport.REPORT, json.dumps(report, indent=1).encode())
    shown = figures(report)
    for name, data in shown.items():
        out.put(name, data)
    if report["serving"] and not report["serving"]["is_within_tolerance"]:
        out.remove(f"{SERVING}.json")
        raise _too_far(report["serving"], f"{out.uri}/{EvalReport.REPORT}")
    names = [EvalReport.REPORT, *shown, *(f"{u.name}.parquet" for u in units if u.name != LOSSLESS), *([COMMITS] if commits else [])]
    return Outcome(file_checksums(out, names), headline(report), tuple(shown))


def _too_far(found: Mapping[str, Any], place: str) -> ValueError:
    served, offline = (f"{found[side]['num_accepted']} tokens of {found[side]['num_drafts']} drafts" for side in ("served", "offline"))
    difference = "which is nothing to compare with" if found["difference"] is None else f"a difference of {found['difference']:+.1%}"
    return ValueError(
        f"stage.evaluate.serving.tolerance: {found['tolerance']:g}: the server accepts {served}, decoding here {offline}, {difference}; "
        f"{found['num_equal_texts']} of {found['num_texts']} texts are equal. Fix: look at {place} (serving), mend the server and run again"
    )


def _commits(benchmarks: Mapping[str, BenchmarkIdentity], out: Storage) -> dict[str, str]:
    """The commit of each data set of the Hub, resolved once for an evaluation."""
    if out.exists(COMMITS):
        return json.loads(out.read(COMMITS))
    commits = {name: _commit(benchmark.hub) for name, benchmark in benchmarks.items() if benchmark.hub is not None}
    if commits:
        out.put(COMMITS, json.dumps(commits).encode())
    return commits


def _commit(hub: HubBenchmark) -> str:
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(hub.repository, revision=hub.revision).sha
    assert commit is not None, f"{hub.repository}: the Hub names no commit of {hub.revision}"
    return commit


def read_benchmark(
    name: str, benchmark: BenchmarkIdentity, uri: str | None, commit: str | None = None
) -> tuple[list[Prompt], list[SetAside]]:
    """Its prompts in the paper's order, so that the first of them are the paper's subset, and what was set aside.

    From the file at `uri`, or from the Hub at a commit."""
    rows: Iterable[tuple[int, dict[str, Any] | str]]
    if benchmark.hub is not None:
        assert commit is not None
        rows = hub_rows(_load(benchmark.hub, commit), benchmark.hub, benchmark.domain)
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


def _load(hub: HubBenchmark, commit: str) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset

    if hub.files:
        uris = [f"hf://datasets/{hub.repository}@{commit}/{file}" for file in hub.files]
        return load_dataset("json", data_files=uris, split=hub.split, streaming=True)
    return load_dataset(hub.repository, hub.subset, revision=commit, split=hub.split, streaming=True)


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
    return setting_name(setting.temperature, setting.draft_mode, setting.top_k, setting.top_p, setting.ablation or "", setting.policy)


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
            check = self._check_lossless if unit.name == LOSSLESS else self._measure_server
            receipt[unit.name], num_tokens = check(list(requests.values()))
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
        plain, drafted = self._decoder.decode(requests, GREEDY, "fp32", "none"), self._decoder.decode(requests, GREEDY, "fp32")
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

    def _measure_server(self, requests: "list[Request]") -> tuple[dict[str, Any], int]:
        """The same requests here and at the server. The rounds here are `serving.parquet`."""
        serving, limits = self._settings.serving, self._settings.decoder
        assert serving is not None
        completions = self._decoder.decode(requests, GREEDY, self._settings.precision, serving)
        put_rounds(self._out, f"{SERVING}.parquet", completions)
        offline = Drafts.of([r for c in completions for r in c.rounds], serving.num_speculative_tokens)
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        with self._served(serving, longest + limits.max_new_tokens + serving.num_speculative_tokens + 1) as url:
            server = Server(url, self._settings.target_name, serving.num_speculative_tokens)
            sent = Limits(limits.max_new_tokens, self._decoder.tokenizer.stop_ids, limits.batch_size)
            texts, served = server.generate([c.request.prompt_ids for c in completions], sent)
            version = server.version
        num_equal = sum(c.token_ids == text for c, text in zip(completions, texts, strict=True))
        found = compare(serving, served, offline, num_equal, len(texts))
        return {"engine": f"vllm {version}", "url": self._settings.serving_url, **found}, sum(len(c.token_ids) for c in completions)

    @contextmanager
    def _served(self, serving: ServingStage, max_length_tokens: int) -> Iterator[str]:
        """The URL of the server to measure."""
        if self._settings.serving_url is not None:
            yield self._settings.serving_url
            return
        with tempfile.TemporaryDirectory() as place:
            drafter = self._decoder.export(Path(place), self._settings.precision) if serving.method == "dspark" else None
            self._decoder.free()  # the server takes most of a GPU's memory
            speculative, target = speculation(serving, drafter), local_folder(self._settings.decoder.target_uri)
            with own_server(target, self._settings.target_name, speculative, self._settings.precision, max_length_tokens) as url:
                yield url
