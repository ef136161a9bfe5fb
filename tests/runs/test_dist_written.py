"""Methods that write what they learn from, over two real processes: the texts, gradients and metrics of one.

A completion's random numbers are named by its row of the data, so they are the same whoever writes it.
"""

from __future__ import annotations

from functools import partial

import dist_equal
import dist_written
import pytest
from dist_equal import left

from lit_rl.algorithms.gkd import writer_of

pytestmark = [pytest.mark.dist, pytest.mark.all]


assert_equal_runs = partial(dist_equal.assert_equal_runs, share=1e-4, beyond=1e-6, moved=1e-3)


@pytest.mark.parametrize("name", dist_written.SHAPES)
def test_two_processes_with_micro_batches_write_and_learn_as_one(name, two, one):
    assert_equal_runs(one(name), left(two, name))


@pytest.mark.parametrize("name", dist_written.SHARDED)
def test_sharded_policies_and_opponents_write_as_whole_ones(name, two, one):
    assert_equal_runs(one(name), left(two / "fsdp", name))


def test_what_the_ranks_could_differ_in_was_there(two):
    """Ties and failures, which are no part of a mean; steps of every writer; a reference that moved."""
    metrics = {name: left(two, name)["metrics"] for name in dist_written.SHAPES}
    for name in ("online-dpo-of-four", "xpo", "nash-md"):
        assert 0 < metrics[name]["train/judge/failures"] < 1 and 0 < metrics[name]["train/judge/ties"] < 1
    assert metrics["online-dpo"]["train/judge/ties"] < 1 and metrics["online-ipo"]["train/judge/ties"] < 1
    assert 0 < metrics["raft"]["train/groups/tied"] < 1
    assert abs(metrics["iterative-dpo"]["train/objective/kl"]) < abs(metrics["online-dpo"]["train/objective/kl"])
    assert metrics["gkd-data"]["train/on_policy"] == 0 and metrics["gkd-student"]["train/on_policy"] == 1
    writers = [
        writer_of(step, seed=0, on_policy_fraction=0.5, teacher_completions=True) for step in range(dist_written.STEPS)
    ]
    assert set(writers) == {"student", "teacher"}
