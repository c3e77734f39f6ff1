"""`make bench-lossless`: is what decoding emits the target's own text?

    toy       a random target of 24 tokens, whose distribution is enumerated. Of every drafter, policy and draft mode, many texts of
              four prompts are drawn at temperature 1; the second and third token (the first two that rounds emit) are counted in
              cells, those of fewer than 10 expected pooled, and compared by chi-square. Passes when the least p-value is above
              1e-3 after Holm's correction over all of them
    controls  three mistakes that the same test must find (p < 1e-6): Appendix A's, a verified length that looks at the token it is
              about; a draft tested at another temperature than it was drawn at; and drafts of one position that share their noise,
              under a policy that looks at earlier confidences alone
    target    the real target with a trained drafter, verify-all and Algorithm 1: the same tokens against plain sampling, counted
    identity  the real target in fp32: greedy text with and without the drafter, token by token, and where they part the margin of
              the decision; sampled text alone and in a batch, which must not part at all

`make bench-lossless ARGS="toy controls"` runs some of them. `target` and `identity` need trained drafters (`--drafter`).
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import scipy.stats
import torch

from dspark import decoding
from dspark.config import DFlashConfig, DrafterConfig, DSparkConfig, Eagle3Config, MtpConfig
from dspark.decoding import DecodingConfig, Request, Verification, decode
from dspark.draft_gate import DraftGate
from dspark.drafters import build_drafter
from dspark.drafters.base import BlockDrafter
from dspark.packed_target import load_target
from dspark.sampling import DRAFT, BlockDraw, Sampling, draw
from dspark.scheduler import Admission, SpsTable, admit, admit_async, fixed, threshold
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel, load_head
from dspark.untrained import DraftModel, PromptLookup
from tests.bench_cache import machine
from tests.trained import Trained, trained_drafters

V, K, BATCH = 24, 3, 1000
PROMPTS = ((3, 14, 15), (9,), (2, 6, 5, 3, 5), (8, 9, 7, 9, 3, 2, 3, 8))
CPU = torch.device("cpu")
PARTS = ["toy", "controls", "target", "identity"]
LEAST_P, CONTROL_P, MARGIN = 1e-3, 1e-6, 1e-4
CONFIGS: dict[str, DrafterConfig] = {
    "markov": DSparkConfig("dspark", 1, K, None, "markov", V, True, (), None),
    "gated": DSparkConfig("dspark", 1, K, None, "gated", V, True, (), None),
    "rnn": DSparkConfig("dspark", 1, K, None, "rnn", V, True, (), None),
    "dflash": DFlashConfig("dflash", 1, K, None, True, (), None),
    "eagle3": Eagle3Config("eagle3", K, None),
    "mtp": MtpConfig("mtp", 1, None),
}
DRAFTERS = (*CONFIGS, "draft_model", "prompt_lookup")


def policies(num_requests: int) -> dict[str, Verification]:
    """A step of so many requests takes 1 s, and another for as many tokens: tokens that survive with one half pay."""
    sps = SpsTable((1, 4 * num_requests), (0.0, 0.0), (1.0 + 1.0 / num_requests, 5.0))
    return {
        "verify_all": Verification(),
        "fixed_2": Verification("fixed_2", fixed(2, sps)),
        "threshold_0.5": Verification("threshold_0.5", threshold(0.5, sps)),
        "scheduler": Verification("scheduler", partial(admit, sps=sps)),
        "scheduler_async": Verification("scheduler_async", partial(admit_async, sps=sps), lag_rounds=1),
        "history": Verification("history", _by_history, lag_rounds=1),
        "scheduler_async_or_none": Verification(
            "scheduler_async_or_none", partial(admit_async, sps=sps), lag_rounds=1, new_gate=lambda: _EvenGate(num_requests)
        ),
    }


class _EvenGate(DraftGate):
    """By a clock of its own: a step that drafts has paid when it emits one and a half tokens a request."""

    def __init__(self, num_requests: int) -> None:
        super().__init__(lambda _: 1.0, lag_rounds=1, window_rounds=num_requests, probe_share=0.2)

    def observe(self, num_requests: int, num_tokens: float | np.ndarray, seconds: float | np.ndarray) -> None:
        super().observe(num_requests, num_tokens, 1.5)


def _by_history(stale_RK: np.ndarray, confidence_RK: np.ndarray) -> Admission:
    """Two tokens where the last confidence of the round before was high: a draft that shared its noise would show."""
    lengths_R = np.where(stale_RK[:, -1] > 0.5, 2, 0)
    return Admission(lengths_R, 0.0, len(lengths_R) + int(lengths_R.sum()))


# --- the toy --------------------------------------------------------------------------------------------------------------


def toy_target(folder: Path, seed: int = 0) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data.normal_(0.0, 1.0)
    model.lm_head.weight.data.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return folder


def toy_drafter(kind: str, folder: Path) -> tuple[TargetModel, BlockDrafter]:
    """A target with the layers that the drafter taps, and an untrained drafter that is right often enough: sequential heads know
    the target's next token of one-token texts. Confidences are noise, of all sizes."""
    target = load_target(folder / "target", (2,) if kind == "mtp" else (0, 1), torch.float32, CPU)
    if kind == "prompt_lookup":
        return target, PromptLookup(K, 1, 3, V)
    if kind == "draft_model":
        return target, DraftModel(load_target(folder / "small", (0,), torch.float32, CPU), K, V)
    head = load_head(folder / "target", torch.float32)
    drafter = build_drafter(CONFIGS[kind], head.shape, target.tapped_layers, V - 1, head.tables, None)
    generator = np.random.default_rng(0)
    for name, parameter in sorted(drafter.named_parameters()):
        if parameter.dim() > 1:
            scale = 2.0 if name.startswith("confidence") else 0.3
            parameter.data.copy_(torch.from_numpy(generator.normal(0.0, scale, parameter.shape)))
    if kind == "markov":
        drafter.norm.weight.data.fill_(0.2)
        logits_VV = torch.stack([target.logits(target.states([token]).final_SD)[0] for token in range(V)])
        drafter.markov_head.markov_w1.weight.data.copy_(torch.eye(V))
        drafter.markov_head.markov_w2.weight.data.copy_(logits_VV.T)
    return target, drafter


