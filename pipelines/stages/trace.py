"""trace: decodes the calibrate and test prompts with the trained drafter, whole blocks verified, and keeps every round.

Calibration is fitted on the rounds of the calibrate split and reported on those of the test split. A truncated round goes on
from an anchor that plain decoding never visits; so for the test prompts a block is also drafted at *every* position of the
finished text (`dspark.trace.every_position`), which lets the replay continue from anywhere.

The first of stage.trace.settings is the one that is served. Of the others there are rounds alone, for the report of calibrate.

Units of work are chunks of a split's prompts under one setting; a unit counts once it has its receipt. Files, by the number of
the setting: `rounds-0-<split>-0000.parquet`, `positions-0-test-0000.parquet` (schema: dspark/rounds.py).
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dspark.rounds import Round, from_parquet
from dspark.storage import Storage
from pipelines.artifacts import PromptSet
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome, file_checksums
from pipelines.decoder import Decoder, DecoderSettings, put_rounds
from pipelines.flow import TraceConfig
from pipelines.runner import Progress, Work
from pipelines.settings import DecodingSetting

CHUNK_BATCHES = 2  # batches of prompts a unit of work
SPLITS = ("calibrate", "test")
SERVED = 0


@dataclass(frozen=True)
class Settings:
    decoder: DecoderSettings
    settings: tuple[DecodingSetting, ...]
    precision: str
    out_uri: str


@dataclass(frozen=True)
class Unit:
    """`setting`: its number, from 0."""

    setting: int
    split: str
    number: int
    prompts: tuple[dict[str, Any], ...]

    @property
    def rounds(self) -> str:
        return f"rounds-{self.setting}-{self.split}-{self.number:04d}"

    @property
    def positions(self) -> str:
        return f"positions-{self.setting}-{self.split}-{self.number:04d}"

    @property
    def has_positions(self) -> bool:
        return self.split == "test" and self.setting == SERVED


def run(config: TraceConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    stage = config.trace
    rows = [json.loads(line) for line in open_storage(inputs["prompts"].uri).read(PromptSet.PROMPTS).splitlines()]
    size, units = stage.batch_size * CHUNK_BATCHES, []
    for setting, split in product(range(len(stage.settings)), SPLITS):
        prompts = [{**row, "source": split} for row in rows if row["split"] == split]
        units += [Unit(setting, split, i // size, tuple(prompts[i : i + size])) for i in range(0, len(prompts), size)]
    receipts = {u.rounds: json.loads(out.read(f"{u.rounds}.json")) for u in units if out.exists(f"{u.rounds}.json")}
    total, done = sum(len(u.prompts) for u in units), sum(len(u.prompts) for u in units if u.rounds in receipts)
    work.report(Progress(done, total, "prompts"))
    decoder = DecoderSettings.of(config, stage, work.resources.target_uri, inputs["drafter"].uri)
    settings = Settings(decoder, stage.settings, stage.precision, out.uri)
    for receipt in work.map("pipelines.stages.trace:Tracer", settings, [u for u in units if u.rounds not in receipts]):
        receipts[receipt["name"]] = receipt
        done += receipt["num_prompts"]
        work.report(Progress(done, total, "prompts", {"traced_tokens_per_second": receipt["tokens_per_second"]}))
    metrics = {}
    for setting, split in product(range(len(stage.settings)), SPLITS):
        found = [receipts[u.rounds] for u in units if (u.setting, u.split) == (setting, split)]
        num_rounds, skipped = sum(receipt["num_rounds"] for receipt in found), sum(len(receipt["skipped"]) for receipt in found)
        if not num_rounds:
            raise ValueError(
                f"stage.trace.max_new_tokens: {stage.max_new_tokens}: no round on the {split} prompts, {skipped} of them too long for "
                f"target.max_length_tokens {config.max_length_tokens}. Fix: a smaller stage.trace.max_new_tokens, or other prompts"
            )
        metrics[f"rounds_{split}" + (f"_{setting}" if setting != SERVED else "")] = float(num_rounds)
    metrics["positions_test"] = float(sum(receipts[u.rounds]["num_positions"] for u in units))
    metrics["prompts_skipped"] = float(sum(len(receipts[u.rounds]["skipped"]) for u in units if u.setting == SERVED))
    names = [f"{u.rounds}.parquet" for u in units]
    names += [f"{u.positions}.parquet" for u in units if u.has_positions]
    return Outcome(file_checksums(out, names), metrics)


def num_settings(artifact: Artifact) -> int:
    """Of how many settings there are rounds."""
    return len({name.split("-")[1] for name in artifact.record["files"] if name.startswith("rounds-")})


def read_rounds(artifact: Artifact, kind: str, split: str, setting: int = SERVED) -> list[Round]:
    """`kind`: rounds | positions, the latter of the served setting only."""
    storage = open_storage(artifact.uri)
    names = sorted(name for name in artifact.record["files"] if name.startswith(f"{kind}-{setting}-{split}-"))
    return [r for name in names for r in from_parquet(storage.read(name))]


class Tracer:
    """Lives on one worker: target and drafter loaded once."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._decoder, self._out = settings, Decoder(settings.decoder), open_storage(settings.out_uri)

    def __call__(self, unit: Unit) -> dict[str, Any]:
        from dspark.trace import every_position

        started, setting = time.monotonic(), self._settings.settings[unit.setting]
        requests, skipped = self._decoder.requests(unit.prompts)
        completions = self._decoder.decode(requests, setting, self._settings.precision)
        put_rounds(self._out, f"{unit.rounds}.parquet", completions)
        receipt: dict[str, Any] = {"name": unit.rounds, "num_prompts": len(unit.prompts), "skipped": skipped, "num_positions": 0}
        receipt["num_rounds"] = sum(len(c.rounds) for c in completions)
        if unit.has_positions:
            target, drafter = self._decoder.models(self._settings.precision)
            for completion in completions:
                completion.rounds = every_position(target, drafter, completion, self._decoder.config(setting))
            put_rounds(self._out, f"{unit.positions}.parquet", completions)
            receipt["num_positions"] = sum(len(c.rounds) for c in completions)
        num_tokens = sum(len(c.token_ids) for c in completions)
        receipt["tokens_per_second"] = num_tokens / max(time.monotonic() - started, 1e-9)
        self._out.put(f"{unit.rounds}.json", json.dumps(receipt).encode())
        return receipt
