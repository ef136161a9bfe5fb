"""The processes of a run, and functions of rows applied to the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.algorithms.signatures import arguments_for, copies_for
from lit_rl.generation.ranks import gather_objects
from lit_rl.transfers import to_host


def sharing_rows(trainer: Any) -> int:
    """How many neighbouring processes of a run have the same rows: under tensor parallelism several, else 1."""
    return getattr(trainer.strategy, "tp_size", 1)


def data_ranks(trainer: Any) -> int:
    """How many parts the rows of a run are dealt out in; known before its processes are started."""
    return trainer.world_size // sharing_rows(trainer)


def data_rank(trainer: Any) -> int:
    """Which of these parts this process has."""
    return trainer.global_rank // sharing_rows(trainer)


@dataclass(frozen=True)
class Ranks:
    """Who has rows of a run, as one of them sees it. Processes that share their rows count as one.

    Every method is a collective over `group`, and `any` is one over all processes: all of them call it, or none.
    """

    device: torch.device | str = "cpu"
    """Where this process computes."""
    rank: int = 0
    """Ours among those that have rows of their own."""
    world_size: int = 1
    """How many have rows of their own."""
    group: Any = None
    """The process group of those; None is that of all processes."""
    same_rows: Any = None
    """The process group of those that have the rows that we have; None where nobody else does."""

    @classmethod
    def of(cls, trainer: Any, device: torch.device | str) -> Ranks:
        """The ranks of a Trainer's run that have rows of their own, as this process sees them."""
        groups = getattr(trainer.strategy, "data_group", None), getattr(trainer.strategy, "tensor_group", None)
        return cls(device, data_rank(trainer), data_ranks(trainer), *groups)

    def gather(self, column: Tensor) -> Tensor:
        """`(n, ...)`: the rows of every rank, in the order of ranks, from our `(b, ...)`.

        Responses are of other lengths on other ranks: a second dimension is padded with 0 to the widest.
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
        """The rows of every rank, as `gather` returns them, of all columns in the host's memory; waits once."""
        found = columns.values() if self.world_size == 1 else map(self.gather, columns.values())
        return dict(zip(columns, to_host(list(found))))

    def gather_tokens(self, flat: Tensor) -> Tensor:
        """`(n,)`: the flat tokens of every rank, from our `(m,)`; every rank may have another number of them."""
        if self.world_size == 1:
            return flat
        counts = [int(count) for count in self._gather(torch.tensor(len(flat), device=flat.device))]
        padded = self._gather(F.pad(flat, (0, max(counts) - len(flat))))
        return torch.cat([row[:count] for row, count in zip(padded, counts)])

    def total(self, mine: Tensor) -> Tensor:
        """The sum of a tensor of one shape over the ranks."""
        return self.gather(mine[None]).sum(0)

    def counts(self, count: int) -> list[int]:
        """The numbers that every rank gives, in the order of ranks."""
        return [count] if self.world_size == 1 else self.gather(torch.tensor([count])).tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process, also of those that share their rows."""
        if self.group is None:
            return any(self.counts(int(flag)))
        return any(gather_objects(flag))

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.world_size == 1 and self.group is None

    def apply(self, function: Callable[..., Tensor], columns: Mapping[str, Tensor]) -> Tensor:
        """Apply `function(rewards, group_id, ...)` to the rows of every rank, and return ours: `(b,)` or `(b, t)`.

        `rewards` and `group_id` go by position, whatever the function calls them, and the others where it names them.

        Args:
            function: Of columns.
            columns: Of our rows, by name; `mask` too where the function may return `(b, t)`.
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

    # ------------------------------------------------------------------ what is no tensor

    def objects(self, mine: Any) -> list[Any]:
        """What every rank gives, in the order of ranks; anything that can be pickled."""
        return gather_objects(mine, self.group) if self.world_size > 1 else [mine]

    def names(self, mine: Iterable[str]) -> list[str]:
        """The names that any rank has, in one order for all: what one rank logs, another may not know."""
        return sorted({name for theirs in self.objects(list(mine)) for name in theirs})

    def broadcast(self, mine: Any) -> Any:
        """What rank 0 gives."""
        if self.world_size == 1:
            return mine
        held = [mine]
        torch.distributed.broadcast_object_list(held, group=self.group, group_src=0)
        return held[0]

    def all_reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """The tensor of one shape, reduced in place; `operation` is one of `torch.distributed.ReduceOp`, by name.

        Where ranks share their rows, all get what the first of them got: seconds, for one, are each process's own.
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
