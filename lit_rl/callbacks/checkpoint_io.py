"""Checkpoints that are there whole or not at all, whenever the process dies."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from lit_rl.errors import StorageError

PARTIAL = ".partial-"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to the disk, then renames: a rename within a folder is atomic."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        target = os.fspath(path)
        partial = f"{target}{PARTIAL}{os.getpid()}"
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            flush_folder(os.path.dirname(target) or ".")
        except OSError as error:
            if os.path.exists(partial):
                os.remove(partial)
            raise StorageError(f"The checkpoint {target} could not be written: {error}.") from error


def flush_folder(folder: str) -> None:
    """Make a rename in the folder survive a power cut. Some file systems cannot, and then nothing is lost by it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
