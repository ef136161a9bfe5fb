"""Regularisers of the policy: the KL to the reference and the entropy bonus, with the controllers of their weights.

The KL is a penalty in the reward, in the loss, or in both. A controller holds state, so each module has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from lit_rl.algorithms.chosen_functions import arguments_for
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.terms.credit import Credit
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, NumericError, StorageError, in_range
from lit_rl.core.rollout import Rollout
from lit_rl.ops.kl import k1
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Positive
from lit_rl.ops.reductions import Metrics, masked_mean, masked_sum

# ------------------------------------------------------------------ KL to the reference


class KLControl(Protocol):
    """A controller of the factor of `algo.beta` and `algo.reward_beta`."""

    @property
    def adapts(self) -> bool:
        """True if `update` changes the factor. Only then is it called, and the KL measured for it."""
        ...

    @property
    def factor(self) -> float:
        """The current factor: 1 at the start, never negative."""
        ...

    def update(self, kl: float, sequences: int) -> None:
        """Update with a rollout's mean KL to the reference, in nats a token, and its sequences, both over all ranks."""
        ...

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        ...

    def load_state(self, saved: Mapping[str, float]) -> None:
        """Restore what `state` returned. Raises StorageError if another controller wrote it."""
        ...


class FixedKL:
    """A constant weight of the KL."""

    factor: float = 1.0
    adapts: bool = False

    def update(self, kl: float, sequences: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, saved: Mapping[str, float]) -> None:
        _check_state(self, saved, self.state())


@checked("algo.kl_control")
class AdaptiveKL:
    """A weight that steers the KL towards a target (1909.08593, section 2.2).

    After a rollout of n sequences the weight is multiplied by ``1 + e n / horizon``, with ``e = clip(KL / target - 1,
    -0.2, 0.2)``.

    A rollout counts at most as a whole horizon, so the weight stays positive.

    Args:
        target: KL to the reference to steer towards, in nats a token, above 0.
        horizon: Sequences over which a KL that is 20 % off changes the weight by about 20 %, at least 1.
    """

    adapts: bool = True

    def __init__(self, target: Positive = 0.1, horizon: AtLeastOne = 10_000) -> None:
        self.target, self.horizon = target, horizon
        self._factor = 1.0

    @property
    def factor(self) -> float:
        return self._factor

    def update(self, kl: float, sequences: int) -> None:
        """Update the factor. Raises NumericError if the KL is not finite, as the weight would not be either."""
        _check_number("KL to the reference", kl)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self._factor *= 1 + error * min(sequences / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"kl_factor": self._factor}

    def load_state(self, saved: Mapping[str, float]) -> None:
        self._factor = _check_state(self, saved, self.state())["kl_factor"]


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
        inside_mask = (part.masked_fill(~mask, 0.0) for part in (logprobs, ref_logprobs, old_logprobs))
        kl = self.estimator(*inside_mask, **arguments_for(self.estimator, {"mask": mask}))
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
        if not self.control.adapts:
            return
        assert old is not None and ref is not None  # see `needs_old_logprobs` and `needs_reference`
        per_row = masked_mean(k1(old, ref, old), mask, dim=1)  # in nats a token; the mean over rows is steered
        total, rows = ranks.total(torch.stack([per_row.sum(), mask.any(1).sum().float()])).tolist()
        self.control.update(total / max(1.0, rows), int(rows))

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


# ------------------------------------------------------------------ entropy bonus


class EntropyControl(Protocol):
    """A controller of the coefficient of the entropy bonus."""

    @property
    def coefficient(self) -> float:
        """The coefficient of the next optimizer step, at least 0."""
        ...

    def update(self, entropy: float) -> None:
        """Update with the mean entropy of an optimizer step over the loss tokens of all ranks, in nats."""
        ...

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        ...

    def load_state(self, saved: Mapping[str, float]) -> None:
        """Restore what `state` returned. Raises StorageError if another controller wrote it."""
        ...


@checked("algo.entropy")
class FixedEntropy:
    """A constant coefficient of the entropy bonus.

    Args:
        coef: Weight of the mean entropy of the tokens, at least 0.
    """

    def __init__(self, coef: NotNegative = 0.001) -> None:
        self.coefficient = coef

    def update(self, entropy: float) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, saved: Mapping[str, float]) -> None:
        _check_state(self, saved, self.state())


