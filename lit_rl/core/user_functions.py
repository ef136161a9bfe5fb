"""Functions of users at ``package.module:name`` or ``./file.py:name``: loaded, or checked without running anything.

Files are loaded by `load_file`, in the training process and in workers. `check_function` reads only their text, before
anything slow; `load_by_path` imports them and returns the object. `weights_by_name` checks the weights that a config
gives to functions. Standard library only: worker processes load this file without PyTorch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import math
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_rl.core.errors import ConfigError, LitRLError, RewardError, describe_error, did_you_mean
from lit_rl.core.process_state import CHOSEN_FOR_SPEED, is_raised_by_user_code, preserve_process_state

FUNCTION_FORM = "allowed are 'package.module:name' and './file.py:name'"

_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_DYNAMIC = {"globals", "vars", "exec", "setattr", "__getattr__", "modules", "__dict__"}
"""Names by which a file may define others as it runs."""


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
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceAsRead(name, str(path), text))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        with importable_folder(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _SourceAsRead(SourceFileLoader):
    """A loader of source text that was read before: a replaced worker must not pick up an edit during a run."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self.text = text

    def get_data(self, path: str) -> bytes:
        return self.text

    def path_stats(self, path: str) -> Any:
        raise OSError("compiled code in __pycache__ may be of another version")


@contextmanager
def importable_folder(folder: Path) -> Iterator[None]:
    """Let modules be imported from a folder. It is last in `sys.path`, so that none of them hides a real package."""
    entry = str(folder)
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def check_file(path: Path, key: str) -> None:
    """Refuse a path that is no Python file.

    Raises:
        ConfigError: names the Python files that are there.
    """
    if not path.is_file():
        here = sorted(file.name for file in path.parent.glob("*.py")) if path.parent.is_dir() else []
        found = f"Python files there: {', '.join(here) or 'none'}." if path.parent.is_dir() else "No such folder."
        raise ConfigError(f"{key}: there is no file {path}. {found}{did_you_mean(path.name, here)}")
    if path.suffix != ".py":
        raise ConfigError(f"{key}: {path} is not a Python file: {FUNCTION_FORM}.")


def missing_function_error(path: str, key: str, name: str, public: Sequence[str]) -> ConfigError:
    """Return the error for a file or module without that name."""
    listed = ", ".join(public) or "none"
    return ConfigError(f"{key}={path!r}: there is no {name!r}. There are: {listed}.{did_you_mean(name, public)}")


def check_function(path: str, key: str) -> None:
    """Refuse `./file.py:name` if the file is missing, or its text can have no such name; nothing of it is run.

    Modules are not searched for, and a file that may define names dynamically is assumed to have this one.

    Raises:
        ConfigError: the same as when the file is loaded.
    """
    source, colon, name = path.rpartition(":")
    if not colon or not source.endswith(".py"):
        return
    file = Path(source).expanduser().resolve()
    check_file(file, key)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # reported where it is loaded
        return
    bound, used = set[str](), set[str]()  # anywhere in it, in functions too: more than the module has
    for node in ast.walk(tree):
        if isinstance(node, _DEFINED):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            used.add(node.id)
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    is_dynamic = "*" in bound or not _DYNAMIC.isdisjoint(used | bound)
    if name not in bound and not is_dynamic:
        public = {node.name for node in tree.body if isinstance(node, _DEFINED) and not node.name.startswith("_")}
        raise missing_function_error(path, key, name, sorted(public))


@dataclass(frozen=True)
class LoadedObject:
    """An object that a path names."""

    source: str
    """The file, absolute, or the module."""
    text: bytes | None
    """The file as it was read; None for a module."""
    name: str
    value: Any


def load_by_path(path: str, key: str, error_class: type[LitRLError] = RewardError) -> LoadedObject:
    """Load and return the object at ``package.module:name`` or ``./file.py:name``.

    Args:
        path: The path; a file is relative to the current directory.
        key: The setting that named it, for messages.
        error_class: The class of error for a module or file that fails on import.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        LitRLError: `error_class`.
    """
    source, colon, name = str(path).rpartition(":")
    if not (colon and source and name):
        raise ConfigError(f"{key}={path!r} names no function: {FUNCTION_FORM}.")
    text = None
    if is_file_path(source):
        file = Path(source).expanduser().resolve()
        check_file(file, key)
        source, text = str(file), file.read_bytes()
    module = _import_source(source, text, key, error_class)
    if not hasattr(module, name):
        public = sorted(
            each
            for each, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
            and not each.startswith("_")
        )
        raise missing_function_error(path, key, name, public)
    return LoadedObject(source, text, name, getattr(module, name))


def _import_source(source: str, text: bytes | None, key: str, error_class: type[LitRLError]) -> ModuleType:
    try:
        with preserve_process_state(f"{key}: importing {source}", CHOSEN_FOR_SPEED):
            return load_source(source, text)
    except BaseException as error:
        if not is_raised_by_user_code(error):
            raise
        missing = error.name if text is None and isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{source}.".startswith(f"{missing}."):
            raise error_class(f"{key}: importing {source} failed with {describe_error(error)}.") from error
        parent, _, last = missing.rpartition(".")
        hint = ""
        if Path(f"{source}.py").is_file():
            hint = f" A file is given as './{source}.py:name'."
        elif parent:
            paths = getattr(sys.modules.get(parent), "__path__", [])
            modules = sorted(module.name for module in pkgutil.iter_modules(paths))
            hint = f" Modules of {parent}: {', '.join(modules)}.{did_you_mean(last, modules)}"
        raise ConfigError(f"{key}: there is no module {missing!r}; {FUNCTION_FORM}.{hint}") from error


def weights_by_name(weights: Any, names: list[str]) -> dict[str, float]:
    """Return a weight for each name, 1 where none is given.

    Raises:
        ConfigError: a weight has no function, or is not a finite number.
    """
    chosen = {} if weights is None else weights
    if not isinstance(chosen, Mapping):
        if not isinstance(chosen, Sequence) or isinstance(chosen, str) or len(chosen) != len(names):
            raise ConfigError(f"weights={weights!r} must be {len(names)} numbers, for {', '.join(names)}.")
        chosen = dict(zip(names, chosen))
    check_weights("weights", chosen, names)
    return {name: float(chosen.get(name, 1.0)) for name in names}


def check_weights(key: str, weights: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a weight that belongs to none of the reward functions, or is not a finite number.

    Args:
        key: Of the weights in the config.
        weights: By the names of functions.
        names: Of all functions.

    Raises:
        ConfigError: names the key and the function.
    """
    for name, weight in weights.items():
        if name not in names:
            raise ConfigError(
                f"{key} names {name!r}, which is no reward function. Functions: {', '.join(names)}."
                f"{did_you_mean(str(name), names)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"{key}.{name}={weight!r} must be a finite number.")
