"""One or several vLLM servers as one `Engine`.

`Dealer` assigns each request to the least loaded server, and to another one when a server is lost. `ask_server` sends a
request: to the route of completions, or to the one that takes images too. Requests and the checks of their servers are
coroutines on `HTTP_LOOP`; the thread that generates takes their results from a queue, since answers of environments
and the rows of a rollout are its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.core import ranks
from lit_rl.core.errors import GenerationError, NumericError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.interrupts import interruptible
from lit_rl.core.vision_inputs import Picture
from lit_rl.core.visuals import as_png
from lit_rl.generation.generator import EngineLost
from lit_rl.generation.vllm.client import (
    Client,
    ServerDead,
    ServerError,
    ServerHung,
    ServerRefused,
    on_all,
    parse_completions,
    parse_generated,
    parse_prompt,
)
from lit_rl.generation.vllm.engine import (
    EngineAnswer,
    EngineWork,
    Facts,
    Heartbeat,
    Request,
    Shapes,
    check_prompt_tokens,
)
from lit_rl.generation.vllm.engine_settings import WORKER_EXTENSION
from lit_rl.generation.vllm.transports import Transport

ADAPTER = "lit_rl_policy"

_POLL_SECONDS = 0.02
"""Seconds between two polls for requests that follow from others."""

_AT_ONCE = 256
"""Most connections to one server at the same time."""

_CHECK_EVERY = 2.0
"""Seconds between two checks of a server that is asked for completions."""

_QUEUE_FACTOR = 2
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
        self.clients, self.transport, self._print = list(clients), transport, say
        self.deadline, self.answer_deadline = deadline, answer_deadline
        self._adapter: str | None = None
        self._leftovers = after_loss
        self._asked = list(range(len(self.clients)))
        """The numbers of the servers that are not lost."""
        with engine_errors():
            models = HTTP_LOOP.wait(on_all(self.clients, lambda client: client.models(answer_deadline)))
        self._names = [next(iter(each)) for each in models]
        facts = self._all_facts()
        self._instances = [each.instance for each in facts]
        self._capacities = [_QUEUE_FACTOR * each.max_num_seqs for each in facts]
        self._vocabularies = [each.vocabulary for each in facts]

    @property
    def lost(self) -> list[str]:
        """Addresses of the servers that were lost while others answered. Their weights are unknown."""
        return [client.url for number, client in enumerate(self.clients) if number not in self._asked]

    def _all_facts(self) -> list[Facts]:
        """Return the facts of the servers that are not lost."""
        with engine_errors():
            return HTTP_LOOP.wait(on_all([self.clients[server] for server in self._asked], self._facts_of))

    async def _facts_of(self, client: Client) -> Facts:
        try:
            return await client.facts(self.answer_deadline)
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
        with engine_errors():
            self.transport.begin(shapes)

    def load(self, weights: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        with engine_errors():
            self.transport.send(weights, self._shapes, dtype)

    def load_adapter(self, folder: str) -> None:
        self._everywhere(lambda client: client.load_adapter(ADAPTER, folder, self.answer_deadline))
        self._adapter = ADAPTER

    def finish(self, version: int) -> None:
        with engine_errors():
            self.transport.finish(version)

    def stamp(self, version: int) -> None:
        self._everywhere(lambda client: client.rpc("lit_rl_stamp", [version], deadline=self.answer_deadline))

    def reset_caches(self) -> None:
        self._everywhere(lambda client: client.reset_caches(self.answer_deadline))

    def resume(self) -> None:
        self._everywhere(lambda client: client.resume(self.answer_deadline))

    def _everywhere(self, call: Callable[[Client], Awaitable[Any]]) -> None:
        with engine_errors():
            self.transport.everywhere(call)

    def sleep(self) -> None:
        """Do nothing: a server keeps its memory, and shares none with the training."""

    def wake(self, what: str) -> None:
        """Do nothing; see `sleep`."""

    def close(self) -> None:
        self.transport.close()

    # ------------------------------------------------------------------ completions

    def run(self, work: EngineWork, heartbeat: Heartbeat | None = None) -> None:
        """Do the work on the servers, as `Dealer` distributes it. A server that is silent meanwhile is detected."""
        calls = _Calls()
        try:
            with interruptible(), engine_errors():
                self._deal(work, calls, heartbeat)
        finally:
            calls.cancel()

    def _deal(self, work: EngineWork, calls: _Calls, heartbeat: Heartbeat | None) -> None:
        """Send new requests and take finished answers, until nothing is left."""
        free = {server: asyncio.Semaphore(_AT_ONCE) for server in self._asked}
        capacities = [self._capacities[server] for server in self._asked]
        dealer = Dealer(capacities_for_rank(ranks.rank(), ranks.world_size(), self._asked, capacities))
        for server in self._asked:
            calls.begin(server, None, self._watch(server))
        while True:
            for number, request in work.requests(wait=not dealer.busy):
                dealer.add(ServerTask(number, request, time.monotonic() + self.deadline))
            for server, task in dealer.assign():
                calls.begin(server, task, self._answers(server, task, free[server]))
            if not dealer.busy:
                return
            with contextlib.suppress(queue.Empty):
                server, task, finished = calls.next(_POLL_SECONDS)
                if (error := finished.exception()) is not None:
                    self._drop_server(dealer, server, error)
                    calls.cancel(server)
                elif task is not None and dealer.done(server, task.number):
                    work.done(task.number, finished.result())
            if heartbeat is not None:
                heartbeat(*work.progress)

    async def _answers(self, server: int, task: ServerTask, free: asyncio.Semaphore) -> list[EngineAnswer]:
        name = self._adapter or self._names[server]
        async with free:
            return await ask_server(self.clients[server], name, task, self._vocabularies[server])

    async def _watch(self, server: int) -> None:
        """Raise once the server has changed or is silent."""
        while True:  # /health would not do: a process in front of the engine answers it, also where the engine hangs
            await asyncio.sleep(_CHECK_EVERY)
            with engine_errors():
                self._same(server, await self._facts_of(self.clients[server]))

    def _drop_server(self, dealer: Dealer, server: int, error: BaseException) -> None:
        """Continue without a lost server, where another is left; else raise its error.

        A late answer means the rollout's own deadline, which no other server could keep.
        """
        if server not in dealer.servers:
            return
        if not isinstance(error, ServerDead | EngineLost) or len(dealer.servers) == 1:
            raise error
        owed = dealer.drop(server)
        self._asked.remove(server)
        self._print(f"{error} The rollout goes on: {owed} requests that it has not answered are asked of the others.")


class _Calls:
    """Calls on `HTTP_LOOP`, and the queue of those that have ended. A cancelled call closes its connection."""

    def __init__(self) -> None:
        self._open: dict[Future[Any], tuple[int, ServerTask | None]] = {}
        self._ended = queue.SimpleQueue[Future[Any]]()

    def begin(self, server: int, task: ServerTask | None, call: Coroutine[Any, Any, Any]) -> None:
        future = HTTP_LOOP.submit(call)
        self._open[future] = server, task
        future.add_done_callback(self._ended.put)

    def next(self, seconds: float) -> tuple[int, ServerTask | None, Future[Any]]:
        """Return the next call that has ended, with its server and task.

        Raises:
            queue.Empty: none has within this time.
        """
        while (future := self._ended.get(timeout=seconds)) not in self._open:  # it was cancelled
            pass
        return *self._open.pop(future), future

    def cancel(self, server: int | None = None) -> None:
        """Cancel the calls of one server, or all."""
        for future in [each for each, (number, _) in self._open.items() if server in (None, number)]:
            del self._open[future]
            future.cancel()


class engine_errors:
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


# ------------------------------------------------------------------ distribution of requests


@dataclass(frozen=True)
class ServerTask:
    """A request that waits for its answer."""

    number: int
    """Its number in the work."""
    request: Request
    until: float
    """The deadline of the answer, by `time.monotonic`."""


class Dealer:
    """A dealer that gives each request to the server with the fewest tokens; of equals, the first. Depends on no clock.

    A server gets more as long as it has fewer completions than its capacity; other requests wait here for the first
    free server. The next turn of a request goes to the same server, whose cache holds its text.

    Args:
        capacities: Completions that each server gets at once, by its number; in the order of `capacities_for_rank`.
    """

    def __init__(self, capacities: Mapping[int, int]) -> None:
        self._capacities = dict(capacities)
        self._running: dict[int, dict[int, ServerTask]] = {server: {} for server in capacities}
        self._completions, self._tokens = dict.fromkeys(capacities, 0), dict.fromkeys(capacities, 0)
        self._server_of: dict[int, int] = {}
        self._next_turns: deque[tuple[int, ServerTask]] = deque()
        self._waiting: deque[ServerTask] = deque()

    @property
    def servers(self) -> list[int]:
        """The servers in use."""
        return list(self._capacities)

    @property
    def busy(self) -> bool:
        """Tell whether an answer is still to come."""
        return bool(self._waiting or self._next_turns or any(self._running.values()))

    def add(self, task: ServerTask) -> None:
        """Add a request."""
        server = self._server_of.get(task.number)
        if server is None:
            self._waiting.append(task)
        else:
            self._next_turns.append((server, task))

    def assign(self) -> Iterator[tuple[int, ServerTask]]:
        """Yield the requests to send now, each with its server."""
        while self._next_turns:
            yield self._assigned(*self._next_turns.popleft())
        while self._waiting and (
            free := [s for s, capacity in self._capacities.items() if self._completions[s] < capacity]
        ):
            yield self._assigned(min(free, key=lambda server: self._tokens[server]), self._waiting.popleft())

    def _assigned(self, server: int, task: ServerTask) -> tuple[int, ServerTask]:
        self._server_of[task.number] = server
        self._running[server][task.number] = task
        self._completions[server] += task.request.completions
        self._tokens[server] += task.request.most_tokens
        return server, task

    def done(self, server: int, number: int) -> bool:
        """Record an answer; return False where it comes from a lost server, and its request went to another."""
        task = self._running.get(server, {}).pop(number, None)
        if task is None:
            return False
        self._completions[server] -= task.request.completions
        self._tokens[server] -= task.request.most_tokens
        return True

    def drop(self, server: int) -> int:
        """Drop a server. Its open requests go to the others, before all others; return their number."""
        del self._capacities[server]
        left = [*self._running.pop(server).values(), *(task for to, task in self._next_turns if to == server)]
        self._next_turns = deque((to, task) for to, task in self._next_turns if to != server)
        self._server_of = {number: to for number, to in self._server_of.items() if to != server}
        self._waiting.extendleft(reversed(left))
        return len(left)


def capacities_for_rank(rank: int, world_size: int, servers: Sequence[int], at_once: Sequence[int]) -> dict[int, int]:
    """Return the servers in the order of a rank, each with the completions that the rank may give it.

    Ranks do not know the requests of others. So each begins at another server, and has its share of a server's
    capacity.

    Args:
        rank: This rank.
        world_size: Ranks that send requests.
        servers: Their numbers.
        at_once: Completions that each of them gets at once from all ranks together.
    """
    capacities = {server: -(-most // world_size) for server, most in zip(servers, at_once, strict=True)}
    first = rank * len(servers) // world_size
    return {server: capacities[server] for server in (*servers[first:], *servers[:first])}


# ------------------------------------------------------------------ the HTTP form of a request


async def ask_server(client: Client, model: str, task: ServerTask, vocabulary: int) -> list[EngineAnswer]:
    """Return the server's completions of a prompt.

    Args:
        client: The server.
        model: Its name of the policy.
        task: The request.
        vocabulary: Tokens of the model.

    Raises:
        ServerError: one of its three kinds.
        GenerationError: the engine's tokens of a prompt with images are not the policy's.
        DataError: an image is gone, or has changed since the data were read.
    """
    request = task.request
    if request.pictured is None:
        body = {"model": model, "prompt": request.token_ids, **request.fields, "return_token_ids": True}
        return parse_completions(await client.complete(body, task.until - time.monotonic()), request, vocabulary)
    images = await asyncio.gather(*(asyncio.to_thread(_image_url, image) for image in request.pictured.images))
    body = {
        "model": model,
        "token_ids": request.pictured.token_ids,
        "content_parts": [{"type": "image_url", "url": image} for image in images],
        "sampling_params": request.fields,
        "return_token_ids": True,
    }
    answer = await client.generate(body, task.until - time.monotonic())
    check_prompt_tokens(request, task.number, parse_prompt(answer))
    return parse_generated(answer, request, vocabulary)


def _image_url(image: Picture) -> str:
    """Return an image as a ``data:`` address: PNG keeps the very pixels, and other modes become RGB in our way."""
    return f"data:image/png;base64,{base64.b64encode(as_png(image.open(), compress_level=1)).decode()}"
