"""The responder of a rollout: every row's episode, under the limits of `env=`.

What environments do runs one after another while the generator waits, so that rows are always answered in the same
order and a rollout is the same to the bit. Where one of them is async they go on at the same time, and rows are
answered as they come: the same samples, but for the rounding of other decode batches.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.environments.base import Environment, Opening, Reply, Turn
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.frames import Frames
from lit_rl.environments.runner import GRACE, Late, Runner, Task
from lit_rl.episodes import End, Episode
from lit_rl.errors import LitRLError
from lit_rl.rollout import Message, Prompt
from lit_rl.turns import Heard, Responder, Said

_log = logging.getLogger(__name__)

_GRACE = 2 * GRACE
"""Seconds beyond its limit after which a thread that does not tell the time is left to itself."""

_ODD, _LARGEST_SEED = 0x9E3779B1, (1 << 32) - 1
"""Global generators are seeded anew for each turn: an odd factor makes the seeds of a row's turns differ."""


@dataclass(frozen=True)
class Reading:
    """How tokens of the policy become text, and texts that answer it become tokens."""

    text: Callable[[Sequence[int]], str]
    """Without special tokens."""
    written: Callable[[Sequence[int]], str]
    """With them."""
    shortened: Callable[[str, int], str]
    """A text cut to so many tokens, which says that it was."""
    eos_ids: frozenset[int]


@dataclass
class Row:
    """One row's episode while it goes on."""

    environment: Environment | None
    """None: it could not be made."""
    frames: Frames
    seed: int
    columns: Mapping[str, Any]
    """The prompt and the other columns of the data's row."""
    prompt: Prompt = ""
    started: float = field(default_factory=time.perf_counter)
    messages: list[Message] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    reward: float | None = None
    tokens: int = 0
    """Of the policy and of its answers."""
    observed: int = 0
    calls: int = 0
    failed_calls: int = 0
    unreadable_calls: int = 0
    seconds: float = 0.0
    end: End | None = None
    error: str | None = None

    def episode(self) -> Episode:
        """As it went."""
        given = [reward for reward in self.turn_rewards if reward is not None]
        return Episode(
            prompt=self.prompt,
            messages=self.messages,
            end=self.end or "failed",
            turns=sum(message["role"] == "assistant" for message in self.messages),
            turn_rewards=self.turn_rewards,
            reward=sum(given) if self.reward is None and given else self.reward,
            calls=self.calls,
            failed_calls=self.failed_calls,
            unreadable_calls=self.unreadable_calls,
            observed_tokens=self.observed,
            seconds=self.seconds,
            error=self.error,
        )


@dataclass(frozen=True)
class _Failed:
    """What an environment gave in the place of a value."""

    end: End
    error: str


