"""`env=environment`: classes of the user's, stepped with each turn or called as tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.by_path import named_by
from lit_rl.environments.base import Environment
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind, Functions
from lit_rl.environments.function_tools import toolbox_of
from lit_rl.environments.parsers import Parser
from lit_rl.environments.pool import Pool, target_of
from lit_rl.environments.user_class import Style, UserClass
from lit_rl.environments.with_steps import ObjectWithSteps
from lit_rl.environments.with_tools import ObjectWithTools
from lit_rl.errors import ConfigError, did_you_mean

COLUMN = "environment"
"""The column of the data that names a row's environment class, where there are several."""

Made = str | Callable[[], Any]
"""A class, a function that makes an object, or the path of one."""


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

    def __init__(
        self, path: Made | Mapping[str, Made], *, style: Style = "auto", functions: Functions = (), **limits: Any
    ) -> None:
        super().__init__(**limits)
        self._several = isinstance(path, Mapping)
        named: Mapping[str, Made] = path if isinstance(path, Mapping) else {"environment": path}
        if not named:
            raise ConfigError("env.path is empty: give package.module:Name or ./file.py:Name.")
        self._kinds = {
            name: _Class(_user_class(each, style, self.pool), functions, self.pool) for name, each in named.items()
        }

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds

    def kind_of(self, row: Mapping[str, Any]) -> str:
        if not self._several:
            return super().kind_of(row)
        name = row.get(COLUMN)
        if name not in self._kinds:
            raise ConfigError(
                f"A row's {COLUMN} is {name!r}, and env.path has {', '.join(self._kinds)}."
                f"{did_you_mean(str(name), self._kinds)}"
            )
        return str(name)

    def check_columns(self, columns: Mapping[str, Sequence[Any]] | Sequence[str]) -> None:
        super().check_columns(columns)
        if self._several and COLUMN not in columns:
            raise ConfigError(
                f"env.path names several environments ({', '.join(self._kinds)}), and the data has no column "
                f"{COLUMN!r} that says which one a row is for. Columns: {', '.join(columns) or 'none'}."
            )
        if self._several and isinstance(columns, Mapping):
            for name in dict.fromkeys(columns[COLUMN]):
                self.kind_of({COLUMN: name})


class _Class(EnvironmentKind):
    """One class, and functions beside its methods."""

    opens = True

    def __init__(self, described: UserClass, functions: Functions, pool: Pool | None) -> None:
        self._described = described
        self.gives_reward = described.gives_reward
        beside = toolbox_of(functions, "env.functions", pool) if functions else None
        if described.toolbox is None and beside is not None:
            raise ConfigError(
                f"env.functions names tools, and {described.name} is stepped with the text of each turn, which calls "
                "none. Leave them out, or set env.style=tools."
            )
        self._beside = beside
        self.toolbox = described.toolbox
        if described.toolbox is not None and beside is not None:
            self.toolbox = described.toolbox.beside(beside)
        self.is_async = described.is_async or (beside is not None and beside.is_async)

    def make(self, parser: Parser | None) -> Environment:
        made = self._described.make()
        toolbox = self._described.tools_of(made)
        if toolbox is None:
            return ObjectWithSteps(made, self._described)
        assert parser is not None
        toolbox = toolbox if self._beside is None else toolbox.beside(self._beside)
        return ObjectWithTools(made, self._described, toolbox, parser)

    def check_columns(self, columns: Sequence[str]) -> None:
        self._described.check_columns(columns)


def _user_class(made: Made, style: Style, pool: Pool | None) -> UserClass:
    if pool is not None:
        named, target = target_of(made, "env.path")
        described = UserClass(named.value, named.name, style)
        described.make = pool.objects(target, described.methods)
        return described
    if isinstance(made, str):
        named = named_by(made, "env.path")
        return UserClass(named.value, named.name, style)
    return UserClass(made, getattr(made, "__name__", type(made).__name__), style)
