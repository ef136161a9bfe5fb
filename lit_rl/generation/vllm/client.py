"""The client of a vLLM server: one coroutine for each of its routes, to be awaited on `HTTP_LOOP`.

Any program may listen at an address, so every answer is checked while it is parsed (`JSONValue`): a wrong one raises
`ServerRefused` with the address, the call, the place in the answer, an excerpt and the likely fix. Fields that are not
read (usage, times, ids of requests) may be anything.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode, urlsplit

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.http_client import (
    HTTPAnswer,
    JSONValue,
    LargeAnswer,
    LateAnswer,
    NoAnswer,
    json_excerpt,
    plain_line,
    request,
)
from lit_rl.generation.vllm.engine import EngineAnswer, Facts, Request
from lit_rl.generation.vllm.engine_settings import API_KEY_VARIABLE, api_key

Result = TypeVar("Result")


class ServerError(GenerationError):
    """A failed call to a server; `url` is the server's."""

    def __init__(self, url: str, call: str, why: str) -> None:
        super().__init__(f"{url}: {call}: {why}")
        self.url = url
        self.why = why


class ServerDead(ServerError):
    """A server that does not listen, a broken connection, or an engine that has died."""


class ServerHung(ServerError):
    """An answer that did not come within the deadline."""


class ServerRefused(ServerError):
    """An answer of the server other than the requested one.

    `status` is HTTP's; 200 where the answer is invalid.
    """

    def __init__(self, url: str, call: str, why: str, status: int) -> None:
        super().__init__(url, call, why)
        self.status = status


# ------------------------------------------------------------------ calls

LARGEST_ANSWER = 2**28
"""Bytes: a completion of a million tokens with its log-probs has less."""

_DEAD = ("EngineDeadError", "EngineCore encountered")
_ENDING = ("Server shutting down", "after shutdown")  # the second is Python's, of a pool that takes no more work
_RETRY_AFTER = 0.05


