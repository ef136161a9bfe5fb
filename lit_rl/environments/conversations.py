"""The responder of a rollout: every row's episode, under the limits of `env=`.

Environments run one after another while the generator waits, so that rows are always answered in the same order and a
rollout is the same to the bit. Where one of them is async they run at the same time, and rows are answered as replies
arrive: the same samples, but for the rounding of other decode batches.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lit_rl.core.episode import End, EnvironmentTurn, Episode, Message, PolicyTurn, Prompt, Responder
from lit_rl.core.errors import DataError, LitRLError
from lit_rl.core.process_state import is_raised_by_user_code
from lit_rl.core.vision_inputs import Later
from lit_rl.data.visual_prompts import Processor, count_placeholders
from lit_rl.environments.environment_base import Environment, Opening, Reply, Turn
from lit_rl.environments.episode_replay import FailedBefore, error_line
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.frames import ChatFrames, Frames, literal_ids
from lit_rl.environments.observations import IMAGE_LIMIT, texts_of_content, with_texts
from lit_rl.environments.runner import GRACE, Runner, RunningTask, TimedOut, TimedTask
from lit_rl.environments.thoughts import speaks_on_channels, split_thoughts
from lit_rl.rewards.jobs import OBJECTS

_log = logging.getLogger(__name__)

_ODD, _LARGEST_SEED = 0x9E3779B1, (1 << 32) - 1
"""Global generators are seeded anew for each turn: an odd factor makes the seeds of a row's turns differ."""


class TurnCodec:
    """A decoder of the policy's turns, which also cuts replies to a number of tokens.

    Args:
        tokenizer: Tokenizer of the policy.
        eos_ids: Every token that ends a turn.
        processor: Processor of a policy over images; None: it reads text.
        max_image_pixels: Width times height of an image in a reply, at most.
    """

    def __init__(
        self, tokenizer: Any, eos_ids: Sequence[int], processor: Processor | None, max_image_pixels: int
    ) -> None:
        self._tokenizer, self._on_channels = tokenizer, speaks_on_channels(tokenizer)
        self._eos_ids = frozenset(eos_ids)
        self.placeholders = frozenset(() if processor is None else processor.placeholders)
        """Tokens that stand for images."""
        self.max_image_pixels = None if processor is None else max_image_pixels
        """None: the policy reads text."""

    def decode(self, turn: PolicyTurn) -> Turn:
        """Return a turn as text, with its special tokens and without, and its thoughts apart."""
        ids = turn.token_ids
        written = str(self._tokenizer.decode(ids[:-1] if self.is_closed(ids) else ids))
        thought = split_thoughts(str(self._tokenizer.decode(ids)))[1] if self._on_channels else ""
        return Turn(self.text(ids), written, cut=not turn.ended, thought=thought)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a turn without special tokens, and without thoughts that stand apart."""
        if self._on_channels:
            return split_thoughts(str(self._tokenizer.decode(ids)))[0]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def is_closed(self, ids: Sequence[int]) -> bool:
        """Tell whether a turn ends with a token that ends turns."""
        return bool(ids) and ids[-1] in self._eos_ids

    def shorten(self, text: str, most: int) -> str:
        """Cut a text to a number of tokens, with a mark where there is room for one."""
        if len(text.encode()) <= most:  # a token is a byte or more
            return text
        ids = literal_ids(self._tokenizer, text)
        if len(ids) <= most:
            return text
        mark = f" [cut: of {len(ids)} tokens]"
        room = most - len(literal_ids(self._tokenizer, mark))
        return f"{self._tokenizer.decode(ids[:room])}{mark}" if room > 0 else str(self._tokenizer.decode(ids[:most]))


@dataclass
class EpisodeRow:
    """One row's episode while it goes on."""

    make: Callable[[], Environment]
    frames: Frames
    seed: int
    columns: Mapping[str, Any]
    """The prompt and the other columns of the data's row: a copy, which the environment may change."""
    environment: Environment | None = None
    """Made by its reset."""
    prompt: Prompt = ""
    started: float | None = None
    """Time at which its first turn was over. A row may have to wait for its place before that."""
    messages: list[Message] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    reward: float | None = None
    tokens: int = 0
    """Tokens of the policy and of replies."""
    observed: int = 0
    calls: int = 0
    failed_calls: int = 0
    unreadable_calls: int = 0
    seconds: float = 0.0
    end: End | None = None
    error: str | None = None

    @property
    def made(self) -> Environment:
        assert self.environment is not None
        return self.environment

    @property
    def failed(self) -> bool:
        return self.end in ("failed", "timeout")

    def episode(self, *, with_object: bool = False) -> Episode:
        """Return the finished episode, with the object that answered if that is asked for."""
        rewards = [reward for reward in self.turn_rewards if reward is not None]
        return Episode(
            prompt=self.prompt,
            messages=self.messages,
            end=self.end or "failed",
            turns=sum(message["role"] == "assistant" for message in self.messages),
            turn_rewards=self.turn_rewards,
            reward=sum(rewards) if self.reward is None and rewards else self.reward,
            calls=self.calls,
            failed_calls=self.failed_calls,
            unreadable_calls=self.unreadable_calls,
            observed_tokens=self.observed,
            seconds=self.seconds,
            error=self.error,
            environment=self.environment.user_object if with_object and self.environment is not None else None,
        )


