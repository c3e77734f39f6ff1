"""What decides whether a piece of work has been done already: identity, fingerprint, record, verdict."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from dspark.storage import LocalStorage
from pipelines import dag
from pipelines.artifacts import TargetCache
from pipelines.dag import Artifact, Resources, Step, canonical, differences, fingerprint, identity, judge, read_record

PROJECT_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Training:
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainConfig:
    train: Training = Training()
    mask_token_id: int = 7


def make_step(config: Any = TrainConfig(), name: str = "train", **changes: Any) -> Step:
    step = Step(name, 1, f"stages.{name}:run", config, {}, Artifact, "dspark", Resources("/target"))
    return replace(step, **changes)


def write_record(
    root: LocalStorage, step: Step, inputs: Mapping[str, str] | None = None, finished_at: str = "2026-01-01"
) -> dict[str, Any]:
    """The record that the runner would write, with one payload file."""
    record = {
        "schema_version": 1,
        "fingerprint": fingerprint(step),
        "identity": identity(step),
        "inputs": {name: {"payload_sha256": payload} for name, payload in (inputs or {}).items()},
        "files": {"weights": "0" * 64},
        "payload_sha256": "payload",
        "metrics": {},
        "figures": [],
        "provenance": {"finished_at": finished_at},
        "mlflow_run_id": None,
    }
    root.put(f"{step.folder}/weights", b"w")
    root.put(f"{step.folder}/{dag.RECORD}", json.dumps(record).encode())
    return record


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path))


# --- fingerprint ----------------------------------------------------------------------------------------------------


def test_fingerprint_with_other_resources_is_the_same() -> None:
    elsewhere = Resources(
        "s3://other/target", num_workers=64, num_cpus=3, num_gpus=8, max_attempts=9, train_engine="deepspeed", zero_stage=3
    )
    assert fingerprint(make_step(resources=elsewhere)) == fingerprint(make_step())
    assert make_step(resources=elsewhere).folder == make_step().folder


def test_fingerprint_with_another_label_is_the_same() -> None:
    assert fingerprint(make_step(label="other")) == fingerprint(make_step())


@pytest.mark.parametrize(
    "changes",
    [
        {"config": TrainConfig(Training(lr=3e-4))},
        {"config": TrainConfig(Training(names={"a": "b"}))},
        {"version": 2},
        {"function": "stages.train:other"},
        {"name": "evaluate"},
        {"inputs": {"cache": make_step(name="cache")}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_fingerprint_with_other_content_differs(changes: Mapping[str, Any]) -> None:
    assert fingerprint(make_step(**changes)) != fingerprint(make_step())


def test_fingerprint_follows_a_change_three_steps_above() -> None:
    def chain(lr: float) -> Step:
        first = make_step(TrainConfig(Training(lr=lr)), name="first")
        return make_step(name="third", inputs={"second": make_step(name="second", inputs={"first": first})})

    assert fingerprint(chain(1e-4)) == fingerprint(chain(1e-4))
    assert fingerprint(chain(1e-4)) != fingerprint(chain(2e-4))


def test_fingerprint_names_the_config_class() -> None:
    @dataclass(frozen=True)
    class Other:
        train: Training = Training()
        mask_token_id: int = 7

    assert fingerprint(make_step(Other())) != fingerprint(make_step(TrainConfig()))


PRINT_FINGERPRINT = """
from pipelines.dag import Artifact, Resources, Step, fingerprint
config = {name: {"value": [1, 0.1, 1e-300, True, None, "\\u03b3"]} for name in {"b", "a", "d", "c"}}  # in the set's order
step = Step("train", 1, "f:g", config, {}, Artifact, "x", Resources("/t"))
after = Step("evaluate", 1, "f:g", 1.5, {name: step for name in {"p", "q", "r"}}, Artifact, "x", Resources("/t"))
print(fingerprint(after))
"""


def test_fingerprint_in_processes_with_other_hash_seeds_is_equal() -> None:
    def printed(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(PROJECT_ROOT)}
        return subprocess.run([sys.executable, "-c", PRINT_FINGERPRINT], env=environment, capture_output=True, text=True, check=True).stdout

    fingerprints = {printed(seed) for seed in ("0", "1", "2", "3")}
    assert len(fingerprints) == 1
    assert len(fingerprints.pop().strip()) == 64


def test_fingerprint_of_a_known_step_does_not_move() -> None:
    """A change here orphans every artifact that exists: it must be wanted."""
    step = Step("train", 1, "pipelines.stages.train:run", {"lr": 0.0006, "name": "γ"}, {}, Artifact, "dspark", Resources("/t"))
    assert identity(step) == {
        "step": "train",
        "version": 1,
        "function": "pipelines.stages.train:run",
        "config": {"lr": 0.0006, "name": "γ"},
        "inputs": {},
    }
    text = r'{"config":{"lr":0.0006,"name":"\u03b3"},"function":"pipelines.stages.train:run","inputs":{},"step":"train","version":1}'
    assert fingerprint(step) == hashlib.sha256(text.encode()).hexdigest()


def test_folder_of_a_step_is_step_label_and_eight_digits() -> None:
    step = make_step()
    assert step.folder == f"train/dspark-{fingerprint(step)[:8]}"


# --- canonical ------------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset("a"),
        object(),
        float("nan"),
        float("inf"),
        -float("inf"),
        b"bytes",
        Path("/x"),
        {1: "a"},
        Training,
        Colour.RED,
        len,
    ],
    ids=repr,
)
def test_canonical_of_an_ambiguous_value_raises_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^config\.train\[1\]\.x: "):
        canonical({"train": [0, {"x": value}]})


def test_canonical_sorts_keys_and_keeps_the_order_of_lists() -> None:
    assert json.dumps(canonical({"b": (2, 1), "a": None})) == '{"a": null, "b": [2, 1]}'


def test_canonical_keeps_true_and_one_and_one_point_zero_apart() -> None:
    assert len({dag.digest(canonical(value)) for value in (True, 1, 1.0, "1", None)}) == 5


# --- record ---------------------------------------------------------------------------------------------------------


def test_record_of_an_empty_folder_is_none(root: LocalStorage) -> None:
    assert read_record(root, "train/dspark-00000000") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", '{"schema_version": 1}', '{"fingerprint": "a"}', '{"schema_version": 99}'])
def test_record_that_is_damaged_raises_with_its_place_and_the_fix(root: LocalStorage, text: str) -> None:
    step = make_step()
    root.put(f"{step.folder}/record.json", text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{step.folder}/record\.json: not a record of schema version 1\. Fix: .*remove this folder"):
        judge(step, root, {})


def test_record_cut_in_its_middle_raises(root: LocalStorage) -> None:
    step = make_step()
    write_record(root, step)
    whole = root.read(f"{step.folder}/record.json")
    root.put(f"{step.folder}/record.json", whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a record"):
        judge(step, root, {})


def test_file_checksums_cover_every_file(root: LocalStorage) -> None:
    root.put("a", b"1")
    root.put("b/c", b"2")
    assert sorted(dag.file_checksums(root)) == ["a", "b/c"]
    assert list(dag.file_checksums(root, ["a"])) == ["a"]
    before = dag.payload_checksum(dag.file_checksums(root))
    root.put("b/c", b"3")
    assert dag.payload_checksum(dag.file_checksums(root)) != before


# --- verdict --------------------------------------------------------------------------------------------------------


def test_judge_with_no_record_says_never_made(root: LocalStorage) -> None:
    verdict = judge(make_step(), root, {})
    assert (verdict.is_hit, verdict.reason, verdict.record) == (False, "never made", None)


def test_judge_with_the_record_is_a_hit(root: LocalStorage) -> None:
    step = make_step()
    record = write_record(root, step)
    verdict = judge(step, root, {})
    assert (verdict.is_hit, verdict.reason, verdict.record) == (True, "made 2026-01-01", record)


def test_judge_with_rebuild_runs_even_over_a_damaged_record(root: LocalStorage) -> None:
    step = make_step()
    root.put(f"{step.folder}/record.json", b"{")
    verdict = judge(step, root, {}, rebuild=True)
    assert (verdict.is_hit, verdict.reason, verdict.record) == (False, "rebuild=[train]", None)


def test_judge_with_another_payload_of_an_input_runs(root: LocalStorage) -> None:
    step = make_step(inputs={"cache": make_step(name="cache")})
    write_record(root, step, inputs={"cache": "old"})
    assert judge(step, root, {"cache": "old"}).is_hit
    verdict = judge(step, root, {"cache": "new"})
    assert (verdict.is_hit, verdict.reason) == (False, "the payload of input cache changed")


def test_judge_with_an_input_made_anew_runs(root: LocalStorage) -> None:
    step = make_step(inputs={"cache": make_step(name="cache")})
    assert judge(step, root, {"cache": None}).reason == "input cache is made anew"
    write_record(root, step, inputs={"cache": "old"})
    assert judge(step, root, {"cache": None}) == dag.Verdict(False, "input cache is made anew")


def test_judge_with_a_payload_file_missing_runs(root: LocalStorage) -> None:
    step = make_step()
    write_record(root, step)
    root.remove(f"{step.folder}/weights")
    assert judge(step, root, {}) == dag.Verdict(False, "file weights is missing")


def write_shards(root: LocalStorage, step: Step, *names: str) -> None:
    record = write_record(root, step)
    root.put(f"{step.folder}/{dag.RECORD}", json.dumps({**record, "files": dict.fromkeys(names, "0")}).encode())
    for name in names:
        root.put(f"{step.folder}/{name}", b"s")


def test_judge_with_a_shard_missing_names_it_as_all_that_is_to_be_made(root: LocalStorage) -> None:
    step = make_step(artifact=TargetCache)
    write_shards(root, step, "a", "b")
    assert judge(step, root, {}).is_hit
    root.remove(f"{step.folder}/b")
    assert judge(step, root, {}) == dag.Verdict(False, "file b is missing", damaged=("b",))


def test_judge_with_damage_noted_and_a_shard_missing_names_both(root: LocalStorage) -> None:
    """Whichever is found first must not hide the other: the note is gone once the folder is mended."""
    step = make_step(artifact=TargetCache)
    write_shards(root, step, "a", "b", "c")
    root.put(f"{step.folder}/{dag.DAMAGED}", json.dumps({"files": ["b"]}).encode())
    assert judge(step, root, {}) == dag.Verdict(False, "file b is damaged", damaged=("b",))
    root.remove(f"{step.folder}/a")
    assert judge(step, root, {}) == dag.Verdict(False, "file a is missing, and 1 more", damaged=("a", "b"))
    root.remove(f"{step.folder}/b")
    assert judge(step, root, {}) == dag.Verdict(False, "file a is missing, and 1 more", damaged=("a", "b"))


def test_judge_of_a_step_that_mends_nothing_with_damage_noted_runs_it_whole(root: LocalStorage) -> None:
    step = make_step()
    write_record(root, step)
    root.put(f"{step.folder}/{dag.DAMAGED}", json.dumps({"files": ["weights"]}).encode())
    assert judge(step, root, {}) == dag.Verdict(False, "file weights is damaged")


def test_judge_with_another_payload_of_an_input_mends_nothing(root: LocalStorage) -> None:
    step = make_step(inputs={"corpus": make_step(name="regenerate")}, artifact=TargetCache)
    write_record(root, step, inputs={"corpus": "old"})
    root.remove(f"{step.folder}/weights")
    assert judge(step, root, {"corpus": "old"}).damaged == ("weights",)
    assert judge(step, root, {"corpus": "new"}).damaged == (), "shards of another corpus would be kept"


def test_judge_with_a_record_for_another_fingerprint_raises(root: LocalStorage) -> None:
    step = make_step()
    record = write_record(root, step)
    root.put(f"{step.folder}/record.json", json.dumps({**record, "fingerprint": "f" * 64}).encode())
    with pytest.raises(ValueError, match=rf"f{{64}} shares only 8 digits with {fingerprint(step)}\. Fix: "):
        judge(step, root, {})


def test_judge_with_a_changed_setting_names_the_field_and_both_values(root: LocalStorage) -> None:
    write_record(root, make_step())
    verdict = judge(make_step(TrainConfig(Training(lr=3e-4))), root, {})
    assert (verdict.is_hit, verdict.reason) == (False, "stage.train.lr: 0.0006 -> 0.0003")


def test_judge_with_several_records_explains_the_nearest_and_newest(root: LocalStorage) -> None:
    write_record(root, make_step(TrainConfig(Training(lr=1e-4), mask_token_id=1)), finished_at="2026-01-04")
    write_record(root, make_step(TrainConfig(Training(lr=2e-4))), finished_at="2026-01-02")
    write_record(root, make_step(TrainConfig(Training(lr=4e-4))), finished_at="2026-01-03")
    root.put("train/dspark-ffffffff/record.json", b"damaged, and none of our business")
    assert judge(make_step(TrainConfig(Training(lr=3e-4))), root, {}).reason == "stage.train.lr: 0.0004 -> 0.0003"


def test_judge_with_only_other_inputs_names_the_input(root: LocalStorage) -> None:
    before = make_step(inputs={"cache": make_step(name="cache")})
    after = make_step(inputs={"cache": make_step(name="cache", version=2)})
    write_record(root, before, inputs={"cache": "p"})
    assert judge(after, root, {"cache": None}).reason == "input cache differs"


def test_judge_with_many_changes_shows_three_and_counts_the_rest(root: LocalStorage) -> None:
    write_record(root, make_step({"train": {f"s{i}": 0 for i in range(5)}}))
    verdict = judge(make_step({"train": {f"s{i}": 1 for i in range(5)}}), root, {})
    assert verdict.reason == "stage.train.s0: 0 -> 1; stage.train.s1: 0 -> 1; stage.train.s2: 0 -> 1; and 2 more"


def test_differences_tell_null_empty_and_absent_apart() -> None:
    old, new = {"config": {"train": {"a": None, "b": {}, "c": 1}}}, {"config": {"train": {"a": {}, "b": {"x": 1}, "d": 2}}}
    assert differences(old, new, "train") == [
        "stage.train.a: null -> {}",
        "stage.train.b: {} -> absent",
        "stage.train.b.x: absent -> 1",
        "stage.train.c: 1 -> absent",
        "stage.train.d: absent -> 2",
    ]


def test_differences_of_long_texts_with_an_equal_beginning_are_found() -> None:
    changes = differences(
        {"config": {"target": {"template": "x" * 90 + "a"}}}, {"config": {"target": {"template": "x" * 90 + "b"}}}, "train"
    )
    assert len(changes) == 1
    assert changes[0].startswith("target.template: ")
    assert len(changes[0]) < 120


def test_planning_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'pyarrow', 'ray', 'mlflow', 'vllm', 'fsspec', 's3fs', 'transformers'}"
    imports = "import sys, pipelines.runner, pipelines.screen, pipelines.backends.object_store as store; store.open_storage('/x')"
    code = f"{imports}; print({heavy} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"
