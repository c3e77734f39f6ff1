"""cache_targets: how a corpus is cut into units, what a unit survives, and what a row looks like when it is stored.

Only the engine is a fake: its states are a function of the token ids. Corpus, store, head and cache are real.
"""

import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dspark.cache import CacheFormat, CacheReader
from dspark.storage import LocalStorage
from dspark.target import load_head
from pipelines.artifacts import Corpus
from pipelines.dag import Resources
from pipelines.flow import CacheContent, CacheTargetsConfig
from pipelines.runner import Failed, LocalWork, Progress
from pipelines.settings import CacheTargetsStage
from pipelines.stages import cache_targets
from pipelines.stages.cache_targets import CorpusRow, Unit, cached_rows, cut, finished, smaller
from pipelines.stages.regenerate import SCHEMA
from pipelines.targets import TargetIdentity
from tests.dspark import tiny

WIDTH, TAPPED, MASK, MAX_LENGTH = 32, (0, 1), 63, 40
ROW_BYTES = 14 * 2 * 64 + 12 * 64  # of `corpus_row`'s states in bf16


# --- a corpus, and an engine ----------------------------------------------------------------------------------------------


def corpus_row(i: int, num_prompt: int = 4, num_response: int = 12, num_after: int = 0, split: str = "train") -> dict[str, Any]:
    """`num_after` tokens after the response are not supervised, like a template's."""
    num_tokens = num_prompt + num_response + num_after
    ids = np.random.default_rng(i).integers(0, MASK, num_tokens).tolist()
    return {
        "row_id": f"prompt-{i}/0", "prompt_id": f"prompt-{i}", "turn": 0, "domain": "math", "split": split, "token_ids": ids,
        "loss_mask": [0] * num_prompt + [1] * num_response + [0] * num_after, "num_prompt_tokens": num_prompt, "finish_reason": "stop",
        "is_truncated": False, "sampling": json.dumps({"seed": i}),
    }  # fmt: skip


def corpus_of(folder: Path, rows: list[dict[str, Any]], rows_per_file: int = 7) -> Corpus:
    storage, files = LocalStorage(str(folder)), {}
    for start in range(0, len(rows), rows_per_file):
        sink, name = io.BytesIO(), f"rows-{start // rows_per_file:05d}.parquet"
        pq.write_table(pa.Table.from_pylist(rows[start : start + rows_per_file], schema=SCHEMA), sink)
        storage.put(name, sink.getvalue())
        files[name] = "its checksum"
    metrics = {
        "rows": float(len(rows)),
        "prompt_tokens": float(sum(row["num_prompt_tokens"] for row in rows)),
        "response_tokens": float(sum(sum(row["loss_mask"]) for row in rows)),
    }
    return Corpus(storage.uri, {"files": files, "metrics": metrics, "identity": {"config": {"max_length_tokens": MAX_LENGTH}}})


