"""What a reward function may take and must return. Every breach is a RewardError that names the function."""

from __future__ import annotations

import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_rl.errors import RewardError, did_you_mean
from lit_rl.rewards.text import Completion, text_of

Function = Callable[..., Any]

ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""What a reward function may name besides the columns of the data."""

_LARGEST = float(torch.finfo(torch.float32).max)


def name_of(function: Any) -> str:
    """The name a function is logged under: its own, or its class's in snake case."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return name.strip("<>")


def check_callable(name: str, function: Any) -> None:
    """Refuse what cannot be called with a batch and give numbers back: objects, classes, coroutine functions."""
    if isinstance(function, type):
        raise RewardError(
            f"reward function {name!r} is a class. Give an object of it, made by {function.__name__}(...)."
        )
    if not callable(function):
        raise RewardError(f"reward function {name!r} is {reprlib.repr(function)}, which cannot be called.")
    for part in (function, type(function).__call__):  # an object's __call__ may be the async one
        if inspect.iscoroutinefunction(part) or inspect.isasyncgenfunction(part):
            raise RewardError(f"reward function {name!r} is async. Async rewards are not available yet: use def.")


def keywords(name: str, function: Function, columns: Iterable[str]) -> list[str]:
    """Which arguments to call a function with: all on offer where it takes ``**kwargs``, else those it names.

    Raises:
        RewardError: it needs an argument that is no column, or a column has the name of a standard argument.
    """
    columns = list(columns)
    if taken := [column for column in columns if column in ARGUMENTS]:
        raise RewardError(
            f"the data column {taken[0]!r} has the name of an argument that every reward function may take. "
            f"Rename it: data.rename={{{taken[0]}: {taken[0]}_column}}."
        )
    offered = [*ARGUMENTS, *columns]
    parameters = _parameters(name, function)
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"reward function {name!r} takes {parameter.name!r} by position only; arguments come by keyword. "
                "Remove the '/' from its signature."
            )
        if parameter.name not in offered:
            raise RewardError(
                f"reward function {name!r} needs the argument {parameter.name!r}, which is no column of the data. "
                f"Columns: {', '.join(columns) or 'none'}. Any function may also name {', '.join(ARGUMENTS)}."
                f"{did_you_mean(parameter.name, offered)} Rename the argument, or the column with data.rename."
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return [argument for argument in offered if argument in named]


def _parameters(name: str, function: Function) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name!r} has no readable signature. Wrap it in a def.") from error


def check_values(name: str, returned: Any, completions: Sequence[Completion]) -> list[float]:
    """What a function returned as one finite float a completion, NaN standing for None.

    Raises:
        RewardError: not a list, tuple or 1-D array of exactly ``len(completions)`` finite numbers or None.
    """
    if inspect.iscoroutine(returned):
        returned.close()
        raise RewardError(f"reward function {name!r} is async. Async rewards are not available yet: use def.")
    values = _as_list(returned)
    if values is None or len(values) != len(completions):
        raise RewardError(
            f"reward function {name!r} returned {describe(returned)}; expected a list of {len(completions)} numbers "
            f"or None, one a completion.{_hint(returned)}"
        )
    return [_as_float(name, index, value, completions[index]) for index, value in enumerate(values)]


def _as_list(returned: Any) -> list[Any] | None:
    if isinstance(returned, Tensor | np.ndarray):
        return returned.tolist() if returned.ndim == 1 else None
    return list(returned) if isinstance(returned, list | tuple) else None


def _as_float(name: str, index: int, value: Any, completion: Completion) -> float:
    if value is None:
        return math.nan
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, Real):
        fault = f"is a {type(value).__name__}, not a number or None"
    else:
        try:
            number = float(value)
        except OverflowError:  # 10**400
            number = math.inf
        if abs(number) <= _LARGEST:
            return number
        fault = "is not finite in float32; return None where the reward does not apply"
    raise RewardError(
        f"reward function {name!r} returned {reprlib.repr(value)} for completion {index}, which {fault}. "
        f"The completion starts {text_of(completion)[:80]!r}."
    )


def describe(returned: Any) -> str:
    """What a value is: its type, its shape or length, its first three items."""
    kind = type(returned).__name__
    if isinstance(returned, Tensor | np.ndarray):
        first = returned[:3].tolist() if returned.ndim else returned.item()
        return f"a {kind} of shape {tuple(returned.shape)} starting with {reprlib.repr(first)}"
    if isinstance(returned, list | tuple):
        return f"a {kind} of {len(returned)} values starting with {reprlib.repr(list(returned[:3]))}"
    return f"{reprlib.repr(returned)} ({kind})"


def _hint(returned: Any) -> str:
    if inspect.isgenerator(returned):
        return " Wrap the generator in list(...)."
    if isinstance(returned, Tensor | np.ndarray) and returned.ndim == 2 and 1 in returned.shape:
        return " Flatten it: .reshape(-1)."
    if isinstance(returned, dict):
        return " Name each part as a function of its own, or use log_extra."
    return ""
