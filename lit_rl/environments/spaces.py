"""Gymnasium's spaces and text: what the policy writes for an action, and how it reads an observation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from lit_rl.data.checks import excerpt
from lit_rl.errors import ConfigError

LARGEST = 100
"""Numbers of an observation that is written out."""


class NoAction(Exception):
    """A turn is no action. The policy is answered with the text, which says what is one."""


class Actions(Protocol):
    """The interface of a reader of actions from the text of a turn."""

    def read(self, text: str) -> Any:
        """Return the action.

        Raises:
            NoAction: the text is none.
        """
        ...


class Choice:
    """An action of a `Discrete` space: its number, or a word that stands for it.

    Args:
        space: The space.
        words: One for each number, in their order; none: the number itself is written. Case is ignored.

    Raises:
        ConfigError: there are more or fewer words than numbers, or one is empty, no text, or there twice.
    """

    def __init__(self, space: Any, words: Sequence[str] = ()) -> None:
        self._first, self._count = int(space.start), int(space.n)
        self._words = tuple(words)
        if self._words:
            self._check()
        self._places = {word.casefold(): place for place, word in enumerate(self._words)}

    def _check(self) -> None:
        listed = f"env.actions={list(self._words)}"
        if len(self._words) != self._count:
            raise ConfigError(
                f"{listed}: these are {len(self._words)} words, and there are {self._count} actions, {self._first} to "
                f"{self._first + self._count - 1}. Give a word for each, in this order."
            )
        for word in self._words:
            if not isinstance(word, str) or not word or word != word.strip():
                raise ConfigError(
                    f"{listed}: {word!r} is no word. Give texts without spaces around them; in YAML, quote words such "
                    "as 'yes', 'on' and '1'."
                )
        if len({word.casefold() for word in self._words}) < self._count:
            raise ConfigError(f"{listed}: a word is there twice, where capitals do not matter. Give each its own.")

    def read(self, text: str) -> int:
        """Return the action that a text names, spaces around it aside."""
        said = text.strip()
        if self._words:
            place = self._places.get(said.casefold(), -1)
        else:
            place = int(said) - self._first if re.fullmatch(r"-?[0-9]{1,18}", said) else -1
        if not 0 <= place < self._count:
            raise NoAction(f"write {self._allowed}")
        return self._first + place

    def write(self, place: int) -> str:
        """Return the text of an action, by its index, 0 for the first."""
        return self._words[place] if self._words else str(self._first + place)

    @property
    def count(self) -> int:
        """Number of actions."""
        return self._count

    @property
    def _allowed(self) -> str:
        if not self._words:
            return f"{self._first} to {self._first + self._count - 1}"
        *others, last = self._words
        return f"{', '.join(others)} or {last}" if others else last


class ReadByFunction:
    """An action that a function of the user's makes of a text.

    Args:
        function: Text to action. Where it raises `ValueError` or gives None or what is not in the space, the turn is
            no action; the policy reads what the error says. Lists of numbers become arrays.
        space: The space.
    """

    def __init__(self, function: Callable[[str], Any], space: Any) -> None:
        self._function, self._space = function, space

    def read(self, text: str) -> Any:
        """Return the action."""
        try:
            action = self._function(text)
        except ValueError as error:
            raise NoAction(str(error) or "this is no action") from error
        if action is not None and self._space.shape:
            action = self._as_array(action)
        if action is None or not self._space.contains(action):
            raise NoAction(f"this is no action of {self._space}")
        return action

    def _as_array(self, action: Any) -> Any:
        """Return the numbers as an array of the space; None where they are none, or cannot be held."""
        try:
            given = np.asarray(action)
            array = given.astype(self._space.dtype)
            return array if np.allclose(array, given) else None
        except (TypeError, ValueError):
            return None


def actions_of(space: Any, words: Sequence[str], function: Callable[[str], Any] | None, who: str) -> Actions:
    """Return the reader of actions.

    Args:
        space: Space of the actions.
        words: Words for the actions of a `Discrete` space, `env.actions`.
        function: Function of the user, `env.read`.
        who: The environment, for messages.

    Raises:
        ConfigError: nothing says how, or two things do.
    """
    from gymnasium.spaces import Discrete

    if function is not None:
        if words:
            raise ConfigError("env.actions and env.read are both given, and either says how a turn becomes an action.")
        return ReadByFunction(function, space)
    if not isinstance(space, Discrete):
        raise ConfigError(
            f"env: the actions of {who} are {excerpt(str(space))}, and without help a turn is read as one of "
            "Discrete(n)'s only. Give a function from the text of a turn to an action: env.read=./file.py:function."
        )
    return Choice(space, words)


def shown_by_default(space: Any) -> Callable[[Any], str] | None:
    """Return a function that writes observations of a space as text; None where there is no plain way.

    A number of `Discrete` as it is, `Text` too; the numbers of up to 100 places of `MultiDiscrete`, `MultiBinary` and
    `Box` with spaces between them and a line for each row, rounded to four digits; the parts of a `Tuple` of these with
    commas between them.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        return _number
    if isinstance(space, spaces.Tuple):
        parts = [shown_by_default(part) for part in space.spaces]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or any(isinstance(part, spaces.Tuple) for part in space.spaces):
            return None
        return lambda observed: ", ".join(show(part) for show, part in zip(known, observed, strict=True))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        return _rows if len(space.shape) <= 2 and np.prod(space.shape) <= LARGEST else None
    return None


def _rows(observed: Any) -> str:
    array = np.asarray(observed)
    return "\n".join(" ".join(map(_number, row)) for row in np.atleast_2d(array))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(int(value))
