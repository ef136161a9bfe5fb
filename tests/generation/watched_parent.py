"""A parent that starts a stand-in for a server under the supervisor, says which group it is, and waits to be ended.

The server ignores SIGTERM where it is told to, and has a child that always does, as a worker of an engine might.
"""

from __future__ import annotations

import subprocess
import sys
import time

from lit_rl.core.processes import supervised

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
SERVER = f"""
import signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print("ready", flush=True)
time.sleep(0 if sys.argv[1] == "short" else 60)
sys.exit(7)
"""


def start(kind: str, grace: float = 0.3) -> subprocess.Popen[str]:
    """The supervisor, once its server and that one's child run."""
    server = [sys.executable, "-c", SERVER, kind]
    process = subprocess.Popen(
        supervised(server, grace), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


if __name__ == "__main__":
    print(start(sys.argv[1]).pid, flush=True)
    time.sleep(60)
