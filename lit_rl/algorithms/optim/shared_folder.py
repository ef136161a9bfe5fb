"""A check that all nodes of a run see one folder, for checkpoints of which each process writes a part."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_rl.errors import ConfigError, StorageError

SEEN_WITHIN = 30.0
"""Seconds in which a network disk shows new files to other nodes."""


def check_checkpoints_are_shared(trainer: L.Trainer) -> None:
    """Call `check_every_node_sees` for each checkpoint folder of a run under DeepSpeed."""
    strategy: Any = trainer.strategy
    folders = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    for folder in dict.fromkeys(filter(None, folders)):
        check_every_node_sees(Path(folder), strategy, f"deepspeed_{strategy.stage}")


def check_every_node_sees(folder: Path, strategy: Any, name: str) -> None:
    """Refuse a run whose checkpoints could not be resumed, before it has learned anything. A collective.

    Args:
        folder: Folder of the checkpoints; it need not exist yet.
        strategy: Lightning's strategy of the run, with initialised processes.
        name: Name of the chosen strategy, for the message.

    Raises:
        ConfigError: a node does not see what rank 0 writes there; on every rank.
        StorageError: rank 0 cannot write there; on every rank.
    """
    folder, said = folder.absolute(), None
    with contextlib.ExitStack() as kept:
        mark = None
        if strategy.is_global_zero:
            try:
                mark = kept.enter_context(_mark(folder))
            except OSError as error:
                said = f"The checkpoints of this run would be in {folder}, where nothing can be written: {error}."
        mark, said = strategy.broadcast((mark, said))
        if said is not None:
            raise StorageError(said)
        sees = strategy.local_rank != 0 or _appears(Path(mark))
        hosts: list[Any] = [None] * strategy.world_size
        torch.distributed.all_gather_object(hosts, None if sees else socket.gethostname())
    if lacking := list(dict.fromkeys(filter(None, hosts))):
        raise ConfigError(
            f"With strategy={name} each process writes its part of a checkpoint, and {' and '.join(lacking)} cannot "
            f"see what rank 0 writes into {Path(mark).parent}. Every node must see the same folder: give a run_dir on "
            "a disk that all nodes share, or take strategy=fsdp, whose checkpoints rank 0 writes whole."
        )


@contextlib.contextmanager
def _mark(folder: Path) -> Iterator[str]:
    """Keep a file in the folder, or its nearest existing parent, with a name that is new to every node."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    with tempfile.NamedTemporaryFile(prefix=".seen_by_every_node_", dir=there) as file:
        yield file.name


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # so that a network disk refreshes its entries
    return True
