"""One or several vLLM servers under the verbs of `Engine`."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.errors import GenerationError, NumericError
from lit_rl.generation import ranks
from lit_rl.generation.base import EngineLost
from lit_rl.generation.vllm.asking import Asking, Done, Failed
from lit_rl.generation.vllm.calls import ServerDead, ServerError, ServerHung, ServerRefused
from lit_rl.generation.vllm.client import Client
from lit_rl.generation.vllm.dealing import Dealer, Task, rooms_of
from lit_rl.generation.vllm.engine import Facts, Heartbeat, Shapes
from lit_rl.generation.vllm.server_outputs import ask_server
from lit_rl.generation.vllm.settings import WORKER_EXTENSION
from lit_rl.generation.vllm.transports import Transport, at_once
from lit_rl.generation.vllm.work import Work
from lit_rl.interruption import may_be_given_up

ADAPTER = "lit_rl_policy"
_NEXT = 0.02
"""Seconds between two polls for requests that follow from others."""
_AT_ONCE = 256
"""Most requests that wait on one server at the same time."""
_STOCK = 2
"""Completions that a server gets, as a multiple of those that it runs at once: the surplus waits there, so that it
never idles, and the rest goes to the first free server."""


class ServerEngine:
    """An engine of servers with the same weights; requests are distributed by their load.

    A server that is lost while others are left gets no more requests, and its open ones go to the others.

    Args:
        clients: The servers.
        transport: Transport of the weights.
        say: Called with a sentence about a server that is lost.
        deadline: Seconds for a request from its start: a rollout without turns starts all at once.
        answer_deadline: Seconds for any other call, and the longest silence of a server while completions are made.
        after_loss: Abandoned requests of ours may still run there: the first pause aborts them.

    All methods raise `EngineLost` where a server died, hangs or was restarted, and `GenerationError` where it refuses.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        transport: Transport,
        *,
        say: Callable[[str], Any],
        deadline: float,
        answer_deadline: float,
        after_loss: bool = False,
    ) -> None:
        self.clients, self.transport, self._say = list(clients), transport, say
        self.deadline, self.answer_deadline = deadline, answer_deadline
        self._adapter: str | None = None
        self._leftovers = after_loss
        self._asked = list(range(len(self.clients)))
        """The numbers of the servers that are not lost."""
        self._names = [self._name(client) for client in self.clients]
        facts = self._all_facts()
        self._instances = [each.instance for each in facts]
        self._rooms = [_STOCK * each.max_num_seqs for each in facts]
        self._vocabularies = [each.vocabulary for each in facts]

    @property
    def lost(self) -> list[str]:
        """Addresses of the servers that were lost while others answered. Their weights are unknown."""
        return [client.url for number, client in enumerate(self.clients) if number not in self._asked]

    def _name(self, client: Client) -> str:
        with server_errors():
            return next(iter(client.models(self.answer_deadline)))

    def _all_facts(self) -> list[Facts]:
        """Return the facts of the servers that are not lost."""
        with server_errors():
            return at_once([self.clients[server] for server in self._asked], self._facts_of)

    def _facts_of(self, client: Client) -> Facts:
        try:
            return client.facts(self.answer_deadline)
        except ServerRefused as error:
            if error.status == 200:  # it knows the method, and answers something else
                raise
            raise GenerationError(
                f"{error} Its workers do not know lit_rl: start it by `lit-rl serve`, or with "
                f"--worker-extension-cls {WORKER_EXTENSION}."
            ) from error

    def _same(self, server: int, facts: Facts) -> None:
        if facts.instance != self._instances[server]:
            raise EngineLost(f"{self.clients[server].url} was restarted: it has lost the policy's weights.")

    def facts(self) -> Facts:
        """Return the facts of the first server; all have to be alike. The version is None where they hold different
        ones.

        Raises:
            EngineLost: a server was restarted since this engine was made, so it has no weights of ours.
            GenerationError: the servers differ.
        """
        everyone = self._all_facts()
        first, *_ = everyone
        for server, facts in zip(self._asked, everyone, strict=True):
            self._same(server, facts)
            if (facts.model, facts.dtype) != (first.model, first.dtype):
                raise GenerationError(
                    f"The servers differ: {self.clients[self._asked[0]].url} runs {first.model} in {first.dtype}, "
                    f"{self.clients[server].url} runs {facts.model} in {facts.dtype}. Start them alike."
                )
        common = first.version if len({facts.version for facts in everyone}) == 1 else None
        return replace(first, version=common)

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
        """Do nothing: a server keeps its memory, and shares none with the training."""

    def wake(self, what: str) -> None:
        """Do nothing; see `sleep`."""

    def close(self) -> None:
        self.transport.close()

    # ------------------------------------------------------------------ completions

    def run(self, work: Work, heartbeat: Heartbeat | None = None) -> None:
        """Do the work on the servers, as `Dealer` distributes it. A server that is silent meanwhile is detected."""
        events = queue.SimpleQueue[Done | Failed]()
        asking = {server: self._asking(server, min(_AT_ONCE, work.at_once), events) for server in self._asked}
        try:
            with may_be_given_up(), server_errors():
                self._deal(work, asking, events, heartbeat)
        finally:
            for each in asking.values():
                each.stop()

    def _asking(self, server: int, threads: int, events: queue.SimpleQueue[Done | Failed]) -> Asking:
        client, name = Client(self.clients[server].url), self._adapter or self._names[server]  # whose calls may be cut
        vocabulary = self._vocabularies[server]

        def look() -> None:
            with server_errors():
                self._same(server, self._facts_of(client))

        return Asking(
            server,
            ask=lambda task: ask_server(client, name, task.number, task.request, task.until, vocabulary),
            look=look,
            tell=events.put,
            hang_up=client.hang_up,
            threads=threads,
        )

    def _deal(
        self,
        work: Work,
        asking: Mapping[int, Asking],
        events: queue.SimpleQueue[Done | Failed],
        heartbeat: Heartbeat | None,
    ) -> None:
        """Send new requests and take finished answers, until nothing is left."""
        servers = list(asking)
        at_once = [self._rooms[server] for server in servers]
        dealer = Dealer(rooms_of(ranks.rank(), ranks.world_size(), servers, at_once))
        while True:
            for number, request in work.requests(wait=not dealer.busy):
                dealer.add(Task(number, request, time.monotonic() + self.deadline))
            for server, task in dealer.give():
                asking[server].put(task)
            if not dealer.busy:
                return
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=_NEXT)
                if isinstance(event, Failed):
                    self._lose(dealer, event.server, event.error)
                    asking[event.server].stop()
                elif dealer.done(event.server, event.task.number):
                    work.done(event.task.number, event.answers)
            if heartbeat is not None:
                heartbeat(*work.progress)

    def _lose(self, dealer: Dealer, server: int, error: Exception) -> None:
        """Continue without a lost server, where another is left; else raise its error.

        A late answer means the rollout's own deadline, which no other server could keep.
        """
        if server not in dealer.servers:
            return
        if not isinstance(error, ServerDead | EngineLost) or len(dealer.servers) == 1:
            raise error
        owed = dealer.lose(server)
        self._asked.remove(server)
        self._say(f"{error} The rollout goes on: {owed} requests that it has not answered are asked of the others.")


class server_errors:
    """A context that turns errors of calls into those of engines: lost, or a refusal."""

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
