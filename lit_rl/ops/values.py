"""What a critic learns: the loss of its values, and how much of the returns they explain."""

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from lit_rl.ops.masking import masked_sum
from lit_rl.ops.step import Metrics


def clipped_value_loss(
    values: Float[Tensor, "b t"],
    old_values: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    clip: float | None = 0.2,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """PPO's value loss for each token (2005.12729, appendix A), to be minimised; 0 outside the mask.

    ``max((V - R)^2, (V_clip - R)^2) / 2`` with ``V_clip = clip(V, V_old - clip, V_old + clip)``. A value that has moved
    by more than ``clip`` in the direction of its return has no gradient; one that has moved away from it has.

    Args:
        values: Of the critic now, with gradient.
        old_values: Of the critic that took the rollout.
        returns: What the values are to predict.
        mask: Loss mask. What stands outside it, NaN included, changes nothing.
        clip: How far a value may move in one rollout, at least 0, in units of the reward. None: as far as it likes.

    Returns:
        Losses of tokens, and metrics averaged over the tokens of the mask: ``value/clipfrac_avg`` (share of tokens
        whose clipped error is the larger one), ``value/error`` (squared error), ``value/mean`` and ``return/mean``.
    """
    values = values.float().masked_fill(~mask, 0.0)
    old_values = old_values.detach().float().masked_fill(~mask, 0.0)
    returns = returns.detach().float().masked_fill(~mask, 0.0)
    error = (values - returns).square()
    worst = error
    if clip is not None:
        worst = torch.maximum(error, (values.clamp(old_values - clip, old_values + clip) - returns).square())
    means = {
        "value/clipfrac_avg": (worst > error).float(),
        "value/error": error.detach(),
        "value/mean": values.detach(),
        "return/mean": returns,
    }
    count = mask.sum().float()
    return worst / 2, {name: (masked_sum(value, mask), count) for name, value in means.items()}


def value_sums(
    values: Float[Tensor, "b t"], returns: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float64[Tensor, "5"]:
    """Return the sums for :func:`explained_variance`: add these up over micro-batches and ranks.

    Number of tokens, then sum and sum of squares of the returns, and of ``R - V``.
    """
    returns = returns.detach().double().masked_fill(~mask, 0.0)
    error = returns - values.detach().double().masked_fill(~mask, 0.0)
    count = mask.sum().double()
    return torch.stack([count, returns.sum(), returns.square().sum(), error.sum(), error.square().sum()])


def explained_variance(sums: Float64[Tensor, "5"]) -> Float64[Tensor, ""]:
    """``1 - Var(R - V) / Var(R)``: 1 is perfect, 0 no better than a constant, below 0 worse than that.

    NaN where the returns do not vary, so that there is nothing to explain.
    """
    count, returns, returns_squared, error, error_squared = sums.unbind()
    variance = returns_squared / count - (returns / count).square()
    left = error_squared / count - (error / count).square()
    varies = variance > 1e-12 * returns_squared / count
    return torch.where(varies, 1 - left / variance, torch.nan)
