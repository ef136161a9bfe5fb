"""At which level the policy is compared with the one that took the rollout: the log of the importance ratio.

All share the signature ``ratio(logprobs, old_logprobs, mask) -> (b, t)``, so that a config can name any of them. The
result is float32 and 0 outside the mask; a level of whole rows gives every token of a row the row's value. Nothing is
clamped here: the losses do it once (:data:`lit_rl.ops.losses.MAX_LOG_RATIO`). What stands outside the mask, NaN
included, changes nothing.

Notation: ``d[i,t] = logprobs - old_logprobs``, ``m[i,t]`` the loss mask (0 or 1), ``n_i = sum_t m``.

    level            log ratio at token t of row i                     used by
    token            d[i,t]                                            PPO, GRPO
    sequence_mean    sum_t m d / n_i                                   GSPO, LUSPO
    sequence_sum     sum_t m d                                         RLOO
    sequence_token   value of sequence_mean, gradient of its token     GSPO-token
"""

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.masking import masked_mean, masked_sum

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
