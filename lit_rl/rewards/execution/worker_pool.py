"""Reward functions in worker processes that can be killed: the training's side."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from lit_rl.errors import RewardError
from lit_rl.rewards.execution.worker_output import quote_output
from lit_rl.rewards.execution.worker_process import WorkerProcess
from lit_rl.rewards.functions.by_path import FunctionFromPath, is_async
from lit_rl.rewards.workers.job import CallFailed, Failure, Job, Outcome, n_completions
from lit_rl.rewards.workers.worker import Setup


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
            await worker.load(setup)
        except BaseException:
            worker.kill()
            raise
        return worker


class _Worker(WorkerProcess):
    """One process, of one function."""

    n_calls = 0

    async def load(self, setup: Setup) -> None:
        """Wait until the function is loaded."""
        failure = await self.start(setup)
        if failure is not None:
            hint = f" It may take {setup.memory_mb} MiB (reward.memory_mb)." if setup.memory_mb else ""
            raise RewardError(
                f"the worker process of {setup.source}:{setup.name} failed while it imported it, with {failure.kind}: "
                f"{failure.text}{quote_output(failure.output)}.{hint}"
            )

    async def call(self, job: Job, limit: float | None) -> tuple[Outcome | Failure, bool]:
        """Return the outcome of the job, and whether the process can be used for another one."""
        self.n_calls += 1
        reply, has_children = await self.ask(job, limit, n_completions(job.rows))
        output = self.output.take()
        if isinstance(reply, Failure):
            reply = replace(reply, output=output)
            return reply, not has_children and reply.kind != "MemoryError"
        return Outcome(reply.returned, reply.metrics, reply.extras, output), True
