"""Batch arithmetic of the methods that learn from a data set."""

from __future__ import annotations

from dataclasses import dataclass

from lit_rl.errors import ConfigError, in_range


@dataclass(frozen=True)
class OfflinePlan:
    """The numbers of one run. All are global (over every rank)."""

    batch_size: int
    """Rows of an optimizer step."""
    accumulate: int
    world_size: int
    rows: int
    """Training rows that are left; of a stream, in its first window."""
    stream_buffer: int | None = None
    """Rows that a stream has in memory at a time; None where all are."""

    def __post_init__(self) -> None:
        in_range("trainer.accumulate_grad_batches", self.accumulate, low=1)
        parts = self.accumulate * self.world_size
        if self.batch_size % parts:
            below = self.batch_size // parts * parts
            near = [f"data.batch_size={size}" for size in (below, below + parts) if size]
            raise ConfigError(
                f"data.batch_size={self.batch_size} must be divisible by trainer.accumulate_grad_batches="
                f"{self.accumulate} x world size {self.world_size}: every micro-batch has as many rows. Nearest that "
                f"work: {', '.join(near)}."
            )

    def table(self) -> list[tuple[str, str]]:
        """What the run will do, as rows of a table."""
        steps, left = divmod(self.rows, self.batch_size)
        per_step = [
            ("rows per optimizer step", f"{self.batch_size}"),
            ("rows per micro-batch and rank", f"{self.batch_size // self.accumulate // self.world_size}"),
        ]
        if self.stream_buffer is not None:
            return [
                ("rows in memory at a time", f"{self.stream_buffer:,} ({self.rows:,} left of the first)"),
                *per_step,
            ]
        return [
            ("training rows", f"{self.rows:,}"),
            *per_step,
            ("optimizer steps per epoch", f"{steps:,}" + (f" ({left} rows are left for other epochs)" if left else "")),
        ]
