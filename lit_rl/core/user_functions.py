"""Functions of users at ``package.module:name`` or ``./file.py:name``: found, loaded, checked.

Standard library only: worker processes load this file without PyTorch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.core.errors import ConfigError, LitRLError, RewardError, describe_error, did_you_mean
from lit_rl.core.model_paths import FUNCTION_FORM, check_file, missing_function_error
from lit_rl.core.process_state import CHOSEN_FOR_SPEED, is_raised_by_user_code, preserve_process_state


def is_file_path(source: str) -> bool:
    """Tell whether the part before the colon names a file; else it names a module."""
    return source.endswith(".py") or "/" in source or "\\" in source


def load_source(source: str, text: bytes | None = None) -> ModuleType:
    """Return the module of this name or in this file; `text` is the file as it was read before, whatever it holds by
    then."""
    return importlib.import_module(source) if text is None else load_file(Path(source), text)


def load_file(path: Path, text: bytes) -> ModuleType:
    """Return the module that this text makes; it is executed once for each content.

    Raises:
        Exception: whatever the file raises. Nothing of it stays in `sys.modules`.
    """
    # The content is part of the name: an edited file is read again (notebooks), an unchanged one is run only once.
    digest = hashlib.sha256(str(path).encode() + text).hexdigest()[:16]
    name = f"_lit_rl_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_KeptSource(name, str(path), text))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        with _siblings_importable(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _KeptSource(SourceFileLoader):
    """Runs a text that was read before: a worker that is replaced must not pick up an edit in the middle of a run."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self.text = text

    def get_data(self, path: str) -> bytes:
        return self.text

    def path_stats(self, path: str) -> Any:
        raise OSError("compiled code in __pycache__ may be of another version")


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


@dataclass(frozen=True)
class LoadedObject:
    """An object that a path names."""

    source: str
    """The file, absolute, or the module."""
    text: bytes | None
    """The file as it was read; None for a module."""
    name: str
    value: Any


def load_by_path(path: str, key: str, failed: type[LitRLError] = RewardError) -> LoadedObject:
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
    if not is_file_path(source):
        return LoadedObject(source, None, name, _attribute(_load_module(source, key, failed), name, path, key))
    file = Path(source).expanduser().resolve()
    text = _read(file, key)
    return LoadedObject(str(file), text, name, _attribute(_load_file(file, text, key, failed), name, path, key))


def _read(path: Path, key: str) -> bytes:
    check_file(path, key)
    return path.read_bytes()


def _load_file(path: Path, text: bytes, key: str, failed: type[LitRLError]) -> ModuleType:
    try:
        with preserve_process_state(f"{key}: importing {path}", CHOSEN_FOR_SPEED):
            return load_file(path, text)
    except BaseException as error:
        if not is_raised_by_user_code(error):
            raise
        raise failed(f"{key}: importing {path} failed with {describe_error(error)}.") from error


def _load_module(name: str, key: str, failed: type[LitRLError]) -> ModuleType:
    try:
        with preserve_process_state(f"{key}: importing {name}", CHOSEN_FOR_SPEED):
            return importlib.import_module(name)
    except BaseException as error:
        if not is_raised_by_user_code(error):
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise failed(f"{key}: importing {name} failed with {describe_error(error)}.") from error
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
        raise missing_function_error(path, key, name, public)
    return getattr(module, name)
