"""A gymnasium environment as text: actions read from a turn, observations written out, terminal colours as words.

Worker processes load this file too: it needs numpy, and no PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lit_rl.core.errors import ConfigError, excerpt
from lit_rl.core.user_functions import load_source

_CODES = re.compile(r"\x1b\[([0-9;]*)m")
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_FIRST_CODES = (30, 40, 90, 100)
"""First codes of eight colours each, for text and background, dark and bright (ECMA-48, SGR)."""


def colours_as_words(text: str) -> str:
    """Put coloured text into brackets with the colour's name: ``[red S]FFF`` of FrozenLake's map.

    Environments that render with ``render_mode="ansi"`` tell by colour alone where one is.
    """
    described, colours = "", list[str]()
    for number, part in enumerate(_CODES.split(text)):
        if number % 2 == 0:
            described += f"[{' '.join(colours)} {part}]" if colours and part else part
            continue
        for code in part.split(";"):  # 0 or no code ends all colours; bold and the like are ignored
            value = int(code or 0)
            first = next((first for first in _FIRST_CODES if first <= value < first + len(_NAMES)), None)
            if value == 0:
                colours = []
            elif first is not None:
                colours.append(_NAMES[value - first])
    return described


MAX_NUMBERS = 100
"""Numbers of an observation that is written out."""


class InvalidAction(Exception):
    """A turn is no action. The policy is answered with the text, which says what is one."""


class ActionReader(Protocol):
    """The interface of a reader of actions from the text of a turn."""

    def read(self, text: str) -> Any:
        """Return the action.

        Raises:
            InvalidAction: the text is none.
        """
        ...


class DiscreteReader:
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
        word = text.strip()
        if self._words:
            place = self._places.get(word.casefold(), -1)
        else:
            place = int(word) - self._first if re.fullmatch(r"-?[0-9]{1,18}", word) else -1
        if not 0 <= place < self._count:
            raise InvalidAction(f"write {self._allowed}")
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


class FunctionReader:
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
            raise InvalidAction(str(error) or "this is no action") from error
        if action is not None and self._space.shape:
            try:
                numbers = np.asarray(action)
                array = numbers.astype(self._space.dtype)
                action = array if np.allclose(array, numbers) else None
            except (TypeError, ValueError):  # it is no number, or the space's type cannot hold it
                action = None
        if action is None or not self._space.contains(action):
            raise InvalidAction(f"this is no action of {self._space}")
        return action


def make_action_reader(
    space: Any, words: Sequence[str], function: Callable[[str], Any] | None, who: str
) -> ActionReader:
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
            raise ConfigError(
                "env.actions and env.read are both set, and each of them decides how a turn becomes an action. Keep "
                "one."
            )
        return FunctionReader(function, space)
    if not isinstance(space, Discrete):
        raise ConfigError(
            f"env: the actions of {who} are {excerpt(str(space))}, and without help a turn is read as one of "
            "Discrete(n)'s only. Give a function from the text of a turn to an action: env.read=./file.py:function."
        )
    return DiscreteReader(space, words)


def default_renderer(space: Any) -> Callable[[Any], str] | None:
    """Return a function that writes observations of a space as text; None where there is no plain way.

    A number of `Discrete` as it is, `Text` too; the numbers of up to 100 places of `MultiDiscrete`, `MultiBinary` and
    `Box` with spaces between them and a line for each row, rounded to four digits; the parts of a `Tuple` of these with
    commas between them.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        return _format_number
    if isinstance(space, spaces.Tuple):
        parts = [default_renderer(part) for part in space.spaces]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or any(isinstance(part, spaces.Tuple) for part in space.spaces):
            return None
        return lambda observed: ", ".join(show(part) for show, part in zip(known, observed, strict=True))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        if len(space.shape) > 2 or np.prod(space.shape) > MAX_NUMBERS:
            return None
        return lambda observed: "\n".join(
            " ".join(map(_format_number, row)) for row in np.atleast_2d(np.asarray(observed))
        )
    return None


def _format_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(int(value))


Renderer = Callable[[Any, Any], str]
"""The environment and its observation as the text that the policy reads."""
FunctionPath = tuple[str, bytes | None, str]
"""The path of a function: its file or module, the file's text, its name."""


class TextGame:
    """An environment of gymnasium whose actions and observations are texts.

    Args:
        made: The environment.
        actions: Reader of actions from the text of a turn.
        show: Function that writes an observation as text.
    """

    def __init__(self, made: Any, actions: ActionReader, show: Renderer) -> None:
        self._made, self._actions, self._show = made, actions, show

    def reset(self, *, seed: int) -> str:
        """Return the first observation."""
        observation, _ = self._made.reset(seed=seed)
        return self._show(self._made, observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Return gymnasium's five values. An invalid action is answered with the valid ones, and the environment stays
        as it is: the turn is worth 0, and counts."""
        try:
            chosen = self._actions.read(action)
        except InvalidAction as error:
            return f"error: {error}", 0.0, False, False, {}
        observation, reward, terminated, truncated, info = self._made.step(chosen)
        return self._show(self._made, observation), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment."""
        self._made.close()


def made_in_worker(
    id: str,
    options: Mapping[str, Any],
    words: Sequence[str],
    *,
    rendered: bool,
    read: FunctionPath | None,
    show: FunctionPath | None,
) -> TextGame:
    """Make an environment in a worker, from settings that were checked in the training process."""
    import gymnasium

    made = gymnasium.make(id, **options)
    actions = make_action_reader(made.action_space, words, _load_function(read), repr(id))
    return TextGame(made, actions, render_as_text if rendered else make_renderer(made, _load_function(show), id))


def make_renderer(made: Any, function: Callable[[Any], str] | None, name: str) -> Renderer:
    """Return the function that writes observations as text.

    Args:
        made: The environment.
        function: Function of the user, `env.show`.
        name: Name of the environment, for messages.

    Raises:
        ConfigError: nothing says how.
    """
    show = function or default_renderer(made.observation_space)
    if show is None:
        raise ConfigError(
            f"env: the observations of {name!r} are {excerpt(str(made.observation_space))}, which have no "
            "plain text. Give a function from an observation to a text, env.show=./file.py:function"
            f"{', or take env.observation=render' if 'ansi' in render_modes(made) else ''}."
        )
    return lambda _, observed: show(observed)


def render_as_text(made: Any, observation: Any) -> str:
    """Return the environment's rendering as text, colours as words."""
    return colours_as_words(made.render()).strip("\n")


def render_modes(made: Any) -> Sequence[str]:
    """Return the modes that an environment can render."""
    return made.metadata.get("render_modes") or ()


def _load_function(place: FunctionPath | None) -> Callable[..., Any] | None:
    return None if place is None else getattr(load_source(*place[:2]), place[2])
