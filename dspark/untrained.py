"""Drafters that need no training: prompt lookup, and a small model of the target's tokenizer.

Shapes: B requests, K drafted tokens, W draft vocabulary (here the target's), T tokens so far.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.base import Choose, ContextRows, Proposal
from dspark.step import Step
from dspark.target import KeyValueCache, TargetModel, TargetStates


@dataclass
class Texts:
    """The tokens of each slot by position."""

    tokens: np.ndarray

    def move(self, source: int, target: int, length: int) -> None:
        self.tokens[target, :length] = self.tokens[source, :length]


class PromptLookup:
    """Drafts what followed the earliest occurrence of the longest n-gram, `max_ngram` down to `min_ngram` tokens, that the text ends
    with; nothing where it occurs nowhere else. The rule is vLLM's (v1/spec_decode/ngram_proposer.py)."""

    def __init__(self, block_size: int, min_ngram: int, max_ngram: int, vocab_size: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"prompt lookup: n-grams of {min_ngram} to {max_ngram} tokens must be 1 <= min <= max. Fix: 2 and 5, say")
        self.block_size, self._ngrams = block_size, range(max_ngram, min_ngram - 1, -1)
        self.draft_ids_W = torch.arange(vocab_size)

    def new_context(self, num_slots: int, max_length: int) -> Texts:
        return Texts(np.zeros((num_slots, max_length), dtype=np.int64))

    def extend_context(self, context: Texts, rows: ContextRows) -> None:
        context.tokens[rows.step.slot_S.numpy(force=True), rows.step.positions_S.numpy(force=True)] = rows.step.tokens_S.numpy(force=True)

    def propose(self, context: Texts, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, choose: Choose) -> Proposal:
        device, found = anchor_tokens_B.device, []
        for slot, (token, position) in enumerate(zip(anchor_tokens_B.tolist(), anchor_positions_B.tolist(), strict=True)):
            context.tokens[slot, position] = token
            found.append(self._following(context.tokens[slot, : position + 1]))
        lengths_B = torch.tensor([len(tokens) for tokens in found], device=device)
        tokens_BK = [np.pad(tokens, (0, self.block_size - len(tokens))) for tokens in found]
        return Proposal(torch.from_numpy(np.stack(tokens_BK)).to(device), lengths_B=lengths_B)

    def _following(self, text_T: np.ndarray) -> np.ndarray:
        for n in self._ngrams:
            if len(text_T) > n:
                windows = np.lib.stride_tricks.sliding_window_view(text_T[:-1], n)
                matches = np.flatnonzero((windows == text_T[-n:]).all(axis=1))
                if len(matches):
                    return text_T[matches[0] + n :][: self.block_size]
        return text_T[:0]


class DraftModel:
    """A small model that drafts token by token. Both models must count the same token ids: ids beyond the smaller vocabulary are
    never drafted, and its context holds another one in their place."""

    def __init__(self, model: TargetModel, block_size: int, vocab_size: int) -> None:
        """vocab_size: the target's."""
        self._model, self.block_size = model, block_size
        self.draft_ids_W = torch.arange(min(vocab_size, model.shape.vocab_size), device=model.device)

    def new_context(self, num_slots: int, max_length: int) -> KeyValueCache:
        return KeyValueCache(num_slots, max_length)

    def extend_context(self, context: KeyValueCache, rows: ContextRows) -> None:
        self._forward(rows.step, context)

    def propose(self, context: KeyValueCache, anchor_tokens_B: Tensor, anchor_positions_B: Tensor, choose: Choose) -> Proposal:
        slots_B, tokens = torch.arange(len(anchor_tokens_B), device=anchor_tokens_B.device), [anchor_tokens_B]
        for k in range(self.block_size):
            step = Step(tokens[-1], anchor_positions_B + k, slots_B, torch.ones_like(slots_B))
            logits_BW = self._model.logits(self._forward(step, context).final_SD)[:, : len(self.draft_ids_W)]
            tokens.append(choose(k, logits_BW))
        return Proposal(torch.stack(tokens[1:], dim=1))

    def _forward(self, step: Step, context: KeyValueCache) -> TargetStates:
        return self._model.forward(replace(step, tokens_S=step.tokens_S.clamp_max(self._model.shape.vocab_size - 1)), context)
