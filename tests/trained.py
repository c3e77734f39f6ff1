"""What `make pipeline` has trained, for benchmarks: drafters, their target, and prompts of the test split."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from dspark.packed_target import load_target

from dspark.chat import ChatTokenizer, messages
from dspark.checkpoint import load_drafter
from dspark.decoding import Request
from dspark.drafters.base import Drafter
from dspark.target import TargetModel, load_head
from pipelines import flow, runner, targets
from pipelines.backends.object_store import open_storage
from pipelines.config import compose


@dataclass(frozen=True)
class Trained:
    """A drafter's folder, its target's, and the prompts' file."""

    drafter_uri: str
    target_folder: Path
    weights: str
    prompts_uri: str

    @property
    def name(self) -> str:
        return Path(self.drafter_uri).name

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self.target_folder)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokenizer.stop_ids

    def load(self, dtype: torch.dtype) -> tuple[TargetModel, Drafter]:
        head = load_head(self.target_folder, dtype)
        drafter = load_drafter(open_storage(self.drafter_uri), "drafter", head, self.weights, dtype)
        return load_target(self.target_folder, drafter.tapped_layers, dtype, torch.device("cpu")), drafter

    def requests(self, num_prompts: int, domains: Sequence[str] = ("math", "code")) -> list[Request]:
        """First turns of the test split: of these domains, and then of all others."""
        rows = [json.loads(line) for line in open_storage(self.prompts_uri).read("prompts.jsonl").splitlines()]
        rows = sorted((row for row in rows if row["split"] == "test"), key=lambda row: row["domain"] not in domains)[:num_prompts]
        return [
            Request(row["id"], tuple(self.tokenizer.prompt_ids(messages(row["system"], row["turns"][:1], []))), row["domain"])
            for row in rows
        ]


def trained_drafters(folders: Sequence[str] | None = None, overrides: Sequence[str] = ()) -> list[Trained]:
    """Those in these folders; without, the one of this configuration. SystemExit when there is none."""
    settings, _ = compose(list(overrides))
    root = open_storage(flow.absolute(settings.cluster.root))
    planned = {item.step.name: item for item in runner.plan(flow.build(settings), root)}
    uris = [f"{root.uri}/{planned['train'].step.folder}"] if folders is None else list(folders)
    if folders is None and not planned["train"].verdict.is_hit:
        raise SystemExit('no trained drafter. Fix: make pipeline ARGS="until=train", or --drafter FOLDER')
    target = settings.target
    prompts_uri = f"{root.uri}/{planned['prompts'].step.folder}"
    return [Trained(uri, Path(targets.uri(target)), targets.identify(target).weights, prompts_uri) for uri in uris]
