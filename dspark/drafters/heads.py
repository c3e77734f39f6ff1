"""DSpark's light heads: the Markov head (Eq. 5) and the confidence head (Eq. 7).

Shapes: R Markov rank, D width, V target vocabulary, W draft vocabulary.
"""

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """Bias of a token's logits given the previous token, of low rank: B_k = W_2 W_1[x_{k-1}].

    W_1 is looked up by target id, W_2 scores the draft vocabulary: with a reduced draft vocabulary they differ in rows.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """W_1[x_{k-1}], [..., R]."""
        return self.markov_w1(previous)

    def bias(self, embedded: Tensor) -> Tensor:
        """B_k, [..., W]."""
        return self.markov_w2(embedded)


class ConfidenceHead(nn.Module):
    """Logit of c_k = sigma(w . [h_k ; W_1[x_{k-1}]] + b), computed in at least fp32.

    h_k is the backbone's output after its final norm; fed by an un-normed stream the loss of this head spikes.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width + rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        features = torch.cat([hidden, embedded], dim=-1)
        wide = features if features.dtype == torch.float64 else features.float()
        return nn.functional.linear(wide, self.proj.weight.to(wide.dtype), self.proj.bias.to(wide.dtype))[..., 0]
