"""The endpoint of a judge, an API for chat completions such as OpenAI's: requests, retries, cache, limits on failures.

`LLMJudge`, which compares pairs, and the rewards of `judge_rewards` derive from `JudgeEndpoint`, and so take the same
settings. `fill` writes what they ask, and marks where each text of others begins and ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import string
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, RewardError, did_you_mean
from lit_rl.core.http_client import (
    HTTP_LOOP,
    JSONValue,
    LateAnswer,
    NoAnswer,
    PatientSender,
    RequestFailed,
    check_address,
    check_token,
    fetch_json,
    plain_line,
)
from lit_rl.core.interrupts import interruptible
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, NotNegative, Portion, Positive
from lit_rl.rewards.caller import ScoreCache
from lit_rl.rewards.contract import FunctionFromPath, blind, content_of
from lit_rl.rewards.jobs import TooManyFailures

QUOTED = object()
"""The value of a reply that stands word for word in what the judge was shown."""

_FREE_FAILURES = 8
_NO_WORD = re.compile(r"\W")
_REFUSES_ALL = (401, 403, 404)
"""Statuses that say nothing about one request: no such key, not allowed, no such model or address."""


@dataclass(frozen=True)
class Answer:
    """The reply to one request, and what it cost."""

    value: Any = None
    """The result of the reader of the reply; None where there is no reply, or none in the asked form."""
    text: str = ""
    cut: bool = False
    """True if the server ended the reply at its limit of tokens: it may be a draft, and has no value."""
    quoted: bool = False
    """True if the reply has the asked form, but may be a quote of what the judge was shown; then it has no value."""
    fault: Exception | None = None
    """The reason why there is no reply: after all attempts, or a refusal that would stay one."""
    requests: int = 0
    """Requests that were sent, failed ones included; 0 from the cache."""
    prompt_tokens: int = 0
    """Tokens that the server read, as it counts them; 0 from the cache, and where the server does not say."""
    completion_tokens: int = 0
    """Tokens that the server wrote, likewise."""
    waited: float = 0.0
    """Seconds that the server's limit on its rate was waited for."""

    @property
    def why(self) -> str:
        """The reason why there is no value, in words."""
        if self.fault is not None:
            return str(self.fault)
        reason = ""
        if self.cut:
            reason = ", which the limit of its tokens cut off"
        elif self.quoted:
            reason = ", which stands word for word in what the judge was shown and so may be a quote"
        return f"no verdict in the answer {self.text[-200:]!r}{reason}"

    @property
    def costs(self) -> dict[str, float]:
        """Metrics of this request, by their last names."""
        return {
            "unanswered": float(self.fault is not None),
            "unparsable": float(self.fault is None and self.value is None and not self.quoted),
            "cached": float(self.fault is None and not self.requests),
            "requests": float(self.requests),
            "prompt_tokens": float(self.prompt_tokens),
            "completion_tokens": float(self.completion_tokens),
            "rate_limit_seconds": self.waited,
        }


@dataclass
class _Asking:
    """A request under way, whose answer is that of equal ones too."""

    task: asyncio.Task[Answer]
    waiting: int = 0
    """The number of those that wait for it."""