class FakeEngine:
    """Notes whose states it `captured`; those of the token ids in `damaged` hold a NaN."""

    version = "fake 1"
    captured: ClassVar[list[list[int]]] = []
    damaged: ClassVar[list[list[int]]] = []

    def __init__(self, folder: Path, tapped_layers: tuple[int, ...]) -> None:
        assert tapped_layers == TAPPED

    def capture(self, sequences: list[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids in sequences:
            self.captured.append(ids)
            tapped, final = states(ids)
            if ids in self.damaged:
                tapped[3, 1, 5] = torch.nan
            yield tapped, final


def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(ids)
    tapped, final = (torch.from_numpy(generator.normal(size=size)).bfloat16() for size in ((len(ids), 2, WIDTH), (len(ids), WIDTH)))
    return tapped, final


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    monkeypatch.setattr(cache_targets, "ReferenceCapture", FakeEngine)
    monkeypatch.setattr(cache_targets, "SHARD_BYTES", 5 * ROW_BYTES)  # five rows
    FakeEngine.captured, FakeEngine.damaged = [], []
    return FakeEngine


class FakeWork(LocalWork):
    """Units with a row of `poison` end every worker that they are given to."""

    def __init__(self, resources: Resources, poison: Iterable[str] = ()) -> None:
        self.poison, self.reports = set(poison), []
        super().__init__(resources, self.reports.append)
        self.asked: list[str] = []

    def map(self, worker: str, settings: Any, items: Iterable[Any], keep_failed: bool = False) -> Iterator[Any]:
        for unit in items:
            self.asked.append(unit.name)
            if not any(row.row_id in self.poison for row in unit.rows):
                yield from super().map(worker, settings, [unit])
            elif keep_failed:
                yield Failed(unit, "the worker died")
            else:
                raise RuntimeError(f"{worker} failed 3 times")


@dataclasses.dataclass
class Place:
    """A target, a corpus and a folder for the cache."""

    target: Path
    folder: Path

    @property
    def out(self) -> LocalStorage:
        return LocalStorage(str(self.folder / "cache"))

    def config(self, **content: Any) -> CacheTargetsConfig:
        chosen = {"engine": "transformers", "dtype": "bf16", "logits": "final", "num_top_logits": 0, **content}
        identity = TargetIdentity("tiny", "weights", "tokenizer", "template")
        return CacheTargetsConfig(CacheContent(**chosen), identity, TAPPED, WIDTH, MASK)

    def work(self, poison: Iterable[str] = (), compression: Any = "none") -> FakeWork:
        stage = CacheTargetsStage("transformers", "bf16", "final", 0, "store", compression, None, 10**9, 45, 110)
        return FakeWork(Resources(str(self.target), cache=stage), poison)

    def run(self, rows: list[dict[str, Any]], work: FakeWork | None = None, **content: Any) -> Any:
        corpus = corpus_of(self.folder / "corpus", rows)
        return cache_targets.run(self.config(**content), {"corpus": corpus}, self.out, work or self.work())

    def reader(self) -> CacheReader:
        return CacheReader(self.out, cache_targets.cache_identity(self.config()))

    def dropped(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read("dropped.jsonl").splitlines()]


@pytest.fixture
def place(tmp_path: Path, tiny_target: Path) -> Place:
    return Place(tiny_target, tmp_path)


# --- units ----------------------------------------------------------------------------------------------------------------


def _rows(sizes: list[int]) -> list[CorpusRow]:
    return [CorpusRow(f"row-{i}", "train", "rows-00000.parquet", i, size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4, 4, 4, 4, 4], [2, 2, 1]),
        ([10, 1, 9, 2], [1, 2, 1]),
        ([25, 1, 25, 25], [1, 1, 1, 1]),  # a row above the limit stands alone
        ([10], [1]),
        ([], []),
    ],
)
def test_units_are_consecutive_rows_of_at_most_so_many_bytes(sizes: list[int], expected: list[int]) -> None:
    rows = _rows(sizes)
    units = cut(rows, 10)
    assert [len(unit.rows) for unit in units] == expected
    assert [row for unit in units for row in unit.rows] == rows
    assert [unit.name for unit in units] == [f"shard-{i:05d}" for i in range(len(expected))]


@pytest.mark.parametrize(
    ("content", "state", "at_row"),
    [
        ({}, 2 * WIDTH, 2 * WIDTH),
        ({"dtype": "fp8"}, WIDTH + 1, WIDTH + 1),
        ({"logits": "topk", "num_top_logits": 6}, 2 * WIDTH, 48),
        ({"dtype": "fp8", "logits": "topk", "num_top_logits": 6}, WIDTH + 1, 48),
    ],
)
def test_bytes_of_corpus_rows_are_those_of_the_states_that_are_stored(place: Place, content: Any, state: int, at_row: int) -> None:
    rows = [corpus_row(0), corpus_row(1, 9, 2, 5), corpus_row(2, 1, 30)]
    found, dropped = cache_targets.corpus_rows(corpus_of(place.folder, rows), place.config(**content))
    assert dropped == []
    # Tapped states up to the last supervised label's row, which no block sees; and one for each supervised label.
    assert [row.num_bytes for row in found] == [2 * t * state + s * at_row for t, s in ((14, 12), (9, 2), (29, 30))]
    place.run(rows, **content)
    assert 0 < place.reader().manifest["bytes"] - sum(row.num_bytes for row in found) < 3 * 4000


