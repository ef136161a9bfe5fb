"""Learning-rate schedulers by dotted path, as schedules: they are stepped with a learning rate of 1."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lit_rl.algorithms.optim.named_class import class_at
from lit_rl.algorithms.optim.schedules import by_group
from lit_rl.errors import ConfigError, in_range

LENGTHS = ("T_max", "total_steps")
"""Arguments of torch's schedulers that default to the length of the run."""


@dataclass(frozen=True)
class ScheduleByPath:
    """A `torch.optim.lr_scheduler.LRScheduler` by its dotted path, stepped once an optimizer step.

    Learning rates among its arguments (`eta_min`, `max_lr`, `base_lr`) are shares of `optimizer.lr`, so that they fit
    every parameter group. `T_max` and `total_steps`, left out, are the optimizer steps of the run after the warm-up.

    Args:
        path: For example `torch.optim.lr_scheduler.StepLR`, or a class of your own package.
        warmup_steps: Optimizer steps of linear warm-up; the scheduler's first step comes after them.
        kwargs: Further keyword arguments of that class.

    Raises:
        ConfigError: it cannot be imported, is no scheduler, goes by a metric, or its arguments do not fit.
    """

    path: str
    warmup_steps: int = 0
    kwargs: dict[str, Any] = field(default_factory=dict)
    _walks: dict[float, _Walk] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        in_range("scheduler.warmup_steps", self.warmup_steps, low=0)
        kind = self._class()
        if issubclass(kind, lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                f"scheduler.path={self.path!r} goes by a metric, and a schedule here goes by the number of the step "
                "alone. Take scheduler=cosine or linear, or a scheduler such as torch.optim.lr_scheduler.StepLR."
            )
        self._walk(kind, 1000.0)  # wrong arguments are found before anything is loaded

    def factor(self, step: int, total_steps: float) -> float:
        """Return the factor of the learning rate in step `step`, which counts from 0.

        Raises:
            ConfigError: the scheduler ends before, or returns no valid learning rate.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        length = total_steps - self.warmup_steps
        if length not in self._walks:
            self._walks[length] = self._walk(self._class(), length)
        return self._walks[length].at(step - self.warmup_steps)

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LRScheduler:
        return by_group(optimizer, total_steps, [self] * len(optimizer.param_groups))

    def _class(self) -> type[LRScheduler]:
        return class_at(self.path, "scheduler.path", LRScheduler, dir(lr_scheduler))

    def _walk(self, kind: type[LRScheduler], length: float) -> _Walk:
        known = inspect.signature(kind).parameters.keys()
        left_out = [name for name in LENGTHS if name in known - self.kwargs.keys() and "epochs" not in self.kwargs]
        if left_out and not math.isfinite(length):
            raise ConfigError(
                f"scheduler.kwargs.{left_out[0]} is not set, and the number of steps is unknown: set it, or "
                "trainer.max_steps or trainer.max_epochs."
            )
        return _Walk(self.path, kind, {**self.kwargs, **{name: max(1, int(length)) for name in left_out}})


class _Walk:
    """The learning rates that a scheduler makes of 1, recorded step by step.

    Args:
        path: Path of the scheduler, for messages.
        kind: Class of the scheduler.
        kwargs: Its arguments.
    """

    def __init__(self, path: str, kind: type[LRScheduler], kwargs: dict[str, Any]) -> None:
        self._path, self._kwargs = path, kwargs
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        try:
            self._scheduler = kind(self._optimizer, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"scheduler.kwargs={kwargs} do not fit {path}: {error}") from error
        if self._optimizer.param_groups[0]["momentum"]:
            raise ConfigError(
                f"scheduler.path={path!r} would also change the momentum, and learning rates alone are scheduled here. "
                "Set scheduler.kwargs.cycle_momentum=false."
            )
        self._rates = [self._rate()]

    def at(self, step: int) -> float:
        """Return the rate in this step."""
        while len(self._rates) <= step:
            self._optimizer.step()
            try:
                self._scheduler.step()
            except ValueError as error:
                told = f"scheduler.path={self._path!r} with {self._kwargs} ends at step {len(self._rates)}"
                raise ConfigError(f"{told}: {error} Give it as many steps as the run has.") from error
            self._rates.append(self._rate())
        return self._rates[step]

    def _rate(self) -> float:
        rate = float(self._optimizer.param_groups[0]["lr"])
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"scheduler.path={self._path!r} with {self._kwargs} makes {rate:g} of a learning rate of 1. Allowed is "
                "a finite number that is not below 0."
            )
        return rate
