"""Servers as real processes: started, looked at, and ended whatever a test left of them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from waiting import until

from lit_rl.core.processes import group_members


@dataclass
class Served:
    """A running `lit-rl serve`."""

    process: subprocess.Popen[str]
    log: Path
    said: str = ""

    @property
    def url(self) -> str:
        found = re.search(r"http://[\d.]+:\d+", self.said)
        assert found, self.said
        return found.group()

    @property
    def group(self) -> int:
        """The process group of the server: its leader is the one child."""
        (child,) = children(self.process.pid)
        return child

    def wait_ready(self) -> Served:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if line.startswith("Ctrl-C"):
                return self
        self.process.wait()
        raise AssertionError(f"it ended: {self.said} {self.log.read_text()[-3000:]}")


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state not in "ZX":
            found.append(int(entry.parent.name))
    return found


def session_members(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(number) == session and state not in "ZX":
            found.append(int(entry.parent.name))
    return found


def is_free(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
        except OSError:
            return False
    return True


def start(folder: Path, *overrides: str) -> Served:
    log = folder / "server.log"
    given = [] if any(word.startswith("model=") for word in overrides) else ["model=tiny"]
    port = [] if any(word.startswith("serve.port=") for word in overrides) else ["serve.port=0"]
    words = ["serve", *given, *port, f"serve.log={log}", *overrides]
    # A shell that runs the tests in the background has Ctrl-C ignored by all that it starts.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = [sys.executable, "-c", f"{heard}; from lit_rl.cli import main; main()", *words]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        program, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    return Served(process, log)


def end(served: Served) -> None:
    """Whatever a test left."""
    groups = children(served.process.pid)
    served.process.kill()
    served.process.communicate()
    for group in groups:
        assert until(lambda group=group: not group_members(group), 30)
