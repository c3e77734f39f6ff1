"""DSpark's light heads: three sequential heads (Eq. 5-6) and the confidence head (Eq. 7).

A sequential head biases the logits of row k by what was drafted before it. It yields b_k [..., R], which W_2 turns into
B_k [..., W]; the product with W_2 is left to the caller, since training never holds B_k of all rows.

    markov  b_k = W_1[x_{k-1}]                                            one token back
    gated   b_k = sigma(W_g [h_k ; W_1[x_{k-1}]]) * W_1[x_{k-1}]          (DeepSpec)
    rnn     z_k = [s_{k-1} ; W_1[x_{k-1}] ; h_k];  g = sigma(W_g z_k);  s_k = g * s_{k-1} + (1 - g) * tanh(W_c z_k);
            b_k = tanh(W_o z_k)                                           the whole block so far; s_{-1} = 0

Projections of gated, rnn and confidence have biases, as in DeepSpec's code; Eq. 6-7 have none. Module names are those of its
checkpoints. Shapes: R Markov rank, D width, V target vocabulary, W draft vocabulary, K block positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class HeadStep:
    """`embedded` W_1[x_{k-1}] [..., R], which the confidence head reads too; `bias` b_k [..., R]; `state` s_k (rnn)."""

    embedded: Tensor
    bias: Tensor
    state: Tensor | None = None


class MarkovHead(nn.Module):
    """W_1 is looked up by target id, W_2 scores the draft vocabulary: with a reduced draft vocabulary they differ in rows."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, width: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> HeadStep:
        """One row: x_{k-1} [...], h_k [..., D], s_{k-1}."""
        embedded = self.markov_w1(previous)
        return HeadStep(embedded, embedded)

    def block(self, previous_BAK: Tensor, hidden_BAKD: Tensor) -> HeadStep:
        """All rows of blocks whose tokens are known."""
        return self.step(previous_BAK, hidden_BAKD, None)


class GatedHead(MarkovHead):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> HeadStep:
        embedded = self.markov_w1(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return HeadStep(embedded, gate * embedded)


class RnnHead(MarkovHead):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, width: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)  # W_g, W_c and W_o in one

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> HeadStep:
        embedded = self.markov_w1(previous)
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return HeadStep(embedded, torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate))

    def block(self, previous_BAK: Tensor, hidden_BAKD: Tensor) -> HeadStep:
        steps: list[HeadStep] = []
        for k in range(previous_BAK.shape[-1]):
            steps.append(self.step(previous_BAK[..., k], hidden_BAKD[..., k, :], steps[-1].state if steps else None))
        return HeadStep(torch.stack([s.embedded for s in steps], dim=-2), torch.stack([s.bias for s in steps], dim=-2))


SEQUENTIAL_HEADS = {"markov": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


class ConfidenceHead(nn.Module):
    """Logit of c_k = sigma(w . [h_k ; W_1[x_{k-1}]] + b), computed in at least fp32; of h_k alone without a sequential head.

    h_k is the backbone's output after its final norm; fed by an un-normed stream the loss of this head spikes.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width + rank, 1)

    def features(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        features = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return features if features.dtype == torch.float64 else features.float()

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        wide = self.features(hidden, embedded)
        return nn.functional.linear(wide, self.proj.weight.to(wide.dtype), self.proj.bias.to(wide.dtype))[..., 0]
