"""One rank of two has a loss or a gradient that is not finite: both leave the step out, and both end after several."""

from __future__ import annotations

import math

import dist_broken
import pytest
from dist_equal import assert_equal_runs, left

from lit_rl.algorithms.optim.broken_steps import LIMIT

pytestmark = [pytest.mark.dist, pytest.mark.all]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", dist_broken.NAMES)
def test_both_ranks_leave_out_the_step_that_one_of_them_breaks(strategy, name, two, one):
    """The weights are those of one process that left it out, and so finite."""
    found = left(two / strategy, name)
    assert_equal_runs(one(name), found, share=2e-4, beyond=2e-6, moved=1e-3)
    assert [step["skipped_steps"] for step in found["each"]] == [0, 0, 1, 0]
    norms = [step["grad_norm"] for step in found["each"]]
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True] and min(norms[:2]) > 0


def test_in_python_every_rank_refuses_a_step_that_does_not_divide_before_it_reads_weights(two):
    for key, said in zip(("data.batch_size=3", "data.prompts_per_rollout=3"), left(two, "refused"), strict=True):
        assert len(said) == 2 and all(key in each and "data-parallel size 2" in each for each in said), said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_in_a_row_end_both_ranks_with_the_same_error(strategy, two):
    assert left(two / strategy, "ended") == [[6, LIMIT]] * 2, "one good step, and the last broken one is not counted"
