"""Child processes: started in a session of their own, watched, and ended with all that they have started.

`Child` is the one way in which workers, engines and programs of a policy are started. A process that is killed can stop
nothing any more, so what has to end with it either asks the system for that (`die_with_parent`) or runs under a
supervisor (`supervised`), which is this file as a program. Standard library only.

    python processes.py PARENT_PID GRACE_SECONDS COMMAND...
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LOOK_EVERY = 0.2
_GONE_WITHIN = 10.0
"""Seconds that killed processes have to be gone."""
_PDEATHSIG = 1


class Child:
    """A process that leads a session of its own, out of reach of Ctrl-C and in reach of one kill.

    Args:
        command: Program and arguments.
        grace: Seconds between SIGTERM for the process and SIGKILL for its group; 0 is SIGKILL at once.
        options: Further arguments of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], grace: float = 0.0, **options: Any) -> None:
        self.process: subprocess.Popen[Any] = subprocess.Popen(command, start_new_session=True, **options)
        self.end = weakref.finalize(self, _end, self.process, grace, os.getpid())
        """Ends its group and waits until that is gone: when called, with this object, or at exit; and not in a fork."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def _end(process: subprocess.Popen[bytes], grace: float, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of the object: the process is not its own to end
        return
    if grace:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    kill_group(process.pid)
    until = time.monotonic() + _GONE_WITHIN
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GONE_WITHIN)
    while group_members(process.pid) and time.monotonic() < until:
        time.sleep(_LOOK_EVERY / 10)


def kill_group(group: int) -> None:
    """Kill every process of a group, if there is one that is ours to kill."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def group_members(group: int) -> list[int]:
    """Return the running processes of a group, without those that have ended and that nothing waits for."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:  # as a rule; and all processes need not be looked at
        return []
    except PermissionError:
        pass
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended a moment ago
            state, _, number = _stat(int(entry.name))[:3]
            if int(number) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Tell whether a process, which may be anyone's, is alive; a zombie is not."""
    try:
        os.kill(pid, 0)
        return _stat(pid)[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # there is no /proc, or it is somebody else's
        return True


def _stat(pid: int) -> list[str]:
    """Return a process's state, parent, group and the rest of proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def how_ended(code: int) -> str:
    """Return in words how a process with this return code ended."""
    if code >= 0:
        return f"has ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (as the kernel does when memory is out)" if name == "SIGKILL" else "")


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends, also where Python holds its lock in C code.

    Args:
        parent: Process id of that thread's process: it may have ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # by few that load this file

    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def supervised(command: Sequence[str], grace: float) -> list[str]:
    """Return a command that runs a server, and ends its process group when the server, or this process, has ended.

    Not every server notices that. It is to lead a session, as it does for `Child`.

    Args:
        command: The server's. It has the stdin, stdout and stderr of the process.
        grace: Seconds between SIGTERM for the server and SIGKILL for the group.
    """
    return [sys.executable, "-I", __file__, str(os.getpid()), str(grace), *command]


def _supervise(parent: int, grace: float, command: Sequence[str]) -> None:
    """Watch until there is a reason to end; then SIGTERM to the server, the grace, and SIGKILL to the whole group.

    The last signal ends this process too, so the group has its leader, and its id is no other's, until then.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: asked.append(received))
    server = subprocess.Popen(command)
    while server.poll() is None and not asked and os.getppid() == parent:
        time.sleep(_LOOK_EVERY)
    if server.poll() is None:
        server.terminate()  # it ends its own processes; all of them at once would report each other's end
        until = time.monotonic() + grace
        while server.poll() is None and time.monotonic() < until:
            time.sleep(_LOOK_EVERY / 4)
    else:
        with contextlib.suppress(OSError):  # who would read it is gone: then it ended as its stdin did
            sys.stderr.write(f"Nobody stopped the server process: it {how_ended(server.returncode)}.\n")
            sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
