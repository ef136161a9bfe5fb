"""`null` on the command line of LightningCLI: read as such at every depth, and refused where a constructor has no use
for it. jsonargparse lets it pass for any argument, and hands it on below two classes as the text ``None``."""

from __future__ import annotations

import collections.abc
import contextlib
import importlib
import inspect
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import Namespace, get_loader, set_loader

from lit_rl.cli.schemas import parameters
from lit_rl.errors import ConfigError


@contextlib.contextmanager
def read_at_every_depth() -> Iterator[None]:
    """Read ``None`` as null in this block, as Python's users write it, and as jsonargparse writes it to itself."""
    read = get_loader("yaml")
    set_loader("yaml", lambda text: None if text == "None" else read(text), (yaml.YAMLError,))
    try:
        yield
    finally:
        set_loader("yaml", read, (yaml.YAMLError,))


def check(key: str, spec: Namespace, target: Any = None) -> None:
    """Refuse a null that a constructor does not take.

    Args:
        key: Key of the object in the config.
        spec: The parsed spec: `class_path` and `init_args`, or the arguments alone.
        target: Target for arguments alone.

    Raises:
        ConfigError: names the key, what is allowed, and the default.
    """
    arguments = spec
    if target is None:
        target, arguments = _load(spec["class_path"]), spec.get("init_args") or Namespace()
    known = {parameter.name: (parameter, hint) for parameter, hint in parameters(target)}
    for name, value in vars(arguments).items():
        if isinstance(value, Namespace) and "class_path" in value:
            check(f"{key}.{name}", value)
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, Namespace) and "class_path" in each:
                    check(f"{key}.{name}[{i}]", each)
        elif value is None and name in known:
            _check_null(f"{key}.{name}", *known[name])


def _check_null(key: str, parameter: inspect.Parameter, hint: Any) -> None:
    if parameter.default is None or _takes_null(hint):
        return
    default = "" if parameter.default is parameter.empty else f" Leave it out for its default, {parameter.default!r}."
    raise ConfigError(f"{key}=null: allowed is {_said(hint)}.{default}")


def _takes_null(hint: Any) -> bool:
    """Tell whether null is allowed, also where a function may stand: its receiver checks it."""
    kinds = get_args(hint) or (hint,)
    return any(kind in (Any, NoneType) or (get_origin(kind) or kind) is collections.abc.Callable for kind in kinds)


def _said(hint: Any) -> str:
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in get_args(hint) or (hint,))


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
