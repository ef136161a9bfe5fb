"""A key-value store of one callback's own, over the one by which the ranks have found each other."""

from __future__ import annotations

from typing import Any

import torch


def own_store(name: str, rank: int) -> Any | None:
    """The same store on every rank that asks for it as often; None where there is no process group.

    It has a connection of its own: the training may wait on the one that it found the others by. The connection lasts
    as long as somebody holds the store.

    Args:
        name: Whose it is.
        rank: Ours.
    """
    distributed: Any = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    store = distributed.distributed_c10d._get_default_store().clone()
    # Counted in the store: in the second job of a sweep rank 0 has counted one already, and others have not.
    turn = store.add(f"lit_rl/{name}/turns/{rank}", 1)
    return distributed.PrefixStore(f"lit_rl/{name}/{turn}", store)
