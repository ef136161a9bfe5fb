"""Terms that count over a whole optimizer step do so over two real processes: the same gradients as one of them."""

from __future__ import annotations

from functools import partial

import dist_equal
import dist_terms
import pytest
from dist_equal import left

pytestmark = [pytest.mark.dist, pytest.mark.all]


assert_equal_runs = partial(dist_equal.assert_equal_runs, share=1e-4, beyond=2e-7, moved=1e-3)


@pytest.mark.parametrize("name", dist_terms.shapes())
def test_ddp_equals_one_process(name, two, one):
    assert_equal_runs(one(name), left(two, name))


@pytest.mark.parametrize("name", dist_terms.SHARDED)
def test_fsdp_equals_one_process(name, two, one):
    assert_equal_runs(one(name), left(two / "fsdp", name))


def test_the_ranks_had_responses_of_different_lengths(two):
    """Else nothing was padded before it was gathered."""
    first, second = left(two, "whitened")["widths"]
    assert len(first) == dist_terms.STEPS and first != second


def test_the_ranks_left_out_different_numbers_of_rows(two):
    """In one step a rank learns from none, and still takes as many passes as the other."""
    first, second = left(two, "skipped")["teaching"]
    assert any(not mine and theirs for mine, theirs in zip(first, second))


def test_what_is_counted_was_there_to_count(two):
    metrics = {name: left(two, name)["metrics"] for name in dist_terms.shapes()}
    assert metrics["dynamic"]["train/groups/drawn"] > 0
    assert metrics["weights"]["train/sampling/truncated"] >= 0 and metrics["weights"]["train/sampling/ess"] < 1
    assert 0 < metrics["kl-cov"]["train/kl_cov/share"] < 0.5
    assert metrics["entropy"]["train/entropy_coef"] > 0
    assert metrics["ahead"]["train/sampling/staleness/max"] == 1
    assert any(name.startswith("train/first/") for name in metrics["ppo"])
