"""One reward function by its path: ``package.module:name`` or ``./file.py:name``."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.errors import ConfigError, RewardError, did_you_mean
from lit_rl.named import FUNCTION_FORM, check_file, no_function
from lit_rl.rewards.functions.contract import check_callable
from lit_rl.rewards.workers.import_source import is_file, load_file


@dataclass(frozen=True)
class Named:
    """What a path names."""

    source: str
    """The file, absolute, or the module."""
    text: bytes | None
    """The file as it was read; None for a module."""
    name: str
    value: Any


def named_by(path: str, key: str) -> Named:
    """What stands at ``package.module:name`` or ``./file.py:name``.

    Args:
        path: The path; a file is relative to the current directory.
        key: The setting that it came with, for messages.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """
    source, colon, name = str(path).rpartition(":")
    if not (colon and source and name):
        raise ConfigError(f"{key}={path!r} names no function: {FUNCTION_FORM}.")
    if not is_file(source):
        return Named(source, None, name, _attribute(_load_module(source, key), name, path, key))
    file = Path(source).expanduser().resolve()
    text = _read(file, key)
    return Named(str(file), text, name, _attribute(_load_file(file, text, key), name, path, key))


class FunctionFromPath:
    """A callable that pickles as the path it came from, and so reaches worker processes.

    Args:
        path: ``package.module:name``, or ``file.py:name`` with a file relative to the current directory. Kept absolute.
        key: The setting that it came with, for messages.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import, or what it names cannot be called.
    """

    def __init__(self, path: str, key: str = "reward.fn") -> None:
        named = named_by(path, key)
        check_callable(path, named.value)
        self.source, self.text, self.function = named.source, named.text, named.value
        functools.update_wrapper(self, self.function, updated=())
        self.__name__ = named.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FunctionFromPath({self.path!r})"

    def __reduce__(self) -> tuple[type[FunctionFromPath], tuple[str]]:
        return FunctionFromPath, (self.path,)

    @property
    def path(self) -> str:
        """`source:name`."""
        return f"{self.source}:{self.__name__}"

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionFromPath:
        return self  # as for any function; reading the file again could pick up an edit in the middle of a run

    @property
    def owner(self) -> str:
        """The file or module without folders, packages and ending."""
        return self.source.rpartition(".")[2] if self.text is None else Path(self.source).stem


def load_function(path: str, key: str = "reward.fn") -> FunctionFromPath:
    """The callable at ``package.module:name``, ``./file.py:name`` or ``/folder/file.py:name``, which `key` names.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """
    return FunctionFromPath(path, key)


def is_async(function: Any) -> bool:
    """Whether a function, or the call of an object, is a coroutine function."""
    inner = function.function if isinstance(function, FunctionFromPath) else function
    return any(inspect.iscoroutinefunction(part) for part in (inner, type(inner).__call__))


def _read(path: Path, key: str) -> bytes:
    check_file(path, key)
    return path.read_bytes()


def _load_file(path: Path, text: bytes, key: str) -> ModuleType:
    try:
        return load_file(path, text)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{key}: importing {path} failed with {type(error).__name__}: {error}.") from error


def _load_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise RewardError(f"{key}: importing {name} failed with {type(error).__name__}: {error}.") from error
        if Path(f"{name}.py").is_file():
            hint = f" A file is given as './{name}.py:name'."
        else:
            parent, _, last = missing.rpartition(".")
            modules = _submodules(parent)
            hint = f" Modules of {parent}: {', '.join(modules)}.{did_you_mean(last, modules)}" if parent else ""
        raise ConfigError(f"{key}: there is no module {missing!r}; {FUNCTION_FORM}.{hint}") from error


def _submodules(package: str) -> Sequence[str]:
    paths = getattr(sys.modules.get(package), "__path__", [])
    return sorted(module.name for module in pkgutil.iter_modules(paths))


def _attribute(module: ModuleType, name: str, path: str, key: str) -> Any:
    if not hasattr(module, name):
        public = sorted(
            each
            for each, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
            and not each.startswith("_")
        )
        raise no_function(path, key, name, public)
    return getattr(module, name)
