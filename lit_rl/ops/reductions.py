"""Numbers from tokens: masked sums, metrics, totals of an optimizer step, and losses of tokens to one loss.

What stands under a False entry of a mask never counts, be it NaN or infinite, neither in the value nor in the
gradient: it is replaced before the sum, not multiplied by zero after it.

A quantile, a share of tokens or a mean weight that belongs to the method is taken once over an optimizer step, over
all its micro-batches on all ranks, so that no gradient depends on how a batch is cut.

The denominator of a loss belongs to the algorithm and spans the whole optimizer step, every micro-batch on every
rank. Each reduction returns *this micro-batch's share*: the shares of all micro-batches and ranks sum to the value,
so cutting a batch into 8 x 1, 4 x 2 or 1 x 8 gives the same gradient, :func:`local_token_mean` excepted. Code that
averages shares (data-parallel gradient averaging, division by the number of accumulated batches) has to multiply that
factor back in.

Notation: ``l[i,t]`` the loss of token t of row i, ``m[i,t]`` its mask (0 or 1). A micro-batch without a loss token
gives 0, still attached to the graph, so that backward and gradient reduction run on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from lit_rl.ops.traits import ReductionTraits

__all__ = [
    "constant_mean",
    "local_token_mean",
    "sequence_mean",
    "sequence_total",
    "token_mean",
    "token_sum",
    "unmasked_constant_mean",
    "unmasked_sequence_mean",
]


def masked_sum(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum the selected entries over ``dim``, or all. An empty selection gives 0, attached to the graph."""
    selected = x.masked_fill(~mask, 0.0)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Average the selected entries over ``dim``, or all. An empty selection gives 0, attached to the graph."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


@torch.no_grad()
def masked_moments(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float64[Tensor, "3"]:
    """Return number, sum and sum of squares of the selected entries: add these up over micro-batches and ranks.

    What is no mean (a variance, an effective share) is formed of the sums of the whole, never averaged over parts.
    """
    selected = x.double().masked_fill(~mask, 0.0)
    return torch.stack([mask.sum().double(), selected.sum(), selected.square().sum()])


def variance(moments: Float64[Tensor, "3"]) -> Float64[Tensor, ""]:
    """Return the mean squared distance from the mean, from :func:`masked_moments`; NaN of nothing."""
    count, total, squares = moments.unbind()
    return (squares / count - (total / count).square()).clamp(min=0)


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


@dataclass(frozen=True)
class StepTotals:
    """Counts of one optimizer step, over all its micro-batches and all ranks."""

    sequences: Tensor | int
    """Rows, fully masked ones (truncated completions) included, as TRL counts them."""
    tokens: Tensor | int
    """True entries of the loss mask."""
    unmasked_sequences: Tensor | int
    """Rows with a loss token, as verl and OpenRLHF count them."""
    micro_batches: Tensor | int
    """Forward passes, on all ranks."""
    weights: WeightTotals | None = None
    """Sums of the weights of an engine correction. None: they are normalised over the micro-batch at hand."""
    better_tokens: Tensor | int = 0
    """Loss tokens of the rows that a judge found better."""
    observed_tokens: Tensor | int = 0
    """Tokens that an environment wrote in rows with a loss token."""

    @classmethod
    def of(cls, mask: Bool[Tensor, "b t"]) -> "StepTotals":
        """Return the totals of a step that is this one batch on one rank. Elsewhere, sum these over batches and
        ranks."""
        return cls(sequences=mask.shape[0], tokens=mask.sum(), unmasked_sequences=mask.any(1).sum(), micro_batches=1)


@ReductionTraits(adds_rows=True)
def token_mean(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_it m l / max(1, tokens)``: every token weighs the same. DAPO (2503.14476, section 3.3)."""
    return masked_sum(per_token, mask) / _at_least_one(totals.tokens)


@ReductionTraits(adds_rows=False)
def local_token_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals
) -> Float[Tensor, ""]:
    """``sum_it m l / max(1, tokens of this micro-batch) / max(1, micro_batches)``: TRL's ``bnpo``.

    The only reduction that depends on how a step is cut: a token of a micro-batch with few tokens weighs more. It is
    there to repeat runs of others; elsewhere take :func:`token_mean`, which it equals for a step of one micro-batch.
    """
    return masked_mean(per_token, mask) / _at_least_one(totals.micro_batches)


@ReductionTraits(adds_rows=True)
def token_sum(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_it m l``: no denominator, so the gradient grows with the tokens of a step."""
    return masked_sum(per_token, mask)


@ReductionTraits(adds_rows=True)
def sequence_mean(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_i (sum_t m l / max(1, sum_t m)) / max(1, sequences)``: every row weighs the same. GRPO (2402.03300, eq. 3).

    A fully masked row adds 0 and still counts in ``sequences``.
    """
    return masked_mean(per_token, mask, dim=1).sum() / _at_least_one(totals.sequences)


@ReductionTraits(adds_rows=True)
def unmasked_sequence_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals
) -> Float[Tensor, ""]:
    """``sum_i (sum_t m l / max(1, sum_t m)) / max(1, unmasked_sequences)``: :func:`sequence_mean` of the rows in use.

    A fully masked row does not count, as in verl and OpenRLHF: cut completions that are left out of the loss do not
    make the gradient of the others smaller.
    """
    return masked_mean(per_token, mask, dim=1).sum() / _at_least_one(totals.unmasked_sequences)


@ReductionTraits(adds_rows=True)
def sequence_total(per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals) -> Float[Tensor, ""]:
    """``sum_i (sum_t m l) / max(1, sequences)``: the mean over rows of their sums. LUSPO (2602.05261).

    With a loss of whole rows, each row weighs in with its length. A fully masked row counts in ``sequences``.
    """
    return masked_sum(per_token, mask) / _at_least_one(totals.sequences)


@ReductionTraits(adds_rows=True)
def constant_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals, *, length: int
) -> Float[Tensor, ""]:
    """``sum_it m l / (max(1, sequences) * length)``: no weight depends on a row's length. Dr. GRPO (2503.20783).

    Args:
        per_token: Losses.
        mask: Loss mask.
        totals: Of the optimizer step. A fully masked row counts in ``sequences``.
        length: The constant in place of a row's length, usually the longest response allowed. Above 0.
    """
    return masked_sum(per_token, mask) / (_at_least_one(totals.sequences) * length)


@ReductionTraits(adds_rows=True)
def unmasked_constant_mean(
    per_token: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], totals: StepTotals, *, length: int
) -> Float[Tensor, ""]:
    """``sum_it m l / (max(1, unmasked_sequences) * length)``: :func:`constant_mean` of the rows in use.

    Args:
        per_token: Losses.
        mask: Loss mask.
        totals: Of the optimizer step. A fully masked row does not count.
        length: The constant in place of a row's length, usually the longest response allowed. Above 0.
    """
    return masked_sum(per_token, mask) / (_at_least_one(totals.unmasked_sequences) * length)


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
