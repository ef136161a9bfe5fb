import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import in_turn

from lit_rl.ops.advantages import (
    batch_normalized,
    centered,
    cpgd,
    gpg,
    group_normalized,
    group_std,
    leave_one_out,
    maxrl,
    normalize_then_sum,
    opo,
    pass_at_k,
    raw,
    remax,
    renumber,
    whiten_rows,
    whiten_tokens,
)

reproducible = settings(derandomize=True, deadline=None, max_examples=15)


def lengths_of(rewards):
    """A length for each row that belongs to the row, whatever its place: from 1 to 7 tokens."""
    return (rewards.nan_to_num() * 64).long() % 7 + 1


def with_lengths(rewards, group_id):
    """OPO with lengths that follow from the reward up to a multiple of 7 / 64."""
    return opo(rewards, group_id, lengths_of(rewards))


def with_equal_lengths(rewards, group_id):
    return opo(rewards, group_id, torch.full_like(group_id, 5))


def with_two_functions(rewards, group_id, eps=1e-4):
    """Two functions that make up the reward, of which the second does not apply to long rows."""
    second = (0.25 * rewards).masked_fill(lengths_of(rewards) > 5, math.nan)
    values = torch.stack([rewards - second.nan_to_num(), second], dim=1)
    return normalize_then_sum(rewards, group_id, values, torch.tensor([1.0, 2.0]), eps=eps)


def with_one_function(rewards, group_id, eps=1e-4):
    return normalize_then_sum(rewards, group_id, rewards[:, None], torch.ones(1), eps=eps)


CENTRED = [group_normalized, batch_normalized, centered, leave_one_out, cpgd, gpg, with_two_functions]
ESTIMATORS = [*CENTRED, with_lengths, pass_at_k, maxrl]
SHIFTABLE = [*CENTRED[:-1], with_one_function, with_equal_lengths, pass_at_k]
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


@pytest.mark.parametrize("estimator", [*CENTRED, maxrl])
@reproducible
@given(batch=batches)
def test_advantages_of_a_group_sum_to_zero(estimator, batch):
    rewards, group_id = split(batch)
    got = estimator(rewards.abs() if estimator is maxrl else rewards, group_id)
    for group in group_id.unique():
        rows = got[group_id == group]
        assert rows.sum().item() == pytest.approx(0, abs=1e-4 + 1e-6 * rows.abs().sum().item())


@reproducible
@given(batch=batches)
def test_opo_sums_to_zero_when_weighted_by_length(batch):
    rewards, group_id = split(batch)
    lengths = lengths_of(rewards)
    weighted = lengths * opo(rewards, group_id, lengths)
    for group in group_id.unique():
        assert weighted[group_id == group].sum().item() == pytest.approx(0, abs=1e-4)


@every_estimator
@reproducible
@given(batch=batches, data=st.data())
def test_order_of_rows_and_names_of_groups_do_not_matter(estimator, batch, data):
    rewards, group_id = split(batch)
    order = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    names = torch.tensor(data.draw(st.lists(st.integers(-(2**60), 2**60), min_size=5, max_size=5, unique=True)))
    got = estimator(rewards[order], names[group_id[order] + 2])
    torch.testing.assert_close(got, estimator(rewards, group_id)[order])


