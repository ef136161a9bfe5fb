"""One reward function by its path: ``package.module:name`` or ``./file.py:name``."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from lit_rl.by_path import named_by
from lit_rl.rewards.functions.contract import check_callable


class FunctionFromPath:
    """A callable that pickles as the path it came from, and so reaches worker processes.

    Args:
        path: ``package.module:name``, or ``file.py:name`` with a file relative to the current directory. Kept absolute.
        key: The setting that named it, for messages.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import, or the object cannot be called.
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
    """Return the callable at ``package.module:name``, ``./file.py:name`` or ``/folder/file.py:name``; `key` is its
    setting.

    Raises:
        ConfigError: the path is not of this form, or the module, file or name does not exist.
        RewardError: the module or file fails on import.
    """
    return FunctionFromPath(path, key)


def is_async(function: Any) -> bool:
    """Tell whether a function, or the call of an object, is a coroutine function."""
    inner = function.function if isinstance(function, FunctionFromPath) else function
    return any(inspect.iscoroutinefunction(part) for part in (inner, type(inner).__call__))
