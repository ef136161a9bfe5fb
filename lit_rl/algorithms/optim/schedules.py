"""Learning-rate schedules as values: warm-up, then constant, linear or cosine. Counted in optimizer steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_rl.algorithms.optim.torch_schedules import FromTorch
from lit_rl.errors import ConfigError, in_range


class Schedule(Protocol):
    """A factory from an optimizer and the number of optimizer steps to a per-step scheduler."""

    def factor(self, step: int, total_steps: float) -> float:
        """Return the factor of the learning rate in step `step`, which counts from 0."""
        ...

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LRScheduler: ...


GivenSchedule = Schedule | Callable[[Optimizer], LRScheduler]
"""A schedule of ours, or a function from an optimizer to a scheduler of torch."""


def as_schedule(given: GivenSchedule, key: str = "scheduler") -> Schedule | FromTorch:
    """Return a schedule, or a function that makes a scheduler of torch, as a schedule.

    Args:
        given: The user's value.
        key: Name of the setting, for the error.

    Raises:
        ConfigError: it is something else, such as a scheduler that has an optimizer already.
    """
    if hasattr(given, "factor") and not isinstance(given, type):
        return given  # pyright: ignore[reportReturnType]
    if callable(given) and not isinstance(given, LRScheduler):
        return FromTorch(given, key)  # pyright: ignore[reportArgumentType]
    then = ""
    if isinstance(given, LRScheduler):
        then = " This one has an optimizer already, which is not that of the run."
    raise ConfigError(
        f"{key} is a {type(given).__name__}. Allowed is Linear, Cosine or Constant of lit_rl, each with warmup_steps; "
        "a function from an optimizer to a scheduler of torch, such as "
        "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10); or an object with factor(step, total_steps) "
        f"-> float, by how much the learning rate is multiplied.{then}"
    )


def fits_run(given: Schedule | FromTorch, total_steps: float) -> None:
    """Refuse a schedule without a first learning rate, before anything is loaded; report a warm-up that never ends.

    Args:
        given: The schedule of one parameter group.
        total_steps: Optimizer steps of the run; infinite where they are unknown.

    Raises:
        ConfigError: see `factor` of the schedule.
    """
    schedule: Any = given.schedule if isinstance(given, After) else given
    if isinstance(schedule, FromTorch):
        return
    schedule.factor(0, total_steps)
    warmup = getattr(schedule, "warmup_steps", 0)
    if warmup > total_steps > 0:
        rank_zero_info(
            f"scheduler.warmup_steps={warmup}, and the run has {total_steps:g} optimizer steps: the learning rate "
            f"rises to {total_steps / warmup:.0%} of optimizer.lr and no higher. Lower the first, or train for longer."
        )


def by_group(optimizer: Optimizer, total_steps: float, schedules: Sequence[Schedule | FromTorch]) -> LRScheduler:
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
    return LambdaLR(optimizer, [_bound(schedule, total_steps) for schedule in schedules])


def _bound(schedule: Any, total_steps: float) -> Callable[[int], float]:
    # A plain function: LambdaLR would save the attributes of any other callable in every checkpoint.
    return lambda step: schedule.factor(step, total_steps)


@dataclass(frozen=True)
class _WarmedUp(ABC):
    """The base of schedules: linear warm-up from 1/warmup to 1, then `decay` of the done share of the other steps."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        in_range("scheduler.warmup_steps", self.warmup_steps, low=0)

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
        return by_group(optimizer, total_steps, [self] * len(optimizer.param_groups))


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


@dataclass(frozen=True)
class Linear(_WarmedUp):
    """A linear decay to `final` times the learning rate at the last step.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        final: Share of the learning rate that is left at the end, in [0, 1].
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("scheduler.final", self.final, low=0, high=1)

    def decay(self, done: float) -> float:
        return 1 - (1 - self.final) * done


@dataclass(frozen=True)
class Cosine(_WarmedUp):
    """A decay by half a cosine (1608.03983, without restarts) to `final` times the learning rate at the last step.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        final: Share of the learning rate that is left at the end, in [0, 1].
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("scheduler.final", self.final, low=0, high=1)

    def decay(self, done: float) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class After:
    """A delayed schedule: 0 for `steps` optimizer steps, then `schedule` over the remaining ones.

    Args:
        steps: Optimizer steps with a learning rate of 0.
        schedule: The schedule after them.
    """

    steps: int
    schedule: Any  # a scheduler of torch cannot be delayed: `by_group` refuses it

    def __post_init__(self) -> None:
        in_range("steps", self.steps, low=0)

    def factor(self, step: int, total_steps: float) -> float:
        if step < self.steps:
            return 0.0
        return self.schedule.factor(step - self.steps, total_steps - self.steps)

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LRScheduler:
        return by_group(optimizer, total_steps, [self] * len(optimizer.param_groups))
