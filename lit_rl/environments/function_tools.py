"""`env=tools`: functions that the policy may call before it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lit_rl.environments.base import Environment
from lit_rl.environments.factory import EnvironmentFactory, EnvironmentKind, Functions
from lit_rl.environments.parsers import Parser
from lit_rl.environments.tools import Toolbox
from lit_rl.environments.with_tools import ToolEnvironment
from lit_rl.rewards.functions.by_path import named_by


class FunctionTools(EnvironmentFactory):
    """Functions as tools: a turn that calls none is the answer.

    Args:
        functions: Typed functions with a Google docstring, sync or async, or their paths, ``package.module:name`` or
            ``./file.py:name``.
        limits: What every `EnvironmentFactory` takes.

    Raises:
        ConfigError: no function, two of one name, or one that cannot be described to the policy.
    """

    def __init__(self, functions: Functions, **limits: Any) -> None:
        super().__init__(**limits)
        self._kinds = {"tools": OnlyTools(toolbox_of(functions, "env.functions"))}

    @property
    def kinds(self) -> Mapping[str, EnvironmentKind]:
        return self._kinds


class OnlyTools(EnvironmentKind):
    """Tools, and nothing beside them."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox, self.is_async = toolbox, toolbox.is_async

    def make(self, parser: Parser | None) -> Environment:
        assert self.toolbox is not None and parser is not None
        return ToolEnvironment(self.toolbox, parser)


def toolbox_of(functions: Functions, key: str) -> Toolbox:
    """The tools that functions or their paths stand for.

    Args:
        functions: Of the user.
        key: The setting that they came with, for messages.

    Raises:
        ConfigError: see `Toolbox`.
    """
    listed = [functions] if isinstance(functions, str) or callable(functions) else functions
    return Toolbox([_function(each, key) for each in listed])


def _function(function: str | Callable[..., Any], key: str) -> Callable[..., Any]:
    return named_by(function, key).value if isinstance(function, str) else function
