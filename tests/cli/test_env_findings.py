"""What `lit-rl env-check` finds: games with one fault each are played for real, here and in another process."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import faulty_games
import pytest
import torch
from faulty_games import Sound

from lit_rl.core.user_functions import load_file
from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.games import GuessNumber
from lit_rl.environments.tool_parsers import HermesParser, Llama3Parser, MistralParser, RegexParser
from lit_rl.environments.tools import Toolbox
from lit_rl.runs import env_check as findings
from lit_rl.runs.env_plays import (
    EpisodeCase,
    EpisodePlayer,
    Growth,
    PlayedEpisode,
    measure_growth,
    rotated_scripts,
    tool_calls,
    write_call,
)
from lit_rl.runs.env_process import OtherProcess

SAID = "0", "win", "", "nonsense"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield from faulty_games.kept()


def player(made: Any, **limits: Any) -> EpisodePlayer:
    return EpisodePlayer(CustomEnvironment(made, **limits), {"environment": None})


def cases(kind: str = "environment") -> list[EpisodeCase]:
    return [EpisodeCase(kind, {"prompt": "go"}, seed, turns) for seed, turns in enumerate(rotated_scripts(SAID, 3))]


def played(made: Any, **limits: Any) -> list[PlayedEpisode]:
    by = player(made, **limits)
    return [by.play(case) for case in cases()]


def lines(of: list[PlayedEpisode]) -> list[tuple[str, ...]]:
    return [each.lines for each in of]


def wrong(found: findings.EnvFinding, *words: str) -> None:
    assert found.level == "WRONG", found
    for word in words:
        assert word in f"{found.seen} {found.why} {found.fix}", (word, found)


def grown(game: Any) -> Growth:
    by = player(game)

    def play(number: int) -> None:
        by.play(cases()[number])

    return measure_growth(play, len(SAID), 30)


def repeated(made: Any, elsewhere: Any = None) -> findings.EnvFinding:
    """The finding on the same episodes twice, where another process played them as this one did at first."""
    first, second = played(made), played(made)
    return next(iter(findings.check_repeats(first, second, elsewhere or lines(first))))


@pytest.mark.parametrize("game", [Sound, GuessNumber])
def test_a_sound_game_passes_every_check(game):
    by, first = player(game), played(game)
    among = [by.interleaved([case, other])[0] for case, other in zip(cases(), cases()[1:] + cases()[:1])]
    told = [
        findings.check_calls(first),
        *findings.check_repeats(first, played(game), lines(first)),
        findings.check_isolation(first, among),
        findings.check_generators(first, at_once=False, elsewhere=False),
        findings.check_leaks(grown(game)),
        *findings.check_lengths(first, len, 100),
        findings.check_times(first, 30.0, findings.EnvRollout(8, 3, at_once=1)),
    ]
    assert [each.what for each in told if each.level != "ok"] == []
    assert len(told) == 8


def test_what_draws_unseeded_or_reads_the_clock_does_not_repeat():
    other = [("elsewhere it was otherwise",)] * len(SAID)
    wrong(repeated(faulty_games.Clock, other), "two new objects", "random.Random(seed)")


def test_what_an_earlier_episode_left_is_told_from_what_is_drawn():
    """A new process plays the first round as this one did: then it is no clock and no dice."""
    wrong(repeated(faulty_games.Shared), "an earlier episode changes a later one", "no class attributes")


def test_what_episodes_share_while_they_go_on_shows_only_side_by_side():
    game = faulty_games.SharedWhileItLasts
    assert repeated(game).level == "ok"
    alone, by = played(game), player(game)
    among = [by.interleaved([case, case])[0] for case in cases()]
    wrong(
        findings.check_isolation(alone, among),
        "turn 1 ('win') was answered '2 moves'",
        "turn 1 ('win') was answered '3 moves'",
    )


@pytest.mark.parametrize(("game", "whose"), [("Dice", "Python's"), ("Numpy", "numpy's"), ("Torch", "torch's")])
def test_global_generators_that_are_drawn_from_are_named_with_the_call(game, whose):
    """A run seeds all three, so that they repeat, but for calls that go on at the same time."""
    made = getattr(faulty_games, game)
    found = findings.check_generators(played(made), at_once=False, elsewhere=False)
    wrong(found, f"{whose} (in turn 0", "random.Random(seed)")
    assert "it repeats" in found.why and repeated(made).level == "ok"
    assert "neither repeats" in findings.check_generators(played(made), at_once=True, elsewhere=False).why


LEFT = [
    ("Files", "open files +1"),
    pytest.param("Threads", "threads +1", marks=pytest.mark.all),
    pytest.param("Memory", "Python objects +1", marks=pytest.mark.all),
]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_memory_that_was_freed_before_does_not_hide_a_leak():
    """As the training process keeps it: a policy was built and let go before the game is played. In a process of its
    own: what other tests have freed here takes in any number of buffers."""
    script = (
        "from lit_rl.cli.process import keep_freed_memory; assert keep_freed_memory()\n"
        "freed, keeps = [bytes(range(256)) * 1000 for _ in range(400)], bytes(1000); freed.clear()\n"
        "from lit_rl.runs.env_plays import measure_growth\n"
        "kept = []\n"
        "from lit_rl.runs import env_check\n"
        "found = measure_growth(lambda _: kept.append(bytes(range(256)) * 1000), 4, 30)\n"
        "print(found.grown.get('KiB of memory', 0.0), env_check.check_leaks(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and 240 < float(done.stdout.split()[0]) < 270, done
    assert "WRONG" in done.stdout and "KiB of memory +" in done.stdout and "hundreds of thousands" in done.stdout


@pytest.mark.parametrize(("game", "what"), LEFT)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_an_episode_leaves_behind_is_counted(game, what):
    found = findings.check_leaks(grown(getattr(faulty_games, game)))
    wrong(found, what, "hundreds of thousands")


@pytest.mark.all
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_child_processes_that_nobody_waits_for_are_counted():
    left: list[subprocess.Popen] = []
    try:
        found = measure_growth(lambda _: left.append(subprocess.Popen(["sleep", "60"])), 4, 60)
        assert found.grown["child processes"] == 1
    finally:
        for process in left:
            process.kill()
            process.communicate()


def test_what_fills_up_once_is_no_leak():
    pool: list[bytes] = []

    def play(_: int) -> None:
        if len(pool) < 10:
            pool.append(bytes(100_000))

    assert measure_growth(play, 4, 10).grown == {}


def test_a_reward_that_is_nan_an_error_and_a_late_answer_are_said_of_their_call():
    wrong(
        findings.check_calls(played(faulty_games.NotANumber)),
        "NotANumber.step in turn 0 returned the reward nan",
        "finite reward",
    )
    wrong(findings.check_calls(played(faulty_games.Raises)), "turn 1 ('win')", "ValueError")
    hung = player(faulty_games.Hangs, step_timeout=0.05).play(cases()[0])
    wrong(findings.check_calls([hung]), "turn 0 ('0') took longer than env.step_timeout=0.05 s")
    assert len(hung.replies) == 0


def test_a_rollout_is_reckoned_from_its_calls():
    first = played(faulty_games.Slow)
    one, all_ = (findings.check_times(first, 30.0, findings.EnvRollout(100, 2, at_once)) for at_once in (1, math.inf))
    assert "waits 60 s" in one.seen or "waits 61 s" in one.seen, one  # 100 episodes of 2 turns of 0.3 s
    assert "waits 0.6" in all_.seen and one.level == "ok"
    wrong(findings.check_times(first, 0.5, findings.EnvRollout(100, 2, math.inf)), "env.step_timeout=0.5 s")


def test_answers_and_openings_that_are_too_long():
    (note,) = findings.check_lengths(played(faulty_games.Talkative), len, 100)
    assert note.level == "note" and "2500 tokens" in note.seen
    (opening,) = findings.check_lengths(played(Sound), len, 11)
    wrong(opening, "reset began with 12 tokens", "env.max_observation_tokens=12")


@pytest.mark.parametrize(("rewards", "level"), [((0.0, -1.0), "ok"), ((None, 0.0), "ok"), ((0.0, 1.0), "WRONG")])
def test_nothing_must_not_pay(rewards, level):
    assert findings.check_rewards(dict(zip(("nothing", "nonsense"), rewards))).level == level


@pytest.mark.all
def test_another_process_has_other_hashes(monkeypatch):
    names = ["Sound", "Hashed", "Shared"]
    paths = {name: f"{faulty_games.__file__}:{name}" for name in names}
    loaded = load_file(Path(faulty_games.__file__), Path(faulty_games.__file__).read_bytes())
    monkeypatch.setattr(loaded.Shared, "moves", [])  # as in a process that begins
    parsers, asked = dict.fromkeys(names), [case for name in names for case in cases(name)[:1]]
    settings = {"_target_": "lit_rl.environments.CustomEnvironment", "path": paths}
    by = EpisodePlayer(CustomEnvironment(paths), parsers)
    first, second = ([by.play(case) for case in asked] for _ in range(2))
    with closing(OtherProcess(settings, parsers, asked)) as elsewhere:
        other = elsewhere.lines(120)
    assert not isinstance(other, str), other
    assert {name for name, a, b in zip(names, first, other) if a.lines != b} == {"Hashed"}
    again, there = findings.check_repeats(first[:2], second[:2], other[:2])
    assert again.level == "ok"
    wrong(there, "turn 0", "hash()")
    wrong(next(iter(findings.check_repeats(first[2:], second[2:], other[2:]))), "an earlier episode changes")


@pytest.mark.all
def test_another_process_that_fails_says_why():
    settings = {"_target_": "lit_rl.environments.CustomEnvironment", "path": "nowhere.at_all:Game"}
    with closing(OtherProcess(settings, {}, [])) as elsewhere:
        why = elsewhere.lines(120)
    assert isinstance(why, str) and "nowhere" in why
    *_, found = findings.check_repeats(played(Sound), played(Sound), why)
    wrong(found, "could not be played there", "nowhere")


# ---------------------------------------------------------------------- tools


def search(query: str, limit: int = 3, exact: bool = False, kind: str | None = None) -> list[str]:
    """Search.

    Args:
        query: What for.
        limit: How many.
        exact: Whether to the letter.
        kind: Of what kind (choices: ["book", "film"])
    """
    return [query] * limit


def leaky(word: str) -> str:
    """Show too much.

    Args:
        word: A word.
    """
    return f'Traceback (most recent call last):\n  File "x.py"\nKeyError: {word}'


def opaque(word: str) -> object:
    """Return an object.

    Args:
        word: A word.
    """
    return object()


def divide(a: int) -> float:
    """Divide by one less.

    Args:
        a: A number.
    """
    return 1 / (a - 1)


def test_calls_made_of_a_schema_are_valid_where_they_should_be():
    box = Toolbox([search, divide])
    made = tool_calls(box)
    assert list(made) == [f"a call of {name}{more}" for name in ("search", "divide") for more in ("", " without arguments")] + ["a call of no tool"]  # fmt: skip # noqa: E501
    for name, call in made.items():
        right = call.name in box.tools and box.tools[call.name].argument_error(call.arguments) is None
        assert right == (name in ("a call of search", "a call of divide")), name


def test_calls_are_written_so_that_every_parser_reads_them(bytes_tokenizer):
    box = Toolbox([search, divide])
    parsers = [HermesParser(), Llama3Parser(), MistralParser(), RegexParser(r"(?P<name>\w+)\((?P<arguments>.*?)\)", box.schemas)]  # fmt: skip # noqa: E501
    for parser in parsers:
        for call in tool_calls(box).values():
            text = write_call(call, parser, bytes_tokenizer)
            assert text is not None
            (read,) = parser.parse(text).calls
            assert (read.name, dict(read.arguments)) == (call.name, dict(call.arguments))  # pyright: ignore
    own = RegexParser(r"<<(?P<name>\w+):(?P<arguments>.*?)>>", box.schemas)
    assert write_call(tool_calls(box)["a call of divide"], own, bytes_tokenizer) is None


def test_answers_of_tools_that_nobody_should_read(bytes_tokenizer):
    factory = FunctionTools([search, leaky, opaque, divide], parser="hermes")
    (kind,) = factory.kinds.values()
    assert kind.toolbox is not None
    parser = HermesParser()
    asked = {name: write_call(call, parser, bytes_tokenizer) for name, call in tool_calls(kind.toolbox).items()}
    by = EpisodePlayer(factory, {"tools": parser})
    first = [by.play(EpisodeCase("tools", {}, 0, (text,))) for text in asked.values() if text is not None]
    told = list(findings.check_tool_answers(first, {**asked, "a call of mine": None}))
    assert [(each.level, each.seen.split()[0]) for each in told[:1]] == [("note", "not")]
    assert [each.level for each in told[1:]] == ["WRONG", "WRONG", "note"]
    wrong(told[1], "leaky", "traceback")
    wrong(told[2], "opaque gave no answer that can be written")
    assert "ZeroDivisionError" in told[3].seen


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Any:
    from transformers import AutoTokenizer

    from lit_rl.core.model_paths import TINY

    return AutoTokenizer.from_pretrained(TINY)
