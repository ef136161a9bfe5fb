"""The HTTP client of a vLLM server.

`JSONCalls` sends JSON with a deadline and raises one of three errors; another thread may abort its calls. Any program
may listen at an address, so every answer is checked while it is parsed (`JSONAnswer`): a wrong one raises
`ServerRefused` with the address, the call, the place in the answer, an excerpt and the likely fix. Fields that are not
read (usage, times, ids of requests) may be anything. `Client` has one method for each route of vLLM.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import socket
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.http_client import AnswerTooLarge, opener_for, read_answer
from lit_rl.generation.vllm.engine import EngineAnswer, Facts, Request
from lit_rl.generation.vllm.engine_settings import API_KEY_VARIABLE, api_key


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

_LONGEST_MESSAGE = 600

LARGEST_ANSWER = 2**28
"""Bytes: a completion of a million tokens with its log-probs has less."""

_DEAD = ("EngineDeadError", "EngineCore encountered")
_ENDING = ("Server shutting down", "after shutdown")  # the second is Python's, of a pool that takes no more work

_EXCERPT = 200
"""Letters of an answer in a message."""


class JSONCalls:
    """Calls of one server. Holds no connection, so threads may share it.

    A bearer key is read from the environment variable VLLM_API_KEY, as the server does, and from nowhere else. Proxies
    of the environment are used, but never for this machine. vLLM drops an aborted request too, since its connection
    closes.

    Args:
        url: Base address of the server, such as ``http://127.0.0.1:8000``.
        key: Name of the setting with the address, for messages.

    Raises:
        ConfigError: no http:// or https:// address of a server, or one with a user name, a path or a query.
    """

    def __init__(self, url: str, key: str = "generator.urls") -> None:
        self.url = checked_url(url, key)
        self._connections = Connections()
        self._opener = opener_for(self.url, *self._connections.handlers())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def abort(self) -> None:
        """End the calls that other threads wait for, as `ServerDead`, and every later one."""
        self._connections.abort()

    def get(self, route: str, deadline: float, **query: Any) -> Any:
        """Return the JSON of an answer; None where it is empty.

        Args:
            route: Path of the server, from ``/``.
            deadline: Seconds.
            query: Query parameters; a list is repeated.

        Raises:
            ServerError: one of its three kinds.
        """
        return self._call("GET", route, deadline, None, query)

    def post(self, route: str, deadline: float, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """Return the JSON of an answer to a JSON body, like `get`."""
        return self._call("POST", route, deadline, body, query)

    def _call(self, verb: str, route: str, deadline: float, body: Mapping[str, Any] | None, query: Any) -> Any:
        call, until = f"{verb} {route}", time.monotonic() + deadline
        if deadline <= 0:
            raise ServerHung(self.url, call, "no time was left for it.")
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if secret := api_key():
            headers["Authorization"] = f"Bearer {secret}"
        parameters = urlencode(query, doseq=True)
        address = f"{self.url}{route}?{parameters}" if parameters else f"{self.url}{route}"
        data = None if body is None and verb == "GET" else json.dumps(body or {}, allow_nan=False).encode()
        request = urllib.request.Request(address, data, headers, method=verb)
        try:
            with self._opener.open(request, timeout=deadline) as response:
                answer = read_answer(response, largest=LARGEST_ANSWER, until=until)
        except AnswerTooLarge as error:
            start = json_excerpt(error.start)
            raise unexpected_answer(self.url, call, f"it is longer than {LARGEST_ANSWER} bytes: {start}") from error
        except HTTPError as error:
            with error:
                raise self._refused(call, error) from error
        except (OSError, http.client.HTTPException) as error:
            reason: Any = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise ServerHung(self.url, call, f"no answer within {deadline:g} seconds.") from error
            why = str(reason) or type(reason).__name__
            raise ServerDead(self.url, call, f"no server answers there: {why}.") from error
        if not answer:
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            if route.startswith("/v1/") and "lora_adapter" in route:  # these two answer in words
                return None
            raise unexpected_answer(self.url, call, f"{json_excerpt(answer)} is no JSON") from error

    def _refused(self, call: str, error: HTTPError) -> ServerError:
        try:
            message = _message(error.read(2**16))
        except (OSError, http.client.HTTPException):
            message = ""
        if any(words in message for words in _DEAD):
            return ServerDead(self.url, call, f"its engine has died: {message}")
        if any(words in message for words in _ENDING):
            return ServerDead(self.url, call, "it is shutting down")
        advice = ""
        if error.code == 401:
            advice = f" The server wants a key: set the environment variable {API_KEY_VARIABLE}."
        elif error.code == 404 and not call.partition(" ")[2].startswith("/v1/"):
            advice = (
                " The server lacks the routes of training: start it with `lit-rl serve`, or VLLM_SERVER_DEV_MODE=1."
            )
        return ServerRefused(
            self.url, call, f"HTTP {error.code} {_plain(str(error.reason))}: {message.rstrip('.')}.{advice}", error.code
        )


class Connections:
    """The connections of some calls. Threads may share it."""

    def __init__(self) -> None:
        self._lock, self._is_aborted = threading.Lock(), False
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def handlers(self) -> list[urllib.request.BaseHandler]:
        """Return the handlers of an opener with these connections."""
        opened = self._opened

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        class Encrypted(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        class PlainHandler(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Plain, req)

        class EncryptedHandler(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Encrypted, req, context=self._context)  # pyright: ignore  # read once, as theirs is

        return [PlainHandler(), EncryptedHandler()]

    def abort(self) -> None:
        """End all calls in flight, and all later ones. A server then drops their requests too."""
        with self._lock:
            self._is_aborted = True
            left = list(self._open)
        for each in left:
            with contextlib.suppress(OSError):  # it has ended by itself
                each.shutdown(socket.SHUT_RDWR)

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_aborted:
                raise ConnectionAbortedError("the call was given up")
            self._open.add(connection)


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


def unexpected_answer(url: str, call: str, what: str) -> ServerRefused:
    """Return the error for an invalid answer.

    Args:
        url: The server's address.
        call: The call.
        what: The fault of the answer; a sentence without its full stop.
    """
    return ServerRefused(
        url,
        call,
        f"this is no answer of a vLLM server of ours: {what}. Another program listens at this address, or the server "
        "runs another version of vLLM or of lit_rl than the trainer: start it by `lit-rl serve` with the trainer's.",
        200,
    )


def json_excerpt(value: Any) -> str:
    """Return the beginning of a value as JSON: one line of ASCII, control characters escaped."""
    shown = json.dumps(_beginning(value, depth=4))
    return shown if len(shown) <= _EXCERPT else f"{shown[:_EXCERPT]} ..."


def _beginning(value: Any, depth: int) -> Any:
    """Return a part that is small enough to be written: an answer may be long, and deeper than Python's recursion
    limit."""
    if isinstance(value, bytes):
        value = value[: 4 * _EXCERPT].decode(errors="replace")
    if isinstance(value, str):
        return value[:_EXCERPT]
    if isinstance(value, list):
        return [_beginning(each, depth - 1) for each in value[:9]] if depth else ["..."]
    if isinstance(value, dict):
        first = itertools.islice(value.items(), 9)
        return {name[:_EXCERPT]: _beginning(each, depth - 1) for name, each in first} if depth else {"...": "..."}
    return value


def _message(body: bytes) -> str:
    """Return the message of an error's body: vLLM writes JSON of several shapes."""
    text = body.decode(errors="replace")
    try:
        found: Any = json.loads(text)
        for name in ("error", "message", "detail"):
            while isinstance(found, dict) and name in found:
                found = found[name]
        return _plain(found if isinstance(found, str) else json.dumps(found))
    except (ValueError, RecursionError):
        return _plain(text)


