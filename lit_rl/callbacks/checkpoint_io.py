"""Checkpoints that are there whole or not at all, whenever the process dies."""

from __future__ import annotations

import errno
import os
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves

from lit_rl.durable import MANIFEST, PARTIAL, check_room, flush, is_as_noted
from lit_rl.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAITS = (2.0, 8.0, 20.0)
"""Seconds until a checkpoint that found a full disk is tried again: somebody may be making room."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, flushes to the disk, then renames: a rename within a folder is atomic."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """As Lightning's.

        Raises:
            StorageError: it cannot be written; of a full disk, after it was tried again. What was saved before is
                as it was.
        """
        target = os.fspath(path)
        for wait in (*_WAITS, None):
            try:
                return _write(checkpoint, target)
            except OSError as error:
                if error.errno not in _FULL or wait is None:
                    raise StorageError(
                        f"The checkpoint {target} could not be written: {error}. What was saved before is as it was: "
                        "mend this, and go on from there with ckpt_path=last."
                    ) from error
                rank_zero_warn(f"The checkpoint {target} finds no room: {error}. It is tried again in {wait:g} s.")
            time.sleep(wait)

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


def _write(checkpoint: dict[str, Any], target: str) -> None:
    folder, partial = os.path.dirname(target) or ".", f"{target}{PARTIAL}{os.getpid()}"
    os.makedirs(folder, exist_ok=True)
    check_room(folder, size_of(checkpoint))
    try:
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
        flush(folder)
    except (OSError, RuntimeError) as error:
        Path(partial).unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):  # torch's writer, which cannot end its file then, hides it
            raise error.__context__ from error
        raise


def size_of(checkpoint: Any) -> int:
    """Bytes of the tensors in it; what two of them share counts once."""
    tensors = [each for each in tree_leaves(checkpoint) if isinstance(each, torch.Tensor)]
    return sum({(each.data_ptr() or id(each), each.nbytes): each.nbytes for each in tensors}.values())


def _unreadable(path: _PATH, reason: str) -> StorageError:
    return StorageError(
        f"{os.fspath(path)} cannot be read as a checkpoint of a run: {reason}. Take another file with ckpt_path=FILE, "
        "or none with ckpt_path=null and another run_dir."
    )


def is_whole(path: Path) -> bool:
    """Whether a checkpoint holds what was written: a file has a checksum of each part, and a folder of pieces, those of
    earlier versions aside, a manifest."""
    if path.is_dir():
        known = (path / "meta.pt").exists() or (path / "latest").exists()
        return known and (not (path / MANIFEST).exists() or is_as_noted(path))
    try:
        torch._C.PyTorchFileReader(os.fspath(path))  # it asks more of an archive's index than Python's own reader
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error):
        return False
