"""`python -m tests.bench_decode --target FOLDER`: what decoding costs, beside a baseline measured in the same run.

    ragged  R requests that verify 0 to 7 draft tokens each, as they are, against all of them padded to the longest

Both take turns, medians are printed; compare ratios, not seconds.
"""

import argparse
import os
from pathlib import Path

import torch

from dspark.packed_target import load_target
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel
from tests.bench_cache import machine
from tests.bench_train import by_turns

CONTEXT_TOKENS = 128
VERIFIED_TOKENS = 8  # at most: the anchor and a block of 7


def bench_ragged(target: TargetModel, num_requests: int, repeats: int) -> None:
    """Lengths 1 to 8 in equal numbers."""
    slots = range(num_requests)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, target.shape.vocab_size, (length,)).tolist()

    cache = KeyValueCache(num_requests, CONTEXT_TOKENS + VERIFIED_TOKENS)
    for slot in slots:
        target.forward(Step.of([tokens(CONTEXT_TOKENS)], [0], [slot], target.device), cache)
    padded = [tokens(VERIFIED_TOKENS) for _ in slots]
    ragged = [row[: 1 + slot % VERIFIED_TOKENS] for slot, row in enumerate(padded)]

    def verify(rows: list[list[int]]) -> None:
        step = Step.of(rows, [CONTEXT_TOKENS] * num_requests, slots, target.device)
        target.logits(target.forward(step, cache).final_SD)

    ours_s, padded_s = by_turns(lambda: verify(ragged), lambda: verify(padded), repeats)
    sizes = f"{sum(map(len, ragged))} / {sum(map(len, padded))} tokens"
    print(f"ragged  R={num_requests}  {sizes}  time {ours_s * 1e3:.1f} / {padded_s * 1e3:.1f} ms = {ours_s / padded_s:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    print(machine())
    target = load_target(arguments.target, (0,), torch.bfloat16, torch.device("cpu"))
    for num_requests in (16, 64):
        bench_ragged(target, num_requests, arguments.repeats)


if __name__ == "__main__":
    main()
