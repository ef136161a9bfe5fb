"""The client of a teacher that is a server: log-probs of given tokens from vLLM's OpenAI-compatible API.

A request is ``POST /v1/completions`` with the token ids of a row as its prompt and ``prompt_logprobs=k``: vLLM answers
the log-prob of each token of the prompt and those of the k likeliest there. It computes them from the logits as they
are, whatever ``temperature``, ``top_p`` and the like the request has, so they are at temperature 1 and of the whole
vocabulary (`TeacherServer.refuse_other_sampling`). Of its own it draws one token, which nobody reads.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.core import ranks
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.http_client import (
    HTTP_LOOP,
    JSONValue,
    PatientSender,
    RequestFailed,
    check_address,
    check_token,
    fetch,
    json_excerpt,
)
from lit_rl.core.interrupts import interruptible
from lit_rl.generation.vllm.client import parse_models
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_rl.core.rollout import Sampling

_LARGEST_ANSWER = 2**30
"""Bytes: one of the k likeliest tokens takes about 60 of them."""

_EXCLUDED = -9999.0
"""vLLM's log-prob in place of minus infinity."""

_HIGHEST = 0.01
"""A log-prob is at most 0, and the mass of the k likeliest tokens at most 1; a server that rounds may end above it."""

_PROBES = ("Hello, world!\n", "if x >= 10:\n\treturn 'ß' + \"日本\"", "  3.14159 * 2 = ")
"""Texts whose tokens two vocabularies hardly have in common by chance."""

_SPECIAL_PROBES = 8


@dataclass(frozen=True)
class RowScores:
    """A teacher's log-probs of the last t tokens of one row, in nats."""

    log_probs: Tensor
    """(t,) Of the row's own tokens; minus infinity where the teacher excludes the token, NaN for a row's first token,
    which nothing precedes."""
    top_ids: Tensor
    """(t, k) The likeliest tokens, the likeliest first; 0 where one is none of the student's, and at a row's first
    token."""
    top_log_probs: Tensor
    """(t, k) Of these; NaN there."""