@pytest.mark.parametrize("estimator", SHIFTABLE)
@reproducible
@given(batch=batches, shift=st.sampled_from([-2.0, 0.25, 4.0]))
def test_adding_a_constant_to_all_rewards_changes_nothing(estimator, batch, shift):
    rewards, group_id = split(batch)
    torch.testing.assert_close(estimator(rewards + shift, group_id), estimator(rewards, group_id), atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("scale", [2.0**-10, 0.5, 1024.0])
def test_normalized_advantages_have_no_scale_at_eps_zero(scale):
    rewards, group_id = groups_of([0.0, 1.0, 0.35, 0.2], [3.0, 3.0, 3.0, 4.0])
    for estimator in (group_normalized, batch_normalized, cpgd, with_one_function, pass_at_k):
        torch.testing.assert_close(estimator(rewards * scale, group_id, eps=0.0), estimator(rewards, group_id, eps=0.0))


@every_estimator
@reproducible
@given(value=st.floats(-1e6, 1e6, width=32), n=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(estimator, value, n):
    """Three groups, each of equal rewards; also at eps 0, where rounding noise would become +-1."""
    rewards, group_id = torch.full((3 * n,), value), torch.arange(3).repeat_interleave(n)
    assert estimator(rewards, group_id).eq(0).all()
    assert group_std(rewards, group_id).eq(0).all()
    if estimator in (group_normalized, batch_normalized, cpgd, pass_at_k):
        assert estimator(rewards, group_id, eps=0.0).eq(0).all()


@in_turn(base=[0.35, 0.1, 100.35], dtype=[torch.float32, torch.float64])
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
    assert got[:4].eq(0).all() and got[5] > 0
    assert got[4] < 0 or estimator is pass_at_k
    assert group_std(rewards, group_id)[:4].eq(0).all()


@pytest.mark.parametrize("estimator", [group_normalized, centered, leave_one_out, cpgd, with_lengths, pass_at_k, maxrl])
def test_one_group_never_touches_another(estimator):
    first, group_id = groups_of([0.0, 1.0, 0.25], [2.0, 5.0, 9.0])
    second = torch.cat([first[:3], torch.tensor([-7.0, 1e6, math.nan])])
    assert torch.equal(estimator(first, group_id)[:3], estimator(second, group_id)[:3])


@every_estimator
def test_no_rows_and_dtype(estimator):
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    assert estimator(torch.zeros(4), torch.zeros(4, dtype=torch.long)).dtype == torch.float32


def test_the_newer_ones_by_hand():
    rewards, group_id = groups_of([0.0, 1.0, 1.0, 2.0], [0.5, 0.5], [0.0, 3.0])
    mean = torch.tensor([1.0] * 4 + [0.5] * 2 + [1.5] * 2)
    torch.testing.assert_close(raw(rewards, group_id), rewards)
    # 8 rows, of which the 2 of the middle group have no spread
    torch.testing.assert_close(gpg(rewards, group_id), (rewards - mean) * 8 / 6)
    torch.testing.assert_close(maxrl(rewards, group_id), (rewards - mean) / mean)
    biased = torch.tensor([0.5**0.5] * 4 + [0.0] * 2 + [1.5] * 2)
    torch.testing.assert_close(cpgd(rewards, group_id, eps=0.25), (rewards - mean) / (biased + 0.25))
    first, last = (2 / 3) ** 0.5, (9 / 2) ** 0.5
    expected = torch.tensor([0, 0, 0, (2 - 1) / (first + 0.25), 0, 0, 0, (3 - 0) / (last + 0.25)])
    torch.testing.assert_close(pass_at_k(rewards, group_id, eps=0.25), expected)


def test_opo_by_hand():
    rewards, group_id = groups_of([0.0, 1.0, 2.0], [1.0, math.nan], [4.0, 8.0])
    got = opo(rewards, group_id, torch.tensor([10, 20, 70, 9, 9, 0, 0]))
    baseline = (20 * 1.0 + 70 * 2.0) / 100
    torch.testing.assert_close(got, torch.tensor([-baseline, 1 - baseline, 2 - baseline, 0, 0, 0, 0]))


def test_of_two_best_rows_neither_is_missed():
    rewards, group_id = groups_of([1.0, 1.0, 0.0], [1.0, 0.0, 0.0])
    assert pass_at_k(rewards, group_id).ne(0).tolist() == [False, False, False, True, False, False]


def test_maxrl_says_nothing_where_the_mean_is_not_positive():
    rewards, group_id = groups_of([0.0, 0.0], [-1.0, 1.0], [-3.0, -1.0], [0.0, 1.0])
    assert maxrl(rewards, group_id).tolist() == [0, 0, 0, 0, 0, 0, -1, 1]


def test_remax_compares_with_the_greedy_completion():
    rewards, group_id = groups_of([1.0, 0.0, math.nan], [1.0, 0.5])
    greedy = torch.tensor([0.25, 0.25, 0.25, math.nan, 0.5])
    assert remax(rewards, group_id, greedy).tolist() == [0.75, -0.25, 0, 0, 0]
    assert raw(rewards, group_id).tolist() == [1, 0, 0, 1, 0.5]


class TestNormalizeThenSum:
    def test_by_hand(self):
        rewards, group_id = groups_of([0.0, 0.0], [0.0, 0.0, 0.0])
        values = torch.tensor([[0.0, 10.0], [2.0, 30.0], [1.0, 5.0], [2.0, math.nan], [3.0, 5.0]])
        weights = torch.tensor([1.0, 0.5])
        root = 2**0.5  # the deviation of (0, 2) is root, that of (10, 30) is 10 root
        sums = [-1 / root - 0.5 / root, 1 / root + 0.5 / root, -1.0, 0.0, 1.0]
        spread = (sum(s * s for s in sums) / 4) ** 0.5
        got = normalize_then_sum(rewards, group_id, values, weights, eps=0.0)
        torch.testing.assert_close(got, torch.tensor([s / spread for s in sums]))

    def test_rows_may_have_weights_of_their_own(self):
        """Two groups that differ in nothing but their weights: what is good in one is bad in the other."""
        rewards, group_id = groups_of([0.0, 0.0], [0.0, 0.0])
        values = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 2)
        weights = torch.tensor([[3.0, 1.0], [3.0, 1.0], [1.0, 3.0], [1.0, 3.0]])
        got = normalize_then_sum(rewards, group_id, values, weights, eps=0.0)
        size = 0.75**0.5  # sums of -+ root 2; their deviation over four rows is root 8/3
        torch.testing.assert_close(got, torch.tensor([-size, size, size, -size]))
        same = normalize_then_sum(rewards, group_id, values, weights[0])
        assert torch.equal(same, normalize_then_sum(rewards, group_id, values, weights[:1].expand(4, 2)))

    def test_rows_without_a_reward_do_not_count_even_if_a_function_gave_them_one(self):
        values = torch.tensor([[0.0, 1.0], [9.0, 9.0], [1.0, 0.5], [0.5, 0.0]])
        rewards, group_id = torch.tensor([0.0, math.nan, 1.0, 1.0]), torch.zeros(4, dtype=torch.long)
        got = normalize_then_sum(rewards, group_id, values, torch.ones(2))
        kept = torch.tensor([0, 2, 3])
        want = normalize_then_sum(rewards[kept], group_id[kept], values[kept], torch.ones(2))
        torch.testing.assert_close(got[kept], want)
        assert got[1] == 0


class TestWhitening:
    def test_rows_by_hand(self):
        advantages, scored = torch.tensor([1.0, 2.0, 99.0, 6.0]), torch.tensor([True, True, False, True])
        kept = torch.tensor([1.0, 2.0, 6.0])
        want = (kept - 3) / (kept.std() + 0.5)
        got = whiten_rows(advantages, scored, eps=0.5)
        torch.testing.assert_close(got, torch.tensor([want[0], want[1], 0, want[2]]))

    def test_tokens_by_hand(self):
        mask = torch.tensor([[True, True, False], [True, False, False]])
        advantages = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, math.nan]])
        want = torch.tensor([-2.0, -1.0, 3.0]) / (7.0 + 0.5) ** 0.5
        got = whiten_tokens(advantages, mask, eps=0.5)
        torch.testing.assert_close(got, torch.tensor([[want[0], want[1], 0], [want[2], 0, 0]]))

    @reproducible
    @given(data=st.data(), b=st.integers(1, 4), t=st.integers(1, 5))
    def test_what_comes_out_has_mean_zero_and_variance_one(self, data, b, t):
        flat = data.draw(st.lists(st.integers(-50, 50), min_size=b * t, max_size=b * t))
        on = data.draw(st.lists(st.booleans(), min_size=b * t, max_size=b * t))
        advantages, mask = torch.tensor(flat).reshape(b, t).float(), torch.tensor(on).reshape(b, t)
        got = whiten_tokens(advantages, mask)
        assert got[~mask].eq(0).all() and got.dtype == torch.float32
        if len(set(advantages[mask].tolist())) > 1:
            assert got[mask].mean().item() == pytest.approx(0, abs=1e-5)
            assert got[mask].std().item() == pytest.approx(1, rel=1e-5)
        else:
            assert got.eq(0).all()
        rows = whiten_rows(advantages.flatten(), mask.flatten(), eps=0.0)
        torch.testing.assert_close(rows.reshape(b, t), whiten_tokens(advantages, mask, eps=0.0))


@given(st.lists(st.integers(-3, 3), max_size=12))
def test_ids_are_renumbered_in_their_order(ids):
    found = torch.tensor(ids, dtype=torch.long)
    assert torch.equal(renumber(found), torch.unique(found, return_inverse=True)[1])