def test_run_makes_a_shard_of_each_unit_with_every_row_in_its_order(place: Place) -> None:
    rows, work = [corpus_row(i, split="select" if i % 4 == 3 else "train") for i in range(23)], place.work()
    outcome = place.run(rows, work)
    reader = place.reader()
    assert [len(shard.entries) for shard in reader.shards] == [5, 5, 5, 5, 3]
    assert [(entry.row_id, entry.split) for entry in reader.entries] == [(row["row_id"], row["split"]) for row in rows]
    for i, row in enumerate(rows):
        found, (tapped, final) = reader[i], states(row["token_ids"])
        assert found.token_ids_T.tolist() == row["token_ids"]
        assert torch.equal(tiny.values(found.tapped_PLD), tapped[:14].double())
        assert torch.equal(tiny.values(found.final_SD), final[3:15].double())
        assert (found.domain, json.loads(found.provenance)) == ("math", {"seed": i})
    assert set(outcome.files) == {*(f"shard-{i:05d}.arrow" for i in range(5)), "manifest.json", "dropped.jsonl"}
    assert outcome.metrics["num_rows"] == 23.0
    assert outcome.metrics["rows_dropped"] == 0.0
    assert outcome.metrics["num_tokens"] == 23 * 16.0
    assert [(p.done, p.total, p.unit) for p in work.reports if not p.metrics] == [(0, 23, "rows")]
    assert [p.done for p in work.reports] == [0, 5, 10, 15, 20, 23]
    assert place.dropped() == []


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("content", [{"dtype": "fp8"}, {"logits": "topk", "num_top_logits": 6}], ids=["fp8", "topk"])
def test_run_stores_the_form_that_it_is_asked_for(place: Place, content: Any, compression: str) -> None:
    place.run([corpus_row(i) for i in range(6)], place.work(compression=compression), **content)
    reader = place.reader()
    expected = {"dtype": "bf16", "logits": "final", "num_top_logits": 0, **content, "compression": compression}
    assert reader.manifest["format"] == expected
    assert reader.manifest["engines"] == ["fake 1"]
    row = reader[5]
    assert (row.tapped_PLD.exponents is None, row.final_SD is None) == ("dtype" not in content, "logits" in content)
    exactness = reader.manifest["exactness"]
    if "dtype" in content:
        assert all(0.01 < error < 0.05 for error in exactness["relative_error"])
    else:
        assert exactness["relative_error"][:2] == [0.0, 0.0]
        assert 0 < exactness["mean_missing_mass"] < exactness["largest_missing_mass"] < 1


# --- going on ---------------------------------------------------------------------------------------------------------------


def test_finished_units_are_not_made_again(place: Place, engine: type[FakeEngine]) -> None:
    rows = [corpus_row(i) for i in range(12)]
    first = place.run(rows)
    for name in ("manifest.json", "shard-00001.json"):  # as if it had been killed within the second unit
        place.out.remove(name)
    before = {name: place.out.read(name) for name in ("shard-00000.arrow", "shard-00002.arrow")}
    engine.captured, work = [], place.work()
    assert place.run(rows, work) == first
    assert work.asked == ["shard-00001"]
    assert [p.done for p in work.reports] == [7, 12]
    assert engine.captured == [row["token_ids"] for row in rows[5:10]]
    assert {name: place.out.read(name) for name in before} == before


