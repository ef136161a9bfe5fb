"""The tests of the real DeepSpeed. Elsewhere than in their environment those that run it are skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "runs"), str(HERE.parent / "algorithms")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("deepspeed") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.deepspeed)
            if missing:
                item.add_marker(pytest.mark.skip(reason="deepspeed not installed: make test-deepspeed"))
