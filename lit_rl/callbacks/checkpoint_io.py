"""Checkpoints that are there whole or not at all, whenever the process dies."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from lit_rl.durable import PARTIAL, flush
from lit_rl.errors import StorageError


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
            flush(os.path.dirname(target) or ".")
        except OSError as error:
            if os.path.exists(partial):
                os.remove(partial)
            raise StorageError(f"The checkpoint {target} could not be written: {error}.") from error

    def load_checkpoint(self, path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What Lightning reads.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the file is damaged, or is something else; names it.
        """
        try:
            loaded = super().load_checkpoint(path, *args, **kwargs)
        except (FileNotFoundError, MemoryError):
            raise
        except Exception as error:  # an unpickler fails on a file of another kind in every way there is
            raise _unreadable(path, str(error).split("\n")[0]) from error
        if not isinstance(loaded, dict) or "state_dict" not in loaded:
            raise _unreadable(path, "it holds no state_dict")
        return loaded


def _unreadable(path: _PATH, reason: str) -> StorageError:
    return StorageError(
        f"{os.fspath(path)} cannot be read as a checkpoint of a run: {reason}. Take another file with ckpt_path=FILE, "
        "or none with ckpt_path=null and another run_dir."
    )


def is_whole(path: Path) -> bool:
    """Whether a checkpoint file can be read to its end. For a sharded folder: whether its index is there."""
    if path.is_dir():
        return (path / "meta.pt").exists() or (path / "latest").exists()
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error):
        return False
