"""Episodes by a script, for `lit-rl env-check`: what an environment answers, how long it takes, which global random
generators it moves. Called as a run calls it: new objects, a limit of time for each call, seeded generators."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from lit_rl.environments.base import Environment, Reply, Turn
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.observations import IMAGE_LIMIT
from lit_rl.environments.parsers import Parser
from lit_rl.environments.runner import Late, Runner, Task
from lit_rl.episodes import words_of
from lit_rl.errors import LitRLError

_LARGEST_SEED = (1 << 32) - 1


@dataclass(frozen=True)
class Case:
    """One episode to be played."""

    kind: str
    """Name of the kind of environment, of those of `env=`."""
    columns: Mapping[str, Any]
    """The prompt and the other columns of a row of the data."""
    seed: int
    turns: tuple[str, ...]
    """The policy's texts, turn by turn."""


@dataclass(frozen=True)
class Call:
    """One call of an environment."""

    name: str
    """``reset``, ``turn 0 ('...')``, ``reward``, ``close``."""
    seconds: float
    moved: tuple[str, ...]
    """Global generators whose state it changed."""


@dataclass(frozen=True)
class Played:
    """A played episode."""

    lines: tuple[str, ...]
    """Everything that the policy or its training would see, a line a call: two episodes are equal where these are."""
    calls: tuple[Call, ...]
    opening: str
    """The opening observation as text; empty: there is none."""
    replies: tuple[tuple[str, Reply], ...]
    """Each turn with its reply."""
    failed: str | None
    """The call that failed, and the reason; None: all succeeded."""


class Player:
    """Plays cases.

    Args:
        factory: Makes the environments.
        parsers: Parsers of tool calls, by the name of the kind.
        max_image_pixels: As `Interaction.max_image_pixels`.
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        parsers: Mapping[str, Parser | None],
        max_image_pixels: int | None = None,
    ) -> None:
        self._max_image_pixels = max_image_pixels
        self._factory, self._parsers, self._runner = factory, parsers, Runner()

    def play(self, case: Case) -> Played:
        """Play one episode, alone."""
        return self.interleaved([case])[0]

    def interleaved(self, cases: Sequence[Case]) -> list[Played]:
        """Play episodes at the same time, a call of each in turn."""
        plays = [self._begun(case) for case in cases]
        for _ in zip_longest(*(play.calls_in_order() for play in plays)):
            pass
        return [play.played() for play in plays]

    def _begun(self, case: Case) -> _Play:
        kind, parser = self._factory.kinds[case.kind], self._parsers[case.kind]
        in_worker = self._factory.pool is not None
        limit, pixels = self._factory.step_timeout, self._max_image_pixels
        return _Play(case, lambda: kind.make(parser), self._runner, limit, pixels, in_worker)


class _Failed(Exception):
    """A call that failed."""


class _Play:
    """One episode while it is played."""

    def __init__(
        self,
        case: Case,
        make: Callable[[], Environment],
        runner: Runner,
        limit: float,
        max_image_pixels: int | None,
        in_worker: bool,
    ) -> None:
        self._max_image_pixels = max_image_pixels
        self._case, self._make, self._runner, self._limit, self._in_worker = case, make, runner, limit, in_worker
        self._environment: Environment | None = None
        self._lines: list[str] = []
        self._calls: list[Call] = []
        self._replies: list[tuple[str, Reply]] = []
        self._opening = ""
        self._failed: str | None = None

    def played(self) -> Played:
        """Return the episode, once it is over."""
        return Played(tuple(self._lines), tuple(self._calls), self._opening, tuple(self._replies), self._failed)

    def calls_in_order(self) -> Iterator[None]:
        """Make the next call at each step of this iterator."""
        try:
            yield from self._until_over()
        except _Failed as failed:
            self._failed = str(failed)
            self._lines.append(self._failed)
        if self._environment is not None:
            try:
                self._call("close", self._environment.close())
            except _Failed as failed:  # a run goes on with the next episode, and logs it
                self._failed = self._failed or str(failed)

    def _until_over(self) -> Iterator[None]:
        opening = self._call("reset", self._begin())
        self._opening = opening if isinstance(opening, str) else json.dumps(opening, default=str) if opening else ""
        self._lines.append(f"reset began with {opening!r}")
        yield
        assert self._environment is not None
        for number, text in enumerate(self._case.turns):
            name = f"turn {number} ({_short(text)})"
            reply: Reply = self._call(name, self._environment.answer(Turn(text, text, cut=False)))
            self._replies.append((text, reply))
            answer = " | ".join(map(words_of, reply.messages))
            self._lines.append(f"{name} was answered {answer!r}, reward {reply.reward}, {reply.end or 'goes on'}")
            yield
            if reply.end is not None:
                break
        self._lines.append(f"the whole had the reward {self._call('reward', self._environment.reward())}")

    async def _begin(self) -> Any:
        """Make the environment, by the user's constructor, and reset it."""
        self._environment = self._make()
        return await self._environment.reset(self._case.seed, copy.deepcopy(dict(self._case.columns)))

    def _call(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        seed = (self._case.seed + len(self._calls)) & _LARGEST_SEED
        task = Task(_watched(coroutine, self._max_image_pixels), self._limit, seed, in_worker=self._in_worker)
        given = self._runner.one(task) if self._in_worker else self._runner.in_order([task])[0]
        if isinstance(given, Late):
            self._calls.append(Call(name, self._limit, ()))
            raise _Failed(f"{name} took longer than env.step_timeout={self._limit:g} s")
        self._calls.append(Call(name, given.seconds, given.moved))
        if isinstance(given.error, LitRLError):
            raise _Failed(f"{name}: {given.error}")
        if given.error is not None:
            raise _Failed(f"{name} raised {type(given.error).__name__}: {given.error}")
        return given.value


@dataclass(frozen=True)
class _Given:
    value: Any
    error: BaseException | None
    seconds: float
    moved: tuple[str, ...]


async def _watched(coroutine: Coroutine[Any, Any, Any], max_image_pixels: int | None) -> _Given:
    """Return the result or error of a call, its seconds, and the global generators that it moved."""
    IMAGE_LIMIT.set(max_image_pixels)
    before, began = _generators(), time.perf_counter()
    value, error = None, None
    try:
        value = await coroutine
    except Late:
        raise
    except (Exception, SystemExit) as raised:
        error = raised
    seconds = time.perf_counter() - began
    moved = tuple(name for name, state in _generators().items() if state != before[name])
    return _Given(value, error, seconds, moved)


def _generators() -> dict[str, Any]:
    _, keys, place, *rest = np.random.get_state()
    return {
        "Python's": random.getstate(),
        "numpy's": (np.asarray(keys).tobytes(), place, *rest),
        "torch's": torch.get_rng_state().numpy().tobytes(),
    }


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:30]!r}... of {len(text)} characters"
