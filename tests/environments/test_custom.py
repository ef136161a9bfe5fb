"""`env=tools` and `env=environment`: what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.environments import CustomEnvironment
from lit_rl.environments.games import GuessDemonstrations
from lit_rl.environments.user_environments import _messages, check_reward, parse_opening


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a


class Game:
    def reset(self, seed: int, level: int = 1) -> None: ...

    def step(self, action: str) -> tuple[Any, ...]:
        return "", 0.0, True, False, {}


class Both(Game):
    def look(self) -> str:
        """Look around."""
        return "a wall"


class NoReset:
    def step(self, action: str) -> None: ...


class Nothing:
    def reset(self) -> None: ...


class Needs:
    def __init__(self, board: str) -> None: ...

    def reset(self) -> None: ...


class NeedsColumn(Nothing):
    def reset(self, board: str) -> None:  # type: ignore[override]
        ...

    def look(self) -> str:
        """Look around."""
        return ""


SHARED = Game()


class Single(Game):
    def __new__(cls) -> Game:  # type: ignore[misc]
        return SHARED


class Opened(Game):
    open = 0

    def __init__(self) -> None:
        type(self).open += 1

    async def close(self) -> None:
        type(self).open -= 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CustomEnvironment(NoReset), "NoReset, which has no method reset"),
        (lambda: CustomEnvironment(Both), "step.* and the public methods look.*env.style=step"),
        (lambda: CustomEnvironment(Nothing), "neither step"),
        (lambda: CustomEnvironment(Nothing, style="step"), "env.style=step, and Nothing has no method step"),
        (lambda: CustomEnvironment(Needs), "Needs.. raised TypeError.*without arguments"),
        (lambda: CustomEnvironment(lambda: SHARED), "returned the same object twice"),
        (lambda: CustomEnvironment(Single), "returned the same object twice"),
        (lambda: CustomEnvironment(Game, functions=[double]), "env.functions gives tools, but Game is stepped"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_column_that_an_environment_needs_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match="'board', .*Columns: level"):
        CustomEnvironment(NeedsColumn).check_columns(["level"])


def test_data_that_fits_is_not() -> None:
    CustomEnvironment(Game).check_columns(["level", "other"])
    CustomEnvironment(NeedsColumn).check_columns(["board"])
    CustomEnvironment({"a": Game}).check_columns({"environment": ["a"]})


def test_a_class_and_its_tools_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(
        "class Shop:\n    def reset(self): ...\n    def buy(self, name: str) -> str:\n"
        '        """Buy.\n\n        Args:\n            name: What.\n        """\n        return name\n\n\n'
        'def double(a: int) -> int:\n    """Double.\n\n    Args:\n        a: What.\n    """\n    return 2 * a\n'
    )
    factory = CustomEnvironment("./shop.py:Shop", functions=["./shop.py:double"])
    (kind,) = factory.kinds.values()
    assert kind.toolbox is not None and set(kind.toolbox.tools) == {"buy", "double"}
    assert not factory.gives_reward and not factory.is_async
    with pytest.raises(ConfigError, match=r"env.path='./shop.py:Shpo'.*Did you mean 'Shop'"):
        CustomEnvironment("./shop.py:Shpo")


def test_every_public_method_is_a_tool_where_that_is_asked_for() -> None:
    class Steps(Both):
        def step(self, action: str) -> str:  # type: ignore[override]
            """Take a step.

            Args:
                action: Where.
            """
            return action

    (kind,) = CustomEnvironment(Steps, style="tools").kinds.values()
    assert kind.toolbox is not None and set(kind.toolbox.tools) == {"look", "step"}


def test_demonstrations_follow_the_hints() -> None:
    rows = GuessDemonstrations(games=200).train()
    assert rows == GuessDemonstrations(games=200).train()
    starts = [row for row in rows if row["prompt"] == "0..9="]
    assert len(starts) == 200 and len(rows) > 400
    for row in rows:
        low, high, parts = 0, 9, row["prompt"].removeprefix("0..9=").replace("<|im_end|>", "").split("=")
        for part in filter(None, parts):
            guess, hint = int(part[:-1]), part[-1]
            low, high = (guess + 1, high) if hint == ">" else (low, guess - 1)
        assert low <= int(row["completion"]) <= high


def test_the_objects_that_are_looked_at_are_closed() -> None:
    CustomEnvironment(Opened)
    CustomEnvironment(lambda: Opened())
    assert Opened.open == 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (np.arange(3), "[0, 1, 2]"),
        (np.zeros(0), "[]"),
        (np.float32(0), "0.0"),
        (torch.tensor([True, False]), "[true, false]"),
        (0, "0"),
        (None, ""),
        ("", ""),
        ({}, ""),
    ],
)
def test_an_observation_may_be_an_array(given: Any, text: str) -> None:
    """Seen as `The truth value of an array with more than one element is ambiguous`, in every episode."""
    (message,) = _messages(given, "Mine.step")
    assert message == {"role": "user", "content": text}
    if text:
        assert parse_opening(given, "Mine.reset") == text


def test_a_reward_beyond_floats_is_no_number() -> None:
    with pytest.raises(RewardError, match=r"Mine\.step returned the reward 1000"):
        check_reward(10**400, "Mine.step")
