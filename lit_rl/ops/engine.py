"""The ratio of the policy that took a rollout, as the training side computes it, to the engine that drew its tokens.

``d = old_logprobs - sampler_logprobs``. A token that the engine did not score is NaN in ``sampler_logprobs``: its d is
0, so its ratio is 1. The ratio of a row is the product over its loss tokens, as TRL has it, not their geometric mean.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rl.ops.ratios import MAX_LOG_RATIO

PerToken = Float[Tensor, "b t"]
Mask = Bool[Tensor, "b t"]


def engine_log_ratio(
    old_logprobs: Float[Tensor, "b t"], sampler_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return d, detached, in float32, within +-20; 0 outside the mask and on tokens that the engine did not score."""
    return _difference(old_logprobs, sampler_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def engine_ratios(
    old_logprobs: Float[Tensor, "b t"], sampler_logprobs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """``exp(d)`` of each token and ``exp(sum_t d)`` of its row, neither bounded by a setting."""
    difference = _difference(old_logprobs, sampler_logprobs, mask)
    rows = difference.sum(1, keepdim=True).expand(mask.shape)
    return _exp(difference), _exp(rows)


def _difference(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    difference = (old_logprobs - sampler_logprobs).detach().float()
    # One token that one side finds impossible decides the row's sum, and must not make it NaN.
    return difference.masked_fill(~mask, 0.0).nan_to_num(nan=0.0, posinf=1e6, neginf=-1e6)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
