"""Selections of the loss tokens that are learned from, as subsets of the loss mask.

A selection of tokens is called as ``(entropy (b, t), mask (b, t), [step], **own settings) -> bool (b, t)``.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.reductions import StepTokens, masked_mean


def top_entropy(
    entropy: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    step: StepTokens | None = None,
    *,
    share: float = 0.2,
) -> Bool[Tensor, "b t"]:
    """Keep tokens with an entropy of at least the ``1 - share`` quantile over all loss tokens of the step (2506.01939).

    The quantile interpolates linearly between the two nearest tokens. All tokens that are exactly at the threshold are
    kept.

    Args:
        entropy: Of the policy at each token, in nats.
        mask: Loss mask.
        step: The loss tokens of the whole optimizer step. None: this batch is all of it.
        share: Share of tokens that is kept, in (0, 1].

    Raises:
        ValueError: the share is out of range.
    """
    _check_share(share)
    everything = (StepTokens.of(mask, entropy=entropy) if step is None else step).entropy
    if not len(everything):
        return torch.zeros_like(mask)
    return mask & (entropy.detach().float() >= _quantile(everything, 1 - share))


def top_entropy_per_sequence(
    entropy: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, share: float = 0.2
) -> Bool[Tensor, "b t"]:
    """Keep the ``max(1, floor(share n))`` tokens of highest entropy of a row's n loss tokens; of equals the earlier
    ones.

    LightRFT's reading of the 80/20 rule (2506.01939): every row keeps the same share, whatever its entropy is.

    Args:
        entropy: Of the policy at each token, in nats.
        mask: Loss mask.
        share: Share of tokens that is kept, in (0, 1].

    Raises:
        ValueError: the share is out of range.
    """
    _check_share(share)
    # 0.29 * 100 is just below 29 in floating point.
    count = (mask.sum(1, keepdim=True).double() * share + 1e-9).floor().clamp(min=1)
    order = entropy.detach().masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return mask & (rank < count)


def off_policy_sequence_mask(
    logprobs: Float[Tensor, "b t"],
    sampler_logprobs: Float[Tensor, "b t"],
    advantages: Float[Tensor, "..."],
    mask: Bool[Tensor, "b t"],
    *,
    threshold: float,
) -> Bool[Tensor, "b t"]:
    """Drop rows with a negative advantage that the policy has moved far from: DeepSeek-V3.2 (2512.02556, eq. 9).

    A row is kept if ``A >= 0`` or ``mean_t(sampler_logprobs - logprobs) <= threshold``, the mean being over its loss
    tokens: an estimate of KL(sampler || policy) per token, in nats.

    Args:
        logprobs: Of the policy now; no gradient flows through the decision.
        sampler_logprobs: Of what drew the tokens: the engine, else the policy when the rollout was taken. A NaN token
            (the engine did not score it) adds 0 to the mean.
        advantages: `(b,)`, or `(b, t)`: then the mean over the row's loss tokens decides, so that a row is kept or
            dropped as a whole.
        mask: Loss mask.
        threshold: In nats per token.
    """
    drift = masked_mean((sampler_logprobs - logprobs.detach()).float().nan_to_num(nan=0.0), mask, dim=1)
    if advantages.ndim == 2:
        advantages = masked_mean(advantages, mask, dim=1)
    return mask & ((advantages >= 0) | (drift <= threshold)).unsqueeze(1)


def _quantile(values: Tensor, q: float) -> Tensor:
    """Compute `torch.quantile` without its limit of 2^24 values, and exact where the position is a whole number."""
    position = round(q * (len(values) - 1), 6)
    low = values.kthvalue(math.floor(position) + 1).values
    high = values.kthvalue(math.ceil(position) + 1).values
    return torch.lerp(low, high, position - math.floor(position))


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share} is out of range: allowed is (0, 1], the share of loss tokens that is kept.")
