"""`env.workers`: environments and tools run in processes that can be killed, and episodes are those of this process."""

from __future__ import annotations

import gc
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from talks import Talk, asked, one, texts
from waiting import until
from worker_games import double

from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.processes import is_alive
from lit_rl.environments import CustomEnvironment, FunctionTools, GymnasiumEnvironment
from lit_rl.environments.factory import EnvironmentFactory

FILE = str(Path(__file__).parent / "worker_games.py")
LIMITS: dict[str, Any] = {"max_turns": 6, "max_tokens": 2000}


def game(name: str, **limits: Any) -> CustomEnvironment:
    return CustomEnvironment(f"{FILE}:{name}", **{**LIMITS, **limits})


def tools(*names: str, **limits: Any) -> FunctionTools:
    return FunctionTools([f"{FILE}:{name}" for name in names], parser="regex", **{**LIMITS, **limits})


def as_it_went(episode: Episode) -> Episode:
    """Less what it took."""
    return replace(episode, seconds=0.0)


@pytest.mark.parametrize(
    ("make", "turns"),
    [
        (lambda workers: game("Counts", workers=workers), ["a", "b", "stop"]),
        (lambda workers: game("Shop", parser="regex", workers=workers), ['buy("x")', 'buy("raise") buy("y")', "bye"]),
        (lambda workers: tools("double", "do", "thing", workers=workers), ["double(4) thing()", 'do("leave")', "8"]),
        (
            lambda workers: GymnasiumEnvironment("FrozenLake-v1", read=f"{FILE}:as_number", workers=workers, **LIMITS),
            ["1", "east", "2"],
        ),
        (
            lambda workers: GymnasiumEnvironment(
                "FrozenLake-v1", actions=["l", "d", "r", "u"], observation="render", workers=workers, **LIMITS
            ),
            ["d", "d", "R"],
        ),
    ],
    ids=["steps", "methods", "functions", "gymnasium", "rendered"],
)
def test_episodes_are_those_of_this_process(make: Any, turns: list[str]) -> None:
    """Texts, rewards, errors of tools, draws from the global generator."""
    here, there = [as_it_went(one(texts(make(workers)), *turns)) for workers in (0, 1)]
    assert here.end in ("done", "answered", "max_turns", "failed") and here.messages
    assert there == here


def test_objects_are_spread_over_workers_that_load_no_torch_and_let_go() -> None:
    interaction = texts(game("Where", workers=2))
    for _ in range(2):
        talk = Talk(interaction, asked("p"), [7] * 6)
        said = [str(talk.heard(row, "where")).split() for row in range(6)]
        assert {torch for _, _, torch in said} == {"False"}
        assert len({pid for pid, _, _ in said} - {str(os.getpid())}) == 2
        assert {living for _, living, _ in said} == {"3"}
        talk.over()


def test_rows_are_answered_at_the_same_time_and_waiting_for_a_worker_is_not_counted() -> None:
    """Six answers of 0.3 seconds, three for each worker, of 0.8 that one may take."""
    talk = Talk(texts(game("Counts", workers=2, step_timeout=0.8)), asked("p"), [7] * 6)
    began = time.monotonic()
    for row in range(6):
        talk.say(row, "sleep0.3")
    heard = [talk.read(answer) for answer in _all(talk, 6)]
    took = time.monotonic() - began
    talk.over()
    alone = Talk(texts(game("Counts", workers=1, step_timeout=0.8)), asked("p"), [7] * 6)
    began = time.monotonic()
    for row in range(6):
        alone.say(row, "sleep0.3")
    _all(alone, 6)
    assert took < time.monotonic() - began
    assert all(text is not None and text.startswith("sleep0.3") for text in heard)
    alone.over()


def _all(talk: Talk, count: int) -> list[Any]:
    heard: list[Any] = []
    while len(heard) < count:
        heard += talk.conversations.answers(wait=True)
    return heard


def _workers(factory: EnvironmentFactory) -> list[int]:
    assert factory.pool is not None
    return [place.life.process.child.process.pid for place in factory.pool._slots if place.life is not None]


def _is_gone(pid: int) -> bool:
    return until(lambda: not is_alive(pid), 30)


