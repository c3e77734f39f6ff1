"""Prompts to rounds on one worker: what evaluate, trace and profile_sps share. The decoding itself is `dspark.decoding.decode`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.artifacts import Drafter
from pipelines.backends.object_store import open_storage
from pipelines.evaluation import request_id
from pipelines.settings import DecodingSetting, EvaluateStage, ServingStage, TraceStage
from pipelines.targets import local_folder

if TYPE_CHECKING:
    from dspark.decoding import Completion, DecodingConfig, Request
    from dspark.drafters.base import BlockDrafter
    from dspark.drafters.base import Drafter as Model
    from dspark.storage import Storage
    from dspark.target import TargetModel
    from pipelines.flow import EvaluateConfig, TraceConfig


@dataclass(frozen=True)
class DecoderSettings:
    """`weights`: hash of the target's weights, which the drafter must have been trained for."""

    target_uri: str
    drafter_uri: str
    weights: str
    max_length_tokens: int
    max_new_tokens: int
    batch_size: int
    seed: int

    @classmethod
    def of(
        cls, config: "EvaluateConfig | TraceConfig", stage: EvaluateStage | TraceStage, target_uri: str, drafter_uri: str
    ) -> "DecoderSettings":
        limits = config.max_length_tokens, stage.max_new_tokens, stage.batch_size, stage.seed
        return cls(target_uri, drafter_uri, config.target.weights, *limits)


class Decoder:
    """Target and drafter of one precision at a time, loaded when first asked for."""

    def __init__(self, settings: DecoderSettings) -> None:
        import torch

        from dspark.chat import ChatTokenizer

        self._settings, self._folder = settings, local_folder(settings.target_uri)
        self.tokenizer = ChatTokenizer(self._folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: dict[str, tuple[TargetModel, Model]] = {}

    def models(self, precision: str) -> "tuple[TargetModel, Model]":
        from dspark.checkpoint import load_drafter
        from dspark.packed_target import load_target
        from dspark.target import load_head
        from dspark.training import DTYPES

        if precision not in self._loaded:
            self._loaded.clear()  # one pair in memory at a time
            dtype = DTYPES[precision]
            head = load_head(self._folder, dtype)
            drafter = load_drafter(open_storage(self._settings.drafter_uri), Drafter.FOLDER, head, self._settings.weights, dtype)
            target = load_target(self._folder, drafter.tapped_layers, dtype, self.device)
            self._loaded = {precision: (target, drafter.to(self.device))}
        return self._loaded[precision]

    def request(self, prompt: dict[str, Any], responses: Sequence[str]) -> "tuple[Request, str | None]":
        """The prompt's next turn after these responses, and in what it is too long."""
        from dspark.chat import messages
        from dspark.decoding import Request

        limits, turn = self._settings, len(responses) + 1
        ids = self.tokenizer.prompt_ids(messages(prompt["system"], prompt["turns"][:turn], responses))
        found = Request(request_id(prompt["source"], prompt["id"], turn), tuple(ids), prompt["domain"], prompt["source"])
        if len(ids) + limits.max_new_tokens <= limits.max_length_tokens:
            return found, None
        return found, (
            f"{len(ids)} tokens, with {limits.max_new_tokens} new ones above target.max_length_tokens {limits.max_length_tokens}"
        )

    def requests(self, prompts: Sequence[dict[str, Any]]) -> "tuple[list[Request], list[dict[str, str]]]":
        """First turns as requests, and what is too long with its reason."""
        requests, skipped = [], []
        for prompt in prompts:
            request, too_long = self.request(prompt, [])
            if too_long is None:
                requests.append(request)
            else:
                skipped.append({"id": prompt["id"], "source": prompt["source"], "reason": f"prompt too long ({too_long})"})
        return requests, skipped

    def config(self, setting: DecodingSetting) -> "DecodingConfig":
        from dspark.decoding import DecodingConfig, Verification
        from dspark.rounds import VERIFY_ALL
        from dspark.sampling import Sampling
        from dspark.scheduler import static_policy

        sampling, limits = Sampling(setting.draft_mode, setting.temperature, setting.top_k, setting.top_p), self._settings
        return DecodingConfig(
            sampling,
            limits.max_new_tokens,
            self.tokenizer.stop_ids,
            limits.batch_size,
            limits.seed,
            setting.ablation or "",
            Verification(setting.policy, None if setting.policy == VERIFY_ALL else static_policy(setting.policy)),
        )

    def decode(
        self,
        requests: "list[Request]",
        setting: DecodingSetting,
        precision: str,
        drafter: "Literal['trained', 'none'] | ServingStage" = "trained",
    ) -> "list[Completion]":
        """Completions by request id. `drafter`: the trained one, none, or what a server is measured beside."""
        from dspark.decoding import decode
        from dspark.drafters.dflash import DFlash
        from dspark.untrained import PromptLookup

        target, trained = self.models(precision)
        if isinstance(trained, DFlash):
            trained.is_markov_ablated = setting.ablation == "no_markov"
        used: BlockDrafter | None = None if drafter == "none" else trained
        config = self.config(setting)
        if isinstance(drafter, ServingStage) and drafter.method == "ngram":
            used = PromptLookup(drafter.num_speculative_tokens, drafter.min_ngram, drafter.max_ngram, target.shape.vocab_size)
            config = replace(config, variant=drafter.method)
        found = decode(target, used, requests, config)
        return sorted(found, key=lambda completion: completion.request.id)

    def export(self, folder: Path, precision: str) -> Path:
        """The trained drafter as vLLM loads it."""
        from dspark.release import served_files
        from dspark.target import load_head
        from dspark.training import DTYPES

        head = load_head(self._folder, DTYPES[precision])
        target_config = json.loads((self._folder / "config.json").read_text())
        for name, data in served_files(self.models(precision)[1], head, target_config).items():
            (folder / name).write_bytes(data)
        return folder

    def free(self) -> None:
        """Takes the models out of memory."""
        import torch

        self._loaded.clear()
        torch.cuda.empty_cache()


def put_rounds(out: "Storage", name: str, completions: "Sequence[Completion]") -> str:
    """Writes their rounds and returns the file's SHA-256."""
    from dspark.rounds import to_parquet

    data = to_parquet([r for completion in completions for r in completion.rounds])
    out.put(name, data)
    return hashlib.sha256(data).hexdigest()