def exact(target: TargetModel, prompt: tuple[int, ...]) -> np.ndarray:
    """Probability of the second and third token after a prompt, [V * V]."""

    def following(prefixes: list[tuple[int, ...]]) -> torch.Tensor:
        step = Step.of(prefixes, [0] * len(prefixes), range(len(prefixes)), CPU)
        states = target.forward(step, KeyValueCache(len(prefixes), len(prefixes[0])))
        return target.logits(states.final_SD[step.starts_R + step.lengths_R - 1]).double().softmax(-1)

    first = following([prompt])[0]
    second = following([(*prompt, a) for a in range(V)])
    third = following([(*prompt, a, b) for a, b in itertools.product(range(V), repeat=2)]).view(V, V, V)
    return ((first[:, None] * second)[..., None] * third).sum(0).flatten().numpy()


def fit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of chi-square; cells of fewer than 10 expected are pooled."""
    expected = probabilities / probabilities.sum() * counts.sum()
    is_kept = expected >= 10
    observed, wanted = (np.append(x[is_kept], x[~is_kept].sum()) for x in (counts, expected))
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(scipy.stats.chisquare(observed, wanted).pvalue)


def toy_p(folder: Path, num_draws: int, kind: str, policy: Verification, mode: str) -> tuple[float, float]:
    """p-value of one combination, its prompts' put together by Fisher's method, and its accepted length."""
    target, drafter = toy_drafter(kind, folder)
    config = DecodingConfig(Sampling(mode, 1.0), 3, (), BATCH, 7, verification=policy)  # type: ignore[arg-type]
    p_values, emitted, rounds = [], 0, 0
    for prompt in PROMPTS:
        counts = np.zeros(V * V)
        requests = [Request(f"{prompt}/{i}", prompt) for i in range(num_draws // len(PROMPTS))]
        for completion in decode(target, drafter, requests, config):
            counts[completion.token_ids[1] * V + completion.token_ids[2]] += 1
            emitted += completion.rounds[0].accepted + 1
            rounds += 1
        p_values.append(fit(counts, exact(target, prompt)))
    return float(scipy.stats.combine_pvalues(p_values).pvalue), emitted / rounds


def holm(p_values: list[float]) -> float:
    """The least p-value after Holm's step-down correction."""
    return min(1.0, min(p * (len(p_values) - i) for i, p in enumerate(sorted(p_values))))


def _toy_row(arguments: tuple[Path, int, str, str, str]) -> tuple[str, str, str, float, float]:
    folder, num_draws, kind, policy, mode = arguments
    torch.set_num_threads(1)
    return kind, policy, mode, *toy_p(folder, num_draws, kind, policies(BATCH)[policy], mode)


