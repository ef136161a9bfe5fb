"""Losses whose trust region has no edge: the gradient fades as the ratio leaves 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.losses.common import MAX_LOG_RATIO, Advantages, Ratio, Terms, ratio_metrics
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.ranges import GammaShape, Positive
from lit_rl.ops.ratios import token_ratio
from lit_rl.ops.step import Metrics, WeightsInside

MIN_LOG_WEIGHT = math.log(1e-8)
"""VESPO cuts the log of its sequence weight here and at :data:`MAX_LOG_RATIO`; phi is 0 in float32 at both ends."""


def sapo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    temperature_positive: Positive = 1.0,
    temperature_negative: Positive = 1.05,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """SAPO (2511.20347): ``-(4 / tau) sigmoid(tau (r - 1)) A``, a sigmoid gate in place of the clip.

    The slope by ``r`` is ``-A`` at ``r = 1`` and falls off to both sides, faster with a higher ``tau``. Reduce it with
    ``sequence_mean``, as the paper does.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        temperature_positive: ``tau`` where the advantage is positive, above 0.
        temperature_negative: ``tau`` elsewhere, above 0. Higher than the other: negative gradients fade sooner.
        ratio: Level of the ratio: a function of ``lit_rl.ops.ratios``.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    positive = terms.advantages > 0
    tau = torch.where(positive, temperature_positive, temperature_negative).to(terms.advantages.dtype)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return terms.only(-gate * terms.advantages), ratio_metrics(terms)


def vespo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    weights: WeightsInside = None,
    *,
    positive: GammaShape = (2.0, 3.0),
    negative: GammaShape = (3.0, 2.0),
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """VESPO (2602.10693): ``-sg(phi) A lp`` with a Gamma-shaped weight of the whole row, ``phi(1) = 1``.

    ``phi = w^k exp(lambda (1 - w))``, ``w = exp(sum_t m (log r + log u))`` with the token ratio ``r`` and the weight
    ``u`` of the engine mismatch. Sums are cut as in TRL: ``log r`` at +-20, ``log u`` and ``log w`` at log 1e-8 and 20.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        weights: Engine-mismatch weights of tokens: those of whole rows would count once for every token. None: all 1.
        positive: k and lambda where the advantage is 0 or more: k at least 0, lambda above 0.
        negative: k and lambda where the advantage is negative.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    phi = _gamma_weights(terms, weights, positive, negative)
    rows = mask.any(1)
    metrics: Metrics = {
        "vespo/phi_seq_mean": (masked_sum(masked_mean(phi, mask, dim=1), rows), rows.sum().float()),
        **ratio_metrics(terms),
    }
    return terms.only(-phi * terms.advantages * terms.logprobs), metrics


@torch.no_grad()
def _gamma_weights(
    terms: Terms, weights: Tensor | None, positive: Sequence[float], negative: Sequence[float]
) -> Float[Tensor, "b t"]:
    """Return phi of the row at every token; it depends on the sign of the token's advantage. In logs throughout."""
    log_w = masked_sum(terms.log_ratio.clamp(min=-MAX_LOG_RATIO), terms.mask, dim=1)
    if weights is not None:
        log_u = weights.float().log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO)
        log_w = log_w + masked_sum(log_u, terms.mask, dim=1)
    log_w = log_w.clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO).unsqueeze(1)
    k, lam = (torch.where(terms.advantages >= 0, *pair) for pair in zip(positive, negative))
    return (lam + k * log_w - lam * log_w.exp()).exp()
