"""A curriculum: pools by the last mean reward, exact draws, and a state that goes on exactly."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import DataError
from lit_rl.data.curriculum import Curriculum, RowDraws, RowOutcome, draw_systematically, order_by_weight
from lit_rl.data.loaders import FIRST_OCCURRENCE, RolloutLoader, SparePrompts
from lit_rl.data.order import RolloutOrder
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.prompt_set import PromptSet

HARD, MIDDLE, EASY, UNSEEN, UNSCORED = range(5)


def data(rows: Sequence[int], **columns: list[Any]) -> PromptSet:
    return PromptSet([f"p{i}" for i in rows], [[i] for i in rows], {"answer": [str(i) for i in rows], **columns})


def draws_of(
    rows: Sequence[int] | PromptSet = range(12), count: int = 4, *, seed: int = 0, sizes: Any = None,
    shares: Any = None, **settings: Any,
) -> RowDraws:  # fmt: skip
    found = rows if isinstance(rows, PromptSet) else data(rows)
    order = RolloutOrder(sizes or (len(found),), count, seed, True, shares)
    return RowDraws(Curriculum(**settings), found, order)


def told(draws: RowDraws, **means: float) -> RowDraws:
    """Rows with a mean: `r3=0.5`."""
    draws.observe(RowOutcome(int(name[1:]), mean, 1) for name, mean in means.items())
    return draws


def stored(state: Any) -> Any:
    """As it comes out of a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return np.array_equal(one.numpy(), two.numpy(), equal_nan=one.is_floating_point())
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    return one == two


# ---------------------------------------------------------------------- pools


def test_a_mean_that_equals_a_limit_belongs_to_its_pool():
    curriculum = Curriculum(at_most=[0.1, 0.3, 0.75], weights=[1, 2, 3, 4])
    tenth = float(np.float32(0.1))  # as a reward of 0.1 comes from the functions: it is a bit more than 0.1
    means = [-5.0, 0.0, tenth, 0.11, 3 / 10, 0.31, 0.75, 0.76, 1.0, 7.0, math.nan, math.nan]
    assert tenth > 0.1
    pools = curriculum.pools(np.asarray(means, np.float32), np.asarray([True] * 11 + [False]))
    assert pools.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 5, 4]
    assert curriculum.pool_weights().tolist() == [1, 2, 3, 4, 1, 0.2]
    assert curriculum.pool_names() == ["pool_0", "pool_1", "pool_2", "pool_3", "unseen", "unscored"]


def test_the_weight_of_a_row_by_hand():
    """A row weighs what its pool does, relative to the mean weight of its source: here 0.475 and 0.35."""
    draws = told(draws_of(range(6), 2, sizes=(4, 2), unseen=0.5), r0=0.25, r1=0.5, r2=1.0, r5=0.0)
    weights, evenly = draws._relative_weights()
    assert weights == pytest.approx([0.2 / 0.475, 1 / 0.475, 0.2 / 0.475, 0.5 / 0.475, 0.5 / 0.35, 0.2 / 0.35])
    assert evenly == [] and draws_of(range(3), 1)._relative_weights()[0].tolist() == [1, 1, 1]


SHARES = {"by size": (None, 3 / 4), "by weight": ((1.0, 4.0), 1 / 5)}


@pytest.mark.parametrize("case", SHARES)
def test_a_source_keeps_its_share_whatever_is_known_of_its_rows(case: str):
    """The first source is solved; of the second one, rows are in all pools. Weighed back, every row counts as it does
    without a curriculum."""
    shares, first = SHARES[case]
    draws, counted = draws_of(range(12), 4, sizes=(9, 3), shares=shares, seed=1), np.zeros(12)
    told(draws, **{f"r{row}": 1.0 for row in range(9)}, r9=0.5, r10=0.0)
    rows, factors = [], []
    for number in range(3000):
        rows += draws.begin(number)
        factors += draws.factors(number)
    assert np.mean(np.asarray(rows) < 9) == pytest.approx(first, abs=0.01)
    np.add.at(counted, rows, factors)
    plain = [first / 9] * 9 + [(1 - first) / 3] * 3
    np.testing.assert_allclose(counted / len(rows), plain, atol=0.01)
    by_row = np.bincount(rows)
    assert by_row[9] / by_row[10] == pytest.approx(5, rel=0.1) and by_row[9] / by_row[11] == pytest.approx(1, rel=0.1)


