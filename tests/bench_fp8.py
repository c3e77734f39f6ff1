"""`make bench-fp8`: what an fp8 cache costs in quality. Drafters trained on fp8 and on bf16 states, in pairs of equal seed.

The pair sees the same rows, anchors and initial weights; only the stored form of the states differs. Both are judged on the
bf16 states of the same held-out rows (the select rows and the last train rows, which are then not trained on), teacher-forced:
the expected accepted length over every block of these rows. The first pair also decodes the same test prompts greedily.

    make bench-fp8 ARGS="--steps 80 --seeds 3 --held-out 110 --decode 12"
"""

import argparse
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dspark.cache import CacheFormat, CacheReader
from dspark.config import TrainingConfig
from dspark.data import RowDraw, RowOrder, build_batch
from dspark.drafters import build_drafter
from dspark.drafters.base import Drafter
from dspark.layers import fast_dtype
from dspark.losses import Denominators, block_losses, loss_weights
from dspark.storage import LocalStorage
from dspark.target import load_head
from dspark.training import LocalEngine, Memory, TrainingData, train
from pipelines import flow, runner, targets
from pipelines.backends.object_store import open_storage
from pipelines.config import compose
from pipelines.stages.train import survey
from tests.bench_cache import open_cache, rewrite

EVERY_ANCHOR = 10_000
EVAL_ROWS = 8
LOSS_ROWS = 256  # block rows whose logits are held at once


