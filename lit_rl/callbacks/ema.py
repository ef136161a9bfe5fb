"""Moving averages of the policy's weights: exponential, and bias-corrected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lit_rl.callbacks.averaged import AveragedWeights
from lit_rl.errors import in_range


class EMAWeights(AveragedWeights):
    """An exponential moving average of the trained weights, exported at the end of the training.

    After every optimizer step ``average <- decay average + (1 - decay) weights``, in float32, over what the policy
    trains (adapters only, where there are adapters). It begins with the initial weights.

    The run, its checkpoints' weights and its export in `hf/` do not depend on it; a checkpoint holds the average too.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
        decay: Share of the old average that stays at an optimizer step, in [0, 1].
    """

    choice: ClassVar[str] = "ema"
    kinds: ClassVar[tuple[str, ...]] = ("average",)

    def __init__(self, folder: str | None = None, decay: float = 0.992) -> None:
        super().__init__(folder)
        in_range("callbacks.ema.decay", decay, low=0, high=1)
        self.decay = decay

    @property
    def told(self) -> str:
        return f"moving average of the weights, decay {self.decay:g}"

    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        kept["average"].lerp_(weight, 1 - self.decay)


class BEMAWeights(AveragedWeights):
    """A bias-corrected moving average of the trained weights (2508.00180), with less lag than an EMA.

    With the weights theta_t after t optimizer steps, at every ``every``-th step after ``burn_in``::

        average   <- (1 - beta_t) average + beta_t theta_t      beta_t  = max((lag + multiplier t)^-ema_power, min_beta)
        corrected <- average + alpha_t (theta_t - theta_0)      alpha_t = (lag + multiplier t)^-bias_power

    theta_0, and the average's first value, are the weights after ``burn_in`` steps. ``corrected`` of the last update is
    exported: before the first one, the initial weights. Three float32 copies of the trained weights are kept.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
        ema_power: Exponent by which the weight beta of new weights falls; 0 makes the average the weights themselves.
        bias_power: Exponent by which the weight alpha of the correction falls; a large one gives a plain average.
        lag: Offset of the step count in both weights, in steps, at least 1.
        multiplier: Factor of the step count beside the lag, at least 0.
        min_beta: Lower bound of beta, in [0, 1].
        every: Optimizer steps between two updates, at least 1.
        burn_in: Optimizer steps before the averaging begins.
    """

    choice: ClassVar[str] = "bema"
    kinds: ClassVar[tuple[str, ...]] = ("corrected", "average", "initial")

    def __init__(
        self,
        folder: str | None = None,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: float = 10.0,
        multiplier: float = 1.0,
        min_beta: float = 0.0,
        every: int = 400,
        burn_in: int = 0,
    ) -> None:
        super().__init__(folder)
        for key, value, low in (
            ("ema_power", ema_power, 0),
            ("bias_power", bias_power, 0),
            ("lag", lag, 1),
            ("multiplier", multiplier, 0),
            ("every", every, 1),
            ("burn_in", burn_in, 0),
        ):
            in_range(f"callbacks.bema.{key}", value, low=low)
        in_range("callbacks.bema.min_beta", min_beta, low=0, high=1)
        self.ema_power, self.bias_power, self.lag, self.multiplier = ema_power, bias_power, lag, multiplier
        self.min_beta, self.every, self.burn_in = min_beta, every, burn_in

    @property
    def told(self) -> str:
        return f"bias-corrected moving average of the weights, every {self.every} steps after {self.burn_in}"

    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        if step < self.burn_in or (step - self.burn_in) % self.every:
            return
        if step == self.burn_in:
            kept["average"].copy_(weight)
            kept["initial"].copy_(weight)
            return
        time = self.lag + self.multiplier * step
        average, initial = kept["average"], kept["initial"]
        average.lerp_(weight, max(time**-self.ema_power, self.min_beta))
        kept["corrected"].copy_(average + time**-self.bias_power * (weight - initial))
