"""Running normalisation: exact over everything seen, whatever the order of arrival in rollouts."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.algorithms.terms.credit import RunningNorm

REWARDS = st.lists(
    st.lists(st.one_of(st.just(math.nan), st.floats(-1e3, 1e3, width=32)), min_size=1, max_size=6),
    min_size=1,
    max_size=6,
)


@given(REWARDS)
def test_each_rollout_is_normalised_by_everything_seen_so_far(rollouts):
    norm, seen = RunningNorm(), []
    for rewards in rollouts:
        given_ = torch.tensor(rewards)
        out = norm(given_)
        seen += [r for r in rewards if not math.isnan(r)]
        assert torch.equal(out.isnan(), given_.isnan())
        if not seen:
            continue
        everything = torch.tensor(seen, dtype=torch.float64)
        std = float(everything.std()) if len(seen) > 1 else 0.0
        expected = (given_.double() - everything.mean()) / (std + 1e-8 if std > 1e-6 else 1.0)
        if std > 1e-6 or std == 0:
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_by_hand():
    norm = RunningNorm(eps=0.0)
    # mean 2, deviation sqrt(2); then of 1, 3, 5, 7: mean 4, deviation sqrt(20 / 3)
    torch.testing.assert_close(norm(torch.tensor([1.0, 3.0])), torch.tensor([-1.0, 1.0]) / math.sqrt(2))
    torch.testing.assert_close(norm(torch.tensor([5.0, 7.0])), torch.tensor([1.0, 3.0]) / math.sqrt(20 / 3))


def test_what_is_only_scaled_is_not_taken_in():
    norm = RunningNorm(eps=0.0)
    norm(torch.tensor([1.0, 3.0]))
    before = norm.state()
    torch.testing.assert_close(norm.scaled(torch.tensor([3.0, 102.0])), torch.tensor([1.0, 100.0]) / math.sqrt(2))
    assert norm.state() == before


def test_rewards_that_are_all_equal_become_zero():
    norm = RunningNorm()
    assert norm(torch.tensor([0.3, 0.3])).abs().max() == 0
    assert norm(torch.tensor([0.3])).abs().max() == 0
