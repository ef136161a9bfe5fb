"""What losses of preferences share: the logistic loss under wrong labels, and the checks of settings."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_rl.ops.preference.divergences import MAX_EXPONENT


def logistic(z: Float[Tensor, " b"], smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """``-(1 - e) ls(z) - e ls(-z)``: the negative log-likelihood where a share ``e`` of the labels is wrong."""
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def check_smoothing(value: float, *, allow_zero: bool = True, allow_half: bool = True) -> None:
    """Check a label smoothing, the probability that a label is wrong: above 1/2 the data would say the opposite.

    Raises:
        ValueError: it is out of range.
    """
    low, high = value > 0 or (allow_zero and value == 0), value < 0.5 or (allow_half and value == 0.5)
    if not (low and high):
        allowed = f"{'[' if allow_zero else '('}0, 0.5{']' if allow_half else ')'}"
        raise ValueError(f"label_smoothing={value} is out of range: allowed is {allowed}, the share of wrong labels.")


def check_not_negative(name: str, value: float) -> None:
    """Check a setting of a preference loss.

    Raises:
    ValueError: the setting of this name is below 0, or NaN.
    """
    if not value >= 0:
        raise ValueError(f"{name}={value} is out of range: it has to be at least 0.")


def alpha_reward(mean: Float[Tensor, " b"], alpha: float) -> Float[Tensor, " b"]:
    """Return AlphaPO's reward (2501.03884) ``(1 - p^-alpha) / alpha`` of ``p = exp(mean)``; the log-prob itself at 0.

    From the log-prob, not from p: that is 0 in float32 from -104 on, and its negative power infinite.
    """
    if abs(alpha) < 1e-6:
        return mean
    return -torch.expm1((-alpha * mean).clamp(max=MAX_EXPONENT)) / alpha
