"""`make bench-decode`: what decoding costs, beside a baseline measured in the same run.

    speed   greedy decoding of test prompts, 1, 4 and 16 at once: tokens a second with each drafter over those without, draft
            and verify time of a step, and the tokens that a round emits, at first and later
    batch   prompts a second of 16 at once over those of one at a time, and the accepted length of both
    ragged  R requests that verify 0 to 7 draft tokens each, as they are, against all of them padded to the longest

In bf16, and in fp32 on a processor that emulates it. All take turns, medians are printed; compare ratios, not seconds.
`make bench-decode ARGS="ragged"` runs one part.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from dspark.decoding import DecodingConfig, StepTimes, Verification, decode
from dspark.drafters.base import BlockDrafter
from dspark.layers import fast_dtype
from dspark.metrics import bootstrap_interval
from dspark.packed_target import load_target
from dspark.rounds import Round
from dspark.sampling import Sampling
from dspark.scheduler import SpsTable, fixed
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel
from dspark.untrained import PromptLookup
from tests.bench_cache import machine
from tests.bench_train import by_turns
from tests.trained import Trained, held_out, trained_drafters

PARTS = ["speed", "batch", "ragged"]
CPU = torch.device("cpu")
GOAL = 1.3  # times plain decoding at concurrency 1
ANY_SPS = SpsTable((1,), (0.0,), (1.0,))  # a fixed length asks for no price
CONTEXT_TOKENS = 128
TURN = 2  # prompts a turn, for each that is decoded at once
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


def bench_speed(
    trained: Sequence[Trained], concurrency: int, num_prompts: int, num_tokens: int, repeats: int, verify: Sequence[int]
) -> None:
    """Greedy decoding of the same prompts with and without each drafter, by turns of a few prompts: the machine changes its pace in
    between. In brackets the ratio's 95 % bootstrap interval over turns."""
    held_out, dtype = trained[0].held_out, fast_dtype()
    requests = held_out.requests(num_prompts)
    plain_target = load_target(held_out.target_folder, (0,), dtype, CPU)
    contenders: dict[str, tuple[TargetModel, BlockDrafter | None, Verification]] = {"plain": (plain_target, None, Verification())}
    for one in trained:
        target, drafter = one.load(dtype)
        for length in verify:
            if length <= drafter.block_size:
                contenders[f"{one.name} verify {length}"] = target, drafter, Verification(f"fixed_{length}", fixed(length, ANY_SPS))
    contenders["prompt lookup"] = plain_target, PromptLookup(4, 2, 4, plain_target.shape.vocab_size), Verification()
    seconds, tokens = defaultdict(list[float]), defaultdict(int)
    steps, rounds = defaultdict(list[StepTimes]), defaultdict(list[Round])
    turns = [requests[i : i + TURN * concurrency] for i in range(0, len(requests), TURN * concurrency)]
    for number in range(-1, repeats * len(turns)):  # the first is a warm-up
        for name, (target, drafter, verification) in contenders.items():
            config = DecodingConfig(Sampling("greedy", 0.0), num_tokens, held_out.stop_ids, concurrency, 0, verification=verification)
            if number < 0:
                list(decode(target, drafter, requests[:1], config))
                continue
            started = time.perf_counter()
            done = list(decode(target, drafter, turns[number % len(turns)], config, steps[name].append))
            seconds[name].append(time.perf_counter() - started)
            tokens[name] += sum(len(c.token_ids) for c in done)
            rounds[name] += [r for c in done for r in c.rounds]
        print(f"turn {number + 1} of {repeats * len(turns)}", file=sys.stderr, flush=True)
    step_ms = dict[str, float]()
    for name in contenders:
        speed = tokens[name] / sum(seconds[name])
        low, high = bootstrap_interval(seconds["plain"], seconds[name])
        draft, verified = (1000 * statistics.median(getattr(s, part) for s in steps[name]) for part in ("draft_seconds", "verify_seconds"))
        emitted = sum(s.num_emitted for s in steps[name]) / sum(s.num_requests for s in steps[name])
        step_ms[name] = draft + verified
        needed = GOAL * step_ms[name] / step_ms["plain"]
        print(
            f"speed    concurrency {concurrency:2d}  {name:40s} {speed:7.1f} tokens/s = {speed * sum(seconds['plain']) / tokens['plain']:.2f} [{low:.2f}, {high:.2f}]   step {draft:5.1f} + {verified:5.1f} ms"
            f"   tokens a round {emitted:.2f} (for {GOAL} times plain: {needed:.2f}){_over_time(rounds[name])}",
            flush=True,
        )


def _over_time(rounds: Sequence[Round]) -> str:
    """Accepted length of the first, second, ... eight rounds of the requests."""
    parts = defaultdict(list)
    for r in rounds:
        parts[min(r.round_index // 8, 3)].append(r.accepted + 1)
    return "   by round " + " ".join(f"{statistics.mean(parts[i]):.2f}" for i in sorted(parts)) if parts else ""


def bench_batch(trained: Trained, num_prompts: int, num_tokens: int) -> None:
    """Prompts a second of an evaluation with 16 prompts at once and with one."""
    target, drafter = trained.load(fast_dtype())
    requests, found = trained.held_out.requests(num_prompts), {}
    for batch_size in (16, 1):
        config = DecodingConfig(Sampling("greedy", 0.0), num_tokens, trained.held_out.stop_ids, batch_size, 0)
        list(decode(target, drafter, requests[:2], config))
        started = time.perf_counter()
        done = list(decode(target, drafter, requests, config))
        rate = len(done) / (time.perf_counter() - started)
        emitted = [sum(r.accepted + (not r.ended_by_stop) for r in c.rounds) for c in done if c.rounds]
        interval = bootstrap_interval(emitted, [len(c.rounds) for c in done if c.rounds])
        length = sum(emitted) / sum(len(c.rounds) for c in done)
        found[batch_size] = rate
        print(
            f"batch    {trained.name} {batch_size:2d} at once: {rate:.3f} prompts/s, accepted length {length:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]",
            flush=True,
        )
    print(f"batch    16 at once: {found[16] / found[1]:.2f} times as many prompts a second (goal: 4)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--drafter", action="append", help="folder of the train step; default: that of `make pipeline`")
    parser.add_argument("--verify", type=int, nargs="+", default=[3, 7], help="drafted tokens that are verified")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"parts {sorted(unknown)} must be of {', '.join(PARTS)}")
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine(), flush=True)
    if "ragged" in parts:
        target = load_target(held_out().target_folder, (0,), fast_dtype(), CPU)
        for num_requests in (16, 64):
            bench_ragged(target, num_requests, 9)
    if {"speed", "batch"} & {*parts}:
        trained = trained_drafters(arguments.drafter)
        for concurrency in arguments.concurrency if "speed" in parts else ():
            bench_speed(trained, concurrency, arguments.prompts, arguments.new_tokens, arguments.repeats, arguments.verify)
        if "batch" in parts:
            bench_batch(trained[0], 3 * arguments.prompts, arguments.new_tokens)


if __name__ == "__main__":
    main()
