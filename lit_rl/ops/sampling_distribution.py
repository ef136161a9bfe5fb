"""The distribution that tokens are drawn from, by their logits: earlier tokens, temperature, truncation.

One arithmetic for the engine and for the scoring. Logits are float32 ``(..., v)``. A transform returns new logits and
edits nothing; a token that is ruled out gets minus infinity. Meaning and order (temperature, top-k, top-p, min-p) are
those of transformers' logits processors.

What truncation keeps depends on the logits alone, tokens of equal logits included: top-k and min-p keep all or none
of them, top-p those of the highest ids. So equal logits give equal sets. Logits that differ by a rounding may give
other sets, once in a while for float32, often for half precision, whose logits are full of ties.

Before temperature and truncation a :class:`History` changes the logits ``z`` of a position by the tokens ``B`` before
it:

    z'_j = z_j / p  where z_j is 0 or more,  z_j p  where it is negative      for j in B (1909.05858), p the penalty
    z'_j = -inf                                                               for the tokens j that end a turn too early
    ∂z'_j/∂z_j = 1 / p, or p

The token that is scored is never ruled out: the policy that drew it could draw it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor


def ban(logits: Float[Tensor, "... v"], tokens: Bool[Tensor, "..."]) -> Float[Tensor, "... v"]:
    """Rule out the tokens where ``tokens``, of a shape that expands to that of the logits, is True."""
    return logits.masked_fill(tokens, -torch.inf)


def temperature(logits: Float[Tensor, "... v"], value: float) -> Float[Tensor, "... v"]:
    """Divide by a temperature above 0. The maximum is taken off first: tiny temperatures must not overflow.

    At 1 the logits come back as they are.
    """
    return logits if value == 1 else (logits - logits.amax(-1, keepdim=True)) / value


def top_k(logits: Float[Tensor, "... v"], k: int) -> Float[Tensor, "... v"]:
    """Keep the k likeliest tokens (1805.04833), and every token tied with the k-th."""
    threshold = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return ban(logits, logits < threshold)


def running_sum(x: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
    """Return the cumulative sum over the last axis, in a fixed order where one is asked for.

    Under ``trainer.deterministic=true`` CUDA's `cumsum` of floating point raises. There sums of doubling length are
    added, log2(n) times (Hillis and Steele, 1986).
    """
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    length = 1
    while length < x.shape[-1]:
        x = torch.cat([x[..., :length], x[..., length:] + x[..., :-length]], -1)
        length *= 2
    return x


def top_p(logits: Float[Tensor, "... v"], p: float) -> Float[Tensor, "... v"]:
    """Keep the smallest set of likeliest tokens whose mass reaches ``p`` (1904.09751, eq. 2); never an empty one."""
    # Stable: else the library's choice among equals would depend on the shape, and differ between engine and scoring.
    ascending, order = logits.sort(dim=-1, stable=True)
    dropped = running_sum(ascending.softmax(-1)) <= 1 - p
    dropped[..., -1] = False
    return ban(logits, dropped.scatter(-1, order, dropped))


def min_p(logits: Float[Tensor, "... v"], p: float) -> Float[Tensor, "... v"]:
    """Keep tokens at least ``p`` times as likely as the likeliest one (2407.01082, eq. 2)."""
    probs = logits.softmax(-1)
    return ban(logits, probs < p * probs.amax(-1, keepdim=True))


@dataclass(frozen=True)
class Truncation:
    """The set of tokens that may be drawn: top-k, then top-p of the rest, then min-p of the rest then.

    Args:
        top_k: Keep the k likeliest tokens. 0 is off.
        top_p: Keep the smallest set of tokens whose mass reaches this, in (0, 1]. 1 is off.
        min_p: Keep tokens at least this share as likely as the likeliest, in [0, 1]. 0 is off.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        assert self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1, f"{self} is out of range"

    @cached_property
    def off(self) -> bool:
        return not self.top_k and self.top_p == 1 and self.min_p == 0

    def __call__(self, logits: Float[Tensor, "... v"]) -> Float[Tensor, "... v"]:
        """Return the logits, temperature applied, of the tokens that are kept; minus infinity elsewhere."""
        if self.top_k:
            logits = top_k(logits, self.top_k)
        if self.top_p < 1:
            logits = top_p(logits, self.top_p)
        if self.min_p > 0:
            logits = min_p(logits, self.min_p)
        return logits


NO_TRUNCATION = Truncation()


def kept_logmass(logits: Float[Tensor, "... v"], kept: Float[Tensor, "... v"]) -> Float[Tensor, "..."]:
    """Return ``log sum_{i kept} softmax(logits)_i``, at most 0: the mass that truncation left.

    Args:
        logits: Before truncation, temperature applied.
        kept: What :class:`Truncation` made of them.
    """
    top = logits.amax(-1, keepdim=True)
    share = (kept - top).exp().sum(-1) / (logits - top).exp().sum(-1)
    return share.log()


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
