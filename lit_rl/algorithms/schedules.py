"""Learning-rate schedules as values: warm-up, then constant, linear or cosine. Counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_rl.errors import ConfigError, in_range


class Schedule(Protocol):
    """Optimizer and total number of optimizer steps in, per-step scheduler out."""

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LambdaLR: ...


def _scheduler(
    optimizer: Optimizer, warmup_steps: int, total_steps: float, decay: Callable[[float], float]
) -> LambdaLR:
    """Linear warm-up from 1/warmup to 1, then `decay` of the fraction of the remaining steps that is done."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return decay(min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps)))

    return LambdaLR(optimizer, factor)


def _finite(name: str, total_steps: float) -> None:
    if not math.isfinite(total_steps):
        raise ConfigError(
            f"scheduler={name} falls towards the last step, but the number of steps is unknown: "
            "set trainer.max_steps or trainer.max_epochs, or take scheduler=constant."
        )


@dataclass(frozen=True)
class Constant:
    """The learning rate stays where it is after the warm-up.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        in_range("scheduler.warmup_steps", self.warmup_steps, low=0)

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LambdaLR:
        return _scheduler(optimizer, self.warmup_steps, total_steps, lambda done: 1.0)


@dataclass(frozen=True)
class Linear:
    """Down on a line to `final` times the learning rate at the last step.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        final: Share of the learning rate that is left at the end, in [0, 1].
    """

    warmup_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        in_range("scheduler.warmup_steps", self.warmup_steps, low=0)
        in_range("scheduler.final", self.final, low=0, high=1)

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LambdaLR:
        _finite("linear", total_steps)
        return _scheduler(optimizer, self.warmup_steps, total_steps, lambda done: 1 - (1 - self.final) * done)


@dataclass(frozen=True)
class Cosine:
    """Down on half a cosine (1608.03983, without restarts) to `final` times the learning rate at the last step.

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        final: Share of the learning rate that is left at the end, in [0, 1].
    """

    warmup_steps: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        in_range("scheduler.warmup_steps", self.warmup_steps, low=0)
        in_range("scheduler.final", self.final, low=0, high=1)

    def __call__(self, optimizer: Optimizer, total_steps: float) -> LambdaLR:
        _finite("cosine", total_steps)
        return _scheduler(
            optimizer,
            self.warmup_steps,
            total_steps,
            lambda done: self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)),
        )
