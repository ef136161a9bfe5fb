"""Worker processes that can be killed, seen from the training process: one process, and a pool per function.

`WorkerProcess` starts `worker_main` in a fresh interpreter, exchanges messages with it and kills it at its limits; it
also runs environments. `WorkerPool` has the processes of one reward function.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rl.core.errors import RewardError
from lit_rl.core.processes import Child, how_ended
from lit_rl.rewards.contract import FunctionFromPath, is_async
from lit_rl.rewards.jobs import CallFailed, Failure, Job, Outcome, n_completions
from lit_rl.rewards.worker_main import LENGTH, Setup, pack

KEPT = 2000
"""Characters of a call's output that are kept: as many from its start as from its end, half each."""


class WorkerOutput:
    """The output of a process, read as fast as it comes; only its first and last part are kept."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._clear()

    def _clear(self) -> None:
        self.first, self.last, self.total = b"", b"", 0

    def read(self) -> bool:
        """Read available output, up to 64 KiB, without waiting; return False if there was none."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return False
        self.total += len(data)
        room = KEPT // 2 - len(self.first)
        self.first += data[:room]
        self.last = (self.last + data[room:])[-KEPT // 2 :]
        return bool(data)

    def take(self) -> str:
        """Return the output since the last time, shortened."""
        for _ in range(16):  # a pipe's worth; a process that prints without end has no last word
            if not self.read():
                break
        left_out = self.total - len(self.first) - len(self.last)
        middle = f"\n... ({left_out} bytes left out) ...\n" if left_out else ""
        text = self.first.decode(errors="replace") + middle + self.last.decode(errors="replace")
        self._clear()
        return text


def quote_output(output: str) -> str:
    """Return the worker's output as part of a message; empty if there is none."""
    return f" (it printed: {output.strip()!r})" if output.strip() else ""


START_LIMIT = 600.0
"""Seconds that a worker may take to import its function."""

_POLL = 0.05  # seconds between two checks of the process

_PACKAGE = Path(__file__).parents[1]

_WORKER_MODULES = [
    "lit_rl.core.process_state",
    "lit_rl.core.processes",
    "lit_rl.core.user_functions",
    "lit_rl.rewards.jobs",
    "lit_rl.rewards.worker_main",
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
        own_end, child_end = socket.socketpair()
        own_end.setblocking(False)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        files = [
            (name, str(_PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")))
            for name in dict.fromkeys((*_WORKER_MODULES, *modules))
        ]
        arguments = json.dumps([files, sys.path, child_end.fileno()])
        try:
            self.child = Child(
                [sys.executable, "-c", _START_SCRIPT, arguments],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[child_end.fileno()],
            )
        except OSError:
            own_end.close()
            os.close(read_end)
            raise
        finally:
            child_end.close()
            os.close(write_end)
        self.connection, self.output = own_end, WorkerOutput(read_end)
        self.kill = weakref.finalize(self, _end_worker, self.child.end, own_end, read_end)
        """Ends the process and its group, and closes its connections."""

    @property
    def alive(self) -> bool:
        return self.child.alive

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
            raise CallFailed(replace(await self._end_as_failure(), output=self.output.take())) from None
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

    async def _end_as_failure(self) -> Failure:
        """Return the failure that describes how the process ended: its exit code or signal."""
        for _ in range(20):  # the socket closes a moment before the process is gone
            if not self.alive:
                break
            await asyncio.sleep(_POLL)
        code = self.child.process.poll()
        return Failure("WorkerEnded", "closed its connection" if code is None else how_ended(code), died=True)


def _end_worker(end: Callable[[], object], connection: socket.socket, output: int) -> None:
    connection.close()
    os.close(output)
    end()


class WorkerPool:
    """The worker processes of one function. They start when first needed, and are killed with this object or at exit.

    A pickled or copied pool starts its own. A worker whose call went wrong beyond an exception is killed with every
    process of its group, and the next call gets a fresh one.

    Args:
        function: Where to find the function.
        size: Most processes at a time.
        memory_mb: Most address space of each, in MiB (RLIMIT_AS); None is no limit.
        recycle_after: Calls after which a process is replaced; 0 is never.
    """

    def __init__(self, function: FunctionFromPath, size: int, memory_mb: int | None, recycle_after: int) -> None:
        self.function, self.size, self.memory_mb, self.recycle_after = function, size, memory_mb, recycle_after
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(self.size)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    async def call(self, job: Job, limit: float | None) -> Outcome:
        """Have a worker run the job, within `limit` seconds.

        Raises:
            CallFailed: the function raised, or its process was over the limit or ended.
            RewardError: no worker could be started.
        """
        if self._pid != os.getpid():  # forked: the workers are the other process's
            self._reset()
        async with self._free:
            worker = await self._take()
            try:
                outcome, keep = await worker.call(job, limit)
            except BaseException:
                worker.kill()
                raise
            if keep and (not self.recycle_after or worker.n_calls < self.recycle_after):
                self._idle.append(worker)
            else:
                worker.kill()
        if isinstance(outcome, Failure):
            raise CallFailed(outcome)
        return outcome

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()
        try:
            worker = _Worker("reward")
        except OSError as error:
            raise RewardError(f"no worker process for a reward function can be started: {error}.") from error
        setup = Setup(
            source=self.function.source,
            name=self.function.__name__,
            text=self.function.text,
            is_async=is_async(self.function),
            memory_mb=self.memory_mb,
            parent=os.getpid(),
        )
        try:
            failure = await worker.start(setup)
            if failure is not None:
                hint = f" It may take {setup.memory_mb} MiB (reward.memory_mb)." if setup.memory_mb else ""
                raise RewardError(
                    f"the worker process of {setup.source}:{setup.name} failed while it imported it, with "
                    f"{failure.kind}: {failure.text}{quote_output(failure.output)}.{hint}"
                )
        except BaseException:
            worker.kill()
            raise
        return worker


class _Worker(WorkerProcess):
    """One process, of one function."""

    n_calls = 0

    async def call(self, job: Job, limit: float | None) -> tuple[Outcome | Failure, bool]:
        """Return the outcome of the job, and whether the process can be used for another one."""
        self.n_calls += 1
        reply, has_children = await self.ask(job, limit, n_completions(job.rows))
        output = self.output.take()
        if isinstance(reply, Failure):
            reply = replace(reply, output=output)
            return reply, not has_children and reply.kind != "MemoryError"
        return Outcome(reply.returned, reply.metrics, reply.extras, output), True
