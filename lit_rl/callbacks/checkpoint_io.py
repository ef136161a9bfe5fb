"""Checkpoints that exist whole or not at all, whenever the process dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch.utils._pytree import tree_leaves

from lit_rl.callbacks.checkpoint_files import fault_of_contents, newest_whole, unusable, verify_once
from lit_rl.durable import PARTIAL, check_room, flush, replacing, tried_again
from lit_rl.errors import StorageError


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint plugin that writes beside the target, flushes, then renames: a rename within a folder is atomic."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint as Lightning does, but atomically.

        Raises:
            StorageError: it cannot be written; with a full disk, after a retry. Earlier checkpoints are unchanged.
        """
        target = os.fspath(path)
        try:
            tried_again(lambda: _write(checkpoint, target), f"The checkpoint {target}")
        except OSError as error:
            raise StorageError(
                f"The checkpoint {target} could not be written: {error}. {_what_is_left(target)}"
            ) from error

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint as Lightning does, once it is verified.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file is damaged, or is something else; names it.
        """
        if Path(path).exists():
            verify_once(Path(path))
        try:
            loaded = super().load_checkpoint(path, *args, **kwargs)
        except (FileNotFoundError, MemoryError):
            raise
        except Exception as error:  # an unpickler fails on a file of another kind in every way there is
            raise unusable(Path(path), fault_of_contents(error)) from error
        if not isinstance(loaded, dict) or "state_dict" not in loaded:
            raise unusable(Path(path), "it holds no state_dict")
        return loaded


def _what_is_left(target: str) -> str:
    """Return the hint how to go on after a checkpoint that could not be written."""
    if newest_whole(list(Path(target).parent.glob("*.ckpt")))[0] is None:
        return "No checkpoint of this run was saved before: mend this, and start it anew."
    return "What was saved before is as it was: mend this, and go on from there with ckpt_path=last."


def _write(checkpoint: dict[str, Any], target: str) -> None:
    folder, partial = os.path.dirname(target) or ".", f"{os.path.basename(target)}{PARTIAL}{os.getpid()}"
    os.makedirs(folder, exist_ok=True)
    check_room(folder, size_of(checkpoint))
    try:
        with replacing(Path(target), partial) as unfinished:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
            flush(unfinished)
        flush(folder)
    except (OSError, RuntimeError) as error:
        if isinstance(error.__context__, OSError):  # torch's writer, which cannot end its file then, hides it
            raise error.__context__ from error
        raise


def size_of(checkpoint: Any) -> int:
    """Return the bytes of the tensors in a checkpoint; shared storage counts once."""
    tensors = [each for each in tree_leaves(checkpoint) if isinstance(each, torch.Tensor)]
    return sum({(each.data_ptr() or id(each), each.nbytes): each.nbytes for each in tensors}.values())
