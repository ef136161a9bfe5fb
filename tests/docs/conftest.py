"""The commands of the documents, in this process and at a small size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doc_runs import alone, running


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, the current one, and the first where Python looks for modules. Its modules are forgotten behind
    the test: another page may have a file of the same name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield alone(tmp_path, monkeypatch)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


@pytest.fixture
def train(cwd: Path) -> Callable[..., int]:
    """`train(*arguments)` is `python train.py *arguments` in `cwd`; returns the exit code."""
    return running("train.py")
