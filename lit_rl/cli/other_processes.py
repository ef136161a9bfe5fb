"""Errors of torch.distributed in the words of a run: another process of it is gone, or never came."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from lit_rl.errors import BackendError, ConfigError, LitRLError

_GO_ON = (
    "If it ended by itself, what it said last is the reason; if it said nothing, it was killed, as the kernel does "
    "when memory is out. Once that is mended, start the same command on every node with ckpt_path=last: the run goes "
    "on from its newest checkpoint."
)

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Messages of gloo and NCCL, where a process at the other end is gone; they raise a RuntimeError."""


def has_lost_another(error: BaseException) -> bool:
    """Tell whether the error is about the loss of another process, and not about this one."""
    ours = isinstance(error, LitRLError)
    return isinstance(error, RuntimeError) and not ours and any(words in str(error) for words in _LOST)


def of_other_processes(error: BaseException) -> LitRLError | None:
    """Return the error as one of ours, or None where it is another one."""
    from torch.distributed import DistError

    text = str(error)
    if isinstance(error, ValueError) and text.startswith("You set `devices="):  # Lightning, of what a launcher started
        return ConfigError(text.replace("`devices=", "`trainer.devices=").replace("`num_nodes=", "`trainer.num_nodes="))
    of_gloo = isinstance(error, RuntimeError) and not isinstance(error, LitRLError) and "gloo" in text
    if not (of_gloo or isinstance(error, DistError) or has_lost_another(error)):
        return None
    meet = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
    said = _first_words(text)
    if "EADDRINUSE" in text:
        return BackendError(
            f"The processes of the run would meet at {meet}, and that port is taken. Set another MASTER_PORT."
        )
    if "waiting for clients" in text or "failed to connect" in text:
        return BackendError(
            f"Not every process of the run came to {meet}, where they meet: {said}. See what the others said, and "
            "whether all nodes reach that address."
        )
    where = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", text)
    which = f"Another process of the run, at {where.group(1)}," if where else "Another process of the run"
    return BackendError(f"{which} is gone, or does not answer: {said}. {_GO_ON}")


def one_has_ended(how: str, killed: bool, folder: Path | None, error: BaseException) -> BackendError:
    """Return the error for a lost connection where the end of the other process is known.

    Args:
        how: A clause with its rank.
        killed: True if a signal killed it; else it printed its own reason.
        folder: Folder of the run, where there is a checkpoint to resume from.
        error: Error of the connection.
    """
    reason = "" if killed else " What it said last is the reason."
    again = "Start the same command again"
    if folder is not None:
        where = shlex.join(["ckpt_path=last", f"run_dir={folder}"])
        again = f"Start the same command with {where}: the run goes on from its newest checkpoint"
    return BackendError(f"{how}.{reason} {again}. What torch.distributed said: {_first_words(str(error))}.")


def _first_words(text: str) -> str:
    return " ".join(text.partition("This is typically caused")[0].split("\n")[0].split()).rstrip(".")
