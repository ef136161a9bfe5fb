"""The KL to the reference as a penalty, in the loss or in the reward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.signatures import arguments_for
from lit_rl.errors import in_range
from lit_rl.ops.kl import k1
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.step import Metrics


class KLPenalty:
    """A weight times an estimate of the KL, token by token.

    Args:
        key: Of the weight, for messages, such as ``algo.beta``.
        weight: At least 0; 0 is no penalty.
        estimator: `(logprobs, ref_logprobs, old_logprobs) -> (b, t)`; it may also name `mask`.
    """

    def __init__(self, key: str, weight: float, estimator: Callable[..., Tensor]) -> None:
        in_range(key, weight, low=0)
        self.weight, self.estimator = weight, estimator

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, factor: float
    ) -> tuple[Tensor, Metrics]:
        """`(b, t)`: the penalty of each token, and the mean KL over the mask as `kl`.

        Args:
            logprobs: `(b, t)` of the policy; in the reward, those when the rollout was taken.
            ref_logprobs: `(b, t)` of the reference.
            old_logprobs: `(b, t)` of the policy that took the rollout.
            mask: Bool `(b, t)`.
            factor: What the controller of the KL multiplies the weight by.
        """
        kl = self.estimator(logprobs, ref_logprobs, old_logprobs, **arguments_for(self.estimator, {"mask": mask}))
        return self.weight * factor * kl, {"kl": (masked_sum(kl.detach(), mask), mask.sum())}


def distance(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ranks: Ranks) -> tuple[float, int]:
    """How far the policy of a rollout is from the reference, and the rows of all ranks that say so.

    The mean over rows of the mean k1 of their tokens, in nats: what a KL controller steers.
    """
    per_row = masked_mean(k1(old_logprobs, ref_logprobs, old_logprobs), mask, dim=1)
    total, rows = ranks.total(torch.stack([per_row.sum(), mask.any(1).sum().float()])).tolist()
    return total / max(1.0, rows), int(rows)
