"""Tests on the pretended GPU (`pretend.py`). In a process without it they are skipped: `make test-pretended-gpu`."""

from __future__ import annotations

import sys
from pathlib import Path

import pretend
import pytest
import torch

HERE = Path(__file__).parent
TESTS = HERE.parent
sys.path += [str(TESTS), *(str(TESTS / name) for name in ("runs", "doors", "algorithms", "generation"))]
sys.path += [str(TESTS.parent / "scripts")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.is_available() and torch.cuda.get_device_name() == pretend.NAME
    for item in items if not there else ():
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no pretended GPU in this process: make test-pretended-gpu"))


@pytest.fixture(autouse=True)
def _first_device() -> None:
    """Make the first device the current one: a run on another leaves that."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
