"""The processes of a run, and functions of rows applied to the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rl.algorithms.signatures import arguments_for
from lit_rl.generation.ranks import gather_objects


@dataclass(frozen=True)
class Ranks:
    """Who takes part in a run, as one of them sees it.

    Every method is a collective where there is more than one process: all of them call it, or none.
    """

    device: torch.device | str = "cpu"
    """Where this process computes."""
    rank: int = 0
    world_size: int = 1

    def gather(self, column: Tensor) -> Tensor:
        """`(n, ...)`: the rows of every rank, in the order of ranks, from our `(b, ...)`.

        Responses are of other lengths on other ranks: a second dimension is padded with 0 to the widest.
        """
        column = column.to(self.device)
        if self.world_size == 1:
            return column
        if column.ndim == 2:
            width = torch.tensor(column.shape[1], device=column.device)
            torch.distributed.all_reduce(width, torch.distributed.ReduceOp.MAX)
            column = F.pad(column, (0, int(width) - column.shape[1]))
        return torch.cat(self._gather(column))

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
        return self.gather(torch.tensor([count])).tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self.counts(int(flag)))

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
            return function(*first, **others)
        shared = {name: self.gather(column) for name, column in others.items()}
        rows = function(*(self.gather(column) for column in first), **shared)
        mine = rows[self.rank * len(first[0]) :][: len(first[0])]
        return mine if mine.ndim == 1 else mine[:, : columns["mask"].shape[1]]

    # ------------------------------------------------------------------ what is no tensor

    def objects(self, mine: Any) -> list[Any]:
        """What every rank gives, in the order of ranks; anything that can be pickled."""
        return gather_objects(mine) if self.world_size > 1 else [mine]

    def names(self, mine: Iterable[str]) -> list[str]:
        """The names that any rank has, in one order for all: what one rank logs, another may not know."""
        return sorted({name for theirs in self.objects(list(mine)) for name in theirs})

    def broadcast(self, mine: Any) -> Any:
        """What rank 0 gives."""
        if self.world_size == 1:
            return mine
        held = [mine]
        torch.distributed.broadcast_object_list(held, src=0)
        return held[0]

    @torch.no_grad()
    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return parts
