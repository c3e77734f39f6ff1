"""The nouns of the recipe: one class per kind of artifact, naming the files inside its folder.

Steps are verbs, artifacts nouns. What stands in the files is documented where it is written: prompts in
`stages/prompts.py`, corpus rows in `stages/regenerate.py`, cache rows in `dspark/cache.py`, round rows in
`dspark/rounds.py`, drafters in `dspark/checkpoint.py`, releases in `dspark/release.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from pipelines.dag import Artifact


@dataclass(frozen=True)
class PromptSet(Artifact):
    """Prompts with content id, domain and split: `prompts.jsonl`, and `dropped.jsonl` with a reason a row."""

    noun: ClassVar[str] = "PromptSet"
    PROMPTS: ClassVar[str] = "prompts.jsonl"
    DROPPED: ClassVar[str] = "dropped.jsonl"


@dataclass(frozen=True)
class Corpus(Artifact):
    """The target's own responses: Parquet shards `rows-00000.parquet` with a receipt each, and `dropped.jsonl`."""

    noun: ClassVar[str] = "Corpus"
    is_mended: ClassVar[bool] = True
    DROPPED: ClassVar[str] = "dropped.jsonl"


@dataclass(frozen=True)
class TargetCache(Artifact):
    """The target's hidden states: Arrow IPC shards with a receipt each, `dropped.jsonl`, and `manifest.json`, written last."""

    noun: ClassVar[str] = "TargetCache"
    is_mended: ClassVar[bool] = True
    DROPPED: ClassVar[str] = "dropped.jsonl"


@dataclass(frozen=True)
class Drafter(Artifact):
    """A trained drafter: `drafter/` (weights and config), `curves.jsonl`, `vocabulary.json`."""

    noun: ClassVar[str] = "Drafter"
    FOLDER: ClassVar[str] = "drafter"


@dataclass(frozen=True)
class EvalReport(Artifact):
    """Accepted length and acceptance per position and domain: `report.json`, its rounds as Parquet, figures."""

    noun: ClassVar[str] = "EvalReport"
    REPORT: ClassVar[str] = "report.json"
    ROUNDS: ClassVar[str] = "rounds-"  # how the files of the reported rounds begin


@dataclass(frozen=True)
class Rounds(Artifact):
    """Decoding rounds on held-out prompts by setting, and a block at every position of the test texts: Parquet files with receipts."""

    noun: ClassVar[str] = "Rounds"


@dataclass(frozen=True)
class Calibration(Artifact):
    """Per-position temperatures `calibration.json`, and what they do on the test rounds: `report.json`, figures."""

    noun: ClassVar[str] = "Calibration"
    CALIBRATION: ClassVar[str] = "calibration.json"
    REPORT: ClassVar[str] = "report.json"


@dataclass(frozen=True)
class SpsProfile(Artifact):
    """Seconds of an engine step by its size: raw `timings.json`, medians `sps.json`, a figure."""

    noun: ClassVar[str] = "SpsProfile"
    TIMINGS: ClassVar[str] = "timings.json"
    SPS: ClassVar[str] = "sps.json"


@dataclass(frozen=True)
class ScheduleReport(Artifact):
    """Every policy replayed at every concurrency: `report.json` and figures."""

    noun: ClassVar[str] = "ScheduleReport"
    REPORT: ClassVar[str] = "report.json"


@dataclass(frozen=True)
class Release(Artifact):
    """What serving engines load (layout: dspark/release.py), in `release/`."""

    noun: ClassVar[str] = "Release"
    FOLDER: ClassVar[str] = "release"
