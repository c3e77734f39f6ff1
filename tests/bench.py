"""`make bench`: hot paths beside a baseline, measured in the same run and printed as ratios.

    attention   block attention over [context ; own block] against dense-mask attention over [context ; all blocks]
    decoding    tokens/s with the trained drafter against plain decoding, same engine, same prompts, T = 0
                (needs a finished `make pipeline`; left out, and said so, without one)
    admission   Algorithm 1 on arrays against the oracle's loop over tokens, one scheduling step

Runs are interleaved and medians are printed, since machines are noisy; compare ratios, not seconds.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import oracles  # beside this file, which runs as a script
import torch

from dspark.blocks import attention_mask
from dspark.layers import attend
from dspark.scheduler import SpsTable, admit
from pipelines import flow, runner, targets
from pipelines.backends.object_store import open_storage
from pipelines.config import compose

REPEATS = 5


def interleaved(subjects: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each subject over interleaved repeats, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(REPEATS + 1):
        for name, run in subjects.items():
            started = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench_attention(num_tokens: int, num_anchors: int) -> None:
    B, K, N, G, H = 4, 7, 9, 3, 64
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    query, key, value = random(B, num_anchors, K, N, H), random(B, num_anchors, K, G, H), random(B, num_anchors, K, G, H)
    context_key, context_value = random(B, num_tokens, G, H), random(B, num_tokens, G, H)
    anchors = np.sort(np.random.default_rng(0).choice(np.arange(8, num_tokens), num_anchors, replace=False))
    visible = (torch.arange(num_tokens) < torch.from_numpy(anchors)[:, None, None]).expand(B, -1, -1, -1)
    mask = torch.from_numpy(attention_mask(anchors, num_tokens, K))

    def dense() -> torch.Tensor:
        def heads(context: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
            return torch.cat([context, own.flatten(1, 2)], dim=1).transpose(1, 2).repeat_interleave(N // G, dim=1)

        rows = query.flatten(1, 2).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(rows, heads(context_key, key), heads(context_value, value), attn_mask=mask)

    found = interleaved({"ours": lambda: attend(query, key, value, context_key, context_value, visible), "dense": dense})
    print(
        f"attention   T={num_tokens:5d} A={num_anchors:4d}   ours {found['ours'] * 1e3:8.1f} ms   dense {found['dense'] * 1e3:8.1f} ms   ratio {found['ours'] / found['dense']:.2f}"
    )


def bench_decoding(batch_size: int, num_prompts: int) -> None:
    from dspark.chat import ChatTokenizer, messages
    from dspark.checkpoint import load_drafter
    from dspark.decoding import DecodingConfig, Request, decode
    from dspark.sampling import Sampling
    from dspark.target import TransformersTarget, load_head

    settings, _ = compose([])
    root = open_storage(flow.absolute(settings.cluster.root))
    planned = {item.step.name: item for item in runner.plan(flow.build(settings), root)}
    if not planned["train"].verdict.is_hit:
        print("decoding    left out: no trained drafter (make pipeline)")
        return
    folder = Path(targets.uri(settings.target))
    head = load_head(folder, torch.bfloat16)
    weights = targets.identify(settings.target).weights
    drafter = load_drafter(open_storage(f"{root.uri}/{planned['train'].step.folder}"), "drafter", head, weights, torch.bfloat16)
    target = TransformersTarget(folder, drafter.tapped_layers, torch.bfloat16, torch.device("cpu"))
    tokenizer = ChatTokenizer(folder)
    rows = [json.loads(line) for line in root.read(f"{planned['prompts'].step.folder}/prompts.jsonl").splitlines()]
    chosen = [row for row in rows if row["split"] == "test" and row["domain"] in ("math", "code")][:num_prompts]
    requests = [Request(row["id"], tuple(tokenizer.prompt_ids(messages(row["system"], row["turns"], [])))) for row in chosen]
    config = DecodingConfig(Sampling("greedy", 0.0), 64, tokenizer.stop_ids, batch_size, 0)
    counted: dict[str, list[float]] = {"plain": [], "drafted": []}
    for _ in range(3):
        for name in counted:
            started = time.perf_counter()
            done = list(decode(target, drafter if name == "drafted" else None, requests, config))
            counted[name].append(sum(len(c.token_ids) for c in done) / (time.perf_counter() - started))
    plain, drafted = (statistics.median(counted[name]) for name in ("plain", "drafted"))
    print(
        f"decoding    batch {batch_size:2d}   plain {plain:7.1f} tokens/s   drafted {drafted:7.1f} tokens/s   speed-up {drafted / plain:.2f}"
    )


def bench_admission(num_requests: int, block_size: int) -> None:
    generator, num_steps = np.random.default_rng(0), 50
    table = SpsTable((1, 256, 512, 1024, 2048), (0.002,) * 5, (0.008, 0.010, 0.013, 0.020, 0.035))
    # New confidences every step: on the same ones again, the processor's branch prediction learns the order of the sort.
    steps = generator.uniform(0.6, 1.0, (num_steps, num_requests, block_size))
    rows, sps = steps.tolist(), table.sps(np.arange(num_requests * (block_size + 1) + 1)).tolist()

    def ours() -> None:
        for confidence_RK in steps:
            admit(confidence_RK, table)

    def loop() -> None:
        for confidences in rows:
            oracles.admission(confidences, sps.__getitem__)

    found = {name: seconds / num_steps for name, seconds in interleaved({"ours": ours, "loop": loop}).items()}
    print(
        f"admission   R={num_requests:4d} K={block_size}   ours {found['ours'] * 1e6:8.1f} us   loop {found['loop'] * 1e6:8.1f} us   ratio {found['ours'] / found['loop']:.3f}"
    )


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    commit = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    )
    print(f"commit {commit}, {platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for num_tokens, num_anchors in ((256, 24), (1024, 96)):
        bench_attention(num_tokens, num_anchors)
    for batch_size, num_prompts in ((1, 4), (16, 16)):
        bench_decoding(batch_size, num_prompts)
    bench_admission(num_requests=256, block_size=7)


if __name__ == "__main__":
    main()
