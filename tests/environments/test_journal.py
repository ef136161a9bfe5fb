"""`env.journal`: what was answered before a process was killed is answered again, and nobody is asked."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from talks import Talk, asked, texts

from lit_rl.algorithms.checks.episode_checks import open_journal
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.episode_replay import Journal

WORLD = itertools.count()
"""Never says the same twice."""

FILE = Path(__file__).parent / "worker_games.py"


class World:
    """Has no seed: every answer and the reward are the world's next number."""

    def reset(self) -> str:
        return "ask: "

    def step(self, action: str) -> tuple[Any, ...]:
        if action == "hang":
            time.sleep(2)
        if action == "raise":
            raise KeyError(next(WORLD))
        return f"{next(WORLD)}", 1.0, action == "stop", False, {}

    def get_reward(self) -> float:
        return float(next(WORLD))


class Says:
    """Answers with all that was said, and a number from the global generator; counts how often it is asked."""

    asked = 0

    def reset(self) -> None:
        self.said = ""

    def step(self, action: str) -> tuple[Any, ...]:
        type(self).asked += 1
        self.said += action
        return f"{self.said} {random.randrange(1000)}", 1.0, action == "stop", False, {}

    def get_reward(self) -> float:
        return float(len(self.said))


def world(what: str) -> str:
    """The world's next number.

    Args:
        what: What.
    """
    return f"{what} {next(WORLD)}"


def game(make: Callable[[], Any] | str = World, **limits: Any) -> CustomEnvironment:
    return CustomEnvironment(make, **{"max_turns": 5, "max_tokens": 600, **limits})


class Process:
    """A process of the run, which knows of the others by their files alone."""

    def __init__(self, folder: Path, factory: Any, rank: int = 0) -> None:
        self.journal, self._interaction = Journal(folder, rank), texts(factory)

    def talk(self, rows: int = 1, *, rollout: int = 0, request: Any = None) -> Talk:
        journal = self.journal.request(rollout, object() if request is None else request)
        return Talk(self._interaction, asked("p"), [7] * rows, journal=journal)


def plain(episodes: tuple[Episode, ...]) -> list[Episode]:
    return [replace(each, seconds=0.0) for each in episodes]


def played(talk: Talk, *rows: list[str]) -> list[Episode]:
    """A turn of each row in turn."""
    for turn in itertools.zip_longest(*rows):
        for row, text in enumerate(turn):
            if text is not None:
                talk.heard(row, text)
    return plain(talk.over())


@pytest.mark.parametrize("workers", [0, 4])
def test_a_rollout_that_was_answered_is_answered_again_and_the_world_is_not_asked(tmp_path, workers) -> None:
    """Openings, answers, rewards of turns and of the whole, what raised, and limits of time."""
    path = game(f"{FILE}:Unrepeatable", workers=workers, step_timeout=0.5)
    rows = ["a", "b", "stop"], ["a", "raise"], ["a", "b"], ["a", "hang"]
    before = played(Process(tmp_path, path).talk(4), *rows)
    assert [each.end for each in before] == ["done", "failed", "failed", "timeout"]
    assert played(Process(tmp_path, path).talk(4), *rows) == before
    assert len({message["content"] for each in before for message in each.messages if message["role"] == "user"}) > 2


class ClosesSlowly(World):
    async def close(self) -> None:
        await asyncio.sleep(1)


def test_how_long_a_close_takes_says_nothing_of_the_episode(tmp_path: Path) -> None:
    before = played(Process(tmp_path, game(ClosesSlowly, step_timeout=0.3)).talk(), ["a", "stop"])
    assert before[0].end == "done"
    assert played(Process(tmp_path, game(ClosesSlowly, step_timeout=0.3)).talk(), ["a", "stop"]) == before


def test_a_limit_of_the_whole_episode_stays_one(tmp_path: Path) -> None:
    talk = Process(tmp_path, game(episode_timeout=0.3)).talk()
    first = talk.heard(0, "a")
    time.sleep(0.4)
    assert first is not None and talk.heard(0, "b") is None
    (late,) = plain(talk.over())
    assert late.end == "timeout"
    again = Process(tmp_path, game(episode_timeout=0.3)).talk()
    assert again.heard(0, "a") == first and again.heard(0, "b") is None
    assert plain(again.over()) == [late]


def test_what_was_killed_in_the_middle_goes_on_where_the_environment_repeats(tmp_path: Path) -> None:
    """A new object is told what was said, once it is asked for more."""
    whole = played(Process(tmp_path / "whole", game(Says)).talk(), ["a", "b", "c", "stop"])
    killed = Process(tmp_path, game(Says)).talk()
    heard = [killed.heard(0, text) for text in "ab"]
    resumed, asked_before = Process(tmp_path, game(Says)).talk(), Says.asked
    assert [resumed.heard(0, text) for text in "ab"] == heard and Says.asked == asked_before
    assert played(resumed, ["c", "stop"]) == whole
    assert Says.asked == asked_before + 4