@checked("{key}")
class JudgeEndpoint:
    """Abstract base of judges behind an API for chat completions, such as OpenAI's or that of vLLM's server.

    A reply is one that is whole and in the asked form. Whatever else comes is a failure of the judge: it is counted and
    gives no verdict, and more of it than `max_failures` ends the run: no verdict is ever made up. A server that asks to
    be left alone (a status of 429 or 503 with Retry-After) is not sent any request by this process until then.

    Args:
        base_url: Where the API is, such as https://host/v1 or http://127.0.0.1:8000/v1; ``/chat/completions`` is added.
        model: The model's name there.
        allow_http: Send texts unencrypted to an http:// address of another machine too.
        concurrency: Requests under way at once, over all processes of a run: each has its share, at least one.
        timeout: Seconds that one request may take.
        attempts: Times that a request is sent before it counts as unanswered; once where the server refuses it for
            good (a status of the 400s other than 408, 409, 425 and 429: no such key, no such model, a text too long).
        backoff: Seconds of the first wait after a failed request; doubled every time up to 30, and shortened by up to
            half at random.
        patience: Seconds from the first time that the server asks to be left alone in which a request may wait for it,
            each time what it asks for and no less than after a failure; this uses up no attempt.
        temperature: Of the judge's own sampling; 0 is greedy.
        max_tokens: Longest answer, in tokens. Models that think before they answer need more.
        extra_body: Further fields of each request, such as ``{seed: 1}``; a null leaves a field out:
            ``{max_tokens: null, max_completion_tokens: 512}``.
        max_failures: Share of what was asked so far that may go without a verdict; the first 8 are always forgiven,
            unless the server refuses all for good. Counted from the start of the process. The first one is warned of.
        cache: Replies that are kept in memory. The key is the whole request, so settings, prompt and text, and the
            address; a reply that cannot be read is not kept. 0 asks anew each time.
        key_env: Environment variable that holds the API key, sent as a bearer token. None sends none.

    Raises:
        ConfigError: the address would send texts unencrypted over a network, a setting is out of range, or the
            environment variable is not set.
    """

    key = ""
    """The key above its settings, for messages."""

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        base_url: str,
        model: str,
        *,
        allow_http: bool = False,
        concurrency: AtLeastOne = 8,
        timeout: Positive = 60.0,
        attempts: AtLeastOne = 4,
        backoff: NotNegative = 1.0,
        patience: NotNegative = 300.0,
        temperature: NotNegative = 0.0,
        max_tokens: AtLeastOne = 256,
        extra_body: dict[str, Any] | None = None,
        max_failures: Portion = 0.05,
        cache: AtLeastZero = 10_000,
        key_env: str | None = None,
    ) -> None:
        self.base_url = str(base_url).rstrip("/")
        self.url = f"{self.base_url}/chat/completions"
        check_address(self._key_of("base_url"), self.base_url, allow_http=allow_http, token_key=self._key_of("key_env"))
        check_token(self._key_of("key_env"), key_env)
        extra_body = dict(extra_body or {})
        if taken := [name for name in ("messages", "n", "stream") if name in extra_body]:
            raise ConfigError(
                f"{self._key_of('extra_body')}={extra_body}: the judge itself writes {taken[0]!r}, as one reply is "
                "read whole. Leave it out."
            )
        self.model, self.temperature, self.max_tokens, self.extra_body = model, temperature, max_tokens, extra_body
        self.concurrency, self.attempts, self.backoff, self.patience = concurrency, attempts, backoff, patience
        self.max_failures, self.cache, self.timeout, self.key_env = max_failures, cache, timeout, key_env
        self._reset()

    def _reset(self) -> None:
        self._replies = ScoreCache(self.cache)
        self._asking: dict[bytes, _Asking] = {}
        self._sender = PatientSender(self.concurrency, self.attempts, self.backoff, self.patience)
        self._asked, self._failed, self._answered, self._warned = 0, 0, 0, False
        self._spent = dict.fromkeys(("requests", "prompt_tokens", "completion_tokens"), 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model} at {self.url})"

    def _key_of(self, setting: str) -> str:
        return f"{self.key}.{setting}" if self.key else setting

    def refuse_incomplete(self, template: str, parts: Sequence[str]) -> None:
        """Refuse a template without one of these parts, ``$name`` or ``${name}``.

        Raises:
            ConfigError: names the parts that it lacks.
        """
        found = string.Template(template).get_identifiers()
        if missing := [f"${name}" for name in parts if name not in found]:
            others = ", ".join(f"${name}" for name in found if name not in parts)
            has = f" It has {others}." if others else ""
            raise ConfigError(
                f"{self._key_of('template')} lacks {', '.join(missing)}: the judge would not see what it judges, or "
                f"how to reply.{has} Put each in, such as {missing[0]}; a $ that is doubled stands for itself."
            )

    # ------------------------------------------------------------------ before anything is loaded

    async def reach(self) -> None:
        """Raise unless the server answers, and has the model. It lists its models, or is asked for one token.

        Raises:
            ConfigError: it has no such model.
            RewardError: it does not answer, or refuses the key.
        """
        sent = await self._sender.send(lambda: self._fetch("GET", "/models"))
        fault, call, known = sent.fault, "GET /models", list[str]()
        if sent.result is not None:
            known = _names_of(sent.result)
            if self.model in known:
                return
        if fault is None or not (fault.status == 401 or isinstance(fault.__cause__, NoAnswer)):
            # No list, one that the key may not see, or a name that a proxy in front of the models knows nevertheless.
            call = "POST /chat/completions"
            body = self._body("Reply with one word.", {"max_tokens": 1})
            sent = await self._sender.send(lambda: self._fetch("POST", "/chat/completions", body))
            fault = sent.fault
        if fault is not None and fault.status == 404 and known:
            shown = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
            raise ConfigError(
                f"{self._key_of('model')}={self.model!r}: {self.base_url} has no such model. It has {shown}."
                f"{did_you_mean(self.model, known)}"
            )
        if fault is not None and (fault.status in _REFUSES_ALL or isinstance(fault.__cause__, NoAnswer)):
            asked = "" if sent.requests == 1 else f" It was asked {sent.requests} times ({self._key_of('attempts')})."
            raise RewardError(
                f"{self._key_of('base_url')}={self.base_url}: {call}: {str(fault).rstrip('. ')}.{asked} "
                f"{self._fix(Answer(fault=fault))}"
            )

    def _body(self, message: str, more: Mapping[str, Any]) -> bytes:
        fields = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **more,
            **self.extra_body,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

    async def _fetch(self, verb: str, route: str, body: bytes | None = None) -> JSONValue:
        return await fetch_json(verb, f"{self.base_url}{route}", body, token_env=self.key_env, timeout=self.timeout)

    # ------------------------------------------------------------------ requests, on `HTTP_LOOP`

    async def ask_all(
        self, messages: Sequence[str], read: Callable[[str], Any], form: Mapping[str, Any] | None = None
    ) -> list[Answer]:
        """Ask several messages at once; see `ask`."""
        return list(await asyncio.gather(*(self.ask(message, read, form) for message in messages)))

    async def ask(self, message: str, read: Callable[[str], Any], form: Mapping[str, Any] | None = None) -> Answer:
        """Return the answer to one message, from the cache if an equal request was answered before.

        An equal one that is under way is waited for, whatever comes of it.

        Args:
            message: Sent as the user's.
            read: Returns the value of a reply, None for one that is not in the asked form, and `QUOTED` for one that is
                but may be a quote.
            form: Fields of the request that demand the form.
        """
        body = self._body(message, form or {})
        key = hashlib.blake2b(self.url.encode() + b"\n" + body, digest_size=16).digest()
        if (kept := self._replies.get(key)) is not None:
            return Answer(read(kept), kept)
        if not self.cache:
            return await self._fresh(key, body, read)
        mine = key not in self._asking
        if mine:
            self._asking[key] = _Asking(asyncio.ensure_future(self._fresh(key, body, read)))
        asking = self._asking[key]
        asking.waiting += 1
        try:
            answer = await asyncio.shield(asking.task)
        finally:
            asking.waiting -= 1
            if not asking.waiting:
                asking.task.cancel()  # nobody is left to hear of it; no effect on one that is over
                self._asking.pop(key, None)
        return answer if mine else replace(answer, requests=0, prompt_tokens=0, completion_tokens=0, waited=0.0)

    async def _fresh(self, key: bytes, body: bytes, read: Callable[[str], Any]) -> Answer:
        answer = await self._send(body)
        if answer.fault is None:
            self._answered += 1
            value = None if answer.cut else read(answer.text)
            answer = replace(answer, value=None if value is QUOTED else value, quoted=value is QUOTED)
        if answer.value is not None and self.cache:
            self._replies.put(key, answer.text)
        return answer

    async def _send(self, body: bytes) -> Answer:
        """Send one request until it is answered, within `attempts` and `patience`."""

        async def send() -> tuple[str, bool, JSONValue]:
            reply = await self._fetch("POST", "/chat/completions", body)
            return *parse_reply(reply), reply

        sent = await self._sender.send(send)
        self._spent["requests"] += sent.requests
        if sent.result is None:
            return Answer(fault=sent.fault, requests=sent.requests, waited=sent.waited)
        text, cut, reply = sent.result
        tokens = dict(zip(("prompt_tokens", "completion_tokens"), tokens_of(reply), strict=True))
        for name, count in tokens.items():
            self._spent[name] += count
        return Answer(text=text, cut=cut, requests=sent.requests, **tokens, waited=sent.waited)

    @property
    def spent(self) -> dict[str, int]:
        """Counts of this process so far, in training and validation: requests (failed ones too), tokens as the server
        counts them, and verdicts that did not come."""
        return {**self._spent, "failures": self._failed}

    # ------------------------------------------------------------------ limits

    def refuses_all(self, answer: Answer) -> bool:
        """Tell whether the server refuses whatever it is asked: it has answered nothing, and does not mind the text."""
        return not self._answered and isinstance(answer.fault, RequestFailed) and answer.fault.status in _REFUSES_ALL

    def count(self, asked: int, lost: int, bad: Answer | None, unit: str, *, refused: bool) -> None:
        """Count verdicts that were asked for, and those that did not come.

        Args:
            asked: Verdicts that were asked for now.
            lost: Of these, those without an answer in form.
            bad: The answer to one of them; None where none was lost.
            unit: The noun of what a verdict is about, in the plural: ``pairs``.
            refused: Whether the server would refuse all others too.

        Raises:
            RewardError: more than `max_failures` did not come.
        """
        self._asked += asked
        self._failed += lost
        if bad is None:
            return
        why = bad.why.rstrip(". ")
        if not refused and self._failed <= max(_FREE_FAILURES, self.max_failures * self._asked):
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the judge {self.model} at {self.url} gave no verdict for {lost} of {asked} {unit}: {why}. This "
                    "warning is not repeated; the metrics unanswered and unparsable count all.",
                    stacklevel=1,
                )
            return
        raise TooManyFailures(
            f"the judge {self.model} at {self.url} gave no verdict for {self._failed} of {self._asked} {unit}, more "
            f"than {self._key_of('max_failures')}={self.max_failures:g}. One of them: {why}. {self._fix(bad)}"
        )

    def _fix(self, bad: Answer) -> str:
        """Return the likely fix of an answer without a verdict."""
        fault = bad.fault
        if fault is None and bad.cut:
            return f"Allow a longer reply: {self._key_of('max_tokens')} (now {self.max_tokens})."
        if fault is None:
            return f"Does the model follow {self._key_of('template')}? Look at its replies, or take a stronger one."
        status = fault.status if isinstance(fault, RequestFailed) else None
        if isinstance(fault.__cause__, LateAnswer):
            return f"{self._key_of('timeout')}={self.timeout:g} is the limit of one request in seconds."
        if isinstance(fault.__cause__, NoAnswer):
            return f"Start the server, or correct {self._key_of('base_url')}."
        if status in (401, 403):
            return f"Does the key fit ({self._key_of('key_env')}={self.key_env})?"
        if status == 404:
            return f"Correct {self._key_of('base_url')}, which often ends in /v1, or {self._key_of('model')}."
        if status is not None and fault.for_good:  # pyright: ignore[reportAttributeAccessIssue]
            return (
                f"Change what the server refuses, such as {self._key_of('max_tokens')} or {self._key_of('extra_body')}."
            )
        return "Look at the server's log."


