"""`env=gymnasium` with the real package: text in, text out, and the same game as stepped by hand."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from talks import Talk, asked, chats, one, texts

from lit_rl.core.errors import BackendError, ConfigError
from lit_rl.environments import GymnasiumEnvironment
from lit_rl.environments.gymnasium_environment import RandomPlay
from lit_rl.environments.text_game import FunctionReader, InvalidAction, colours_as_words, default_renderer

DRY: dict[str, Any] = {"is_slippery": False, "map_name": "4x4"}
WAYS = ["left", "down", "right", "up"]
HOME = ["1", "1", "2", "1", "2", "2"]
"""Over the ice of the 4x4 map."""


def lake(**settings: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment("FrozenLake-v1", **{"options": DRY, "max_turns": 12, **settings})


def heard(episode: Any) -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == "user"]


# ------------------------------------------------------------------ an episode


def test_a_limit_of_the_environment_cuts() -> None:
    episode = one(texts(lake(options={**DRY, "max_episode_steps": 2})), *HOME, prompt="lake ")
    assert (episode.end, episode.turns, episode.reward) == ("cut", 2, 0.0)


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Blackjack-v1", "CliffWalking-v", "Taxi-v"])
def test_a_game_is_the_one_that_is_stepped_by_hand(id: str) -> None:
    id = next(name for name in sorted(gymnasium.registry, reverse=True) if name.startswith(id))
    env, draw = GymnasiumEnvironment(id, max_turns=12), random.Random(5)
    for seed in range(6):
        with gymnasium.make(id) as made:
            actions = [draw.randrange(made.action_space.n) for _ in range(12)]  # pyright: ignore
            observation, _ = made.reset(seed=seed)
            seen, rewards, over = [observation], [], False
            for action in actions:
                observation, reward, terminated, truncated, _ = made.step(action)
                seen, rewards, over = [*seen, observation], [*rewards, float(reward)], terminated or truncated
                if over:
                    break
        episode = one(texts(env), *map(str, actions), prompt="", seed=seed)
        told = [", ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in seen]
        assert [episode.prompt, *heard(episode)] == told
        assert episode.turn_rewards == rewards and episode.reward == sum(rewards)
        assert episode.end == ("done" if over else "max_turns")


def test_the_games_of_a_group_are_one_game_and_those_of_seeds_are_many() -> None:
    """Slippery ice: where one goes is drawn, by the seed and the number of the step alone."""
    env = lake(options={"map_name": "4x4"})

    def played(seeds: Sequence[int], order: Sequence[int]) -> list[list[str]]:
        talk = Talk(texts(env), asked("lake "), seeds)
        alive = set(order)
        for _ in range(6):
            for row in order:
                if row in alive and talk.heard(row, "2") is None:
                    alive.remove(row)
        return [heard(episode) for episode in talk.over()]

    same = played([3, 3, 3], [0, 1, 2])
    assert same[0] == same[1] == same[2] and same == played([3, 3, 3], [2, 0, 1])
    assert len({tuple(each) for each in played(range(16), range(16))}) > 4


def test_a_chat() -> None:
    env = lake(actions=WAYS)
    episode = one(chats(env), "Down", " right ", prompt=[{"role": "user", "content": "You are on "}])
    assert episode.prompt == [{"role": "user", "content": "You are on 0"}]
    assert heard(episode) == ["4", "5"] and episode.end == "done"


# ------------------------------------------------------------------ actions


@pytest.mark.parametrize(
    ("settings", "said", "told"),
    [
        ({}, ["4", "-1", "left", "", "1 1", "1.0", "٣", "9" * 30], "error: write 0 to 3"),
        ({"actions": WAYS}, ["1", "go left", ""], "error: write left, down, right or up"),
        ({"read": int}, ["4"], "error: this is no action of Discrete(4)"),
        ({"read": int}, ["x"], "error: invalid literal for int() with base 10: 'x'"),
        ({"read": {"a": 1}.get}, ["b"], "error: this is no action of Discrete(4)"),
    ],
)
def test_what_is_no_action_is_answered_and_moves_nothing(settings: Any, said: list[str], told: str) -> None:
    """It is a turn, worth 0, and never unscored."""
    episode = one(texts(lake(max_turns=len(said), **settings)), *said, prompt="lake ")
    assert heard(episode) == [told] * len(said)
    assert (episode.end, episode.turn_rewards, episode.reward) == ("max_turns", [0.0] * len(said), 0.0)
    first = {"actions": "down", "read": "1" if settings.get("read") is int else "a"}.get(next(iter(settings), ""), "1")
    assert heard(one(texts(lake(**settings)), *said, first, prompt="lake "))[-1] == "4"


def test_a_policy_that_never_acts_runs_out_of_turns() -> None:
    episode = one(texts(lake(max_turns=3)), *"xxxx", prompt="lake ")
    assert (episode.end, episode.turns, episode.reward) == ("max_turns", 3, 0.0)


def test_numbers_begin_where_the_space_does() -> None:
    env = GymnasiumEnvironment("lit_rl_test/Counts-v0")
    assert [env.actions.read(text) for text in ("-1", "1", " 0\n")] == [-1, 1, 0]
    with pytest.raises(InvalidAction, match="write -1 to 1"):
        env.actions.read("2")
    words = GymnasiumEnvironment("lit_rl_test/Counts-v0", actions=["less", "same", "more"])
    assert [words.actions.read(text) for text in ("less", "MORE")] == [-1, 1]


@pytest.mark.parametrize(
    ("space", "given", "read"),
    [
        (spaces.Box(-2, 2, (2,)), [1, 0.5], [1, 0.5]),
        (spaces.Box(-2, 2, (2,)), [3, 0.5], None),
        (spaces.Box(-2, 2, (2,)), [1], None),
        (spaces.Box(-2, 2, (2,)), [1, float("nan")], None),
        (spaces.Box(-2, 2, (2,)), [[1], [1, 2]], None),
        (spaces.Box(-2, 2, (2,)), "ab", None),
        (spaces.MultiDiscrete([3, 4]), [2, 3], [2, 3]),
        (spaces.MultiDiscrete([3, 4]), [2.5, 3], None),  # and not 2
        (spaces.MultiDiscrete([3, 4]), [3, 0], None),
        (spaces.Box(0, 255, (1,), np.uint8), [-1], None),  # and not 255
    ],
)
def test_arrays_of_a_function_are_of_the_space_or_no_action(space: Any, given: Any, read: Any) -> None:
    reads = FunctionReader(lambda _: given, space)
    if read is None:
        with pytest.raises(InvalidAction, match="this is no action of"):
            reads.read("")
    else:
        array = reads.read("")
        assert array.tolist() == read and array.dtype == space.dtype


def test_functions_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.py").write_text(
        "def last(text):\n    return {'down': 1, 'right': 2}.get(text.split()[-1].strip('.'))\n\n\n"
        "def field(observed):\n    return f'row {observed // 4}, column {observed % 4}'\n\n\nnumber = 3\n"
    )
    env = lake(read="./words.py:last", show="./words.py:field")
    episode = one(texts(env), "I go down.", "Now right.", prompt="")
    assert [episode.prompt, *heard(episode)] == ["row 0, column 0", "row 1, column 0", "row 1, column 1"]
    with pytest.raises(ConfigError, match="env.read='./words.py:number' is a int, not a function"):
        lake(read="./words.py:number")
    with pytest.raises(ConfigError, match=r"env.show='./words.py:feild'.*Did you mean 'field'"):
        lake(show="./words.py:feild")


# ------------------------------------------------------------------ observations


@pytest.mark.parametrize(
    ("space", "observed", "text"),
    [
        (spaces.Discrete(9, start=-4), np.int64(-3), "-3"),
        (spaces.Text(8), "a wall", "a wall"),
        (spaces.MultiDiscrete([3, 4]), np.array([2, 3]), "2 3"),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), "1 0 1"),
        (spaces.Box(-9, 9, (2,)), np.array([0.123456, -8], np.float32), "0.1235 -8"),
        (spaces.Box(0, 9, (2, 2), np.int64), np.array([[1, 2], [3, 4]]), "1 2\n3 4"),
        (spaces.Box(0, 9, ()), np.float32(2), "2"),
        (spaces.Tuple([spaces.Discrete(32), spaces.Text(3), spaces.MultiBinary(2)]), (14, "up", [0, 1]), "14, up, 0 1"),
        (spaces.Box(0, 9, (101,)), None, None),
        (spaces.Box(0, 9, (2, 2, 2)), None, None),
        (spaces.Dict(a=spaces.Discrete(2)), None, None),
        (spaces.Tuple([spaces.Tuple([spaces.Discrete(2)])]), None, None),
        (spaces.Tuple([spaces.Box(0, 255, (84, 84))]), None, None),
    ],
)
def test_observations_as_plain_text(space: Any, observed: Any, text: str | None) -> None:
    show = default_renderer(space)
    assert (show is None) == (text is None)
    assert show is None or show(observed) == text


def test_the_map_of_the_lake() -> None:
    episode = one(texts(lake(observation="render")), "2", prompt="")
    assert episode.prompt == "[red S]FFF\nFHFH\nFFFH\nHFFG"
    assert heard(episode) == ["  (Right)\nS[red F]FF\nFHFH\nFFFH\nHFFG"]


@pytest.mark.parametrize(
    ("coloured", "told"),
    [
        ("plain [1]", "plain [1]"),
        ("\x1b[43m \x1b[0m:", "[yellow  ]:"),
        ("\x1b[34;1mB\x1b[0m", "[blue B]"),
        ("\x1b[1mB\x1b[0m", "B"),
        ("\x1b[32m_\x1b[35mR\x1b[m|", "[green _][green magenta R]|"),
        ("\x1b[91ma\x1b[102mb", "[red a][red green b]"),
    ],
)
def test_colours_become_words(coloured: str, told: str) -> None:
    assert colours_as_words(coloured) == told


# ------------------------------------------------------------------ what is refused at start


class Counts(gymnasium.Env[Any, Any]):
    """Adds up. Whoever opens one closes it."""

    metadata = {"render_modes": ["ansi", "rgb_array"]}
    action_space = spaces.Discrete(3, start=-1)
    observation_space = spaces.Discrete(100)
    open = 0

    def __init__(self, fails: bool = False, render_mode: str | None = None) -> None:
        self.fails, self.render_mode = fails, render_mode
        type(self).open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        if self.fails:
            raise OSError("no board")
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 1, float(action), False, False, {}

    def render(self) -> Any:
        return np.zeros((2, 2))

    def close(self) -> None:
        type(self).open -= 1


class Shaped(Counts):
    """With the spaces that a test gives it."""

    def __init__(self, kind: str, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        if kind == "action":
            self.action_space = spaces.Box(-1, 1, (2,))  # pyright: ignore
        else:
            self.observation_space = spaces.Dict(a=spaces.Discrete(2))  # pyright: ignore


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    Counts.open = Shaped.open = 0
    gymnasium.register("lit_rl_test/Counts-v0", entry_point=Counts)
    gymnasium.register("lit_rl_test/Shaped-v0", entry_point=Shaped)
    yield
    for name in ("lit_rl_test/Counts-v0", "lit_rl_test/Shaped-v0"):
        gymnasium.registry.pop(name)


COUNTS, SHAPED = "lit_rl_test/Counts-v0", "lit_rl_test/Shaped-v0"


@pytest.mark.parametrize(
    ("id", "settings", "words"),
    [
        (SHAPED, {"options": {"kind": "action"}}, r"are Box\(-1.0, 1.0, \(2,\).*env.read="),
        (SHAPED, {"options": {"kind": "action"}, "actions": ["a"]}, "env.read="),
        (SHAPED, {"options": {"kind": "both"}}, r"are Dict\('a': Discrete\(2\)\).*env.show=.*env.observation=render"),
        (COUNTS, {"options": {"fails": True}}, "cannot begin: OSError: no board"),
        (COUNTS, {"observation": "render"}, "cannot begin: TypeError"),
        (
            COUNTS,
            {"show": lambda observed: observed},
            "env.show returned 0 for the first observation; it has to return a str",
        ),
        (COUNTS, {"show": lambda observed: observed["a"]}, "cannot begin: TypeError"),
        (COUNTS, {"actions": ["a", "b"]}, "these are 2 words, and there are 3 actions, -1 to 1"),
    ],
)
def test_what_cannot_be_played_is_refused_at_start(id: str, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GymnasiumEnvironment(id, **settings)
    assert Counts.open == Shaped.open == 0, "it was left open"


def test_a_missing_package_of_an_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(BackendError, match=r"'LunarLander-v3' needs a package.*gymnasium\[box2d\]"):
        GymnasiumEnvironment("LunarLander-v3")


@pytest.mark.all
def test_without_gymnasium_everything_else_imports() -> None:
    program = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from lit_rl.environments import GymnasiumEnvironment, gymnasium_environment, text_game\n"
        "try: GymnasiumEnvironment('FrozenLake-v1')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "BackendError env=gymnasium needs the package gymnasium: pip install 'lit-rl[gymnasium]'."
    )


# ------------------------------------------------------------------ what is left behind


def test_every_environment_is_closed() -> None:
    interaction = texts(GymnasiumEnvironment(COUNTS, max_turns=2))
    assert Counts.open == 0
    talk = Talk(interaction, asked("a", "b"), [1, 2])
    assert Counts.open == 2
    talk.heard(0, "1")
    talk.over()
    assert Counts.open == 0, "one was in the middle of its game, and one had not begun"


def test_nothing_is_warned_of_and_no_global_generator_moves() -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env in (lake(), lake(observation="render"), GymnasiumEnvironment("Blackjack-v1")):
            one(texts(env), "0", "1", prompt="")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr]


# ------------------------------------------------------------------ random play


def test_random_play_is_the_game_as_it_is_read() -> None:
    """Each row's prompt is what the policy would have read, had it written the same actions."""
    task = RandomPlay("FrozenLake-v1", "lake ", options=DRY, actions=WAYS, games=30, turns=5, seed=2)
    rows = task.train()
    assert rows == task.train() and not task.val()
    assert {row["completion"] for row in rows} == set(WAYS)
    games: list[list[dict[str, Any]]] = []
    for row in rows:
        games += [[]] if row["prompt"] == "lake 0" else []
        games[-1].append(row)
    assert len(games) == 30 and max(map(len, games)) == 5
    for game in games[:8]:
        talk = Talk(texts(lake(actions=WAYS)), asked("lake "), [0])
        text = "lake 0"
        for row in game:
            assert row["prompt"] == text
            text += f"{row['completion']}<|im_end|>{talk.heard(0, row['completion'])}"
        talk.over()
