"""What a reward function may take and must return. Every breach is a RewardError that names the function."""

from __future__ import annotations

import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from lit_rl.errors import RewardError, did_you_mean
from lit_rl.rewards.completion import Completion, text_of
from lit_rl.rewards.workers.job import SERVICES
from lit_rl.rewards.workers.plain_values import Opaque

Function = Callable[..., Any]

_SPAN = ("start", "end", "value")

Span = tuple[int, int, float]
"""``(start, end, value)``: characters ``start`` to ``end`` (exclusive) of the text of a completion earned ``value``."""

TurnReward = tuple[int, float]
"""``(turn, value)``: the policy's turn ``turn``, counted from 0, earned ``value``."""

Part = Span | TurnReward
"""A part of a reward, with the place in a completion where it was earned."""


def of_a_turn(part: Part) -> bool:
    """Tell whether a part is of a turn; else it is of a span of characters."""
    return len(part) != len(_SPAN)


ARGUMENTS = ("prompts", "completions", "completion_ids", *SERVICES)
"""The names that a reward function may use besides the columns of the data."""

SINGULAR = ("prompt", "completion", "completion_ids", *SERVICES)
"""The same for a function that takes one completion at a time."""


@runtime_checkable
class LooksAtData(Protocol):
    """A reward function that may refuse rows before a run begins."""

    def check_columns(self, columns: Mapping[str, Sequence[Any]], given: Sequence[str] = ()) -> None:
        """Raise if the function cannot score rows with these values; `given` names its arguments from episodes."""
        ...


_RENAME = "Rename the argument, or the column with data.rename."
_FIX = {
    "solution_str": "In verl that is the text of one completion: name it completion here, and in the place of "
    "ground_truth the column that holds the right answer.",
    "ground_truth": "In verl that is the right answer of one row: name the column that holds it, such as answer.",
    "queries": "In OpenRLHF a query is a prompt and its response as one text: name prompts and completions here.",
    "self": "It is a method without its object: give one of an object, CLASS(...).METHOD.",
    "episodes": "Episodes are there where something answers the policy: env=tools, or env=environment.",
    "environments": "TRL hands over its environment objects; here they are gone when rewards are asked, and may be in "
    "another process: write get_reward(self) and take reward=environment, or name episodes, which says what was said.",
}

_LARGEST = float(torch.finfo(torch.float32).max)


def name_of(function: Any) -> str:
    """Return the name a function is logged under: its own, or its class's in snake case."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(function).__name__).lower()
    return name.strip("<>")


def check_callable(name: str, function: Any) -> None:
    """Refuse anything that cannot be called for numbers: objects, classes, PyTorch modules, async generators."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.nn.Module):
        raise RewardError(
            f"reward function {name!r} is a PyTorch module ({type(function).__name__}), which takes tensors and no "
            "texts. For a reward model give lit_rl.rewards.RewardModel(folder_or_hub_id), or, loaded already, "
            "lit_rl.rewards.RewardModel(model, tokenizer=...) (in a config: "
            "reward=reward_model). For any other module write def f(prompts, completions, **columns), which calls "
            "it and returns one number a completion."
        )
    if isinstance(function, type):
        raise RewardError(
            f"reward function {name!r} is a class. Give an object of it, made by {function.__name__}(...); of a file, "
            "make one there and give its name."
        )
    if not callable(function):
        raise RewardError(f"reward function {name!r} is {reprlib.repr(function)}, which cannot be called.")
    for part in (function, type(function).__call__):  # an object's __call__ may be the async one
        if inspect.isasyncgenfunction(part):
            raise RewardError(f"reward function {name!r} is an async generator. Return a list; do not yield.")


def argument_names(name: str, function: Function) -> set[str]:
    """Return the names in a function's signature."""
    return {parameter.name for parameter in _parameters(name, function)}


