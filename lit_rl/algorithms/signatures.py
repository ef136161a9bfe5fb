"""Signatures of functions that users choose: the columns that they read, and the settings that they have.

A function is passed the offered arguments that it has parameters for. A function with `**keywords` is passed all of
them, like a reward function. An annotation restricts the columns, or the values of a setting.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lit_rl.core.declared_settings import annotations_of
from lit_rl.ops.reductions import WeightsInside


def arguments_for(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `offered` that the function has parameters for."""
    if takes_any_keyword(function):
        return {name: value for name, value in offered.items() if name not in _preset_keywords(function)}
    return {name: value for name, value in offered.items() if name in parameters(function)}


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the function's parameters, without those that a `functools.partial` has set."""
    given = _preset_keywords(function)
    kinds = inspect.signature(function).parameters.values()
    return tuple(p.name for p in kinds if p.name not in given and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Tell whether the function has `**keywords`."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def reads_column(function: Callable[..., Any], name: str) -> bool:
    """Tell whether the function is passed the column `name` if it is offered."""
    return bool(arguments_for(function, {name: None}))


def unwrap(function: Any) -> Any:
    """Return the function inside a `functools.partial`, or inside LightningCLI's `WithKeywords`."""
    return unwrap(function.func) if hasattr(function, "func") else function


def copies_for(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors to call a function with: copies for a user's function, which may change them in place.

    Functions of lit_rl change nothing, and get the tensors themselves.
    """
    return tensors if is_from_lit_rl(function) else tuple(tensor.clone() for tensor in tensors)


def is_from_lit_rl(function: Any) -> bool:
    """Tell whether a function is defined in lit_rl."""
    return str(getattr(unwrap(function), "__module__", None)).startswith("lit_rl.")


def name_of(function: Any) -> str:
    """Return the name of a function, with or without settings."""
    return getattr(unwrap(function), "__name__", type(function).__name__)


def setting_of(function: Callable[..., Any], name: str) -> Any:
    """Return the value of a function's keyword: as it was set, or its default."""
    given = _preset_keywords(function)
    return given[name] if name in given else inspect.signature(function).parameters[name].default


def _preset_keywords(function: Callable[..., Any]) -> Mapping[str, Any]:
    return getattr(function, "keywords", {})


def accepts_positional(function: Callable[..., Any], count: int) -> bool:
    """Tell whether the function can be called with exactly this many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def multiplies_weights(loss: Callable[..., Any]) -> bool:
    """Tell whether a loss applies the engine correction's weights itself: a parameter has the type `WeightsInside`.

    All other losses are multiplied by the weights.
    """
    return WeightsInside in annotations_of(loss).values()
