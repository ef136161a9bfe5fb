"""Importance ratios and policy-gradient losses, not yet reduced: the caller adds a KL term and chooses the denominator.

All losses share the signature ``loss(logprobs, old_logprobs, advantages, mask, [weights], [step], *, settings)`` and
return losses of tokens ``(b, t)``, to be minimised, 0 outside the mask, with their metrics. Advantages are one a row
or one a token. What stands outside the mask, NaN included, changes neither value nor gradient. A loss of whole rows
gives every token the value of its row, so that :func:`~lit_rl.ops.reductions.sequence_mean` is the mean over rows.

Notation: ``r`` the importance ratio, of tokens where a loss has no ``ratio`` setting, ``lp`` and ``lp_old``
log-probs, ``p`` and ``p_old`` probabilities, ``A`` the advantage, ``sg`` without gradient.

A ratio function, ``ratio(logprobs, old_logprobs, mask) -> (b, t)``, is the log of the importance ratio of the policy
to the one that took the rollout: float32, 0 outside the mask; a level of whole rows gives every token of a row the
row's value. Nothing is clamped there: the losses do it once (:data:`MAX_LOG_RATIO`). With ``d[i,t] = logprobs -
old_logprobs``, ``m[i,t]`` the loss mask (0 or 1) and ``n_i = sum_t m``:

    level            log ratio at token t of row i                     used by
    token            d[i,t]                                            PPO, GRPO
    sequence_mean    sum_t m d / n_i                                   GSPO, LUSPO
    sequence_sum     sum_t m d                                         RLOO
    sequence_token   value of sequence_mean, gradient of its token     GSPO-token

The losses, by what happens to a token whose ratio has left its range:

    clipped      no gradient beyond a bound on the ratio, log ratio or log-prob: clipped_policy_loss, up_grpo_loss,
                 gmpo_loss, cpgd_loss; fipo_loss, with a weight on each token
    weighted     REINFORCE with a weight on each token, which a bound cuts and never drops: reinforce_loss,
                 importance_weighted_loss, cispo_loss, cispo_two_sided_loss
    moment       dropped for the largest log ratios of the step, until the mean square of the others is low: m2po_loss
    divergence   dropped by the change of its probability, not by its ratio: dppo_tv_loss, dppo_kl_loss, prime_rl_loss,
                 prime_rl_ipo_loss. The ratio of a rare token is large after a harmless change, and that of a likely one
                 stays near 1 through a large one. A probability is that of the drawn token against all others together
                 (binary), so the whole vocabulary is not needed.
    soft         a trust region without an edge: the gradient fades as the ratio leaves 1: sapo_loss, vespo_loss;
                 or is turned back by a penalty on the squared log ratio: dro_loss
    covariance   the entropy is held up where it is lost, at tokens that are likely and good (2505.22617):
                 clip_cov_loss, kl_cov_loss. The change of entropy in a step is minus the covariance of log-prob and
                 advantage; a token's part of it is ``cov = (A - mean A) (lp - mean lp)``, means over the loss tokens of
                 the step.

    ranked       the rows of a prompt are told apart by their log-probs, as a classifier does: real_loss

Metrics are pairs ``(numerator, denominator)`` over loss tokens, or extremes over rows (:mod:`lit_rl.ops.reductions`).
Shares count tokens also where the ratio is the row's. Losses without a bound have the last two only:

    clip_ratio/low_mean     share beyond the lower bound with a negative advantage: no gradient there
    clip_ratio/low_min      the same share of one row: the lowest of all rows
    clip_ratio/high_mean    share beyond the upper bound with a positive advantage: no gradient there
    clip_ratio/high_max     the same share of one row: the highest of all rows
    clip_ratio/region_mean  beyond either of them
    ratio_mean              mean ratio of the policy to the one that drew the tokens; 1 on policy
    approx_kl               mean of ``ratio - 1 - log ratio``: KL(old policy || policy)

Some have one of their own:

    clip_ratio/delta_mean   share that ``delta`` stops: ratio above it, negative advantage
    cispo_clip_ratio        share whose weight is cut; one-sided CISPO counts positive advantages only, as TRL does
    fipo/weight_mean        mean weight of the tokens
    m2po/dropped            share of tokens that the bound on the second moment drops
    vespo/phi_seq_mean      mean over rows of the weight phi
    clip_cov/share          share of tokens dropped for their covariance
    kl_cov/share            share of tokens with the KL penalty
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rl.ops.advantages import group_max, group_sum, renumber
from lit_rl.ops.ranges import Above, AboveOne, Band, ClipRange, GammaShape, NotNegative, Positive, Share, WeightRange
from lit_rl.ops.reductions import (
    Highest,
    Lowest,
    Metrics,
    StepTokens,
    WeightsInside,
    masked_mean,
    masked_sum,
    mean_of,
)
from lit_rl.ops.returns import return_to_go
from lit_rl.ops.traits import PolicyLossTraits

__all__ = [
    "MAX_LOG_RATIO",
    "cispo_loss",
    "cispo_two_sided_loss",
    "clip_cov_loss",
    "clipped_policy_loss",
    "cpgd_loss",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "dro_loss",
    "fipo_loss",
    "gmpo_loss",
    "importance_weighted_loss",
    "kl_cov_loss",
    "m2po_loss",
    "prime_rl_ipo_loss",
    "prime_rl_loss",
    "real_loss",
    "reinforce_loss",
    "sapo_loss",
    "sequence_mean_ratio",
    "sequence_sum_ratio",
    "sequence_token_ratio",
    "token_ratio",
    "up_grpo_loss",
    "vespo_loss",
]


MAX_LOG_RATIO = 20.0
"""The bound on log ratios (against an engine also below, at -20), with no gradient beyond: float32 overflows at e^88,
the square of a ratio has to fit too, and infinity times 0 would be NaN in the backward pass."""


def token_ratio(
    logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``d[i,t]``: each token by itself, as in PPO (1707.06347, section 3)."""
    return (logprobs.float() - old_logprobs.float()).masked_fill(~mask, 0.0)