# ---------------------------------------------------------------------- one draw


class Fixed:
    """Leaves the row as it is, and starts at `first`."""

    def __init__(self, first: float) -> None:
        self.first = first

    def permutation(self, count: int) -> np.ndarray:
        return np.arange(count)

    def random(self) -> float:
        return self.first


def drawn_at(first: float, weights: Sequence[float], count: int) -> list[int]:
    random: Any = Fixed(first)
    return draw_systematically(np.asarray(weights, dtype=float), count, random).tolist()


def test_a_draw_by_hand():
    """Weights 1, 2, 0, 1 are the intervals [0, 1), [1, 3), none and [3, 4); the points are 2 apart."""
    assert drawn_at(0.25, [1, 2, 0, 1], 2) == [0, 1]  # 0.5 and 2.5
    assert drawn_at(0.75, [1, 2, 0, 1], 2) == [1, 3]  # 1.5 and 3.5
    assert drawn_at(0.5, [1, 2, 0, 1], 2) == [1, 3]  # 1 and 3: an interval has its lower end
    assert drawn_at(0.0, [0, 1], 3) == [1, 1, 1]
    assert drawn_at(math.nextafter(1, 0), [0.1, 0.2, 0.0], 1) == [1]  # and rounding reaches no row of weight 0


@given(weights=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), count=st.integers(1, 9))
def test_a_row_is_drawn_in_exact_proportion_to_its_weight(weights, count):
    """Over all starts: `sum(weights)` of them, evenly spaced, are enough for whole weights."""
    total = sum(weights)
    counted: Counter[int] = Counter()
    for k in range(total):
        one = Counter(drawn_at((k + 0.5) / total, weights, count))
        for row, weight in enumerate(weights):
            share = Fraction(count * weight, total)
            assert math.floor(share) <= one[row] <= math.ceil(share)
        counted += one
    assert [counted[row] for row in range(len(weights))] == [count * weight for weight in weights]


def test_with_equal_weights_a_rollout_of_all_rows_has_each_once_in_a_random_order():
    draws = draws_of(range(7), 7)
    first, second = draws.rows(0), draws.rows(1)
    assert sorted(first) == sorted(second) == list(range(7)) and first != second


# ---------------------------------------------------------------------- what is known


def test_the_mean_of_a_row_is_that_of_its_last_rollout():
    draws = draws_of()
    draws.observe([RowOutcome(3, 2.0, 4), RowOutcome(3, 1.0, 2), RowOutcome(5, 0.0, 4)])  # row 3 came twice
    assert draws._means[[3, 5]].tolist() == [0.5, 0.0]
    draws.observe([RowOutcome(3, 3.0, 3), RowOutcome(5, 0.0, 0)])  # of row 5 nothing was scored
    assert draws._means[[3, 5]].tolist() == [1.0, 0.0]
    assert [draws._pools()[row] for row in (3, 5, 6)] == [EASY, HARD, UNSEEN]


@given(order=st.permutations(range(6)))
def test_means_do_not_depend_on_the_order_of_ranks(order):
    outcomes = [RowOutcome(i % 2, value, 3) for i, value in enumerate([1e16, 0.1, 1.0, 0.3, -1e16, 0.2])]
    draws, other = draws_of(), draws_of()
    draws.observe(outcomes)
    other.observe([outcomes[i] for i in order])
    assert same(draws.state(), other.state()) and draws._means[0] == np.float32(1 / 9)


