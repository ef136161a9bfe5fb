"""A language model as the judge, behind an API for chat completions such as OpenAI's: hosted, or your own server."""

from __future__ import annotations

import asyncio
import json
import re
import string
import warnings
from collections.abc import Sequence
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.http_client import HTTP_LOOP, JSONValue
from lit_rl.ops.ranges import AtLeastOne, NotNegative, Portion, Positive
from lit_rl.rewards.contract import Completion, content_of, text_of
from lit_rl.rewards.jobs import TrainerState
from lit_rl.rewards.judges import LogMetric, Verdict, average_orders, check_judge_columns
from lit_rl.rewards.remote_reward import RemoteReward, RequestFailed, back_off

TEMPLATE = """\
Two assistants, A and B, answered the same request. Decide which answer serves the person who asked better. Weigh \
correctness first, then helpfulness and clarity. The order of the answers and their length mean nothing.

Request:
$prompt

Answer of A:
$first

Answer of B:
$second

Reply with one line and nothing else: "verdict: A", "verdict: B", or "verdict: tie" if neither is better."""

_VERDICT = re.compile(r"verdict\W{0,5}\s*(A|B|tie)\b", re.IGNORECASE)
_BARE = re.compile(r"\W*(A|B|tie)\W*", re.IGNORECASE)
_WINS = {"a": 1.0, "b": 0.0, "tie": 0.5}
_FREE_FAILURES = 8


