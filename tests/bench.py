"""`make bench`: hot paths beside a baseline, measured in the same run and printed as ratios.

    product     few fp32 rows times a layer's weights, filled up to a quick number of columns against as many as there are
    attention   block attention over [context ; own block] against dense-mask attention over [context ; all blocks]
    admission   Algorithm 1 on arrays against the oracle's loop over tokens, one scheduling step
    sts         Sequential Temperature Scaling, fit in blocks that stay in cache against whole columns (numpy uses one core)

Runs are interleaved and medians are printed, since machines are noisy; compare ratios, not seconds.
"""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import numpy as np
import oracles  # beside this file, which runs as a script
import torch

from dspark.blocks import attention_mask
from dspark.calibration import GRID, fit, sigmoid
from dspark.layers import attend, fast_dtype, product
from dspark.metrics import ece
from dspark.scheduler import SpsTable, admit

REPEATS = 5


def interleaved(subjects: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Median seconds of each subject over interleaved repeats, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for repeat in range(repeats + 1):
        for name, run in subjects.items():
            started = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench_product(num_rows: int) -> None:
    """Weights of 30 layers after each other: more than the processor's cache holds."""
    weights, x = [torch.randn(3072, 576) for _ in range(30)], torch.randn(num_rows, 576)
    subjects = {"ours": lambda: [product(x, w) for w in weights], "as is": lambda: [(w @ x.T).T.contiguous() for w in weights]}
    found = {name: seconds / len(weights) for name, seconds in interleaved(subjects).items()}
    print(
        f"product     M={num_rows:4d}   ours {found['ours'] * 1e3:8.2f} ms   as is {found['as is'] * 1e3:8.2f} ms   ratio {found['ours'] / found['as is']:.2f}"
    )


def bench_attention(num_tokens: int, num_anchors: int) -> None:
    B, K, N, G, H = 4, 7, 9, 3, 64
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(fast_dtype())

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


def bench_sts(num_rounds: int, block_size: int) -> None:
    generator = np.random.default_rng(0)
    true_NK = generator.normal(0.8, 1.2, (num_rounds, block_size))
    accepted_N = np.cumprod(generator.random(true_NK.shape) < sigmoid(true_NK), axis=1).sum(1)
    logits_NK, found = 2.0 * true_NK, {}

    def ours() -> None:
        found["ours"] = fit(logits_NK, accepted_N).temperatures_K

    def columns() -> None:
        prefix_N, temperatures = np.ones(num_rounds), []
        for k in range(block_size):
            outcome_N, logit_N = (accepted_N > k).astype(np.float64), logits_NK[:, k].copy()
            eces = [ece(prefix_N * sigmoid(logit_N / t), outcome_N) for t in GRID]
            temperatures.append(GRID[int(np.argmin(eces))])
            prefix_N = prefix_N * sigmoid(logit_N / temperatures[-1])
        found["columns"] = tuple(temperatures)

    seconds = interleaved({"ours": ours, "columns": columns}, repeats=1)
    assert found["ours"] == found["columns"], found
    print(
        f"sts         N={num_rounds:.0e} K={block_size}   ours {seconds['ours']:8.2f} s   columns {seconds['columns']:8.2f} s   ratio {seconds['ours'] / seconds['columns']:.2f}"
    )


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    commit = (
        subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    )
    print(f"commit {commit}, {platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for num_rows in (7, 15, 16, 39, 40):
        bench_product(num_rows)
    for num_tokens, num_anchors in ((256, 24), (1024, 96)):
        bench_attention(num_tokens, num_anchors)
    bench_admission(num_requests=256, block_size=7)
    bench_sts(num_rounds=1_000_000, block_size=7)


if __name__ == "__main__":
    main()