@pytest.mark.parametrize("damage", ["cut off", "missing", "longer"])
def test_unit_whose_shard_has_not_the_size_of_its_receipt_is_made_again(place: Place, damage: str) -> None:
    rows = [corpus_row(i) for i in range(12)]
    first, name = place.run(rows), "shard-00001.arrow"
    whole = place.out.read(name)
    if damage == "missing":
        place.out.remove(name)
    else:
        place.out.put(name, whole[:-1] if damage == "cut off" else whole + b"x")
    assert finished(place.out, "shard-00001") is None
    assert finished(place.out, "shard-00000") == json.loads(place.out.read("shard-00000.json"))
    assert finished(place.out, "shard-00009") is None
    work = place.work()
    assert place.run(rows, work) == first
    assert work.asked == ["shard-00001"]
    assert place.out.read(name) == whole


# --- rows and units that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 8])
def test_unit_that_ended_its_engine_is_cut_in_two_without_losing_a_row(place: Place, count: int) -> None:
    unit = Unit("shard-00004", tuple(_rows([10] * count)))
    settings = cache_targets.capture_settings(place.config(), corpus_of(place.folder, [corpus_row(0)]), place.work().resources, place.out)
    halves = smaller(Failed(unit, "it died"), settings, place.out)
    assert [half.name for half in halves] == ["shard-00004-0", "shard-00004-1"]
    assert [row for half in halves for row in half.rows] == list(unit.rows)
    assert abs(len(halves[0].rows) - len(halves[1].rows)) <= 1
    assert place.out.list() == []


def test_single_row_that_ended_its_engine_is_set_aside_in_a_shard_of_its_own(place: Place) -> None:
    unit = Unit("shard-00004-1", tuple(_rows([10])))
    settings = cache_targets.capture_settings(
        place.config(), corpus_of(place.folder / "corpus", [corpus_row(0)]), place.work().resources, place.out
    )
    assert smaller(Failed(unit, "killed by signal 9"), settings, place.out) == [unit]
    receipt = finished(place.out, "shard-00004-1")
    assert receipt is not None
    assert receipt["rows"] == []
    assert receipt["dropped"] == [{"row_id": "row-0", "reason": "it ended its engine: killed by signal 9", "is_poisoned": True}]


@pytest.mark.parametrize("poisoned", [0, 12, 24], ids=["first", "middle", "last"])
def test_unit_that_fails_is_halved_until_the_poisoned_row_stands_alone(place: Place, poisoned: int) -> None:
    rows = [corpus_row(i) for i in range(25)]
    work = place.work(poison=[f"prompt-{poisoned}/0"])
    outcome = place.run(rows, work)
    assert sorted(entry.row_id for entry in place.reader().entries) == sorted(r["row_id"] for i, r in enumerate(rows) if i != poisoned)
    (aside,) = place.dropped()
    assert aside == {"row_id": f"prompt-{poisoned}/0", "reason": "it ended its engine: the worker died", "is_poisoned": True}
    assert (outcome.metrics["num_rows"], outcome.metrics["rows_dropped"]) == (24.0, 1.0)
    assert len(work.asked) == len(set(work.asked))  # nothing is tried twice
    assert len(work.asked) <= 5 + 2 * 3
    assert work.reports[-1].done == 25
    reader = place.reader()
    assert [torch.equal(tiny.values(reader[i].tapped_PLD), states(reader[i].token_ids_T.tolist())[0][:14].double()) for i in range(24)]


def test_units_with_several_poisoned_rows_keep_everything_else(place: Place) -> None:
    rows = [corpus_row(i) for i in range(60)]
    poison = [f"prompt-{i}/0" for i in (20, 21, 57)]
    place.run(rows, place.work(poison))
    assert {entry.row_id for entry in place.reader().entries} == {row["row_id"] for row in rows} - set(poison)
    assert {item["row_id"] for item in place.dropped()} == set(poison)


