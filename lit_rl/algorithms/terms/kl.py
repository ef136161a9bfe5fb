"""The KL to the reference as a penalty, in the reward and in the loss, and the controller that both weights follow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.signatures import arguments_for
from lit_rl.algorithms.terms.controllers import KLControl
from lit_rl.algorithms.terms.credit import Credit
from lit_rl.errors import in_range
from lit_rl.ops.kl import k1
from lit_rl.ops.masking import masked_mean, masked_sum
from lit_rl.ops.step import Metrics
from lit_rl.rollout import Rollout


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
        """Return the penalty `(b, t)` of each token, 0 outside the mask, and the mean KL over the mask as `kl`.

        Args:
            logprobs: `(b, t)` of the policy; in the reward, those when the rollout was taken.
            ref_logprobs: `(b, t)` of the reference.
            old_logprobs: `(b, t)` of the policy that took the rollout.
            mask: Bool `(b, t)`.
            factor: Factor of the weight.
        """
        # Filled before the estimator and not after it: 0 times its slope at a NaN would be NaN.
        there = (part.masked_fill(~mask, 0.0) for part in (logprobs, ref_logprobs, old_logprobs))
        kl = self.estimator(*there, **arguments_for(self.estimator, {"mask": mask}))
        return self.weight * factor * kl, {"kl": (masked_sum(kl.detach(), mask), mask.sum())}


class ReferenceKL:
    """The KL to the reference in an objective: a penalty in the reward, a penalty in the loss, and their controller.

    The controller's factor when a rollout is taken applies to all of that rollout. The penalty in the reward is
    computed then, and `Rollout.kl_factor` keeps the factor for the losses of the rollout. `update` then sets the factor
    of the next rollout.

    Args:
        in_reward: Penalty subtracted from the rewards when the rollout is taken.
        in_loss: Penalty added to the losses of tokens.
        control: Controller of the factor of both weights.
    """

    def __init__(self, in_reward: KLPenalty, in_loss: KLPenalty, control: KLControl) -> None:
        self.in_reward, self.in_loss, self.control = in_reward, in_loss, control

    @property
    def needs_reference(self) -> bool:
        """True if one of the penalties is on."""
        return bool(self.in_reward.weight or self.in_loss.weight)

    @property
    def needs_old_logprobs(self) -> bool:
        """True if a penalty or the controller reads the log-probs of the policy that took the rollout."""
        return bool(self.in_reward.weight) or self.control.adapts

    def take_off_rewards(
        self, credit: Credit, old: Tensor | None, ref: Tensor | None, mask: Tensor
    ) -> tuple[Credit, Metrics]:
        """Subtract the penalty from the credit; return it with the mean KL, unless the loss reports that.

        Args:
            credit: Credit of `b` completions.
            old: `(b, t)`: log-probs of the policy that took the rollout, None if not needed.
            ref: `(b, t)`: those of the reference, likewise.
            mask: Bool `(b, t)`: the sampled tokens.
        """
        if not self.in_reward.weight or old is None or ref is None:
            return credit, {}
        penalty, metrics = self.in_reward(old, ref, old, mask, self.control.factor)
        return credit.less(penalty, mask), {} if self.in_loss.weight else metrics

    def update(self, old: Tensor | None, ref: Tensor | None, mask: Tensor, ranks: Ranks) -> None:
        """Update the controller with the KL of this rollout's policy to the reference. A collective, if it adapts.

        Args:
            old: `(b, t)`: log-probs of the policy that took the rollout.
            ref: `(b, t)`: those of the reference.
            mask: Bool `(b, t)`: the sampled tokens.
            ranks: The ranks that share the rollout.
        """
        if self.control.adapts:
            assert old is not None and ref is not None  # see `needs_old_logprobs` and `needs_reference`
            self.control.update(*distance(old, ref, mask, ranks))

    def add_to_loss(self, per_token: Tensor, rollout: Rollout, logprobs: Tensor, old: Tensor) -> tuple[Tensor, Metrics]:
        """Add the penalty to the losses `(b, t)`, and return them with the mean KL.

        Args:
            per_token: Losses of a micro-batch.
            rollout: The micro-batch.
            logprobs: `(b, t)` of the policy now, with gradient.
            old: `(b, t)` of the policy that took the rollout.
        """
        if rollout.ref_logprobs is None:
            return per_token, {}
        penalty, metrics = self.in_loss(logprobs, rollout.ref_logprobs, old, rollout.loss_mask, rollout.kl_factor)
        return per_token + penalty, metrics

    def coefficients(self) -> dict[str, float]:
        """Return the weights that the controller changes, as in the next rollout, for the log."""
        if not self.control.adapts:
            return {}
        weights = {"kl_coef": self.in_loss.weight, "reward_kl_coef": self.in_reward.weight}
        return {name: weight * self.control.factor for name, weight in weights.items() if weight}


def distance(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, ranks: Ranks) -> tuple[float, int]:
    """Return the mean KL of a rollout's policy to the reference, and the number of rows of all ranks.

    The mean over rows of the mean k1 of their tokens, in nats: the quantity that a KL controller steers.
    """
    per_row = masked_mean(k1(old_logprobs, ref_logprobs, old_logprobs), mask, dim=1)
    total, rows = ranks.total(torch.stack([per_row.sum(), mask.any(1).sum().float()])).tolist()
    return total / max(1.0, rows), int(rows)
