"""Learning-rate schedules as values, counted in optimizer steps: warm-up, then constant, linear, cosine, or torch's.

`FromTorch` wraps a scheduler of torch that is made from the optimizer of the run. `ScheduleByPath` imports one by its
dotted path and records the rates that it makes of a learning rate of 1.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lit_rl.algorithms.optim.optimizers import import_class
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.ops.ranges import AtLeastZero, Portion


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
                f"{self.key}=ReduceLROnPlateau needs a metric of the validation, but schedules step once per optimizer "
                "step here. Pass another scheduler of torch, or Linear, Cosine or Constant of lit_rl."
            )
        if not isinstance(made, LRScheduler):
            raise ConfigError(
                f"{self.key}={name} returned a {type(made).__name__}, expected a torch.optim.lr_scheduler.LRScheduler. "
                "Pass a function from the optimizer to a scheduler."
            )
        return made


class Schedule(Protocol):
    """A factory from an optimizer and the number of optimizer steps to a per-step scheduler."""

    def factor(self, step: int, total_steps: float) -> float:
        """Return the factor of the learning rate in step `step`, which counts from 0."""
        ...

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LRScheduler: ...


ScheduleLike = Schedule | Callable[[Optimizer], LRScheduler]
"""A schedule of ours, or a function from an optimizer to a scheduler of torch."""


def as_schedule(value: ScheduleLike, key: str = "scheduler") -> Schedule | FromTorch:
    """Return a schedule, or a function that makes a scheduler of torch, as a schedule.

    Args:
        value: The user's value.
        key: Name of the setting, for the error.

    Raises:
        ConfigError: it is something else, such as a scheduler that has an optimizer already.
    """
    if hasattr(value, "factor") and not isinstance(value, type):
        return value  # pyright: ignore[reportReturnType]
    if callable(value) and not isinstance(value, LRScheduler):
        return FromTorch(value, key)  # pyright: ignore[reportArgumentType]
    hint = ""
    if isinstance(value, LRScheduler):
        hint = " This one has an optimizer already, which is not that of the run."
    raise ConfigError(
        f"{key} is a {type(value).__name__}. Allowed is Linear, Cosine or Constant of lit_rl, each with warmup_steps; "
        "a function from an optimizer to a scheduler of torch, such as "
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10); or an object with factor(step, total_steps) "
        f"-> float, by how much the learning rate is multiplied.{hint}"
    )


def check_schedule(group_schedule: Schedule | FromTorch, total_steps: float) -> None:
    """Refuse a schedule without a first learning rate, before anything is loaded; report a warm-up that never ends.

    Args:
        group_schedule: The schedule of one parameter group.
        total_steps: Optimizer steps of the run; infinite where they are unknown.

    Raises:
        ConfigError: see `factor` of the schedule.
    """
    schedule: Any = group_schedule.schedule if isinstance(group_schedule, After) else group_schedule
    if isinstance(schedule, FromTorch):
        return
    schedule.factor(0, total_steps)
    warmup = getattr(schedule, "warmup_steps", 0)
    if warmup > total_steps > 0:
        rank_zero_info(
            f"scheduler.warmup_steps={warmup}, and the run has {total_steps:g} optimizer steps: the learning rate "
            f"rises to {total_steps / warmup:.0%} of optimizer.lr and no higher. Lower the first, or train for longer."
        )


def scheduler_by_group(
    optimizer: Optimizer, total_steps: float, schedules: Sequence[Schedule | FromTorch]
) -> LRScheduler:
    """Return one scheduler with a schedule for each parameter group, in the groups' order.

    Raises:
        ConfigError: a scheduler of torch is set for some of the groups, or is to be delayed.
    """
    first, *others = schedules
    if isinstance(first, FromTorch) and all(other is first for other in others):
        return first.scheduler(optimizer)
    inner = [each.schedule if isinstance(each, After) else each for each in schedules]
    if from_torch := next((each for each in inner if isinstance(each, FromTorch)), None):
        raise ConfigError(
            f"{from_torch.key} is a scheduler of torch, which has one schedule for all parameter groups, and this run "
            "has several: a critic's own schedule, or its warm-up. Take Linear, Cosine or Constant of lit_rl, or an "
            "object with factor(step, total_steps) -> float."
        )
    # Plain functions: LambdaLR would save the attributes of any other callable in every checkpoint.
    return LambdaLR(optimizer, [lambda step, factor=each.factor: factor(step, total_steps) for each in schedules])  # pyright: ignore


@checked("scheduler")
@dataclass(frozen=True)
class _WarmedUp(ABC):
    """The base of schedules: linear warm-up from 1/warmup to 1, then `decay` of the done share of the other steps."""

    warmup_steps: AtLeastZero = 0

    def factor(self, step: int, total_steps: float) -> float:
        self.check(total_steps)
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.decay(min(1.0, (step - self.warmup_steps) / max(1.0, total_steps - self.warmup_steps)))

    def check(self, total_steps: float) -> None:
        """Refuse an unknown number of steps, for a schedule that falls towards the last.

        Raises:
            ConfigError: names the settings for it.
        """
        if not math.isfinite(total_steps):
            raise ConfigError(
                f"scheduler={type(self).__name__.lower()} falls towards the last step, but the number of steps is "
                "unknown: set trainer.max_steps or trainer.max_epochs, or take scheduler=constant."
            )

    @abstractmethod
    def decay(self, done: float) -> float:
        """Return the factor after the share `done`, in [0, 1], of the steps after the warm-up."""

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LRScheduler:
        return scheduler_by_group(optimizer, total_steps, [self] * len(optimizer.param_groups))


@checked("scheduler")
@dataclass(frozen=True)
class Constant(_WarmedUp):
    """A constant learning rate after the warm-up.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
    """

    def check(self, total_steps: float) -> None:
        """Accept any number of steps."""

    def decay(self, done: float) -> float:
        return 1.0


@checked("scheduler")
@dataclass(frozen=True)
class Linear(_WarmedUp):
    """A linear decay to `final` times the learning rate at the last step.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        final: Share of the learning rate that is left at the end, in [0, 1].
    """

    final: Portion = 0.0

    def decay(self, done: float) -> float:
        return 1 - (1 - self.final) * done


@checked("scheduler")
@dataclass(frozen=True)
class Cosine(_WarmedUp):
    """A decay by half a cosine (1608.03983, without restarts) to `final` times the learning rate at the last step.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        final: Share of the learning rate that is left at the end, in [0, 1].
    """

    final: Portion = 0.0

    def decay(self, done: float) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@checked("")
@dataclass(frozen=True)
class After:
    """A delayed schedule: 0 for `steps` optimizer steps, then `schedule` over the remaining ones.

    Args:
        steps: Optimizer steps with a learning rate of 0.
        schedule: The schedule after them.
    """

    steps: AtLeastZero
    schedule: Any  # a scheduler of torch cannot be delayed: `scheduler_by_group` refuses it

    def factor(self, step: int, total_steps: float) -> float:
        if step < self.steps:
            return 0.0
        return self.schedule.factor(step - self.steps, total_steps - self.steps)

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LRScheduler:
        return scheduler_by_group(optimizer, total_steps, [self] * len(optimizer.param_groups))


LENGTH_ARGUMENTS = ("T_max", "total_steps")
"""Arguments of torch's schedulers that default to the length of the run."""


