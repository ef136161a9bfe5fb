"""Checkpoint files: written whole or not at all, verified before they are read, and searched for the newest whole
one."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from lit_rl.core import upstream
from lit_rl.core.durable_files import (
    MANIFEST,
    PARTIAL,
    check_free_space,
    flush,
    matches_manifest,
    replacing,
    retry_on_full_disk,
)
from lit_rl.core.errors import StorageError

_DEEPSPEED, _FSDP = "latest", "meta.pt"
"""Marker files of checkpoints that are folders. We write DeepSpeed's (`lit_rl.algorithms.optim.strategies`), with a
manifest; Lightning writes the other kind, where a user asks its own FSDP for `state_dict_type="sharded"`."""
_INDEX = ".metadata"
"""The index of the pieces of `torch.distributed.checkpoint`, which FSDP's are; it is written after all of them."""
_found_whole: set[tuple[str, int, int, int]] = set()
"""Files that this process has read and found whole: gigabytes are not read twice."""


def is_whole(path: Path) -> bool:
    """Tell whether a checkpoint holds what was written. Reads every byte.

    A file has a checksum of each part, and a folder has a manifest (one of Lightning's FSDP, without checksums, an
    index).
    """
    whole = path.exists() and _find_fault(path) is None
    if path.is_file():
        (_found_whole.add if whole else _found_whole.discard)(_file_version(path))
    return whole


def verify(path: Path) -> None:
    """Refuse a checkpoint that does not hold what was written, before anything is read from it.

    Raises:
        StorageError: says what is wrong with it, and names the newest whole one beside it.
    """
    if not is_whole(path):
        raise unusable_checkpoint(path, _find_fault(path) or "it was replaced while it was read")


def verify_once(path: Path) -> None:
    """Call `verify`, unless this process has found the same file whole before."""
    if not (path.is_file() and _file_version(path) in _found_whole):
        verify(path)


def unusable_checkpoint(path: Path, fault: str) -> StorageError:
    """Return the error for a checkpoint that a run cannot be resumed from.

    Args:
        path: The checkpoint.
        fault: A sentence without its end, such as "it is empty".
    """
    others = [other for other in path.parent.glob("*.ckpt") if other != path]
    newest, _ = newest_whole(others)
    way_out = (
        "There is no other whole checkpoint beside it: take another file with ckpt_path=FILE, or none with "
        "ckpt_path=null and another run_dir."
        if newest is None
        else f"The newest whole checkpoint beside it is ckpt_path={newest}."
    )
    return StorageError(f"{path} cannot be used as a checkpoint: {fault}. {way_out}")


def read_lazily(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint before anything is loaded; tensors are read from the disk at their first use.

    Empty where it cannot be read, as loading will report, and for DeepSpeed's folders.
    """
    file = path / _FSDP if path.is_dir() else path
    try:
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception:  # an unpickler fails on a file of another kind in every way there is
        return {}
    return saved if isinstance(saved, dict) else {}


def fault_of_contents(error: BaseException) -> str:
    """Describe, for `unusable_checkpoint`, why PyTorch's reader of plain values refuses a whole file."""
    if found := re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error)):
        return (
            f"it holds a Python object ({found[1]}), and reading one runs code of whoever wrote it. Nothing was "
            "run: lit_rl reads tensors and plain values only"
        )
    return f"its contents are not those of a checkpoint ({type(error).__name__})"


def newest_whole(paths: list[Path]) -> tuple[Path | None, list[Path]]:
    """Return the newest whole checkpoint, None where there is none, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in sorted(paths, key=lambda path: (step_of(path), path.stat().st_mtime), reverse=True):
        if is_whole(path):
            return path, damaged
        damaged.append(path)
    return None, damaged


def step_of(path: Path) -> int:
    """Return the optimizer step in the name of a checkpoint, or else the last number in it; -1 where none is."""
    numbers = re.findall(r"step[_=](\d+)", path.stem) or re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else -1


def _file_version(path: Path) -> tuple[str, int, int, int]:
    status = path.stat()
    return os.path.realpath(path), status.st_ino, status.st_size, status.st_mtime_ns


def _find_fault(path: Path) -> str | None:
    """Describe the fault of a file or a folder; None where it is whole."""
    if path.is_dir() and (path / _DEEPSPEED).exists():
        if not (path / MANIFEST).exists():
            return f"it is damaged: {MANIFEST}, the list of its pieces, is missing"
        return None if matches_manifest(path) else f"it is damaged: a piece is missing, or differs from {MANIFEST}"
    if path.is_dir() and (path / _FSDP).exists():
        return None if (path / _INDEX).exists() else f"it is damaged: {_INDEX}, the index of its pieces, is missing"
    if path.is_dir():
        return f"it is a folder that contains neither {_DEEPSPEED} nor {_FSDP}"
    try:
        upstream.read_archive_index(os.fspath(path))
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        return None if damaged is None else f"it is damaged: {damaged} in it does not have its checksum"
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, zlib.error):
        return _describe_non_archive(path)


def _describe_non_archive(path: Path) -> str:
    """Describe a file that PyTorch's reader of archives refuses."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not head:
        return "it is empty"
    try:
        has_index = zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it has one at its end, which is not sound
        has_index = True
    if has_index:
        return "it is damaged, or an archive of another kind"
    if head.startswith(b"PK"):
        return "it is cut short: the index at its end is missing"
    if head.startswith(b"\x80"):
        return (
            "it is a pickle, and reading one runs code of whoever wrote it. lit_rl reads none; write it anew with "
            "torch.save, of tensors and plain values"
        )
    if head[8:9] == b"{":
        return "it holds weights alone (safetensors); start from its folder with model.name=FOLDER"
    try:
        head[:500].decode()
    except UnicodeDecodeError:
        return "it is no file of torch.save"
    return "it is a file of text"


# ---------------------------------------------------------------------- writing and reading


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint plugin that writes beside the target, flushes, then renames: a rename within a folder is atomic."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint as Lightning does, but atomically.

        Raises:
            StorageError: it cannot be written; with a full disk, after a retry. Earlier checkpoints are unchanged.
        """
        target = os.fspath(path)
        try:
            retry_on_full_disk(lambda: _write_atomically(checkpoint, target), f"The checkpoint {target}")
        except OSError as error:
            saved, _ = newest_whole(list(Path(target).parent.glob("*.ckpt")))
            hint = (
                "This run had saved no checkpoint before: fix this, and start it again."
                if saved is None
                else "Earlier checkpoints are unchanged: fix this, and resume from the newest with ckpt_path=last."
            )
            raise StorageError(f"The checkpoint {target} could not be written: {error}. {hint}") from error

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
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
            raise unusable_checkpoint(Path(path), fault_of_contents(error)) from error
        if not isinstance(loaded, dict) or "state_dict" not in loaded:
            raise unusable_checkpoint(Path(path), "it holds no state_dict")
        return loaded


def _write_atomically(checkpoint: dict[str, Any], target: str) -> None:
    folder, partial = os.path.dirname(target) or ".", f"{os.path.basename(target)}{PARTIAL}{os.getpid()}"
    os.makedirs(folder, exist_ok=True)
    check_free_space(folder, checkpoint_size(checkpoint))
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


def checkpoint_size(checkpoint: Any) -> int:
    """Return the bytes of the tensors in a checkpoint; shared storage counts once."""
    tensors = [each for each in upstream.leaves(checkpoint) if isinstance(each, torch.Tensor)]
    return sum({(each.data_ptr() or id(each), each.nbytes): each.nbytes for each in tensors}.values())