def _plain(text: str) -> str:
    """Return one line of printable characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in words)[:_LONGEST_MESSAGE]


# ------------------------------------------------------------------ routes

_RETRY_AFTER = 0.05


class Client(JSONCalls):
    """A client of one server with vLLM's routes of training, started by `lit-rl serve`, by `launch` or otherwise.

    Every method raises `ServerDead`, `ServerHung` or `ServerRefused`, also for an invalid answer.
    """

    def health(self, deadline: float) -> None:
        """Return if the engine behind the server lives.

        Raises:
            ServerDead: also where the server answers and its engine does not live.
        """
        try:
            self.get("/health", deadline)
        except ServerRefused as error:
            if error.status == 503:
                raise ServerDead(self.url, "GET /health", "its engine has died.") from error
            raise

    def models(self, deadline: float) -> dict[str, int | None]:
        """Return the names of the model and of adapters, each with its longest sequence in tokens."""
        return parse_models(self._answered("GET /v1/models", self.get("/v1/models", deadline)))

    def world_size(self, deadline: float) -> int:
        """Return the number of workers behind the server, of all copies of the model together."""
        return parse_world_size(self._answered("GET /get_world_size", self.get("/get_world_size", deadline)))

    def facts(self, deadline: float) -> Facts:
        """Return the engine's facts from its first worker; all workers of a server are alike."""
        first, *_ = self.rpc("lit_rl_facts", deadline=deadline)
        return parse_facts(self._answered("rpc lit_rl_facts", first))

    def rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, deadline: float
    ) -> list[Any]:
        """Call a method of every worker, and return the results, one a worker.

        Arguments and results are JSON values; a result that is no dict, list or None comes as a string.
        """
        body = {"method": method, "args": list(args), "kwargs": dict(kwargs or {}), "timeout": deadline}
        return parse_results(self._answered(f"rpc {method}", self.post("/collective_rpc", deadline, body)))

    def complete(self, payload: Mapping[str, Any], deadline: float) -> JSONAnswer:
        """Return the answer of ``POST /v1/completions``, for `parse_completions`."""
        return self._answered("POST /v1/completions", self.post("/v1/completions", deadline, payload))

    def generate(self, payload: Mapping[str, Any], deadline: float) -> JSONAnswer:
        """Return the answer of ``POST /inference/v1/generate``, which takes images beside token ids, for
        `parse_generated`. A server started with ``--enable-scale-out`` has this route."""
        route = "/inference/v1/generate"
        return self._answered(f"POST {route}", self.post(route, deadline, payload))

    def pause(self, deadline: float, mode: Literal["abort", "wait", "keep"] = "wait") -> None:
        """Accept no new requests. Running ones are aborted, waited for, or frozen until `resume`."""
        self.post("/pause", deadline, mode=mode)

    def resume(self, deadline: float) -> None:
        """Accept requests again after `pause`."""
        self.post("/resume", deadline)

    def reset_caches(self, deadline: float) -> None:
        """Empty every cache with results of older weights: of prefixes, of images, of encoders.

        Raises:
            ServerRefused: requests still hold parts of the prefix cache when the deadline comes.
        """
        call, until = "POST /reset_prefix_cache", time.monotonic() + deadline
        while not parse_reset(self._answered(call, self.post("/reset_prefix_cache", _left(until)))):
            if _left(until) < 2 * _RETRY_AFTER:
                raise ServerRefused(self.url, call, "running requests hold the prefix cache: pause first.", 200)
            time.sleep(_RETRY_AFTER)
        self.post("/reset_mm_cache", _left(until))
        self.post("/reset_encoder_cache", _left(until))

    def load_adapter(self, name: str, path: str, deadline: float) -> None:
        """Load a PEFT adapter from a folder that the server can read, in place of one of the same name.

        Requests with ``"model": name`` then use it. The caches stay as they are.
        """
        self.post("/v1/load_lora_adapter", deadline, {"lora_name": name, "lora_path": path, "load_inplace": True})

    def _answered(self, call: str, value: Any) -> JSONAnswer:
        return JSONAnswer(self.url, call, value)


