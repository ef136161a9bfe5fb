"""Offline methods over two real processes, and over micro-batches: the gradients of one process and one batch."""

from __future__ import annotations

from functools import partial

import dist_equal
import dist_offline
import pytest
from dist_equal import left

pytestmark = [pytest.mark.dist, pytest.mark.all]


assert_equal_runs = partial(dist_equal.assert_equal_runs, share=2e-4, beyond=2e-6, moved=1e-4)


@pytest.mark.parametrize("name", dist_offline.WHOLE)
def test_two_processes_equal_one(name, two, one):
    assert_equal_runs(one(name), left(two, name))


@pytest.mark.parametrize("name", dist_offline.SHARDED)
def test_sharded_processes_with_micro_batches_equal_one(name, two, one):
    assert_equal_runs(one(name), left(two / "fsdp", name))


@pytest.mark.parametrize("name", dist_offline.SHAPES)
def test_micro_batches_equal_a_whole_batch(name, one):
    assert_equal_runs(one(name), one(name, 4))
