"""The nouns of the recipe: one class per kind of artifact, naming the files inside its folder.

Steps are verbs, artifacts nouns. What stands in the files is documented where it is written: prompts in
`stages/prompts.py`, corpus rows in `stages/regenerate.py`, cache rows in `dspark/cache.py`, round rows in
`dspark/rounds.py`, drafters in `dspark/checkpoint.py`.
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
    DROPPED: ClassVar[str] = "dropped.jsonl"


@dataclass(frozen=True)
class TargetCache(Artifact):
    """The target's hidden states: Arrow IPC shards with a receipt each and `manifest.json`, written last."""

    noun: ClassVar[str] = "TargetCache"


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