def _left(until: float) -> float:
    return until - time.monotonic()


# ------------------------------------------------------------------ answers

_LOWEST = -9999.0
"""vLLM's log-prob in place of minus infinity; on the route for images, in place of NaN too."""

_HIGHEST = 0.01
"""A log-prob is at most 0; an engine that rounds may end a little above it."""

_MOST = 2**31 - 1
_MOST_WORKERS = 2**16

_LARGEST_BLOCK = 2**16
"""Tokens. The probe is longer than a block."""

_LONGEST_WORD = 1000
"""Letters of a name: they stand in messages."""


@dataclass(frozen=True)
class JSONAnswer:
    """A part of an answer, and its place."""

    url: str
    call: str
    value: Any
    place: str = "it"

    def refuse(self, wanted: str) -> NoReturn:
        raise unexpected_answer(
            self.url, self.call, f"{self.place} is {json_excerpt(self.value)}, and has to be {wanted}"
        )

    def part(self, name: str) -> JSONAnswer:
        """Return the part of an object under a name, which has to exist."""
        if not isinstance(self.value, dict) or name not in self.value:
            self.refuse(f'an object with "{name}"')
        place = name if self.place == "it" else f"{self.place}.{name}"
        return JSONAnswer(self.url, self.call, self.value[name], place)

    def entry(self, index: int) -> JSONAnswer:
        return JSONAnswer(self.url, self.call, self.value[index], f"{self.place}[{index}]")

    def entries(self) -> Iterator[JSONAnswer]:
        return (self.entry(index) for index in range(len(self.as_list())))

    def as_list(self) -> list[Any]:
        return self.value if isinstance(self.value, list) else self.refuse("a list")

    def whole(self, low: int = 1, high: int = _MOST) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def whole_or_null(self, low: int = 1, high: int = _MOST) -> int | None:
        return None if self.value is None else self.whole(low, high)

    def word(self) -> str:
        if not isinstance(self.value, str) or not self.value.isprintable() or not 0 < len(self.value) <= _LONGEST_WORD:
            self.refuse("a name in printable letters")
        return self.value


