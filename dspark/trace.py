"""A round at every position of a finished text: what a replay needs to go on after a round that it truncated.

Decoding visits some anchors of a text only. `every_position` drafts at all of them, and decides what of each block the text
accepts by the coupling of rejection sampling, so that each round has the law of the one that decoding would have made there.

Shapes: A anchors, K block positions, R target distributions, T tokens of the text, V target and W draft vocabulary, D width.
"""

import numpy as np
import torch
from torch import Tensor

from dspark.decoding import Completion, DecodingConfig
from dspark.drafters.base import ContextRows, Drafter
from dspark.rounds import Round
from dspark.sampling import DRAFT, Noise, Sampling, distribution, exponentials, race, residual
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel

ANCHORS_AT_ONCE = 64  # each with a copy of the drafter's context, and K rows of logits


@torch.no_grad()
def every_position(target: TargetModel, drafter: Drafter, completion: Completion, config: DecodingConfig) -> list[Round]:
    """A round at every anchor of a finished text, as decoding could have made it there on the way to this very text.

    A replay needs them after a truncated round. Rejection sampling couples draft and text: given the accepted prefix and the
    text's next token x, the drafted token is x and is accepted with probability min(1, p_d(x) / p_t(x)); else it is drawn from
    max(0, p_d - p_t), and what follows it from p_d alone. At temperature 0 both are point masses: the block drafted there, as
    far as the text bears it out. Blocks are cut at the text's end. `target_probs`: of accepted tokens and of the first
    rejected one, NaN behind it.
    """
    prompt, text, K = completion.request.prompt_ids, completion.token_ids, drafter.block_size
    num_anchors, sequence, device, sampling = len(text) - 1, [*prompt, *text], target.device, config.sampling
    if num_anchors < 1:
        return []
    step = Step.of([sequence[:-1]], [0], [0], device)
    states = target.forward(step, KeyValueCache(1, len(sequence)))
    whole = drafter.new_context(1, len(sequence))
    drafter.extend_context(whole, ContextRows(step, states.tapped_SLD, torch.tensor(sequence[1:], device=device)))
    text_T = torch.tensor(text, device=device)
    generator = Noise(config.seed, f"every position of {completion.request.id}").generator(DRAFT, 0)
    columns: list[tuple[list[int], list[float], list[float], list[float], int, int]] = []
    for start in range(0, num_anchors, ANCHORS_AT_ONCE):
        index_A = torch.arange(start, min(start + ANCHORS_AT_ONCE, num_anchors), device=device)
        # Of the token after each anchor, and of the K - 1 that follow the last.
        final_RD = states.final_SD[len(prompt) + start : len(prompt) + start + len(index_A) + K - 1]
        coupled = _Coupled(text_T, index_A, drafter.draft_ids_W, sampling, sampling.probs(target.logits(final_RD)), generator)
        context = whole.rows(torch.zeros(len(index_A), dtype=torch.long, device=device))
        proposal = drafter.propose(context, text_T[index_A], len(prompt) + index_A, coupled.choose)
        draft_prob_AK, target_prob_AK = (torch.stack(column, dim=1).tolist() for column in (coupled.draft_probs, coupled.target_probs))
        logit_AK = proposal.confidence_logits_BK.tolist() if proposal.confidence_logits_BK is not None else [[]] * len(index_A)
        proposed_A = (num_anchors - index_A).clamp_max(K).tolist()
        chunk = proposal.tokens_BK.tolist(), draft_prob_AK, target_prob_AK, logit_AK, proposed_A, coupled.accepted_A.tolist()
        columns += zip(*chunk, strict=True)
    rounds = []
    for i, (drafted, draft_probs, target_probs, logits, proposed, accepted) in enumerate(columns):
        following = text[i + 1 + accepted : i + 2 + accepted]
        rounds.append(
            Round(
                request_id=completion.request.id,
                domain=completion.request.domain,
                source=completion.request.source,
                round_index=i,
                temperature=config.sampling.temperature,
                top_k=config.sampling.top_k,
                top_p=config.sampling.top_p,
                draft_mode=config.sampling.mode,
                variant=config.variant,
                policy="every_position",
                context_length_tokens=len(prompt) + i,
                anchor_token=text[i],
                draft_tokens=tuple(drafted[:proposed]),
                draft_probs=tuple(draft_probs[:proposed]),
                target_probs=tuple(target_probs[:proposed]),
                confidence_logits=tuple(logits[:proposed]),
                proposed=proposed,
                accepted=accepted,
                next_token=following[0] if following else None,
                ended_by_stop=not following and completion.finish_reason == "stop",
            )
        )
    return rounds


class _Coupled:
    """Drafts the blocks of A anchors of one text by the coupling of rejection sampling. R rows: target distributions, from the
    first anchor's next token on."""

    def __init__(
        self,
        text_T: Tensor,
        index_A: Tensor,
        draft_ids_W: Tensor,
        sampling: Sampling,
        target_probs_RV: Tensor,
        generator: np.random.Generator,
    ) -> None:
        self.text_T, self.index_A, self.draft_ids_W, self.target_probs_RV = text_T, index_A, draft_ids_W, target_probs_RV
        self.sampling, self.generator = sampling, generator
        self.accepted_A = torch.zeros_like(index_A)
        self.draft_probs: list[Tensor] = []
        self.target_probs: list[Tensor] = []

    def choose(self, k: int, logits_AW: Tensor) -> Tensor:
        """The drafted tokens at position k; extends `accepted_A` where the text's token is drafted and accepted."""
        ids_W, last = self.draft_ids_W, len(self.text_T) - 1
        probs_AW = distribution(logits_AW, 0.0) if self.sampling.has_point_drafts else self.sampling.probs(logits_AW)
        row_A = (self.index_A - self.index_A[0] + k).clamp_max(len(self.target_probs_RV) - 1)
        is_open_A = (self.accepted_A == k) & (self.index_A + k < last)  # accepted so far, and the text goes on
        label_A = self.text_T[(self.index_A + k + 1).clamp_max(last)]
        label_index_A = torch.searchsorted(ids_W, label_A).clamp_max(len(ids_W) - 1)
        draft_prob_A = probs_AW.gather(-1, label_index_A[:, None])[:, 0] * (ids_W[label_index_A] == label_A)
        uniform_A = torch.from_numpy(self.generator.random(len(row_A))).to(ids_W.device)
        is_accepted_A = is_open_A & (uniform_A.to(draft_prob_A.dtype) * self.target_probs_RV[row_A, label_A] < draft_prob_A)
        self.accepted_A += is_accepted_A
        left_AW = residual(probs_AW, self.target_probs_RV[row_A[:, None], ids_W].to(probs_AW.dtype))
        weights_AW = torch.where((is_open_A & ~is_accepted_A)[:, None], left_AW, probs_AW)
        drawn_A = race(weights_AW, torch.from_numpy(exponentials(self.generator, tuple(weights_AW.shape))).to(ids_W.device))
        found_A = torch.where(is_accepted_A, label_index_A, drawn_A)
        self.draft_probs.append(probs_AW.gather(-1, found_A[:, None])[:, 0])
        self.target_probs.append(torch.where(is_open_A, self.target_probs_RV[row_A, ids_W[found_A]], torch.nan))
        return found_A