@pytest.mark.parametrize(
    ("word", "end", "error", "limits"),
    [
        ("hang", "timeout", "env.step_timeout=0.5", {"step_timeout": 0.5}),
        ("spin", "timeout", "env.step_timeout=0.5", {"step_timeout": 0.5}),
        ("exit", "failed", "ended with exit code 3 during step", {}),
        ("kill", "failed", r"was killed by SIGKILL \(as the kernel does when memory is out\) during step", {}),
        ("memory", "failed", "ended, after MemoryError.*512 MiB .env.memory_mb.", {"memory_mb": 512}),
        ("raise", "failed", "KeyError: 'gold'", {}),
    ],
)
def test_what_ends_or_stalls_a_worker_costs_its_own_episode_alone(word, end, error, limits) -> None:
    """Faults 21 and 22. The others of that worker go on in a new one, as if nothing had been."""
    factory = game("Counts", workers=1, **limits)
    talk = Talk(texts(factory), asked("p"), [7] * 3)
    first = [talk.heard(row, "a") for row in range(3)]
    (worker,) = _workers(factory)
    assert talk.heard(1, word) is None
    assert _workers(factory) == [worker] if word == "raise" else _is_gone(worker)
    assert talk.heard(0, "b") == talk.heard(2, "b")
    episodes = talk.over()
    bad = episodes[1]
    assert bad.end == end and bad.failed
    assert re.search(error, str(bad.error))
    alone = Talk(texts(game("Counts")), asked("p"), [7])
    assert first == [alone.heard(0, "a")] * 3
    alone.heard(0, "b")
    (good,) = alone.over()
    assert as_it_went(episodes[0]) == as_it_went(episodes[2]) == as_it_went(good)


def test_a_worker_that_dies_between_two_calls_is_no_new_world(tmp_path: Path) -> None:
    """The system may end it at any time, for want of memory."""
    factory = game("Counts", workers=1)
    talk = Talk(texts(factory), asked("p"), [7] * 2)
    talk.heard(0, "a"), talk.heard(1, "a")
    (worker,) = _workers(factory)
    os.kill(worker, 9)
    assert _is_gone(worker)
    alone = Talk(texts(game("Counts")), asked("p"), [7])
    alone.heard(0, "a")
    assert talk.heard(0, "b") == talk.heard(1, "b") == alone.heard(0, "b")
    talk.over(), alone.over()


def test_limits_of_a_rollout_hold_for_those_that_wait_for_a_worker() -> None:
    """Of six answers that take half a second each, one worker gives three at most in the time of the rollout."""
    talk = Talk(texts(game("Counts", workers=1, rollout_timeout=1.5)), asked("p"), [7] * 6)
    for row in range(6):
        talk.say(row, "sleep0.5")
    heard = [talk.read(answer) for answer in _all(talk, 6)]
    late = heard.count(None)
    assert late >= 3
    errors = [str(each.error) for each in talk.over() if each.end == "timeout"]
    assert len(errors) == late and all("env.rollout_timeout=1.5" in error for error in errors)


def test_nobody_waits_for_answers_of_a_conversation_that_is_closed() -> None:
    """The worker of what is under way is ended, and what waits for it never begins."""
    factory = game("Counts", workers=1)
    talk = Talk(texts(factory), asked("p"), [7] * 3)
    (worker,) = _workers(factory)
    for row in range(3):
        talk.say(row, "sleep20")
    talk.conversations.close()
    assert _is_gone(worker)


def test_an_episode_that_does_not_repeat_fails_where_its_worker_is_lost() -> None:
    talk = Talk(texts(game("Forgets", workers=1)), asked("p"), [7] * 2)
    assert talk.heard(0, "a") == talk.heard(1, "a")
    assert talk.heard(1, "kill") is None and talk.heard(0, "b") is None
    lost, killed = talk.over()
    assert lost.end == killed.end == "failed"
    assert re.search(r"made anew in the middle of its episode, it gave '\d+ \(0.0\)' and not '\d+", str(lost.error))


@pytest.mark.parametrize(("word", "end"), [("spin", "timeout"), ("exit", "failed")])
def test_a_tool_that_hangs_or_dies_is_no_answer_and_the_next_call_is_served(word, end) -> None:
    talk = Talk(texts(tools("double", "do", workers=1, step_timeout=0.5)), asked("p"), [7] * 2)
    assert talk.heard(0, f'do("{word}")') is None
    assert talk.heard(1, "double(4)") == "8"
    lost, other = talk.over()
    assert lost.end == end and lost.calls == 0 and other.calls == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FunctionTools([double], workers=2), "double was given as an object"),
        (lambda: game("Shop", functions=[double], workers=1), "env.workers runs env.functions.*double"),
    ],
)
def test_what_no_worker_can_run_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_worker_that_cannot_begin_ends_the_run_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}: raise OSError('no licence')\n"
        "class Game:\n    def reset(self): ...\n    def step(self, action): ...\n"
    )
    factory = CustomEnvironment(f"{tmp_path}/here.py:Game", workers=1)
    with pytest.raises(GenerationError, match="here.py:Game, with OSError: no licence"):
        one(texts(factory), "a")


def test_workers_end_with_their_factory() -> None:
    factory = game("Counts", workers=2)
    one(texts(factory), "stop")
    workers = _workers(factory)
    del factory
    gc.collect()
    assert workers and all(map(_is_gone, workers))
