"""An endpoint of OpenAI's API in front of the policy of a rollout function, for agents that know no other.

Every completion has an address of its own, and a request there gets its next turn. Agents run on one event loop in the
thread of the rollout function, the only thread that may ask the generator; requests arrive on other threads. The policy
is asked once all agents wait for it, or some have waited for long enough: while it writes, the loop stands still, so no
other work of an agent can run into a time limit.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import GenerationError
from lit_rl.core.event_loops import hide_running_loop, run_coroutine
from lit_rl.environments.tool_parsers import ParserName, check_parser
from lit_rl.generation.chat_conversation import (
    MODEL,
    ChatConversation,
    ChatReading,
    ChatRequest,
    ChatRequestRefused,
    ChatTurn,
    read_request,
)
from lit_rl.generation.rollout_function import RolloutHandle
from lit_rl.ops.ranges import NotNegative, Positive

_SPARE_THREADS = 32
"""Threads for other uses, such as the lookup of names."""

Result = TypeVar("Result")

Agent = Callable[[int, str], Awaitable[Result]]
"""Called with the number of a completion and the address of its policy, such as ``http://127.0.0.1:4711/k/0/v1``."""


@dataclass(frozen=True)
class Played(Generic[Result]):
    """The agents' results and completions of a rollout."""

    results: list[Result | Exception]
    """The value that each agent returned, or its exception; a `TimeoutError` where its time was over."""
    rollout: dict[str, list[Any]]
    """The returned dict of a rollout function: ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask``,
    ``ended``, ``env_follows``, ``episode_messages``, ``episode_limit``, and ``episode_error``: the exception where an
    agent raised or its time was over, else None. It is None too where the completion had no room for another turn or
    another branch: then it is cut."""


