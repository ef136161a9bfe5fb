"""What an f-divergence makes of a log ratio: its score ``f'(pi / ref)``, without constants (2309.16240, Table 1).

DPO solves "reward less beta times a divergence from the reference". With the reverse KL the reward of a completion is
beta times its log ratio; with another f-divergence it is beta times another increasing function of it, given here.

All share the signature ``divergence(rho) -> score``, of any shape, and are 0 at ``rho = 0`` with slope 1 there, except
:func:`js_divergence`, whose slope is 1/2. Exponents are cut at :data:`MAX_EXPONENT`, with no gradient beyond.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

MAX_EXPONENT = 80.0
"""float32 overflows at e^88, and the difference of two infinite scores would be NaN."""

_LIMIT = 1e-6
"""Nearer to 1 than this, alpha is 1: the quotient has no digits left in float32."""


def reverse_kl(rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``rho``: KL(policy || reference), the divergence of DPO (2305.18290)."""
    return rho


def forward_kl(rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``1 - exp(-rho)``: KL(reference || policy). Below 1; losing probability costs exponentially."""
    return -torch.expm1((-rho).clamp(max=MAX_EXPONENT))


def js_divergence(rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``log 2 + ls(rho)``: Jensen-Shannon. Below log 2; near ``rho + log 2`` where the policy has lost probability."""
    return math.log(2) + logsigmoid(rho)


def alpha_divergence(rho: Float[Tensor, "*shape"], *, alpha: float = 0.5) -> Float[Tensor, "*shape"]:
    """``(exp((alpha - 1) rho) - 1) / (alpha - 1)``: from the forward KL at 0 to the reverse KL at 1.

    Args:
        rho: Log ratio.
        alpha: Any finite number, as in TRL 1.16: 1 less the alpha of the paper. Within 1e-6 of 1 it is 1, where the
            score is ``rho``.

    Raises:
        ValueError: alpha is not finite.
    """
    if not math.isfinite(alpha):
        raise ValueError(f"alpha={alpha} is out of range: it has to be a finite number; 1 is the reverse KL.")
    order = alpha - 1
    if abs(order) < _LIMIT:
        return rho
    return torch.expm1((order * rho).clamp(max=MAX_EXPONENT)) / order
