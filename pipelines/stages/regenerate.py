"""regenerate: the target answers the train and select prompts; its tokens, exactly as the engine returned them.

Every user turn is answered in order. A row is one answer: the conversation so far, rendered as a server would render it,
then the answer's ids, which alone are supervised and never tokenised again. Shards of prompts are units of work: a shard
`rows-00000.parquet` counts once its receipt `rows-00000.json` exists, so a killed run goes on with the next shard.

Corpus row, schema version 1: row_id (prompt id / turn), prompt_id, turn, domain, split, token_ids, loss_mask,
num_prompt_tokens, finish_reason (stop | length), is_truncated, sampling (JSON: settings, engine, its version and seed).
"""

import hashlib
import io
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.storage import Storage
from pipelines.artifacts import Corpus, PromptSet
from pipelines.backends.object_store import open_storage
from pipelines.dag import Artifact, Outcome
from pipelines.flow import RegenerateConfig
from pipelines.runner import Progress, Work
from pipelines.targets import local_folder

CORPUS_SCHEMA_VERSION = 1
SPLITS = ("train", "select")

SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("num_prompt_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("is_truncated", pa.bool_()),
        ("sampling", pa.string()),
    ],
    metadata={"schema": "dspark.corpus", "schema_version": str(CORPUS_SCHEMA_VERSION)},
)


@dataclass(frozen=True)
class Settings:
    config: RegenerateConfig
    target_uri: str
    out_uri: str


@dataclass(frozen=True)
class Shard:
    name: str
    prompts: tuple[dict[str, Any], ...]


def run(config: RegenerateConfig, inputs: Mapping[str, Artifact], out: Storage, work: Work) -> Outcome:
    rows = [json.loads(line) for line in open_storage(inputs["prompts"].uri).read(PromptSet.PROMPTS).splitlines()]
    prompts = sorted((row for row in rows if row["split"] in SPLITS), key=lambda row: row["id"])
    size = config.regenerate.shard_prompts
    shards = [Shard(f"rows-{i // size:05d}", tuple(prompts[i : i + size])) for i in range(0, len(prompts), size)]
    receipts = {s.name: json.loads(out.read(f"{s.name}.json")) for s in shards if out.exists(f"{s.name}.json")}
    done = sum(len(s.prompts) for s in shards if s.name in receipts)
    work.report(Progress(done, len(prompts), "prompts"))
    missing = [shard for shard in shards if shard.name not in receipts]
    for receipt in work.map("pipelines.stages.regenerate:Regenerator", Settings(config, work.resources.target_uri, out.uri), missing):
        receipts[receipt["name"]] = receipt
        done += receipt["num_prompts"]
        work.report(Progress(done, len(prompts), "prompts", {"generated_tokens_per_second": receipt["tokens_per_second"]}))
    ordered = [receipts[shard.name] for shard in shards]
    dropped = [item for receipt in ordered for item in receipt["dropped"]]
    data = "".join(json.dumps(item) + "\n" for item in dropped).encode()
    out.put(Corpus.DROPPED, data)
    num_rows = sum(r["num_rows"] for r in ordered)
    if not num_rows:
        raise ValueError(
            f"no prompt got an answer; all {len(dropped)} rows were set aside in {out.uri}/{Corpus.DROPPED}. Fix: look at their reasons"
        )
    metrics = {
        "rows": num_rows,
        "rows_dropped": len(dropped),
        "rows_truncated": sum(r["num_truncated"] for r in ordered),
        "response_tokens": sum(r["num_response_tokens"] for r in ordered),
    }
    if all("num_prompt_tokens" in r for r in ordered):  # shards that an earlier version finished did not count them
        metrics["prompt_tokens"] = sum(r["num_prompt_tokens"] for r in ordered)
    files = {f"{r['name']}.parquet": r["sha256"] for r in ordered} | {Corpus.DROPPED: hashlib.sha256(data).hexdigest()}
    return Outcome(files, {name: float(value) for name, value in metrics.items()})