class Client:
    """A client of one server with vLLM's routes of training, started by `lit-rl serve`, by `launch` or otherwise.

    A bearer key is read from the environment variable VLLM_API_KEY, as the server does, and from nowhere else. Every
    method raises `ServerDead`, `ServerHung` or `ServerRefused`, also for an invalid answer. Deadlines are seconds.

    Args:
        url: Base address of the server, such as ``http://127.0.0.1:8000``.
        key: Name of the setting with the address, for messages.

    Raises:
        ConfigError: no http:// or https:// address of a server, or one with a user name, a path or a query.
    """

    def __init__(self, url: str, key: str = "generator.urls") -> None:
        self.url = checked_url(url, key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def get(self, route: str, deadline: float) -> JSONValue:
        """Return the JSON of an answer; null where it is empty. `route` is the server's path, from ``/``."""
        return await self._call("GET", route, deadline, None)

    async def post(self, route: str, deadline: float, body: Mapping[str, Any] | None = None, **query: Any) -> JSONValue:
        """Return the JSON of an answer to a JSON body, like `get`. A query parameter that is a list is repeated."""
        parameters = urlencode(query, doseq=True)
        address = f"{route}?{parameters}" if parameters else route
        return await self._call("POST", address, deadline, json.dumps(body or {}, allow_nan=False).encode())

    async def _call(self, verb: str, address: str, deadline: float, body: bytes | None) -> JSONValue:
        route = address.partition("?")[0]
        call = f"{verb} {route}"
        if deadline <= 0:
            raise ServerHung(self.url, call, "no time was left for it.")
        try:
            answer = await request(
                verb, f"{self.url}{address}", body, bearer=api_key(), timeout=deadline, largest=LARGEST_ANSWER
            )
        except LargeAnswer as error:
            what = f"it is longer than {LARGEST_ANSWER} bytes: {json_excerpt(error.start)}"
            raise self._unexpected(call, what) from error
        except LateAnswer as error:
            raise ServerHung(self.url, call, f"{error}.") from error
        except NoAnswer as error:
            raise ServerDead(self.url, call, f"no server answers there: {error}.") from error
        if not answer.is_ok:
            raise self._refused(call, answer)
        # These two answer in words.
        body = b"null" if not answer.body or "lora_adapter" in route else answer.body
        return JSONValue.parse(body, lambda what: self._unexpected(call, what))

    def _unexpected(self, call: str, what: str) -> ServerRefused:
        """Return the error for an invalid answer; `what` is its fault, a sentence without its full stop."""
        return ServerRefused(
            self.url,
            call,
            f"this is no answer of a vLLM server of ours: {what}. Another program listens at this address, or the "
            "server runs another version of vLLM or of lit_rl than the trainer: start it by `lit-rl serve` with the "
            "trainer's.",
            200,
        )

    def _refused(self, call: str, answer: HTTPAnswer) -> ServerError:
        message = _message(answer.body[: 2**16])
        if any(words in message for words in _DEAD):
            return ServerDead(self.url, call, f"its engine has died: {message}")
        if any(words in message for words in _ENDING):
            return ServerDead(self.url, call, "it is shutting down")
        advice = ""
        if answer.status == 401:
            advice = f" The server wants a key: set the environment variable {API_KEY_VARIABLE}."
        elif answer.status == 404 and not call.partition(" ")[2].startswith("/v1/"):
            advice = (
                " The server lacks the routes of training: start it with `lit-rl serve`, or VLLM_SERVER_DEV_MODE=1."
            )
        why = f"HTTP {answer.status} {plain_line(answer.reason)}: {message.rstrip('.')}.{advice}"
        return ServerRefused(self.url, call, why, answer.status)

    async def health(self, deadline: float) -> None:
        """Return if the engine behind the server lives.

        Raises:
            ServerDead: also where the server answers and its engine does not live.
        """
        try:
            await self.get("/health", deadline)
        except ServerRefused as error:
            if error.status == 503:
                raise ServerDead(self.url, "GET /health", "its engine has died.") from error
            raise

    async def models(self, deadline: float) -> dict[str, int | None]:
        """Return the names of the model and of adapters, each with its longest sequence in tokens."""
        return parse_models(await self.get("/v1/models", deadline))

    async def world_size(self, deadline: float) -> int:
        """Return the number of workers behind the server, of all copies of the model together."""
        return parse_world_size(await self.get("/get_world_size", deadline))

    async def facts(self, deadline: float) -> Facts:
        """Return the engine's facts from its first worker; all workers of a server are alike."""
        first, *_ = await self.rpc("lit_rl_facts", deadline=deadline)
        return parse_facts(JSONValue(first, lambda what: self._unexpected("rpc lit_rl_facts", what)))

    async def rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, deadline: float
    ) -> list[Any]:
        """Call a method of every worker, and return the results, one a worker.

        Arguments and results are JSON values; a result that is no dict, list or None comes as a string.
        """
        body = {"method": method, "args": list(args), "kwargs": dict(kwargs or {}), "timeout": deadline}
        answer = await self.post("/collective_rpc", deadline, body)
        return parse_results(replace(answer, fault=lambda what: self._unexpected(f"rpc {method}", what)))

    async def complete(self, payload: Mapping[str, Any], deadline: float) -> JSONValue:
        """Return the answer of ``POST /v1/completions``, for `parse_completions`."""
        return await self.post("/v1/completions", deadline, payload)

    async def generate(self, payload: Mapping[str, Any], deadline: float) -> JSONValue:
        """Return the answer of ``POST /inference/v1/generate``, which takes images beside token ids, for
        `parse_generated`. A server started with ``--enable-scale-out`` has this route."""
        return await self.post("/inference/v1/generate", deadline, payload)

    async def pause(self, deadline: float, mode: Literal["abort", "wait", "keep"] = "wait") -> None:
        """Accept no new requests. Running ones are aborted, waited for, or frozen until `resume`."""
        await self.post("/pause", deadline, mode=mode)

    async def resume(self, deadline: float) -> None:
        """Accept requests again after `pause`."""
        await self.post("/resume", deadline)

    async def reset_caches(self, deadline: float) -> None:
        """Empty every cache with results of older weights: of prefixes, of images, of encoders.

        Raises:
            ServerRefused: requests still hold parts of the prefix cache when the deadline comes.
        """
        until = time.monotonic() + deadline
        while not parse_reset(await self.post("/reset_prefix_cache", until - time.monotonic())):
            if until - time.monotonic() < 2 * _RETRY_AFTER:
                why = "running requests hold the prefix cache: pause first."
                raise ServerRefused(self.url, "POST /reset_prefix_cache", why, 200)
            await asyncio.sleep(_RETRY_AFTER)
        await self.post("/reset_mm_cache", until - time.monotonic())
        await self.post("/reset_encoder_cache", until - time.monotonic())

    async def load_adapter(self, name: str, path: str, deadline: float) -> None:
        """Load a PEFT adapter from a folder that the server can read, in place of one of the same name.

        Requests with ``"model": name`` then use it. The caches stay as they are.
        """
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self.post("/v1/load_lora_adapter", deadline, body)


