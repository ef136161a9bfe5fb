"""Learning-rate schedulers of torch, made from the optimizer of the run."""

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
        make: Optimizer in, scheduler out, such as `functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)`.
        key: What messages call it.
    """

    make: Callable[[Optimizer], Any]
    key: str = "scheduler"

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """The scheduler of this optimizer.

        Raises:
            ConfigError: the function cannot make one of an optimizer alone, made something else, or one that waits for
                a metric.
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
