"""Losses that drop a token by the change of its probability, not by its ratio.

The ratio of a rare token is large after a harmless change, and that of a likely one stays near 1 through a large one.
A probability is that of the drawn token against all others together (binary), so the whole vocabulary is not needed.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.losses.common import Advantages, Terms, beyond, clip_metrics
from lit_rl.ops.ranges import AboveOne, NotNegative, Positive, Share
from lit_rl.ops.ratios import token_ratio
from lit_rl.ops.step import Metrics


def dppo_tv_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    threshold_low: Share = 0.2,
    threshold_high: Share | None = None,
    cap: AboveOne = 20.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """DPPO with the binary total variation (2602.04879, eq. 11 to 13): ``-A sg(min(r, cap)) lp`` on the tokens kept.

    Dropped are tokens with ``A > 0`` and ``p - p_old > threshold_high``, and with ``A < 0`` and
    ``p - p_old < -threshold_low``: they have gone far enough already. The ``clip_ratio/*`` metrics are their shares.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without; the paper means the engine that sampled.
        advantages: One for each row or for each token.
        mask: Loss mask.
        threshold_low: How far a probability may fall, in (0, 1].
        threshold_high: How far a probability may rise, in (0, 1]. None: ``threshold_low``.
        cap: Highest weight of a token, above 1; low caps bias the gradient (section 5.4).
    """
    high = threshold_low if threshold_high is None else threshold_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    return _weighted(terms, *beyond(_change(terms), terms, -threshold_low, high), cap=cap)


def dppo_kl_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    threshold_low: Positive = 0.05,
    threshold_high: Positive | None = None,
    cap: AboveOne = 20.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """DPPO with the binary KL (2602.04879, eq. 11, 12, 14): ``-A sg(min(r, cap)) lp`` on the tokens kept.

    ``kl = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``. Dropped are tokens with ``A > 0``,
    ``p > p_old`` and ``kl > threshold_high``, and with ``A < 0``, ``p < p_old`` and ``kl > threshold_low``. The
    ``clip_ratio/*`` metrics are their shares.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without; the paper means the engine that sampled.
        advantages: One for each row or for each token.
        mask: Loss mask.
        threshold_low: Highest KL of a token whose probability fell, in nats, above 0.
        threshold_high: Highest KL of a token whose probability rose, in nats, above 0. None: ``threshold_low``.
        cap: Highest weight of a token, above 1; low caps bias the gradient (section 5.4).
    """
    high = threshold_low if threshold_high is None else threshold_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    signed = _change(terms).sign() * _binary_kl(terms)
    return _weighted(terms, *beyond(signed, terms, -threshold_low, high), cap=cap)


def prime_rl_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    threshold_low: Share = 0.2,
    threshold_high: Share | None = None,
    kl_tau: NotNegative = 1e-3,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """The default loss of prime-rl: ``-keep A r + kl_tau (log r)^2``, with the tokens that :func:`dppo_tv_loss` keeps.

    The ratio is not capped (but for ``MAX_LOG_RATIO``), and the squared log ratio acts on every loss token.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without; prime-rl takes the engine that sampled.
        advantages: One for each row or for each token.
        mask: Loss mask.
        threshold_low: How far a probability may fall, in (0, 1].
        threshold_high: How far a probability may rise, in (0, 1]. None: ``threshold_low``.
        kl_tau: Weight of the squared log ratio, at least 0.
    """
    high = threshold_low if threshold_high is None else threshold_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    return _penalised(terms, *beyond(_change(terms), terms, -threshold_low, high), kl_tau=kl_tau)


def prime_rl_ipo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    threshold: Share = 0.1,
    kl_tau: NotNegative = 1e-3,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """prime-rl's ``ipo``, not Identity-PO: ``-keep A r + kl_tau (log r)^2``, kept: ``|p - p_old| <= threshold``.

    A token that has moved too far is dropped whatever the sign of its advantage. ``clip_ratio/low_*`` are the shares
    that fell too far, ``clip_ratio/high_*`` those that rose too far.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without; prime-rl takes the engine that sampled.
        advantages: One for each row or for each token.
        mask: Loss mask.
        threshold: How far a probability may move, in (0, 1].
        kl_tau: Weight of the squared log ratio, at least 0.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    change = _change(terms)
    return _penalised(terms, change < -threshold, change > threshold, kl_tau=kl_tau)


@torch.no_grad()
def _change(terms: Terms) -> Tensor:
    """Return ``p - p_old``."""
    return terms.logprobs.exp() - terms.old_logprobs.exp()


@torch.no_grad()
def _binary_kl(terms: Terms) -> Tensor:
    p_old = terms.old_logprobs.exp()
    rest, rest_old = ((-torch.expm1(lp)).clamp(min=0) + 1e-8 for lp in (terms.logprobs, terms.old_logprobs))
    return p_old * (terms.old_logprobs - terms.logprobs) + (1 - p_old) * (rest_old / rest).log()


def _weighted(terms: Terms, low: Tensor, high: Tensor, *, cap: float) -> tuple[Tensor, Metrics]:
    weight = terms.ratio.detach().clamp(max=cap)
    loss = (-weight * terms.advantages * terms.logprobs).masked_fill(low | high, 0.0)
    return terms.only(loss), clip_metrics(terms, low, high)


def _penalised(terms: Terms, low: Tensor, high: Tensor, *, kl_tau: float) -> tuple[Tensor, Metrics]:
    surrogate = (-terms.ratio * terms.advantages).masked_fill(low | high, 0.0)
    log_ratio = token_ratio(terms.logprobs, terms.old_logprobs, terms.mask)  # not cut: the penalty pulls it back
    return terms.only(surrogate + kl_tau * log_ratio.square()), clip_metrics(terms, low, high)
