import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.ops.advantages import batch_normalized, centered, group_normalized, group_std, leave_one_out

reproducible = settings(derandomize=True, deadline=None)
ESTIMATORS = [group_normalized, batch_normalized, centered, leave_one_out]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)

reward = st.one_of(st.sampled_from([0.0, 1.0, 0.35, -0.5]), st.floats(-3, 3, width=32), st.just(math.nan))
batches = st.lists(st.tuples(reward, st.integers(-2, 2)), min_size=1, max_size=16)


def split(batch):
    rewards = torch.tensor([r for r, _ in batch], dtype=torch.float32)
    return rewards, torch.tensor([g for _, g in batch])


def groups_of(*groups):
    """Groups of rewards, one after another."""
    rewards = torch.tensor([r for group in groups for r in group])
    return rewards, torch.tensor([i for i, group in enumerate(groups) for _ in group])


def test_by_hand():
    rewards, group_id = groups_of([0.0, 1.0, 2.0], [5.0, 5.0, 8.0])
    torch.testing.assert_close(centered(rewards, group_id), torch.tensor([-1.0, 0, 1, -1, -1, 2]))
    torch.testing.assert_close(leave_one_out(rewards, group_id), torch.tensor([-1.5, 0, 1.5, -1.5, -1.5, 3]))
    std = torch.tensor([1.0] * 3 + [3**0.5] * 3)
    torch.testing.assert_close(group_std(rewards, group_id), std)
    got = group_normalized(rewards, group_id, eps=0.5)
    torch.testing.assert_close(got, torch.tensor([-1.0, 0, 1, -1, -1, 2]) / (std + 0.5))
    got = batch_normalized(rewards, group_id, eps=0.5)
    torch.testing.assert_close(got, torch.tensor([-1.0, 0, 1, -1, -1, 2]) / (rewards.std() + 0.5))


def test_leave_one_out_is_what_its_name_says():
    rewards, group_id = groups_of([0.1, 0.9, 0.4, 0.7])
    others = torch.stack([rewards[torch.arange(4) != i].mean() for i in range(4)])
    torch.testing.assert_close(leave_one_out(rewards, group_id), rewards - others)


@every_estimator
@reproducible
@given(batch=batches)
def test_advantages_of_a_group_sum_to_zero(estimator, batch):
    rewards, group_id = split(batch)
    got = estimator(rewards, group_id)
    for group in group_id.unique():
        assert got[group_id == group].sum().item() == pytest.approx(0, abs=1e-4)


@reproducible
@given(batch=batches)
def test_leave_one_out_is_centered_times_n_over_n_minus_one(batch):
    rewards, group_id = split(batch)
    got, base = leave_one_out(rewards, group_id), centered(rewards, group_id)
    for group in group_id.unique():
        rows = group_id == group
        n = int((~rewards[rows].isnan()).sum())
        torch.testing.assert_close(got[rows], base[rows] * (n / max(n - 1, 1)))


@every_estimator
@reproducible
@given(batch=batches, data=st.data())
def test_order_of_rows_and_names_of_groups_do_not_matter(estimator, batch, data):
    rewards, group_id = split(batch)
    order = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    names = torch.tensor(data.draw(st.lists(st.integers(-(2**60), 2**60), min_size=5, max_size=5, unique=True)))
    got = estimator(rewards[order], names[group_id[order] + 2])
    torch.testing.assert_close(got, estimator(rewards, group_id)[order])


