"""`make bench-train`: the training loss and a whole training step beside a dense implementation, measured in the same run.

Dense is `oracles.dense_loss`: autograd over whole [rows, vocabulary] tensors, both softmaxes in full for the loss and again for the
confidence label, as the paper's code computes them. Both take turns, medians are printed; compare ratios, not seconds. Peak
memory is what the process grows by beyond its inputs and the gradients of its parameters.

    loss   CE + TV + confidence and all gradients, for [rows] of a drafter of width D with a Markov head of rank R
    step   forward, loss, backward and AdamW of a DSpark drafter with SmolLM2's shape over its whole vocabulary of 49,152
"""

import argparse
import ctypes
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dspark.config import DSparkConfig, LossConfig, Rope, TargetShape, TrainingConfig
from dspark.drafters import build_drafter
from dspark.drafters.base import BlockOutput, DraftHead, FrozenTables, PackedContext, TrainingBatch
from dspark.layers import fast_dtype
from dspark.losses import Denominators, block_losses, loss_bytes, loss_weights
from dspark.training import DrafterLoss, LocalEngine
from tests import oracles
from tests.bench_cache import machine

LOSS = LossConfig(alpha_ce=0.1, alpha_soft_ce=0.0, alpha_tv=0.9, alpha_confidence=1.0, position_decay=4.0)
BLOCK_SIZE = 7
SIZES = [(151_936, 1024, 256, 448), (151_936, 1024, 256, 3584), (49_152, 576, 64, 448), (49_152, 576, 64, 3584)]
DENSE_ROWS = 448  # a dense loss of more rows over 151,936 tokens does not fit a small machine
SHAPE = TargetShape("llama", 30, 576, 9, 3, 64, 1536, 49_152, 1e-5, Rope(100_000.0, 64, None), 1.0, 0.0, None)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_bytes(run: Callable[[], object]) -> int:
    """By how much the process grows at most while `run` runs."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, done, peak = resident_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return peak[0] - before


def by_turns(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of both after one warm-up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for run, times in zip((first, second), seconds, strict=True):
            started = time.perf_counter()
            run()
            if repeat:
                times.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def problem(vocab: int, width: int, rank: int, rows: int, dtype: torch.dtype) -> tuple[TrainingBatch, DraftHead, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(dtype)

    size = (1, rows // BLOCK_SIZE, BLOCK_SIZE)
    head = DraftHead(normal(vocab, width, scale=0.05), normal(vocab, rank, scale=0.05).requires_grad_(), torch.arange(vocab), None)
    final = normal(*size, width)
    log_sum_exp = torch.cat([head.logits(part).logsumexp(-1) for part in final.view(-1, width).split(64)]).view(size)
    label = torch.randint(0, vocab, size, generator=generator)
    nothing = torch.zeros(size[:2], dtype=torch.long)
    context = PackedContext.of(final[0, :0], nothing[0, :0], [0])
    batch = TrainingBatch(context, nothing, label, label, torch.ones(size, dtype=torch.bool), log_sum_exp, final)
    leaves = [
        normal(*size, width).requires_grad_(),
        normal(*size, rank).requires_grad_(),
        torch.randn(size, generator=generator).requires_grad_(),
    ]
    return batch, head, leaves


def bench_loss(vocab: int, width: int, rank: int, rows: int, dtype: torch.dtype, chunk_rows: int, repeats: int) -> None:
    batch, head, (hidden, bias, confidence) = problem(vocab, width, rank, rows, dtype)
    weight = head.bias_weight_WR
    assert weight is not None
    weights = loss_weights(batch, head, LOSS, torch.float32)
    whole = Denominators(weights.sum, weights.sum_ce)

    def ours() -> None:
        output = BlockOutput(hidden, bias, confidence)
        block_losses(output, batch, head, weights, whole, LOSS, chunk_rows).total.backward()
        clear()

    def dense() -> None:
        oracles.dense_loss(batch, head, hidden, bias, weight, confidence, LOSS).backward()
        clear()

    def clear() -> None:
        for leaf in (hidden, bias, confidence, weight):
            leaf.grad = None

    gradient_bytes = weight.numel() * weight.element_size()
    name = f"loss  V={vocab:7,} D={width} R={rank} rows={rows:5,} {str(dtype).removeprefix('torch.')}"
    own = growth_bytes(ours) - gradient_bytes
    predicted = loss_bytes(chunk_rows, head, LOSS)
    if vocab * rows > 49_152 * 3584:
        started = time.perf_counter()
        ours()
        print(
            f"{name}  ours {time.perf_counter() - started:6.2f} s {own / 1e6:6.0f} MB (predicted {predicted / 1e6:.0f})   dense left out: it needs {11 * 4 * vocab * rows / 1e9:.0f} GB",
            flush=True,
        )
        return
    other = growth_bytes(dense) - gradient_bytes
    ours_s, dense_s = by_turns(ours, dense, repeats)
    print(
        f"{name}  time {ours_s:6.2f} / {dense_s:6.2f} s = {ours_s / dense_s:.2f}   "
        f"memory {own / 1e6:5.0f} (predicted {predicted / 1e6:.0f}) / {other / 1e6:5.0f} MB = 1/{other / own:.1f}",
        flush=True,
    )  # fmt: skip


def bench_step(dtype: torch.dtype, num_layers: int, rank: int, chunk_rows: int, repeats: int) -> None:
    """One optimiser step of 8 sequences of 192 tokens with 24 anchors each."""
    generator = torch.Generator().manual_seed(0)
    B, T, A, K = 8, 192, 24, BLOCK_SIZE
    table = (torch.randn(SHAPE.vocab_size, SHAPE.width, generator=generator) * 0.05).to(dtype)
    config = TrainingConfig(
        lr=1e-3, muon_lr=None, num_steps=100, warmup_fraction=0.0, weight_decay=0.0, clip_norm=1.0, batch_sequences=B, num_anchors=A,
        precision="bf16" if dtype == torch.bfloat16 else "fp32", seed=0, window_shards=1, row_uses=1, select_every_steps=100,
        checkpoint_every_steps=100, loss=LOSS,
    )  # fmt: skip
    drafter_config = DSparkConfig("dspark", num_layers, K, None, "markov", rank, True, (), None)
    drafter = build_drafter(drafter_config, SHAPE, (4, 12, 20, 26), 0, FrozenTables(table, table, table[0]), None)
    drafter.initialise(0)
    engine = LocalEngine(DrafterLoss(drafter, LOSS, chunk_rows), config, 1)
    final = torch.randn(B, A, K, SHAPE.width, generator=generator).to(dtype)
    log_sum_exp = torch.stack([drafter.head.logits(part).logsumexp(-1) for part in final])
    label, previous = (torch.randint(0, SHAPE.vocab_size, (B, A, K), generator=generator) for _ in range(2))
    anchors = torch.randint(16, T, (B, A), generator=generator)
    tapped = torch.randn(B, T, 4, SHAPE.width, generator=generator).to(dtype)
    context = PackedContext.of(tapped.flatten(0, 1), torch.zeros(B * T, dtype=torch.long), [T] * B)
    batch = TrainingBatch(context, anchors, previous, label, torch.ones(B, A, K, dtype=torch.bool), log_sum_exp, final)
    weights = loss_weights(batch, drafter.head, LOSS, torch.float32)
    whole = Denominators(weights.sum, weights.sum_ce)

    def ours() -> None:
        engine.backward(engine.forward(batch, whole)[0])
        engine.step(1.0)

    def dense() -> None:
        output, head = drafter(batch), drafter.head
        args = (output.hidden_BAKD, output.bias_BAKR, head.bias_weight_WR, output.confidence_logits_BAK)
        engine.backward(oracles.dense_loss(batch, head, *args, LOSS))
        engine.step(1.0)

    ours_s, dense_s = by_turns(ours, dense, repeats)
    rows = B * A * K
    print(
        f"step  V={SHAPE.vocab_size:,} layers={num_layers} R={rank} rows={rows:,} {str(dtype).removeprefix('torch.')}  "
        f"time {ours_s:6.2f} / {dense_s:6.2f} s = {ours_s / dense_s:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="cluster.loss_chunk_rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], action="append", help="default: bfloat16, and float32 without bf16 instructions"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine())
    dtypes = [getattr(torch, name) for name in arguments.dtype or ()] or sorted({torch.bfloat16, fast_dtype()}, key=str)
    for dtype in dtypes:
        for vocab, width, rank, rows in SIZES:
            bench_loss(vocab, width, rank, rows, dtype, arguments.rows, arguments.repeats if rows <= DENSE_ROWS else 1)
        bench_step(dtype, 2, 64, arguments.rows, arguments.repeats)


if __name__ == "__main__":
    main()
