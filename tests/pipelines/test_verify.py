"""mode=verify finds every kind of damage in a cache and says where; the run after it makes what is damaged, and nothing else.

The target is a random one, its states are real; damage is done to the files of a finished cache.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark import cache as cache_module
from dspark.cache import MANIFEST, CacheReader, CacheRow, ShardReader, checksum, supervised_rows, write_manifest, write_shard
from dspark.states import States, encode
from dspark.storage import LocalStorage, Storage
from dspark.target import TransformersTarget
from pipelines import dag, lease, random_target, runner, verify
from pipelines.backends.object_store import open_storage
from pipelines.dag import DAMAGED, RECORD, Artifact, Step
from pipelines.flow import CacheContent, CacheTargetsConfig
from pipelines.lease import LEASE
from pipelines.runner import LocalExecutor, NullTracker, Progress, StepFailed
from pipelines.settings import RandomSource
from pipelines.stages import cache_targets
from pipelines.stages.cache_targets import cache_identity
from pipelines.targets import TargetIdentity
from pipelines.verify import ShardReport
from tests.pipelines import recorded
from tests.s3_servers import Fault, FaultProxy

SOURCE = RandomSource("random", num_layers=3, width=64, num_heads=2, num_kv_heads=1, mlp_width=128, seed=0)
ANSWERS = recorded.Answers(tuple(20 + 3 * (i % 7) for i in range(20)), first_token=4, vocab_size=260, max_length_tokens=512)
UNIT_BYTES = 64_000  # four rows
SHARD, RECEIPT = "shard-00001.arrow", "shard-00001.json"
WRITTEN_ANEW = {MANIFEST, RECORD, "dropped.jsonl"}  # by every run that is no hit


# --- a finished cache, to be damaged --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_target.make(SOURCE, folder)
    return folder


@pytest.fixture(scope="module")
def steps(target: Path) -> list[Step]:
    config = CacheTargetsConfig(CacheContent("transformers", "bf16", "final", 0), TargetIdentity("random", "w", "t", "c"), (0, 1), 64, 2)
    return recorded.recipe(ANSWERS, config, target)


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_targets, "SHARD_BYTES", UNIT_BYTES)
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.0)
    # A random model is never sure: its best token leads by less, and bf16 changes it where two are as good as equal.
    monkeypatch.setattr(verify, "DECISIVE_LOGITS", 0.1)


@pytest.fixture(scope="module")
def finished(steps: list[Step], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_targets, "SHARD_BYTES", UNIT_BYTES)
        drive(steps, LocalStorage(str(root)))
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> LocalStorage:
    shutil.copytree(finished, tmp_path / "root")
    return LocalStorage(str(tmp_path / "root"))


@pytest.fixture
def out(root: LocalStorage, steps: list[Step]) -> LocalStorage:
    return LocalStorage(f"{root.uri}/{steps[1].folder}")


def drive(steps: list[Step], root: Storage, screen: recorded.SilentScreen | None = None) -> dict[str, Artifact]:
    return runner.run(runner.plan(steps, root), root, open_storage, LocalExecutor(), NullTracker(), screen or recorded.SilentScreen())


def artifact(root: Storage, step: Step) -> Artifact:
    record = dag.read_record(root, step.folder)
    assert record is not None
    return step.artifact(f"{root.uri}/{step.folder}", record)


def verified(root: Storage, steps: list[Step], step: Step | None = None) -> dict[str, ShardReport]:
    corpus, cache = (artifact(root, each) for each in steps)
    work = LocalExecutor().work(steps[1], lambda progress: None)
    return {report.file: report for report in verify.run(step or steps[1], cache, corpus, open_storage(cache.uri), work)}


def problems(reports: dict[str, ShardReport]) -> dict[str, tuple[tuple[str, str], ...]]:
    return {file: report.problems for file, report in reports.items() if report.problems}


def contents(out: Storage) -> dict[str, bytes]:
    """Every file but the record, in which times stand."""
    return {name: out.read(name) for name in out.list() if name != RECORD}


def stamps(out: LocalStorage) -> dict[str, int]:
    return {name: out.path(name).stat().st_mtime_ns for name in out.list()}


def row_ids(out: Storage, shard: str = SHARD) -> list[str]:
    return [values[0] for values in json.loads(out.read(f"{Path(shard).stem}.json"))["rows"]]


def require_mended(root: LocalStorage, steps: list[Step], out: LocalStorage, whole: dict[str, bytes], made: set[str]) -> None:
    """The next run makes exactly `made` and what every run writes; then the cache is byte for byte the old one, and sound."""
    before = stamps(out)
    drive(steps, root)
    assert contents(out) == whole
    assert {name for name, stamp in stamps(out).items() if before.get(name) != stamp} == made | WRITTEN_ANEW
    assert not problems(verified(root, steps))
    assert runner.plan(steps, root)[1].verdict.is_hit


def flip(storage: Storage, name: str, at: int) -> None:
    data = bytearray(storage.read(name))
    data[at] ^= 1
    storage.put(name, bytes(data))


# --- a sound cache --------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_cache_reports_its_counts_changes_nothing_and_takes_an_old_note_away(
    root: LocalStorage, out: LocalStorage, steps: list[Step]
) -> None:
    manifest, before = json.loads(out.read(MANIFEST)), stamps(out)
    out.put(DAMAGED, json.dumps({"files": [SHARD]}).encode())
    assert not runner.plan(steps, root)[1].verdict.is_hit
    reports = verified(root, steps)
    assert not problems(reports)
    assert list(reports) == [MANIFEST, *(shard["file"] for shard in manifest["shards"])]
    assert len(manifest["shards"]) >= 4
    assert sum(report.num_rows for report in reports.values()) == manifest["num_rows"] == len(ANSWERS.lengths)
    assert sum(report.num_tokens for report in reports.values()) == manifest["num_tokens"]
    assert sum(report.num_bytes for report in reports.values()) == manifest["bytes"]
    assert all(report.num_compared >= 10 for file, report in reports.items() if file != MANIFEST)
    assert stamps(out) == before
    assert runner.plan(steps, root)[1].verdict.is_hit


def test_verify_reports_progress_shard_by_shard(root: LocalStorage, steps: list[Step]) -> None:
    seen: list[Progress] = []
    corpus, cache = (artifact(root, each) for each in steps)
    verify.run(steps[1], cache, corpus, open_storage(cache.uri), LocalExecutor().work(steps[1], seen.append))
    assert [progress.done for progress in seen] == list(range(seen[0].total + 1))


# --- damaged bytes ----------------------------------------------------------------------------------------------------------


def test_verify_of_a_truncated_shard_names_its_sizes_and_the_rows_that_are_lost(
    root: LocalStorage, out: LocalStorage, steps: list[Step]
) -> None:
    whole = contents(out)
    lost = [values[0] for values in json.loads(whole[RECEIPT])["rows"] if values[5] + values[6] > 40_000]
    assert 1 < len(lost) < len(row_ids(out))
    out.put(SHARD, whole[SHARD][:40_000])
    with pytest.raises(ValueError, match=rf"{out.uri}/{SHARD}: row {lost[0]} is damaged.*mode=verify"):
        read_all(out, steps)
    found = problems(verified(root, steps))
    assert list(found) == [SHARD]
    assert found[SHARD][0] == ("", f"40,000 bytes, {len(whole[SHARD]):,} were written")
    assert [row for row, _ in found[SHARD][1:]] == lost
    assert all("are not those that were written" in said for _, said in found[SHARD][1:])
    assert json.loads(out.read(DAMAGED))["files"] == [SHARD]
    assert runner.plan(steps, root)[1].verdict.reason == f"file {SHARD} is damaged"
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_verify_of_an_empty_shard_names_every_row(root: LocalStorage, out: LocalStorage, steps: list[Step]) -> None:
    whole = contents(out)
    out.put(SHARD, b"")
    found = problems(verified(root, steps))
    assert [row for row, _ in found[SHARD]] == ["", *row_ids(out)]
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_verify_of_a_flipped_byte_in_a_row_names_shard_row_and_bytes(root: LocalStorage, out: LocalStorage, steps: list[Step]) -> None:
    whole = contents(out)
    row, offset, num_bytes = (json.loads(whole[RECEIPT])["rows"][1][i] for i in (0, 5, 6))
    flip(out, SHARD, offset + num_bytes // 2)
    with pytest.raises(ValueError, match=rf"{out.uri}/{SHARD}: row {row} is damaged.*mode=verify"):
        read_all(out, steps)
    found = problems(verified(root, steps))
    assert found == {
        SHARD: (
            ("", "not the bytes that were written"),
            (row, f"bytes {offset:,} to {offset + num_bytes:,} are not those that were written"),
        )
    }
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_verify_of_a_flipped_byte_in_the_footer_names_the_shard(root: LocalStorage, out: LocalStorage, steps: list[Step]) -> None:
    whole = contents(out)
    flip(out, SHARD, len(whole[SHARD]) - 30)
    read_all(out, steps)  # rows are read by their ranges: training does not care
    assert problems(verified(root, steps)) == {SHARD: (("", "not the bytes that were written"),)}
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_run_after_a_shard_is_lost_makes_it_alone_without_a_verify(root: LocalStorage, out: LocalStorage, steps: list[Step]) -> None:
    whole = contents(out)
    out.remove(SHARD)
    with pytest.raises(ValueError, match=rf"{SHARD}: missing\. Fix: run the same command again"):
        read_all(out, steps)
    assert runner.plan(steps, root)[1].verdict.reason == f"file {SHARD} is missing"
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_verify_of_a_missing_shard_and_a_damaged_one_has_both_made(root: LocalStorage, out: LocalStorage, steps: list[Step]) -> None:
    whole, other = contents(out), "shard-00003.arrow"
    out.remove(SHARD)
    flip(out, other, 5000)
    found = problems(verified(root, steps))
    assert list(found) == [SHARD, other]
    assert found[SHARD] == (("", "missing"),)
    assert runner.plan(steps, root)[1].verdict.reason == f"file {SHARD} is missing, and 1 more"
    require_mended(root, steps, out, whole, {SHARD, RECEIPT, other, "shard-00003.json"})


@pytest.mark.parametrize("damage", ["missing", "flipped", "no JSON", "of another shard"])
def test_verify_of_a_receipt_that_is_not_the_one_written_names_it(
    root: LocalStorage, out: LocalStorage, steps: list[Step], damage: str
) -> None:
    whole = contents(out)
    if damage == "missing":
        out.remove(RECEIPT)
    elif damage == "flipped":
        flip(out, RECEIPT, whole[RECEIPT].index(b'"rows"') + 40)
    else:
        out.put(RECEIPT, b"{" if damage == "no JSON" else whole["shard-00002.json"])
    said = "the receipt is missing" if damage == "missing" else "not the receipt that manifest.json was made from"
    with pytest.raises(ValueError, match=rf"{RECEIPT}: {said}\. Fix: "):
        read_all(out, steps)
    found = problems(verified(root, steps))
    assert list(found) == [SHARD]
    assert f"{out.uri}/{RECEIPT}: {said}" in found[SHARD][0][1]
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


@pytest.mark.parametrize("damage", ["flipped", "no JSON", "missing"])
def test_verify_of_a_damaged_manifest_has_it_alone_written_again(
    root: LocalStorage, out: LocalStorage, steps: list[Step], damage: str
) -> None:
    whole = contents(out)
    if damage == "missing":
        out.remove(MANIFEST)
        said = "manifest.json: missing"
    else:
        at = whole[MANIFEST].index(b"receipt_checksum") + 25  # readable, but no receipt fits it
        out.put(MANIFEST, b"{" if damage == "no JSON" else whole[MANIFEST][:at] + b"?" + whole[MANIFEST][at + 1 :])
        said = "manifest.json: not the bytes that were written"
    assert problems(verified(root, steps)) == {MANIFEST: (("", said),)}
    require_mended(root, steps, out, whole, set())


def test_verify_of_a_damaged_manifest_still_finds_a_damaged_shard_and_receipt(
    root: LocalStorage, out: LocalStorage, steps: list[Step]
) -> None:
    whole = contents(out)
    out.put(MANIFEST, b"{")
    flip(out, SHARD, 5000)
    out.put("shard-00002.json", whole[RECEIPT])
    assert list(problems(verified(root, steps))) == [MANIFEST, SHARD, "shard-00002.arrow"]
    require_mended(root, steps, out, whole, {SHARD, RECEIPT, "shard-00002.arrow", "shard-00002.json"})


def test_verify_of_a_damaged_list_of_dropped_rows_has_it_written_again(root: LocalStorage, out: LocalStorage, steps: list[Step]) -> None:
    whole = contents(out)
    out.put("dropped.jsonl", b"{}\n")
    assert problems(verified(root, steps)) == {MANIFEST: (("", "dropped.jsonl: not the bytes that were written"),)}
    require_mended(root, steps, out, whole, set())


def read_all(out: Storage, steps: list[Step]) -> list[CacheRow]:
    """As training reads."""
    reader = CacheReader(out, cache_identity(steps[1].config))
    return [reader[i] for i in range(len(reader))]


# --- sound bytes that cannot be right -------------------------------------------------------------------------------------


def rewrite(root: Storage, steps: list[Step], change: Callable[[list[CacheRow]], None], shard: str = SHARD) -> None:
    """Writes a shard again with changed rows, and receipt, manifest and record that fit it: no checksum tells."""
    out, config = open_storage(f"{root.uri}/{steps[1].folder}"), steps[1].config
    manifest = json.loads(out.read(MANIFEST))
    receipts = {item["file"]: json.loads(out.read(f"{Path(item['file']).stem}.json")) for item in manifest["shards"]}
    reader = ShardReader(out, receipts[shard])
    rows = [reader.read(i) for i in range(len(reader.entries))]
    change(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "check_row", lambda row, identity: None)
        receipts[shard] = write_shard(out, Path(shard).stem, rows, cache_identity(config), reader.form, receipts[shard]["engine"])
    write_manifest(out, list(receipts.values()), cache_identity(config), reader.form)
    record = json.loads(out.read(RECORD))
    record["files"] |= {shard: receipts[shard]["checksum"], MANIFEST: checksum(out.read(MANIFEST))}
    out.put(RECORD, json.dumps(record | {"payload_sha256": dag.payload_checksum(record["files"])}).encode())


def with_nan(rows: list[CacheRow]) -> None:
    codes = rows[1].tapped_PLD.codes.copy()
    codes[3, 1, 5] = 0x7FC0
    rows[1].tapped_PLD = States(codes)


def with_a_zero_layer(rows: list[CacheRow]) -> None:
    codes = rows[1].tapped_PLD.codes.copy()
    codes[:, 1] = 0
    rows[1].tapped_PLD = States(codes)


def with_a_zero_final_state(rows: list[CacheRow]) -> None:
    assert rows[1].final_SD is not None
    codes = rows[1].final_SD.codes.copy()
    codes[2] = 0x8000  # minus zero
    rows[1].final_SD = States(codes)


def with_other_tokens(rows: list[CacheRow]) -> None:
    rows[1].token_ids_T = rows[1].token_ids_T.copy()
    rows[1].token_ids_T[4] += 1


def with_another_mask(rows: list[CacheRow]) -> None:
    rows[1].loss_mask_T = rows[1].loss_mask_T.copy()
    rows[1].loss_mask_T[[5, recorded.NUM_PROMPT_TOKENS]] = 1, 0  # as many as before


def with_infinite_normaliser(rows: list[CacheRow]) -> None:
    rows[1].log_sum_exp_S = rows[1].log_sum_exp_S.copy()
    rows[1].log_sum_exp_S[0] = np.inf


def of_no_corpus_row(rows: list[CacheRow]) -> None:
    rows[1].row_id = "from elsewhere"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_nan, "tapped holds a NaN or an infinity"),
        (with_a_zero_layer, r"tapped is all zero at \[0, 1\], at \d+ places in all"),
        (with_a_zero_final_state, r"final is all zero at \[2\], at 1 places in all"),
        (with_infinite_normaliser, "log_sum_exp holds a NaN or an infinity"),
        (with_other_tokens, "its token_ids are not the corpus's"),
        (with_another_mask, "its loss_mask are not the corpus's"),
        (of_no_corpus_row, "the corpus has no such row"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_verify_of_a_row_that_cannot_be_right_names_shard_row_and_reason(
    root: LocalStorage, out: LocalStorage, steps: list[Step], change: Callable[[list[CacheRow]], None], said: str
) -> None:
    whole, row = contents(out), row_ids(out)[1]
    rewrite(root, steps, change)
    assert runner.plan(steps, root)[1].verdict.is_hit, "its checksums tell"
    row = "from elsewhere" if change is of_no_corpus_row else row
    found = problems(verified(root, steps))
    assert list(found) == [SHARD]
    assert [name for name, _ in found[SHARD]] == [row]
    assert re.fullmatch(rf"row {row}: {said}", found[SHARD][0][1])
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_verify_of_the_final_states_of_another_model_says_how_many_agree(
    root: LocalStorage, out: LocalStorage, steps: list[Step], tmp_path: Path
) -> None:
    whole = contents(out)
    random_target.make(replace(SOURCE, seed=1), tmp_path / "other")
    other = TransformersTarget(tmp_path / "other", (0, 1), torch.bfloat16, torch.device("cpu"))

    def of_another_model(rows: list[CacheRow]) -> None:
        for row in rows:
            final_TD = other.states(row.token_ids_T.tolist()).final_SD
            row.final_SD = encode(final_TD[supervised_rows(row.loss_mask_T)], "bf16")

    rewrite(root, steps, of_another_model)
    reports = verified(root, steps)
    report = reports[SHARD]
    assert list(problems(reports)) == [SHARD]
    assert report.num_agreeing < 0.5 * report.num_compared
    said = f"the best token of its final states is the target's at only {report.num_agreeing} of {report.num_compared} positions"
    assert report.problems == ((row_ids(out)[0], said),)
    require_mended(root, steps, out, whole, {SHARD, RECEIPT})


def test_cache_made_for_other_weights_is_refused_by_reader_and_verify_with_both_values(
    root: LocalStorage, out: LocalStorage, steps: list[Step]
) -> None:
    other = replace(steps[1], config=replace(steps[1].config, target=TargetIdentity("random", "other weights", "t", "c")))
    said = r"weights is 'w', the drafter needs 'other weights'"
    with pytest.raises(ValueError, match=rf"{out.uri}: states of another target: {said}\. Fix: run cache_targets for this target"):
        CacheReader(out, cache_identity(other.config))
    found = problems(verified(root, steps, other))
    assert list(found) == [MANIFEST, *(name for name in out.list("shard-") if name.endswith(".arrow"))]
    assert re.search(said, found[MANIFEST][0][1])
    for file in found.keys() - {MANIFEST}:
        assert found[file][0][0] == ""
        assert "weights='w'" in found[file][0][1]
        assert "weights='other weights'" in found[file][0][1]


# --- places that have trouble -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@dataclass
class AfterTwoShards(recorded.SilentScreen):
    """Calls `trouble` once two units are finished, while the third one waits."""

    trouble: Callable[[], object]
    num_rows: int
    is_over: bool = False

    def progress(self, progress: Progress) -> None:
        if progress.unit == "rows" and progress.done >= self.num_rows and not self.is_over:
            self.is_over = True
            self.trouble()


@pytest.fixture
def num_rows_of_two(finished: Path, steps: list[Step]) -> int:
    out = LocalStorage(f"{finished}/{steps[1].folder}")
    return len(row_ids(out, "shard-00000.arrow")) + len(row_ids(out, SHARD))


def test_cache_on_a_disk_that_fills_up_says_so_keeps_its_shards_and_goes_on_when_there_is_room(
    finished: Path, steps: list[Step], small_disk: Path, num_rows_of_two: int
) -> None:
    root = LocalStorage(str(small_disk / "root"))
    out = LocalStorage(f"{root.uri}/{steps[1].folder}")
    filler = small_disk / "filler"

    def fill() -> None:
        room = shutil.disk_usage(small_disk).free
        filler.write_bytes(b"x" * (room - 16_384))  # a lease fits, a shard does not

    with pytest.raises(
        StepFailed, match=r"step cache_targets failed: cannot store in .*: the disk is full; [\d,]+ bytes are needed.*Fix: make room"
    ) as caught:
        drive(steps, root, AfterTwoShards(fill, num_rows_of_two))
    assert out.uri in str(caught.value)
    assert filler.exists()
    before = stamps(out)
    assert out.list("shard-") == ["shard-00000.arrow", "shard-00000.json", SHARD, RECEIPT]
    assert not list(small_disk.rglob("*.partial"))
    filler.unlink()
    drive(steps, root)
    assert contents(out) == contents(LocalStorage(f"{finished}/{steps[1].folder}"))
    assert {name: stamp for name, stamp in stamps(out).items() if name in before and name != LEASE} == {
        name: stamp for name, stamp in before.items() if name != LEASE
    }


def test_cache_that_does_not_fit_on_its_disk_is_refused_before_anything_is_computed(
    steps: list[Step], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = LocalStorage(str(small_disk / "root"))
    drive(steps[:1], root)
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
    monkeypatch.setattr(cache_targets, "CAPTURER", "no.such.module:Worker")
    with pytest.raises(StepFailed, match=r"its cache would take .* above the free space.* Fix: "):
        drive(steps, root)


def test_cache_in_a_bucket_that_is_denied_half_way_says_so_at_once_and_goes_on_later(
    finished: Path, steps: list[Step], s3_proxy: FaultProxy, num_rows_of_two: int
) -> None:
    root = open_storage("s3://drafters/denied")
    out = open_storage(f"{root.uri}/{steps[1].folder}")
    denied_at: list[float] = []

    def deny() -> None:
        s3_proxy.add(Fault("PUT", status=403))
        denied_at.append(time.monotonic())

    with pytest.raises(
        StepFailed,
        match=rf"step cache_targets failed: cannot write {out.uri}/shard-00002\.arrow: access is denied by .*Fix: set AWS_ACCESS_KEY_ID",
    ):
        drive(steps, root, AfterTwoShards(deny, num_rows_of_two))
    assert time.monotonic() - denied_at[0] < 10, "it was retried for long"
    s3_proxy.heal()
    assert out.list("shard-") == ["shard-00000.arrow", "shard-00000.json", SHARD, RECEIPT]
    expire(out)
    s3_proxy.heal()
    drive(steps, root)
    written = [path.rpartition("/")[2] for method, path in s3_proxy.requests if method == "PUT"]
    assert "shard-00002.arrow" in written
    assert SHARD not in written
    assert contents(out) == contents(LocalStorage(f"{finished}/{steps[1].folder}"))


def expire(out: Storage) -> None:
    """The lease of the failed driver, which could not be given up where nothing may be written: this process lives on."""
    out.put(LEASE, json.dumps(json.loads(out.read(LEASE)) | {"heartbeat": 0.0}).encode())


def test_cache_in_a_bucket_with_a_wrong_secret_is_refused_at_once(
    steps: list[Step], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-word")
    root = open_storage("s3://drafters/wrong-secret")
    with pytest.raises(
        ValueError, match=rf"s3://drafters/wrong-secret.*: access is denied by {s3_proxy.url} .*Fix: set AWS_ACCESS_KEY_ID"
    ) as caught:
        drive(steps, root)
    assert s3_proxy.num_requests == 1, "it was retried"
    assert "not-the-right-word" not in str(caught.value)


def test_verify_over_an_object_store_finds_damage_and_the_next_run_mends_it(
    root: LocalStorage, out: LocalStorage, steps: list[Step], s3_proxy: FaultProxy
) -> None:
    whole, place = contents(out), open_storage("s3://drafters/verified")
    for name in root.list():
        place.put(name, root.read(name))
    stored = open_storage(f"{place.uri}/{steps[1].folder}")
    assert not problems(verified(place, steps))
    row, offset = (json.loads(whole[RECEIPT])["rows"][2][i] for i in (0, 5))
    flip(stored, SHARD, offset + 3000)
    stored.remove("shard-00002.arrow")
    s3_proxy.heal()
    found = problems(verified(place, steps))
    gets = [path for method, path in s3_proxy.requests if method == "GET" and path.endswith(".arrow")]
    assert len(gets) == len(set(gets)), "a shard was fetched twice"
    assert {file: [name for name, _ in said] for file, said in found.items()} == {SHARD: ["", row], "shard-00002.arrow": [""]}
    s3_proxy.heal()
    drive(steps, place)
    written = {path.rpartition("/")[2] for method, path in s3_proxy.requests if method == "PUT"}
    assert written - {LEASE} == {SHARD, RECEIPT, "shard-00002.arrow", "shard-00002.json"} | WRITTEN_ANEW
    assert contents(stored) == whole
    assert not problems(verified(place, steps))


# --- shards of another cut --------------------------------------------------------------------------------------------


def test_run_over_shards_that_were_cut_elsewhere_refuses_to_lose_or_repeat_rows(
    root: LocalStorage, out: LocalStorage, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted folder that another version with another unit size goes on with."""
    out.remove(SHARD)
    monkeypatch.setattr(cache_targets, "SHARD_BYTES", UNIT_BYTES // 2)
    with pytest.raises(
        StepFailed, match=rf"{out.uri}: its shards hold \d+ rows, .* the corpus has {len(ANSWERS.lengths)}.*Fix: rebuild=\[cache_targets\]"
    ):
        drive(steps, root)
    assert not out.exists(RECORD)
