"""A lock on a run's folder, `.lock`: one run at a time writes there.

It is `flock(2)`: a process that dies, however it dies, leaves no lock behind, and Linux passes it on to NFS servers.
The text in the file is for people.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import TextIO

from lit_rl.core.errors import StorageError

LOCK_FILE = ".lock"

_TAKEN = (errno.EACCES, errno.EAGAIN)
_MOST_TRIES = 100


class RunLock:
    """A lock that is held from its construction until `close`, or until the process ends.

    Args:
        folder: Existing folder of a run.
        setting: Name of the setting in messages.

    Raises:
        StorageError: another process holds it, or the folder cannot be written.
    """

    def __init__(self, folder: Path, setting: str = "run_dir") -> None:
        self.path, self._setting = folder / LOCK_FILE, setting
        self._file = self._acquire()
        os.register_at_fork(after_in_child=self._file.close)  # a child that lives on must not hold it
        with contextlib.suppress(OSError):  # of a full disk: what it says is for people
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            self._file.truncate(0)
            self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
            self._file.flush()

    def _acquire(self) -> TextIO:
        for _ in range(_MOST_TRIES):
            file = self._lock_file()
            if self._is_at_path(file):
                return file
            file.close()  # who held it before has removed the file in between
        raise StorageError(f"{self.path} is replaced again and again by other processes. Take another {self._setting}.")

    def _lock_file(self) -> TextIO:
        folder = self.path.parent
        try:
            file = self.path.open("a+")
        except OSError as error:
            raise StorageError(
                f"The run's folder {folder} cannot be written ({error.strerror}). Take another {self._setting}."
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:  # a file system that knows no locks
                return file
            with file:
                holder = ""
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # its note cannot be read
                    file.seek(0)
                    note = json.loads(file.read())
                    holder = f" by process {note['pid']} on {note['host']} since {note['since']}"
                raise StorageError(
                    f"The run's folder {folder} is in use{holder}. Wait for that run or stop it, or take another "
                    f"{self._setting}."
                ) from error
        return file

    def _is_at_path(self, file: TextIO) -> bool:
        """Tell whether the path still leads to the file that is open."""
        try:
            named, held = self.path.stat(), os.fstat(file.fileno())
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        """Let the next run in. May be called again."""
        if self._file.closed:
            return
        with self._file, contextlib.suppress(OSError):
            if self._is_at_path(self._file):
                self.path.unlink()
