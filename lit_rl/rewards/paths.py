"""Reward functions named in a config: ``package.module:name`` or ``./file.py:name``."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.errors import ConfigError, RewardError, did_you_mean
from lit_rl.rewards.base import Rewards
from lit_rl.rewards.contract import check_callable

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
        if _is_file(source):
            source = str(Path(source).expanduser().resolve())
        self.function = _attribute(_load(source), name, path)
        functools.update_wrapper(self, self.function, updated=())
        self.path = f"{source}:{name}"
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FunctionFromPath({self.path!r})"

    def __reduce__(self) -> tuple[type[FunctionFromPath], tuple[str]]:
        return FunctionFromPath, (self.path,)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionFromPath:
        return self  # as for any function; reading the file again could pick up an edit in the middle of a run

    @property
    def owner(self) -> str:
        """The file or module without folders, packages and ending."""
        source = self.path.rpartition(":")[0]
        return Path(source).stem if _is_file(source) else source.rpartition(".")[2]


def load_function(path: str) -> FunctionFromPath:
    """The callable at ``package.module:name``, ``./file.py:name`` or ``/folder/file.py:name``.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """
    return FunctionFromPath(path)


def from_paths(fn: str | list[str], weights: list[float] | None = None) -> Rewards:
    """Rewards from one path or several; functions of the same name are called ``file.name``.

    Args:
        fn: ``package.module:name`` or ``./file.py:name``, or a list of these.
        weights: One for each path. None: all 1.
    """
    functions = [load_function(path) for path in ([fn] if isinstance(fn, str) else fn)]
    counts = Counter(function.__name__ for function in functions)
    names = [f.__name__ if counts[f.__name__] == 1 else f"{f.owner}.{f.__name__}" for f in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"reward.fn holds the same function or file name twice: {', '.join(names)}.")
    return Rewards(dict(zip(names, functions)), weights)


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def _load(source: str) -> ModuleType:
    return _load_file(Path(source)) if _is_file(source) else _load_module(source)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        here = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        found = f"Python files there: {', '.join(here) or 'none'}." if path.parent.is_dir() else "No such folder."
        raise ConfigError(f"reward.fn: there is no file {path}. {found}{did_you_mean(path.name, here)}")
    # The content is part of the name: an edited file is read anew (notebooks), an unchanged one is run only once.
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"_lit_rl_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.fn: {path} is not a Python file: {FORM}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        with _siblings_importable(path.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"reward.fn: importing {path} failed with {type(error).__name__}: {error}.") from error
    return module


@contextmanager
def _siblings_importable(folder: Path) -> Iterator[None]:
    """Let a file import its neighbours while it is read. Last in line, so no neighbour hides a real package."""
    entry = str(folder)
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


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