class Rows:
    """Given rows of a cache (dspark.data.RowSource)."""

    def __init__(self, cache: CacheReader, numbers: Sequence[int]) -> None:
        self.cache, self.numbers = cache, numbers

    def read(self, draws: Sequence[RowDraw]) -> list:
        return [self.cache[self.numbers[draw.row]] for draw in draws]

    def used(self, end_slot: int) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 80), ("seeds", 3), ("held-out", 110), ("decode", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    settings, _ = compose([])
    root = open_storage(flow.absolute(settings.cluster.root))
    planned = {item.step.name: item for item in runner.plan(flow.build(settings), root)}
    if not planned["cache_targets"].verdict.is_hit:
        raise SystemExit("no stored cache of the default experiment. Fix: make pipeline ARGS=until=cache_targets")
    exact = open_cache(open_storage(f"{root.uri}/{planned['cache_targets'].step.folder}"))
    train_rows = [i for i, entry in enumerate(exact.entries) if entry.split == "train"]
    held_out = [i for i, entry in enumerate(exact.entries) if entry.split == "select"] + train_rows[len(train_rows) - arguments.held_out :]
    train_rows = train_rows[: len(train_rows) - arguments.held_out]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    print(
        f"commit {commit}, {platform.machine()}, torch {torch.__version__}; {len(train_rows)} train rows, {len(held_out)} held out",
        flush=True,
    )
    folder = Path(targets.uri(settings.target))
    head = load_head(folder, torch.float32)
    corpus = planned["regenerate"].step
    record = planned["regenerate"].verdict.record
    assert record is not None
    made = survey(planned["train"].step.config, corpus.artifact(f"{root.uri}/{corpus.folder}", record), targets.uri(settings.target))
    vocabulary = made["ids"] and torch.tensor(made["ids"])
    found: dict[str, list[float]] = {"bf16": [], "fp8": []}
    with tempfile.TemporaryDirectory() as place:
        rewrite(exact, LocalStorage(place), CacheFormat("fp8", "final", 0))
        caches = {"bf16": exact, "fp8": open_cache(LocalStorage(place))}
        for seed in range(arguments.seeds):
            for dtype, cache in caches.items():
                started = time.monotonic()
                config = configured(settings.stage.train, arguments.steps, seed)
                drafter = build_drafter(
                    settings.drafter, head.shape, settings.target.tapped_layers, settings.target.mask_token_id, head.tables, vocabulary
                )
                trained(drafter, config, cache, train_rows, held_out[:8], settings.cluster.micro_batch_sequences)
                length, num_blocks = judged(drafter, config, exact, held_out)
                found[dtype].append(length)
                line = f"seed {seed} {dtype:4}  expected accepted length {length:.4f} over {num_blocks} blocks"
                if seed == 0 and arguments.decode:
                    decoded, num_rounds = accepted_decoding(drafter, settings, root, planned, folder, arguments.decode)
                    line += f"   decoded {decoded:.4f} in {num_rounds} rounds"
                print(f"{line}   {time.monotonic() - started:.0f} s", flush=True)
    ratios = np.array(found["fp8"]) / np.array(found["bf16"])
    print(f"fp8 / bf16, paired: {', '.join(f'{ratio:.4f}' for ratio in ratios)}; mean {ratios.mean():.4f}")


def configured(stage: TrainingConfig, num_steps: int, seed: int) -> TrainingConfig:
    """The default training, shorter, in fp32 and with AdamW alone: Muon's products are bf16, which a CPU may have to emulate."""
    changed = {"num_steps": num_steps, "seed": seed, "precision": "fp32", "muon_lr": None, "clip_norm": 1.0}
    return TrainingConfig(**{**vars(stage), **changed, "select_every_steps": num_steps, "checkpoint_every_steps": num_steps + 1})


def trained(drafter: Drafter, config: TrainingConfig, cache: CacheReader, rows: Sequence[int], select: Sequence[int], micro: int) -> None:
    drafter.initialise(config.seed)
    data = TrainingData(
        RowOrder([len(rows)], config.window_shards, config.row_uses, config.seed),
        Rows(cache, rows),
        Rows(cache, select),
        len(select),
        drafter.config.block_size,
    )
    with tempfile.TemporaryDirectory() as place:
        train(drafter, data, config, LocalEngine, Memory(micro, LOSS_ROWS), LocalStorage(place), lambda _: None)


@torch.no_grad()
def judged(drafter: Drafter, config: TrainingConfig, cache: CacheReader, rows: Sequence[int]) -> tuple[float, int]:
    """Expected accepted length, bonus included, over every block of these rows."""
    total = blocks = 0.0
    rows = sorted(rows, key=lambda i: cache.entries[i].num_supervised)  # little padding
    for start in range(0, len(rows), EVAL_ROWS):
        batch = build_batch([(cache[i], (0,)) for i in rows[start : start + EVAL_ROWS]], EVERY_ANCHOR, drafter.config.block_size)
        batch = batch.to(torch.device("cpu"), torch.float32)
        weights = loss_weights(batch, drafter.head, config.loss, torch.float32)
        everything = Denominators(weights.sum, weights.sum_ce)
        losses = block_losses(drafter(batch), batch, drafter.head, weights, everything, config.loss, LOSS_ROWS)
        total, blocks = total + float(losses.accepted_length), blocks + float(losses.num_blocks)
    return 1.0 + total / blocks, int(blocks)


def accepted_decoding(drafter: Drafter, settings, root, planned, folder: Path, num_prompts: int) -> tuple[float, int]:
    """Accepted tokens a round, bonus included, greedy, on test prompts of math and code."""
    from dspark.chat import ChatTokenizer, messages
    from dspark.decoding import DecodingConfig, Request, decode
    from dspark.sampling import Sampling
    from dspark.target import TransformersTarget

    target = TransformersTarget(folder, settings.target.tapped_layers, fast_dtype(), torch.device("cpu"))
    tokenizer = ChatTokenizer(folder)
    prompts = [json.loads(line) for line in root.read(f"{planned['prompts'].step.folder}/prompts.jsonl").splitlines()]
    chosen = [row for row in prompts if row["split"] == "test" and row["domain"] in ("math", "code")][:num_prompts]
    requests = [Request(row["id"], tuple(tokenizer.prompt_ids(messages(row["system"], row["turns"][:1], [])))) for row in chosen]
    config = DecodingConfig(Sampling("greedy", 0.0), 96, tokenizer.stop_ids, num_prompts, 0)
    rounds = [r for done in decode(target, drafter.to(fast_dtype()), requests, config) for r in done.rounds]
    drafter.to(torch.float32)
    return float(np.mean([r.accepted + 1 for r in rounds])), len(rounds)


if __name__ == "__main__":
    main()
