"""An environment of gymnasium as texts. Workers load this file too: it needs numpy, and no PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.data.checks import excerpt
from lit_rl.environments.colours import colours_as_words
from lit_rl.environments.spaces import Actions, NoAction, actions_of, shown_by_default
from lit_rl.errors import ConfigError
from lit_rl.import_source import load

Show = Callable[[Any, Any], str]
"""The environment and its observation as the text that the policy reads."""
Place = tuple[str, bytes | None, str]
"""The path of a function: its file or module, the file's text, its name."""


class TextGame:
    """An environment of gymnasium whose actions and observations are texts.

    Args:
        made: The environment.
        actions: Reader of actions from the text of a turn.
        show: Function that writes an observation as text.
    """

    def __init__(self, made: Any, actions: Actions, show: Show) -> None:
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
        except NoAction as error:
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
    read: Place | None,
    show: Place | None,
) -> TextGame:
    """Make an environment in a worker, from settings that were checked in the training process."""
    import gymnasium

    made = gymnasium.make(id, **options)
    actions = actions_of(made.action_space, words, _function(read), repr(id))
    return TextGame(made, actions, show_rendered if rendered else shown_by(made, _function(show), id))


def shown_by(made: Any, function: Callable[[Any], str] | None, name: str) -> Show:
    """Return the function that writes observations as text.

    Args:
        made: The environment.
        function: Function of the user, `env.show`.
        name: Name of the environment, for messages.

    Raises:
        ConfigError: nothing says how.
    """
    show = function or shown_by_default(made.observation_space)
    if show is None:
        raise ConfigError(
            f"env: the observations of {name!r} are {excerpt(str(made.observation_space))}, which have no "
            "plain text. Give a function from an observation to a text, env.show=./file.py:function"
            f"{', or take env.observation=render' if 'ansi' in render_modes(made) else ''}."
        )
    return lambda _, observed: show(observed)


def show_rendered(made: Any, observation: Any) -> str:
    """Return the environment's rendering as text, colours as words."""
    return colours_as_words(made.render()).strip("\n")


def render_modes(made: Any) -> Sequence[str]:
    """Return the modes that an environment can render."""
    return made.metadata.get("render_modes") or ()


def _function(place: Place | None) -> Callable[..., Any] | None:
    return None if place is None else getattr(load(*place[:2]), place[2])
