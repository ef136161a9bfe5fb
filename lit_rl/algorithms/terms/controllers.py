"""Controllers of the weights of the KL and of the entropy bonus. They hold state, so each module has its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from lit_rl.errors import ConfigError, NumericError, StorageError, in_range


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
        _restored(self, saved, self.state())


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

    def __init__(self, target: float = 0.1, horizon: int = 10_000) -> None:
        in_range("algo.kl_control.target", target, low=0, open_low=True)
        in_range("algo.kl_control.horizon", horizon, low=1)
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
        self._factor = _restored(self, saved, self.state())["kl_factor"]


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


class FixedEntropy:
    """A constant coefficient of the entropy bonus.

    Args:
        coef: Weight of the mean entropy of the tokens, at least 0.
    """

    def __init__(self, coef: float = 0.001) -> None:
        in_range("algo.entropy.coef", coef, low=0)
        self.coefficient = coef

    def update(self, entropy: float) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {}

    def load_state(self, saved: Mapping[str, float]) -> None:
        _restored(self, saved, self.state())


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
        self, coef: float = 0.0, low: float = 0.0, high: float = 1.0, delta: float = 0.005, target: float = 0.2
    ) -> None:
        in_range("algo.entropy.low", low, low=0)
        if not low <= high < math.inf:
            raise ConfigError(f"algo.entropy.high={high} is out of range: allowed is [algo.entropy.low={low:g}, inf).")
        in_range("algo.entropy.coef", coef, low=low, high=high)
        in_range("algo.entropy.delta", delta, low=0)
        in_range("algo.entropy.target", target, low=0)
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
        values = _restored(self, saved, self.state())
        self._coef, self._entropy = values["entropy_coef"], values["entropy"]


def _check_number(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise NumericError(f"The {what} of the last step is {value}: the policy's weights or logits are broken.")


def _restored(controller: object, saved: Mapping[str, float], own: Mapping[str, float]) -> Mapping[str, float]:
    if saved.keys() != own.keys():
        raise StorageError(
            f"The checkpoint holds {sorted(saved) or 'nothing'} of a controller, and {type(controller).__name__} needs "
            f"{sorted(own) or 'nothing'}. Resume with algo/kl_control and algo/entropy of the run's config.yaml."
        )
    return saved
