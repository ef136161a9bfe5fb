"""A script that runs one program and its tests, watches it, and ends everything that it started.

`code_rewards.py` starts it. A request comes as JSON on stdin (code, tests, seconds, memory_mb, processes). On
stdout go the process id of the program and, in a second line, the verdict as JSON. The program runs in a forked
child; this process stays outside of it and keeps the clock. As the first process of a namespace its end is the
end of all others; elsewhere it adopts the orphans of the program, and kills them. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import time
import types
from typing import Any

_TICK = 0.05  # seconds between two checks of the child
_FILE_BYTES = 16 * 2**20
_OPEN_FILES = 64
_SUBREAPER = 36
_LONGEST_ERROR = 300


def main() -> None:
    """Read the request, run it, write the verdict: `passed`, or in a few words why not."""
    request = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become children of this process
    nonce = secrets.token_bytes(16)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reading)
        _run(request, nonce, writing)
    os.close(writing)
    with contextlib.suppress(OSError):  # the child did it already
        os.setpgid(child, child)
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
    verdict = _watch(child, reading, nonce, request["seconds"])
    if os.getpid() != 1:
        _end_all(child)
    sys.stdout.write(json.dumps(verdict))


def _run(request: dict[str, Any], nonce: bytes, verdict: int) -> None:
    """Run the program, then its tests, then send the nonce. Runs in the child, and never returns."""
    me, code = os.getpid(), 1
    try:
        _limit(request)
        module = types.ModuleType("__main__")  # dataclasses and pickle look their module up
        sys.modules["__main__"] = module
        sources = {"completion": request["code"]} | {f"test {i}": test for i, test in enumerate(request["tests"])}
        for name, source in sources.items():
            exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102 (the purpose of this file)
        report, code = nonce, 0
    except BaseException as error:
        report = f"{type(error).__name__}: {error}".encode(errors="replace")[:_LONGEST_ERROR]
    try:
        if os.getpid() == me:  # a forked copy of the program must not report
            os.write(verdict, report)
    finally:
        os._exit(code)


def _limit(request: dict[str, Any]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.nice(10)
    memory, seconds = request["memory_mb"] * 2**20, math.ceil(request["seconds"]) + 1
    limits = {"AS": memory, "CPU": seconds, "FSIZE": _FILE_BYTES, "NOFILE": _OPEN_FILES, "CORE": 0}
    for name, value in {**limits, "NPROC": request["processes"]}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _watch(child: int, reading: int, nonce: bytes, seconds: float) -> str:
    """Wait for the child's word, its end, or the end of its time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([reading], [], [], _TICK)[0]:  # a word, or the end of the last process that could give one
            report = os.read(reading, _LONGEST_ERROR)
            if report:
                return "passed" if report == nonce else report.decode(errors="replace")
            return _ended(child)
        gone = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if gone and not select.select([reading], [], [], 0)[0]:  # its orphans hold the pipe open
            return _ended(child)
    return f"took more than {seconds:g} seconds"


def _ended(child: int) -> str:
    """Return how the child ended. Its end of the pipe is closed, a moment before the child is gone."""
    end = time.monotonic() + 1
    while (result := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > end:
            return "closed the pipe that it reports on"
        time.sleep(0.005)
    if result.si_code == os.CLD_EXITED:
        return f"ended by itself before its tests did, with exit code {result.si_status}"
    return f"was ended by signal {result.si_status}"


def _end_all(child: int) -> None:
    """Kill the child's group, then descendants outside of it, until none is left. Their number is limited."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    end = time.monotonic() + 5
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        below = descendants(os.getpid())
        if not below:
            return
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Return every process below this one. Orphans are children of a subreaper, or of a namespace's first process."""
    found, new = list[int](), [root]
    while new:
        pid = new.pop()
        with contextlib.suppress(OSError):  # it ended meanwhile, or the system has no such files
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    below = [int(word) for word in file.read().split()]
                new += below
                found += below
    return found


if __name__ == "__main__":
    main()
