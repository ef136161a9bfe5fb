"""What a term may know of the whole optimizer step, and what it may say about itself.

A quantile, a share of tokens or a mean weight that belongs to the method is taken once over an optimizer step, over all
its micro-batches on all ranks, so that no gradient depends on how a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from lit_rl.ops.masking import masked_mean, masked_sum


@dataclass(frozen=True)
class StepTokens:
    """The loss tokens of one optimizer step, flat, in any order: what `n` tokens were like before the step."""

    logprobs: Float[Tensor, " n"]
    """Log-probs of the policy that takes the step."""
    old_logprobs: Float[Tensor, " n"]
    """Log-probs of the policy that took the rollout."""
    advantages: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    """Entropy, in nats."""
    selected: Float[Tensor, ""] | None = None
    """Number of them that the policy loss acts on. None: not counted."""

    @classmethod
    def of(
        cls,
        mask: Bool[Tensor, "b t"],
        *,
        logprobs: Float[Tensor, "b t"] | None = None,
        old_logprobs: Float[Tensor, "b t"] | None = None,
        advantages: Float[Tensor, "..."] | None = None,
        entropy: Float[Tensor, "b t"] | None = None,
    ) -> StepTokens:
        """Return the tokens of one batch; a field that is not given is 0 everywhere. Advantages are `(b,)` or `(b, t)`.

        Without `old_logprobs` the policy that takes the step is the one that took the rollout: every ratio is 1.
        """
        old = logprobs if old_logprobs is None else old_logprobs
        parts = {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "entropy": entropy}
        if advantages is not None and advantages.ndim == 1:
            parts["advantages"] = advantages.unsqueeze(1).expand(mask.shape)
        zeros = torch.zeros(mask.shape, device=mask.device)
        return cls(**{name: (zeros if part is None else part.detach().float())[mask] for name, part in parts.items()})


@dataclass(frozen=True)
class WeightTotals:
    """Sums of weights over an optimizer step, over all its micro-batches and all ranks."""

    tokens: Tensor
    """Loss tokens."""
    sequences: Tensor
    """Rows that have a loss token."""
    token_weights: Tensor
    """Sum of the weights of the loss tokens."""
    sequence_weights: Tensor
    """Sum over rows of the mean weight of their loss tokens."""

    @classmethod
    def of(cls, weights: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> WeightTotals:
        """Return the sums of a step that is this one batch. Elsewhere, sum these over batches and ranks."""
        means = masked_mean(weights, mask, dim=1)
        return cls(mask.sum(), mask.any(1).sum(), masked_sum(weights, mask), means.sum())


@dataclass(frozen=True)
class Highest:
    """A metric of which the highest value over a step or a rollout is reported."""

    value: Tensor


@dataclass(frozen=True)
class Lowest:
    """A metric of which the lowest value over a step or a rollout is reported."""

    value: Tensor


@dataclass(frozen=True)
class Summed:
    """A metric that is no mean: formed of sums over a whole step or rollout, never averaged over parts."""

    sums: Float64[Tensor, " k"]
    """The sums that add up over micro-batches and ranks."""
    summary: Literal["effective_share", "variance", "explained_variance"]
    """The function of `lit_rl.ops` that makes one number of the sums."""


Metric = tuple[Tensor, Tensor] | Highest | Lowest | Summed
"""A mean as numerator and denominator, an extreme, or a summary of sums. All but sums are 0-dim tensors; an extreme of
nothing is +-inf."""

Metrics = dict[str, Metric]

WeightsInside = Annotated[Float[Tensor, "b t"] | None, "the loss multiplies them in itself"]
"""The type of a loss's parameter `weights` where it takes the weights against an engine in itself. Every other loss is
multiplied by them."""


def mean_of(values: Shaped[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """Return a metric: the mean of `values` over the places where `mask` is True."""
    return masked_sum(values.detach().float(), mask), mask.sum().float()


def mean_entropy(entropy: Float[Tensor, "b t"] | None, mask: Bool[Tensor, "b t"]) -> Metrics:
    """Return the metric of that name; none where no entropy was computed."""
    return {} if entropy is None else {"entropy": mean_of(entropy, mask)}
