"""New tokens of several requests in one forward: one request's after the other's, without padding.

Requests bring different numbers of tokens: a prompt each when they begin, one token and as many of the draft as are verified
later. Whatever is computed token by token is computed on the S tokens; attention pads to the longest request.

Shapes: R requests, S tokens of all of them, T tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """`slots_R`: where the caches keep each request. Positions of one request ascend by one."""

    tokens_S: Tensor
    positions_S: Tensor
    slots_R: Tensor
    lengths_R: Tensor

    @staticmethod
    def of(tokens: Sequence[Sequence[int]], first_positions: Sequence[int], slots: Sequence[int], device: torch.device) -> "Step":
        """Tokens of each request, the first of them at its position."""
        lengths = [len(row) for row in tokens]
        positions = [first + i for first, n in zip(first_positions, lengths, strict=True) for i in range(n)]
        columns = [token for row in tokens for token in row], positions, slots, lengths
        return Step(*(torch.tensor(column, dtype=torch.long, device=device) for column in columns))

    @cached_property
    def starts_R(self) -> Tensor:
        """Where each request's tokens begin."""
        return self.lengths_R.cumsum(0) - self.lengths_R

    @cached_property
    def row_S(self) -> Tensor:
        """The request of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths_R), device=self.lengths_R.device), self.lengths_R)

    @cached_property
    def slot_S(self) -> Tensor:
        return self.slots_R[self.row_S]

    @cached_property
    def column_S(self) -> Tensor:
        """Of each token, how many of its request are before it."""
        return torch.arange(len(self.tokens_S), device=self.lengths_R.device) - self.starts_R[self.row_S]

    @cached_property
    def width(self) -> int:
        return int(self.lengths_R.max())

    @cached_property
    def end(self) -> int:
        """One more than the highest position."""
        return int(self.positions_S.max()) + 1

    @cached_property
    def slots(self) -> slice | Tensor:
        """The requests' rows of a cache: a view where they are neighbours."""
        first = int(self.slots_R[0])
        whole = slice(first, first + len(self.slots_R))
        is_range = torch.equal(self.slots_R, torch.arange(whole.start, whole.stop, device=self.slots_R.device))
        return whole if is_range else self.slots_R

    @cached_property
    def is_rectangle(self) -> bool:
        return self.width * len(self.lengths_R) == len(self.tokens_S)

    @cached_property
    def positions_RT(self) -> Tensor:
        """Positions, going on behind the end of shorter requests."""
        first_R1 = self.positions_S[self.starts_R][:, None]
        return first_R1 + torch.arange(self.width, device=self.positions_S.device)

    def padded(self, x_S: Tensor) -> Tensor:
        """[S, ...] -> [R, T, ...], zeros behind the end of shorter requests."""
        size = (len(self.lengths_R), self.width, *x_S.shape[1:])
        return x_S.view(size) if self.is_rectangle else x_S.new_zeros(size).index_put((self.row_S, self.column_S), x_S)

    def packed(self, x_RT: Tensor) -> Tensor:
        """[R, T, ...] -> [S, ...]."""
        return x_RT.flatten(0, 1) if self.is_rectangle else x_RT[self.row_S, self.column_S]
