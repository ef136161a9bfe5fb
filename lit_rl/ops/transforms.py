"""What temperature and truncation make of the logits of a step: one arithmetic for the engine and for the scoring.

Logits are float32 ``(..., v)``. A transform returns new logits and edits nothing; a token that is ruled out gets minus
infinity. Meaning and order (temperature, top-k, top-p, min-p) are those of transformers' logits processors.

What truncation keeps depends on the logits alone, tokens of equal logits included: top-k and min-p keep all or none of
them, top-p those of the highest ids. So equal logits give equal sets. Logits that differ by a rounding may give other
sets, once in a while for float32, often for half precision, whose logits are full of ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
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

    @property
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