def parse_models(answer: JSONAnswer) -> dict[str, int | None]:
    """Return the names of the model and of adapters, each with its longest sequence in tokens; one or more."""
    models, found = answer.part("data"), {}
    for model in models.entries():
        name = model.part("id").word()
        found[name] = model.part("max_model_len").whole_or_null() if "max_model_len" in model.value else None
    return found or models.refuse("a list of one model or more")


def parse_world_size(answer: JSONAnswer) -> int:
    """Return the number of workers behind a server."""
    return answer.part("world_size").whole(high=_MOST_WORKERS)


def parse_results(answer: JSONAnswer) -> list[Any]:
    """Return the results of the workers; one or more."""
    results = answer.part("results")
    return results.as_list() or results.refuse("a list with a result of every worker")


def parse_reset(answer: JSONAnswer) -> bool:
    """Tell whether a cache was emptied."""
    done = answer.part("success")
    return done.value if isinstance(done.value, bool) else done.refuse("true or false")


def parse_facts(answer: JSONAnswer) -> Facts:
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
            JSONAnswer(answer.url, answer.call, value, f"{model.place}[{json_excerpt(name)}]").word()
    return Facts(
        instance=answer.part("instance").word(),
        version=answer.part("version").whole_or_null(-_MOST),
        model=model.value,
        dtype=answer.part("dtype").word(),
        max_model_len=answer.part("max_model_len").whole(),
        block_size=answer.part("block_size").whole(high=_LARGEST_BLOCK),
        logprobs_mode=answer.part("logprobs_mode").word(),
        max_num_seqs=answer.part("max_num_seqs").whole(),
        max_lora_rank=answer.part("max_lora_rank").whole_or_null(0),
        device=answer.part("device").word(),
    )


