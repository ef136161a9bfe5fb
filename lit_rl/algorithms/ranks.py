"""Functions of rows applied to the rows of every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from lightning import LightningModule


def named(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `offered` that the function's signature names. A term asks for what it needs by naming it."""
    return {name: value for name, value in offered.items() if name in parameters(function)}


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names that the function can be called with; those that a `functools.partial` has set are left out."""
    taken = getattr(function, "keywords", {})
    return tuple(name for name in inspect.signature(function).parameters if name not in taken)


def inner(function: Any) -> Any:
    """The function that settings were given to: under a `functools.partial`, or LightningCLI's `WithKeywords`."""
    return inner(function.func) if hasattr(function, "func") else function


def setting(function: Callable[..., Any], name: str) -> Any:
    """What a keyword of a function is set to: as it was given, or its default."""
    given = getattr(function, "keywords", {})
    return given[name] if name in given else inspect.signature(function).parameters[name].default


def everyones(module: LightningModule, column: Tensor) -> Tensor:
    """`(n, ...)`: the rows of every rank, in the order of ranks, from our `(b, ...)`.

    Responses are of other lengths on other ranks: a second dimension is padded with 0 to the widest.
    """
    column = column.to(module.device)
    if module.trainer.world_size == 1:
        return column
    if column.ndim == 2:
        width = torch.tensor(column.shape[1], device=column.device)
        torch.distributed.all_reduce(width, torch.distributed.ReduceOp.MAX)
        column = F.pad(column, (0, int(width) - column.shape[1]))
    return module.all_gather(column).flatten(0, 1)  # pyright: ignore


def union(names: Iterable[str]) -> list[str]:
    """The names that any rank has, in one order for all. A collective: what one rank logs, another may not know."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return sorted(names)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, list(names))
    return sorted({name for theirs in everyone for name in theirs})


def over_all_ranks(module: LightningModule, function: Callable[..., Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    """Apply `function(rewards, group_id, ...)` to the rows of every rank, and return ours: `(b,)` or `(b, t)`.

    `rewards` and `group_id` go by position, whatever the function calls them, and the others where it names them.
    """
    first = [columns["rewards"], columns["group_id"]]
    others = named(function, {name: column for name, column in columns.items() if name not in ("rewards", "group_id")})
    trainer = getattr(module, "_trainer", None)
    if trainer is None or trainer.world_size == 1:
        return function(*first, **others)
    shared = {name: everyones(module, column) for name, column in others.items()}
    rows = function(*(everyones(module, column) for column in first), **shared)
    mine = rows[module.global_rank * len(first[0]) :][: len(first[0])]
    return mine if mine.ndim == 1 else mine[:, : columns["mask"].shape[1]]


def all_tokens(module: LightningModule, flat: Tensor) -> Tensor:
    """`(n,)`: the flat tokens of every rank, from our `(m,)`; every rank may have another number of them."""
    if module.trainer.world_size == 1:
        return flat
    count = torch.tensor(len(flat), device=flat.device)
    counts = module.all_gather(count)
    longest = int(counts.max())  # pyright: ignore
    padded: Any = module.all_gather(F.pad(flat, (0, longest - len(flat))))
    return torch.cat([row[: int(n)] for row, n in zip(padded, counts)])  # pyright: ignore