@checked("")
class ChatEndpoint(Generic[Result]):
    """An endpoint of OpenAI's chat completions through which agents write a rollout, with exact tokens.

    Args:
        trainer: The rollout function's second argument.
        parser: Name of the parser of tool calls, where a request names tools: see `env.parser`.
        call_pattern: Pattern for `parser=regex`.
        patience: Seconds that waiting agents wait for others to ask too.
        agent_timeout: Seconds that an agent may take from when it is called, generation included; None is no limit. It
            is looked at while the agent awaits something: no turn is cut. One that is late is cancelled, and the others
            go on.

    Raises:
        ConfigError: a number is out of range, or there is no such parser.
    """

    def __init__(
        self,
        trainer: RolloutHandle,
        *,
        parser: ParserName = "auto",
        call_pattern: str | None = None,
        patience: NotNegative = 1.0,
        agent_timeout: Positive | None = None,
    ) -> None:
        check_parser(parser, call_pattern)
        eos_ids = frozenset(trainer.eos_ids)
        self._reading = ChatReading(
            trainer.tokenizer, trainer.encode, trainer.template_kwargs, eos_ids, parser, call_pattern
        )
        self._trainer, self._patience, self._agent_timeout = trainer, patience, agent_timeout
        limits = trainer.max_tokens, trainer.max_branches
        self._conversations = [ChatConversation(self._reading, *limits) for _ in range(trainer.count)]
        self._live: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._broken: BaseException | None = None

    def play(
        self,
        agent: Agent[Result],
        *,
        around: AbstractAsyncContextManager[Any] | None = None,
        instead: Sequence[Prompt] | None = None,
    ) -> Played[Result]:
        """Let an agent write every completion.

        Args:
            agent: Each call of it writes one. It must not block its loop, which is the one that answers: a blocking
                client goes into `asyncio.to_thread`.
            around: Entered on the loop of the agents before the first of them begins, left after the last.
            instead: A prompt for each completion. Where an agent fails before it has had a turn, the policy answers the
                prompt of its group once: a failed completion has tokens too. None: the run ends.

        Raises:
            GenerationError: an agent ended without having asked the policy for a turn.
        """
        results = run_coroutine(self._play(agent, around or nullcontext()))
        for row, (conversation, result) in enumerate(zip(self._conversations, results)):
            raised = result if isinstance(result, Exception) else None
            if conversation.turns:
                continue
            if instead is None or raised is None:
                why = f": {type(raised).__name__}: {raised}" if raised else "."
                raise GenerationError(
                    f"The agent of completion {row} ended and never had a turn of the policy{why}"
                ) from raised
            size = self._trainer.num_generations
            group = self._conversations[row // size * size : (row // size + 1) * size]
            ids = next((each.prompt_ids for each in group if each.turns), None) or self._trainer.encode(instead[row])
            out = self._trainer.generate([ids], rows=[row])
            conversation.write(ids, out["completion_ids"][0], out["logprobs"][0], ended=out["ended"][0])
        columns = {"completion_ids": "completion_ids", "prompt_ids": "prompt_ids", "logprobs": "logprobs"}
        columns |= {"env_mask": "written", "ended": "ended", "episode_messages": "messages"}
        columns |= {"env_follows": "follows", "episode_limit": "limit"}
        rollout = {key: [getattr(each, name) for each in self._conversations] for key, name in columns.items()}
        rollout["episode_error"] = [
            result if isinstance(result, Exception) and not conversation.full else None
            for conversation, result in zip(self._conversations, results)
        ]
        return Played(results, rollout)

    async def _play(self, agent: Agent[Result], around: AbstractAsyncContextManager[Any]) -> list[Result | Exception]:
        self._loop, self._came = asyncio.get_running_loop(), asyncio.Event()
        # A thread for each agent: `asyncio.to_thread` has few, and who waits for one is not asking the policy.
        self._loop.set_default_executor(ThreadPoolExecutor(len(self._conversations) + _SPARE_THREADS))
        async with around:
            with _ChatServer(self._take) as server:
                self._live = set(range(len(self._conversations)))
                tasks = [asyncio.ensure_future(self._write(agent, row, server.url(row))) for row in sorted(self._live)]
                try:
                    while self._live:
                        await self._until_asked()
                        self._answer()
                    return [task.result() for task in tasks]
                finally:
                    self._live.clear()
                    for task in tasks:
                        task.cancel()
                    for row in list(self._waiting):
                        self._leave(row)

    async def _write(self, agent: Agent[Result], row: int, url: str) -> Result | Exception:
        limit = asyncio.timeout(self._agent_timeout)
        try:
            async with limit:
                return await agent(row, url)
        except Exception as error:  # an agent is a program of anybody's
            if not limit.expired():
                return error
            self._conversations[row].ended = False
            late = TimeoutError(f"the agent took longer than agent_timeout={self._agent_timeout:g} s")
            late.__cause__ = error
            return late
        finally:
            self._live.discard(row)
            self._leave(row)
            self._came.set()

    def _leave(self, row: int) -> None:
        """Cancel the requests of an agent that has ended: their clients get an error."""
        if waiting := self._waiting.pop(row, None):
            for future in waiting.futures:
                future.cancel()

    async def _until_asked(self) -> None:
        """Wait until all agents wait for the policy, or some of them have waited for long enough."""
        while self._live and len(self._waiting) < len(self._live):
            self._came.clear()
            first = min((each.since for each in self._waiting.values()), default=None)
            left = None if first is None else max(0.0, first + self._patience - time.monotonic())
            try:
                await asyncio.wait_for(self._came.wait(), left)
            except TimeoutError:
                return
            if self._broken is not None:
                raise self._broken

    def _answer(self) -> None:
        """Draw a turn for all agents that wait."""
        rows = sorted(self._waiting)
        asked = [self._waiting[row] for row in rows]
        with hide_running_loop():  # engines may run one
            out = self._trainer.generate(
                [each.ids for each in asked], rows=rows, max_new_tokens=[each.room for each in asked]
            )
        for row, each, ids, logprobs, ended in zip(rows, asked, out["completion_ids"], out["logprobs"], out["ended"]):
            turn = self._conversations[row].answer(ids, logprobs, ended=ended)
            for future in each.futures:
                future.set_result(turn)
            del self._waiting[row]

    # ------------------------------------------------------------------ requests, on threads of their own

    def _take(self, row: int, request: ChatRequest) -> ChatTurn:
        """Return the policy's next turn of a completion."""
        future: Future[ChatTurn] = Future()
        self._loop.call_soon_threadsafe(self._asked, row, request, future)
        try:
            return future.result()
        except CancelledError:
            raise ChatRequestRefused("the agent's time or the rollout is over", status=409) from None

    def _asked(self, row: int, request: ChatRequest, future: Future[ChatTurn]) -> None:
        if row not in self._live:
            future.cancel()
            return
        # A client repeats a request where the answer was lost or is late: it gets the answer of the first one.
        if turn := self._conversations[row].answered(request):
            future.set_result(turn)
            return
        if (waiting := self._waiting.get(row)) and waiting.request == request:
            waiting.futures.append(future)
            return
        try:
            ids, room = self._conversations[row].ask(request)
            most = self._trainer.sampling.max_new_tokens
            self._waiting[row] = _Waiting(request, ids, min(most, room, request.max_new_tokens or most), [future])
        except ChatRequestRefused as refused:
            future.set_exception(refused)
        except Exception as error:  # the policy cannot be asked so: a chat template, a parser
            future.set_exception(ChatRequestRefused(str(error), status=500))
            self._broken = error
        self._came.set()


@dataclass(frozen=True)
class _Waiting:
    request: ChatRequest
    ids: list[int]
    room: int
    futures: list[Future[ChatTurn]]
    since: float = field(default_factory=time.monotonic)


# ------------------------------------------------------------------ HTTP

_LARGEST_BODY = 2**25
"""Bytes of a request: a conversation of some million tokens."""

_PIECE = 2**16


class _ChatServer:
    """The HTTP server, on the loopback alone, under a path that cannot be guessed."""

    def __init__(self, take: Callable[[int, ChatRequest], ChatTurn]) -> None:
        self._key = secrets.token_urlsafe(16)
        self._http = _HTTPServer(("127.0.0.1", 0), _handler(self._key, take))
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.02,), name="lit_rl-chat-endpoint", daemon=True
        )

    def url(self, row: int) -> str:
        """Return the address of a completion's policy."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/{self._key}/{row}/v1"

    def __enter__(self) -> _ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # all agents of a rollout connect at once
    block_on_close = False  # a connection that a client keeps open does not delay the end

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is gone."""