def test_what_was_killed_in_the_middle_fails_where_the_environment_does_not_repeat(tmp_path: Path) -> None:
    killed = Process(tmp_path, game()).talk()
    heard = killed.heard(0, "a")
    resumed = Process(tmp_path, game()).talk()
    assert resumed.heard(0, "a") == heard and resumed.heard(0, "b") is None
    (episode,) = resumed.over()
    assert episode.end == "failed" and "made anew in the middle of its episode, it gave" in str(episode.error)


def test_tools_remember_nothing_so_that_no_call_is_made_twice(tmp_path: Path) -> None:
    tools = FunctionTools([world], parser="regex", max_turns=5, max_tokens=600)
    killed = Process(tmp_path, tools).talk()
    heard, mark = killed.heard(0, 'world("x")'), next(WORLD)
    resumed = Process(tmp_path, tools).talk()
    assert resumed.heard(0, 'world("x")') == heard
    assert resumed.heard(0, 'world("y")') == f"y {mark + 1}"


def test_what_is_said_otherwise_is_asked(tmp_path: Path) -> None:
    played(Process(tmp_path, game(Says)).talk(), ["a", "b"])
    assert str(Process(tmp_path, game(Says)).talk().heard(0, "x")).startswith("x ")


def test_a_request_that_is_drawn_again_is_answered_again_and_another_one_is_not(tmp_path: Path) -> None:
    """An engine that is lost in the middle is asked once more, by the same request (fault 25)."""
    run, request = Process(tmp_path, game()), object()
    lost = run.talk(request=request)
    heard = lost.heard(0, "stop")
    assert heard is None
    before = plain(lost.over())
    assert played(run.talk(request=request), ["stop"]) == before
    greedy = played(run.talk(request=object()), ["stop"])
    assert greedy != before
    resumed = Process(tmp_path, game())
    assert [played(resumed.talk(), ["stop"]) for _ in range(2)] == [before, greedy]


def test_what_was_being_written_is_lost_alone(tmp_path: Path) -> None:
    talk = Process(tmp_path, game(Says)).talk()
    first = talk.heard(0, "a")
    talk.heard(0, "b")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    asked_before, resumed = Says.asked, Process(tmp_path, game(Says)).talk()
    assert resumed.heard(0, "a") == first and Says.asked == asked_before
    assert str(resumed.heard(0, "b")).startswith("ab ") and Says.asked == asked_before + 2
    assert all(line.endswith(b"]\n") for line in file.read_bytes().splitlines(keepends=True))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollout_0.rank_1.jsonl").write_text("[1,\n")
    with pytest.raises(StorageError, match="rollout_0.rank_1.jsonl cannot be read.*Remove the file"):
        Process(tmp_path, game()).talk()


def test_a_rank_reads_what_another_one_wrote(tmp_path: Path) -> None:
    """A run may be resumed by another number of processes."""
    before = played(Process(tmp_path, game(), rank=1).talk(), ["a", "stop"])
    assert played(Process(tmp_path, game()).talk(), ["a", "stop"]) == before


def test_files_are_dropped_when_the_checkpoint_after_theirs_is_written(tmp_path: Path) -> None:
    run = Process(tmp_path, game())
    names = [f"rollout_{number}.rank_0.jsonl" for number in range(3)]
    for rollout in range(3):
        played(run.talk(rollout=rollout), ["stop"])
        run.journal.saved(rollout)
        assert sorted(path.name for path in tmp_path.iterdir()) == names[rollout : rollout + 1]
    run.journal.forget()
    assert not list(tmp_path.iterdir())
    played(run.talk(rollout=2), ["stop"])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_reply_that_no_file_can_hold_ends_the_run(tmp_path: Path) -> None:
    class Odd(World):
        def step(self, action: str) -> tuple[Any, ...]:
            return [{"role": "user", "content": "a", "by": object()}], 0.0, False, False, {}

    with pytest.raises(ConfigError, match="env.journal cannot write"):
        Process(tmp_path, game(Odd)).talk().heard(0, "a")


def test_a_folder_that_is_named_belongs_to_one_run(tmp_path) -> None:
    env = game(journal=str(tmp_path / "replies"))
    assert open_journal(env, str(tmp_path / "first"), 0) is not None
    assert open_journal(env, str(tmp_path / "first"), 0) is not None  # the same run, resumed
    with pytest.raises(ConfigError, match="replies' holds .*first, but this run is in .*second"):
        open_journal(env, str(tmp_path / "second"), 0)
    assert open_journal(game(journal=True), str(tmp_path / "second"), 0) is not None
