"""Rewards from a server: texts out, numbers back, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.http_client import (
    HTTP_LOOP,
    JSONValue,
    RequestFailed,
    back_off,
    check_address,
    check_token,
    fetch_json,
)
from lit_rl.core.visuals import ImageRef, VideoRef, visuals_in
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Positive
from lit_rl.rewards.contract import ARGUMENTS

_REQUESTS_PER_SERVER = 4
_LONGEST_PAUSE = 60.0


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
            check_address("urls", url, allow_http=allow_http, token_key="token_env")
        check_token("token_env", token_env)
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
                    reply = await fetch_json("POST", url, body, token_env=self.token_env, timeout=self.timeout)
                return parse_rewards(reply, count)
            except RequestFailed as error:
                failure, pause = f"{url}: {error}", min(error.retry_after or 0.0, _LONGEST_PAUSE)
        raise RewardError(
            f"no server gave the rewards of {count} completions in {tries} attempts. The last one, {failure}. Servers: "
            f"{', '.join(self.urls)}. Are they running? timeout={self.timeout:g} is the limit of one "
            "request in seconds, attempts the number of rounds."
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
