"""Environments of the user's own: functions as tools (`env=tools`), and classes (`env=environment`).

A class needs a method ``reset``, and either ``step(action)``, which is called with the text of each turn, or public
methods that are tools. ``get_reward()`` and ``close()`` are optional. Any of them may be ``async def``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Message
from lit_rl.core.errors import ConfigError, RewardError, describe_error, did_you_mean, excerpt
from lit_rl.core.event_loops import BackgroundLoop
from lit_rl.core.process_state import is_raised_by_user_code, preserve_process_state
from lit_rl.core.user_functions import load_by_path
from lit_rl.environments.environment_base import Environment, Opening, Reply, Turn
from lit_rl.environments.environment_pool import Pool, target_of
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind, Functions
from lit_rl.environments.observations import as_text, content_of, replace_surrogates, shows_image
from lit_rl.environments.parser_base import BadCall, Parser
from lit_rl.environments.tools import FunctionTool, ToolAnswer, Toolbox, ToolCall

Style = Literal["auto", "step", "tools"]

_PROTOCOL_METHODS = ("reset", "get_reward", "close")
_NO_TOOLS = (*_PROTOCOL_METHODS, "step", "render", "seed")
"""Methods that gymnasium's environments have too, and that no policy calls."""


_PROBE_LOOP = BackgroundLoop("lit_rl-environments-looked-at")
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
        self.make, self.name = make, name
        with preserve_process_state(f"env: {name}"):
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
        public = [name for name in dir(type(first)) if not name.startswith("_") and name not in _NO_TOOLS]
        public = [name for name in public if inspect.isroutine(inspect.getattr_static(first, name))]
        has_step = callable(getattr(first, "step", None))
        self.style = self._choose_style(style, public, has_step=has_step)
        self.reads_seed, self._reset_names = _parameters(first.reset)
        self.toolbox = None
        if self.style == "tools":
            names = [*public, "step"] if has_step else public
            self.toolbox = Toolbox([getattr(first, method) for method in sorted(names)])
        self.gives_reward = self.style == "step" or callable(getattr(first, "get_reward", None))
        named = {method: getattr(first, method, None) for method in (*_PROTOCOL_METHODS, "step", *public)}
        self.methods = [name for name, method in named.items() if callable(method)]
        self.is_async = any(inspect.iscoroutinefunction(method) for method in named.values())
        for made in (first, second):
            with contextlib.suppress(Exception):  # it was never reset
                _PROBE_LOOP.wait(close_object(made))

    def _made(self) -> Any:
        try:
            return self.make()
        except BaseException as error:
            if not is_raised_by_user_code(error):
                raise
            raise ConfigError(
                f"env: {self.name}() raised {describe_error(error)}. It is called without arguments."
            ) from error

    def _choose_style(self, style: Style, public: Sequence[str], *, has_step: bool) -> Style:
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
                "The data has a column 'seed', but reset(seed=...) gets the seed of the episode. Rename the column: "
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


