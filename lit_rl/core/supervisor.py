"""A program that runs a server and ends its process group when the server, or the parent process, has ended.

It is started as the leader of a new session: a trainer that is killed cannot stop anything any more, and not
every server notices. vLLM's server runs under it, and those of `env=mcp`. The server has its stdin, stdout and
stderr. Standard library only.

    python supervisor.py PARENT_PID GRACE_SECONDS COMMAND...
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_LOOK_EVERY = 0.2


def main(arguments: Sequence[str]) -> None:
    """Watch until there is a reason to end; then SIGTERM to the server, the grace, and SIGKILL to the whole group.

    The last signal ends this process too, so the group has its leader, and its id is no other's, until then.
    """
    parent, grace, command = int(arguments[0]), float(arguments[1]), list(arguments[2:])
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
        code = server.returncode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        with contextlib.suppress(OSError):  # who would read it is gone: then it ended as its stdin did
            sys.stderr.write(f"The server process ended by itself: {how}.\n")
            sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
