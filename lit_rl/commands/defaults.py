"""The defaults of constructors and functions that a config may name, from a file: reading them loads no torch.

`scripts/config_reference.py` writes `defaults.yaml` with what `looked_up` finds. What the file does not have, or has of
another version of Lightning, is looked up in the constructor.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_rl.keywords import makers

OURS = ("lit_rl.", "lightning.")
"""Packages whose constructors are looked up. A run's config may name others; reading it imports none of them."""

FILE = Path(__file__).with_name("defaults.yaml")

_FUNCTION, _OBJECT = "_function_", "_object_"


@dataclass(frozen=True)
class Made:
    """A default that a config cannot hold as a plain value."""

    name: str
    """Name of the function, also where some of its arguments are bound; name of the object's class; else its text."""
    function: bool
    """True for a function. A config that has null there means it."""


def of(target: Any) -> dict[str, Any]:
    """Return parameters and their defaults, plain or `NamedDefault`, those of parents too where keywords are passed
    on.

    Args:
        target: The path of a constructor or a function. Of any but `OURS` nothing is said.
    """
    if not isinstance(target, str) or not target.startswith(OURS):
        return {}
    if (said := _file().get(target)) is None or _file()["_lightning_"] != lightning():
        return looked_up(target)
    return {name: _read(value) for name, value in said.items()}


def looked_up(target: str) -> dict[str, Any]:
    """Return the same from the constructor itself, which imports it."""
    return {name: _made(default) for name, default in _defaults(target)}


def as_plain(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults in the form of the file."""
    return {name: _written(default) for name, default in defaults.items()}


def lightning() -> str:
    """Return the first two numbers of Lightning's version."""
    return ".".join(importlib.metadata.version("lightning").split(".")[:2])


@functools.cache
def _file() -> Mapping[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader)


def _read(value: Any) -> Any:
    if isinstance(value, dict) and (kind := next(iter(value), None)) in (_FUNCTION, _OBJECT):
        return Made(value[kind], kind == _FUNCTION)
    return value


def _written(default: Any) -> Any:
    return {_FUNCTION if default.function else _OBJECT: default.name} if isinstance(default, Made) else default


def _made(default: Any) -> Any:
    if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # of a dataclass: it begins empty
        return {}
    if isinstance(default, (list, tuple)):
        return [_made(each) for each in default]
    if default is None or isinstance(default, (bool, int, float, str, dict)):
        return default
    inner = getattr(default, "func", default)
    if callable(default):
        return Made(getattr(inner, "__name__", type(inner).__name__), function=True)
    ours = type(default).__module__.startswith("lit_rl.")
    return Made(type(default).__name__ if ours else str(default), function=False)


def _defaults(target: str) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of a constructor or a function of ours, those of parents too where it passes keywords on."""
    found = _load(target)
    if found is None:
        return
    given: dict[str, Any] = {}
    for function in makers(found) if inspect.isclass(found) else [found]:
        for name, parameter in _signature(function).items():
            if parameter.default is not parameter.empty:
                given.setdefault(name, parameter.default)
    yield from given.items()


def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _load(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:  # an optional package is missing, or a version had it elsewhere
        return None