def bench_toy(folder: Path, num_draws: int, num_processes: int) -> bool:
    rows = [(folder, num_draws, *row) for row in itertools.product(DRAFTERS, policies(BATCH), ("probabilistic", "greedy"))]
    started, p_values = time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for kind, policy, mode, p, length in pool.imap(_toy_row, rows):
            p_values.append(p)
            left = (time.monotonic() - started) / len(p_values) * (len(rows) - len(p_values))
            print(f"toy       {kind:14s}{policy:16s}{mode:14s} accepted length {length:.3f}   p {p:.4f}   ({left:4.0f} s left)", flush=True)
    least = holm(p_values)
    print(
        f"toy       {len(rows)} combinations of {num_draws:,} draws: least p after Holm {least:.3g}: {verdict(least > LEAST_P)}", flush=True
    )
    return least > LEAST_P


def looks_ahead(confidence_RK: np.ndarray) -> Admission:
    """Appendix A: whether x_1 is verified depends on c_2, which depends on x_1."""
    lengths_R = np.where(confidence_RK[:, 1] > 0.5, 2, 0)
    return Admission(lengths_R, 0.0, len(lengths_R) + int(lengths_R.sum()))


class _OtherTemperature(BlockDraw):
    """Claims to have drawn at temperature 1/2."""

    @property
    def probs_BKW(self) -> torch.Tensor | None:
        probs_BKW = super().probs_BKW
        return None if probs_BKW is None else probs_BKW**2 / (probs_BKW**2).sum(-1, keepdim=True)


class _SharedNoise(BlockDraw):
    """Draws a position alike from every anchor."""

    def __call__(self, k: int, logits_BW: torch.Tensor) -> torch.Tensor:
        self._probs.append(self._sampling.probs(logits_BW))
        return draw(self._probs[-1], self._noises, DRAFT, [position + k + 1 for position in self._positions])


def bench_controls(folder: Path, num_draws: int) -> bool:
    found = {"a length that looks ahead": toy_p(folder, num_draws, "markov", Verification("looks_ahead", looks_ahead), "probabilistic")[0]}
    for name, draws, policy in (
        ("a test at another temperature", _OtherTemperature, "verify_all"),
        ("noise shared by two drafts", _SharedNoise, "history"),
    ):
        decoding.BlockDraw = draws  # type: ignore[misc]
        found[name] = toy_p(folder, num_draws, "markov", policies(BATCH)[policy], "probabilistic")[0]
        decoding.BlockDraw = BlockDraw  # type: ignore[misc]
    for name, p in found.items():
        print(f"controls  {name:32s} p {p:.3g}: {'found' if p < CONTROL_P else 'NOT FOUND'}", flush=True)
    return max(found.values()) < CONTROL_P


def verdict(is_good: bool) -> str:
    return "passes" if is_good else "FAILS"


# --- the real target ------------------------------------------------------------------------------------------------------


def two_samples(plain: np.ndarray, drafted: np.ndarray) -> tuple[float, int]:
    """p-value of chi-square that both count the same distribution, and its number of cells."""
    pooled = plain + drafted
    is_kept = pooled >= 20
    table = np.array([[*x[is_kept], x[~is_kept].sum()] for x in (plain, drafted)])
    table = table[:, table.sum(0) > 0]
    return float(scipy.stats.chi2_contingency(table).pvalue), table.shape[1]


def bench_target(trained: Trained, num_draws: int, batch_size: int) -> bool:
    target, drafter = trained.load(torch.float32)
    prompt = min((request.prompt_ids for request in trained.held_out.requests(100)), key=len)
    requests = [Request(str(i), prompt) for i in range(num_draws)]
    others = [Request(f"other {i}", prompt) for i in range(num_draws)]
    config = DecodingConfig(Sampling("probabilistic", 1.0), 3, trained.held_out.stop_ids, batch_size, 0)

    def counts(drafter: BlockDrafter | None, requests: list[Request], verification: Verification) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for completion in decode(target, drafter, requests, dataclasses.replace(config, verification=verification)):
            pair = tuple(completion.token_ids[1:3])
            found[pair] = found.get(pair, 0) + 1
        return found

    config_of_first = dataclasses.replace(config, max_new_tokens=1)
    first = np.bincount([c.token_ids[0] for c in decode(target, None, others, config_of_first)], minlength=target.shape.vocab_size)
    p_values = [fit(first, target.logits(target.states(list(prompt)).final_SD[-1]).double().softmax(-1).numpy())]
    print(f"target    first token of {num_draws:,} texts against its probabilities: p {p_values[0]:.4f}", flush=True)
    plain = counts(None, others, Verification())
    for name in ("verify_all", "scheduler"):
        drafted = counts(drafter, requests, policies(batch_size)[name])
        pairs = sorted({*plain, *drafted})
        p, num_cells = two_samples(*(np.array([found.get(pair, 0) for pair in pairs]) for found in (plain, drafted)))
        p_values.append(p)
        print(f"target    {trained.name} {name:12s} {num_draws:,} draws each, {num_cells} cells: p {p:.4f}", flush=True)
    print(f"target    least p after Holm {holm(p_values):.3g}: {verdict(holm(p_values) > LEAST_P)}", flush=True)
    return holm(p_values) > LEAST_P


