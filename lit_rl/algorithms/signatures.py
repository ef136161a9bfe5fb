"""What a function needs is what its signature says: the columns that it names, and the settings that it has.

A function is given what it names of all that is offered. One with `**keywords` is given everything, as reward functions
are. An annotation narrows what a function is given, or may be set to; one without any is given everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

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


def copies_for(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as a function gets them: one of the user's gets copies, which it may change in place. Those of
    lit_rl change nothing, and get them as they are."""
    return tensors if is_shipped(function) else tuple(tensor.clone() for tensor in tensors)


def is_shipped(function: Any) -> bool:
    """Whether a function is one of lit_rl's."""
    return str(getattr(unwrapped(function), "__module__", None)).startswith("lit_rl.")


def name_of(function: Any) -> str:
    """The name of a function, also under the settings it was given."""
    return getattr(unwrapped(function), "__name__", type(function).__name__)


def setting(function: Callable[..., Any], name: str) -> Any:
    """What a keyword of a function is set to: as it was given, or its default."""
    given = _given(function)
    return given[name] if name in given else inspect.signature(function).parameters[name].default


def _given(function: Callable[..., Any]) -> Mapping[str, Any]:
    return getattr(function, "keywords", {})


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each parameter, in their order and with what `Annotated` adds; `Any` where there is none.

    One that cannot be resolved, such as a name that only a type checker imports, is `Any` too.
    """
    plain = unwrapped(function)
    routine = plain if inspect.isroutine(plain) else type(plain).__call__
    return {name: _resolved(routine, name) for name in inspect.signature(plain).parameters}


def _resolved(routine: Callable[..., Any], name: str) -> Any:
    annotations = getattr(routine, "__annotations__", {})
    if name not in annotations:
        return Any
    alone = SimpleNamespace(__annotations__={name: annotations[name]})
    names = getattr(inspect.unwrap(routine), "__globals__", {})
    try:
        return get_type_hints(alone, globalns=names, include_extras=True)[name]
    except (NameError, TypeError):
        return Any


def notes(annotation: Any) -> tuple[Any, ...]:
    """What `Annotated` adds to an annotation, or to an option of a union."""
    if get_origin(annotation) is Annotated:
        return annotation.__metadata__
    if get_origin(annotation) in (Union, UnionType):
        return tuple(note for option in get_args(annotation) for note in notes(option))
    return ()


def takes_positions(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with this many arguments by position, and nothing by name."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def multiplies_weights(loss: Callable[..., Any]) -> bool:
    """Whether a loss takes the weights against an engine in itself: it has a parameter of the type `WeightsInside`.

    All other losses are multiplied by them.
    """
    return WeightsInside in annotations_of(loss).values()
