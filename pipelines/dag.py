"""Steps, artifacts, fingerprints and records: what decides whether a piece of work has been done already.

A `Step` is a function (named by import path), a frozen config, named inputs and the type of artifact that it makes. Its
*fingerprint* hashes everything that decides what the artifact is: step name, version, function, config and the inputs'
fingerprints. Where the step runs (`Resources`) never enters it.

An `Artifact` is a folder `{root}/{step}/{label}-{first 8 hex of the fingerprint}` of any store, valid only once its
`record.json` exists, which is written last. One piece of work through this file:

    step = Step("train", 1, "pipelines.stages.train:run", config, {"cache": cache_step}, Drafter, "dspark", resources)
    fingerprint(step)                      # 64 hex digits, the same in every process
    judge(step, root_storage, inputs)      # Verdict(is_hit=False, reason="stage.train.lr: 0.0006 -> 0.0003")

record.json, schema version 1: `schema_version`, `fingerprint`, `identity` (the hashed payload, readable), `inputs`
(name -> step, fingerprint, uri, payload_sha256), `files` (name -> sha256), `payload_sha256` (over them), `metrics`,
`figures`, `provenance` (code version, host, packages, times, wall and CPU seconds, load, resources) and `mlflow_run_id`.
Only the standard library is imported, so that a plan costs nothing.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from dspark.storage import Storage

RECORD = "record.json"
DAMAGED = "damaged.json"  # what mode=verify found: {"files": [...]}
RECORD_SCHEMA_VERSION = 1
RECORD_KEYS = {"fingerprint", "identity", "inputs", "files", "payload_sha256", "metrics", "figures", "provenance", "mlflow_run_id"}


@dataclass(frozen=True)
class Artifact:
    """A finished folder of the store and its record. Subclasses (artifacts.py) name the files inside."""

    uri: str
    record: Mapping[str, Any]

    noun: ClassVar[str] = "artifact"
    is_mended: ClassVar[bool] = False  # its step makes lost files alone: each has a receipt of its name, or is made in every run

    @property
    def fingerprint(self) -> str:
        return self.record["fingerprint"]

    @property
    def payload_sha256(self) -> str:
        return self.record["payload_sha256"]


@dataclass(frozen=True)
class Resources:
    """Where and how a step runs. Never hashed; recorded as provenance."""

    target_uri: str
    num_workers: int = 1
    num_cpus: int = 0  # a worker; 0 = every CPU of its machine
    num_gpus: int = 0  # a worker
    max_attempts: int = 3
    train_engine: str = "local"
    zero_stage: int = 0
    micro_batch_sequences: int = 1
    loss_chunk_rows: int = 256
    cache: Any = None  # stage.cache_targets: how the target cache is stored or streamed
    num_producers: int = 0  # engine workers beside a training that reads a stream
    cpu_share: float = 1.0  # of its machine, for a worker with num_cpus 0
    serving_url: str | None = None  # of a running vLLM server
    files: Mapping[str, str] = field(default_factory=dict)  # name -> uri of input files, hashed by content


@dataclass(frozen=True)
class Step:
    """One verb of the recipe. `version` is bumped by hand when the code starts to make something else of the same config."""

    name: str
    version: int
    function: str
    config: Any
    inputs: Mapping[str, "Step"]
    artifact: type[Artifact]
    label: str
    resources: Resources
    is_streamed: bool = False  # unless it is there already, the step that takes it makes it in passing and keeps nothing

    @property
    def folder(self) -> str:
        """Where the artifact lives below the root: `train/dspark-1a2b3c4d`."""
        return f"{self.name}/{self.label}-{self._fingerprint[:8]}"

    @cached_property
    def _fingerprint(self) -> str:  # computed once: a config may hold a tokenizer's whole text
        return digest(identity(self))


@dataclass(frozen=True)
class Outcome:
    """What a step function hands back: checksums of every file that is the artifact, metrics, and figures to show.

    `registered_model`: the name under which the tracker registers the artifact as a model version.
    """

    files: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    registered_model: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`is_hit` with the record found, or the reason why the step has to run."""

    is_hit: bool
    reason: str
    record: Mapping[str, Any] | None = None
    is_streamed: bool = False  # nothing to make: `record` has no more than the payload checksum that a stream stands for
    damaged: tuple[str, ...] = ()  # files of a finished artifact that are missing or damaged; the rest of it is good


def canonical(value: Any, path: str = "config") -> Any:
    """Plain JSON data with one serialization only; TypeError for anything that could differ between two processes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: canonical(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)}
        return {"__type__": type(value).__name__, **fields}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, tuple | list):
        return [canonical(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: canonical(value[key], f"{path}.{key}") for key in sorted(value)}
    allowed = "dataclass, str, int, finite float, bool, None, tuple, list, dict with str keys"
    raise TypeError(f"{path}: {value!r:.40} ({type(value).__name__}) cannot be part of a fingerprint (allowed: {allowed})")


def identity(step: Step) -> dict[str, Any]:
    """The hashed payload: everything that decides what the artifact is, and nothing about where it is made."""
    inputs = {name: fingerprint(step.inputs[name]) for name in sorted(step.inputs)}
    return {"step": step.name, "version": step.version, "function": step.function, "config": canonical(step.config), "inputs": inputs}


def digest(value: Any) -> str:
    """SHA-256 over the canonical JSON text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


def fingerprint(step: Step) -> str:
    return step._fingerprint


def payload_checksum(files: Mapping[str, str]) -> str:
    return digest(dict(files))


def file_checksums(storage: Storage, names: list[str] | None = None) -> dict[str, str]:
    """SHA-256 of the named files (default: every file), for `Outcome.files` of steps with small payloads."""
    return {name: hashlib.sha256(storage.read(name)).hexdigest() for name in (storage.list() if names is None else names)}


