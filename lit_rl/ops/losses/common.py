"""What the losses are made of: ratio and advantages of tokens, and the metrics that all of them report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.ratios import MAX_LOG_RATIO, token_ratio
from lit_rl.ops.step import Highest, Lowest, Metrics, StepTokens

Advantages = Float[Tensor, " b"] | Float[Tensor, "b t"]
"""Advantages: one for each row, shared by its tokens, or one for each token."""

Ratio = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of :mod:`lit_rl.ops.ratios`."""


@dataclass(frozen=True)
class Terms:
    """The tokens of a batch, in float32 and 0 outside the mask (their ratio is 1 there)."""

    logprobs: Float[Tensor, "b t"]
    """Log-probs of the policy now, with gradient."""
    old_logprobs: Float[Tensor, "b t"]
    log_ratio: Float[Tensor, "b t"]
    """Log ratio, with gradient, at most :data:`MAX_LOG_RATIO`."""
    advantages: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]

    @classmethod
    def of(
        cls, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, ratio: Ratio = token_ratio
    ) -> Terms:
        """Mask all terms before anything is computed: a NaN that is masked afterwards still spoils the gradient of its
        row."""
        logprobs, old_logprobs = (x.float().masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs))
        if advantages.ndim == 1:
            advantages = advantages.unsqueeze(1).expand_as(mask)
        return cls(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            log_ratio=ratio(logprobs, old_logprobs, mask).clamp(max=MAX_LOG_RATIO),
            advantages=advantages.float().masked_fill(~mask, 0.0),
            mask=mask,
        )

    @property
    def ratio(self) -> Tensor:
        """The importance ratio, with gradient."""
        return self.log_ratio.exp()

    def share(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return a metric: the share of the loss tokens that are True, or the mean of a value over them."""
        return masked_sum(tokens.detach().float(), self.mask), self.mask.sum().float()

    def only(self, per_token: Tensor) -> Tensor:
        """Return losses with 0 outside the mask, attached to the graph."""
        return per_token.masked_fill(~self.mask, 0.0)


@torch.no_grad()
def ratio_metrics(terms: Terms) -> Metrics:
    """Return ``ratio_mean`` and ``approx_kl``, at the level of the loss's ratio, over loss tokens."""
    return {
        "ratio_mean": terms.share(terms.ratio),
        "approx_kl": terms.share(torch.expm1(terms.log_ratio) - terms.log_ratio),
    }


@torch.no_grad()
def clip_metrics(terms: Terms, low: Bool[Tensor, "b t"], high: Bool[Tensor, "b t"]) -> Metrics:
    """Return shares of tokens beyond a bound, on the side where it acts, beside :func:`ratio_metrics`.

    Args:
        terms: Of the loss.
        low: Tokens below the lower bound with a negative advantage.
        high: Tokens above the upper bound with a positive advantage.
    """
    rows = terms.mask.any(1)
    inf = float("inf")
    return {
        "clip_ratio/low_mean": terms.share(low),
        "clip_ratio/low_min": Lowest(masked_mean(low.float(), terms.mask, dim=1).masked_fill(~rows, inf).min()),
        "clip_ratio/high_mean": terms.share(high),
        "clip_ratio/high_max": Highest(masked_mean(high.float(), terms.mask, dim=1).masked_fill(~rows, -inf).max()),
        "clip_ratio/region_mean": terms.share(low | high),
        **ratio_metrics(terms),
    }


@torch.no_grad()
def beyond(x: Tensor, terms: Terms | StepTokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the tokens with ``x < low`` and a negative advantage, and those with ``x > high`` and a positive one."""
    return (x < low) & (terms.advantages < 0), (x > high) & (terms.advantages > 0)
