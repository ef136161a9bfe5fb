"""Learning-rate schedulers of torch, made from the run's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_rl.errors import ConfigError


@dataclass(frozen=True)
class FromTorch:
    """A scheduler of torch for all parameter groups. It steps once an optimizer step.

    Args:
        make: Function from an optimizer to a scheduler, such as
            `functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)`.
        key: Name of the setting, for messages.
    """

    make: Callable[[Optimizer], Any]
    key: str = "scheduler"

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the scheduler of this optimizer.

        Raises:
            ConfigError: the function needs more than an optimizer, made something else, or a scheduler that waits for a
                metric.
        """
        name = getattr(self.make, "__name__", None) or getattr(
            getattr(self.make, "func", None), "__name__", repr(self.make)
        )
        try:
            made = self.make(optimizer)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.key}={name} was called with the optimizer alone and failed: {error}. Bind its "
                "other arguments: functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)."
            ) from error
        if isinstance(made, ReduceLROnPlateau):
            raise ConfigError(
                f"{self.key}=ReduceLROnPlateau waits for a metric of the validation, and schedules here step once an "
                "optimizer step. Take another scheduler of torch, or Linear, Cosine or Constant of lit_rl."
            )
        if not isinstance(made, LRScheduler):
            raise ConfigError(
                f"{self.key}={name} gave a {type(made).__name__}. It takes the optimizer and returns a "
                "scheduler of torch."
            )
        return made
