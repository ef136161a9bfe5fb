"""`env=tools`: functions that the policy may call before it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lit_rl.by_path import named_by
from lit_rl.environments.base import Environment
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind, Functions
from lit_rl.environments.parsers import Parser
from lit_rl.environments.pool import Pool, target_of
from lit_rl.environments.tools import FunctionTool, Toolbox
from lit_rl.environments.with_tools import ToolEnvironment
from lit_rl.errors import ConfigError


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
        self._kinds = {"tools": OnlyTools(toolbox_of(functions, "env.functions", self.pool))}

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds


class OnlyTools(EnvironmentKind):
    """Tools, and nothing beside them."""

    has_state = False

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox, self.is_async = toolbox, toolbox.is_async

    def make(self, parser: Parser | None) -> Environment:
        assert self.toolbox is not None and parser is not None
        return ToolEnvironment(self.toolbox, parser)


def toolbox_of(functions: Functions, key: str, pool: Pool | None = None) -> Toolbox:
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
        return Toolbox([named_by(each, key).value if isinstance(each, str) else each for each in listed])
    return Toolbox([_in_worker(each, key, pool) for each in listed])


def _in_worker(function: str | Callable[..., Any], key: str, pool: Pool) -> FunctionTool:
    named, target = target_of(function, key)
    return FunctionTool(named.value).by(pool.function(target))
