"""The program of a worker process: load one reward function, then answer jobs until the socket closes.

Environments have a ``main`` of their own (`lit_rl.environments.environment_worker`), with the limits and the loop of
this one. Standard library only. A worker is a fresh interpreter, not a fork: nothing of CUDA, threads or `__main__`
comes along. It keeps accidents away from the training (endless loops, memory, exits, prints); it is no sandbox
against malice.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from lit_rl.core.processes import die_with_parent
from lit_rl.core.user_functions import load_source
from lit_rl.rewards.jobs import CallFailed, Failure, failure_of, run, run_async

SPARE_TASKS = 4096
"""Processes and threads that the user may have beyond those at a worker's start, as a bound on fork bombs."""

LENGTH = struct.Struct("<Q")
"""The format of the length in bytes before each message."""


@dataclass(frozen=True)
class Setup:
    """The first message to a worker."""

    source: str
    """File or module."""
    name: str
    """Name of the function."""
    text: bytes | None
    """The file's text; None for a module."""
    is_async: bool
    memory_mb: int | None
    parent: int
    """Process id of the training process."""


def main(fd: int) -> None:
    """Answer messages on this socket until the other side closes it."""
    connection = connect(fd)
    setup: Setup = receive(connection)
    try:
        set_limits(setup.memory_mb, setup.parent)
        function = getattr(load_source(setup.source, setup.text), setup.name)
    except BaseException as error:
        send(connection, failure_of(error))
        return
    send(connection, None)
    if not setup.is_async:
        serve(connection, lambda job: run(function, job, _wait))
        return
    import asyncio  # half of a worker's start, and few functions are async

    loop = asyncio.new_event_loop()  # one for all calls: a client may keep its connections
    serve(connection, lambda job: loop.run_until_complete(run_async(function, job)))


def connect(fd: int) -> socket.socket:
    """Return the socket to the training process. Output is sent there in UTF-8, a line at a time."""
    os.set_inheritable(fd, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # pyright: ignore
    return socket.socket(fileno=fd)


def serve(connection: socket.socket, call: Callable[[Any], Any]) -> None:
    """Answer each message with the result of ``call``, or the Failure of its error, and with whether this process has
    children; until the other side is gone."""
    me, home = os.getpid(), os.getcwd()
    while True:
        try:
            data = receive_bytes(connection)
        except EOFError:
            return
        try:
            os.chdir(home)
            reply: Any = call(pickle.loads(data))
        except CallFailed as failed:
            reply = failed.failure
        except BaseException as error:  # KeyboardInterrupt too: no answer would mean a wait until the limit
            reply = failure_of(error)
        if os.getpid() != me:  # a forked copy of the function must not answer too
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the function closed it
                stream.flush()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            has_children = True
        except ChildProcessError:
            has_children = False
        send(connection, (reply, has_children))


def _wait(awaitable: Awaitable[Any]) -> Any:
    import asyncio

    async def awaited() -> Any:
        return await awaitable

    return asyncio.run(awaited())


def set_limits(memory_mb: int | None, parent: int) -> None:
    """Limit the resources of this process, and end it with its parent.

    Args:
        memory_mb: Most address space, in MiB (RLIMIT_AS); None is no limit.
        parent: Process id of the training process.
    """
    import resource  # not on every system that the training process may run on

    if memory_mb is not None:
        size = memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if not sys.platform.startswith("linux"):
        return
    die_with_parent(parent)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this process goes before the training
    tasks = SPARE_TASKS  # beside the threads of this user's processes
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                tasks += len(os.listdir(f"/proc/{entry.name}/task"))
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard == resource.RLIM_INFINITY or hard > tasks:
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))


def send(connection: socket.socket, message: Any) -> None:
    """Send one message; in the place of one that cannot be pickled, a Failure that explains it."""
    try:
        data = pack(message)
    except Exception as error:
        text = f"what it gave to log_extra cannot leave its process: {error}"
        data = pack((Failure(type(error).__name__, text), False))
    connection.sendall(data)


def pack(message: Any) -> bytes:
    """Return a message for sending: its length, and its pickle.

    Raises:
        Exception: whatever pickle or an object in the message raises.
    """
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def receive(connection: socket.socket) -> Any:
    """Return the next message.

    Raises:
        EOFError: the other side is gone.
    """
    return pickle.loads(receive_bytes(connection))


def receive_bytes(connection: socket.socket) -> bytearray:
    """Return the next message, still pickled; raises as `receive`."""
    return _receive_exactly(connection, LENGTH.unpack(_receive_exactly(connection, LENGTH.size))[0])


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view.nbytes:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data
