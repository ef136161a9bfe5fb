"""Estimators of KL(policy || reference) from one sampled token: Schulman, "Approximating KL divergence" (2020).

All share the signature ``kl(logprobs, ref_logprobs, old_logprobs) -> (b, t)``, so that a config can name any of them.
``old_logprobs`` belong to the policy that drew the tokens. Only :func:`corrected_k3` reads them: the others take the
tokens as drawn from the policy itself, which is true on policy only.

What each is good for, on policy, a token at a time:

    estimator       value           gradient when it is part of a loss
    k1              unbiased        zero in expectation: use it in a reward, never in a loss
    k2              biased          unbiased
    k3              unbiased, >= 0  biased: that of KL(reference || policy)
    corrected_k3    unbiased        unbiased, also where the tokens come from an older policy

"Unbiased" is about the tokens' own distributions given their prefix; no estimator here corrects for prefixes that an
older policy wrote. Nothing is clamped. Positions outside the loss mask must hold finite numbers, as rollouts do.
"""

import torch
from jaxtyping import Float
from torch import Tensor


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


def corrected_k3(
    logprobs: Float[Tensor, "b t"], ref_logprobs: Float[Tensor, "b t"], old_logprobs: Float[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """``k3 * pi / pi_old``: the unbiased estimate of DeepSeek-V3.2 (2512.02556), TRL's default.

    The ratio is differentiated, so the gradient differs from that of :func:`k3` also where the ratio is 1.
    """
    ratio = (logprobs - old_logprobs).exp()
    return ratio * k3(logprobs, ref_logprobs, old_logprobs)
