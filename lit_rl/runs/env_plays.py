"""Scripted episodes for `lit-rl env-check`: texts and tool calls of a policy, the answers of the environment, and what
the process holds after many episodes.

The environment is called as a run calls it: new objects, a time limit for each call, seeded generators.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_rl.core.episode import Episode, PolicyTurn, message_text
from lit_rl.core.errors import LitRLError
from lit_rl.core.rollout import PromptBatch
from lit_rl.environments.environment_base import Environment, Reply, Turn
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.observations import IMAGE_LIMIT
from lit_rl.environments.parser_base import Parser
from lit_rl.environments.runner import Runner, TimedOut, TimedTask
from lit_rl.environments.tool_parsers import rendered_call
from lit_rl.environments.tools import Toolbox, ToolCall

# ---------------------------------------------------------------------- episodes, call by call


_LARGEST_SEED = (1 << 32) - 1


@dataclass(frozen=True)
class EpisodeCase:
    """One episode to be played."""

    kind: str
    """Name of the kind of environment, of those of `env=`."""
    columns: Mapping[str, Any]
    """The prompt and the other columns of a row of the data."""
    seed: int
    turns: tuple[str, ...]
    """The policy's texts, turn by turn."""


@dataclass(frozen=True)
class EnvCall:
    """One call of an environment."""

    name: str
    """``reset``, ``turn 0 ('...')``, ``reward``, ``close``."""
    seconds: float
    moved: tuple[str, ...]
    """Global generators whose state it changed."""


@dataclass(frozen=True)
class PlayedEpisode:
    """A played episode."""

    lines: tuple[str, ...]
    """Everything that the policy or its training would see, a line a call: two episodes are equal where these are."""
    calls: tuple[EnvCall, ...]
    opening: str
    """The opening observation as text; empty: there is none."""
    replies: tuple[tuple[str, Reply], ...]
    """Each turn with its reply."""
    failed: str | None
    """The call that failed, and the reason; None: all succeeded."""


class EpisodePlayer:
    """The player of scripted cases.

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

    def play(self, case: EpisodeCase) -> PlayedEpisode:
        """Play one episode, alone."""
        return self.interleaved([case])[0]

    def interleaved(self, cases: Sequence[EpisodeCase]) -> list[PlayedEpisode]:
        """Play episodes at the same time, a call of each in turn."""
        in_worker = self._factory.pool is not None
        limit, pixels = self._factory.step_timeout, self._max_image_pixels
        plays = []
        for case in cases:
            make = partial(self._factory.kinds[case.kind].make, self._parsers[case.kind])
            plays.append(_Play(case, make, self._runner, limit, pixels, in_worker))
        for _ in zip_longest(*(play.calls_in_order() for play in plays)):
            pass
        return [play.played() for play in plays]


class _CallFailed(Exception):
    """A call that failed."""


class _Play:
    """One episode while it is played."""

    def __init__(
        self,
        case: EpisodeCase,
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
        self._calls: list[EnvCall] = []
        self._replies: list[tuple[str, Reply]] = []
        self._opening = ""
        self._failed: str | None = None

    def played(self) -> PlayedEpisode:
        """Return the episode, once it is over."""
        return PlayedEpisode(tuple(self._lines), tuple(self._calls), self._opening, tuple(self._replies), self._failed)

    def calls_in_order(self) -> Iterator[None]:
        """Make the next call at each step of this iterator."""
        try:
            opening = self._call("reset", self._begin())
            self._opening = opening if isinstance(opening, str) else json.dumps(opening, default=str) if opening else ""
            self._lines.append(f"reset began with {opening!r}")
            yield
            assert self._environment is not None
            for number, text in enumerate(self._case.turns):
                name = f"turn {number} ({_short(text)})"
                reply: Reply = self._call(name, self._environment.answer(Turn(text, text, cut=False)))
                self._replies.append((text, reply))
                answer = " | ".join(map(message_text, reply.messages))
                self._lines.append(f"{name} was answered {answer!r}, reward {reply.reward}, {reply.end or 'goes on'}")
                yield
                if reply.end is not None:
                    break
            self._lines.append(f"the whole had the reward {self._call('reward', self._environment.reward())}")
        except _CallFailed as failed:
            self._failed = str(failed)
            self._lines.append(self._failed)
        if self._environment is not None:
            try:
                self._call("close", self._environment.close())
            except _CallFailed as failed:  # a run goes on with the next episode, and logs it
                self._failed = self._failed or str(failed)

    async def _begin(self) -> Any:
        """Make the environment, by the user's constructor, and reset it."""
        self._environment = self._make()
        return await self._environment.reset(self._case.seed, copy.deepcopy(dict(self._case.columns)))

    def _call(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        seed = (self._case.seed + len(self._calls)) & _LARGEST_SEED
        task = TimedTask(_watched_call(coroutine, self._max_image_pixels), self._limit, seed, in_worker=self._in_worker)
        result = self._runner.one(task) if self._in_worker else self._runner.in_order([task])[0]
        if isinstance(result, TimedOut):
            self._calls.append(EnvCall(name, self._limit, ()))
            raise _CallFailed(f"{name} took longer than env.step_timeout={self._limit:g} s")
        self._calls.append(EnvCall(name, result.seconds, result.moved))
        if isinstance(result.error, LitRLError):
            raise _CallFailed(f"{name}: {result.error}")
        if result.error is not None:
            raise _CallFailed(f"{name} raised {type(result.error).__name__}: {result.error}")
        return result.value


@dataclass(frozen=True)
class _CallResult:
    value: Any
    error: BaseException | None
    seconds: float
    moved: tuple[str, ...]


async def _watched_call(coroutine: Coroutine[Any, Any, Any], max_image_pixels: int | None) -> _CallResult:
    """Return the result or error of a call, its seconds, and the global generators that it moved."""
    IMAGE_LIMIT.set(max_image_pixels)
    before, began = _generator_states(), time.perf_counter()
    value, error = None, None
    try:
        value = await coroutine
    except TimedOut:
        raise
    except (Exception, SystemExit) as raised:
        error = raised
    seconds = time.perf_counter() - began
    moved = tuple(name for name, state in _generator_states().items() if state != before[name])
    return _CallResult(value, error, seconds, moved)


def _generator_states() -> dict[str, Any]:
    _, keys, place, *rest = np.random.get_state()
    return {
        "Python's": random.getstate(),
        "numpy's": (np.asarray(keys).tobytes(), place, *rest),
        "torch's": torch.get_rng_state().numpy().tobytes(),
    }


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:30]!r}... of {len(text)} characters"