# ---------------------------------------------------------------------- schedulers by path


@checked("scheduler")
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
    warmup_steps: AtLeastZero = 0
    kwargs: dict[str, Any] = field(default_factory=dict)
    _walks: dict[float, _RecordedRates] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = self._class()
        if issubclass(kind, lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                f"scheduler.path={self.path!r} needs a metric, but schedules depend on the number of the step alone "
                "here. Set scheduler=cosine or linear, or a scheduler such as torch.optim.lr_scheduler.StepLR."
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
        return scheduler_by_group(optimizer, total_steps, [self] * len(optimizer.param_groups))

    def _class(self) -> type[LRScheduler]:
        return import_class(self.path, "scheduler.path", LRScheduler, dir(lr_scheduler))

    def _walk(self, kind: type[LRScheduler], length: float) -> _RecordedRates:
        known = inspect.signature(kind).parameters.keys()
        left_out = [
            name for name in LENGTH_ARGUMENTS if name in known - self.kwargs.keys() and "epochs" not in self.kwargs
        ]
        if left_out and not math.isfinite(length):
            raise ConfigError(
                f"scheduler.kwargs.{left_out[0]} is not set, and the number of steps is unknown: set it, or "
                "trainer.max_steps or trainer.max_epochs."
            )
        return _RecordedRates(self.path, kind, {**self.kwargs, **{name: max(1, int(length)) for name in left_out}})


class _RecordedRates:
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
                f"scheduler.path={path!r} would also change the momentum, but only learning rates are scheduled here. "
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
                problem = f"scheduler.path={self._path!r} with {self._kwargs} ends at step {len(self._rates)}"
                raise ConfigError(f"{problem}: {error} Set as many steps as the run has.") from error
            self._rates.append(self._rate())
        return self._rates[step]

    def _rate(self) -> float:
        rate = float(self._optimizer.param_groups[0]["lr"])
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"scheduler.path={self._path!r} with {self._kwargs} turns a learning rate of 1 into {rate:g}. Allowed "
                "is a finite number of at least 0."
            )
        return rate
