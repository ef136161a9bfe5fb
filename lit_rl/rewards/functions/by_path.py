"""One reward function by its path: ``package.module:name`` or ``./file.py:name``."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.errors import ConfigError, RewardError, did_you_mean
from lit_rl.rewards.functions.contract import check_callable
from lit_rl.rewards.workers.import_source import is_file, load_file

FORM = "allowed are 'package.module:name' and './file.py:name'"


class FunctionFromPath:
    """A callable that pickles as the path it came from, and so reaches worker processes.

    Args:
        path: ``package.module:name``, or ``file.py:name`` with a file relative to the current directory. Kept absolute.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """

    def __init__(self, path: str) -> None:
        source, colon, name = str(path).rpartition(":")
        if not (colon and source and name):
            raise ConfigError(f"reward.fn={path!r} names no function: {FORM}.")
        if is_file(source):
            source = str(Path(source).expanduser().resolve())
        self.source = source
        """The file, absolute, or the module."""
        self.text = _read(Path(source)) if is_file(source) else None
        """The file as it was read; None for a module."""
        module = _load_module(source) if self.text is None else _load_file(Path(source), self.text)
        self.function = _attribute(module, name, path)
        functools.update_wrapper(self, self.function, updated=())
        self.__name__ = name

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


def load_function(path: str) -> FunctionFromPath:
    """The callable at ``package.module:name``, ``./file.py:name`` or ``/folder/file.py:name``.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """
    return FunctionFromPath(path)


def is_async(function: Any) -> bool:
    """Whether a function, or the call of an object, is a coroutine function."""
    inner = function.function if isinstance(function, FunctionFromPath) else function
    return any(inspect.iscoroutinefunction(part) for part in (inner, type(inner).__call__))


def _read(path: Path) -> bytes:
    if not path.is_file():
        here = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        found = f"Python files there: {', '.join(here) or 'none'}." if path.parent.is_dir() else "No such folder."
        raise ConfigError(f"reward.fn: there is no file {path}. {found}{did_you_mean(path.name, here)}")
    if path.suffix != ".py":
        raise ConfigError(f"reward.fn: {path} is not a Python file: {FORM}.")
    return path.read_bytes()


def _load_file(path: Path, text: bytes) -> ModuleType:
    try:
        return load_file(path, text)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward.fn: importing {path} failed with {type(error).__name__}: {error}.") from error


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise RewardError(f"reward.fn: importing {name} failed with {type(error).__name__}: {error}.") from error
        if Path(f"{name}.py").is_file():
            hint = f" A file is given as './{name}.py:name'."
        else:
            parent, _, last = missing.rpartition(".")
            modules = _submodules(parent)
            hint = f" Modules of {parent}: {', '.join(modules)}.{did_you_mean(last, modules)}" if parent else ""
        raise ConfigError(f"reward.fn: there is no module {missing!r}; {FORM}.{hint}") from error


def _submodules(package: str) -> Sequence[str]:
    paths = getattr(sys.modules.get(package), "__path__", [])
    return sorted(module.name for module in pkgutil.iter_modules(paths))


def _attribute(module: ModuleType, name: str, path: str) -> Any:
    if not hasattr(module, name):
        public = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        )
        raise ConfigError(
            f"reward.fn={path!r}: there is no {name!r}. Functions there: {', '.join(public) or 'none'}."
            f"{did_you_mean(name, public)}"
        )
    value = getattr(module, name)
    check_callable(path, value)
    return value
