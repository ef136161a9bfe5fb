from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.order import RolloutOrder, count_occurrences

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=3)


@given(size=st.integers(1, 50), prompts=st.integers(1, 50), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_an_epoch_of_one_source_is_a_permutation_without_the_incomplete_rollout(size, prompts, seed, epoch):
    if prompts > size:
        with pytest.raises(DataError):
            RolloutOrder((size,), prompts)
        return
    rows = RolloutOrder((size,), prompts, seed).epoch(epoch)
    assert len(rows) == size // prompts * prompts
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(size))


def test_the_order_depends_on_seed_and_epoch_only():
    order = RolloutOrder((50,), 10)
    assert order.epoch(1) == RolloutOrder((50,), 10).epoch(1)
    others = [order.epoch(0), order.epoch(1), RolloutOrder((50,), 10, seed=1).epoch(0), list(range(50))]
    assert len({tuple(rows) for rows in others}) == 4
    same = [RolloutOrder((50,), size).epoch(0)[:40] for size in (10, 20, 40)]
    assert same[0] == same[1] == same[2], "the size of a rollout only cuts the same order"


def test_without_shuffle_every_epoch_is_the_data_in_its_order():
    order = RolloutOrder((10,), 3, shuffle=False)
    assert order.epoch(0) == order.epoch(5) == list(range(9))


@given(sizes=SIZES, seed=st.integers(0, 5))
def test_without_weights_an_epoch_is_every_row_once(sizes, seed):
    rows = RolloutOrder(tuple(sizes), 1, seed).epoch(2)
    assert sorted(rows) == list(range(sum(sizes)))


@settings(deadline=None)
@given(sizes=SIZES, weights=st.lists(st.floats(0.1, 10), min_size=3, max_size=3), shuffle=st.booleans())
def test_sources_get_their_share_by_weight(sizes, weights, shuffle):
    weights = weights[: len(sizes)]
    try:
        order = RolloutOrder(tuple(sizes), 1, 3, shuffle, tuple(weights))
    except ConfigError:
        assert any(sum(sizes) * weight / sum(weights) < 1 for weight in weights)
        return
    first = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    for epoch in range(2):
        rows = order.epoch(epoch)
        assert len(rows) == sum(sizes)
        for i, weight in enumerate(weights):
            drawn = sum(first[i] <= row < first[i + 1] for row in rows)
            assert abs(drawn - sum(sizes) * weight / sum(weights)) < 1


def test_a_source_is_used_up_before_a_row_of_it_comes_again():
    order = RolloutOrder((7, 30), 1, weights=(2.0, 1.0))
    drawn = Counter(row for epoch in range(6) for row in order.epoch(epoch))
    for rows in (range(7), range(7, 37)):
        counts = [drawn[row] for row in rows]
        assert max(counts) - min(counts) <= 1
    assert [sum(drawn[row] for row in rows) for rows in (range(7), range(7, 37))] == [25 * 6, 12 * 6]


def test_sources_are_mixed_over_the_epoch():
    for shuffle in (True, False):
        rows = RolloutOrder((100, 100), 20, shuffle=shuffle, weights=(3.0, 1.0)).epoch(0)
        shares = [sum(row < 100 for row in rows[i : i + 20]) for i in range(0, 200, 20)]
        assert all(8 <= share <= 20 for share in shares) and sum(shares) == 150


def test_occurrences_count_the_same_row_before():
    assert count_occurrences([3, 1, 3, 3, 1, 2]) == [0, 0, 1, 2, 1, 0]