class Regenerator:
    """Lives on one worker with one engine; makes a shard and its receipt."""

    def __init__(self, settings: Settings) -> None:
        from dspark.chat import ChatTokenizer

        config, folder = settings.config, local_folder(settings.target_uri)
        self._config, self._out = config, open_storage(settings.out_uri)
        self._tokenizer = ChatTokenizer(folder)
        # Fresh randomness each time: regenerating again is meant to give other answers. The seed is in every row.
        seed = secrets.randbits(31)
        if config.regenerate.engine == "vllm":
            from pipelines.backends.vllm import Generator

            self._engine: Any = Generator(folder, config.max_length_tokens, config.sampling, config.regenerate.max_new_tokens, seed)
        else:
            self._engine = ReferenceGenerator(folder, config, self._tokenizer.stop_ids, seed)
        self._sampling = json.dumps(
            {**asdict(config.sampling), "max_new_tokens": config.regenerate.max_new_tokens, "engine": self._engine.version, "seed": seed}
        )

    def __call__(self, shard: Shard) -> dict[str, Any]:
        import time

        from dspark.chat import messages

        started, rows, dropped = time.monotonic(), [], []
        answers: dict[str, list[str]] = {prompt["id"]: [] for prompt in shard.prompts}
        for turn in range(max(len(prompt["turns"]) for prompt in shard.prompts)):
            batch = []
            for prompt in shard.prompts:
                if turn < len(prompt["turns"]) and len(answers[prompt["id"]]) == turn:
                    ids = self._tokenizer.prompt_ids(messages(prompt["system"], prompt["turns"], answers[prompt["id"]]))
                    if len(ids) + self._config.regenerate.max_new_tokens > self._config.max_length_tokens:
                        dropped.append({"row_id": f"{prompt['id']}/{turn}", "reason": "prompt too long", "prompt_tokens": len(ids)})
                    else:
                        batch.append((prompt, ids))
            for (prompt, ids), (answer, reason) in zip(batch, self._engine.generate([ids for _, ids in batch]), strict=True):
                row_id = f"{prompt['id']}/{turn}"
                text = self._tokenizer.text(answer)
                if not text.strip():
                    dropped.append({"row_id": row_id, "reason": "empty answer", "prompt_tokens": len(ids)})
                    continue
                answers[prompt["id"]].append(text)
                rows.append((row_id, prompt, turn, ids, answer, reason))
        num_tokens = sum(len(answer) for *_, answer, _ in rows)
        return self._write(shard, rows, dropped, num_tokens / max(time.monotonic() - started, 1e-9))

    def _write(
        self, shard: Shard, rows: list[tuple[str, dict[str, Any], int, list[int], list[int], str]], dropped: list[Any], rate: float
    ) -> dict[str, Any]:
        columns = [
            {
                "row_id": row_id,
                "prompt_id": prompt["id"],
                "turn": turn,
                "domain": prompt["domain"],
                "split": prompt["split"],
                "token_ids": [*ids, *answer],
                "loss_mask": [0] * len(ids) + [1] * len(answer),
                "num_prompt_tokens": len(ids),
                "finish_reason": reason,
                "is_truncated": reason == "length",
                "sampling": self._sampling,
            }
            for row_id, prompt, turn, ids, answer, reason in rows
        ]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(columns, schema=SCHEMA), sink)
        self._out.put(f"{shard.name}.parquet", sink.getvalue())
        receipt = {
            "name": shard.name,
            "num_prompts": len(shard.prompts),
            "num_rows": len(rows),
            "num_truncated": sum(reason == "length" for *_, reason in rows),
            "num_prompt_tokens": sum(len(ids) for _, _, _, ids, _, _ in rows),
            "num_response_tokens": sum(len(answer) for *_, answer, _ in rows),
            "tokens_per_second": rate,
            "dropped": dropped,
            "sha256": hashlib.sha256(sink.getvalue()).hexdigest(),
        }
        self._out.put(f"{shard.name}.json", json.dumps(receipt).encode())
        return receipt


class ReferenceGenerator:
    """Plain decoding with transformers, through the project's own decoding loop."""

    def __init__(self, folder: Any, config: RegenerateConfig, stop_ids: tuple[int, ...], seed: int) -> None:
        import torch
        import transformers

        from dspark.target import TransformersTarget

        self.version = f"transformers {transformers.__version__}"
        self._target = TransformersTarget(folder, (0,), torch.float32, torch.device("cpu"))
        self._config, self._stop_ids, self._seed, self._calls = config, stop_ids, seed, 0

    def generate(self, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
        from dspark.decoding import DecodingConfig, Request, decode
        from dspark.sampling import Sampling

        self._calls += 1
        requests = [Request(f"{self._calls}/{i}", tuple(ids)) for i, ids in enumerate(prompts)]
        sampling = Sampling("probabilistic", self._config.sampling.temperature)
        config = DecodingConfig(sampling, self._config.regenerate.max_new_tokens, self._stop_ids, 16, self._seed)
        done = {c.request.id: (c.token_ids, c.finish_reason) for c in decode(self._target, None, requests, config)}
        return [done[request.id] for request in requests]


def read_shard(storage: Storage, name: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows of a corpus shard (or some of their columns); ValueError on another schema version."""
    table = pq.read_table(io.BytesIO(storage.read(name)), columns=columns and list(columns))
    version = (table.schema.metadata or {}).get(b"schema_version", b"none").decode()
    if version != str(CORPUS_SCHEMA_VERSION):
        raise ValueError(
            f"{storage.uri}/{name}: corpus schema {version}, this version reads {CORPUS_SCHEMA_VERSION}. Fix: run regenerate again"
        )
    return table.to_pylist()
