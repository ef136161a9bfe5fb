"""What a run goes on from, on every node: those whose file systems are their own get it from rank 0."""

from __future__ import annotations

import hashlib
import os
import socket
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_rl.callbacks.checkpoint_files import step_of
from lit_rl.commands.rendezvous import Rendezvous
from lit_rl.commands.run_dir import RunDir
from lit_rl.durable import MANIFEST, PARTIAL, flush, replacing
from lit_rl.errors import StorageError

_PIECE = 4 * 2**20
"""Bytes of a file that are sent at once; a store takes 8 MiB."""


def carry(meeting: Rendezvous, run_dir: RunDir, ckpt_path: str | None, *, newest: bool) -> None:
    """Send the start of the run, and the checkpoint to nodes that lack it. Called by rank 0.

    Args:
        meeting: All processes.
        run_dir: Folder of the run.
        ckpt_path: Checkpoint to resume from.
        newest: True if the newest checkpoint was asked for: then no node may hold a newer one.

    Raises:
        StorageError: a node holds a newer one, or lacks one that cannot be sent.
    """
    path = None if ckpt_path is None else Path(ckpt_path).absolute()
    resumed = path is not None and run_dir.summary.exists()
    meeting.tell(
        "start",
        {
            "run_dir": str(run_dir.path.absolute()),
            "ckpt_path": path and str(path),
            "mark": path and _mark(path),
            "summary": run_dir.read_summary() if resumed else None,
            "newest": newest,
        },
    )
    answers = meeting.answers()
    lacking = [answer["host"] for answer in answers if answer["lacks"]]
    _check_newest(path, [f"{answer['host']}:{answer['newer']}" for answer in answers if answer["newer"]])
    if path is not None and path.is_dir() and lacking:
        raise StorageError(
            f"{path} is a folder with a part of each process, and {', '.join(lacking)} does not see there what "
            "this node sees. A run with strategy=deepspeed_* goes on where all nodes share the file system of run_dir."
        )
    if path is not None and lacking:
        meeting.send(_pieces(path), len(lacking))
    meeting.tell("carried", {})


def say_finished(meeting: Rendezvous) -> None:
    """Send, in place of `send_start`, that the run has finished. Called by rank 0. Returns once all others have
    received it, since the store ends with this process."""
    meeting.tell("start", {"finished": True})
    meeting.answers()


def take_over(meeting: Rendezvous) -> tuple[RunDir, str | None] | None:
    """Receive the folder of the run, and the checkpoint to resume from; None where the run has finished. Called by the
    other ranks.

    Raises:
        LitRLError: why the run does not begin.
    """
    told = meeting.hear("start")
    if "finished" in told:
        meeting.answer(None)
        return None
    run_dir, path = RunDir(Path(told["run_dir"])), Path(told["ckpt_path"]) if told["ckpt_path"] else None
    first = meeting.place.first_of_node
    lacks = first and path is not None and (not path.exists() or _mark(path) != told["mark"])
    newer = _newer(run_dir, path) if first and told["newest"] else None
    if first and newer is None:
        run_dir.error.unlink(missing_ok=True)  # of the attempt before
        _say_the_same(run_dir, told["summary"])
    meeting.answer({"host": socket.gethostname(), "lacks": lacks, "newer": newer and str(newer)})
    if lacks and path is not None:
        _write(path, meeting.received())
    meeting.hear("carried")
    return run_dir, str(path) if path is not None else None


def _check_newest(path: Path | None, newer: Sequence[str]) -> None:
    if newer:
        holds = f"node 0 would go on from {path.name}" if path is not None else "node 0 holds none and would begin anew"
        raise StorageError(
            f"ckpt_path=last: {holds}, and there is {' and '.join(newer)}. Where nodes have file systems of their own, "
            "the run is in the folder of node 0: let the machine be node 0 that was it before, or copy the folder. To "
            "go on without, remove it there."
        )


def _newer(run_dir: RunDir, path: Path | None) -> Path | None:
    here = max(run_dir.checkpoints.glob("*.ckpt"), key=step_of, default=None)
    return here if here is not None and (path is None or step_of(here) > step_of(path)) else None


def _mark(path: Path) -> str | None:
    """Return a digest that differs between two checkpoints, without reading all of them; None where there is none."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        if path.is_dir():
            digest.update((path / MANIFEST).read_bytes())
        else:
            with zipfile.ZipFile(path) as archive:
                digest.update(repr([(part.filename, part.file_size, part.CRC) for part in archive.infolist()]).encode())
    except (OSError, zipfile.BadZipFile):
        return None
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _write(path: Path, pieces: Iterator[bytes]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f"{path.name}{PARTIAL}{os.getpid()}") as partial:
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            flush(partial)
    except OSError as error:
        raise StorageError(
            f"This node ({socket.gethostname()}) lacks the checkpoint {path}, and cannot write it: {error}."
        ) from error


def _say_the_same(run_dir: RunDir, summary: dict[str, Any] | None) -> None:
    """Write rank 0's summary here. It decides what is measured, which takes all processes."""
    if summary is not None and run_dir.read_summary() != summary:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.write_summary(summary)
