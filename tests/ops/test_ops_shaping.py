import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.ops.advantages import missing_eos, relative_length_penalty, relative_length_reward

reproducible = settings(derandomize=True, deadline=None, max_examples=15)
LENGTH_SHAPINGS = [relative_length_penalty, relative_length_reward]

rows = st.tuples(st.sampled_from([0.0, 1.0, 0.5, -1.0, math.nan]), st.integers(0, 2), st.integers(0, 9))
batches = st.lists(rows, min_size=1, max_size=10)


def split(batch):
    rewards, group_id, lengths = (torch.tensor(column) for column in zip(*batch))
    return rewards, group_id, lengths


def test_missing_eos_by_hand():
    rewards, ended = torch.tensor([1.0, 1.0, math.nan]), torch.tensor([True, False, False])
    got = missing_eos(rewards, torch.zeros(3, dtype=torch.long), ended, penalty=0.75)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.25, math.nan]), equal_nan=True)


@pytest.mark.parametrize("penalty", [0.0, -1.0, math.nan])
def test_a_penalty_that_rewards_is_refused(penalty):
    with pytest.raises(ValueError, match="penalty=.*above 0"):
        missing_eos(torch.zeros(1), torch.zeros(1).long(), torch.ones(1).bool(), penalty=penalty)


def test_relative_length_penalty_by_hand():
    rewards = torch.tensor([1.0, 0.0, math.nan, 1.0, 1.0, 0.0, 0.0])
    group_id, lengths = torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.tensor([5, 10, 99, 4, 2, 7, 3])
    got = relative_length_penalty(rewards, group_id, lengths, weight=0.5)
    want = [1 - 0.5 * 0.5 * 5 / 10, -0.5 * 0.5, math.nan, 1 - 0.5, 1 - 0.5 * 2 / 4, 0.0, 0.0]
    torch.testing.assert_close(got, torch.tensor(want), equal_nan=True)


def test_relative_length_reward_by_hand():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, math.nan, 1.0, 1.0])
    group_id, lengths = torch.tensor([0, 0, 0, 0, 0, 1, 1]), torch.tensor([10, 20, 10, 18, 99, 4, 4])
    got = relative_length_reward(rewards, group_id, lengths, weight=2.0, threshold=0.5)
    want = [1 + 2 * 0.5, 1 - 2 * 0.5, 0.0, 2 * (0.5 - 0.8), math.nan, 1.0, 1.0]
    torch.testing.assert_close(got, torch.tensor(want), equal_nan=True)
    # at a threshold of 1 no answer is right, and nothing is gained by being short
    got = relative_length_reward(rewards, group_id, lengths, weight=2.0, threshold=1.0)
    assert bool((got.nan_to_num() <= rewards.nan_to_num()).all())


@pytest.mark.parametrize("shaping", LENGTH_SHAPINGS)
@reproducible
@given(batch=batches, data=st.data())
def test_order_and_unscored_rows_do_not_matter_and_weight_zero_changes_nothing(shaping, batch, data):
    rewards, group_id, lengths = split(batch)
    got = shaping(rewards, group_id, lengths)
    assert torch.equal(got.isnan(), rewards.isnan())
    order = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    again = shaping(rewards[order], group_id[order], lengths[order])
    torch.testing.assert_close(again, got[order], equal_nan=True)
    kept = ~rewards.isnan()
    torch.testing.assert_close(shaping(rewards[kept], group_id[kept], lengths[kept]), got[kept])
    torch.testing.assert_close(shaping(rewards, group_id, lengths, weight=0.0), rewards, equal_nan=True)


@pytest.mark.parametrize("shaping", LENGTH_SHAPINGS)
def test_a_weight_that_rewards_length_is_refused(shaping):
    with pytest.raises(ValueError, match="weight=-0.5 would reward length"):
        shaping(torch.zeros(1), torch.zeros(1).long(), torch.ones(1).long(), weight=-0.5)