class Conversations(Responder):
    """The episodes of one request.

    Args:
        rows: Of the completions, in their order.
        factory: For the limits.
        reading: Of the policy's tokenizer.
        max_new_tokens: Of one turn.
        runner: Runs what the environments do.
        told: What was logged of failures already; is added to.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        factory: EnvironmentFactory,
        reading: Reading,
        *,
        max_new_tokens: int,
        runner: Runner,
        told: set[str],
    ) -> None:
        self._rows, self._factory, self._reading = rows, factory, reading
        self._max_new_tokens, self._runner, self._told = max_new_tokens, runner, told
        self._answered: list[Heard] = []
        self._waiting: list[tuple[Said, Task]] = []
        self._arrived: queue.SimpleQueue[tuple[Said, float, Future[Reply | _Failed]]] = queue.SimpleQueue()
        self._asked: dict[int, tuple[Said, float]] = {}

    @property
    def max_tokens(self) -> int:
        return self._factory.max_tokens

    # ------------------------------------------------------------------ before and after

    def open(self) -> list[Opening]:
        """Reset every environment; what each row begins with."""
        rows = self._sound()
        openings: dict[int, Opening] = {}
        for row, opening in zip(rows, self._each(rows, lambda env, row: env.reset(row.seed, row.columns))):
            if isinstance(opening, _Failed):
                row.end, row.error = opening.end, opening.error
            else:
                openings[id(row)] = opening
        return [openings.get(id(row)) for row in self._rows]

    def episodes(self) -> tuple[Episode, ...]:
        """Every row's episode, with the reward that its environment gives it. When all are over."""
        rows = self._sound()
        for row, reward in zip(rows, self._each(rows, lambda env, row: env.reward())):
            if isinstance(reward, _Failed):
                row.end, row.error = reward.end, reward.error
            else:
                row.reward = reward
        return tuple(row.episode() for row in self._rows)

    def close(self) -> None:
        """Let the environments go. What they raise is logged, and nothing else comes of it."""
        rows = [row for row in self._rows if row.environment is not None]
        self._each(rows, lambda env, row: env.close())

    def _sound(self) -> list[Row]:
        return [row for row in self._rows if row.environment is not None and row.end not in ("failed", "timeout")]

    # ------------------------------------------------------------------ turns

    def tell(self, said: Said) -> None:
        row = self._rows[said.row]
        row.tokens += len(said.token_ids)
        late = self._late(row)
        if row.environment is None or row.end is not None or late:
            if late and row.end is None:
                row.end, row.error = "timeout", f"the episode took longer than {self._factory.episode_timeout:g} s"
            self._answered.append(Heard(said.row, None, ended=False))
            return
        task = self._task(self._answer(row.environment, said), row, 1 + said.turn)
        if not self._factory.is_async:
            self._waiting.append((said, task))
            return
        begun = time.perf_counter()
        self._asked[said.row] = said, begun
        future = self._runner.begin(task)
        future.add_done_callback(lambda done: self._arrived.put((said, begun, done)))

    def answers(self, *, wait: bool) -> list[Heard]:
        self._answer_in_order()
        while not self._arrived.empty():
            self._take(*self._arrived.get())
        if wait and not self._answered:
            self._wait()
        given, self._answered = self._answered, []
        return given

    def _answer_in_order(self) -> None:
        """Answer the turns that were told, where nothing is awaited."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        begun = time.perf_counter()
        replies = self._runner.in_order([task for _, task in waiting])
        seconds = (time.perf_counter() - begun) / len(waiting)
        for (said, _), reply in zip(waiting, replies, strict=True):
            self._answered.append(self._heard(said, self._in_time(reply), seconds))

    def _wait(self) -> None:
        """Until an answer is there. What keeps its thread from telling the time is late when its time is over."""
        while not self._answered:
            assert self._asked, "nobody was asked"
            patience = min(begun for _, begun in self._asked.values()) + self._factory.step_timeout + _GRACE
            try:
                self._take(*self._arrived.get(timeout=max(0.0, patience - time.perf_counter())))
            except queue.Empty:
                self._runner.leave()
                for said, begun in list(self._asked.values()):
                    self._asked.pop(said.row)
                    self._answered.append(self._heard(said, self._too_late(), time.perf_counter() - begun))

    def _take(self, said: Said, begun: float, done: Future[Reply | _Failed]) -> None:
        if self._asked.pop(said.row, None) is not None:  # else it was given up
            self._answered.append(self._heard(said, self._result(done, 0.0), time.perf_counter() - begun))

    def _answer(self, environment: Environment, said: Said) -> Coroutine[Any, Any, Reply]:
        ids, closed = said.token_ids, self._closed(said)
        written = self._reading.written(ids[:-1] if closed else ids)
        return environment.answer(Turn(self._reading.text(ids), written, cut=not said.ended))

    def _closed(self, said: Said) -> bool:
        return bool(said.token_ids) and said.token_ids[-1] in self._reading.eos_ids

    def _heard(self, said: Said, reply: Reply | _Failed, seconds: float) -> Heard:
        """Take down what a turn was answered, and what the row is told of it."""
        row, factory = self._rows[said.row], self._factory
        row.seconds += seconds
        if isinstance(reply, _Failed):
            row.messages.append({"role": "assistant", "content": self._reading.text(said.token_ids)})
            row.end, row.error = reply.end, reply.error
            return Heard(said.row, None, ended=False)
        messages = self._shortened(reply.messages)
        row.messages += [dict(reply.said), *messages]
        row.turn_rewards.append(reply.reward)
        row.calls, row.failed_calls = row.calls + reply.calls, row.failed_calls + reply.failed_calls
        row.unreadable_calls += reply.unreadable_calls
        if reply.end is not None:
            row.end = reply.end
            return Heard(said.row, None, ended=reply.end != "cut")
        if said.turn + 1 >= factory.max_turns:
            row.end = "max_turns"
            return Heard(said.row, None, ended=False)
        ids = row.frames.encode(messages, closed=self._closed(said))
        room = min(self._max_new_tokens, self.max_tokens - row.tokens - len(ids))
        if room < 1:
            row.end = "max_tokens"
            return Heard(said.row, None, ended=False)
        row.tokens, row.observed = row.tokens + len(ids), row.observed + len(ids)
        return Heard(said.row, ids, room)

    def _shortened(self, messages: Sequence[Message]) -> list[Message]:
        share = max(1, self._factory.max_observation_tokens // max(1, len(messages)))
        return [{**message, "content": self._reading.shortened(message["content"], share)} for message in messages]

    # ------------------------------------------------------------------ what environments do, with limits

    def _each(self, rows: Sequence[Row], ask: Callable[[Environment, Row], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What each row's environment gives, or how it failed."""
        tasks = [self._task(ask(row.environment, row), row, 0) for row in rows if row.environment is not None]
        if not self._factory.is_async:
            return [self._in_time(given) for given in self._runner.in_order(tasks)]
        futures = [self._runner.begin(task) for task in tasks]
        return [self._result(future, self._factory.step_timeout + _GRACE) for future in futures]

    def _task(self, coroutine: Coroutine[Any, Any, Any], row: Row, number: int) -> Task:
        return Task(self._guarded(coroutine), self._seconds(row), (row.seed + number * _ODD) & _LARGEST_SEED)

    def _in_time(self, given: Any) -> Any:
        return self._too_late() if isinstance(given, Late) else given

    def _result(self, future: Future[Any], seconds: float) -> Any:
        try:
            return future.result(timeout=seconds)
        except Late:
            return self._too_late()
        except TimeoutError:
            self._runner.leave()
            return self._too_late()

    async def _guarded(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What it gives, or that it raised: the episode fails, and the others go on."""
        try:
            return await coroutine
        except LitRLError:
            raise
        except Exception as error:
            kind = f"{type(error).__name__}: {error}"
            if type(error).__name__ not in self._told:
                self._told.add(type(error).__name__)
                _log.warning(
                    "an environment raised; the episode is not learned from, and it is logged once:", exc_info=True
                )
            return _Failed("failed", excerpt(kind, 200))

    def _seconds(self, row: Row) -> float:
        """That what is asked now may take."""
        whole = self._factory.episode_timeout
        left = math.inf if whole is None else row.started + whole - time.perf_counter()
        return max(0.0, min(self._factory.step_timeout, left))

    def _late(self, row: Row) -> bool:
        whole = self._factory.episode_timeout
        return whole is not None and time.perf_counter() - row.started > whole

    def _too_late(self) -> _Failed:
        return _Failed("timeout", f"the environment took longer than env.step_timeout={self._factory.step_timeout:g} s")
