"""A keyword that a constructor does not take: refused with where it belongs, or what is near."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from lit_rl.errors import ConfigError, did_you_mean

T = TypeVar("T")


class UnknownKeyword(ConfigError):
    """A keyword that no constructor takes."""

    keyword = ""
    """An attribute and no constructor argument, so that it survives pickling."""


def names(kind: type) -> set[str]:
    """Return the names of all keywords of a class's constructor, and of its parents' if it passes keywords on to
    them."""
    found: set[str] = set()
    for maker in makers(kind):
        parameters = inspect.signature(maker).parameters.values()
        found |= {each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    return found - {"self"}


def makers(kind: type) -> Iterator[Callable[..., Any]]:
    """Yield the constructor of a class, and those of its parents as long as each passes `**keywords` on."""
    for maker in (vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)):
        yield maker
        try:
            parameters = inspect.signature(maker).parameters.values()
        except (TypeError, ValueError):  # written in C
            return
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            return


def refuse(kind: type, given: Iterable[str], taken: type, place: Callable[[str, set[str]], str]) -> None:
    """Refuse keywords that no constructor takes.

    Args:
        kind: The class to construct.
        given: The names of the keywords that are passed on.
        taken: The class whose constructor gets them, and its parents'.
        place: From a name, and all that `kind` takes, to the place where it belongs here; empty if unknown.

    Raises:
        UnknownKeyword: names the first of them, and the place where it belongs or the nearest keyword.
    """
    known = names(taken)
    wrong = next((name for name in given if name not in known), None)
    if wrong is None:
        return
    allowed = known | names(kind)
    elsewhere = place(wrong, allowed)
    said = f" {elsewhere[0].upper()}{elsewhere[1:]}." if elsewhere else did_you_mean(wrong, allowed)
    error = UnknownKeyword(f"{kind.__name__} takes no {wrong}=.{said} help({kind.__name__}) lists them.")
    error.keyword = wrong
    raise error


def answered(places: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Decorate a class without `**keywords`, such as a dataclass, to refuse unknown keywords with a helpful message.

    The constructor keeps its signature.

    Args:
        places: Hints by the names that other libraries have for a setting.
    """

    def decorate(kind: type[T]) -> type[T]:
        made: Any = kind.__init__

        @functools.wraps(made)
        def constructor(self: Any, *arguments: Any, **given: Any) -> None:
            refuse(kind, given, kind, lambda name, _: places.get(name, ""))
            made(self, *arguments, **given)

        kind.__init__ = constructor
        return kind

    return decorate
