"""Estimators of KL(policy || reference) from one sampled token: Schulman, "Approximating KL divergence" (2020).

All share the signature ``kl(logprobs, ref_logprobs, old_logprobs) -> (b, t)``, so that a config can name any of them;
one may also name ``mask``. ``old_logprobs`` belong to the policy that drew the tokens. Only the corrected ones read
them: the others take the tokens as drawn from the policy itself, which is true on policy only.

Their properties, on policy, a token at a time:

    estimator       value           gradient when it is part of a loss
    k1              unbiased        zero in expectation: use it in a reward, never in a loss
    k2              biased          unbiased
    k3              unbiased, >= 0  biased: that of KL(reference || policy)
    k3_with_k2_...  unbiased, >= 0  unbiased
    corrected_k1    unbiased        unbiased } also where the tokens
    corrected_k2    biased          unbiased } come from an older policy
    corrected_k3    unbiased        unbiased }

"Unbiased" is about the tokens' own distributions given their prefix; no estimator here corrects for prefixes that an
older policy wrote. Nothing is clamped: where a token is more than 88.7 nats likelier under the reference than under the
policy, k3 and what is made of it are infinite in float32, and the optimizer step is left out with a warning. Positions
outside the loss mask must hold finite numbers; `lit_rl.algorithms.terms.regularizers` fills them.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.reductions import masked_mean

_FAR = 5.0
"""Nats beyond which the slope of `corrected_k3` is written out: up to there autograd's is right to 4e-6."""


def k1(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``log(pi / ref)``. Of either sign; the highest variance of the four."""
    return logprobs - ref_logprobs


def k2(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``log(pi / ref)^2 / 2``. The value is right to second order only, where the policies are near."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``ref / pi - 1 - log(ref / pi)``, never negative: the KL term of GRPO (2402.03300, eq. 4)."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def k3_with_k2_gradient(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """The value of :func:`k3` with the gradient of :func:`k2`: both unbiased on policy (verl's ``k3+``)."""
    value, surrogate = k3(logprobs, ref_logprobs, old_logprobs), k2(logprobs, ref_logprobs, old_logprobs)
    return surrogate + (value - surrogate).detach()


def corrected_k1(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``k1 * pi / pi_old``, the ratio differentiated: value and gradient unbiased, with the variance of k1."""
    return (logprobs - old_logprobs).exp() * k1(logprobs, ref_logprobs, old_logprobs)


def corrected_k2(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``k2 * pi / pi_old``, the ratio detached: the gradient of :func:`k2`, corrected for tokens of an older policy."""
    return (logprobs - old_logprobs).exp().detach() * k2(logprobs, ref_logprobs, old_logprobs)


def corrected_k3(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``k3 * pi / pi_old``: the unbiased estimate of DeepSeek-V3.2 (2512.02556), TRL's default.

    The ratio is differentiated, so the gradient differs from that of :func:`k3` also where the ratio is 1: it is the
    ratio times ``log(pi / ref)``.
    """
    ratio, log_ratio = (logprobs - old_logprobs).exp(), (ref_logprobs - logprobs).detach()
    value = ratio * k3(logprobs, ref_logprobs, old_logprobs)
    # Autograd adds ratio (ref / pi - 1 - log(ref / pi)) and ratio (1 - ref / pi): far away, float32 keeps nothing of
    # their difference.
    written_out = value.detach() - ratio.detach() * log_ratio * (logprobs - logprobs.detach())
    return torch.where(log_ratio > _FAR, written_out, value)


def sequence_corrected_k3(
    logprobs: Float[Tensor, "b t"],
    ref_logprobs: Float[Tensor, "b t"],
    old_logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """``k3`` times the ratio of the row, ``exp(mean_t log(pi / pi_old))``: TRL's at sequence-level importance."""
    ratio = masked_mean(logprobs - old_logprobs, mask, dim=1).exp().unsqueeze(1)
    return ratio * k3(logprobs, ref_logprobs, old_logprobs)
