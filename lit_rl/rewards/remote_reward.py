"""Rewards from a server: texts out, numbers back, over HTTP; and how a request is sent until it is answered."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.http_client import HTTP_LOOP, JSONValue, NoAnswer, plain_line, request
from lit_rl.core.machine import is_loopback
from lit_rl.core.visuals import ImageRef, VideoRef, visuals_in
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Positive
from lit_rl.rewards.contract import ARGUMENTS

Result = TypeVar("Result")

_REQUESTS_PER_SERVER = 4
_LONGEST_WAIT = 30.0
_LONGEST_PAUSE = 60.0
_LARGEST_ANSWER = 64 * 2**20
_RETRIED_STATUSES = (408, 409, 425, 429)
"""Statuses of the 400s that the same request may not get again: too slow, in conflict, too early, too many."""


@checked("")
class RemoteReward:
    """Rewards from servers; several requests are under way at once.

    One request is ``POST {"prompts": [...], "completions": [...], "columns": {name: [...]}}``, every list of the same
    length, each entry as a reward function would get it; images are texts ``data:image/png;base64,...`` of their
    encoded bytes, once a completion, and a video is ``{"frames": [...], "fps": ...}`` of such. The answer is
    ``{"rewards": [...]}`` with as many finite numbers or nulls (the reward does not apply). Requests go round-robin
    over the servers, up to four a server at once. One that fails, for whatever reason, is sent to the next server; once
    all have failed it waits ``backoff`` seconds, doubled every round up to 30 and shortened by up to half at random.
    After ``attempts`` rounds the run ends: no reward is ever made up.

    Args:
        urls: The servers, as https:// addresses, or http:// ones of this machine.
        allow_http: Send prompts and completions unencrypted to http:// addresses of other machines too.
        columns: Columns of the data to send. None sends all of them.
        batch_size: Completions of one request.
        timeout: Seconds that one request may take.
        attempts: Rounds over the servers before the run ends.
        backoff: Seconds of the first wait between two rounds.
        token_env: Environment variable whose value is sent as a bearer token. None sends none.

    Raises:
        ConfigError: an address that would send texts unencrypted over a network or holds a password, a setting out of
            range, or an environment variable that is not set.
    """

    def __init__(
        self,
        urls: Sequence[str],
        allow_http: bool = False,
        columns: Sequence[str] | None = None,
        batch_size: AtLeastOne = 64,
        timeout: Positive = 60.0,
        attempts: AtLeastOne = 4,
        backoff: NotNegative = 1.0,
        token_env: str | None = None,
    ) -> None:
        self.urls = [urls] if isinstance(urls, str) else list(urls)
        if not self.urls:
            raise ConfigError("urls is empty: give the address of at least one server.")
        for url in self.urls:
            check_address(url, allow_http)
        if token_env is not None and not os.environ.get(token_env):
            raise ConfigError(f"token_env={token_env!r}: there is no environment variable of this name. Set it first.")
        self.columns = None if columns is None else list(columns)
        self.batch_size = batch_size
        self.timeout = timeout
        self.attempts = attempts
        self.backoff = backoff
        self.token_env = token_env
        self._sent = 0
        if self.columns is not None:
            self.__signature__ = _signature(self.columns)

    def __repr__(self) -> str:
        return f"RemoteReward({', '.join(self.urls)})"

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float] | list[float | None]:
        names = [name for name in columns if name not in ARGUMENTS] if self.columns is None else self.columns
        sent = {name: columns[name] for name in names}
        _check_columns(sent)
        starts = range(0, len(completions), self.batch_size)
        parts = [slice(start, start + self.batch_size) for start in starts]
        bodies = [_body(prompts[part], completions[part], {k: v[part] for k, v in sent.items()}) for part in parts]
        counts = [len(completions[part]) for part in parts]
        return await asyncio.wrap_future(HTTP_LOOP.submit(self._ask_all(bodies, counts)))

    async def _ask_all(self, bodies: Sequence[bytes], counts: Sequence[int]) -> list[float | None]:
        free = asyncio.Semaphore(_REQUESTS_PER_SERVER * len(self.urls))
        try:
            async with asyncio.TaskGroup() as group:  # the first request to fail for good ends the others
                asked = [group.create_task(self._ask(*job, free)) for job in zip(bodies, counts)]
        except* RewardError as errors:
            raise errors.exceptions[0] from None
        return [value for task in asked for value in task.result()]

    async def _ask(self, body: bytes, count: int, free: asyncio.Semaphore) -> list[float | None]:
        """Send one request until a server answers it."""
        first, failure, pause = self._sent, "", 0.0
        self._sent += 1
        tries = self.attempts * len(self.urls)
        for attempt in range(tries):
            url = self.urls[(first + attempt) % len(self.urls)]
            if attempt and attempt % len(self.urls) == 0:
                await back_off(attempt // len(self.urls), self.backoff, pause)
            try:
                async with free:
                    return parse_rewards(await self.post(url, body), count)
            except RequestFailed as error:
                failure, pause = f"{url}: {error}", min(error.retry_after or 0.0, _LONGEST_PAUSE)
        raise RewardError(
            f"no server gave the rewards of {count} completions in {tries} attempts. The last one, {failure}. Servers: "
            f"{', '.join(self.urls)}. Are they running? timeout={self.timeout:g} is the limit of one "
            "request in seconds, attempts the number of rounds."
        )

    async def post(self, url: str, body: bytes) -> JSONValue:
        """Return the JSON of the answer to a JSON body, read within the limits of this reward.

        Raises:
            RequestFailed: the server cannot be reached, refuses, or answers too late, too much or no JSON.
        """
        bearer = os.environ.get(self.token_env, "").strip() if self.token_env is not None else None
        try:
            answer = await request("POST", url, body, bearer=bearer, timeout=self.timeout, largest=_LARGEST_ANSWER)
        except NoAnswer as error:
            raise RequestFailed(str(error)) from error
        if not answer.is_ok:
            raise RequestFailed(
                f"answered {answer.status} {plain_line(answer.reason)} "
                f"{plain_line(answer.body[:200].decode(errors='replace'))}",
                status=answer.status,
                retry_after=answer.retry_after,
            )
        return JSONValue.parse(answer.body, lambda what: RequestFailed(f"the answer is wrong: {what}"))


async def back_off(failures: int, first: float, at_least: float = 0.0) -> None:
    """Wait after a failure: `first` seconds, doubled every time up to 30, and shortened by up to half at random.

    Never shorter than `at_least` seconds.
    """
    await asyncio.sleep(wait_after(failures, first, at_least))


def wait_after(failures: int, first: float, at_least: float = 0.0) -> float:
    """Return the seconds that `back_off` waits."""
    doubled = first * 2 ** min(failures - 1, 60)  # beyond 2^1023 it would be no float
    return max(at_least, min(_LONGEST_WAIT, doubled) * random.uniform(0.5, 1))


@dataclass(frozen=True)
class Sent(Generic[Result]):
    """The outcome of one request of a `PatientSender`: a result or a fault, and what it took."""

    result: Result | None
    fault: RequestFailed | None
    """The last failure, where there is no result."""
    requests: int
    """Times that it was sent."""
    waited: float
    """Seconds that the server's limit on its rate was waited for."""