@pytest.mark.parametrize("mean", [-0.5, 1.5])
def test_means_outside_0_to_1_are_warned_of_once_where_the_limits_are_the_default(mean: float):
    draws = draws_of()
    with warnings.catch_warnings(action="error"):
        told(draws, r0=0.0, r1=1.0, r2=1.0 + 1e-6)  # as a sum of weights is in float32
        told(draws_of(at_most=[-1, 2]), r0=mean)
    message = (
        rf"at_most=\[0\.25, 0\.75\], the default.* go from {min(mean, 0.5):g} to {max(mean, 0.5):g}\. Set data\.curr"
    )
    with pytest.warns(UserWarning, match=message):
        told(draws, r0=0.5, r3=mean)
    with warnings.catch_warnings(action="error"):
        told(draws, r4=mean)


def test_rows_of_equal_content_have_one_mean():
    draws = told(draws_of([4, 5, 4], 1), r0=0.5)
    assert draws._pools().tolist() == [MIDDLE, UNSEEN, MIDDLE] and len(draws._means) == 2
    other_answer = PromptSet(["p4", "p4"], [[4], [4]], {"answer": ["4", "5"]})
    assert told(draws_of(other_answer, 1), r1=0.0)._pools().tolist() == [UNSEEN, HARD]


def test_rows_that_are_never_scored_have_a_pool_of_their_own_and_do_not_take_over():
    """Half of the rows are never scored, and the other half are solved: both weigh 0.2."""
    draws, found = draws_of(range(20), 10), Counter[int]()
    for number in range(100):
        rows = draws.begin(number)
        found += Counter(row % 2 for row in rows)
        draws.observe(RowOutcome(row, 1.0 * (row % 2), row % 2) for row in rows)
    assert 400 < found[0] < 600 and Counter(draws._pools()) == {EASY: 10, UNSCORED: 10}
    assert draws.shares(100)["rows/unscored"] == (10, 20) and draws.shares(100)["drawn/unseen"] == (0, 10)
    assert draws.shares(100)["drawn/unscored"] == (sum(row % 2 == 0 for row in draws.rows(100)), 10)
    state = stored(draws.state())
    again = draws_of(range(20), 10)
    again.load_state(state, same_rows=True)
    assert same(again.state(), state) and len(state["keys"]) == 20
    assert [again.rows(number) for number in (100, 101)] == [draws.rows(number) for number in (100, 101)]
    told(again, r0=0.5)
    again.observe([RowOutcome(0, 0.0, 0)])
    assert again._pools()[[0, 2]].tolist() == [MIDDLE, UNSCORED]
    out = draws_of(range(4), 2, unscored=0)
    out.observe([RowOutcome(0, 0.0, 0)])
    assert all(0 not in out.rows(number) for number in range(10))


def test_a_draw_is_a_pure_function_of_seed_number_and_means():
    draws = told(draws_of(), r1=0.5, r2=0.0)
    backwards = told(draws_of(), r1=0.5, r2=0.0)
    forwards = [draws.rows(number) for number in range(5)]
    assert [backwards.rows(number) for number in reversed(range(5))] == forwards[::-1]
    assert draws_of(seed=1).rows(0) != draws_of().rows(0)
    assert told(draws_of(), r1=0.5, r2=0.0).begin(3) == forwards[3]


def test_rows_that_were_drawn_stay_so_whatever_becomes_known():
    draws = draws_of(weights=[0, 1, 0])
    ahead = draws.rows(2)
    told(draws, **{f"r{row}": 0.0 for row in range(11)})
    assert draws.begin(1) == [11] * 4 and draws.begin(2) == ahead
    assert [draw["number"] for draw in draws.state()["draws"]] == [2]


# ---------------------------------------------------------------------- an empty pool


