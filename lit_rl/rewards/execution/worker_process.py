"""One worker process that can be killed, of reward functions and of environments: the training's side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rl.rewards.execution.worker_output import WorkerOutput
from lit_rl.rewards.workers.job import CallFailed, Failure
from lit_rl.rewards.workers.worker import LENGTH, pack

START_LIMIT = 600.0
"""Seconds that a worker may take to import its function."""

_POLL = 0.05  # seconds between two checks of the process

_PACKAGE = Path(sys.modules["lit_rl"].__path__[0])

_WORKER_MODULES = [
    "lit_rl.process_state",
    "lit_rl.import_source",
    "lit_rl.rewards.workers.plain_values",
    "lit_rl.rewards.workers.job",
    "lit_rl.rewards.workers.worker",
]

# The worker's files are read one by one: their packages would import PyTorch, which costs seconds and gigabytes.
_START_SCRIPT = """
import importlib.util, json, sys
files, path, fd = json.loads(sys.argv.pop())
sys.path[:] = path
for name, file in files:
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
module.main(fd)
"""


class WorkerProcess:
    """A fresh interpreter that answers one message at a time. Killed with this object, at exit, or by `kill`.

    Args:
        key: The group of settings whose `workers` it is one of, for messages.
        modules: Further modules of lit_rl to load, each before its importers. The last one's ``main`` runs.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, key: str, modules: Sequence[str] = ()) -> None:
        self._key = key
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        files = [(name, str(_file_of(name))) for name in dict.fromkeys((*_WORKER_MODULES, *modules))]
        arguments = json.dumps([files, sys.path, theirs.fileno()])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START_SCRIPT, arguments],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own, out of reach of Ctrl-C and in reach of one kill
            )
        except OSError:
            ours.close()
            os.close(read_end)
            raise
        finally:
            theirs.close()
            os.close(write_end)
        self.connection, self.output = ours, WorkerOutput(read_end)
        self._kill = weakref.finalize(self, _end, self.process, ours, read_end, os.getpid())

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and its group, and close its connections."""
        self._kill()

    async def start(self, setup: Any) -> Failure | None:
        """Send the setup, and wait until the function is loaded; return the failure, if any."""
        try:
            return await self.ask(setup, START_LIMIT, "importing it")
        except CallFailed as failed:
            return failed.failure

    async def ask(self, message: Any, limit: float | None, task: str) -> Any:
        """Send a message, and wait for the reply as long as there is a process to give one.

        Args:
            message: Anything that can be pickled.
            limit: Seconds; None is no limit.
            task: The work that exceeds the limit, for messages.

        Raises:
            CallFailed: there is no reply: the message cannot be sent, the limit is over, or the process has ended. It
                is not fit for another one then.
        """
        try:
            data = pack(message)
        except Exception as error:
            text = (
                f"what it asks for cannot be sent to a worker process: {error}. {self._key}.workers=0 needs no sending"
            )
            raise CallFailed(Failure(type(error).__name__, text)) from error
        reply = asyncio.ensure_future(self._exchange(data))
        loop = asyncio.get_running_loop()
        end = None if limit is None else loop.time() + limit
        loop.add_reader(self.output.fd, self.output.read)
        try:
            while not reply.done():
                await asyncio.wait({reply}, timeout=_POLL)
                if reply.done():
                    break
                if not self.alive:
                    await asyncio.wait({reply}, timeout=_POLL)  # its last words may be on their way
                    if not reply.done():
                        raise EOFError
                elif end is not None and loop.time() > end:
                    failure = Failure("TimeoutError", f"more than {limit:g} seconds for {task}", timed_out=True)
                    raise CallFailed(replace(failure, output=self.output.take()))
            return pickle.loads(reply.result())
        except (EOFError, ConnectionError):
            raise CallFailed(replace(await self._how_it_ended(), output=self.output.take())) from None
        finally:
            loop.remove_reader(self.output.fd)
            reply.cancel()
            await asyncio.wait({reply})  # the loop lets go of the socket before its number is given to another one

    async def _exchange(self, data: bytes) -> bytearray:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.connection, data)
        (length,) = LENGTH.unpack(await self._receive_exactly(LENGTH.size))
        return await self._receive_exactly(length)

    async def _receive_exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view.nbytes:
            received = await asyncio.get_running_loop().sock_recv_into(self.connection, view)
            if not received:
                raise EOFError
            view = view[received:]
        return data

    async def _how_it_ended(self) -> Failure:
        for _ in range(20):  # the socket closes a moment before the process is gone
            if not self.alive:
                break
            await asyncio.sleep(_POLL)
        code = self.process.poll()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by signal {-code}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with exit code {code}"
        return Failure("WorkerEnded", how, died=True)


def _file_of(module: str) -> Path:
    return _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")


def _end(process: subprocess.Popen[bytes], connection: socket.socket, output: int, owner: int) -> None:
    connection.close()
    os.close(output)
    if os.getpid() != owner:  # a forked copy of this object: the process is not its own to kill
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
