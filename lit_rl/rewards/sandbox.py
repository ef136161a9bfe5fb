"""Two sandboxes of `bwrap`, for a program and for its tests, both watched from outside."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lit_rl.core.errors import BackendError
from lit_rl.rewards.code_runner import descendants

_SCRIPT, _INSIDE = Path(__file__).with_name("sandbox_script.py"), "/sandbox_script.py"
_START = 30.0  # seconds until both interpreters are there
_TICK = 0.02  # seconds between two checks of the memory
_STOPPED = 2.0  # seconds until a stopped process has stopped
_ANSWER = 4096
FIRST_UID, _UIDS = 20_000, 40_000
_TEMPORARY, _SHARED = 64 * 2**20, 16 * 2**20  # bytes of /tmp and of /dev/shm
_LIMITS = {"FSIZE": 16 * 2**20, "NOFILE": 64, "CORE": 0}
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")


@dataclass(frozen=True)
class Bubblewrap:
    """Limits of one program; its tests have the same, in a sandbox of their own."""

    seconds: float
    memory_mb: int
    """Address space of a process, and memory of all processes together, in MiB."""
    processes: int

    @staticmethod
    def check() -> None:
        """Refuse a system where this cannot run.

        Raises:
            BackendError: `bwrap` is not installed, or cannot work here.
        """
        if shutil.which("bwrap") is None:
            raise BackendError(
                "CodeExecution: runner=bubblewrap needs the program bwrap, which is not installed. Install it with: "
                "apt-get install bubblewrap (or dnf, pacman, zypper). runner=process needs none, and stops less."
            )
        if platform.machine() != "x86_64":
            raise BackendError(
                f"CodeExecution: runner=bubblewrap knows the system calls of x86_64, and this is {platform.machine()}."
            )
        if (error := failed_trial()) is not None:
            raise BackendError(
                "CodeExecution: runner=bubblewrap does not work here: the system may not let users make namespaces, as "
                f"in most containers. The error was: {error}"
            )

    def verdict(self, code: str, tests: list[str]) -> str:
        """Return `passed`, or a short reason for the failure."""
        with self._start_both(code, tests) as (program, judge):
            return self._watch(program, judge)

    @contextlib.contextmanager
    def _start_both(
        self, code: str, tests: list[str], errors: int | IO[bytes] = subprocess.DEVNULL
    ) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
        ends, processes = socket.socketpair(), list[subprocess.Popen[bytes]]()
        limits = {"AS": self.memory_mb * 2**20, "CPU": math.ceil(self.seconds) + 1, **_LIMITS}
        # The first process of the namespace is counted too, where it is the same user's.
        limits["NPROC"] = self.processes + (os.geteuid() != 0)
        try:
            for role, end, request in (("program", ends[0], {"code": code}), ("tests", ends[1], {"tests": tests})):
                with tempfile.TemporaryFile() as stdin:
                    stdin.write(json.dumps({**request, "limits": limits}).encode())
                    stdin.seek(0)
                    processes.append(
                        subprocess.Popen(
                            [*_sandbox_command(), sys.executable, "-I", _INSIDE, role, str(end.fileno())],
                            stdin=stdin,
                            stdout=subprocess.PIPE if role == "tests" else subprocess.DEVNULL,
                            stderr=errors,
                            pass_fds=[end.fileno()],
                        )
                    )
                end.close()
            yield processes[0], processes[1]
        finally:
            for end in ends:
                end.close()
            inside = [pid for process in processes for pid in _kill(process)]
            # None may hold memory. A namespace's first process may linger while the kernel takes its network down.
            until = time.monotonic() + 5
            while time.monotonic() < until and any("VmRSS:" in _status(pid) for pid in inside):
                time.sleep(0.005)

    def _watch(self, program: subprocess.Popen[bytes], judge: subprocess.Popen[bytes]) -> str:
        """Return the verdict that the tests write, or the limit that was exceeded first."""
        assert judge.stdout is not None
        end, written, begun = time.monotonic() + _START, b"", False
        poll = select.poll()  # select.select takes no descriptor beyond 1023, and a trainer may have more
        poll.register(judge.stdout, select.POLLIN)
        while time.monotonic() < end:
            if poll.poll(1000 * _TICK):
                part = os.read(judge.stdout.fileno(), _ANSWER)
                written += part
                if not part or len(written) > _ANSWER:
                    verdict = None
                    with contextlib.suppress(ValueError):
                        verdict = json.loads(written.partition(b"\n")[2])
                    return verdict if verdict and isinstance(verdict, str) else "ended the process of its tests"
                if not begun and b"\n" in written:
                    begun, end = True, time.monotonic() + self.seconds
            for process in (program, judge):
                if _memory(process.pid) > self.memory_mb * 2**20:
                    return f"took more than {self.memory_mb} MiB in all its processes"
        return f"took more than {self.seconds:g} seconds" if begun else f"did not start in {_START:g} seconds"


def _kill(process: subprocess.Popen[bytes]) -> list[int]:
    """Kill a sandbox with all processes in it, and return their ids.

    It is stopped before: killed while it starts, it would leave a first process that waits for it for ever.
    """
    process.send_signal(signal.SIGSTOP)
    end = time.monotonic() + _STOPPED
    while time.monotonic() < end and not re.search(r"^State:\s+[TtZX]", _status(process.pid), re.MULTILINE):
        time.sleep(0.001)
    inside = descendants(process.pid)
    for pid in inside:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return inside


def _status(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


def _memory(pid: int) -> int:
    """Return the bytes that the processes below this one hold privately, or share in memory without a file."""
    total = 0
    for below in descendants(pid):
        for line in _status(below).splitlines():
            if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")):
                total += int(line.split()[1]) * 1024
    return total


@functools.cache
def failed_trial() -> str | None:
    """Return None if a program can be run here, else the error text."""
    runner = Bubblewrap(seconds=20, memory_mb=1024, processes=8)
    with tempfile.TemporaryFile() as errors:
        with runner._start_both("def one():\n    return 1", ["assert one() == 1"], errors) as started:
            verdict = runner._watch(*started)
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip()
    return None if verdict == "passed" else text[-300:] or verdict


def _sandbox_command() -> list[str]:
    """Return the command prefix that runs a program in a sandbox.

    It has its own processes, network (none) and shared memory; of the files it sees the system's programs and the
    interpreter with its packages, which it cannot write, and an empty /tmp. Root becomes a nameless user in it.
    """
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += [] if os.geteuid() == 0 else ["--unshare-user"]
    command += ["--die-with-parent", "--new-session", "--clearenv"]
    for name, value in {"PATH": os.defpath, "HOME": "/tmp", "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"}.items():
        command += ["--setenv", name, value]
    command += ["--size", str(_TEMPORARY), "--perms", "1777", "--tmpfs", "/tmp", *_visible_files()]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHARED), "--perms", "1777", "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    if os.geteuid() == 0:
        uid = fresh_uid()
        user = (f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs")
        command += ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", "--"]
    return command


def fresh_uid() -> int:
    """Return the user id for a program that root starts, a new one each time: the system counts processes by user."""
    return FIRST_UID + secrets.randbelow(_UIDS)


@functools.cache
def _visible_files() -> tuple[str, ...]:
    """Return the arguments that show the system's programs and this interpreter, at their own places."""
    shown = ["/usr", *(f"/etc/{name}" for name in _ETC if os.path.exists(f"/etc/{name}"))]
    links = list[str]()
    for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(top):
            links += ["--symlink", os.readlink(top), top]
        elif os.path.isdir(top):
            shown.append(top)
    interpreter = Path(sys.executable)
    while interpreter.is_symlink():  # a link of a link: each has to be there
        interpreter = interpreter.parent / os.readlink(interpreter)
    for folder in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, str(interpreter.parents[1])):
        if not any(folder == other or folder.startswith(f"{other}/") for other in shown):
            shown.append(folder)
    folders = {str(parent) for path in shown for parent in Path(path).parents} - {"/", *shown}
    command = list[str]()
    for folder in sorted(folders - {"/tmp"}):
        command += ["--perms", "0755", "--dir", folder]
    for path in shown:
        command += ["--ro-bind", path, path]
    return (*command, *links, "--ro-bind", str(_SCRIPT), _INSIDE)