def judges_among(functions: Mapping[str, Any]) -> dict[str, JudgeEndpoint]:
    """Return those of the functions that are judges behind an API, also one that is named by path."""
    inner = {name: each.function if isinstance(each, FunctionFromPath) else each for name, each in functions.items()}
    return {name: each for name, each in inner.items() if isinstance(each, JudgeEndpoint)}


def reach_judges(judges: Iterable[JudgeEndpoint]) -> None:
    """Raise unless the servers of these judges answer. A collective: rank 0 asks.

    Raises:
        ConfigError: a server has not the model.
        RewardError: a server does not answer, or refuses the key.
    """
    judges = list(judges)

    async def all_of_them() -> None:
        for judge in judges:
            await judge.reach()

    def ask() -> None:
        if ranks.rank() == 0:
            with interruptible():
                HTTP_LOOP.wait(all_of_them())

    if judges:
        ranks.run_on_all_ranks(ask)


# ---------------------------------------------------------------------- what is asked


Shown = str | tuple[tuple[str, str], ...]
"""A completion as a judge is shown it: its text, or the author and the text of each message."""


def fill(template: str, texts: Mapping[str, Shown], words: Mapping[str, str] | None = None) -> str:
    """Return a template with its parts put in, in one pass: a text that holds ``$prompt`` or ``{prompt}`` keeps it.

    Each text of others stands between marks of its own that end in a digest of all that is put in, and so does each
    message of a transcript. No text can close its mark, or open another: it would have to hold a digest of itself.

    Args:
        template: With a ``$name`` or ``${name}`` for each part. ``$$`` becomes one ``$``, and any other ``$`` stays.
        texts: What is judged, by name.
        words: Parts of the question itself, by name, which stand there as they are.
    """
    words = words or {}
    whole = json.dumps([template, dict(texts), dict(words)]).encode()
    digest = hashlib.blake2b(whole, digest_size=8).hexdigest()

    def marked(name: str, shown: Shown) -> str:
        if not isinstance(shown, str):
            shown = "\n".join(marked(f"message_by_{_NO_WORD.sub('_', author)}", text) for author, text in shown)
        return f"<{name}-{digest}>\n{shown}\n</{name}-{digest}>"

    marks = {name: marked(name, shown) for name, shown in texts.items()}
    # safe_substitute: a $ in the template's own words stays, and texts are put in as they are
    return string.Template(template).safe_substitute({**words, **marks})