@checked("judge")
class LLMJudge:
    """An LLM as the judge of which completion is better (2306.05685), each pair in both orders.

    The two answers of a pair are averaged, so that a liking for the first place cancels out: a pair of which the same
    place wins twice is a tie. An answer is read from its last "verdict: A", "verdict: B" or "verdict: tie", or is one
    of these words alone. Where one of the two cannot be read, or never comes, the pair has no verdict. That is counted
    (``judge/unparsable`` and ``judge/unanswered``, shares of the requests), and more of it than `max_failures` ends the
    run: no verdict is ever made up.

    Args:
        base_url: Where the API is, such as https://host/v1 or http://127.0.0.1:8000/v1; ``/chat/completions`` is added.
        model: The model's name there.
        template: The message that is sent: ``$prompt``, ``$first`` and ``$second`` are put in.
        allow_http: Send texts unencrypted to an http:// address of another machine too.
        concurrency: Requests under way at once.
        timeout: Seconds that one request may take.
        attempts: Times that a request is sent before it counts as unanswered; once where the server refuses it for
            good (a status of the 400s other than 408, 409, 425 and 429: no such key, no such model, a text too long).
        backoff: Seconds of the first wait after a failed request; doubled every time up to 30, and shortened by up to
            half at random.
        temperature: Of the judge's own sampling; 0 is greedy.
        max_tokens: Longest answer, in tokens. Models that think before they answer need more.
        max_failures: Share of all pairs asked about so far that may go without a verdict; the first 8 are always
            forgiven, unless the server refuses a whole batch for good. Counted from the start of the process. The
            first one is warned of.
        key_env: Environment variable that holds the API key, sent as a bearer token. None sends none.

    Raises:
        ConfigError: the address would send texts unencrypted over a network, the template lacks a part, a setting is
            out of range, or the environment variable is not set.
    """

    reads_rewards = False

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        base_url: str,
        model: str,
        *,
        template: str = TEMPLATE,
        allow_http: bool = False,
        concurrency: AtLeastOne = 8,
        timeout: Positive = 60.0,
        attempts: AtLeastOne = 4,
        backoff: NotNegative = 1.0,
        temperature: NotNegative = 0.0,
        max_tokens: AtLeastOne = 256,
        max_failures: Portion = 0.05,
        key_env: str | None = None,
    ) -> None:
        missing = [f"${name}" for name in ("prompt", "first", "second") if f"${name}" not in template]
        if missing:
            raise ConfigError(f"judge.template lacks {', '.join(missing)}: the judge would not see what it judges.")
        self.url = f"{str(base_url).rstrip('/')}/chat/completions"
        try:
            # Its transport: checked addresses, no redirects, no proxy to this machine, limits on time and size.
            self._server = RemoteReward([self.url], allow_http, timeout=timeout, token_env=key_env)
        except ConfigError as error:
            raise ConfigError(f"judge.base_url or judge.key_env: {error}") from error
        self.model, self.template, self.temperature, self.max_tokens = model, template, temperature, max_tokens
        self.concurrency, self.attempts, self.backoff = concurrency, attempts, backoff
        self.max_failures = max_failures
        self._asked, self._failed, self._warned = 0, 0, False

    def __repr__(self) -> str:
        return f"LLMJudge({self.model} at {self.url})"

    def bind(self, columns: Sequence[str]) -> None:
        """Accept any columns but those with a reserved name; none is sent."""
        check_judge_columns(columns)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        *,
        log_metric: LogMetric | None = None,
        trainer_state: TrainerState | None = None,
        **columns: Any,
    ) -> list[Verdict]:
        forth = list(zip(prompts, firsts, seconds, strict=True))
        back = [(prompt, second, first) for prompt, first, second in forth]
        requests = list[bytes]()
        for prompt, first, second in (*forth, *back):
            # safe_substitute: a $ in the template's own words stays, and texts are put in as they are
            parts = {"prompt": _prompt_text(prompt), "first": text_of(first), "second": text_of(second)}
            message = string.Template(self.template).safe_substitute(parts)
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": message}],
                "temperature": self.temperature,
                "max_tokens": self.max_tokens,
            }
            requests.append(json.dumps(body).encode())
        answers = HTTP_LOOP.wait(self._ask_all(requests)) if requests else []
        read = [None if isinstance(answer, Exception) else verdict_of(answer) for answer in answers]
        verdicts = average_orders(read[: len(forth)], read[len(forth) :])
        silent = sum(isinstance(answer, Exception) for answer in answers)
        if log_metric is not None and answers:
            log_metric("judge/unanswered", silent / len(answers))
            log_metric("judge/unparsable", (read.count(None) - silent) / len(answers))
        self._count(verdicts, answers, read)
        return verdicts

    def _count(self, verdicts: Sequence[Verdict], answers: Sequence[str | Exception], read: Sequence[Verdict]) -> None:
        lost = verdicts.count(None)  # pyright: ignore
        self._asked += len(verdicts)
        self._failed += lost
        if not lost:
            return
        last = next((answer for answer, verdict in zip(answers, read) if verdict is None), "")
        what = str(last) if isinstance(last, Exception) else f"no verdict in the answer {last[-200:]!r}"
        refused = all(isinstance(answer, RequestFailed) and answer.for_good for answer in answers)
        if not refused and self._failed <= max(_FREE_FAILURES, self.max_failures * self._asked):
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the judge {self.model} at {self.url} gave no verdict for {lost} of {len(verdicts)} pairs: "
                    f"{what}. This warning is not repeated; judge/unanswered and judge/unparsable count all.",
                    stacklevel=2,
                )
            return
        raise RewardError(
            f"the judge {self.model} at {self.url} gave no verdict for {self._failed} of {self._asked} pairs, more "
            f"than judge.max_failures={self.max_failures:g}. One of them: {what}. Is the server running, does the key "
            "fit (judge.key_env), may the answer be longer (judge.max_tokens), does the model follow judge.template?"
        )

    async def _ask_all(self, requests: Sequence[bytes]) -> list[str | Exception]:
        free = asyncio.Semaphore(self.concurrency)
        return list(await asyncio.gather(*(self._ask(request, free) for request in requests)))

    async def _ask(self, request: bytes, free: asyncio.Semaphore) -> str | Exception:
        """Return the text of the answer, or the error after all attempts or after a permanent refusal."""
        failure: Exception = RuntimeError("never sent")
        for attempt in range(self.attempts):
            if attempt:
                await back_off(attempt, self.backoff)
            try:
                async with free:
                    return parse_reply(await self._server.post(self.url, request))
            except RequestFailed as error:
                failure = error
                if error.for_good:
                    break
        return failure


def verdict_of(answer: str) -> Verdict:
    """Return the probability that A is better by a judge's answer; None where it cannot be read."""
    found = _VERDICT.findall(answer)
    if found:
        return _WINS[found[-1].lower()]
    bare = _BARE.fullmatch(answer.strip())
    return None if bare is None else _WINS[bare.group(1).lower()]


def _prompt_text(prompt: Prompt) -> str:
    """Return the prompt as text, messages with their roles.

    Raises:
        RewardError: the prompt shows images, which the judge would not see.
    """
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    if any(part.get("type") != "text" for each in contents if isinstance(each, list) for part in each):
        raise RewardError(
            "judge=llm reads text alone, and a prompt shows images: it would judge answers to what it has not seen. "
            "Take judge=reward, or a judge of your own (judge=function)."
        )
    return "\n\n".join(f"{message.get('role', '')}: {content_of(message)}" for message in prompt)


def parse_reply(answer: JSONValue) -> str:
    """Return the text of a chat completion; empty if the model only thought, or called a tool."""
    content = answer.part("choices").entry(0).part("message").part("content").value
    return content if isinstance(content, str) else ""