def parse_completions(answer: JSONAnswer, request: Request, vocabulary: int) -> list[EngineAnswer]:
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


def parse_generated(answer: JSONAnswer, request: Request, vocabulary: int) -> list[EngineAnswer]:
    """Parse the answer of ``POST /inference/v1/generate``; see `parse_completions`. An unrepresentable log-prob is
    NaN."""
    found = []
    for choice in _in_order(answer, request):
        ids, ended = _tokens(choice, request, vocabulary), _ended(choice)
        content = choice.part("logprobs").part("content")
        listed = _logprobs(content, _named(content), len(ids))
        found.append(EngineAnswer(ids, [math.nan if value <= _LOWEST else value for value in listed], ended))
    return found


def parse_prompt(answer: JSONAnswer) -> list[Any]:
    """Return the engine's tokens of a prompt with images; of any type, as they are only compared."""
    return answer.part("prompt_token_ids").as_list()


def _in_order(answer: JSONAnswer, request: Request) -> list[JSONAnswer]:
    choices, count = answer.part("choices"), request.completions
    if len(choices.as_list()) != count:
        choices.refuse(f"a list of {count}, as many completions as were asked for")
    found = {choice.part("index").whole(0, count - 1): choice for choice in choices.entries()}
    if len(found) != count:
        choices.refuse("a list in which each completion has an index of its own")
    return [found[index] for index in range(count)]


def _tokens(choice: JSONAnswer, request: Request, vocabulary: int) -> list[int]:
    tokens, most = choice.part("token_ids"), request.fields["max_tokens"]
    ids = tokens.as_list()
    if not 1 <= len(ids) <= most:
        tokens.refuse(f"a list of 1 to {most} tokens, not of {len(ids)}")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
        for entry in tokens.entries():
            entry.whole(0, vocabulary - 1)
    return ids


def _ended(choice: JSONAnswer) -> bool:
    """Tell whether it ended by an EOS or a stop string, and not by its length."""
    reason = choice.part("finish_reason")
    if reason.value not in ("stop", "length"):
        reason.refuse('"stop" or "length" ("abort": another program has paused the server)')
    return reason.value == "stop"


def _logprobs(answer: JSONAnswer, values: list[Any], count: int) -> list[float]:
    """Return `values` if they are `count` log-probs; `answer` is their place."""
    if len(values) != count:
        answer.refuse(f"a list of {count}, one for each token, not of {len(values)}")
    if set(map(type, values)) <= {int, float} and all(_LOWEST <= value <= _HIGHEST for value in values):
        return values
    wrong = next(i for i, v in enumerate(values) if type(v) not in (int, float) or not _LOWEST <= v <= _HIGHEST)
    JSONAnswer(answer.url, answer.call, values[wrong], f"{answer.place}[{wrong}]").refuse(
        f"a log-prob: a number from {_LOWEST:g} to 0"
    )


def _named(content: JSONAnswer) -> list[Any]:
    """Return the values under "logprob" of a list's entries."""
    try:
        return [entry["logprob"] for entry in content.as_list()]
    except (TypeError, KeyError):
        return [entry.part("logprob").value for entry in content.entries()]  # says which has none


def _prompt_logprobs(answer: JSONAnswer, prompt: list[int]) -> list[float]:
    """Return the log-prob of each token but the first, which has none; an entry holds other likely tokens too."""
    if len(answer.as_list()) != len(prompt):
        answer.refuse(f"a list of {len(prompt)}, one for each token of the prompt, not of {len(answer.value)}")
    values = [answer.entry(i).part(str(prompt[i])).part("logprob").value for i in range(1, len(prompt))]
    return _logprobs(answer, values, len(prompt) - 1)