def read_record(storage: Storage, folder: str = "") -> dict[str, Any] | None:
    """The record of a folder, or None when there is none. A damaged one is an error: it cannot have been written by us."""
    name = f"{folder}/{RECORD}" if folder else RECORD
    try:
        data = storage.read(name)
    except FileNotFoundError:
        return None
    try:
        record = json.loads(data)
        is_readable = record["schema_version"] == RECORD_SCHEMA_VERSION and record.keys() >= RECORD_KEYS
    except (ValueError, KeyError, TypeError):
        is_readable = False
    if not is_readable:
        raise ValueError(
            f"{storage.uri}/{name}: not a record of schema version {RECORD_SCHEMA_VERSION}. "
            "Fix: use another cluster.root, or remove this folder, then its step will run again"
        )
    return record


def stream_record(step: Step, input_payloads: Mapping[str, str]) -> dict[str, Any]:
    """Stands for an artifact that is streamed: made of these inputs, of no bytes, known by what it would have been made from."""
    inputs = {name: {"payload_sha256": payload} for name, payload in input_payloads.items()}
    cost = {"finished_at": "-", "wall_seconds": 0.0, "cpu_seconds": 0.0, "load_average": 0.0}
    record = {"fingerprint": fingerprint(step), "inputs": inputs, "files": {}, "metrics": {}, "figures": [], "provenance": cost}
    return record | {"payload_sha256": stream_payload(record)}


def stream_payload(record: Mapping[str, Any]) -> str:
    """What a streamed artifact has in place of a checksum; an equal one that was stored counts as the same input."""
    return digest([record["fingerprint"], {name: made["payload_sha256"] for name, made in record["inputs"].items()}])


def judge(
    step: Step, root: Storage, input_payloads: Mapping[str, str | None], rebuild: bool = False, streamed: Mapping[str, str] | None = None
) -> Verdict:
    """Is the artifact there? `input_payloads`: the payload checksum of each input, None when that input will be made anew;
    `streamed`: the payload that each would have as a stream.

    A hit needs the full fingerprint and the very inputs it was made from: regeneration is random, so an equal fingerprint
    does not mean equal content.
    """
    if rebuild:
        return Verdict(False, f"rebuild=[{step.name}]")
    anew = [name for name, payload in input_payloads.items() if payload is None]
    is_anew = f"input {', '.join(anew)} is made anew" if anew else ""
    record = read_record(root, step.folder)
    if record is None:
        return Verdict(False, _drift(step, root) or is_anew or "never made")
    if record["fingerprint"] != fingerprint(step):
        raise ValueError(
            f"{root.uri}/{step.folder}: its fingerprint {record['fingerprint']} shares only 8 digits with {fingerprint(step)}. "
            "Fix: use another cluster.root"
        )
    if anew:
        return Verdict(False, is_anew)
    made_from = {name: record["inputs"][name]["payload_sha256"] for name in input_payloads}
    changed = [name for name, payload in input_payloads.items() if made_from[name] not in (payload, (streamed or {}).get(name))]
    if changed:
        return Verdict(False, f"the payload of input {', '.join(changed)} changed")
    there = {name.removeprefix(f"{step.folder}/") for name in root.list(f"{step.folder}/")}
    missing = record["files"].keys() - there
    noted = json.loads(root.read(f"{step.folder}/{DAMAGED}"))["files"] if DAMAGED in there else []
    if lost := sorted({*missing, *noted}):
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        reason = f"file {lost[0]} is {'missing' if lost[0] in missing else 'damaged'}{more}"
        return Verdict(False, reason, damaged=tuple(lost) if step.artifact.is_mended else ())
    return Verdict(True, f"made {record['provenance']['finished_at']}", record)


def _drift(step: Step, root: Storage) -> str:
    """Field-level difference to the nearest record of the same step; empty when there is none to compare with."""
    records = []
    for name in root.list(f"{step.name}/"):
        if name.count("/") == 2 and name.endswith(f"/{RECORD}"):
            with contextlib.suppress(ValueError):  # damaged, or of another schema: nothing to compare with
                records.append(read_record(root, name.removesuffix(f"/{RECORD}")))
    newest_first = sorted((record for record in records if record), key=lambda record: record["provenance"]["finished_at"], reverse=True)
    changes = [differences(record["identity"], identity(step), step.name) for record in newest_first]
    nearest = min(filter(None, changes), key=len, default=[])
    settings = [change for change in nearest if not change.startswith("inputs.")]
    shown = settings or [change.split(":")[0].replace("inputs.", "input ") + " differs" for change in nearest]
    return "; ".join(shown[:3]) + (f"; and {len(shown) - 3} more" if len(shown) > 3 else "")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], step_name: str) -> list[str]:
    """Changed leaves as `path: old -> new`, in the words a user types: the part named like the step is `stage.<step>`."""

    def leaves(value: Any, path: str) -> dict[str, str]:
        if isinstance(value, Mapping) and value:
            return {k: v for key in value for k, v in leaves(value[key], f"{path}.{key}" if path else key).items()}
        return {path: json.dumps(value)}

    def words(path: str) -> str:
        setting = path.removeprefix("config.")
        return f"stage.{setting}" if setting.split(".")[0] == step_name else setting

    before, after = leaves(old, ""), leaves(new, "")
    pairs = [(path, before.get(path, "absent"), after.get(path, "absent")) for path in sorted(before.keys() | after.keys())]
    short = [(path, *(text if len(text) <= 40 else f"{text[:37]}..." for text in texts)) for path, *texts in pairs if texts[0] != texts[1]]
    return [f"{words(path)}: {a} -> {b}" for path, a, b in short]