@dataclass(frozen=True)
class _EnvironmentFailure:
    """A failure of an environment, in the place of its result."""

    end: End
    error: str


class Conversations(Responder):
    """The episodes of one request.

    Args:
        rows: Rows of the completions, in their order.
        factory: Factory with the limits.
        codec: Codec of the policy's tokenizer.
        max_new_tokens: Tokens of one turn.
        runner: Runs what the environments do.
        logged: Failures that were logged already; new ones are added.
    """

    def __init__(
        self,
        rows: Sequence[EpisodeRow],
        factory: EnvironmentFactory,
        codec: TurnCodec,
        *,
        max_new_tokens: int,
        runner: Runner,
        logged: set[str],
    ) -> None:
        self._rows, self._factory, self._codec = rows, factory, codec
        self._max_new_tokens, self._runner, self._logged = max_new_tokens, runner, logged
        self._answered: list[EnvironmentTurn] = []
        self._waiting: list[tuple[PolicyTurn, TimedTask]] = []
        self._arrived: queue.SimpleQueue[tuple[PolicyTurn, float, RunningTask]] = queue.SimpleQueue()
        self._asked: dict[int, tuple[PolicyTurn, RunningTask]] = {}
        whole = factory.rollout_timeout
        self._ends = math.inf if whole is None else time.perf_counter() + whole
        self.waited = 0.0
        """Seconds spent waiting for environments."""

    @property
    def max_tokens(self) -> int:
        return self._factory.max_tokens

    @property
    def chat_frames(self) -> list[ChatFrames]:
        """Frames that render the replies to each row; empty where prompts are plain text."""
        return [row.frames for row in self._rows if isinstance(row.frames, ChatFrames)]

    # ------------------------------------------------------------------ before and after

    def open(self) -> list[Opening]:
        """Make and reset every environment; return the first observations, one a row."""

        async def make_and_reset(row: EpisodeRow) -> Opening:
            row.environment = row.make()  # by the user's constructor
            return await row.environment.reset(row.seed, row.columns)

        openings = self._each(self._rows, _SeedOffset.RESET, make_and_reset)
        return [self._unless_failed(row, opening) for row, opening in zip(self._rows, openings)]

    def episodes(self) -> tuple[Episode, ...]:
        """Return every row's episode with its environment's reward, once all are over."""
        rows = [row for row in self._rows if not row.failed and row.environment is not None]
        rewards = self._each(rows, _SeedOffset.REWARD, lambda row: row.made.reward())
        for row, reward in zip(rows, rewards):
            row.reward = self._unless_failed(row, reward)
        with_object = OBJECTS in self._factory.columns
        return tuple(row.episode(with_object=with_object) for row in self._rows)

    def close(self) -> None:
        """Close the environments. Their errors are logged and otherwise ignored.

        Nobody waits for answers any longer.
        """
        for _, begun in self._asked.values():
            begun.future.cancel()
        self._asked.clear()
        rows = [row for row in self._rows if row.environment is not None]
        self._each(rows, _SeedOffset.CLOSE, lambda row: row.made.close())

    def _unless_failed(self, row: EpisodeRow, result: Any) -> Any:
        """Return a result, or record a failure in the row and return None."""
        if isinstance(result, _EnvironmentFailure):
            row.end, row.error = result.end, result.error
            return None
        return result

    # ------------------------------------------------------------------ turns

    def tell(self, turn: PolicyTurn) -> None:
        row = self._rows[turn.row]
        row.tokens += len(turn.token_ids)
        row.started = time.perf_counter() if row.started is None else row.started
        if row.end is None and time.perf_counter() > self._end_of(row):
            self._answered.append(self._record_reply(turn, self._too_late(row), 0.0))
            return
        if row.end is not None or row.environment is None:
            self._answered.append(EnvironmentTurn(turn.row, None, ended=False))
            return
        task = self._task(partial(row.environment.answer, self._codec.decode(turn)), row, _SeedOffset.TURN + turn.turn)
        if self._factory.is_async:
            self._ask(turn, task)
        else:
            self._waiting.append((turn, task))

    def answers(self, *, wait: bool) -> list[EnvironmentTurn]:
        waiting, self._waiting = self._waiting, []
        if waiting:  # nothing is awaited: they are answered one after another
            begun = time.perf_counter()
            with self._time_waited():
                replies = self._runner.in_order([task for _, task in waiting])
            seconds = (time.perf_counter() - begun) / len(waiting)
            for (turn, _), reply in zip(waiting, replies, strict=True):
                self._answered.append(self._record_reply(turn, self._in_time(reply, self._rows[turn.row]), seconds))
        while not self._arrived.empty():
            self._collect(*self._arrived.get())
        while wait and not self._answered:
            self._wait()
        answered, self._answered = self._answered, []
        return answered

    def _ask(self, turn: PolicyTurn, task: TimedTask) -> None:
        begun, now = self._runner.begin(task), time.perf_counter()
        self._asked[turn.row] = turn, begun
        begun.future.add_done_callback(lambda done: self._arrived.put((turn, now, begun)))

    def _wait(self) -> None:
        """Wait for one more reply. A call that blocks its thread is abandoned after its time limit, with those running
        in the same thread; calls that had not begun are submitted again."""
        assert self._asked, "nobody was asked"
        limit = self._factory.step_timeout + GRACE
        try:
            with self._time_waited():
                arrived = self._arrived.get(timeout=min(limit, 0.2))
            self._collect(*arrived)
        except queue.Empty:
            if not self._is_blocked(limit):
                return
            self._runner.abandon()
            asked, self._asked = self._asked, {}
            for turn, begun in asked.values():
                if begun.abandon():
                    self._answered.append(self._record_reply(turn, self._too_late(self._rows[turn.row]), limit))
                else:
                    self._ask(turn, begun.task)

    def _collect(self, turn: PolicyTurn, since: float, begun: RunningTask) -> None:
        if self._asked.get(turn.row, (None, None))[1] is begun:  # otherwise it was abandoned
            self._asked.pop(turn.row)
            reply = self._result(begun, self._rows[turn.row])
            self._answered.append(self._record_reply(turn, reply, time.perf_counter() - since))

    def _record_reply(self, turn: PolicyTurn, reply: Reply | _EnvironmentFailure, seconds: float) -> EnvironmentTurn:
        """Record the reply to a turn, and return the row's tokens of it."""
        row, factory = self._rows[turn.row], self._factory
        row.seconds += seconds
        if isinstance(reply, _EnvironmentFailure):
            row.messages.append({"role": "assistant", "content": self._codec.text(turn.token_ids)})
            row.end, row.error = reply.end, reply.error
            return EnvironmentTurn(turn.row, None, ended=False)
        messages = self._shortened(reply.messages)
        row.messages += [dict(reply.said), *messages]
        row.turn_rewards.append(reply.reward)
        row.calls, row.failed_calls = row.calls + reply.calls, row.failed_calls + reply.failed_calls
        row.unreadable_calls += reply.unreadable_calls
        if reply.end is not None:
            row.end = reply.end
            return EnvironmentTurn(turn.row, None, ended=reply.end != "cut")
        if turn.turn + 1 >= factory.max_turns:
            row.end = "max_turns"
            return EnvironmentTurn(turn.row, None, ended=False)
        closed, seen = self._codec.is_closed(turn.token_ids), tuple[Later, ...]()
        if not any(isinstance(message["content"], list) for message in messages):
            ids = row.frames.encode(messages, closed=closed)
        else:
            try:
                ids, seen = row.frames.encode_seen(messages, closed=closed)
            except DataError as error:
                row.end, row.error = "failed", str(error)
                return EnvironmentTurn(turn.row, None, ended=False)
            count, most = count_placeholders(self._codec.placeholders, ids), factory.max_observation_tokens
            if count > most:
                row.end = "failed"
                row.error = (
                    f"the images of an answer have {count} tokens, more than env.max_observation_tokens={most}, and an "
                    "image cannot be cut: raise it, or return smaller or fewer images"
                )
                return EnvironmentTurn(turn.row, None, ended=False)
        room = min(self._max_new_tokens, self.max_tokens - row.tokens - len(ids))
        if room < 1:
            row.end = "max_tokens"
            return EnvironmentTurn(turn.row, None, ended=False)
        row.tokens, row.observed = row.tokens + len(ids), row.observed + len(ids)
        return EnvironmentTurn(turn.row, ids, room, seen=seen)

    def _shortened(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with their texts cut to equal shares of the longest reply."""
        share = max(1, self._factory.max_observation_tokens // max(1, len(messages)))
        found = []
        for message in messages:
            texts = texts_of_content(message["content"])
            most = max(1, share // max(1, len(texts)))
            shortened = [self._codec.shorten(text, most) for text in texts]
            found.append({**message, "content": with_texts(message["content"], shortened)})
        return found

    # ------------------------------------------------------------------ calls of environments, with limits

    @contextmanager
    def _time_waited(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - begun

    def _each(
        self, rows: Sequence[EpisodeRow], place: int, ask: Callable[[EpisodeRow], Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        """Return each row's result of a call, or its failure."""
        tasks = [self._task(partial(ask, row), row, place) for row in rows]
        with self._time_waited():
            if not self._factory.is_async:
                return [self._in_time(result, row) for result, row in zip(self._runner.in_order(tasks), rows)]
            begun = [self._runner.begin(task) for task in tasks]
            limit = self._factory.step_timeout + GRACE
            while not all(each.future.done() for each in begun):
                futures.wait([each.future for each in begun], timeout=min(limit, 0.2))
                if self._is_blocked(limit):
                    self._runner.abandon()
                    begun = [
                        self._runner.begin(each.task) if not (each.future.done() or each.abandon()) else each
                        for each in begun
                    ]
                    break
            futures.wait([each.future for each in begun], timeout=limit)
            return [self._result(each, row) for each, row in zip(begun, rows)]

    def _is_blocked(self, limit: float) -> bool:
        """Tell whether a call blocks the event loop's thread; calls in workers cannot."""
        return self._factory.pool is None and self._runner.blocked(limit)

    def _task(self, ask: Callable[[], Coroutine[Any, Any, Any]], row: EpisodeRow, place: int) -> TimedTask:
        until = self._end_of(row) if place < _SeedOffset.REWARD else math.inf  # reward, close: no limit
        seed, in_worker = (row.seed + place * _ODD) & _LARGEST_SEED, self._factory.pool is not None
        return TimedTask(self._catching_errors(ask), self._factory.step_timeout, seed, until=until, in_worker=in_worker)

    def _in_time(self, result: Any, row: EpisodeRow) -> Any:
        return self._too_late(row) if isinstance(result, TimedOut) else result

    def _result(self, begun: RunningTask, row: EpisodeRow) -> Any:
        if not begun.future.done():
            return self._too_late(row)
        try:
            return begun.future.result()
        except TimedOut:
            return self._too_late(row)

    async def _catching_errors(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Await a call, and return its result, or its exception as a failure of this episode alone."""
        IMAGE_LIMIT.set(self._codec.max_image_pixels)
        try:
            return await ask()
        except (LitRLError, TimedOut):
            raise
        except FailedBefore as failed:
            return _EnvironmentFailure(failed.end, str(failed))
        except BaseException as error:
            if not is_raised_by_user_code(error):
                raise
            kind = error_line(error)
            if kind not in self._logged:
                self._logged.add(kind)
                _log.warning("an environment raised; its episode fails, and it is logged once:", exc_info=True)
            return _EnvironmentFailure("failed", kind)

    def _end_of(self, row: EpisodeRow) -> float:
        """Return the time at which a row's episode has to be over, by its own limit and the rollout's."""
        whole = self._factory.episode_timeout
        return self._ends if whole is None or row.started is None else min(self._ends, row.started + whole)

    def _too_late(self, row: EpisodeRow) -> _EnvironmentFailure:
        factory, now = self._factory, time.perf_counter()
        if now > self._ends:
            limit = f"the rollout took longer than env.rollout_timeout={factory.rollout_timeout:g} s"
        elif now > self._end_of(row):
            limit = f"the episode took longer than env.episode_timeout={factory.episode_timeout:g} s"
        else:
            limit = f"the environment took longer than env.step_timeout={factory.step_timeout:g} s"
        if row.environment is not None:
            row.environment.timed_out(limit)
        return _EnvironmentFailure("timeout", limit)


class _SeedOffset:
    """Offsets of the seeds, so that each call of an environment draws from a seed of its own."""

    RESET, TURN, REWARD, CLOSE = 0, 1, 1 << 20, (1 << 20) + 1