async def call_maybe_async(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function, and await its result where that is awaitable."""
    result = function(*arguments, **keywords)
    return await result if inspect.isawaitable(result) else result


def check_reward(reward: Any, who: str) -> float | None:
    """Return a reward that an environment gave, as a finite number, or None.

    Raises:
        RewardError: it is neither a finite number nor None.
    """
    if reward is None:
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"env: {who} returned the reward {excerpt(repr(reward))}, which is not a number. Return a number, or None "
            "for no reward."
        ) from error
    if not math.isfinite(number):
        raise RewardError(
            f"env: {who} returned the reward {number}, which is not finite. Return a finite number, or None for no "
            "reward."
        )
    return number


def is_empty_observation(given: Any) -> bool:
    """Tell whether an environment gave nothing to read. A number is something, and so is an array of any length."""
    return given is None or (isinstance(given, str | list | tuple | dict) and not given)


def parse_opening(returned: Any, who: str) -> Opening:
    """Return what an episode begins with, of what ``reset`` returned: text, images beside texts, messages, or nothing;
    all else as JSON.

    Raises:
        UnusableImage: an image is damaged, or too large.
        ConfigError: it can be none of these.
    """
    if shows_image(returned):
        return content_of(returned, f"env: {who}")
    if is_empty_observation(returned) and not isinstance(returned, tuple | dict):
        return None
    return check_messages(returned, who) if isinstance(returned, list) else as_text(returned, who)


def check_messages(messages: Sequence[Any], who: str, roles: Sequence[str] = ("system", "user")) -> list[Message]:
    """Return the messages after checking them.

    Raises:
        ImageReturned: one shows an image, and the policy reads text.
        UnusableImage: an image is damaged, or too large.
        ConfigError: one has another role, or no text.
    """
    found: list[Message] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        seen = shows_image(content)
        if seen:
            content = content_of(content, f"env: {who}")
        if not (isinstance(message, dict) and message.get("role") in roles and (seen or isinstance(content, str))):
            raise ConfigError(
                f"env: {who} returned the message {excerpt(repr(message))}. A message of an environment has the role "
                f"{' or '.join(roles)} and a text under 'content'."
            )
        found.append({**message, "content": replace_surrogates(content) if isinstance(content, str) else content})
    return found


async def episode_reward(made: Any, described: UserClass) -> float | None:
    """Return an object's reward of the whole episode; None where it has no ``get_reward``."""
    get: Callable[..., Any] | None = getattr(made, "get_reward", None)
    return None if get is None else check_reward(await call_maybe_async(get), f"{described.name}.get_reward")


async def close_object(made: Any) -> None:
    """Close an object of the user's, where it can be closed."""
    if close := getattr(made, "close", None):
        await call_maybe_async(close)


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


_FIVE = 5


class SteppedEnvironment(Environment):
    """An object of the user's whose ``step(action)`` gives gymnasium's five values. The observation, the first of them,
    is the user's next message.

    Args:
        made: The object.
        described: Description of its class.
    """

    def __init__(self, made: Any, described: UserClass) -> None:
        self._made, self._described = made, described
        self._turns = 0

    @property
    def user_object(self) -> Any:
        return self._made

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        opening = await call_maybe_async(self._made.reset, **self._described.arguments(seed, row))
        if isinstance(opening, tuple) and len(opening) == 2:  # gymnasium's: observation, info
            opening = opening[0]
        return parse_opening(opening, self._who("reset"))

    async def answer(self, turn: Turn) -> Reply:
        who = self._who("step")
        five = await call_maybe_async(self._made.step, turn.text)
        if not isinstance(five, Sequence) or len(five) != _FIVE:
            raise ConfigError(
                f"env: {who} returned {excerpt(repr(five))}, expected five values: observation, reward, terminated, "
                "truncated, info."
            )
        observation, reward, terminated, truncated, _ = five
        turn_number, self._turns = self._turns, self._turns + 1
        messages, over = _messages(observation, who), bool(terminated or truncated)
        return Reply(
            turn.message(turn.text),
            [message for message in messages if message["content"] or not over],
            end=("done" if terminated else "cut") if over else None,
            reward=check_reward(reward, f"{who} in turn {turn_number}"),
        )

    async def reward(self) -> float | None:
        return await episode_reward(self._made, self._described)

    async def close(self) -> None:
        await close_object(self._made)

    def _who(self, method: str) -> str:
        return f"{self._described.name}.{method}"


def _messages(observation: Any, who: str) -> list[Message]:
    if shows_image(observation):
        return [{"role": "user", "content": content_of(observation, f"env: {who}")}]
    if not isinstance(observation, list) or not observation:
        return [{"role": "user", "content": "" if is_empty_observation(observation) else as_text(observation, who)}]
    return check_messages(observation, who, roles=("user",))


_ID = re.compile(r"[A-Za-z0-9]{9}")
"""An id as Mistral's templates demand it. In other templates it is of no use."""


class ToolEnvironment(Environment):
    """A turn without a call is the final answer; every call of a turn is answered, in the order of the calls. Async
    tools that one turn calls run at the same time.

    Args:
        toolbox: Tools that may be called.
        parser: Reads the calls.
    """

    def __init__(self, toolbox: Toolbox, parser: Parser) -> None:
        self._toolbox, self._parser = toolbox, parser

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        return None

    async def answer(self, turn: Turn) -> Reply:
        parsed = self._parser.parse(turn.written)
        if not parsed.calls:
            return Reply(turn.message(turn.text), end="cut" if turn.cut else "answered")
        answers = await self._answers(parsed.calls)
        # The policy's turn with its calls as templates expect them; an unreadable one is text.
        unread = "".join(call.text for call in parsed.calls if isinstance(call, BadCall))
        message, written = turn.message(parsed.content + unread), list[Message]()
        for call in parsed.calls:
            if isinstance(call, ToolCall):
                function = {"name": call.name, "arguments": dict(call.arguments)}
                written.append(
                    {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}
                )
        return Reply(
            message | {"tool_calls": written} if written else message,
            [self._message(call, answer) for call, answer in zip(parsed.calls, answers, strict=True)],
            calls=len(answers),
            failed_calls=sum(answer.failed for answer in answers),
            unreadable_calls=sum(isinstance(call, BadCall) for call in parsed.calls),
        )

    async def _answers(self, calls: Sequence[ToolCall | BadCall]) -> list[ToolAnswer]:
        """Return the replies in the order of the calls. Async tools run at the same time."""
        if not self._toolbox.is_async:
            return [await self._answer(call) for call in calls]
        begun = [asyncio.ensure_future(self._answer(call)) for call in calls]
        try:
            return list(await asyncio.gather(*begun))
        finally:
            for each in begun:  # one raised, or the time is over
                each.cancel()

    async def _answer(self, call: ToolCall | BadCall) -> ToolAnswer:
        if isinstance(call, BadCall):
            return ToolAnswer(f"error: {call.why}", failed=True)
        return await self._toolbox.answer(call)

    def _message(self, call: ToolCall | BadCall, answer: ToolAnswer) -> Message:
        """Return the reply as templates expect it. Names and ids that the policy made up are left out."""
        name, id_ = ("unknown", None) if isinstance(call, BadCall) else (call.name, call.id)
        known = name if name in self._toolbox.tools else "unknown"
        message: Message = {"role": "tool", "name": known, "content": answer.content}
        return message | {"tool_call_id": id_} if id_ and _ID.fullmatch(id_) else message


class ToolMethodsEnvironment(ToolEnvironment):
    """A `ToolEnvironment` whose tools are methods of a user's object, which begins the episode and may reward it.

    Args:
        made: The object.
        described: Description of its class.
        toolbox: Its methods, and other tools that may be called.
        parser: Reads the calls.
    """

    def __init__(self, made: Any, described: UserClass, toolbox: Toolbox, parser: Parser) -> None:
        super().__init__(toolbox, parser)
        self._made, self._described = made, described

    @property
    def user_object(self) -> Any:
        return self._made

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        arguments = self._described.arguments(seed, row)
        return parse_opening(await call_maybe_async(self._made.reset, **arguments), f"{self._described.name}.reset")

    async def reward(self) -> float | None:
        return await episode_reward(self._made, self._described)

    async def close(self) -> None:
        await close_object(self._made)


class FunctionTools(EnvironmentFactory):
    """Functions as tools: a turn that calls none is the answer.

    Args:
        functions: Typed functions with a Google docstring, sync or async, or their paths, ``package.module:name`` or
            ``./file.py:name``.
        limits: Further arguments of `EnvironmentFactory`.

    Raises:
        ConfigError: no function, two of one name, or one that cannot be described to the policy.
    """

    def __init__(self, functions: Functions, **limits: Any) -> None:
        super().__init__(**limits)
        self._kinds = {"tools": ToolsKind(make_toolbox(functions, "env.functions", self.pool))}

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds


class ToolsKind(EnvironmentKind):
    """Tools, and nothing beside them."""

    has_state = False

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox, self.is_async = toolbox, toolbox.is_async

    def make(self, parser: Parser | None) -> Environment:
        assert self.toolbox is not None and parser is not None
        return ToolEnvironment(self.toolbox, parser)


def make_toolbox(functions: Functions, key: str, pool: Pool | None = None) -> Toolbox:
    """Return the tools that functions or their paths stand for.

    Args:
        functions: Functions of the user.
        key: Name of the setting, for messages.
        pool: Pool of the workers that run them; None: they run in this process.

    Raises:
        ConfigError: see `Toolbox`; or a function is to run in a worker and was given as an object.
    """
    listed = [functions] if isinstance(functions, str) or callable(functions) else functions
    if not isinstance(listed, Iterable) or isinstance(listed, Mapping):
        raise ConfigError(f"{key}={functions!r:.80}: give a function, its path, or a list of these.")
    if pool is None:
        return Toolbox([load_by_path(each, key).value if isinstance(each, str) else each for each in listed])
    tools = []
    for each in listed:
        named, target = target_of(each, key)
        tools.append(FunctionTool(named.value).by(pool.function(target)))
    return Toolbox(tools)


ENVIRONMENT_COLUMN = "environment"
"""The column of the data that names a row's environment class, where there are several."""

EnvironmentLike = str | Callable[[], Any]
"""A class, a function that makes an object, or the path of one."""


@checked("env")
class CustomEnvironment(EnvironmentFactory):
    """A class of your own, of which every episode gets a new object.

    It has ``reset(self, *, seed, **row)``, which is given the columns of the row and the seed as far as it names them
    and may return a text for the end of the prompt; and either ``step(self, action)``, which is given the text of each
    turn and returns gymnasium's five values, or public methods, which are tools. ``get_reward(self)`` and
    ``close(self)`` are optional, and any of them may be ``async def``.

    Args:
        path: ``package.module:Name`` or ``./file.py:Name``; in Python also the class itself, or a function that makes
            an object. Several are given by name, and a row's column ``environment`` says which is its own.
        style: ``step``, ``tools``, or ``auto``: ``step`` where there is such a method.
        functions: Tools beside the methods of the class, as `FunctionTools` takes them.
        limits: Further arguments of `EnvironmentFactory`.

    Raises:
        ConfigError: there is no such class, it is no environment, or its tools cannot be described.
    """

    has_objects = True

    def __init__(
        self,
        path: EnvironmentLike | Mapping[str, EnvironmentLike],
        *,
        style: Style = "auto",
        functions: Functions = (),
        **limits: Any,
    ) -> None:
        super().__init__(**limits)
        self._several = isinstance(path, Mapping)
        named: Mapping[str, EnvironmentLike] = path if isinstance(path, Mapping) else {"environment": path}
        if not named:
            raise ConfigError("env.path is empty: give package.module:Name or ./file.py:Name.")
        self._kinds = {
            name: _UserClassKind(_user_class(each, style, self.pool), functions, self.pool)
            for name, each in named.items()
        }

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds

    def kind_of(self, row: Mapping[str, Any]) -> str:
        if not self._several:
            return super().kind_of(row)
        name = row.get(ENVIRONMENT_COLUMN)
        if name not in self._kinds:
            raise ConfigError(
                f"The column {ENVIRONMENT_COLUMN!r} of a row is {name!r}, but env.path has {', '.join(self._kinds)}."
                f"{did_you_mean(str(name), self._kinds)}"
            )
        return str(name)

    def check_columns(self, columns: Mapping[str, Sequence[Any]] | Sequence[str]) -> None:
        super().check_columns(columns)
        if self._several and ENVIRONMENT_COLUMN not in columns:
            raise ConfigError(
                f"env.path names several environments ({', '.join(self._kinds)}), and the data has no column "
                f"{ENVIRONMENT_COLUMN!r} that says which one a row is for. Columns: {', '.join(columns) or 'none'}."
            )
        if self._several and isinstance(columns, Mapping):
            for name in dict.fromkeys(columns[ENVIRONMENT_COLUMN]):
                self.kind_of({ENVIRONMENT_COLUMN: name})


class _UserClassKind(EnvironmentKind):
    """One class, and functions beside its methods."""

    opens = True

    def __init__(self, described: UserClass, functions: Functions, pool: Pool | None) -> None:
        self._described = described
        self.gives_reward = described.gives_reward
        beside = make_toolbox(functions, "env.functions", pool) if functions else None
        if described.toolbox is None and beside is not None:
            raise ConfigError(
                f"env.functions gives tools, but {described.name} is stepped with the text of each turn, and no "
                "tool is ever called. Leave env.functions out, or set env.style=tools."
            )
        self._beside = beside
        self.toolbox = described.toolbox
        if described.toolbox is not None and beside is not None:
            self.toolbox = described.toolbox.beside(beside)
        self.is_async = described.is_async or (beside is not None and beside.is_async)

    def make(self, parser: Parser | None) -> Environment:
        made = self._described.make()
        if self._described.toolbox is None:
            return SteppedEnvironment(made, self._described)
        assert parser is not None
        toolbox = self._described.toolbox.of(made)
        toolbox = toolbox if self._beside is None else toolbox.beside(self._beside)
        return ToolMethodsEnvironment(made, self._described, toolbox, parser)

    def check_columns(self, columns: Sequence[str]) -> None:
        self._described.check_columns(columns)


def _user_class(made: EnvironmentLike, style: Style, pool: Pool | None) -> UserClass:
    if pool is not None:
        named, target = target_of(made, "env.path")
        described = UserClass(named.value, named.name, style)
        described.make = pool.objects(target, described.methods)
        return described
    if isinstance(made, str):
        named = load_by_path(made, "env.path")
        return UserClass(named.value, named.name, style)
    return UserClass(made, getattr(made, "__name__", type(made).__name__), style)
