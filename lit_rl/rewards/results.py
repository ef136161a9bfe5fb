"""What one reward function is told about calling, and what it said of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.errors import ConfigError, in_range
from lit_rl.rewards.calling import Failure
from lit_rl.rewards.contract import Span


@dataclass(frozen=True)
class Settings:
    """What `Rewards` was told about calling. See there."""

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


@dataclass
class Result:
    """What one function said of ``b`` completions."""

    values: list[float]
    """NaN where it does not apply."""
    spans: list[list[Span] | None]
    failures: list[Failure | None]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    output: str = ""
    hits: int = 0
    """Completions that the cache knew."""

    def entry(self, i: int) -> tuple[float, list[Span] | None, Failure | None, dict[str, Any]]:
        """All about one completion, as a cache keeps it."""
        extras = {column: values[i] for column, values in self.extras.items()}
        return self.values[i], self.spans[i], self.failures[i], extras

    @classmethod
    def of_entries(cls, entries: Sequence[Any], fresh: Result, hits: int) -> Result:
        """Entries one after another; metrics and output are those of the call that made the fresh ones."""
        columns = dict.fromkeys(column for *_, extras in entries for column in extras)
        return cls(
            values=[value for value, _, _, _ in entries],
            spans=[spans for _, spans, _, _ in entries],
            failures=[failure for _, _, failure, _ in entries],
            metrics=fresh.metrics,
            extras={column: [extras.get(column) for *_, extras in entries] for column in columns},
            output=fresh.output,
            hits=hits,
        )
