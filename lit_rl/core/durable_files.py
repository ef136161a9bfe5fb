"""Files and folders that are either whole or absent.

An unfinished one has a name of its own. A file that a run resumes from, or reports with, is flushed before it
gets its final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PARTIAL = ".partial-"
"""Between the name of a checkpoint and the number of the process that is writing it."""

MANIFEST = "manifest.json"
"""The file that lists every file of a folder, with its size and digest."""

RETRY_WAITS = (2.0, 8.0, 20.0)
"""Seconds before each retry on a full disk: space may be freed meanwhile."""


def retry_on_full_disk(write: Callable[[], T], what: str) -> T:
    """Return the result of `write`, which is retried after each of `RETRY_WAITS` while the disk is full.

    Args:
        write: Writes something whole or leaves nothing of it.
        what: The name of the written object in the warning.

    Raises:
        Exception: whatever `write` raises; of a full disk, its last time.
    """
    for wait in RETRY_WAITS:
        try:
            return write()
        except Exception as error:
            if not is_full(error):
                raise
            warnings.warn(f"{what} finds no room: {error}. It is tried again in {wait:g} s.", stacklevel=2)
        time.sleep(wait)
    return write()


def is_full(error: BaseException) -> bool:
    """Tell whether an error means that the disk, or the user's quota on it, is full."""
    return _errno_of(error) in (errno.ENOSPC, errno.EDQUOT)


def is_failing(error: BaseException) -> bool:
    """Tell whether an error means that the disk, or the server of a network folder (a stale file handle), fails."""
    return _errno_of(error) in (errno.EIO, errno.ESTALE)


def _errno_of(error: BaseException) -> int | None:
    """Return the errno of an error. Errors of safetensors and tokenizers, which are written in Rust, have it in
    their text only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found is not None else None


def check_free_space(folder: str | Path, size: int) -> None:
    """Raise unless enough disk space is free.

    Args:
        folder: Where it will be written; it need not exist yet.
        size: Bytes.

    Raises:
        OSError: ENOSPC, with both numbers.
    """
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    try:
        total, _, free = shutil.disk_usage(existing)
    except OSError:
        return  # unknown
    if total and free < size:
        raise OSError(errno.ENOSPC, f"it takes {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free", str(folder))


def flush(path: str | Path) -> None:
    """Make a file, or the names in a folder, survive a power cut.

    Raises:
        OSError: a file could not be written. A folder is left as it is where the file system cannot flush one.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.close(handle)


def flush_tree(folder: Path) -> None:
    """Flush everything in a folder, and the folder last."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


@contextmanager
def replacing(path: Path, partial: str | None = None) -> Iterator[Path]:
    """Write a file under another name, which becomes `path` when the block ends, and is removed if it fails.

    A file that has to survive a power cut is flushed in the block: that takes some 10 ms, too much in every step.

    Args:
        path: In an existing folder.
        partial: The other name, in the same folder. None: `.NAME.partial`.
    """
    unfinished = path.with_name(f".{path.name}.partial" if partial is None else partial)
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def write_new(path: Path, text: str) -> None:
    """Write a file that survives a power cut, unless it exists. Of several processes, exactly one succeeds.

    Raises:
        FileExistsError: it exists, whole.
        OSError: it could not be written; nothing of it is left.
    """
    unfinished = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex}")  # several hosts may count the same pid
    try:
        unfinished.write_text(text)
        flush(unfinished)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with path.open("x") as file:
                try:
                    file.write(text)
                    file.flush()
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, once all of it is written."""
    files = {str(path.relative_to(folder)): _facts(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")


def matches_manifest(folder: Path) -> bool:
    """Tell whether every file of the manifest is present with its noted size and digest. Reads them all."""
    try:
        noted = json.loads((folder / MANIFEST).read_text())
        return bool(noted) and all(_facts(folder / name) == facts for name, facts in noted.items())
    except (OSError, ValueError, AttributeError):
        return False


def _facts(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}