def bench_identity(trained: Trained, num_prompts: int, num_sampled: int) -> bool:
    target, drafter = trained.load(torch.float32)
    requests = trained.held_out.requests(max(num_prompts, num_sampled))
    greedy = DecodingConfig(Sampling("greedy", 0.0), 48, trained.held_out.stop_ids, 16, 0)
    sampled = dataclasses.replace(greedy, sampling=Sampling("probabilistic", 1.0))
    num_wrong = 0

    def texts(drafter: BlockDrafter | None, requests: list[Request], config: DecodingConfig, batch_size: int) -> dict[str, list[int]]:
        found = decode(target, drafter, requests, dataclasses.replace(config, batch_size=batch_size))
        return {completion.request.id: completion.token_ids for completion in found}

    plain = texts(None, requests[:num_prompts], greedy, 16)
    for batch_size in (1, 16):
        num_wrong += _partings(
            f"greedy, batch {batch_size:2d}", trained, target, plain, texts(drafter, requests[:num_prompts], greedy, batch_size)
        )
    if num_sampled:
        alone, together = (texts(drafter, requests[:num_sampled], sampled, size) for size in (1, 16))
        num_equal = sum(alone[name] == together[name] for name in alone)
        num_wrong += len(alone) - num_equal
        what = f"{num_equal} of {len(alone)} texts equal: {verdict(num_equal == len(alone))}"
        print(f"identity  {trained.name} sampled, alone and in 16: {what}", flush=True)
    return num_wrong == 0


def _partings(what: str, trained: Trained, target: TargetModel, one: dict[str, list[int]], other: dict[str, list[int]]) -> int:
    """Prints where texts part; the number of those that rounding does not explain."""
    parting = [name for name in one if one[name] != other[name]]
    num_wrong = 0
    for name in parting:
        position = next((i for i, (a, b) in enumerate(zip(one[name], other[name], strict=False)) if a != b), 0)
        prompt = next(r.prompt_ids for r in trained.held_out.requests(len(one)) if r.id == name)
        best = target.logits(target.states([*prompt, *one[name][:position]]).final_SD[-1]).topk(2).values
        margin = float(best[0] - best[1])
        num_wrong += margin > MARGIN
        print(f"identity  {trained.name} {what}: {name} parts at token {position}, margin {margin:.2g}", flush=True)
    print(f"identity  {trained.name} {what}: {len(one) - len(parting)} of {len(one)} texts equal: {verdict(not num_wrong)}", flush=True)
    return num_wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-lossless", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--draws", type=int, default=50_000, help="of each combination of the toy")
    parser.add_argument("--target-draws", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=100, help="of identity")
    parser.add_argument("--sampled", type=int, default=50, help="prompts of identity at temperature 1")
    parser.add_argument("--drafter", action="append", help="folder of the train step; default: that of `make pipeline`")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"parts {sorted(unknown)} must be of {', '.join(PARTS)}")
    torch.set_num_threads(os.cpu_count() or 1)
    print(machine(), flush=True)
    is_good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        toy_target(folder / "target")
        toy_target(folder / "small", seed=1)
        if "toy" in parts:
            is_good &= bench_toy(folder, arguments.draws, os.cpu_count() or 1)
        if "controls" in parts:
            is_good &= bench_controls(folder, arguments.draws)
    for trained in trained_drafters(arguments.drafter) if {"target", "identity"} & {*parts} else ():
        if "identity" in parts:
            is_good &= bench_identity(trained, arguments.prompts, arguments.sampled)
        if "target" in parts:
            is_good &= bench_target(trained, arguments.target_draws, 64)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
