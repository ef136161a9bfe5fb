"""Import of classes by their dotted paths."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TypeVar

from lit_rl.errors import ConfigError, did_you_mean

T = TypeVar("T")


def class_at(path: str, key: str, kind: type[T], known: Iterable[str]) -> type[T]:
    """Import the class that a setting names.

    Args:
        path: `package.module.Class`.
        key: The setting, for messages.
        kind: Required base class.
        known: Names to suggest for a mistyped one.

    Raises:
        ConfigError: nothing can be imported from there, or it is no subclass of `kind`.
    """
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={path!r} cannot be imported ({error}).{did_you_mean(name, known)}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{key}={path!r} is {found!r}; allowed is a {_public(kind)} class.")
    return found


def _public(kind: type) -> str:
    """Return a class's path in its package, as users write it, without the inner module."""
    package = kind.__module__.removesuffix(".optimizer")
    return f"{package}.{kind.__name__}"