def test_run_after_one_that_was_stopped_among_halves_makes_only_what_is_missing(place: Place, engine: type[FakeEngine]) -> None:
    rows = [corpus_row(i) for i in range(25)]
    first = place.run(rows, place.work(poison=["prompt-7/0"]))
    place.out.remove("manifest.json")
    engine.captured, work = [], place.work(poison=["prompt-7/0"])
    assert place.run(rows, work) == first
    assert engine.captured == []
    assert all("-0" in name or "-1" in name or name == "shard-00001" for name in work.asked)


def test_row_whose_states_are_damaged_is_set_aside_and_its_shard_survives(place: Place, engine: type[FakeEngine]) -> None:
    rows = [corpus_row(i) for i in range(25)]
    engine.damaged = [rows[11]["token_ids"]]
    outcome = place.run(rows)
    assert [entry.row_id for entry in place.reader().entries] == [row["row_id"] for i, row in enumerate(rows) if i != 11]
    (aside,) = place.dropped()
    assert aside == {"row_id": "prompt-11/0", "reason": "row prompt-11/0: tapped holds a NaN or an infinity", "is_poisoned": True}
    assert outcome.metrics["rows_dropped"] == 1.0


def test_more_than_a_twentieth_of_poisoned_rows_is_the_engines_fault(place: Place, engine: type[FakeEngine]) -> None:
    rows = [corpus_row(i) for i in range(40)]
    engine.damaged = [rows[i]["token_ids"] for i in (3, 30)]
    place.run(rows)  # 2 of 40: just allowed
    for name in place.out.list():
        place.out.remove(name)
    engine.damaged = [rows[i]["token_ids"] for i in (3, 9, 30)]
    with pytest.raises(
        ValueError, match=r"3 rows were set aside, 3 of them for what the engine returned, .*NaN.*Fix: look at .*dropped.jsonl"
    ):
        place.run(rows)
    assert len(place.dropped()) == 3
    assert not place.out.exists("manifest.json")


def test_rows_that_are_too_long_or_say_nothing_are_set_aside_and_blame_nobody(place: Place) -> None:
    rows = [corpus_row(0), corpus_row(1, 4, MAX_LENGTH - 4), corpus_row(2, 4, MAX_LENGTH - 3), corpus_row(3, 6, 1), corpus_row(4, 3, 0)]
    outcome = place.run(rows)
    assert [entry.row_id for entry in place.reader().entries] == ["prompt-0/0", "prompt-1/0"]
    assert place.dropped() == [
        {"row_id": "prompt-2/0", "reason": f"{MAX_LENGTH + 1} tokens, target.max_length_tokens is {MAX_LENGTH}"},
        {"row_id": "prompt-3/0", "reason": "fewer than 2 supervised tokens"},
        {"row_id": "prompt-4/0", "reason": "fewer than 2 supervised tokens"},
    ]
    assert outcome.metrics["rows_dropped"] == 3.0


def test_corpus_without_a_row_to_cache_is_an_error(place: Place) -> None:
    with pytest.raises(ValueError, match=r"1 rows were set aside.*fewer than 2 supervised tokens.*Fix: "):
        place.run([corpus_row(0, 6, 1)])