@checked("algo.entropy")
class AdaptiveEntropy:
    """A coefficient of the entropy bonus that is active while the entropy is low (Skywork-OR1, 2505.22312, section 4).

    After each optimizer step the weight increases by ``delta`` if the step's entropy was at most ``target``, else it
    decreases by as much, within ``[low, high]``. It is active only if the last step's entropy was at most ``target``;
    in the first step, when no entropy is known, it is not.

    Args:
        coef: Weight of the mean entropy of the tokens at the start, within low and high.
        low: Lowest weight, at least 0.
        high: Highest weight.
        delta: Change of the weight in one optimizer step, at least 0.
        target: Target of the mean entropy of the tokens, in nats, at least 0.
    """

    def __init__(
        self,
        coef: float = 0.0,
        low: NotNegative = 0.0,
        high: float = 1.0,
        delta: NotNegative = 0.005,
        target: NotNegative = 0.2,
    ) -> None:
        if not low <= high < math.inf:
            raise ConfigError(f"algo.entropy.high={high} is out of range: allowed is [algo.entropy.low={low:g}, inf).")
        in_range("algo.entropy.coef", coef, low=low, high=high)
        self.low, self.high, self.delta, self.target = low, high, delta, target
        self._coef, self._entropy = coef, math.inf

    @property
    def coefficient(self) -> float:
        return self._coef if self._entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Update the coefficient. Raises NumericError if the entropy is not finite."""
        _check_number("entropy", entropy)
        step = self.delta if entropy <= self.target else -self.delta
        self._coef = min(max(self._coef + step, self.low), self.high)
        self._entropy = entropy

    def state(self) -> dict[str, float]:
        return {"entropy_coef": self._coef, "entropy": self._entropy}

    def load_state(self, saved: Mapping[str, float]) -> None:
        values = _check_state(self, saved, self.state())
        self._coef, self._entropy = values["entropy_coef"], values["entropy"]


class EntropyBonus:
    """The entropy bonus of an objective.

    The loss calls it, which changes no state. Between micro-batches the training loop calls `observe`, and after the
    optimizer step `update`, so that the controller gets the mean over the whole step.

    Args:
        control: Controller of the coefficient.
    """

    def __init__(self, control: EntropyControl) -> None:
        self.control = control
        self._observed: list[Tensor] = []
        """Summed entropy and number of tokens of each micro-batch of the step so far."""

    def __call__(self, entropy: Tensor, selected: Tensor, tokens: Tensor) -> Tensor:
        """Return this micro-batch's share of the bonus, 0-dim.

        Args:
            entropy: `(b, t)` in nats, with gradient.
            selected: Bool `(b, t)`: the tokens that the policy loss acts on.
            tokens: 0-dim: the number of such tokens in the whole optimizer step.
        """
        return self.control.coefficient * masked_sum(entropy, selected) / tokens.clamp(min=1)

    def observe(self, entropy: Tensor, selected: Tensor) -> None:
        """Add the entropy of a micro-batch; the arguments are those of its bonus."""
        self._observed.append(torch.stack([masked_sum(entropy.detach(), selected), selected.sum().float()]))

    def update(self, ranks: Ranks, *, skipped: bool) -> None:
        """Update the controller with the optimizer step's mean entropy. A collective.

        Args:
            ranks: The ranks that share the step.
            skipped: Whether the step was skipped, so that the controller does not count it.
        """
        observed, self._observed = self._observed, []
        if observed and not skipped:
            total, count = ranks.total(torch.stack(observed).sum(0)).tolist()
            self.control.update(total / max(1.0, count))


# ------------------------------------------------------------------ controllers


def _check_number(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise NumericError(f"The {what} of the last step is {value}: the policy's weights or logits are broken.")


def _check_state(controller: object, saved: Mapping[str, float], own: Mapping[str, float]) -> Mapping[str, float]:
    if saved.keys() != own.keys():
        raise StorageError(
            f"The checkpoint holds {sorted(saved) or 'nothing'} of a controller, and {type(controller).__name__} needs "
            f"{sorted(own) or 'nothing'}. Resume with algo/kl_control and algo/entropy of the run's config.yaml."
        )
    return saved
