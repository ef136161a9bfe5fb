"""REINFORCE with a weight on each token: none, the ratio, or a bounded ratio that never drops a token's gradient."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.losses.common import Advantages, Ratio, Terms, ratio_metrics
from lit_rl.ops.ranges import Positive, Share
from lit_rl.ops.ratios import token_ratio
from lit_rl.ops.step import Metrics


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
        ratio: Level of the ratio: a function of ``lit_rl.ops.ratios``.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    return terms.only(-terms.ratio * terms.advantages), ratio_metrics(terms)


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
        ratio: Level of the ratio: a function of ``lit_rl.ops.ratios``.
    """
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    now = terms.ratio.detach()
    metrics = {"cispo_clip_ratio": terms.share((now > cap) & (terms.advantages > 0)), **ratio_metrics(terms)}
    return terms.only(-now.clamp(max=cap) * terms.advantages * terms.logprobs), metrics


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
        clip_low: Distance of the lowest weight from 1, in [0, 1]. 1: no bound.
        clip_high: Distance of the highest weight from 1, above 0. None: ``clip_low``.
        ratio: Level of the ratio: a function of ``lit_rl.ops.ratios``.
    """
    low, high = 1 - clip_low, 1 + (clip_low if clip_high is None else clip_high)
    terms = Terms.of(logprobs, old_logprobs, advantages, mask, ratio)
    now = terms.ratio.detach()
    metrics = {"cispo_clip_ratio": terms.share((now < low) | (now > high)), **ratio_metrics(terms)}
    return terms.only(-now.clamp(low, high) * terms.advantages * terms.logprobs), metrics
