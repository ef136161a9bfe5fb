"""Two processes do what one does, also where pairs are compared over a step or the reference is computed before."""

from __future__ import annotations

from pathlib import Path

import dist_precomputed
import pytest
from dist_equal import Ones, assert_equal_runs, left

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.fixture(scope="module")
def two(two_ranks: Path) -> Path:
    """What two processes left behind."""
    return two_ranks / "precomputed"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Ones:
    return Ones(dist_precomputed.run, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", dist_precomputed.RUNS)
def test_two_processes_do_what_one_does(two: Path, one: Ones, name: str) -> None:
    assert_equal_runs(one(name), left(two, name), share=1e-4, beyond=1e-6, moved=1e-3)


def test_one_file_for_each_set_whatever_the_number_of_processes(two: Path, one: Ones) -> None:
    for name in dist_precomputed.RUNS:
        one(name)
    here, there = (sorted(path.name for path in (folder / "cache").iterdir()) for folder in (one.folder / "1", two))
    assert len(here) == 2 and here == there
