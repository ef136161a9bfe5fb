"""A class of the user's that is an environment: what it has, found out once, and how its methods are called.

It needs a method ``reset``, and either ``step(action)`` or public methods that are tools. ``get_reward()`` and
``close()`` are optional. Any of them may be ``async def``.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lit_rl.data.checks import excerpt
from lit_rl.environments.base import Opening
from lit_rl.environments.observations import as_text, content_of, shows, writable
from lit_rl.environments.tools import Toolbox
from lit_rl.errors import ConfigError, RewardError, one_of, with_its_line
from lit_rl.process_state import process_kept, raised_by_itself
from lit_rl.rewards.execution.event_loops import BackgroundLoop
from lit_rl.rollout import Message

Style = Literal["auto", "step", "tools"]
STYLES = ("auto", "step", "tools")

_OURS = ("reset", "get_reward", "close")
_NO_TOOLS = (*_OURS, "step", "render", "seed")
"""Methods that gymnasium's environments have too, and that no policy calls."""


_LOOKED_AT = BackgroundLoop("lit_rl-environments-looked-at")
"""Closes the objects that are only looked at, which may have to be awaited."""


class UserClass:
    """A class of the user's, and what was found of it.

    Args:
        make: The class, or a function without arguments that gives a new object.
        name: Name in messages.
        style: ``step``: the text of a turn is given to ``step``. ``tools``: public methods are called as tools, one
            named ``step`` too. ``auto``: ``step`` where there is such a method, else ``tools``.

    Raises:
        ConfigError: an object cannot be made; it has no ``reset``, or neither ``step`` nor tools, or both; or the
            function gives the same object twice.
    """

    def __init__(self, make: Callable[[], Any], name: str, style: Style = "auto") -> None:
        one_of("env.style", style, STYLES)
        self.make, self.name = make, name
        with process_kept(f"env: {name}"):
            first, second = self._made(), self._made()
        if second is first:
            raise ConfigError(
                f"env: {name} returned the same object twice, and episodes that go on at the same time would share it. "
                "Return a new object at each call."
            )
        if not callable(getattr(first, "reset", None)):
            raise ConfigError(
                f"env: {name} makes a {type(first).__name__}, which has no method reset. An environment has "
                "reset(self, *, seed=None, **row) and either step(self, action) or methods that are tools."
            )
        public = _public_methods(first)
        has_step = callable(getattr(first, "step", None))
        self.style = self._style(style, public, has_step=has_step)
        self.reads_seed, self._reset_names = _parameters(first.reset)
        self.toolbox = None
        if self.style == "tools":
            names = [*public, "step"] if has_step else public
            self.toolbox = Toolbox([getattr(first, method) for method in sorted(names)])
        self.gives_reward = self.style == "step" or callable(getattr(first, "get_reward", None))
        named = {method: getattr(first, method, None) for method in (*_OURS, "step", *public)}
        self.methods = [name for name, method in named.items() if callable(method)]
        self.is_async = any(inspect.iscoroutinefunction(method) for method in named.values())
        for made in (first, second):
            with contextlib.suppress(Exception):  # it was never reset
                _LOOKED_AT.wait(closed(made))

    def _made(self) -> Any:
        try:
            return self.make()
        except BaseException as error:
            if not raised_by_itself(error):
                raise
            raise ConfigError(
                f"env: {self.name}() raised {with_its_line(error)}. It is called without arguments."
            ) from error

    def _style(self, style: Style, public: Sequence[str], *, has_step: bool) -> Style:
        if style == "step" and not has_step:
            raise ConfigError(f"env.style=step, and {self.name} has no method step(self, action).")
        if style == "tools" or not has_step:
            if not public and not has_step:
                raise ConfigError(
                    f"env: {self.name} has neither step(self, action) nor a public method that could be a tool."
                )
            return "tools"
        if public and style == "auto":
            raise ConfigError(
                f"env: {self.name} has step(self, action) and the public methods {', '.join(public)}, which could be "
                "tools. Say which it is: env.style=step gives each turn to step, env.style=tools makes all of them "
                "tools, step too."
            )
        return "step"

    def check_columns(self, columns: Sequence[str]) -> None:
        """Refuse data whose rows ``reset`` cannot be called with.

        Raises:
            ConfigError: ``reset`` needs what is no column, or a column is called ``seed``.
        """
        if "seed" in columns:
            raise ConfigError(
                "The data has a column 'seed', and reset(seed=...) gets the seed of the episode: rename it, "
                "data.rename={seed:seed_column}."
            )
        if self._reset_names is None:
            return
        for name, required in self._reset_names.items():
            if required and name not in (*columns, "prompt", "seed"):
                raise ConfigError(
                    f"env: {self.name}.reset needs the argument {name!r}, which is no column of the data. Columns: "
                    f"{', '.join(columns) or 'none'}, and prompt."
                )

    def arguments(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``reset``: those columns of the row, and the seed, that it names."""
        offered = {**row, "seed": seed} if self.reads_seed else dict(row)
        if self._reset_names is None:
            return offered
        return {name: value for name, value in offered.items() if name in self._reset_names}

    def tools_of(self, made: Any) -> Toolbox | None:
        """Return the tools of one object."""
        return None if self.toolbox is None else self.toolbox.of(made)


async def called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function, and await its result where that is awaitable."""
    result = function(*arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


def finite(reward: Any, who: str) -> float | None:
    """Return a reward that an environment gave, as a finite number, or None.

    Raises:
        RewardError: it is neither a finite number nor None.
    """
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"env: {who} gave the reward {excerpt(repr(reward))}, which is no number.") from error
    if not math.isfinite(number):
        raise RewardError(f"env: {who} gave the reward {number}, which is not finite. None says that there is none.")
    return number


def says_nothing(given: Any) -> bool:
    """Tell whether an environment gave nothing to read. A number is something, and so is an array of any length."""
    return given is None or (isinstance(given, str | list | tuple | dict) and not given)


def opening_of(returned: Any, who: str) -> Opening:
    """Return what an episode begins with, of what ``reset`` returned: text, images beside texts, messages, or nothing;
    all else as JSON.

    Raises:
        UnusableImage: an image is damaged, or too large.
        ConfigError: it can be none of these.
    """
    if shows(returned):
        return content_of(returned, f"env: {who}")
    if says_nothing(returned) and not isinstance(returned, tuple | dict):
        return None
    return checked_messages(returned, who) if isinstance(returned, list) else as_text(returned, who)


def checked_messages(messages: Sequence[Any], who: str, roles: Sequence[str] = ("system", "user")) -> list[Message]:
    """Return the messages after checking them.

    Raises:
        ImageReturned: one shows an image, and the policy reads text.
        UnusableImage: an image is damaged, or too large.
        ConfigError: one has another role, or no text.
    """
    found: list[Message] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        seen = shows(content)
        if seen:
            content = content_of(content, f"env: {who}")
        if not (isinstance(message, dict) and message.get("role") in roles and (seen or isinstance(content, str))):
            raise ConfigError(
                f"env: {who} returned the message {excerpt(repr(message))}; its messages have the role "
                f"{' or '.join(roles)}, and a text under 'content'."
            )
        found.append({**message, "content": writable(content) if isinstance(content, str) else content})
    return found


async def reward_of(made: Any, described: UserClass) -> float | None:
    """Return an object's reward of the whole episode; None where it has no ``get_reward``."""
    get: Callable[..., Any] | None = getattr(made, "get_reward", None)
    return None if get is None else finite(await called(get), f"{described.name}.get_reward")


async def closed(made: Any) -> None:
    """Close an object of the user's, where it can be closed."""
    if close := getattr(made, "close", None):
        await called(close)


def _public_methods(made: Any) -> list[str]:
    names = [name for name in dir(type(made)) if not name.startswith("_") and name not in _NO_TOOLS]
    return [name for name in names if inspect.isroutine(inspect.getattr_static(made, name))]


def _parameters(reset: Callable[..., Any]) -> tuple[bool, dict[str, bool] | None]:
    """Return whether ``reset`` names ``seed``, and its other arguments with whether each is required; None: any."""
    parameters = inspect.signature(reset).parameters.values()
    names = {
        each.name: each.default is each.empty
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return "seed" in names, None if takes_any else names
