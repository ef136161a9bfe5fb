"""Reading a module or a Python file by its path, in the training process and in workers.

Standard library only: worker processes load this file without PyTorch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


def is_file(source: str) -> bool:
    """Tell whether the part before the colon names a file; else it names a module."""
    return source.endswith(".py") or "/" in source or "\\" in source


def load(source: str, text: bytes | None = None) -> ModuleType:
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