def prompt_text(prompt: Prompt, asker: str) -> str:
    """Return the prompt as text, messages with their roles; `asker` names the judge in messages.

    Raises:
        RewardError: the prompt shows images, which the judge would not see.
    """
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    if any(part.get("type") != "text" for each in contents if isinstance(each, list) for part in each):
        raise blind(asker)
    return "\n\n".join(f"{message.get('role', '')}: {content_of(message)}" for message in prompt)


# ---------------------------------------------------------------------- what is answered


def parse_reply(answer: JSONValue) -> tuple[str, bool]:
    """Return the text of a chat completion, and whether the limit of tokens ended it.

    The text is empty if the model only thought, or called a tool.
    """
    choice = answer.part("choices").entry(0)
    content = choice.part("message").part("content").value
    return content if isinstance(content, str) else "", choice.value.get("finish_reason") == "length"


def tokens_of(answer: JSONValue) -> tuple[int, int]:
    """Return the tokens that a server says it has read and written; 0 where it says nothing that can be read."""
    usage = answer.value.get("usage") if isinstance(answer.value, dict) else None
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in ("prompt_tokens", "completion_tokens")]
    read, written = (count if type(count) is int and count >= 0 else 0 for count in counts)
    return read, written


def _names_of(answer: JSONValue) -> list[str]:
    """Return the models that a server lists; none where the answer is no such list."""
    listed = answer.value.get("data") if isinstance(answer.value, dict) else None
    entries = listed if isinstance(listed, list) else []
    return [plain_line(str(each["id"])) for each in entries if isinstance(each, dict) and "id" in each]
