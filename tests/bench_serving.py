"""`make bench-serving`: does the offline figure hold in a serving engine?

The same prompts, greedily, through vLLM's n-gram speculation and through our prompt lookup with the same rule and block size;
accepted tokens per draft by either's own count, and how many texts are equal (in bf16 they part where two tokens all but tie).
Fails when the figures differ by more than 5 %.
"""

import argparse
import os
import sys

import torch

from dspark.decoding import DecodingConfig, decode
from dspark.packed_target import load_target
from dspark.sampling import Sampling
from dspark.untrained import PromptLookup
from tests.bench_cache import machine
from tests.trained import held_out

BLOCK_SIZE, MIN_NGRAM, MAX_NGRAM = 4, 2, 4
TOLERANCE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine(), flush=True)
    prompts = held_out()
    requests = prompts.requests(arguments.prompts)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    target = load_target(prompts.target_folder, (0,), dtype, torch.device("cpu"))
    config = DecodingConfig(Sampling("greedy", 0.0), arguments.new_tokens, prompts.stop_ids, 16, 0)
    lookup = PromptLookup(BLOCK_SIZE, MIN_NGRAM, MAX_NGRAM, target.shape.vocab_size)
    done = {c.request.id: c for c in decode(target, lookup, requests, config)}
    drafted = [r for c in done.values() for r in c.rounds if r.proposed]
    offline = sum(r.accepted for r in drafted) / len(drafted)

    from pipelines.backends.vllm import LookupServer

    longest = max(len(request.prompt_ids) for request in requests) + arguments.new_tokens + BLOCK_SIZE + 1
    server = LookupServer(prompts.target_folder, arguments.precision, longest, BLOCK_SIZE, MIN_NGRAM, MAX_NGRAM)
    texts, served = server.generate([list(request.prompt_ids) for request in requests], arguments.new_tokens)
    online = served.num_accepted / served.num_drafts
    num_equal = sum(text == done[request.id].token_ids for text, request in zip(texts, requests, strict=True))
    print(f"offline  {len(drafted):5d} drafts, accepted {offline:.3f} tokens a draft")
    print(f"vLLM     {served.num_drafts:5d} drafts, accepted {online:.3f} tokens a draft, {served.num_proposed} proposed")
    difference = online / offline - 1.0
    is_good = abs(difference) <= TOLERANCE
    print(f"difference {difference:+.1%}: {'passes' if is_good else 'FAILS'} ({TOLERANCE:.0%}); {num_equal} of {len(texts)} texts equal")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