def test_mask_token_in_a_corpus_row_stops_the_step(place: Place) -> None:
    row = corpus_row(0)
    row["token_ids"][3] = MASK
    with pytest.raises(ValueError, match=r"target.mask_token_id: 63 occurs in corpus row prompt-0/0\. Fix: "):
        place.run([row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 48}, r"target.width: 48, the model's is 32\. Fix: target.width=32"),
        ({"mask_token_id": 64}, r"target.mask_token_id: 64 is not a token of the target \(64\)"),
        ({"tapped_layers": (0, 3)}, r"tapped_layers"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(place: Place, change: Any, message: str) -> None:
    corpus = corpus_of(place.folder / "corpus", [corpus_row(0)])
    with pytest.raises(ValueError, match=message):
        cache_targets.run(dataclasses.replace(place.config(), **change), {"corpus": corpus}, place.out, place.work())


# --- a row ----------------------------------------------------------------------------------------------------------------

CONTENTS = {
    "bf16": CacheFormat("bf16", "final", 0),
    "fp8": CacheFormat("fp8", "final", 0),
    "topk": CacheFormat("bf16", "topk", 6),
    "fp8-topk": CacheFormat("fp8", "topk", 6),
}
every_content = pytest.mark.parametrize("form", CONTENTS.values(), ids=CONTENTS.keys())


@every_content
def test_row_ends_with_its_last_supervised_label(tiny_target: Path, form: CacheFormat) -> None:
    head, row = load_head(tiny_target, torch.float32), corpus_row(0, 3, 5, num_after=4)
    tapped, final = states(row["token_ids"])
    [found] = cached_rows([row], [(tapped, final)], head, form)
    assert found.token_ids_T.tolist() == row["token_ids"][:8]
    assert found.loss_mask_T.tolist() == row["loss_mask"][:8] == [0, 0, 0, 1, 1, 1, 1, 1]
    # Rows 2 to 6 predict the labels 3 to 7; the last anchor is at 6 and sees the tokens before it.
    assert found.tapped_PLD.codes.shape == (6, 2, WIDTH)
    assert found.log_sum_exp_S.shape == (5,)


@every_content
def test_normaliser_of_a_row_is_that_of_the_logits_that_training_sees(tiny_target: Path, form: CacheFormat, monkeypatch: Any) -> None:
    """With final states those of the stored state; with best logits those of what the target computed."""
    monkeypatch.setattr(cache_targets, "LOGIT_ROWS", 3)  # several parts
    head, row = load_head(tiny_target, torch.float32), corpus_row(1, 4, 8)
    tapped, final = states(row["token_ids"])
    [found] = cached_rows([row], [(tapped, final)], head, form)
    seen = final[3:11].double() if form.logits == "topk" else tiny.values(found.final_SD)
    logits = seen @ head.tables.lm_head_VD.double().T
    assert found.log_sum_exp_S.tolist() == pytest.approx(logits.logsumexp(-1).tolist(), rel=1e-5)
    errors = [tiny.values(found.tapped_PLD)[:, layer] - tapped[:10, layer].double() for layer in range(2)]
    assert found.exactness.squared_error[:2] == pytest.approx([float(e.square().sum()) for e in errors], rel=1e-4)
    if form.logits == "topk":
        assert found.final_SD is None
        best = logits.topk(6)
        assert found.top_ids_SC.tolist() == best.indices.tolist()
        assert found.top_logits_SC.flatten().tolist() == pytest.approx(best.values.flatten().tolist(), rel=1e-5, abs=1e-5)
        missing = 1.0 - logits.softmax(-1).topk(6).values.sum(-1)
        assert found.exactness.missing_mass == pytest.approx(float(missing.sum()), rel=1e-4)
        assert found.exactness.largest_missing_mass == pytest.approx(float(missing.max()), rel=1e-4)
    else:
        assert found.top_ids_SC is found.top_logits_SC is None
        assert (found.exactness.missing_mass, found.exactness.largest_missing_mass) == (0.0, 0.0)


def test_row_with_states_of_other_tokens_is_refused(tiny_target: Path) -> None:
    row = corpus_row(0)
    tapped, final = states(row["token_ids"][:-1])
    with pytest.raises(ValueError, match="row prompt-0/0: the engine returned states of 15 tokens for 16"):
        list(cached_rows([row], [(tapped, final)], load_head(tiny_target, torch.float32), CONTENTS["bf16"]))


def test_progress_counts_every_row_once(place: Place) -> None:
    work = place.work(poison=["prompt-7/0"])
    place.run([corpus_row(i) for i in range(25)], work)
    done = [progress.done for progress in work.reports]
    assert done == sorted(done)
    assert isinstance(work.reports[-1], Progress)
    assert (done[-1], work.reports[-1].total) == (25, 25)
