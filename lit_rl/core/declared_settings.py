"""Ranges and words that the annotations of a constructor declare, such as ``max_turns: AtLeastOne = 8``.

They stand once. The constructor refuses other values, and `scripts/config_reference.py` writes them down for the
command line, which refuses them before torch loads.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from numbers import Integral
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lit_rl.core.errors import ConfigError, in_range, one_of
from lit_rl.ops.ranges import OneOf, Range

T = TypeVar("T")
Allowed = Range | tuple[str | None, ...]
"""The range of a number, or the words to choose from, with None where it is allowed."""


def checked(key: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class whose constructor refuses values that its annotations do not allow.

    The constructor keeps its signature. A dataclass has a constructor of its own: one whose parent is decorated is
    decorated too.

    Args:
        key: The key above the settings, for messages: `env`. ``{key}`` in it is the class attribute `key`. Empty
            where a config may have the object under any key: settings are then named alone.
    """

    def decorate(kind: type[T]) -> type[T]:
        made: Any = kind.__init__
        signature = inspect.signature(made)
        allowed = functools.cache(lambda: allowed_fields(kind) if is_dataclass(kind) else allowed_values(made))

        @functools.wraps(made)
        def constructor(self: Any, *arguments: Any, **given: Any) -> None:
            try:
                values = signature.bind(self, *arguments, **given).arguments
            except TypeError:  # the call below raises it, in Python's words
                values = {}
            for name, values_allowed in allowed().items():
                if values.get(name) is not None:
                    check_value(setting_key(constructor, type(self), name), values[name], values_allowed)
            made(self, *arguments, **given)

        described: Any = constructor
        described.key, described.allowed = key, allowed
        kind.__init__ = constructor
        return kind

    return decorate


def setting_key(constructor: Any, kind: type, name: str) -> str:
    """Return the key of a setting of a decorated constructor, which `kind` has or inherits."""
    above = constructor.key.format(key=getattr(kind, "key", ""))
    return f"{above}.{name}" if above else name


def allowed_values(function: Callable[..., Any]) -> dict[str, Allowed]:
    """Return the ranges and words that the annotations of a function's parameters declare, by name."""
    found = {name: declared(annotation) for name, annotation in annotations_of(function).items()}
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def allowed_fields(kind: Any) -> dict[str, Allowed]:
    """Return those of a dataclass's fields, each as the module reads it that declares it."""
    found: dict[str, Allowed | None] = {}
    for owner in reversed(kind.__mro__):
        names = vars(sys.modules[owner.__module__])
        found |= {
            name: declared(_resolve(text, names)) for name, text in vars(owner).get("__annotations__", {}).items()
        }
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def declared(annotation: Any) -> Allowed | None:
    """Return the range or the words of an annotation, which may allow None beside them."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    given = [option for option in options if option is not type(None)]
    if len(given) == 1 and get_origin(given[0]) is Literal:
        words = get_args(given[0])
        return (*words, *[None] * (len(options) - 1)) if all(isinstance(word, str) for word in words) else None
    notes = [note for note in annotated_metadata(annotation) if isinstance(note, Range | OneOf)]
    return None if not notes else notes[0].words if isinstance(notes[0], OneOf) else notes[0]


def check_value(key: str, value: Any, allowed: Allowed) -> None:
    """Refuse a value outside a range, or none of the words.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    if not isinstance(allowed, Range):
        one_of(key, value, allowed)
        return
    if allowed.whole and (isinstance(value, bool) or not isinstance(value, Integral)):
        name = key.rpartition(".")[2]
        raise ConfigError(f"{key} is {value!r:.60}, a {type(value).__name__}. Write a whole number, such as {name}=8.")
    number: Any = value
    in_range(key, number, **allowed.bounds)


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each parameter, in order and with `Annotated` metadata; `Any` if there is none.

    An annotation that cannot be resolved, such as a name that only a type checker imports, is `Any` too.
    """
    plain: Any = function
    while hasattr(plain, "func"):  # a `functools.partial`, or LightningCLI's `WithKeywords`
        plain = plain.func
    routine = plain if inspect.isroutine(plain) else type(plain).__call__
    annotations, names = getattr(routine, "__annotations__", {}), getattr(inspect.unwrap(routine), "__globals__", {})
    return {name: _resolve(annotations.get(name, Any), names) for name in inspect.signature(plain).parameters}


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    alone = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(alone, globalns=names, include_extras=True)["it"]
    except (NameError, TypeError):
        return Any


def annotated_metadata(annotation: Any) -> tuple[Any, ...]:
    """Return the `Annotated` metadata of an annotation, or of all options of a union."""
    if get_origin(annotation) is Annotated:
        return annotation.__metadata__
    if get_origin(annotation) in (Union, UnionType):
        return tuple(note for option in get_args(annotation) for note in annotated_metadata(option))
    return ()