def _handler(key: str, take: Callable[[int, ChatRequest], ChatTurn]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                _row_of(self.path, key, "models")
            except ChatRequestRefused as refused:
                self._send(refused.status, "application/json", refused.body)
                return
            listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "lit_rl"}]}
            self._send(200, "application/json", json.dumps(listed).encode())

        def do_POST(self) -> None:
            size = self.headers.get("content-length", "")
            unread = int(size) if size.isascii() and size.isdigit() else None
            try:
                row = _row_of(self.path, key, "chat/completions")  # first: any user of this machine may send a body
                if unread is None or unread > _LARGEST_BODY:
                    why = f"the request has more than {_LARGEST_BODY} bytes, or does not say how many"
                    raise ChatRequestRefused(why, status=413)
                body, unread = self.rfile.read(unread), 0
                request = read_request(body)
                turn = take(row, request)
            except ChatRequestRefused as refused:
                if unread != 0:
                    self.close_connection = True
                    left = min(unread or 0, _LARGEST_BODY)  # a sender reads the answer after its body alone
                    while left > 0 and (piece := self.rfile.read(min(left, _PIECE))):
                        left -= len(piece)
                self._send(refused.status, "application/json", refused.body)
                return
            if request.stream:
                self._send(200, "text/event-stream", turn.events)
            else:
                self._send(200, "application/json", json.dumps(turn.body).encode())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log no requests."""

    return Handler


def _row_of(path: str, key: str, route: str) -> int:
    """Return the number of the completion that a route belongs to.

    Raises:
        ChatRequestRefused: there is no such route; also to those who do not know the key.
    """
    parts = path.split("?")[0].strip("/").split("/", 3)
    if len(parts) == 4 and parts[0] == key and parts[1].isdigit() and parts[2:] == ["v1", route]:
        return int(parts[1])
    raise ChatRequestRefused(f"there is no route {route} here", status=404)
