"""The commands of the documents, in this process and at a small size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_runs import left_as_found

from lit_rl import cli


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one, and the first where Python looks for modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def train(cwd: Path) -> Callable[..., int]:
    """`train(*arguments)` is `python train.py *arguments` in `cwd`; returns the exit code."""

    def run(*arguments: str) -> int:
        with left_as_found():
            sys.argv = ["train.py"]
            return cli.run(list(arguments))

    return run