@checked("algo.teacher")
class TeacherServer:
    """A teacher behind vLLM's OpenAI-compatible API, started by ``vllm serve`` or by `lit-rl serve`.

    Every process of a run asks for its own rows. A request that fails is sent again; one that is not answered in
    `attempts` ends the run with exit code 5 and a checkpoint: no log-prob is ever made up. ``vllm serve`` gives the 20
    likeliest tokens at most unless it is started with ``--max-logprobs``; `lit-rl serve` gives any number.

    Args:
        base_url: Where the API is, such as http://127.0.0.1:8000/v1; ``/completions`` and ``/models`` are added.
        model: The model's name there. None: the only one that the server has.
        allow_http: Send token ids unencrypted to an http:// address of another machine too.
        concurrency: Requests under way at once, over all processes of a run: each has its share, at least one.
        timeout: Seconds that one request, the log-probs of one row, may take.
        attempts: Times that a request is sent before the run ends; once where the server refuses it for good.
        backoff: Seconds of the first wait after a failed request; doubled every time up to 30, and shortened by up to
            half at random.
        patience: Seconds that a request may wait for a server that asks to be left alone (a status of 429 or 503 with
            Retry-After), from the first time that it does.
        key_env: Environment variable that holds the API key, sent as a bearer token. None sends none.

    Raises:
        ConfigError: the address would send tokens unencrypted over a network, a setting is out of range, or the
            environment variable is not set.
    """

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        base_url: str,
        *,
        model: str | None = None,
        allow_http: bool = False,
        concurrency: AtLeastOne = 32,
        timeout: Positive = 600.0,
        attempts: AtLeastOne = 4,
        backoff: NotNegative = 1.0,
        patience: NotNegative = 300.0,
        key_env: str | None = None,
    ) -> None:
        self.base_url = str(base_url).rstrip("/")
        keys = "algo.teacher.base_url", "algo.teacher.key_env"
        check_address(keys[0], self.base_url, allow_http=allow_http, token_key=keys[1])
        check_token(keys[1], key_env)
        self.model, self.key_env = model, key_env
        self.concurrency, self.timeout = concurrency, timeout
        self.attempts, self.backoff, self.patience = attempts, backoff, patience
        self._reset()

    def _reset(self) -> None:
        self._sender = PatientSender(self.concurrency, self.attempts, self.backoff, self.patience)
        self._name, self._longest, self._vocabulary = "", None, 0
        self._requests, self._waited = 0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        name = self._name or self.model
        return f"TeacherServer({f'{name} at ' if name else ''}{self.base_url})"

    # ------------------------------------------------------------------ before anything is learned

    def refuse_other_sampling(self, sampling: Sampling) -> None:
        """Refuse a rollout whose distribution is not that of the server's log-probs: temperature 1 and all tokens.

        Raises:
            ConfigError: names the settings.
        """
        names = [*(["temperature"] if sampling.temperature != 1 else []), *sampling.reshaped]
        if names:
            keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in names)
            raise ConfigError(
                f"{keys} with a teacher that is a server: whatever a request says, vLLM gives log-probs of a prompt "
                "at temperature 1 and over the whole vocabulary, so two kinds of distribution would be compared. Set "
                "sampling.temperature=1.0 and leave the rest out, or take a teacher that is a model of this process: "
                "algo/teacher=model."
            )

    def connect(self, tokenizer: PreTrainedTokenizerBase, k: int) -> None:
        """Check that the server answers as a teacher of this student. A collective: rank 0 asks.

        Args:
            tokenizer: The student's. The server has to make the same tokens of a few texts, special tokens included.
            k: Likeliest tokens that will be asked for; 0 for none.

        Raises:
            GenerationError: the server does not answer, or not as vLLM does.
            ConfigError: it has several models or not this one, another vocabulary, or gives fewer than k tokens.
        """

        def ask() -> tuple[str, int | None] | None:
            if ranks.rank() != 0:
                return None
            with interruptible():
                return HTTP_LOOP.wait(self._connect(tokenizer, k))

        self._name, self._longest = ranks.broadcast_object(ranks.run_on_all_ranks(ask))
        self._vocabulary = len(tokenizer)

    async def _connect(self, tokenizer: PreTrainedTokenizerBase, k: int) -> tuple[str, int | None]:
        models = parse_models(await self._answer("GET", "/models", None))
        if self.model is None and len(models) > 1:
            raise ConfigError(
                f"algo.teacher.model is not set, and {self.base_url} has several: {', '.join(models)}. Name one."
            )
        name = next(iter(models)) if self.model is None else self.model
        if name not in models:
            raise ConfigError(
                f"algo.teacher.model={name!r}: {self.base_url} has no such model. It has {', '.join(models)}."
            )
        longest = models[name]
        texts = [*_PROBES, *[str(token) for token in tokenizer.all_special_tokens[:_SPECIAL_PROBES]]]
        wanted = {text: list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}
        for text, ids in wanted.items():
            if ids and (longest is None or len(ids) < longest):
                await self._compare_tokens(name, text, ids)
        ids = next(ids for ids in wanted.values() if ids)
        self._name, self._longest, self._vocabulary = name, longest, len(tokenizer)
        await self._score(ids[: (longest or 64) - 1], 0, k)
        return name, longest

    async def _compare_tokens(self, name: str, text: str, ids: list[int]) -> None:
        body = {"model": name, "prompt": text, "add_special_tokens": False, **_ONE_TOKEN}
        answer = await self._answer("POST", "/completions", body)
        theirs = answer.part("choices").entry(0).part("prompt_token_ids").as_list()
        if theirs != ids:
            raise ConfigError(
                f"algo.teacher.base_url={self.base_url}: {name} reads {text!r} as the tokens {json_excerpt(theirs)}, "
                f"the student as {json_excerpt(ids)}. They have different vocabularies, so the log-probs of one say "
                "nothing of the other's tokens: take a teacher of the student's family."
            )

    # ------------------------------------------------------------------ log-probs

    def score_rows(self, rows: Sequence[Sequence[int]], starts: Sequence[int], k: int) -> list[RowScores]:
        """Return the teacher's log-probs of the tokens of rows, in their order. Several requests are under way at once.

        Args:
            rows: Token ids of each, prompt and completion, without padding.
            starts: The first token of each row that is asked about.
            k: Likeliest tokens that are asked for; 0 for none.

        Raises:
            GenerationError: a row is not answered in `attempts`, refused, or longer than the teacher reads.
        """
        with interruptible():
            return HTTP_LOOP.wait(self._score_all(rows, starts, k))

    async def _score_all(self, rows: Sequence[Sequence[int]], starts: Sequence[int], k: int) -> list[RowScores]:
        try:
            async with asyncio.TaskGroup() as group:  # the first row to fail for good ends the others
                asked = [
                    group.create_task(self._score(list(row), start, k)) for row, start in zip(rows, starts, strict=True)
                ]
        except* (GenerationError, ConfigError) as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]

    async def _score(self, ids: list[int], start: int, k: int) -> RowScores:
        if self._longest is not None and len(ids) >= self._longest:
            raise GenerationError(
                f"{self!r} reads {self._longest} tokens, one of them its own, and a row has {len(ids)}. Start the "
                "teacher with a larger --max-model-len, or lower data.max_prompt_tokens or sampling.max_new_tokens."
            )
        if start == len(ids):
            return RowScores(torch.empty(0), torch.empty(0, k, dtype=torch.long), torch.empty(0, k))
        body = {"model": self._name, "prompt": ids, "prompt_logprobs": k, **_ONE_TOKEN}

        def parse(answer: bytes) -> RowScores:
            return parse_scores(JSONValue.parse(answer, self._unexpected), ids, start, k, self._vocabulary)

        return await self._ask("POST", "/completions", body, parse)

    async def _answer(self, verb: str, route: str, body: Mapping[str, Any] | None) -> JSONValue:
        return await self._ask(verb, route, body, lambda answer: JSONValue.parse(answer, self._unexpected))

    async def _ask(self, verb: str, route: str, body: Mapping[str, Any] | None, parse: Any) -> Any:
        """Return what `parse` makes of the answer, which it may do in a thread: an answer may be large."""
        content = None if body is None else json.dumps(body).encode()
        limits: dict[str, Any] = {"timeout": self.timeout, "largest": _LARGEST_ANSWER, "quoted": 2000}

        async def call() -> Any:
            answer = await fetch(verb, f"{self.base_url}{route}", content, token_env=self.key_env, **limits)
            return await asyncio.to_thread(parse, answer)

        sent = await self._sender.send(call)
        self._requests, self._waited = self._requests + sent.requests, self._waited + sent.waited
        if sent.fault is not None:
            raise self._failure(f"{verb} {route}", sent.fault, sent.requests)
        return sent.result

    def _unexpected(self, what: str) -> RequestFailed:
        return _WrongAnswer(f"the answer is none of vLLM's: {what}.")

    def _failure(self, call: str, fault: RequestFailed, requests: int) -> GenerationError | ConfigError:
        """Return the error of a request that is given up, with the likely fix."""
        said = f"The teacher at {self.base_url}: {call}: {str(fault).rstrip('. ')}."
        if "max allowed" in str(fault):
            return ConfigError(
                f"{said} The teacher gives fewer tokens than are asked for: start it with a larger --max-logprobs (-1: "
                "any number; `lit-rl serve` does), or lower algo.distillation.top_k."
            )
        if "not JSON compliant" in str(fault):
            return GenerationError(f"{said} The teacher's log-probs hold NaN: its type is too narrow for its weights.")
        if fault.status in (401, 403):
            return GenerationError(f"{said} Does the key fit (algo.teacher.key_env={self.key_env})?")
        if isinstance(fault, _WrongAnswer):
            return GenerationError(
                f"{said} Another program listens at algo.teacher.base_url={self.base_url}, or an API without the "
                "log-probs of prompts: a teacher needs a server of vLLM."
            )
        times = "" if requests == 1 else f" It was asked {requests} times (algo.teacher.attempts)."
        return GenerationError(
            f"{said}{times} Is the teacher running? `lit-rl serve model=NAME` or `vllm serve NAME --max-logprobs -1` "
            f"starts one. algo.teacher.timeout={self.timeout:g} is the limit of one request in seconds."
        )


