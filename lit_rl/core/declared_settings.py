"""Ranges and words that the annotations of a constructor declare, such as ``max_turns: AtLeastOne = 8``.

They stand once. The constructor refuses other values, and `scripts/config_reference.py` writes them down for the
command line, which refuses them before torch loads.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from math import inf
from numbers import Integral, Number
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lit_rl.core.errors import ConfigError, in_range, one_of
from lit_rl.ops.ranges import OneOf, Range

T = TypeVar("T")


@dataclass(frozen=True)
class Allowed:
    """The values that an annotation allows: numbers in a range, lists of them, words, and null."""

    range: Range | None = None
    words: tuple[str, ...] = ()
    null: bool = False
    many: bool = False
    """True if a list of such numbers is allowed too, as in ``Positive | Sequence[Positive]``: one for each epoch."""

    def check(self, key: str, value: Any) -> None:
        """Refuse a value that is none of these.

        Raises:
            ConfigError: names the key, the value and what is allowed.
        """
        kind = type(value)
        if kind is type(None) and self.null:
            return
        if self.many and issubclass(kind, Sequence) and kind is not str:
            if not value:
                raise ConfigError(f"{key}=[] has no number. Set one number, or a list with one for each epoch.")
            for number in value:
                replace(self, many=False, null=False).check(key, number)
            return
        is_number = issubclass(kind, Number) and kind is not bool
        if self.range is None or (self.words and not is_number):
            choices = [*self.words, None] if self.null else [*self.words]
            if self.range is not None:
                choices.insert(0, "a whole number" if self.range.whole else "a number")
            one_of(key, value, choices)
            return
        if self.range.whole and (kind is bool or not issubclass(kind, Integral)):
            name, example = key.rpartition(".")[2], int(max(8, self.range.low))
            raise ConfigError(
                f"{key} is {value!r:.60}, a {kind.__name__}. Write a whole number, such as {name}={example}."
            )
        in_range(key, value, **self.range.bounds)

    @property
    def record(self) -> dict[str, Any]:
        """The same as plain data, from which `restore` makes it."""
        bounds = {} if self.range is None else vars(self.range)
        # `typing` gives equal annotations one object: whether a bound is 0 or 0.0 would depend on the order of imports.
        numbers = {name: value if isinstance(value, bool) else float(value) for name, value in bounds.items()}
        given = {name: value for name, value in numbers.items() if value is not False and value != inf}
        flags = {name: True for name in ("null", "many") if getattr(self, name)}
        return given | ({"words": list(self.words)} if self.words else {}) | flags

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> Allowed:
        """Return what a `record` was made of."""
        bounds = {name: record[name] for name in Range.__match_args__ if name in record}
        flags = {name: record[name] for name in ("null", "many") if name in record}
        return cls(Range(**bounds) if bounds else None, tuple(record.get("words", ())), **flags)


def checked(key: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class whose constructor refuses values that its annotations do not allow.

    The constructor keeps its signature. A dataclass below a decorated one has a constructor of its own, so it must be
    decorated itself.

    Args:
        key: The key above the settings, for messages: `env`. ``{key}`` in it is the class attribute `key`. Empty
            where a config may have the object under any key: settings are then named alone.
    """

    def decorate(kind: type[T]) -> type[T]:
        init: Any = kind.__init__
        signature = inspect.signature(init)

        @functools.wraps(init)
        def constructor(self: Any, *arguments: Any, **keywords: Any) -> None:
            try:
                values = signature.bind(self, *arguments, **keywords).arguments
            except TypeError:  # the call below raises it, in Python's words
                values = {}
            for name, allowed in declared_by(kind).items():
                if name in values:
                    allowed.check(setting_key(constructor, type(self), name), values[name])
            init(self, *arguments, **keywords)

        described: Any = constructor
        described.key, described.declared = key, functools.partial(declared_by, kind)
        kind.__init__ = constructor
        return kind

    return decorate


def setting_key(constructor: Any, kind: type, name: str) -> str:
    """Return the key of a setting of a decorated constructor, which `kind` has or inherits."""
    above = constructor.key.format(key=getattr(kind, "key", ""))
    return f"{above}.{name}" if above else name


@functools.cache
def declared_by(kind: Any) -> dict[str, Allowed]:
    """Return what the annotations of a constructor allow, by name; of a dataclass, those of its fields."""
    owners = kind.__mro__
    if not is_dataclass(kind):
        return declared_parameters(inspect.unwrap(kind.__init__))
    found: dict[str, Allowed | None] = {}
    for owner in reversed(owners):  # each field as the module reads it that declares it
        names = vars(sys.modules[owner.__module__])
        for name, text in vars(owner).get("__annotations__", {}).items():
            found[name] = declared(_resolve(text, names))
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def declared_parameters(function: Callable[..., Any]) -> dict[str, Allowed]:
    """Return what the annotations of a function's parameters allow, by name."""
    found = {name: declared(annotation) for name, annotation in annotations_of(function).items()}
    return {name: allowed for name, allowed in found.items() if allowed is not None}


def declared(annotation: Any) -> Allowed | None:
    """Return what an annotation allows; None if it declares neither a range nor words, or has other types too."""
    allowed = Allowed()
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    for option in options:
        notes = [note for note in annotated_metadata(option) if isinstance(note, Range | OneOf)]
        if option is type(None):
            allowed = replace(allowed, null=True)
        elif get_origin(option) is Sequence and get_args(option)[0] in options:
            allowed = replace(allowed, many=True)
        elif get_origin(option) is Literal and all(isinstance(word, str) for word in get_args(option)):
            allowed = replace(allowed, words=get_args(option))
        elif notes and isinstance(notes[0], OneOf):
            allowed = replace(allowed, words=notes[0].words)
        elif notes:
            allowed = replace(allowed, range=notes[0])
        else:
            return None
    return allowed if allowed.range is not None or allowed.words else None


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
