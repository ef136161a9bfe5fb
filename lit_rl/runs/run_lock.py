"""A lock on a run's folder, `.lock`: one run at a time writes there.

`filelock` holds it by `flock(2)`: a process that dies, however it dies, leaves no lock behind, its forks hold none, and
Linux passes it on to NFS servers. The text in the file is for people.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from lit_rl.core.errors import StorageError

LOCK_FILE = ".lock"

_PATIENCE = 0.2
"""Seconds in which a lock is tried again: whoever held it may be about to remove the file."""


class RunLock:
    """A lock that is held from its construction until `close`, or until the process ends.

    Args:
        folder: Existing folder of a run.
        setting: Name of the setting in messages.

    Raises:
        StorageError: another process holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path, setting: str = "run_dir") -> None:
        self.path = folder / LOCK_FILE
        self._lock = FileLock(self.path, _PATIENCE, thread_local=False, fallback_to_soft=False)
        try:
            self.path.touch()
        except OSError as error:
            raise StorageError(
                f"The run's folder {folder} cannot be written ({error.strerror}). Take another {setting}."
            ) from error
        try:
            self._lock.acquire()
        except Timeout as error:
            holder = ""
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # its note cannot be read
                note = json.loads(self.path.read_text())
                holder = f" by process {note['pid']} on {note['host']} since {note['since']}"
            raise StorageError(
                f"The run's folder {folder} is in use{holder}. Wait for that run or stop it, or take another {setting}."
            ) from error
        except OSError:  # a file system that knows no locks
            pass
        self._file, self._owner = self.path.stat(), os.getpid()
        with contextlib.suppress(OSError):  # of a full disk: what it says is for people
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            self.path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))

    def close(self) -> None:
        """Let the next run in. May be called again."""
        owner, self._owner = self._owner, None
        with contextlib.suppress(OSError):
            if owner == os.getpid() and os.path.samestat(self.path.stat(), self._file):
                self.path.unlink()  # nobody else's
        self._lock.release()
