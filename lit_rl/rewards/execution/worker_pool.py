"""Reward functions in worker processes that can be killed: the training's side."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_rl.errors import RewardError
from lit_rl.rewards.execution.worker_output import WorkerOutput, quote_output
from lit_rl.rewards.functions.by_path import FunctionFromPath, is_async
from lit_rl.rewards.workers.job import CallFailed, Failure, Job, Outcome, n_completions
from lit_rl.rewards.workers.worker import LENGTH, Setup, pack

START_LIMIT = 600.0
"""Seconds that a worker may take to import the function's module."""

_POLL = 0.05  # seconds between two looks whether the process is still there

_WORKER_FILES = Path(__file__).parents[1] / "workers"

# The worker's files are read one by one: the package itself would import PyTorch, which costs seconds and gigabytes.
_START_SCRIPT = """
import importlib.util, json, sys
folder, path, fd = json.loads(sys.argv.pop())
sys.path[:] = path
for name in ("plain_values", "job", "import_source", "worker"):
    spec = importlib.util.spec_from_file_location("lit_rl.rewards.workers." + name, folder + "/" + name + ".py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
module.main(fd)
"""


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
        worker = _Worker()
        setup = Setup(
            source=self.function.source,
            name=self.function.__name__,
            text=self.function.text,
            is_async=is_async(self.function),
            memory_mb=self.memory_mb,
            parent=os.getpid(),
        )
        try:
            await worker.start(setup)
        except BaseException:
            worker.kill()
            raise
        return worker


class _Worker:
    """One process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        arguments = json.dumps([str(_WORKER_FILES), sys.path, theirs.fileno()])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START_SCRIPT, arguments],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own, out of reach of Ctrl-C and in reach of one kill
            )
        except OSError as error:
            ours.close()
            os.close(read_end)
            raise RewardError(f"no worker process for a reward function can be started: {error}.") from error
        finally:
            theirs.close()
            os.close(write_end)
        self.connection, self.n_calls = ours, 0
        self.output = WorkerOutput(read_end)
        self._kill = weakref.finalize(self, _end, self.process, ours, read_end, os.getpid())

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and its group, and close what led to it."""
        self._kill()

    async def start(self, setup: Setup) -> None:
        """Wait until the function is loaded."""
        try:
            failure = await self._ask(setup, START_LIMIT, "importing it")
        except CallFailed as failed:
            failure = failed.failure
        if failure is not None:
            hint = f" It may take {setup.memory_mb} MiB (reward.memory_mb)." if setup.memory_mb else ""
            raise RewardError(
                f"the worker process of {setup.source}:{setup.name} failed while it imported it, with {failure.kind}: "
                f"{failure.text}{quote_output(failure.output)}.{hint}"
            )

    async def call(self, job: Job, limit: float | None) -> tuple[Outcome | Failure, bool]:
        """What came of the job, and whether the process is fit for another one."""
        self.n_calls += 1
        reply, has_children = await self._ask(job, limit, n_completions(job.rows))
        output = self.output.take()
        if isinstance(reply, Failure):
            reply = replace(reply, output=output)
            return reply, not has_children and reply.kind != "MemoryError"
        return Outcome(reply.returned, reply.metrics, reply.extras, output), True

    async def _ask(self, message: Any, limit: float | None, task: str) -> Any:
        """Send a message, and wait for the reply as long as there is a process to give one."""
        try:
            data = pack(message)
        except Exception as error:
            text = f"what it asks for cannot be sent to a worker process: {error}. reward.workers=0 needs no sending"
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


def _end(process: subprocess.Popen[bytes], connection: socket.socket, output: int, owner: int) -> None:
    connection.close()
    os.close(output)
    if os.getpid() != owner:  # a forked copy of this object: the process is not its own to kill
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
