"""How a reward function is to be called: its limits, and what its failures mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_rl.errors import ConfigError, in_range


@dataclass(frozen=True)
class CallSettings:
    """The settings of `Rewards` for calls of its functions; its docstring explains each of them."""

    on_error: float | None
    timeout: float | None
    workers: int
    memory_mb: int | None
    recycle_after: int
    max_concurrent: int
    cache: int

    def __post_init__(self) -> None:
        if self.on_error is not None and not (isinstance(self.on_error, int | float) and math.isfinite(self.on_error)):
            raise ConfigError(f"reward.on_error={self.on_error!r} must be a finite number, or null to end the run.")
        if self.timeout is not None:
            in_range("reward.timeout", self.timeout, low=0, open_low=True)
        if self.memory_mb is not None:
            in_range("reward.memory_mb", self.memory_mb, low=1)
        in_range("reward.max_concurrent", self.max_concurrent, low=1)
        for key in ("workers", "recycle_after", "cache"):
            in_range(f"reward.{key}", getattr(self, key), low=0)
