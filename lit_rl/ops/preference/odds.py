"""The odds ratio of two completions: ORPO (2403.07691)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

_HALF = -math.log(2)


def odds_ratio(
    chosen_mean: Float[Tensor, " b"], rejected_mean: Float[Tensor, " b"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """``(-ls(o), o)`` with the log odds ratio ``o = log(odds(chosen) / odds(rejected))``, ``odds(p) = p / (1 - p)``.

    Eqs. 4 and 7 of the paper; the weight and the likelihood term of ORPO are the caller's.

    Args:
        chosen_mean: Log-prob per token of the chosen completion, at most 0: ``log p`` is the mean of its tokens.
        rejected_mean: The same of the rejected one.

    Both are taken as at most ``-eps`` of their dtype, 1.2e-7 in float32: nearer to 0 the probability is 1 there, and
    its odds infinite. No gradient beyond.
    """
    log_odds = _log_odds(chosen_mean) - _log_odds(rejected_mean)
    return -logsigmoid(log_odds), log_odds


def _log_odds(log_p: Tensor) -> Tensor:
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - _log1mexp(log_p)


def _log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x < 0``, without cancellation on either side of ``-log 2``.

    The far branch never sees what is near: ``exp(x)`` may round to 1 there, and its infinite slope times 0 is NaN.
    """
    near = (-torch.expm1(x)).log()
    far = torch.log1p(-x.clamp(max=_HALF).exp())
    return torch.where(x < _HALF, far, near)
