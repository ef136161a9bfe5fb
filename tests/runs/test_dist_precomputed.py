"""Two processes do what one does where the reference was asked before the first step, and they share its files."""

from __future__ import annotations

from pathlib import Path

import dist_precomputed
import pytest
from dist_equal import Ones, assert_equal_runs, left

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.mark.parametrize("name", dist_precomputed.RUNS)
def test_two_processes_do_what_one_does(two: Path, one: Ones, name: str) -> None:
    """With one file for each set: rows of training and validation; for KTO pairs of two epochs and of validation."""
    assert_equal_runs(one(name), left(two, name), share=1e-4, beyond=1e-6, moved=1e-3)
    here, there = (
        sorted(each.name for each in (folder / name / "cache").iterdir()) for folder in (one.folder / "1", two)
    )
    assert here == there and len(here) == (5 if name == "kto" else 2)