class PatientSender:
    """Requests to one server, each sent until it is answered. For one event loop.

    A request that fails is sent again after a wait (`wait_after`), unless the server refuses it for good. A server that
    asks to be left alone (a status of 429 or 503 with Retry-After) is not sent any request by this process until then.

    Args:
        concurrency: Requests under way at once, over all processes of a run: each has its share, at least one.
        attempts: Times that a request is sent before it counts as failed.
        backoff: Seconds of the first wait after a failure.
        patience: Seconds from the first time that the server asks to be left alone in which a request may wait for it;
            this uses up no attempt.
    """

    def __init__(self, concurrency: int, attempts: int, backoff: float, patience: float) -> None:
        self.concurrency, self.attempts, self.backoff, self.patience = concurrency, attempts, backoff, patience
        self._free: asyncio.Semaphore | None = None
        self._held_until = 0.0

    async def send(self, call: Callable[[], Awaitable[Result]]) -> Sent[Result]:
        """Return the result of `call`, which sends the request and raises `RequestFailed` where it fails."""
        if self._free is None:
            self._free = asyncio.Semaphore(max(1, self.concurrency // ranks.world_size()))
        sent = failures = refusals = 0
        waited, first_refusal = 0.0, math.inf
        while True:
            try:
                async with self._free:
                    waited += await self._while_held()
                    sent += 1
                    return Sent(await call(), None, sent, waited)
            except RequestFailed as error:
                fault = error
            if fault.retry_after is not None and fault.status in (429, 503):
                now = time.monotonic()
                first_refusal, refusals = min(first_refusal, now), refusals + 1
                pause = wait_after(refusals, self.backoff, fault.retry_after)  # it may say 0, or a time that is past
                if now - first_refusal + pause > self.patience:
                    return Sent(None, fault, sent, waited)
                self._held_until = max(self._held_until, now + pause)
                if pause:
                    continue
            failures += 1
            if fault.for_good or failures >= self.attempts:
                return Sent(None, fault, sent, waited)
            await back_off(failures, self.backoff)

    async def _while_held(self) -> float:
        """Wait as long as the server has asked to be left alone; return the seconds."""
        began, held = time.monotonic(), False
        while (left := self._held_until - time.monotonic()) > 0:
            held = True
            await asyncio.sleep(left)
        return time.monotonic() - began if held else 0.0


class RequestFailed(Exception):
    """A request without the requested result.

    Args:
        why: The reason, in words.
        status: Of the answer; None where there was none, or one that cannot be read.
        retry_after: Seconds that the server asks to be left alone; None where it says nothing.
    """

    def __init__(self, why: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.status, self.retry_after = status, retry_after

    @property
    def for_good(self) -> bool:
        """True if the same request would be answered the same again: a status of the 400s that does not pass."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in _RETRIED_STATUSES


def check_address(url: str, allow_http: bool) -> None:
    """Refuse an address that is none, holds a password, or would send texts unencrypted over a network.

    Raises:
        ConfigError: the message begins with ``urls``.
    """
    parts = urlsplit(str(url))
    shown = str(url).replace(f"{parts.username}:{parts.password}@", "***@") if parts.password else url
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"urls: {shown!r} is no address of a server: it reads https://host:port/path.")
    if parts.username or parts.password:
        raise ConfigError(
            f"urls: {shown!r} holds a user name: put a token into an environment variable, token_env=NAME."
        )
    if parts.scheme == "http" and not allow_http and not is_loopback(parts.hostname):
        raise ConfigError(
            f"urls: {shown!r} would send prompts and completions unencrypted over the network. Use https, or say "
            "that this network is yours: allow_http=true."
        )


def _signature(columns: Sequence[str]) -> inspect.Signature:
    """Return the signature of the columns that are sent, so that a missing column is found before anything is
    loaded."""
    names = dict.fromkeys(["prompts", "completions", *columns])
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])


def _check_columns(columns: Mapping[str, Sequence[Any]]) -> None:
    for name, values in columns.items():
        unseen = [None if visuals_in(value) else value for value in values]  # which are encoded once, in the request
        try:
            json.dumps(unseen, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"the column {name!r} cannot be sent as JSON: {error}. Leave it out: name the others in columns=."
            ) from error


def _body(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> bytes:
    body = {"prompts": prompts, "completions": completions, "columns": columns}
    try:
        return json.dumps(body, default=_encode_visual).encode()
    except TypeError as error:  # only values of an environment can be anything but text, numbers, images and videos
        raise RewardError(
            f"the episodes cannot be sent as JSON: {error}. Take a reward function of this process, which gets them as "
            "they are."
        ) from error


def _encode_visual(value: Any) -> Any:
    """Return an image as a ``data:`` address of its encoded bytes; a video as its frames and their rate."""
    if isinstance(value, ImageRef):
        return f"data:image/{value.encoding};base64,{base64.b64encode(value.read()).decode()}"
    if isinstance(value, VideoRef):
        return {"frames": list(value.frames), "fps": value.fps}
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def parse_rewards(answer: JSONValue, count: int) -> list[float | None]:
    """Return the rewards in an answer: `count` finite numbers or nulls."""
    rewards = answer.part("rewards")
    rewards.as_list(count, "one for each completion")
    return [each.finite_or_null() for each in rewards.entries()]
