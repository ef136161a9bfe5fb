"""The tests of real task sets and environment servers. Elsewhere than in their environment they are skipped."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [name for name in ("verifiers", "openenv") if importlib.util.find_spec(name) is None]
sys.path.append(str(HERE.parent / "docs"))  # what reads the pages of docs/, and runs what they say

from doc_runs import alone, running  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.agents)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=f"{', '.join(MISSING)} not installed: make test-agents"))


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and the current one."""
    return alone(tmp_path, monkeypatch)


@pytest.fixture
def train(cwd: Path) -> Callable[..., int]:
    """`train(*arguments)` is `lit-rl *arguments` in `cwd`; returns the exit code."""
    return running("lit-rl")
