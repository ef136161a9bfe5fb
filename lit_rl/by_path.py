"""What stands at a path of the user's: ``package.module:name`` or ``./file.py:name``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.errors import ConfigError, LitRLError, RewardError, did_you_mean, with_its_line
from lit_rl.import_source import is_file, load_file
from lit_rl.named import FUNCTION_FORM, check_file, no_function
from lit_rl.process_state import CHOSEN_FOR_SPEED, process_kept, raised_by_itself


@dataclass(frozen=True)
class Named:
    """An object that a path names."""

    source: str
    """The file, absolute, or the module."""
    text: bytes | None
    """The file as it was read; None for a module."""
    name: str
    value: Any


def named_by(path: str, key: str, failed: type[LitRLError] = RewardError) -> Named:
    """Load and return the object at ``package.module:name`` or ``./file.py:name``.

    Args:
        path: The path; a file is relative to the current directory.
        key: The setting that named it, for messages.
        failed: The class of error for a module or file that fails on import.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        LitRLError: `failed`.
    """
    source, colon, name = str(path).rpartition(":")
    if not (colon and source and name):
        raise ConfigError(f"{key}={path!r} names no function: {FUNCTION_FORM}.")
    if not is_file(source):
        return Named(source, None, name, _attribute(_load_module(source, key, failed), name, path, key))
    file = Path(source).expanduser().resolve()
    text = _read(file, key)
    return Named(str(file), text, name, _attribute(_load_file(file, text, key, failed), name, path, key))


def _read(path: Path, key: str) -> bytes:
    check_file(path, key)
    return path.read_bytes()


def _load_file(path: Path, text: bytes, key: str, failed: type[LitRLError]) -> ModuleType:
    try:
        with process_kept(f"{key}: importing {path}", CHOSEN_FOR_SPEED):
            return load_file(path, text)
    except BaseException as error:
        if not raised_by_itself(error):
            raise
        raise failed(f"{key}: importing {path} failed with {with_its_line(error)}.") from error


def _load_module(name: str, key: str, failed: type[LitRLError]) -> ModuleType:
    try:
        with process_kept(f"{key}: importing {name}", CHOSEN_FOR_SPEED):
            return importlib.import_module(name)
    except BaseException as error:
        if not raised_by_itself(error):
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise failed(f"{key}: importing {name} failed with {with_its_line(error)}.") from error
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
