"""vLLM's servers, one or several, under the verbs of `Engine`."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.errors import GenerationError, NumericError
from lit_rl.generation.base import EngineLost
from lit_rl.generation.vllm.calls import ServerDead, ServerError, ServerHung, ServerRefused
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.engine import Facts, Heartbeat, Shapes
from lit_rl.generation.vllm.requests import Answer, Request
from lit_rl.generation.vllm.server_outputs import ask_server
from lit_rl.generation.vllm.settings import WORKER_EXTENSION
from lit_rl.generation.vllm.transports import Transport
from lit_rl.generation.vllm.work import Work

ADAPTER = "lit_rl_policy"
_LOOK_EVERY = 2.0
_NEXT = 0.02
"""Seconds until requests that follow from others are looked for again."""
_AT_ONCE = 256
"""Requests that wait on one server at the same time; vLLM queues those that it does not run."""
_Todo = queue.SimpleQueue[tuple[int, Request, float] | None]
"""Each request with its number, and the time at which its answer has to be there."""


class ServerEngine:
    """Every server holds the same weights; requests are dealt out to them in turn.

    Args:
        clients: The servers.
        transport: How weights reach them.
        deadline: Seconds for a request, from when it is there to be asked: of a rollout without turns, all are at once.
        answer_deadline: Seconds for any other call; while completions are made, how long a server may be silent.
        after_loss: Requests of ours may still run there that nobody waits for: the first pause aborts them.

    All methods raise `EngineLost` where a server died, hangs or was restarted, and `GenerationError` where it refuses.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        transport: Transport,
        *,
        deadline: float,
        answer_deadline: float,
        after_loss: bool = False,
    ) -> None:
        self.clients, self.transport = list(clients), transport
        self.deadline, self.answer_deadline = deadline, answer_deadline
        self._adapter: str | None = None
        self._leftovers = after_loss
        self._names = [self._name(client) for client in self.clients]
        self._instances = [facts.instance for facts in self._all_facts()]

    def _name(self, client: Client) -> str:
        with server_errors():
            return next(iter(client.models(self.answer_deadline)), "")

    def _all_facts(self) -> list[Facts]:
        def ask(client: Client) -> Facts:
            try:
                return Facts.told(client.rpc("lit_rl_facts", deadline=self.answer_deadline)[0])
            except ServerRefused as error:
                raise GenerationError(
                    f"{error} Its workers do not know lit_rl: start it by `lit-rl serve`, or with "
                    f"--worker-extension-cls {WORKER_EXTENSION}."
                ) from error

        with server_errors():
            return self.transport.everywhere(ask)

    def facts(self) -> Facts:
        """Of the first server; all have to be alike. The version is None where they hold different ones.

        Raises:
            EngineLost: a server was restarted since this engine was made, so it has no weights of ours.
            GenerationError: the servers differ.
        """
        everyone = self._all_facts()
        for client, facts, instance in zip(self.clients, everyone, self._instances, strict=True):
            if facts.instance != instance:
                raise EngineLost(f"{client.url} was restarted: it has lost the policy's weights.")
            first = everyone[0]
            if (facts.model, facts.dtype) != (first.model, first.dtype):
                raise GenerationError(
                    f"The servers differ: {self.clients[0].url} runs {first.model} in {first.dtype}, {client.url} "
                    f"runs {facts.model} in {facts.dtype}. Start them alike."
                )
        common = everyone[0].version if len({facts.version for facts in everyone}) == 1 else None
        return replace(everyone[0], version=common)

    # ------------------------------------------------------------------ an update

    def pause(self) -> None:
        mode, self._leftovers = ("abort" if self._leftovers else "wait"), False
        self._everywhere(lambda client: client.pause(self.answer_deadline, mode=mode))

    def begin(self, shapes: Shapes) -> None:
        self._shapes = shapes
        with server_errors():
            self.transport.begin(shapes)

    def load(self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        with server_errors():
            self.transport.send(weights, self._shapes, dtype)

    def load_adapter(self, folder: str) -> None:
        self._everywhere(lambda client: client.load_adapter(ADAPTER, folder, self.answer_deadline))
        self._adapter = ADAPTER

    def finish(self, version: int) -> None:
        with server_errors():
            self.transport.finish(version)

    def stamp(self, version: int) -> None:
        self._everywhere(lambda client: client.rpc("lit_rl_stamp", [version], deadline=self.answer_deadline))

    def reset_caches(self) -> None:
        self._everywhere(lambda client: client.reset_caches(self.answer_deadline))

    def resume(self) -> None:
        self._everywhere(lambda client: client.resume(self.answer_deadline))

    def _everywhere(self, call: Callable[[Client], Any]) -> None:
        with server_errors():
            self.transport.everywhere(call)

    def sleep(self) -> None:
        """A server keeps its memory: it shares none with the training."""

    def wake(self, what: str) -> None:
        """See `sleep`."""

    def close(self) -> None:
        self.transport.close()

    # ------------------------------------------------------------------ completions

    def run(self, work: Work, heartbeat: Heartbeat | None = None) -> None:
        """Each request goes to the server that has the fewest, and what follows from it to the same one, whose cache
        holds its text. The servers are looked after meanwhile: one that is silent is found out."""
        todo = [_Todo() for _ in self.clients]
        done: queue.SimpleQueue[tuple[int, list[Answer] | Exception]] = queue.SimpleQueue()
        stop = threading.Event()

        def ask(server: int) -> None:
            client, name = self.clients[server], self._adapter or self._names[server]
            while (asked := todo[server].get()) is not None and not stop.is_set():
                number, request, until = asked
                try:
                    done.put((number, ask_server(client, name, number, request, until)))
                except Exception as error:
                    done.put((number, error))

        # Daemons: a thread that waits for a server which hangs must not keep the process from ending.
        threads = min(_AT_ONCE, work.at_once)
        for server in range(len(self.clients)):
            for _ in range(threads):
                threading.Thread(target=ask, args=(server,), daemon=True).start()
        try:
            with server_errors():
                self._deal(work, todo, done, heartbeat)
        finally:
            stop.set()
            for each in todo:
                for _ in range(threads):
                    each.put(None)

    def _deal(
        self, work: Work, todo: Sequence[_Todo], done: queue.SimpleQueue[Any], heartbeat: Heartbeat | None
    ) -> None:
        """Give out what comes and take in what is done, until nothing is left."""
        running, homes, looked = [0] * len(todo), dict[int, int](), time.monotonic()
        while True:
            for number, request in work.requests(wait=not any(running)):
                home = homes.setdefault(number, running.index(min(running)))
                running[home] += 1
                todo[home].put((number, request, time.monotonic() + self.deadline))
            if not any(running):
                return
            with contextlib.suppress(queue.Empty):
                number, answers = done.get(timeout=_NEXT)
                if isinstance(answers, Exception):
                    raise answers
                running[homes[number]] -= 1
                work.done(number, answers)
            if heartbeat is not None:
                heartbeat(*work.progress)
            if time.monotonic() - looked > _LOOK_EVERY:
                self.facts()  # /health is answered by a process in front of the engine, also where the engine hangs
                looked = time.monotonic()


class server_errors:
    """Errors of calls as those of engines: lost, or a refusal."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, ServerDead | ServerHung):
            raise EngineLost(str(error)) from error
        if isinstance(error, ServerRefused) and "not JSON compliant" in error.why:
            raise NumericError(
                f"{error.url}: the engine's log-probs hold NaN or infinity: the weights diverged, or its type is too "
                "narrow for this model. Lower optimizer.lr, or set generator.dtype=bfloat16 or float32."
            ) from error
        if isinstance(error, ServerError):
            raise GenerationError(str(error)) from error