async def on_all(clients: Sequence[Client], call: Callable[[Client], Awaitable[Result]]) -> list[Result]:
    """Call servers at the same time, and return the results in order. Raise the first error, once all have ended."""
    calls = [asyncio.ensure_future(call(client)) for client in clients]
    await asyncio.gather(*calls, return_exceptions=True)
    return [each.result() for each in calls]


def checked_url(url: str, key: str) -> str:
    """Return the base address without a slash at its end. Raise a ConfigError for an invalid one; see `Client`."""
    try:
        parts = urlsplit(str(url))
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{key}: {url!r} is not the address of a server: {error}.") from error
    if parts.username or parts.password:
        raise ConfigError(
            f"{key} holds a user name or a password: put a key into the environment variable {API_KEY_VARIABLE}."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: {url!r} is not the address of a server, which reads http://host:port.")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise ConfigError(f"{key}: {url!r} has more than a host and a port: leave out what follows them, such as /v1.")
    return f"{parts.scheme}://{parts.netloc}"


def _message(body: bytes) -> str:
    """Return the message of an error's body: vLLM writes JSON of several shapes."""
    text = body.decode(errors="replace")
    try:
        found: Any = json.loads(text)
        for name in ("error", "message", "detail"):
            while isinstance(found, dict) and name in found:
                found = found[name]
        return plain_line(found if isinstance(found, str) else json.dumps(found))
    except (ValueError, RecursionError):
        return plain_line(text)


# ------------------------------------------------------------------ answers

_LOWEST = -9999.0
"""vLLM's log-prob in place of minus infinity; on the route for images, in place of NaN too."""

_HIGHEST = 0.01
"""A log-prob is at most 0; an engine that rounds may end a little above it."""

_MOST_WORKERS = 2**16

_LARGEST_BLOCK = 2**16
"""Tokens. The probe is longer than a block."""


def parse_models(answer: JSONValue) -> dict[str, int | None]:
    """Return the names of the model and of adapters, each with its longest sequence in tokens; one or more."""
    models, found = answer.part("data"), {}
    for model in models.entries():
        name = model.part("id").word()
        found[name] = model.part("max_model_len").whole_or_null() if "max_model_len" in model.value else None
    return found or models.refuse("a list of one model or more")


def parse_world_size(answer: JSONValue) -> int:
    """Return the number of workers behind a server."""
    return answer.part("world_size").whole(high=_MOST_WORKERS)


def parse_results(answer: JSONValue) -> list[Any]:
    """Return the results of the workers; one or more."""
    results = answer.part("results")
    return results.as_list() or results.refuse("a list with a result of every worker")


def parse_reset(answer: JSONValue) -> bool:
    """Tell whether a cache was emptied."""
    done = answer.part("success")
    return done.value if isinstance(done.value, bool) else done.refuse("true or false")


def parse_facts(answer: JSONValue) -> Facts:
    """Return the facts of a worker, see `worker.WeightUpdates.lit_rl_facts`."""
    known = {field.name for field in fields(Facts)}
    if not isinstance(answer.value, dict):
        answer.refuse("an object")
    if set(answer.value) != known:
        missing, unknown = sorted(known - set(answer.value)), sorted(set(answer.value) - known)
        answer.refuse(
            f"what workers of this lit_rl say: missing is {json_excerpt(missing)}, unknown {json_excerpt(unknown)}"
        )
    model = answer.part("model")  # architecture and sizes, see `worker.shape_of`
    model.part("vocab_size").whole()
    for name, value in model.value.items():
        if type(value) not in (bool, int):
            JSONValue(value, answer.fault, f"{model.place}[{json_excerpt(name)}]").word()
    return Facts(
        instance=answer.part("instance").word(),
        version=answer.part("version").whole_or_null(-(2**31)),
        model=model.value,
        dtype=answer.part("dtype").word(),
        max_model_len=answer.part("max_model_len").whole(),
        block_size=answer.part("block_size").whole(high=_LARGEST_BLOCK),
        logprobs_mode=answer.part("logprobs_mode").word(),
        max_num_seqs=answer.part("max_num_seqs").whole(),
        max_lora_rank=answer.part("max_lora_rank").whole_or_null(0),
        device=answer.part("device").word(),
    )


def parse_completions(answer: JSONValue, request: Request, vocabulary: int) -> list[EngineAnswer]:
    """Parse the answer of ``POST /v1/completions``.

    Args:
        answer: The answer.
        request: The request, with the number of completions, their longest length, and whether the log-probs of the
            prompt are required.
        vocabulary: Tokens of the model; ids are below it.
    """
    found = []
    for choice in _in_order(answer, request):
        ids, ended = _tokens(choice, request, vocabulary), _ended(choice)
        logprobs = choice.part("logprobs").part("token_logprobs")
        scored = None
        if request.fields.get("prompt_logprobs") is not None:
            scored = _prompt_logprobs(choice.part("prompt_logprobs"), request.token_ids)
        found.append(EngineAnswer(ids, _logprobs(logprobs, logprobs.as_list(), len(ids)), ended, scored))
    return found


def parse_generated(answer: JSONValue, request: Request, vocabulary: int) -> list[EngineAnswer]:
    """Parse the answer of ``POST /inference/v1/generate``; see `parse_completions`. An unrepresentable log-prob is
    NaN."""
    found = []
    for choice in _in_order(answer, request):
        ids, ended = _tokens(choice, request, vocabulary), _ended(choice)
        content = choice.part("logprobs").part("content")
        listed = _logprobs(content, _named(content), len(ids))
        found.append(EngineAnswer(ids, [math.nan if value <= _LOWEST else value for value in listed], ended))
    return found


def parse_prompt(answer: JSONValue) -> list[Any]:
    """Return the engine's tokens of a prompt with images; of any type, as they are only compared."""
    return answer.part("prompt_token_ids").as_list()


def _in_order(answer: JSONValue, request: Request) -> list[JSONValue]:
    choices, count = answer.part("choices"), request.completions
    choices.as_list(count, "as many completions as were asked for")
    found = {choice.part("index").whole(0, count - 1): choice for choice in choices.entries()}
    if len(found) != count:
        choices.refuse("a list in which each completion has an index of its own")
    return [found[index] for index in range(count)]


def _tokens(choice: JSONValue, request: Request, vocabulary: int) -> list[int]:
    tokens, most = choice.part("token_ids"), request.fields["max_tokens"]
    ids = tokens.as_list()
    if not 1 <= len(ids) <= most:
        tokens.refuse(f"a list of 1 to {most} tokens, not of {len(ids)}")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
        for entry in tokens.entries():
            entry.whole(0, vocabulary - 1)
    return ids


def _ended(choice: JSONValue) -> bool:
    """Tell whether it ended by an EOS or a stop string, and not by its length."""
    reason = choice.part("finish_reason")
    if reason.value not in ("stop", "length"):
        reason.refuse('"stop" or "length" ("abort": another program has paused the server)')
    return reason.value == "stop"


def _logprobs(answer: JSONValue, values: list[Any], count: int) -> list[float]:
    """Return `values` if they are `count` log-probs; `answer` is their place."""
    if len(values) != count:
        answer.refuse(f"a list of {count}, one for each token, not of {len(values)}")
    if set(map(type, values)) <= {int, float} and all(_LOWEST <= value <= _HIGHEST for value in values):
        return values
    wrong = next(i for i, v in enumerate(values) if type(v) not in (int, float) or not _LOWEST <= v <= _HIGHEST)
    JSONValue(values[wrong], answer.fault, f"{answer.place}[{wrong}]").refuse(
        f"a log-prob: a number from {_LOWEST:g} to 0"
    )


def _named(content: JSONValue) -> list[Any]:
    """Return the values under "logprob" of a list's entries."""
    try:
        return [entry["logprob"] for entry in content.as_list()]
    except (TypeError, KeyError):
        return [entry.part("logprob").value for entry in content.entries()]  # says which has none


def _prompt_logprobs(answer: JSONValue, prompt: list[int]) -> list[float]:
    """Return the log-prob of each token but the first, which has none; an entry holds other likely tokens too."""
    answer.as_list(len(prompt), "one for each token of the prompt")
    values = [answer.entry(i).part(str(prompt[i])).part("logprob").value for i in range(1, len(prompt))]
    return _logprobs(answer, values, len(prompt) - 1)
