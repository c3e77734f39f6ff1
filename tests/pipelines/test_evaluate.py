"""The evaluate step with decoding faked, and its report from rounds that are counted by hand."""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dspark.rounds import Round, from_parquet
from dspark.storage import LocalStorage
from pipelines import flow
from pipelines.artifacts import Drafter, PromptSet
from pipelines.benchmarks import DOMAINS, ON_HUB, PAPER_SUBSET_SEED
from pipelines.config import compose
from pipelines.dag import Outcome
from pipelines.decoder import Decoder, DecoderSettings
from pipelines.evaluation import SetAside, Views, figures, headline, make_report, request_id
from pipelines.runner import LocalWork
from pipelines.settings import DecodingSetting, ServingStage
from pipelines.stages import evaluate
from pipelines.stages.prompts import prompt_id
from tests.conftest import SHARED
from tests.pipelines.fake_vllm import FakeVllm

GREEDY, DRAWN = DecodingSetting(0.0, "greedy", None), DecodingSetting(1.0, "probabilistic", None)
VIEWS = Views((0, 100), (0.0, 0.5))
NUM_NEW_TOKENS, MAX_LENGTH = 4, 40  # a prompt of the fake tokenizer has a token a letter


def make_round(request: str, domain: str, accepted: int, **changes: Any) -> Round:
    """A block of two, verified whole."""
    source = request.partition("/")[0]
    made = Round(request, domain, source, 0, 0.0, 0, 1.0, "greedy", "", "verify_all", 9, 5, (7, 7), (0.5,) * 2, (0.5,) * 2, (1.0, -1.0), 2, accepted, 8, False)  # fmt: skip
    return replace(made, **changes)


# --- a decoder without a model --------------------------------------------------------------------------------------


@dataclass
class Answer:
    request: Any
    token_ids: list[int]
    rounds: list[Round]


@dataclass
class FakeDecoder:
    """Answers every request with as many tokens as it has turns. `is_dying` ends it in place of its third call."""

    _settings: Any
    decoded: list[str] = field(default_factory=list)
    is_dying: bool = False
    num_calls: int = 0
    stop_ids = (0,)
    request = Decoder.request

    @property
    def tokenizer(self) -> Any:
        return self

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def text(self, token_ids: list[int]) -> str:
        return "!" * len(token_ids)

    def decode(self, requests: list[Any], setting: DecodingSetting, precision: str, drafter: Any = "trained") -> list[Answer]:
        self.num_calls += 1
        if self.is_dying and self.num_calls == 3:
            raise KeyboardInterrupt
        self.decoded += [f"{setting.temperature:g} {request.id} {''.join(map(chr, request.prompt_ids))}" for request in requests]
        changes = {"temperature": setting.temperature, "draft_mode": setting.draft_mode}
        return [Answer(r, [1, 2], [make_round(r.id, r.domain, 1, source=r.source, **changes)]) for r in requests]