# ---------------------------------------------------------------------- the policy's texts and tool calls


NONSENSE = "nonsense"

_LONG = "word " * 1000

_NO_TOOL = "no_such_tool"

_EXAMPLES = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
"""Example values by the type of a JSON schema."""


def policy_texts(tokenizer: Any) -> list[str]:
    """Return a number, nonsense, nothing, a long text, and a control token spelled out."""
    return ["0", NONSENSE, "", _LONG, str(tokenizer.eos_token)]


def tool_calls(toolbox: Toolbox) -> dict[str, ToolCall]:
    """Return calls by description: for each tool a correct one, if example values can make one, and one without its
    arguments; and one of a missing tool."""
    made: dict[str, ToolCall] = {}
    for name, tool in toolbox.tools.items():
        arguments = _example(tool.schema["function"]["parameters"])
        if tool.argument_error(arguments) is None:
            made[f"a call of {name}"] = ToolCall(name, arguments)
        if tool.argument_error({}) is not None:
            made[f"a call of {name} without arguments"] = ToolCall(name, {})
    return made | {"a call of no tool": ToolCall(_NO_TOOL, {})}


def rotated_scripts(texts: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Return the turns of several episodes, so that each text begins one.

    Args:
        texts: The policy's texts.
        most: Turns of an episode.
    """
    return [(*texts[first:], *texts[:first])[:most] for first in range(len(texts))]


def write_call(call: ToolCall, parser: Parser, tokenizer: Any) -> str | None:
    """Return the call in the first form that the run's own parser reads; None: it reads none that is known."""
    arguments = dict(call.arguments)
    forms = (
        f"{call.name}({', '.join(map(json.dumps, arguments.values()))})",
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>",
        json.dumps({"name": call.name, "parameters": arguments}),
        f"[TOOL_CALLS]{json.dumps([{'name': call.name, 'arguments': arguments}])}",
    )
    by_template = rendered_call(tokenizer, call, []) if tokenizer.chat_template else ()
    for text in chain(map(parser.thoughts.going_on, forms), by_template):
        calls = parser.parse(text).calls
        one = calls[0] if len(calls) == 1 and isinstance(calls[0], ToolCall) else None
        if one is not None and (one.name, dict(one.arguments)) == (call.name, arguments):
            return text
    return None


def _example(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits a JSON schema."""
    if schema.get("enum"):
        return schema["enum"][0]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _example(options[0])
    type_ = schema.get("type")
    type_ = type_[0] if isinstance(type_, list) and type_ else type_
    if type_ == "object" and schema.get("properties"):
        return {name: _example(part) for name, part in schema["properties"].items()}
    return _EXAMPLES.get(str(type_), "a")


# ---------------------------------------------------------------------- a conversation as the tokens of a run


@dataclass(frozen=True)
class ScriptedTalk:
    """One conversation."""

    episode: Episode
    ids: list[int]
    """All tokens that the policy reads and writes."""
    learned: list[bool]
    """True for each token that the policy wrote."""

    @property
    def written(self) -> list[int]:
        """Token ids that the policy wrote."""
        return [token for token, learned in zip(self.ids, self.learned) if learned]


def play_talk(
    interaction: Interaction,
    tokenizer: Any,
    batch: PromptBatch,
    seed: int,
    turns: Sequence[str],
    max_new_tokens: int,
) -> ScriptedTalk:
    """Play the turns until the conversation is over. A turn that is too long is cut, as a policy's is.

    Args:
        interaction: The run's interaction.
        tokenizer: The policy's tokenizer.
        batch: A batch of one prompt.
        seed: Seed of the episode.
        turns: The policy's texts.
        max_new_tokens: Most tokens of one turn.

    Raises:
        LitRLError: what would end a run.
    """
    seen = batch.vision(batch.rows) if batch.vision is not None else ()
    (opened,), conversations = interaction.begin(batch, [seed], max_new_tokens=max_new_tokens, seen=seen)
    with closing(conversations):
        ids, learned, room = list(opened.ids), [False] * len(opened.ids), max_new_tokens
        for number, text in enumerate(turns):
            whole = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            turn = whole[: min(room, max_new_tokens)]
            conversations.tell(PolicyTurn(0, number, turn, ended=len(turn) == len(whole)))
            (reply,) = conversations.answers(wait=True)
            answer = list(reply.token_ids or ())
            ids, learned = [*ids, *turn, *answer], [*learned, *[True] * len(turn), *[False] * len(answer)]
            if reply.token_ids is None:
                break
            room = reply.max_new_tokens
        return ScriptedTalk(conversations.episodes()[0], ids, learned)


# ---------------------------------------------------------------------- resources that episodes leave behind


_MIN_EPISODES, _MAX_EPISODES = 4, 40
"""Fewest and most episodes between two measurements: below the first there is no result."""

_LEAST_GROWTH = {
    "threads": 0.1,
    "child processes": 0.1,
    "open files": 0.1,
    "Python objects": 20.0,
    "KiB of memory": 32.0,
}
"""Least growth an episode that is reported. Anything rarer may be a pool that fills; a run has hundreds of thousands
of episodes."""


@dataclass(frozen=True)
class Growth:
    """Resources that grew over two equal numbers of episodes."""

    episodes: int
    """Episodes of each half; 0: they take too long to measure."""
    grown: dict[str, float]
    """Growth an episode, by resource, where it grew in both halves."""


def measure_growth(play: Callable[[int], object], cases: int, budget: float) -> Growth:
    """Play episodes, and measure the resources of the process before, halfway and after.

    Args:
        play: Plays an episode of the case with this number, and keeps nothing.
        cases: Number of cases.
        budget: Seconds for all of it, about.
    """
    began = time.perf_counter()
    for number in range(cases):  # what is loaded or filled once
        play(number)
    spent = time.perf_counter() - began
    rounds = min(math.ceil(_MAX_EPISODES / cases), int((budget - spent) / spent / 2))
    if (episodes := rounds * cases) < _MIN_EPISODES:
        return Growth(0, {})
    looks = [held_resources()]
    for _ in range(2):
        for number in range(episodes):
            play(number % cases)
        looks.append(held_resources())
    grown = {name: min(b[name] - a[name] for a, b in pairwise(looks)) / episodes for name in looks[0]}
    return Growth(episodes, {name: each for name, each in grown.items() if each >= _LEAST_GROWTH[name]})


def held_resources() -> dict[str, float]:
    """Return the resources of this process: counts, and KiB of memory of its own. Cyclic garbage is collected
    before."""
    gc.collect()
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # pages that glibc keeps: else what leaks fills memory that was freed before, unseen
    # Small blocks of Python's own allocator: counting them costs nothing, unlike tracing each.
    held: dict[str, float] = {"threads": threading.active_count(), "Python objects": sys.getallocatedblocks()}
    process = Path("/proc/self")
    if process.is_dir():  # Linux
        held["open files"] = len(os.listdir(process / "fd"))
        # The process's own memory. Pages of files (libraries) come and go as the system likes.
        own = re.findall(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", (process / "status").read_text(), re.M)
        held["KiB of memory"] = float(sum(map(int, own)))
        held["child processes"] = 0
        for task in (process / "task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended, or a kernel without this file
                held["child processes"] += len((task / "children").read_text().split())
    return held