def sequence_mean_ratio(
    logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``sum_t m d / max(1, n_i)``: the log of the geometric mean of the token ratios. GSPO (2507.18071, eq. 7).

    Ratios are nearer to 1 than those of tokens, so the clip range is far smaller: GSPO takes 3e-4 and 4e-4.
    """
    return _to_tokens(masked_mean(logprobs.float() - old_logprobs.float(), mask, dim=1), mask)


def sequence_sum_ratio(
    logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``sum_t m d``: the log ratio of the probabilities of the whole response, as TRL's RLOO has it (2402.14740).

    It is the ratio that makes an average over responses unbiased, and its spread grows with their length.
    """
    return _to_tokens(masked_sum(logprobs.float() - old_logprobs.float(), mask, dim=1), mask)


def sequence_token_ratio(
    logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``logprobs - sg(logprobs) + sg(sequence_mean)``, sg: without gradient. GSPO-token (2507.18071, eq. 14).

    The value is that of :func:`sequence_mean_ratio`; a gradient goes to the token's own log-prob only, so that
    advantages may differ between the tokens of a row.
    """
    now = logprobs.float()
    value = sequence_mean_ratio(now.detach(), old_logprobs, mask)
    return (now - now.detach()).masked_fill(~mask, 0.0) + value


def _to_tokens(per_row: Float[Tensor, " b"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    return per_row.unsqueeze(1).expand_as(mask).masked_fill(~mask, 0.0)


Advantages = Float[Tensor, " b"] | Float[Tensor, "b t"]
"""Advantages: one for each row, shared by its tokens, or one for each token."""

Ratio = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A ratio function, such as :func:`token_ratio`."""


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


def _upper_bound(clip_low: float, clip_high: float | None) -> float:
    """Return the upper bound of the clip on the ratio."""
    return 1 + (clip_low if clip_high is None else clip_high)


AboveUpperBound = Annotated[float, Above(_upper_bound)]
"""A bound on the ratio that leaves the clip as it is."""


@PolicyLossTraits(zero_without_advantage=True)
def clipped_policy_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    clip_high: Positive | None = None,
    delta: AboveUpperBound | None = None,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """PPO's clipped surrogate (1707.06347, eq. 7): ``-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    With the ratio of tokens it is the loss of GRPO, Dr. GRPO and DAPO; of sequence means that of GSPO (2507.18071,
    eq. 5) and, reduced by ``sequence_total``, of LUSPO (2602.05261); of sequence sums that of RLOO in TRL.
    ``delta`` is the dual clip (1912.09729) under INTELLECT-2's name (2505.07291): where the advantage is negative, the
    loss stops at ``delta |A|``.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound on the ratio from 1, in (0, 1].
        clip_high: Distance of the upper bound on the ratio from 1, above 0. None: ``clip_low``. DAPO has 0.28.
        delta: Bound on the ratio where the advantage is negative, and the plain clip has none. Above ``1 + clip_high``;
            verl's dual clip takes 3. None: no bound.
        ratio: Level of the ratio, such as ``token_ratio`` or ``sequence_mean_ratio``.
    """
    clip_high = clip_low if clip_high is None else clip_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    clipped = terms.ratio.clamp(1 - clip_low, 1 + clip_high)
    capped = terms.ratio if delta is None else terms.ratio.clamp(max=delta)
    loss = -torch.minimum(capped * terms.advantages, clipped * terms.advantages)
    # TRL counts clips of the capped ratio, which is the same count for every delta above 1 + clip_high.
    metrics = clip_metrics(terms, *beyond(terms.ratio, terms, 1 - clip_low, 1 + clip_high))
    if delta is not None:
        metrics["clip_ratio/delta_mean"] = _delta_share(terms, delta)
    return terms.only(loss), metrics


@PolicyLossTraits(zero_without_advantage=True)
def up_grpo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    delta: AboveOne | None = 3.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """UP-GRPO (2607.06987, eq. 14): an unbounded positive side, the clipped surrogate on the negative one.

    ``-A exp(lp - sg(lp))`` where ``A > 0``: value -A and the gradient of REINFORCE, whatever the ratio.
    ``-max(min(r, delta), 1 - clip_low) A`` elsewhere, which is the dual clip: its upper bound acts on no bad token.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound on the ratio from 1, in (0, 1].
        delta: Bound on the ratio where the advantage is negative (dual clip, 1912.09729), above 1. None: no bound.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    anchored = (terms.logprobs - terms.logprobs.detach()).exp()
    capped = terms.ratio if delta is None else terms.ratio.clamp(max=delta)
    loss = -torch.where(terms.advantages > 0, anchored, capped.clamp(min=1 - clip_low)) * terms.advantages
    metrics = clip_metrics(terms, *beyond(terms.ratio, terms, 1 - clip_low, math.inf))
    if delta is not None:
        metrics["clip_ratio/delta_mean"] = _delta_share(terms, delta)
    return terms.only(loss), metrics


@PolicyLossTraits(zero_without_advantage=True)
def fipo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    clip_high: Positive | None = None,
    half_life: Positive = 32.0,
    weight_range: WeightRange = (1.0, 1.2),
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """FIPO (2603.19835): the clipped surrogate, with a weight for what the policy did after a token.

    ``sg(f_t)`` times :func:`clipped_policy_loss`, ``f_t = clip(exp(sum_{k >= t} g^(k - t) d_k), *weight_range)`` with
    the log ratio ``d`` of tokens and ``g = 2^(-1 / half_life)``. A token whose continuation has become likelier
    weighs more. Masked tokens add nothing and take no time.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound on the ratio from 1, in (0, 1].
        clip_high: Distance of the upper bound on the ratio from 1, above 0. None: ``clip_low``.
        half_life: Tokens after which a log ratio counts half, above 0.
        weight_range: Lowest and highest weight of a token: the lowest in (0, 1], the highest at least 1.
    """
    loss, metrics = clipped_policy_loss(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )
    with torch.no_grad():
        later = return_to_go(token_ratio(logprobs, old_logprobs, mask), mask, gamma=2 ** (-1 / half_life))
        weight = later.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(*weight_range)
    return loss * weight, {"fipo/weight_mean": mean_of(weight, mask), **metrics}


@PolicyLossTraits(zero_without_advantage=True)
def gmpo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Positive = 0.4,
    clip_high: Positive | None = None,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """GMPO (2507.20673): the geometric mean of the token ratios of a row, each clipped in log space first.

    ``-A exp(sum_t m w' / n_i)`` at every token of row i, with ``w = log r`` of the token and ``w' = min(w, clip_high)``
    where ``A > 0``, else ``max(w, -clip_low)``. Reduce it with ``sequence_mean``, the average over rows of the paper.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: How far the log ratio may fall, above 0: the bound on the ratio is ``exp(-clip_low)``.
        clip_high: How far the log ratio may rise, above 0. None: ``clip_low``.
    """
    clip_high = clip_low if clip_high is None else clip_high
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    w = terms.log_ratio
    one_sided = torch.where(terms.advantages > 0, w.clamp(max=clip_high), w.clamp(min=-clip_low))
    loss = -masked_mean(one_sided, mask, dim=1).exp().unsqueeze(1) * terms.advantages
    return terms.only(loss), clip_metrics(terms, *beyond(w, terms, -clip_low, clip_high))


@PolicyLossTraits(zero_without_advantage=True)
def cpgd_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    clip_high: Positive | None = None,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """The policy-gradient term of CPGD (2505.12504): REINFORCE with the log-prob clipped, so no ratio in the gradient.

    ``-A min(lp, lp_old + log(1 + clip_high))`` where ``A > 0``, else ``-A max(lp, lp_old + log(1 - clip_low))``. The
    paper adds a KL term to the old policy, which is a term of its own here.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound on the ratio from 1, in (0, 1]. 1: no bound.
        clip_high: Distance of the upper bound on the ratio from 1, above 0. None: ``clip_low``.
    """
    clip_high = clip_low if clip_high is None else clip_high
    lowest, highest = math.log1p(-clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    lp, old = terms.logprobs, terms.old_logprobs
    bounded = torch.where(terms.advantages > 0, torch.minimum(lp, old + highest), torch.maximum(lp, old + lowest))
    return terms.only(-bounded * terms.advantages), clip_metrics(terms, *beyond(lp - old, terms, lowest, highest))


@torch.no_grad()
def _delta_share(terms: Terms, delta: float) -> tuple[Tensor, Tensor]:
    return terms.share((terms.ratio > delta) & (terms.advantages < 0))


@PolicyLossTraits(zero_without_advantage=True)
def reinforce_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """REINFORCE (Williams, 1992): ``-lp A``, without ratio or clip. GPG (2504.02546) is this with its own advantage.

    Off policy it is biased: take one optimizer step a rollout, or a correction of the engine mismatch for its weights.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, for the metrics only.
        advantages: One for each row or for each token.
        mask: Loss mask.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    return terms.only(-terms.logprobs * terms.advantages), ratio_metrics(terms)


@PolicyLossTraits(zero_without_advantage=True)
def importance_weighted_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """REINFORCE with importance weights: ``-r A``, without clip. The surrogate that PPO clips (1707.06347, eq. 6).

    The gradient, ``-r A grad lp``, is unbounded in ``r``: with ``sequence_sum`` unbiased, and of high variance.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        ratio: Level of the ratio, such as ``token_ratio`` or ``sequence_mean_ratio``.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    return terms.only(-terms.ratio * terms.advantages), ratio_metrics(terms)


@PolicyLossTraits(zero_without_advantage=True)
def cispo_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    cap: Positive = 5.0,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """CISPO as ScaleRL (2510.13786) and TRL have it: ``-sg(min(r, cap)) A lp``; the cap is a ratio, not a distance.

    A token keeps its gradient however large its ratio. :func:`cispo_two_sided_loss` is the form of MiniMax-M1.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        cap: Highest weight of a token, above 0. ScaleRL takes 4 to 8. TRL's name for it is ``epsilon_high``.
        ratio: Level of the ratio, such as ``token_ratio`` or ``sequence_mean_ratio``.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    now = terms.ratio.detach()
    metrics = {"cispo_clip_ratio": terms.share((now > cap) & (terms.advantages > 0)), **ratio_metrics(terms)}
    return terms.only(-now.clamp(max=cap) * terms.advantages * terms.logprobs), metrics


@PolicyLossTraits(zero_without_advantage=True)
def cispo_two_sided_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    clip_low: Share = 0.2,
    clip_high: Positive | None = None,
    ratio: Ratio = token_ratio,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """CISPO of MiniMax-M1 (2506.13585, eq. 4): ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A lp``, as in verl.

    The paper leaves the lower side open (``clip_low`` 1) and tunes the upper one.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        clip_low: Distance of the lower bound on the ratio from 1, in (0, 1]. 1: no bound.
        clip_high: Distance of the upper bound on the ratio from 1, above 0. None: ``clip_low``.
        ratio: Level of the ratio, such as ``token_ratio`` or ``sequence_mean_ratio``.
    """
    low, high = 1 - clip_low, 1 + (clip_low if clip_high is None else clip_high)
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    now = terms.ratio.detach()
    metrics = {"cispo_clip_ratio": terms.share((now < low) | (now > high)), **ratio_metrics(terms)}
    return terms.only(-now.clamp(low, high) * terms.advantages * terms.logprobs), metrics


@PolicyLossTraits(zero_without_advantage=True)
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


@PolicyLossTraits(zero_without_advantage=True)
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


@PolicyLossTraits(zero_without_advantage=True, but_for="kl_tau")
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


@PolicyLossTraits(zero_without_advantage=True, but_for="kl_tau")
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


MIN_LOG_WEIGHT = math.log(1e-8)
"""VESPO cuts the log of its sequence weight here and at :data:`MAX_LOG_RATIO`; phi is 0 in float32 at both ends."""


@PolicyLossTraits(zero_without_advantage=True)
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
        ratio: Level of the ratio, such as ``token_ratio`` or ``sequence_mean_ratio``.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    positive = terms.advantages > 0
    tau = torch.where(positive, temperature_positive, temperature_negative).to(terms.advantages.dtype)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return terms.only(-gate * terms.advantages), ratio_metrics(terms)


@PolicyLossTraits(zero_without_advantage=False)
def dro_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    *,
    beta: Positive = 1.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """DRO by tokens, as verl has it: ``-(lp A - beta / 2 (lp - lp_old)^2)``, no ratio and no clip.

    The slope is ``-(A - beta (lp - lp_old))``: a token is drawn to the log ratio ``A / beta`` and no further, so a
    penalty stands where others have a bound. The paper's (2405.19107) is of whole responses, with a learned value for
    its baseline.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        beta: Weight of the squared log ratio, above 0, in units of the advantage. With 1 a token of advantage 1 is
            drawn one nat up.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    log_ratio = token_ratio(terms.logprobs, terms.old_logprobs, mask)  # not cut: the penalty pulls it back
    loss = -terms.logprobs * terms.advantages + beta / 2 * log_ratio.square()
    return terms.only(loss), ratio_metrics(terms)


@PolicyLossTraits(zero_without_advantage=True)
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


@PolicyLossTraits(zero_without_advantage=False)
def clip_cov_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    step: StepTokens | None = None,
    *,
    clip_range: ClipRange = (0.2, 0.2),
    share: Share = 2e-4,
    band: Band = (1.0, 5.0),
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """Clip-Cov (2505.22617): the clipped surrogate, with a few tokens of high covariance dropped at random.

    Each of the tokens with ``band[0] < cov < band[1]`` that the clip leaves is dropped with the probability at which
    ``max(1, share * tokens of the step)`` of them go. How many a step drops is therefore right on average only, but for
    every cut into micro-batches. The draw is torch's default generator, whose state checkpoints hold.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        step: Tokens of the optimizer step. None: this batch is the whole step.
        clip_range: Distances of the lower and of the upper bound on the ratio from 1.
        share: Share of the tokens of a step to drop, in (0, 1].
        band: Lowest and highest covariance of a token that may be dropped.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    step = _whole_step(terms, step)
    bounds = 1 - clip_range[0], 1 + clip_range[1]
    clipped = terms.ratio.clamp(*bounds)
    loss = -torch.minimum(terms.ratio * terms.advantages, clipped * terms.advantages)
    low, high = beyond(terms.ratio, terms, *bounds)
    cov, step_cov = _covariances(terms, step)
    step_ratio = (step.logprobs - step.old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    step_low, step_high = beyond(step_ratio, step, *bounds)
    candidates = _within(step_cov, band) & ~(step_low | step_high)
    chance = _count(share, step_cov) / candidates.sum().clamp(min=1)
    dropped = _within(cov, band) & ~(low | high) & (torch.rand_like(cov) < chance)
    metrics: Metrics = {"clip_cov/share": terms.share(dropped), **clip_metrics(terms, low, high)}
    return terms.only(loss.masked_fill(dropped, 0.0)), metrics


@PolicyLossTraits(zero_without_advantage=False)
def kl_cov_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    step: StepTokens | None = None,
    *,
    share: Share = 2e-4,
    kl_coef: NotNegative = 1.0,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """KL-Cov (2505.22617): ``-r A``, plus ``kl_coef |lp - lp_old|`` on the tokens with the highest covariance.

    These are the top ``max(1, share * tokens of the step)``, and whatever ties with the last of them. Nothing is
    clipped.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        step: Tokens of the optimizer step. None: this batch is the whole step.
        share: Share of the tokens of a step that are penalised, in (0, 1].
        kl_coef: Weight of the penalty, at least 0. The paper takes 1; the example configs of verl take 0.1.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    cov, step_cov = _covariances(terms, _whole_step(terms, step))
    chosen = cov >= _top_threshold(step_cov, share)
    penalty = token_ratio(terms.logprobs, terms.old_logprobs, mask).abs().masked_fill(~chosen, 0.0)
    loss = -terms.ratio * terms.advantages + kl_coef * penalty
    return terms.only(loss), {"kl_cov/share": terms.share(chosen), **ratio_metrics(terms)}


@PolicyLossTraits(zero_without_advantage=False)
def m2po_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    step: StepTokens | None = None,
    *,
    threshold: Positive = 0.04,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """M2PO (2510.01161): ``-r A`` without the tokens of largest ``|log r|``, so many that the others' mean square of
    ``log r`` is at most ``threshold``.

    The bound is on the tokens of the step together, not on each: while the policy is near nothing is dropped, and far
    off policy few tokens are. A dropped token stays in the denominator.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, without.
        advantages: One for each row or for each token.
        mask: Loss mask.
        step: Tokens of the optimizer step. None: this batch is the whole step.
        threshold: Highest mean square of the log ratios that stay, above 0.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    whole = _whole_step(terms, step)
    cut = _moment_cut((whole.logprobs - whole.old_logprobs).square(), threshold)
    dropped = token_ratio(terms.logprobs.detach(), terms.old_logprobs, mask).square() > cut
    loss = (-terms.ratio * terms.advantages).masked_fill(dropped, 0.0)
    return terms.only(loss), {"m2po/dropped": terms.share(dropped), **ratio_metrics(terms)}


@PolicyLossTraits(zero_without_advantage=True)
def real_loss(
    logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    advantages: Advantages,
    mask: Bool[Tensor, "b t"],
    group_id: Int[Tensor, " b"] | None = None,
    *,
    temperature: Positive = 0.5,
) -> tuple[Float[Tensor, "b t"], Metrics]:
    """REAL (2602.05630): rewards as labels, ``log(1 + sum_+ e^(-s / tau)) + log(1 + sum_- e^(s / tau))`` of a prompt.

    ``s`` is the mean log-prob of a row; the sums are over the rows of the prompt with a positive and with a negative
    advantage. The slope of a row is at most ``1 / tau``, however the rewards are spread: largest for the good row that
    is least likely, and for the bad one that is likeliest. There is no ratio. Every token of a row has the loss of its
    group, so that ``sequence_mean`` is the mean over groups of one size. A row without an advantage takes no part, and
    has loss 0; so has one below 1e-5 of its group's largest, as a mean is rounded.

    Args:
        logprobs: Of the policy now, with gradient.
        old_logprobs: Of the policy that took the rollout, for the metrics only.
        advantages: One for each row, whose sign is its label, or for each token: then the sign of their mean.
        mask: Loss mask.
        group_id: Of each row: the prompt; rows of a group stand in one batch. None: all rows are of one prompt.
        temperature: ``tau``, above 0, in nats per token. 0.5 is a choice of this library.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask)
    rows = mask.any(1)
    index = renumber(torch.zeros_like(rows, dtype=torch.long) if group_id is None else group_id)
    score = masked_mean(terms.logprobs, mask, dim=1) / temperature
    advantage = masked_mean(terms.advantages, mask, dim=1)
    label = advantage.sign().masked_fill(advantage.abs() <= 1e-5 * group_max(advantage.abs(), index), 0.0)
    losses = _log_one_plus_sum(-score, rows & (label > 0), index) + _log_one_plus_sum(score, rows & (label < 0), index)
    return terms.only(losses.masked_fill(label == 0, 0.0).unsqueeze(1).expand_as(mask)), ratio_metrics(terms)


def _log_one_plus_sum(
    exponents: Float[Tensor, " b"], counted: Bool[Tensor, " b"], index: Int[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Return ``log(1 + sum e^x)`` over the counted rows of each row's group."""
    known = exponents.masked_fill(~counted, -torch.inf)
    top = group_max(known.detach(), index).clamp(min=0.0)
    return (torch.expm1(-top) + group_sum((known - top).exp(), index)).log1p() + top


def _whole_step(terms: Terms, step: StepTokens | None) -> StepTokens:
    if step is not None:
        return step
    return StepTokens.of(
        terms.mask, logprobs=terms.logprobs, old_logprobs=terms.old_logprobs, advantages=terms.advantages
    )


@torch.no_grad()
def _covariances(terms: Terms, step: StepTokens) -> tuple[Float[Tensor, "b t"], Float[Tensor, " n"]]:
    """Return covariances of the tokens of this batch, and of all tokens of the step. NaN in a step without tokens."""
    mean_advantage, mean_logprob = step.advantages.mean(), step.logprobs.mean()
    return (
        (terms.advantages - mean_advantage) * (terms.logprobs - mean_logprob),
        (step.advantages - mean_advantage) * (step.logprobs - mean_logprob),
    )


def _within(cov: Tensor, band: Sequence[float]) -> Tensor:
    return (cov > band[0]) & (cov < band[1])


def _count(share: float, values: Float[Tensor, " n"]) -> int:
    return max(1, int(share * values.numel()))


def _top_threshold(values: Float[Tensor, " n"], share: float) -> Tensor:
    """Return the middle between the last value of the top share and the next: log-probs of two passes differ by
    rounding."""
    count = _count(share, values)
    if values.numel() <= count:
        return values.new_tensor(-torch.inf)
    top = values.topk(count + 1).values
    return (top[-1] + top[-2]) / 2


@torch.no_grad()
def _moment_cut(squares: Float[Tensor, " n"], bound: float) -> Tensor:
    """Return a number between the kept squares and the dropped ones, so that the mean of the kept ones is at most the
    bound; -inf where the lowest is above it, inf where all are kept. Equal squares are kept or dropped together."""
    ordered = squares.sort().values.double()
    counts = torch.arange(1, len(ordered) + 1, device=squares.device)
    is_last = torch.nn.functional.pad(ordered[1:] > ordered[:-1], (0, 1), value=True)[: len(ordered)]
    fits = is_last & (ordered.cumsum(0) / counts <= bound)
    kept = torch.nn.functional.pad(counts * fits, (1, 0)).max()
    edges = torch.nn.functional.pad(ordered, (1, 1), value=torch.inf)
    edges[0] = -torch.inf
    return (edges[kept] + edges[kept + 1]) / 2
