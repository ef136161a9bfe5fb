"""What becomes of the logits of a token because of where it stands, and of what stood before it.

Before temperature and truncation, with the logits ``z`` of a position and the tokens ``B`` that stood before it:

    z'_j = z_j / p  where z_j is 0 or more,  z_j p  where it is negative      for j in B (1909.05858), p the penalty
    z'_j = -inf                                                               for the tokens j that end a turn too early
    ∂z'_j/∂z_j = 1 / p, or p

The token that is scored is never ruled out: the policy that drew it could draw it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor


@dataclass(frozen=True)
class History:
    """Earlier tokens of scored positions, in any shape, and how they change the logits there."""

    early: Bool[Tensor, "*shape"]
    """True where a turn is still too short to end."""
    row: Int[Tensor, "*shape"]
    """The number of the text that a position belongs to."""
    place: Int[Tensor, "*shape"]
    """The column of its text: the tokens before it stand in lower ones."""
    texts: Int[Tensor, "r s"]
    """The tokens of whole texts, prompts included; -1 where none counts."""
    ends: Int[Tensor, " k"]
    """The tokens that end a turn."""
    penalty: float = 1.0
    """Above 0. 1 is off."""
    first: Int32[Tensor, "r v"] | None = None
    """The first column of each text that holds each token; s where none does. None without a penalty."""
    is_end: Bool[Tensor, " v"] | None = None
    """The tokens of `ends`. None where there are none."""
    made: dict[int, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict, compare=False, repr=False)
    """`first` and `is_end` by the size of the vocabulary: made once for all blocks of the same texts."""

    def over(self, vocabulary: int) -> History:
        """Return the history for logits over ``vocabulary`` tokens: with `first`, which is small beside whole logits,
        and `is_end`."""
        if self.first is not None or self.is_end is not None:
            return self
        if vocabulary not in self.made:
            self.made[vocabulary] = self._over(vocabulary)
        first, is_end = self.made[vocabulary]
        return replace(self, first=first, is_end=is_end)

    def _over(self, vocabulary: int) -> tuple[Tensor | None, Tensor | None]:
        first, is_end, device = None, None, self.texts.device
        if self.penalty != 1:
            r, s = self.texts.shape
            never = torch.full((r, vocabulary + 1), s, dtype=torch.int32, device=device)
            columns = torch.arange(s, dtype=torch.int32, device=device).expand(r, s)
            tokens = self.texts.where(self.texts >= 0, vocabulary)
            first = never.scatter_reduce_(1, tokens, columns, "amin")[:, :vocabulary]
        if len(self.ends):
            is_end = torch.isin(torch.arange(vocabulary, device=device), self.ends)
        return first, is_end

    def mapped(self, change: Callable[[Tensor], Tensor]) -> History:
        """Return the same positions in another shape, or some of them."""
        return replace(self, early=change(self.early), row=change(self.row), place=change(self.place))

    def at(self, block: Any) -> History:
        """Return the positions of a block, by its slices."""
        return self.mapped(lambda field: field[block])

    def __call__(self, logits: Float[Tensor, "*shape v"], ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape v"]:
        """Return the logits that are drawn from, before temperature; the given ones stay as they are."""
        if self.penalty != 1:
            logits = torch.where(self._seen(), penalised(logits, self.penalty), logits)
        if self.is_end is None:
            return logits
        own = ids.unsqueeze(-1)
        possible = logits.masked_fill(self.early.unsqueeze(-1) & self.is_end, -torch.inf)
        return possible.scatter_(-1, own, logits.gather(-1, own))

    def slope_into(self, grad: Float[Tensor, "*shape v"], logits: Float[Tensor, "*shape v"]) -> Tensor:
        """Multiply a gradient of the result by ∂z'/∂z, in its place. It is 0 already where tokens are ruled out."""
        if self.penalty == 1:
            return grad
        slope = torch.where(logits < 0, self.penalty, 1 / self.penalty).to(grad)
        return grad.mul_(slope.masked_fill_(~self._seen(), 1.0))

    def _seen(self) -> Bool[Tensor, "*shape v"]:
        """Return which tokens stood before each position."""
        assert self.first is not None, "History.over comes first"
        return self.first[self.row] < self.place.unsqueeze(-1)


def penalised(logits: Tensor, penalty: float) -> Tensor:
    """Return all logits divided by `penalty`, negative ones multiplied by it."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)