@every_estimator
@reproducible
@given(batch=batches, shift=st.sampled_from([-2.0, 0.25, 4.0]))
def test_adding_a_constant_to_all_rewards_changes_nothing(estimator, batch, shift):
    rewards, group_id = split(batch)
    torch.testing.assert_close(estimator(rewards + shift, group_id), estimator(rewards, group_id), atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("scale", [2.0**-10, 0.5, 1024.0])
def test_normalized_advantages_have_no_scale_at_eps_zero(scale):
    rewards, group_id = groups_of([0.0, 1.0, 0.35, 0.2], [3.0, 3.0, 3.0, 4.0])
    for estimator in (group_normalized, batch_normalized):
        torch.testing.assert_close(estimator(rewards * scale, group_id, eps=0.0), estimator(rewards, group_id, eps=0.0))


@pytest.mark.parametrize("estimator", [centered, leave_one_out])
def test_the_others_scale_with_the_rewards(estimator):
    rewards, group_id = groups_of([0.0, 1.0, 0.35, 0.2])
    torch.testing.assert_close(estimator(4 * rewards, group_id), 4 * estimator(rewards, group_id))


@every_estimator
@reproducible
@given(value=st.floats(-1e6, 1e6, width=32), n=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(estimator, value, n):
    """Three groups, each of equal rewards; also at eps 0, where rounding noise would become +-1."""
    rewards, group_id = torch.full((3 * n,), value), torch.arange(3).repeat_interleave(n)
    assert estimator(rewards, group_id).eq(0).all()
    assert group_std(rewards, group_id).eq(0).all()
    if estimator in (group_normalized, batch_normalized):
        assert estimator(rewards, group_id, eps=0.0).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("base", [0.35, 0.1, 100.35])
def test_seven_against_one(base, dtype):
    """The one row's advantage is 7 / sqrt(8) whatever the size of the difference; the seven share -1 / sqrt(8)."""
    rewards = torch.tensor([base] * 7 + [base + 0.5], dtype=dtype)
    got = group_normalized(rewards, torch.zeros(8, dtype=torch.long), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([-1.0] * 7 + [7.0], dtype=dtype) / 8**0.5)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_float64_rewards_without_an_exact_mean_give_exactly_zero_too(n):
    rewards, group_id = torch.full((n,), 0.35, dtype=torch.float64), torch.zeros(n, dtype=torch.long)
    for estimator in ESTIMATORS:
        assert estimator(rewards, group_id).eq(0).all()


@every_estimator
def test_unscorable_rows_are_as_if_absent(estimator):
    rewards, group_id = groups_of([0.0, 1.0, 0.25], [2.0, 5.0])
    dirty, dirty_id = groups_of([math.nan, 0.0, 1.0, math.nan, 0.25], [2.0, math.nan, 5.0], [math.nan, math.nan])
    got = estimator(dirty, dirty_id)
    kept = ~dirty.isnan()
    torch.testing.assert_close(got[kept], estimator(rewards, group_id))
    assert got[~kept].eq(0).all()
    assert group_std(dirty, dirty_id)[~kept].eq(0).all()
    torch.testing.assert_close(group_std(dirty, dirty_id)[kept], group_std(rewards, group_id))


@every_estimator
def test_a_group_with_one_scored_row_gets_zero(estimator):
    rewards, group_id = groups_of([3.0], [math.nan, 7.0, math.nan], [0.0, 1.0])
    got = estimator(rewards, group_id)
    assert got[:4].eq(0).all() and got[4] < 0 < got[5]
    assert group_std(rewards, group_id)[:4].eq(0).all()


@pytest.mark.parametrize("estimator", [group_normalized, centered, leave_one_out])
def test_one_group_never_touches_another(estimator):
    first, group_id = groups_of([0.0, 1.0, 0.25], [2.0, 5.0, 9.0])
    second = torch.cat([first[:3], torch.tensor([-7.0, 1e6, math.nan])])
    assert torch.equal(estimator(first, group_id)[:3], estimator(second, group_id)[:3])


def test_batch_deviation_keeps_an_easy_group_small():
    """What batch normalisation is for: a group of tiny differences is not blown up to unit size."""
    rewards, group_id = groups_of([0.0, 1.0, 0.0, 1.0], [0.50, 0.51, 0.50, 0.51])
    by_group = group_normalized(rewards, group_id)[4:].abs().max()
    by_batch = batch_normalized(rewards, group_id)[4:].abs().max()
    assert by_group > 0.8 and by_batch < 0.02


@every_estimator
def test_no_rows_and_dtype(estimator):
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert estimator(torch.zeros(4), torch.zeros(4, dtype=torch.long)).dtype == torch.float32
