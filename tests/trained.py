"""What `make pipeline` has trained, for benchmarks: drafters, their target, and prompts of the test split."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from dspark.chat import ChatTokenizer, messages
from dspark.checkpoint import load_drafter
from dspark.decoding import Request
from dspark.drafters.base import Drafter
from dspark.packed_target import load_target
from dspark.target import TargetModel, load_head
from pipelines import flow, runner, targets
from pipelines.backends.object_store import open_storage
from pipelines.config import compose
from pipelines.dag import Artifact


@dataclass(frozen=True)
class HeldOut:
    """A target's folder, its weights' hash, and the prompts' folder."""

    target_folder: Path
    weights: str
    prompts_uri: str

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.target_folder)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokenizer.stop_ids

    def requests(self, num_prompts: int, domains: Sequence[str] = ("math", "code")) -> list[Request]:
        """First turns of the test split: of these domains, and then of all others."""
        rows = [json.loads(line) for line in open_storage(self.prompts_uri).read("prompts.jsonl").splitlines()]
        rows = sorted((row for row in rows if row["split"] == "test"), key=lambda row: row["domain"] not in domains)[:num_prompts]
        return [
            Request(row["id"], tuple(self.tokenizer.prompt_ids(messages(row["system"], row["turns"][:1], []))), row["domain"])
            for row in rows
        ]


@dataclass(frozen=True)
class Trained:
    """A trained drafter's folder, and what it drafts for."""

    uri: str
    held_out: HeldOut

    @property
    def name(self) -> str:
        return Path(self.uri).name

    def load(self, dtype: torch.dtype) -> tuple[TargetModel, Drafter]:
        folder = self.held_out.target_folder
        drafter = load_drafter(open_storage(self.uri), "drafter", load_head(folder, dtype), self.held_out.weights, dtype)
        return load_target(folder, drafter.tapped_layers, dtype, torch.device("cpu")), drafter


def held_out() -> HeldOut:
    """Of the default configuration. SystemExit when they are not there."""
    settings, _ = compose([])
    prompts = planned_artifacts("prompts")["prompts"]
    return HeldOut(Path(targets.uri(settings.target)), targets.identify(settings.target).weights, prompts.uri)


def trained_drafters(folders: Sequence[str] | None = None) -> list[Trained]:
    """Those in these folders; without, that of the default configuration. SystemExit when there is none."""
    prompts = held_out()
    return [Trained(folder, prompts) for folder in folders or [planned_artifacts("train")["train"].uri]]


def planned_artifacts(*steps: str, overrides: Sequence[str] = ()) -> dict[str, Artifact]:
    """What `make pipeline` has made with these overrides, by step. SystemExit when one is not there."""
    settings, _ = compose(list(overrides))
    root = open_storage(flow.absolute(settings.cluster.root))
    found = {}
    for item in runner.plan(flow.build(settings), root):
        if item.verdict.is_hit and item.verdict.record is not None:
            found[item.step.name] = item.step.artifact(f"{root.uri}/{item.step.folder}", item.verdict.record)
    if missing := [step for step in steps if step not in found]:
        raise SystemExit(
            f'{missing[0]}: not there. Fix: make pipeline ARGS="{" ".join([*overrides, f"until={missing[0]}"])}", or name a drafter with --drafter FOLDER'
        )
    return found