def takes(name: str, function: Function, argument: str) -> bool:
    """Return whether a function names an argument, or takes all by ``**kwargs`` and may use it there.

    A function of lit_rl names all that it uses, and ``**_`` is ignored.
    """
    inner: Any = getattr(function, "function", function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    ours = str(getattr(inner, "__module__", "")).startswith("lit_rl.")
    parameters = _parameters(name, function)
    rest = any(each.kind is each.VAR_KEYWORD and each.name != "_" for each in parameters)
    return any(each.name == argument for each in parameters) or (rest and not ours)


def is_per_sample(name: str, function: Function) -> bool:
    """Tell whether a function takes one completion at a time: it names `prompt` or `completion`, and neither plural."""
    arguments = argument_names(name, function)
    return bool(arguments & {"prompt", "completion"}) and not arguments & {"prompts", "completions"}


def keywords(name: str, function: Function, columns: Iterable[str]) -> list[str]:
    """Return the arguments to call a function with: all on offer if it takes ``**kwargs``, else those it names.

    Raises:
        RewardError: it needs an argument that is no column, or a column has the name of a standard argument.
    """
    columns = list(columns)
    standard = SINGULAR if is_per_sample(name, function) else ARGUMENTS
    # `prompt` and `completion` are fine names for columns as long as no function means something else by them.
    if clashing := [column for column in columns if column in ARGUMENTS or column in standard]:
        raise RewardError(
            f"the data column {clashing[0]!r} has the name of an argument that reward function {name!r} may take. "
            f"Rename it: data.rename={{{clashing[0]}:{clashing[0]}_column}}."
        )
    offered = [*standard, *columns]
    parameters = _parameters(name, function)
    for parameter in parameters:
        _check_parameter(name, parameter, standard, columns)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    by_keyword = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return [argument for argument in offered if argument in by_keyword]


def columns_read(name: str, function: Function, columns: Iterable[str]) -> set[str]:
    """Return the columns that a function may read: all if it takes ``**kwargs``, none for ``**_``, and those it
    names."""
    parameters = _parameters(name, function)
    if any(parameter.kind is parameter.VAR_KEYWORD and parameter.name != "_" for parameter in parameters):
        return {*columns}
    return {*columns} & {parameter.name for parameter in parameters}


def _check_parameter(name: str, parameter: inspect.Parameter, standard: Sequence[str], columns: Sequence[str]) -> None:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if variadic or parameter.default is not parameter.empty:
        return
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise RewardError(
            f"reward function {name!r} takes {parameter.name!r} by position only; arguments come by keyword. "
            "Remove the '/' from its signature, or call it in a def of your own: def f(completions, **columns)."
        )
    if parameter.name not in standard and parameter.name not in columns:
        raise RewardError(
            f"reward function {name!r} needs the argument {parameter.name!r}, which is no column of the data. "
            f"Columns: {', '.join(columns) or 'none'}. Any function may also name {', '.join(standard)}."
            f"{did_you_mean(parameter.name, [*standard, *columns])} {_FIX.get(parameter.name, _RENAME)}"
        )


def _parameters(name: str, function: Function) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward function {name!r} has no readable signature. Wrap it in a def.") from error


def check_rows(name: str, returned: Any, rows: int) -> None:
    """Refuse a result that `to_plain` could not read as a list of one entry per completion.

    Raises:
        RewardError: the result is no list, tuple or 1-D array, or not of this length.
    """
    if isinstance(returned, Opaque):
        raise RewardError(
            f"reward function {name!r} returned {returned.text}; expected a list of {rows} numbers or None, one a "
            f"completion.{returned.hint}"
        )


def check_value(name: str, index: int, value: Any, completion: Completion) -> tuple[float, list[Part] | None]:
    """Return one entry as a finite float, NaN standing for None, and the parts that it is the sum of, if it was a list.

    Raises:
        RewardError: it is neither a finite number, nor None, nor a list of turns, or of spans inside the text of the
            completion.
    """
    if value is None:
        return math.nan, None
    parts = None
    if isinstance(value, list):
        if len(set(map(len, value))) > 1:
            raise RewardError(
                f"reward function {name!r} returned {reprlib.repr(value)} for completion {index}, which mixes spans "
                "and turns: a list holds (start, end, value), or it holds (turn, value)."
            )
        parts = [_part(name, index, part, completion) for part in value]
        value = math.fsum(part[-1] for part in parts)
    return _number(name, index, value, completion), parts


def _number(name: str, index: int, value: Any, completion: Completion) -> float:
    if isinstance(value, Opaque):
        shown, fault = (
            value.text,
            f"is {_named(value.kind)}, not a number, None or a list of (start, end, value) or of (turn, value)",
        )
        if value.kind == "dict":
            fault += "; return its score alone, and give the rest to log_metric or log_extra"
    elif isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # 10**400
            number = math.inf
        if abs(number) <= _LARGEST:
            return number
        shown, fault = reprlib.repr(value), "is not finite in float32; return None where the reward does not apply"
    else:
        shown, fault = reprlib.repr(value), f"is {_named(type(value).__name__)}, not a number"
    raise RewardError(
        f"reward function {name!r} returned {shown} for completion {index}, which {fault}. "
        f"The completion starts {text_of(completion)[:80]!r}."
    )


def _named(kind: str) -> str:
    return "a coroutine (await it, in an async def)" if kind == "coroutine" else f"a {kind}"


def _part(name: str, index: int, part: Any, completion: Completion) -> Part:
    if not of_a_turn(part):
        return _span(name, index, part, completion)
    turn, value = part
    if not isinstance(turn, int) or turn < 0:
        shown = turn.text if isinstance(turn, Opaque) else reprlib.repr(turn)
        raise RewardError(
            f"reward function {name!r} returned the turn {shown} for completion {index}. The reward of a turn is "
            "(turn, value), and turns of the policy are counted 0, 1, 2, ..."
        )
    return turn, _number(name, index, value, completion)


def _span(name: str, index: int, span: Any, completion: Completion) -> Span:
    start, end, value = span
    length = len(text_of(completion))
    whole = isinstance(start, int) and isinstance(end, int)
    if not whole or not 0 <= start < end <= length:
        shown = tuple(part.text if isinstance(part, Opaque) else part for part in span)
        raise RewardError(
            f"reward function {name!r} returned the span {shown} for completion {index}, which has {length} "
            "characters. A span is (start, end, value) with whole numbers 0 <= start < end <= length; end is exclusive."
        )
    return start, end, _number(name, index, value, completion)