def test_rows_of_weight_0_are_not_drawn_and_an_empty_pool_is_none():
    draws = told(draws_of(range(6), 3, weights=[0, 1, 0]), r0=0.0, r1=1.0, r2=0.5, r3=0.5)
    assert all(not {0, 1} & set(draws.rows(number)) for number in range(20))
    empty = told(draws_of(range(4), 2), **{f"r{row}": 0.5 for row in range(4)})
    shares = empty.shares(0)
    assert shares["rows/pool_0"] == shares["rows/pool_2"] == (0, 4) and shares["drawn/pool_1"] == (2, 2)
    assert draws.shares(0)["uniform/coverage"] == (4, 6)


def test_where_all_rows_have_weight_0_all_are_drawn_alike_and_it_is_said():
    draws = told(draws_of(range(4), 4, weights=[0, 1, 0]), r0=0.0, r1=1.0, r2=1.0, r3=0.0)
    with pytest.warns(UserWarning, match=r"Every row is in a pool of weight 0 \(data\.curriculum\.weights=\[0, 1, 0\]"):
        assert sorted(draws.rows(5)) == [0, 1, 2, 3]
    assert draws.shares(5)["evenly"] == (1, 1) and draws.shares(5)["uniform/coverage"] == (4, 4)
    assert draws.factors(5) == [1, 1, 1, 1]
    told(draws, r3=0.5)
    assert draws.rows(6) == [3, 3, 3, 3] and draws.shares(6)["evenly"] == (0, 1)


def test_a_source_of_rows_of_weight_0_is_drawn_alike_within_and_it_is_said():
    draws = told(draws_of(range(6), 6, sizes=(3, 3), weights=[0, 1, 0]), r0=1.0, r1=1.0, r2=0.0, r3=0.0, r4=0.5, r5=0.5)
    with pytest.warns(
        UserWarning, match=r"Every row of data\.sources\[0\] is in a pool of weight 0 .*all of them alike"
    ):
        found = Counter(draws.rows(5))
    with warnings.catch_warnings(action="error"):
        draws.rows(6)  # said once
    assert [found[row] for row in range(4)] == [1, 1, 1, 0] and found[4] + found[5] == 3
    assert draws.shares(5)["evenly"] == (1, 2) and draws.shares(5)["uniform/coverage"] == (5, 6)
    assert {row: factor for row, factor in zip(draws.rows(5), draws.factors(5)) if row < 3} == {0: 1, 1: 1, 2: 1}


# ---------------------------------------------------------------------- the estimate beside


@given(means=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=4, max_size=4))
def test_weighed_back_a_rollout_has_every_row_alike(means):
    """Over all starts of a draw, rows count `factor` times as often as they are drawn: each the same."""
    draws = told(draws_of(range(4), 2, weights=[1, 4, 2]), r0=means[0], r1=means[1], r2=means[2])
    weights = draws._relative_weights()[0]
    total = int(draws.curriculum.pool_weights()[draws._pools()].sum())
    counted = [0.0] * 4
    for k in range(total):
        for row in drawn_at((k + 0.5) / total, weights.tolist(), 2):
            counted[row] += 1 / weights[row]
    assert counted == pytest.approx([total / 2] * 4)
    assert draws.factors(0) == [1 / weights[row] for row in draws.rows(0)]


# ---------------------------------------------------------------------- spare rows


@pytest.mark.parametrize("rows", [9, 10, 15, 40])
def test_no_spare_row_comes_twice_before_every_row_came_once(rows: int):
    """Rollouts of 8: first the rows that the rollout does not have, then all, pass after pass."""
    draws = told(draws_of(range(rows), 8), r3=0.5, r0=1.0, r1=0.0)
    own, spare = draws.rows(0), draws.spare_rows(0, range(4 * rows))
    others = set(range(rows)) - set(own)
    assert len(others) == rows - len(set(own)) and set(spare[: len(others)]) == others
    for begin in range(len(others), 3 * rows, rows):
        assert sorted(spare[begin : begin + rows]) == list(range(rows))
    assert spare[len(others) :][:rows] != spare[len(others) + rows :][:rows]
    full = draws_of(range(4), 4)  # a rollout of all rows
    assert sorted(full.spare_rows(0, range(4))) == [0, 1, 2, 3]


