"""A key-value store for one callback, on top of the process group's rendezvous store."""

from __future__ import annotations

from typing import Any

import torch


def own_store(name: str, rank: int) -> Any | None:
    """Return a store that is the same on all ranks, by the count of calls; None without a process group.

    It has a connection of its own: the training may block on that of the rendezvous store. The connection lasts as long
    as the store is referenced.

    Args:
        name: Name of the callback.
        rank: This rank.
    """
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store = distributed.distributed_c10d._get_default_store().clone()
    # Counted in the store: in the second job of a sweep rank 0 has already counted one call, and others have not.
    turn = store.add(f"lit_rl/{name}/turns/{rank}", 1)
    return distributed.PrefixStore(f"lit_rl/{name}/{turn}", store)
