"""Batch arithmetic: from a rollout or rows of a data set to optimizer steps (docs/batch-arithmetic.md)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import product

from lit_rl.errors import ConfigError, in_range


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of a run with rollouts. All are global (over every rank) unless the name says otherwise."""

    prompts_per_rollout: int
    group_size: int
    minibatches: int
    iterations: int
    accumulate: int
    world_size: int
    split_groups: int = 1
    max_new_tokens: int = 1
    why: str = ""
    """The reason for `accumulate`, where the memory plan chose it."""

    def __post_init__(self) -> None:
        for key, value in self._keys().items():
            in_range(key, value, low=1)
        if self.group_size % self.split_groups:
            raise ConfigError(
                f"algo.split_groups={self.split_groups} does not divide algo.group_size={self.group_size}: "
                "every slice of a group must have the same number of rows."
            )
        if not self._divides(self.prompts_per_rollout, self.minibatches, self.accumulate):
            raise ConfigError(self._explain())

    def _keys(self) -> dict[str, int]:
        return {
            "data.prompts_per_rollout": self.prompts_per_rollout,
            "algo.group_size": self.group_size,
            "algo.minibatches": self.minibatches,
            "algo.iterations": self.iterations,
            "trainer.accumulate_grad_batches": self.accumulate,
            "data-parallel size": self.world_size,
            "algo.split_groups": self.split_groups,
        }

    def _divides(self, prompts: int, minibatches: int, accumulate: int) -> bool:
        """Tell whether mini-batches hold whole groups of each rank, and micro-batches whole slices of groups."""
        per_rank, left = divmod(prompts, self.world_size)
        if left or per_rank < minibatches or per_rank % minibatches:
            return False
        return (per_rank // minibatches * self.split_groups) % accumulate == 0

    def _explain(self) -> str:
        """Return the message: the equation, the settings, and the three nearest that work."""
        want = (self.prompts_per_rollout, self.minibatches, self.accumulate)
        near = sorted(
            (
                (abs(p - want[0]) / want[0] + 2 * abs(m - want[1]) / want[1] + 2 * abs(a - want[2]) / want[2], p, m, a)
                for p, m, a in product(
                    range(1, 2 * want[0] + want[1] * want[2] * self.world_size + 1),
                    range(1, want[1] + 1),
                    range(1, want[2] + 1),
                )
                if self._divides(p, m, a)
            ),
        )[:3]
        lines = [
            f"  data.prompts_per_rollout={p} algo.minibatches={m} trainer.accumulate_grad_batches={a}"
            for _, p, m, a in near
        ]
        slices = f" (each group cut into {self.split_groups} slices)" if self.split_groups > 1 else ""
        return (
            f"data.prompts_per_rollout={want[0]} must be divisible by algo.minibatches={want[1]} x "
            f"trainer.accumulate_grad_batches={want[2]} x data-parallel size {self.world_size}{slices}, "
            "so that every micro-batch holds whole groups. Nearest settings that work:\n" + "\n".join(lines)
        )

    @property
    def slots(self) -> int:
        """Micro-batches of a rollout (R of the design)."""
        return self.iterations * self.minibatches * self.accumulate

    @property
    def units(self) -> int:
        """Slices of groups of a rank in an optimizer step, of which micro-batches are made."""
        return self.prompts_per_rollout // self.world_size // self.minibatches * self.split_groups

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of a rollout."""
        return self.iterations * self.minibatches

    @property
    def completions(self) -> int:
        """Completions of a rollout, over all ranks."""
        return self.prompts_per_rollout * self.group_size

    def table(self) -> list[tuple[str, str]]:
        """Return the batch arithmetic as rows of a table."""
        per_step = self.completions // self.minibatches
        micro = per_step // self.accumulate // self.world_size
        return [
            ("prompts per rollout", f"{self.prompts_per_rollout}"),
            ("completions per rollout", f"{self.completions} = {self.prompts_per_rollout} x {self.group_size}"),
            ("tokens per rollout, at most", f"{self.completions * self.max_new_tokens:,}"),
            ("optimizer steps per rollout", f"{self.steps_per_rollout} = {self.iterations} x {self.minibatches}"),
            ("completions per optimizer step", f"{per_step}"),
            ("completions per micro-batch and rank", f"{micro}"),
            *([("micro-batches per optimizer step", self.why)] if self.why else []),
        ]


def mix(*parts: int) -> int:
    """Return a seed made of several numbers, the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class OfflinePlan:
    """The batch sizes of a run on a data set. All are global (over every rank)."""

    batch_size: int
    """Rows of an optimizer step."""
    accumulate: int
    world_size: int
    rows: int
    """Training rows that are used; for a stream, in its first window."""
    stream_buffer: int | None = None
    """Rows of a stream in memory at a time; None where all are."""
    why: str = ""
    """The reason for `accumulate`, where the memory plan chose it."""

    def __post_init__(self) -> None:
        in_range("trainer.accumulate_grad_batches", self.accumulate, low=1)
        parts = self.accumulate * self.world_size
        if self.batch_size % parts:
            below = self.batch_size // parts * parts
            near = [f"data.batch_size={size}" for size in (below, below + parts) if size]
            raise ConfigError(
                f"data.batch_size={self.batch_size} must be divisible by trainer.accumulate_grad_batches="
                f"{self.accumulate} x data-parallel size {self.world_size}: every micro-batch has as many rows. "
                f"Nearest that work: {', '.join(near)}."
            )

    def table(self) -> list[tuple[str, str]]:
        """Return the batch arithmetic as rows of a table."""
        steps, left = divmod(self.rows, self.batch_size)
        per_step = [
            ("rows per optimizer step", f"{self.batch_size}"),
            ("rows per micro-batch and rank", f"{self.batch_size // self.accumulate // self.world_size}"),
            *([("micro-batches per optimizer step", self.why)] if self.why else []),
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
