"""`make bench-serving`: does the offline figure hold in a serving engine?

The same prompts, greedily, through a vLLM server's n-gram speculation and through our prompt lookup with the same rule and block
size, as `stage.evaluate.engine=vllm` does it: accepted tokens per draft by either's own count, and how many texts are equal (in
bf16 they part where two tokens all but tie). Fails when the figures differ by more than 5 %.
"""

import argparse
import os
import sys

import torch

from dspark.decoding import DecodingConfig, decode
from dspark.packed_target import load_target
from dspark.sampling import Sampling
from dspark.untrained import PromptLookup
from pipelines.serving import Drafts, Limits, Server, compare, own_server, speculation
from pipelines.settings import ServingStage
from tests.bench_cache import machine
from tests.trained import held_out

SERVING = ServingStage("ngram", num_speculative_tokens=4, min_ngram=2, max_ngram=4, tolerance=0.05)
NAME, BATCH_SIZE = "target", 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="fp32")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine(), flush=True)
    prompts, block_size = held_out(), SERVING.num_speculative_tokens
    requests = prompts.requests(arguments.prompts)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    target = load_target(prompts.target_folder, (0,), dtype, torch.device("cpu"))
    config = DecodingConfig(Sampling("greedy", 0.0), arguments.new_tokens, prompts.stop_ids, BATCH_SIZE, 0)
    lookup = PromptLookup(block_size, SERVING.min_ngram, SERVING.max_ngram, target.shape.vocab_size)
    completions = list(decode(target, lookup, requests, config))
    offline = Drafts.of([r for c in completions for r in c.rounds], block_size)

    longest = max(len(request.prompt_ids) for request in requests) + arguments.new_tokens + block_size + 1
    with own_server(prompts.target_folder, NAME, speculation(SERVING, None), arguments.precision, longest) as url:
        limits = Limits(arguments.new_tokens, prompts.stop_ids, BATCH_SIZE)
        texts, served = Server(url, NAME, block_size).generate([c.request.prompt_ids for c in completions], limits)
    num_equal = sum(text == c.token_ids for text, c in zip(texts, completions, strict=True))
    found = compare(SERVING, served, offline, num_equal, len(texts))
    for name, drafts in (("offline", offline), ("vLLM", served)):
        per_draft = drafts.num_accepted / max(drafts.num_drafts, 1)
        print(f"{name:8s} {drafts.num_drafts:5d} drafts, accepted {per_draft:.3f} tokens a draft, {drafts.num_proposed} proposed")
    difference = "nothing accepted" if found["difference"] is None else f"difference {found['difference']:+.1%}"
    verdict = "passes" if found["is_within_tolerance"] else "FAILS"
    print(f"{difference}: {verdict} ({SERVING.tolerance:.0%}); {num_equal} of {len(texts)} texts equal")
    sys.exit(not found["is_within_tolerance"])


if __name__ == "__main__":
    main()
