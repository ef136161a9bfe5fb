"""The ranks of a run: objects sent between them, and work that all of them finish or none, because the others must
not wait for one that has failed.

`algorithms.data_parallel.Ranks` are those among them that have rows of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from lit_rl.core import upstream
from lit_rl.core.errors import GenerationError, LitRLError
from lit_rl.core.interrupts import Interrupted

Result = TypeVar("Result")

_thread = threading.local()


def world_size() -> int:
    """Return the number of processes of the default group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the default group; 0 without a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, in their order; anything that can be pickled. A collective.

    Args:
        value: This rank's object.
        group: The group of ranks. None: all processes.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the object of the group's first rank; anything that can be pickled. A collective.

    Args:
        value: This rank's object; read on the first rank only.
        group: The group of ranks. None: all processes.
    """
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def in_background_thread() -> bool:
    """Tell whether this is a background thread while the main one uses the ranks' group: no collective may be
    entered."""
    return getattr(_thread, "is_background", False)


@contextmanager
def background_thread() -> Iterator[None]:
    """Mark the calls inside as those of a background thread, which enters no collective."""
    before = in_background_thread()
    _thread.is_background = True
    try:
        yield
    finally:
        _thread.is_background = before


def run_on_all_ranks(work: Callable[[], Result]) -> Result:
    """Run `work` on every rank; where one fails, all raise that rank's error. A collective.

    In a background thread it runs the work and no more: each rank's error is its own.

    Raises:
        LitRLError: of the class of the first rank that failed; this rank's own where it is of that class, else that
            rank's, with its number in front.
        Interrupted: likewise, where that rank was interrupted.
    """
    if in_background_thread():
        return work()
    error: LitRLError | Interrupted | None = None
    result: Any = None
    try:
        result = work()
    except (LitRLError, Interrupted) as failed:
        error = failed
    except Exception as failed:
        if world_size() == 1:
            raise
        error = GenerationError(f"{type(failed).__name__}: {failed}")
        error.__cause__ = failed
    failures = gather_objects(None if error is None else (type(error), str(error)))
    first = next((number for number, failure in enumerate(failures) if failure is not None), None)
    if first is not None:
        kind, message = failures[first]  # one class on every rank: they recover from it alike, or not at all
        if error is not None and type(error) is kind:
            raise error
        raise kind(f"Rank {first}: {message}")
    return result


def callback_store(name: str, rank: int) -> Any | None:
    """Return a store that is the same on all ranks, by the count of calls; None without a process group.

    It has a connection of its own: the training may block on that of the rendezvous store. The connection lasts as long
    as the store is referenced.

    Args:
        name: Name of the callback.
        rank: This rank.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = upstream.default_store().clone()
    # Counted in the store: in the second job of a sweep rank 0 has already counted one call, and others have not.
    turn = store.add(f"lit_rl/{name}/turns/{rank}", 1)
    return dist.PrefixStore(f"lit_rl/{name}/{turn}", store)
