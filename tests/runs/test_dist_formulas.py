"""Terms that differ from one of `test_dist_terms.py` in a formula alone, over two real processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import dist_equal
import dist_terms
import pytest
from dist_equal import left

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive]

assert_equal_runs = partial(dist_equal.assert_equal_runs, share=1e-4, beyond=2e-7, moved=1e-3)


@pytest.mark.parametrize("name", dist_terms.ALIKE)
def test_ddp_equals_one_process(name: str, two_ranks: Path, tmp_path: Path) -> None:
    dist_terms.run(name, tmp_path, 1)
    assert_equal_runs(left(tmp_path, name), left(two_ranks / "formulas", name))