def test_a_weighted_order_by_hand():
    """Weights 1, 2 and 4: the first is the third with 4/7, and then the second with 2/3."""
    random, count = np.random.default_rng(0), 7000
    found = Counter(tuple(order_by_weight(np.asarray([1.0, 0.0, 2.0, 4.0]), random).tolist()) for _ in range(count))
    expected = {(3, 2, 0): 8 / 21, (3, 0, 2): 4 / 21, (2, 3, 0): 8 / 35, (2, 0, 3): 2 / 35, (0, 3, 2): 2 / 21}
    assert set(found) == {*expected, (0, 2, 3)}
    assert all(found[order] / count == pytest.approx(share, abs=0.02) for order, share in expected.items())


def test_spare_rows_are_others_than_those_of_the_rollout_while_there_are_any():
    draws = told(draws_of(range(8), 4, weights=[0, 1, 1]), r7=0.0)
    own, spare = set(draws.rows(0)), draws.spare_rows(0, range(12))
    assert set(spare[:3]) == set(range(7)) - own and set(spare[3:10]) == set(range(7))  # never 7
    parts = [*draws.spare_rows(0, range(5)), *draws.spare_rows(0, range(5, 6)), *draws.spare_rows(0, range(6, 12))]
    assert parts == spare and draws.spare_rows(1, range(12)) != spare
    prompts = SparePrompts(draws_data := data(range(8)), draws.order, draws)
    batch = prompts.batch(range(100, 103), rollout=0, first=2)
    assert list(batch.rows) == spare[2:5] and batch.prompts == [draws_data.prompts[row] for row in spare[2:5]]
    assert batch.occurrences == [FIRST_OCCURRENCE + i for i in (2, 3, 4)]


# ---------------------------------------------------------------------- checkpoints


def test_a_state_is_by_content_and_rows_that_left_the_data_leave_it(caplog):
    before = told(draws_of(range(12)), **{f"r{row}": row / 12 for row in range(10)})
    before.rows(3)
    state = stored(before.state())
    assert len(state["keys"]) == len(state["means"]) == 10
    moved = draws_of([11, 20, 3, 0])
    with caplog.at_level("INFO"):
        moved.load_state(state, same_rows=False)
    assert "the rewards of 8 rows that are no longer in the data" in caplog.text
    np.testing.assert_array_equal(moved._means, np.asarray([np.nan, np.nan, 3 / 12, 0], np.float32))
    after = moved.state()
    assert len(after["keys"]) == 2 and after["draws"] == []
    again = draws_of(range(12))
    again.load_state(state, same_rows=True)
    assert same(again.state(), state) and again.rows(3) == before.rows(3)


def test_a_new_column_of_other_rows_changes_no_row():
    one, two = data(range(3)), data(range(3), topic=[None, None, "x"])
    assert [a == b for a, b in zip(one.digests, two.digests)] == [True, True, False]
    tokens = PromptSet(one.prompts, [[9, 9]] * 3, one.columns)
    assert tokens.digests == one.digests and tokens.fingerprint != one.fingerprint


ROWS = 23


def loader(
    draws: RowDraws | None = None, *, repeat: int = 1, allow_changed: bool = False, **more: Any
) -> RolloutLoader:
    draws = draws or draws_of(range(ROWS), 4)
    return RolloutLoader(
        data(range(ROWS)), draws.order, draws=draws, repeat=repeat, allow_changed=allow_changed, **more
    )