class _WrongAnswer(RequestFailed):
    """An answer of another form than vLLM's."""


_ONE_TOKEN = {"max_tokens": 1, "temperature": 1.0, "return_token_ids": True}
"""Fields of each request: a server draws one token at least."""


def parse_scores(answer: JSONValue, ids: Sequence[int], start: int, k: int, vocabulary: int) -> RowScores:
    """Return the log-probs in an answer of ``POST /v1/completions``.

    Args:
        answer: The answer to a request with one prompt of token ids.
        ids: The prompt.
        start: The first of its tokens that was asked about.
        k: Likeliest tokens that were asked for.
        vocabulary: Tokens of the student. Where another is among the likeliest, there are no likeliest tokens.
    """
    choice = answer.part("choices").entry(0)
    if (read := choice.part("prompt_token_ids")).as_list() != list(ids):
        read.refuse("the token ids that were sent")
    listed = choice.part("prompt_logprobs")
    listed.as_list(len(ids), "one for each token")
    count = len(ids) - start
    own = torch.full((count,), torch.nan)
    top_ids, top = torch.zeros(count, k, dtype=torch.long), torch.full((count, k), torch.nan)
    for at in range(max(start, 1), len(ids)):  # nothing precedes the first, so the server gives null for it
        entry = listed.entry(at)
        found = _entry(entry)
        if ids[at] not in found:
            entry.refuse(f"an object with the token {ids[at]}")
        own[at - start] = found[ids[at]]
        if sum(map(math.exp, found.values())) > 1 + _HIGHEST:
            entry.refuse("log-probs, whose mass is at most 1 (the server's --logprobs-mode may be one of logits)")
        if len(found) < k:
            entry.refuse(f"an object with {k} tokens or more")
        # The row's own token stands among the likeliest, or is less likely than they are.
        likeliest = sorted(found.items(), key=lambda each: -each[1])[:k]
        if k and max(token for token, _ in likeliest) < vocabulary:
            top_ids[at - start] = torch.tensor([token for token, _ in likeliest])
            top[at - start] = torch.tensor([value for _, value in likeliest])
    for values in (own, top):
        values[values <= _EXCLUDED] = -torch.inf
    return RowScores(own, top_ids, top)


def _entry(entry: JSONValue) -> dict[int, float]:
    """Return the log-probs of one position by token id."""
    try:
        found = {int(token): said["logprob"] for token, said in entry.value.items()}
    except (AttributeError, TypeError, ValueError, KeyError):
        entry.refuse('an object of token ids, each with its "logprob"')
    for token, value in found.items():
        if type(value) not in (int, float) or not _EXCLUDED <= value <= _HIGHEST:
            JSONValue(value, entry.fault, f"{entry.place}.{token}.logprob").refuse("a log-prob: a number of at most 0")
    if min(found, default=0) < 0:
        entry.refuse("an object of token ids, which are at least 0")
    return found
