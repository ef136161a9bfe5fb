"""Pairs of completions as their losses see them: sums of log-probs, log ratios, scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.masking import masked_sum
from lit_rl.ops.preference.divergences import reverse_kl

Divergence = Callable[[Tensor], Tensor]
"""A function of :mod:`lit_rl.ops.preference.divergences`: log ratio -> score."""


class PolicyPairs:
    """The pairs of a loss without a reference: log-probs of the policy, and lengths."""

    chosen: Float[Tensor, " b"]
    rejected: Float[Tensor, " b"]
    chosen_tokens: Float[Tensor, " b"]
    rejected_tokens: Float[Tensor, " b"]

    @property
    def chosen_mean(self) -> Tensor:
        """Log-prob of the chosen completion per token, under the policy alone, ``(b,)``."""
        return self.chosen / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean(self) -> Tensor:
        """Log-prob of the rejected completion per token, under the policy alone, ``(b,)``."""
        return self.rejected / self.rejected_tokens.clamp(min=1)


class RatioPairs(PolicyPairs):
    """The pairs of a loss that reads log-probs and log ratios as they are: no divergence but the reverse KL fits it."""

    ref_chosen: Float[Tensor, " b"]
    ref_rejected: Float[Tensor, " b"]

    @property
    def chosen_ratio(self) -> Tensor:
        """``rho_c``, ``(b,)``."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """``rho_r``, ``(b,)``."""
        return self.rejected - self.ref_rejected


@dataclass(frozen=True)
class OfStep:
    """A mark for pairs that have to be all those of an optimizer step, since the loss couples them."""


StepPairs = Annotated[RatioPairs, OfStep()]
"""All pairs of an optimizer step, read as log ratios."""


@dataclass(frozen=True)
class Pairs(RatioPairs):
    """Pairs of a chosen and a rejected completion of one prompt: log-probs in nats, summed over completion tokens.

    A loss names the part of it that it reads as the type of its first argument: `PolicyPairs`, `RatioPairs`, or all.
    """

    chosen: Float[Tensor, " b"]
    """Log-prob of the chosen completion under the policy, with gradient."""
    rejected: Float[Tensor, " b"]
    ref_chosen: Float[Tensor, " b"]
    """Log-prob of the chosen completion under the reference, without gradient. 0 where a method has no reference."""
    ref_rejected: Float[Tensor, " b"]
    chosen_tokens: Float[Tensor, " b"]
    """Number of tokens of the chosen completion."""
    rejected_tokens: Float[Tensor, " b"]
    divergence: Divergence = reverse_kl
    """The function from a log ratio to a score."""
    nll: Float[Tensor, " b"] | None = None
    """Minus the log-prob of ALL chosen tokens, none weighed down, with gradient. None: ``-chosen``."""
    nll_tokens: int | float | Float[Tensor, ""] | None = None
    """Chosen tokens of the whole optimizer step, over all ranks. None: of these pairs."""
    step_rows: int | float | None = None
    """Pairs of the whole optimizer step, over all ranks. None: of these pairs."""

    @property
    def chosen_score(self) -> Tensor:
        """``s_c``, ``(b,)``."""
        return self.divergence(self.chosen_ratio)

    @property
    def rejected_score(self) -> Tensor:
        """``s_r``, ``(b,)``."""
        return self.divergence(self.rejected_ratio)

    @property
    def margin(self) -> Tensor:
        """``s_c - s_r``, ``(b,)``."""
        return self.chosen_score - self.rejected_score

    @property
    def chosen_mean_score(self) -> Tensor:
        """``s_c / n_c``, ``(b,)``; 0 / 1 of an empty completion."""
        return self.chosen_score / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean_score(self) -> Tensor:
        """``s_r / n_r``, ``(b,)``."""
        return self.rejected_score / self.rejected_tokens.clamp(min=1)

    @property
    def nll_share(self) -> Tensor:
        """``(b,)``: the mean of it over the pairs of the step is the mean of ``-log pi`` over its chosen tokens."""
        nll = -self.chosen if self.nll is None else self.nll
        tokens = self.chosen_tokens.sum() if self.nll_tokens is None else torch.as_tensor(self.nll_tokens)
        rows = len(nll) if self.step_rows is None else self.step_rows
        return nll * (rows / tokens.clamp(min=1))


def sums_of_pairs(
    logprobs: Float[Tensor, "n t"], mask: Bool[Tensor, "n t"], *, tail_weight: float = 1.0
) -> Float[Tensor, " n"]:
    """Sum log-probs of completions, at least in float32; the longer one of a pair may count less beyond the shorter
    one.

    LD-DPO (2409.06411): with ``L = min(n_c, n_r)`` the tokens of both completions up to the L-th weigh 1 and
    those after it ``tail_weight``. The policy and the reference are summed alike.

    Args:
        logprobs: Of ``n = 2 b`` rows: ``b`` chosen ones, then their rejected ones. What stands outside the mask, NaN
            included, changes nothing.
        mask: True on tokens of completions.
        tail_weight: Weight of the tokens beyond the shorter completion, in [0, 1]. 1: the plain sum.

    Raises:
        ValueError: the number of rows is odd, or the weight is out of range.
    """
    if not 0 <= tail_weight <= 1:
        raise ValueError(f"tail_weight={tail_weight} is out of range: allowed is [0, 1]; 1 is the plain sum.")
    if len(logprobs) % 2:
        raise ValueError(f"{len(logprobs)} rows are no pairs: all chosen rows come first, then as many rejected ones.")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    if tail_weight == 1:
        return masked_sum(logprobs, mask, dim=1)
    shorter = torch.minimum(*mask.sum(1).chunk(2)).repeat(2)
    tail = mask & (mask.cumsum(1) > shorter.unsqueeze(1))
    return masked_sum(logprobs, mask & ~tail, dim=1) + tail_weight * masked_sum(logprobs, tail, dim=1)
