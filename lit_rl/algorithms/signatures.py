"""What a function needs is what its signature says: the columns that it names, and the settings that it has.

A function is given what it names of all that is offered. One with `**keywords` is given everything, as reward functions
are.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from lit_rl.ops.step import WeightsInside


def arguments_for(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `offered` that the function can be called with by name."""
    if takes_everything(function):
        return {name: value for name, value in offered.items() if name not in _given(function)}
    return {name: value for name, value in offered.items() if name in parameters(function)}


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the function's parameters; those that a `functools.partial` has set are left out."""
    given = _given(function)
    kinds = inspect.signature(function).parameters.values()
    return tuple(p.name for p in kinds if p.name not in given and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


def takes_everything(function: Callable[..., Any]) -> bool:
    """Whether it has `**keywords`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def reads(function: Callable[..., Any], name: str) -> bool:
    """Whether it is given the column `name` where that is offered."""
    return bool(arguments_for(function, {name: None}))


def unwrapped(function: Any) -> Any:
    """The function that settings were given to: under a `functools.partial`, or LightningCLI's `WithKeywords`."""
    return unwrapped(function.func) if hasattr(function, "func") else function


def setting(function: Callable[..., Any], name: str) -> Any:
    """What a keyword of a function is set to: as it was given, or its default."""
    given = _given(function)
    return given[name] if name in given else inspect.signature(function).parameters[name].default


def multiplies_weights(loss: Callable[..., Any]) -> bool:
    """Whether a loss takes the weights against an engine in itself: it has a parameter of the type `WeightsInside`.

    All other losses are multiplied by them.
    """
    return has_parameter_of(loss, WeightsInside)


def has_parameter_of(function: Callable[..., Any], kind: Any) -> bool:
    """Whether a parameter is annotated with the type `kind`, an `Annotated`."""
    try:
        hints = typing.get_type_hints(unwrapped(function), include_extras=True)
    except (NameError, TypeError):  # of a user's own, whose types are not there when it runs
        return False
    return any(hint == kind for hint in hints.values())


def _given(function: Callable[..., Any]) -> Mapping[str, Any]:
    return getattr(function, "keywords", {})
