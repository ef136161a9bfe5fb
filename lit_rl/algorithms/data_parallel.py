"""The data-parallel ranks of a run: collectives over rows, and functions applied to the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.algorithms.chosen_functions import arguments_for, copies_for
from lit_rl.core.ranks import broadcast_object, gather_objects
from lit_rl.core.transfers import to_host


def tensor_parallel_size(trainer: Any) -> int:
    """Return the number of neighbouring processes with the same rows: 1 without tensor parallelism."""
    return getattr(trainer.strategy, "tp_size", 1)


def data_world_size(trainer: Any) -> int:
    """Return the number of ranks with rows of their own; known before the processes are started."""
    return trainer.world_size // tensor_parallel_size(trainer)


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks of a run, from the view of one of them. Processes with the same rows count as one.

    Every method is a collective over `group`, and `any` over all processes: all of them call it, or none.
    """

    device: torch.device | str = "cpu"
    """The device of this process."""
    rank: int = 0
    """Index of this process among the ranks with rows of their own."""
    world_size: int = 1
    """Number of ranks with rows of their own."""
    group: Any = None
    """The process group of these ranks; None is that of all processes."""
    same_rows: Any = None
    """The process group of the processes with the same rows; None if there are no others."""

    @classmethod
    def of(cls, trainer: Any, device: torch.device | str) -> Ranks:
        """Return the ranks of a Trainer's run that have rows of their own."""
        groups = getattr(trainer.strategy, "data_group", None), getattr(trainer.strategy, "tensor_group", None)
        return cls(device, trainer.global_rank // tensor_parallel_size(trainer), data_world_size(trainer), *groups)

    def gather(self, column: Tensor) -> Tensor:
        """Return the rows `(n, ...)` of all ranks, in the order of ranks, from our `(b, ...)`.

        Widths may differ between ranks: a second dimension is padded with 0 to the widest.
        """
        column = column.to(self.device)
        if self.world_size == 1:
            return column
        if column.ndim == 2:
            width = torch.tensor(column.shape[1], device=column.device)
            torch.distributed.all_reduce(width, torch.distributed.ReduceOp.MAX, group=self.group)
            column = F.pad(column, (0, int(width) - column.shape[1]))
        return torch.cat(self._gather(column))

    def gather_to_host(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all columns gathered as by `gather`, in host memory. Waits for the device once."""
        found = columns.values() if self.world_size == 1 else map(self.gather, columns.values())
        return dict(zip(columns, to_host(list(found))))

    def gather_tokens(self, flat: Tensor) -> Tensor:
        """Return the flat tokens `(n,)` of all ranks, from our `(m,)`. Their number may differ between ranks."""
        if self.world_size == 1:
            return flat
        counts = [int(count) for count in self._gather(torch.tensor(len(flat), device=flat.device))]
        padded = self._gather(F.pad(flat, (0, max(counts) - len(flat))))
        return torch.cat([row[:count] for row, count in zip(padded, counts)])

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor of the same shape on each."""
        return self.gather(mine[None]).sum(0)

    def counts(self, count: int) -> list[int]:
        """Return the number of every rank, in the order of ranks."""
        return [count] if self.world_size == 1 else self.gather(torch.tensor([count])).tolist()

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any process, including those with the same rows."""
        if self.group is None:
            return any(self.counts(int(flag)))
        return any(gather_objects(flag))

    @property
    def alone(self) -> bool:
        """True if this is the only process."""
        return self.world_size == 1 and self.group is None

    def apply(self, function: Callable[..., Tensor], columns: Mapping[str, Tensor]) -> Tensor:
        """Apply `function(rewards, group_id, ...)` to the rows of all ranks, and return our part: `(b,)` or `(b, t)`.

        `rewards` and `group_id` are passed by position, the other columns by name if the function has such a parameter.

        Args:
            function: A function of columns.
            columns: The columns of our rows, by name; with `mask` if the function may return `(b, t)`.
        """
        first = [columns["rewards"], columns["group_id"]]
        others = {name: column for name, column in columns.items() if name not in ("rewards", "group_id")}
        others = arguments_for(function, others)
        if self.world_size == 1:
            return function(*copies_for(function, *first), **dict(zip(others, copies_for(function, *others.values()))))
        shared = {name: self.gather(column) for name, column in others.items()}
        rows = function(*(self.gather(column) for column in first), **shared)
        mine = rows[self.rank * len(first[0]) :][: len(first[0])]
        return mine if mine.ndim == 1 else mine[:, : columns["mask"].shape[1]]

    # ------------------------------------------------------------------ Python objects

    def objects(self, mine: Any) -> list[Any]:
        """Return the object of every rank, in the order of ranks; anything that can be pickled."""
        return gather_objects(mine, self.group) if self.world_size > 1 else [mine]

    def names(self, mine: Iterable[str]) -> list[str]:
        """Return the sorted union of the names of all ranks: a metric may be logged on one rank only."""
        return sorted({name for theirs in self.objects(list(mine)) for name in theirs})

    def broadcast(self, mine: Any) -> Any:
        """Return the object of rank 0."""
        return broadcast_object(mine, self.group) if self.world_size > 1 else mine

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Reduce a tensor in place and return it; `operation` is the name of a `torch.distributed.ReduceOp`.

        Processes with the same rows all get the result of the first of them, because seconds, for example, differ.
        """
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation), group=self.group)
        if self.same_rows is not None:
            torch.distributed.broadcast(tensor, group=self.same_rows, group_src=0)
        return tensor

    @torch.no_grad()
    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts
