"""The commands of the documents, in this process and at a small size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from doc_runs import alone, running


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules_here: None) -> Path:
    """An empty folder, the current one, and the first where Python looks for modules."""
    return alone(tmp_path, monkeypatch)


@pytest.fixture
def train(cwd: Path) -> Callable[..., int]:
    """`train(*arguments)` is `python train.py *arguments` in `cwd`; returns the exit code."""
    return running("train.py")