@dataclass
class Bench:
    """The step with benchmark files of these lines. `decoder` is what the last run decoded with."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    decoder: FakeDecoder | None = None

    def run(
        self,
        files: dict[str, list[str]],
        is_dying: bool = False,
        num_test: int = 3,
        url: str | None = None,
        hub: tuple[str, ...] = (),
        **stage: Any,
    ) -> Outcome:
        settings, _ = compose(["experiment=tiny"])
        rows = [{"id": f"p{i}", "turns": ["question?"], "system": None, "domain": "chat", "split": "test"} for i in range(num_test)]
        LocalStorage(str(self.root / "prompts")).put(PromptSet.PROMPTS, "\n".join(json.dumps(row) for row in rows).encode())
        uris = {}
        for name, lines in files.items():
            LocalStorage(str(self.root / "files")).put(f"{name}.jsonl", "\n".join(lines).encode())
            uris[name] = str(self.root / "files" / f"{name}.jsonl")
        stage = {"settings": (GREEDY, DRAWN), "batch_size": 1, "num_lossless_prompts": 0, "max_new_tokens": NUM_NEW_TOKENS, **stage}
        benchmarks = {name: flow._identify_benchmark(name, uris.get(name)) for name in (*uris, *hub)}
        step = next(step for step in flow.build(settings) if step.name == "evaluate")
        config = replace(step.config, evaluate=replace(step.config.evaluate, **stage), max_length_tokens=MAX_LENGTH, benchmarks=benchmarks)
        self.decoder = FakeDecoder(DecoderSettings("", "", "", MAX_LENGTH, NUM_NEW_TOKENS, 1, 0), is_dying=is_dying)
        self.monkeypatch.setattr(evaluate, "Decoder", lambda settings: self.decoder)
        self.monkeypatch.setattr(evaluate, "figures", lambda report: {"x.png": b"png"} if report["settings"] else {})  # takes seconds
        inputs = {"prompts": PromptSet(str(self.root / "prompts"), {}), "drafter": Drafter(str(self.root / "train"), {})}
        return evaluate.run(
            config, inputs, self.out, LocalWork(replace(step.resources, files=uris, serving_url=url), lambda progress: None)
        )

    @property
    def out(self) -> LocalStorage:
        return LocalStorage(str(self.root / "out"))

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out.read("report.json"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def lines(*turns: str) -> list[str]:
    return [json.dumps({"turns": [turn]}) for turn in turns]


def test_evaluate_bad_rows_are_set_aside_with_their_row_and_reason_and_the_rest_is_decoded(bench: Bench) -> None:
    bad = ["{not json", json.dumps({"turns": ["  "]}), json.dumps({"turns": []}), "", json.dumps({"turns": ["x" * 37]})]
    outcome = bench.run({"gsm8k": [*lines("one", "two"), *bad, *lines("one", "three\u2028lines")]})
    found = [(s["source"], s["row"], s["turn"], s["reason"]) for s in bench.report["skipped"]]
    assert found == [
        ("gsm8k", 3, 1, "not JSON"),
        ("gsm8k", 4, 1, "every turn must be a text that is not blank"),
        ("gsm8k", 5, 1, '"turns" must be a list with at least one text'),
        ("gsm8k", 8, 1, "duplicate"),
        ("gsm8k", 7, 1, "prompt too long"),  # once, though two settings would have decoded it
    ]
    assert "37 tokens" in bench.report["skipped"][-1]["detail"]
    assert bench.report["skipped_by_reason"]["prompt too long"] == 1
    assert outcome.metrics["prompts_skipped"] == 5.0
    assert outcome.metrics["prompts_skipped/not_JSON"] == 1.0
    gsm8k = bench.report["settings"]["t0-greedy"]["gsm8k"]
    assert sorted(gsm8k) == ["all", "math"]  # the file names no domain, the benchmark's name does
    assert gsm8k["all"]["num_prompts"] == 3
    assert sum("three\u2028lines" in text for text in bench.decoder.decoded) == 2


def test_evaluate_benchmark_of_bad_rows_alone_does_not_end_the_evaluation(bench: Bench) -> None:
    outcome = bench.run({"mine": ["{"]}, num_test=0)
    assert bench.report["settings"] == {}
    assert outcome.figures == ()
    assert outcome.metrics == {"prompts_skipped": 1.0, "prompts_skipped/not_JSON": 1.0}


def test_evaluate_killed_goes_on_without_decoding_a_finished_prompt_again(bench: Bench) -> None:
    files = {"alpaca": lines(*"abcd")}
    with pytest.raises(KeyboardInterrupt):
        bench.run(files, is_dying=True)
    assert bench.decoder is not None
    before = bench.decoder.decoded
    assert len(before) == 4  # two units of two prompts
    outcome = bench.run(files)
    assert len(before) + len(bench.decoder.decoded) == 2 * 7
    assert not set(before) & set(bench.decoder.decoded)
    parquet = [name for name in outcome.files if name.endswith(".parquet")]
    assert sorted(r.request_id for name in parquet for r in from_parquet(bench.out.read(name)) if r.temperature == 1.0) == sorted(
        {r.request_id for name in parquet for r in from_parquet(bench.out.read(name))}
    )
    bench.run(files)
    assert bench.decoder.decoded == []


def test_evaluate_first_turns_are_the_default_and_all_turns_go_on_with_the_answers(bench: Bench) -> None:
    rows = [json.dumps({"turns": ["first", "second", "third"]}), json.dumps({"turns": ["alone"]})]
    bench.run({"mt-bench": rows}, settings=(GREEDY,), num_test=0)
    assert sorted(text.split()[-1] for text in bench.decoder.decoded) == ["alone", "first"]


def test_evaluate_all_turns_go_on_with_the_targets_answers_and_count_as_one_prompt(bench: Bench) -> None:
    rows = [json.dumps({"turns": ["first", "second", "third"]}), json.dumps({"turns": ["alone", "y" * 30, "never"]})]
    bench.run({"mt-bench": rows}, settings=(GREEDY,), num_test=0, turns="all")
    assert sorted(text.split()[-1] for text in bench.decoder.decoded) == ["alone", "first", "first!!second", "first!!second!!third"]
    assert len({text.split()[1] for text in bench.decoder.decoded}) == 4  # each request draws its own numbers
    summary = bench.report["settings"]["t0-greedy"]["mt-bench"]["all"]
    assert (summary["num_prompts"], summary["num_rounds"]) == (2, 4)
    assert [(s["row"], s["turn"], s["setting"], s["reason"]) for s in bench.report["skipped"]] == [(2, 2, "t0-greedy", "prompt too long")]


def test_evaluate_takes_the_papers_subset_of_a_benchmark(bench: Bench) -> None:
    turns = [f"question {i}" for i in range(50)]
    bench.run({"mbpp": lines(*turns)}, settings=(GREEDY,), num_test=0, max_prompts_per_source=5)
    random.Random(PAPER_SUBSET_SEED).shuffle(turns)
    assert sorted(text.partition(" mbpp/")[2].partition(" ")[2] for text in bench.decoder.decoded) == sorted(turns[:5])


# --- a server beside it ---------------------------------------------------------------------------------------------

SERVING = ServingStage("ngram", num_speculative_tokens=2, min_ngram=2, max_ngram=4, tolerance=0.05)


def test_evaluate_measures_a_server_on_the_same_prompts_and_reports_both(bench: Bench) -> None:
    with FakeVllm(model="tiny").running() as fake:
        outcome = bench.run({"gsm8k": lines("one", "x" * 37)}, settings=(GREEDY,), url=fake.url, serving=SERVING)
    sent = sorted("".join(map(chr, ids)) for body in fake.bodies for ids in body["prompt"])
    assert sent == ["one", "question?", "question?", "question?"]  # not the one that is too long
    found = bench.report["serving"]
    assert (found["difference"], found["num_texts"], found["num_equal_texts"], found["engine"]) == (0.0, 4, 4, "vllm 0.0")
    assert found["served"] == found["offline"]
    assert outcome.metrics["serving/served_accepted_length"] == outcome.metrics["serving/offline_accepted_length"] == 2.0
    assert len(from_parquet(bench.out.read("serving.parquet"))) == 4
    assert "serving.parquet" in outcome.files
    assert bench.report["settings"]["t0-greedy"]["test"]["all"]["num_rounds"] == 3  # the server's prompts count once


def test_evaluate_above_the_tolerance_fails_with_its_report_written_and_asks_the_server_again(bench: Bench) -> None:
    with FakeVllm(model="tiny", num_accepted=2, text=(1, 3)).running() as fake:
        message = r"stage.evaluate.serving.tolerance: 0.05: .*accepts 6 tokens of 3 drafts, .*3 tokens of 3 drafts.*\+100.0%; 0 of 3 .*Fix:"
        with pytest.raises(ValueError, match=message):
            bench.run({}, settings=(GREEDY,), url=fake.url, serving=SERVING)
        assert bench.report["serving"]["difference"] == 1.0
        assert bench.report["settings"]["t0-greedy"]["test"]["all"]["num_rounds"] == 3
        fake.num_accepted, fake.text = 1, (1, 2)
        outcome = bench.run({}, settings=(GREEDY,), url=fake.url, serving=SERVING)
    assert bench.decoder is not None
    assert len(bench.decoder.decoded) == 3  # beside the server; the report's rounds were there
    assert bench.report["serving"]["is_within_tolerance"]
    assert outcome.metrics["serving/num_equal_texts"] == 3.0


def test_evaluate_refuses_another_server_before_anything_is_decoded(bench: Bench) -> None:
    with FakeVllm(model="another").running() as fake, pytest.raises(ValueError, match="must serve tiny"):
        bench.run({}, url=fake.url, serving=SERVING)
    assert bench.decoder is not None
    assert bench.decoder.decoded == []


def test_server_is_part_of_the_fingerprint_only_where_it_is_measured_and_its_place_never() -> None:
    def folder_of(*overrides: str) -> str:
        steps = flow.build(compose(["experiment=tiny", *overrides])[0])
        return next(step.folder for step in steps if step.name == "evaluate")

    measured = "stage.evaluate.engine=vllm"
    assert folder_of() == folder_of("stage.evaluate.serving.tolerance=0.1") != folder_of(measured)
    assert (
        folder_of(measured)
        == folder_of(measured, "cluster.serving_url=http://x:8000")
        != folder_of(measured, "stage.evaluate.serving.tolerance=0.1")
    )


# --- benchmarks -----------------------------------------------------------------------------------------------------

PROBLEM = "Find \\frac{1}{2} of {x}."
HUB_ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": PROBLEM, "answer": "1"},
    "math500": {"problem": PROBLEM, "answer": "1", "level": 2},
    "aime25": {"problem_idx": 1, "problem": PROBLEM, "answer": 70},
    "mbpp": {"task_id": 2, "prompt": PROBLEM, "code": "x"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": PROBLEM, "test": "x"},
    "livecodebench": {"question_content": PROBLEM, "starter_code": "", "platform": "x"},
    "mt-bench": {"prompt": [PROBLEM, "And then?"], "prompt_id": 1},
    "alpaca": {"instruction": PROBLEM, "input": "", "output": "x"},
    "arena-hard-v2": {"uid": "a", "prompt": PROBLEM, "category": "x"},
}


def from_hub(name: str, *rows: dict[str, Any]) -> list[Any]:
    """Through a data set in memory, as `datasets` hands rows out."""
    import datasets

    return [row for _, row in evaluate.hub_rows(datasets.Dataset.from_list(list(rows)), ON_HUB[name], DOMAINS[name])]


@pytest.mark.parametrize("name", sorted(ON_HUB))
def test_hub_row_of_a_benchmark_becomes_a_prompt_in_the_words_of_its_file(name: str) -> None:
    (row,) = from_hub(name, HUB_ROWS[name])
    assert row["domain"] == DOMAINS[name]
    assert len(row["turns"]) == (2 if name == "mt-bench" else 1)
    before, found, after = row["turns"][0].partition(PROBLEM)
    assert found  # braces of the text are not taken for columns
    path = SHARED / "eval" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    for line in path.read_text(encoding="utf-8").split("\n")[:50]:
        if line:
            text = json.loads(line)["turns"][0]
            assert text.startswith(before)
            assert text.endswith(after) or name == "livecodebench"


def test_hub_row_with_an_input_shows_it_and_one_without_text_is_set_aside() -> None:
    rows = [{"instruction": "Sort.", "input": "3 1 2"}, {"instruction": None, "input": ""}, {"instruction": " ", "input": "x"}]
    found = from_hub("alpaca", *rows)
    assert found[0]["turns"] == ["Sort.\n\nInput:\n3 1 2"]
    assert found[1:] == ["every turn must be a text that is not blank"] * 2
    assert from_hub("livecodebench", {**HUB_ROWS["livecodebench"], "starter_code": "class S:"})[0]["turns"][0].endswith(
        "### Format: Use the following code structure:\n```python\nclass S:\n```\n\n### Answer: (use the provided format with backticks)"
    )
    assert from_hub("mt-bench", {"prompt": ["x", ""]}) == ["every turn must be a text that is not blank"]


def test_evaluate_resumed_loads_a_benchmark_of_the_hub_at_the_commit_that_it_began_with(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, loaded = {"main": "1111111"}, []
    rows = {"1111111": ["old 1", "old 2", "old 3", "old 4", "old 5"], "2222222": ["new"]}

    def load(benchmark: Any, commit: str) -> list[dict[str, Any]]:
        loaded.append(commit)
        return [{"instruction": text, "input": ""} for text in rows[commit]]

    monkeypatch.setattr(evaluate, "_commit", lambda benchmark: hub[benchmark.revision])
    monkeypatch.setattr(evaluate, "_load", load)
    with pytest.raises(KeyboardInterrupt):
        bench.run({}, is_dying=True, hub=("alpaca",), settings=(GREEDY,), num_test=0)
    hub["main"] = "2222222"
    outcome = bench.run({}, hub=("alpaca",), settings=(GREEDY,), num_test=0)
    assert loaded == ["1111111", "1111111"]
    assert bench.report["benchmark_commits"] == {"alpaca": "1111111"}
    assert bench.report["settings"]["t0-greedy"]["alpaca"]["all"]["num_prompts"] == 5
    assert "commits.json" in outcome.files


@pytest.mark.parametrize("name", sorted(ON_HUB))
def test_shared_benchmark_is_read_whole(name: str) -> None:
    path = SHARED / "eval" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    prompts, set_aside = evaluate.read_benchmark(name, flow._identify_benchmark(name, str(path)), str(path))
    assert len(prompts) + len(set_aside) == path.read_text(encoding="utf-8").count("\n")
    assert {item.reason for item in set_aside} <= {"duplicate"}
    assert {row["domain"] for row in prompts} == {DOMAINS[name]}
    assert len({prompt_id(row) for row in prompts}) == len(prompts)


def test_benchmark_changes_the_fingerprint_with_its_content_and_not_with_its_place(tmp_path: Path) -> None:
    for folder, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "f.jsonl").write_text(lines(text)[0])

    def folder_of(benchmarks: str) -> str:
        steps = flow.build(compose(["experiment=tiny", f"stage.evaluate.benchmarks={{{benchmarks}}}"])[0])
        return next(step.folder for step in steps if step.name == "evaluate")

    found = [folder_of(f"gsm8k: {tmp_path}/{name}/f.jsonl") for name in "abc"] + [folder_of("gsm8k: hub"), folder_of("math500: hub")]
    assert found[0] == found[1]
    assert len(set(found)) == 4


# --- the report -----------------------------------------------------------------------------------------------------


def test_report_has_buckets_sweep_and_means_as_counted_by_hand() -> None:
    logits = {"confidence_logits": (2.0, -2.0)}
    rounds = [
        make_round("test/a", "math", 2, **logits),
        make_round("test/a", "math", 0, context_length_tokens=100, **logits),
        make_round("test/b", "code", 1, context_length_tokens=99, confidence_logits=(-1.0, 3.0)),
        make_round("test/c", "chat", 1, proposed=1, ended_by_stop=True, next_token=None, confidence_logits=(-1.0,)),
        make_round("gsm8k/x", "math", 2, **logits),
        make_round("mbpp/y", "code", 0, **logits),
    ]
    report = make_report(rounds, VIEWS, [], {}, None, None)
    test = report["settings"]["t0-greedy"]["test"]
    assert sorted(test) == ["all", "chat", "code", "math", "math+code"]
    # 3 + 1 + 2 tokens, and 1 of the round that ends without a bonus.
    assert test["all"]["accepted_length"] == 7 / 4
    assert [(b["from_tokens"], b["below_tokens"], b["accepted_length"], b["num_rounds"], b["num_prompts"]) for b in test["all"]["context_buckets"]] == [
        (0, 100, 2.0, 3, 3), (100, None, 1.0, 1, 1),
    ]  # fmt: skip
    assert test["chat"]["context_buckets"][1]["accepted_length_interval"] is None
    whole, half = test["all"]["threshold_sweep"]
    assert (whole["verified_tokens"], whole["accepted_length"], whole["acceptance_rate"]) == (7 / 4, 7 / 4, 4 / 7)
    # Verified 1, 1, 0, 0; accepted 1, 0, 0, 0; cut before its stop token, the last round has a bonus.
    assert half == {"threshold": 0.5, "verified_tokens": 0.5, "rejected_tokens": 0.25, "accepted_length": 5 / 4, "acceptance_rate": 0.5}
    assert report["benchmark_means"]["t0-greedy"] == {"all": 2.0, "math": 3.0, "code": 1.0}
    assert report["settings"]["t0-greedy"]["gsm8k"].keys() == {"all", "math"}
    assert headline(report)["t0-greedy/benchmark_means/all/accepted_length"] == 2.0
    assert {"context_buckets", "threshold_sweep", "benchmark_means", "skipped"} <= report["definitions"].keys()


def test_report_of_a_drafter_without_confidences_has_no_sweep() -> None:
    report = make_report([make_round("test/a", "math", 1, confidence_logits=())], VIEWS, [], {}, None, None)
    assert report["settings"]["t0-greedy"]["test"]["all"]["threshold_sweep"] is None
    assert sorted(figures(report)) == ["acceptance.png", "accepted_length.png", "context.png"]


def test_report_pools_no_policies_and_sweeps_thresholds_of_whole_blocks_alone() -> None:
    whole = [make_round("test/a", "math", 2), make_round("test/b", "math", 1)]
    cut = [replace(r, policy="fixed_1", proposed=1, accepted=1, confidence_logits=r.confidence_logits[:1]) for r in whole]
    narrow = [replace(r, temperature=1.0, draft_mode="probabilistic", top_p=0.9) for r in whole]
    settings = make_report([*whole, *cut, *narrow], VIEWS, [], {}, None, None)["settings"]
    lengths = {name: sources["test"]["all"]["accepted_length"] for name, sources in settings.items()}
    assert lengths == {"t0-greedy": 2.5, "t0-greedy-fixed_1": 2.0, "t1-probabilistic-top_p0.9": 2.5}
    assert settings["t0-greedy-fixed_1"]["test"]["all"]["threshold_sweep"] is None
    assert settings["t0-greedy"]["test"]["all"]["threshold_sweep"]


def test_report_resamples_prompts_with_all_their_turns() -> None:
    """A turn of 3 tokens and one of 1: as one prompt they leave nothing to resample."""
    rounds = [make_round(request_id("test", "a", turn), "math", 2 * (turn - 1)) for turn in (1, 2)]
    summary = make_report(rounds, VIEWS, [], {}, None, None)["settings"]["t0-greedy"]["test"]["all"]
    assert (summary["accepted_length_interval"], summary["num_prompts"]) == ((2.0, 2.0), 1)


def test_report_counts_what_is_set_aside_in_two_settings_once() -> None:
    first = SetAside("gsm8k", 7, "a", 1, "", "prompt too long", "50 tokens")
    later = [SetAside("gsm8k", 8, "b", 2, setting, "prompt too long", "50 tokens") for setting in ("t0-greedy", "t1-probabilistic")]
    report = make_report([], VIEWS, [first, first, *later], {}, None, None)
    assert [item["row"] for item in report["skipped"]] == [7, 8, 8]
    assert report["skipped_by_reason"] == {"prompt too long": 3}


def test_figures_of_equal_rounds_are_equal_bytes() -> None:
    rounds = [make_round(f"{source}/{i}", domain, i % 3) for source, domain in (("test", "math"), ("mbpp", "code")) for i in range(6)]
    one, other = (figures(make_report(rounds, VIEWS, [], {}, None, None)) for _ in range(2))
    assert one == other
    assert sorted(one) == ["acceptance.png", "accepted_length.png", "context.png", "thresholds.png"]
    assert all(data.startswith(b"\x89PNG") for data in one.values())