def learn(one: RolloutLoader, batch: Any) -> None:
    """What a run tells of a rollout when it has taken it."""
    if batch.slot == 0:
        assert one.draws is not None
        rows = one.draws.rows(batch.rollout)
        one.draws.observe(RowOutcome(row, float((row * 7 + batch.rollout) % 5), 4) for row in rows)


def run(one: RolloutLoader, batches: int) -> tuple[list[Any], list[Any]]:
    seen, states = [], []
    while len(seen) < batches:
        for batch in one:
            learn(one, batch)
            seen.append((batch.rollout, batch.slot, list(batch.rows), [list(each.rows) for each in batch.upcoming]))
            states.append(stored(one.state_dict()))
            if len(seen) == batches:
                break
    return seen, states


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_draw_knows_the_rollouts_before_the_one_that_begins(ahead: int):
    """By hand: rollout k is drawn when rollout k - ahead begins."""
    whole, _ = run(loader(ahead=ahead), 12)
    for k in range(12):
        known = draws_of(range(ROWS), 4)
        for number, _, rows, _ in whole[: max(0, k - ahead)]:
            known.observe(RowOutcome(row, float((row * 7 + number) % 5), 4) for row in rows)
        assert known.rows(k) == whole[k][2]


def test_the_ranks_together_draw_what_one_process_draws():
    one = loader(repeat=2)
    parts = [loader(repeat=2, rank=rank, world_size=2) for rank in range(2)]
    for whole, *shares in zip(one, *parts):
        assert [row for part in shares for row in part.rows] == list(whole.rows)
        assert [n for part in shares for n in part.occurrences] == list(whole.occurrences)
        learn(one, whole)
        for each, part in zip(parts, shares):
            learn(each, part)
        assert all(same(each.state_dict()["draws"], one.state_dict()["draws"]) for each in parts)
    alone = loader(repeat=2)
    alone.load_state_dict(stored(parts[0].state_dict()))
    assert same(alone.state_dict()["draws"], one.state_dict()["draws"])


def test_other_settings_are_refused_by_name_and_allowed_they_draw_from_the_same_means():
    first = loader()
    run(first, 3)
    state = stored(first.state_dict())
    other = loader(draws_of(range(ROWS), 4, unseen=2.0))
    with pytest.raises(DataError, match=r"checkpoint's: data\.curriculum at_most .*unseen 1\.0.* -> .*unseen 2\.0"):
        other.load_state_dict(state)
    plain = RolloutLoader(data(range(ROWS)), RolloutOrder((ROWS,), 4))
    with pytest.raises(DataError, match=r"checkpoint's: data\.curriculum at_most .* -> None"):
        plain.load_state_dict(state)
    other.allow_changed = plain.allow_changed = True
    other.load_state_dict(state)
    plain.load_state_dict(state)
    assert other.draws is not None and first.draws is not None
    assert same(other.draws.state()["means"], first.draws.state()["means"]) and other.draws.state()["draws"] == []
    fresh = loader(allow_changed=True)
    fresh.load_state_dict(plain.state_dict())  # a checkpoint of a run without a curriculum
    assert fresh.draws is not None and len(fresh.draws.state()["means"]) == 0


def test_without_a_curriculum_nothing_changes():
    order = RolloutOrder((ROWS,), 4, 3)
    state = RolloutLoader(data(range(ROWS)), order).state_dict()
    assert "draws" not in state and state["fingerprint"] == RolloutLoader(data(range(ROWS)), order).fingerprint
    assert copy.deepcopy(loader()).fingerprint != state["fingerprint"]


# ---------------------------------------------------------------------- the data module


def test_where_batches_are_overfitted_the_order_is_fixed():
    module = RolloutDataModule([{"prompt": "1"}, {"prompt": "2"}], curriculum=Curriculum())
    assert module.draws is None
    module.trainer = SimpleNamespace(overfit_batches=2)  # pyright: ignore[reportAttributeAccessIssue]
    assert not module.shuffles()
