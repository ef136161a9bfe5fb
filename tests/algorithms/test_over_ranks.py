"""Functions of rows on several ranks see the rows of all of them, and give each rank its own.

A function is given what its signature names."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import Ranks as Threads
from small_rollouts import batch, completions, rollout, scores
from tiers import in_turn

from lit_rl.algorithms import GRPO
from lit_rl.algorithms.chosen_functions import (
    accepts_positional,
    arguments_for,
    multiplies_weights,
    parameters,
    reads_column,
    setting_of,
    takes_any_keyword,
    unwrap,
)
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.records import RolloutRecords
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import select
from lit_rl.ops.advantages import batch_normalized, normalize_then_sum
from lit_rl.ops.engine_mismatch import mismatch_metrics, token_truncate
from lit_rl.ops.reductions import Summed, WeightsInside, masked_moments
from lit_rl.ops.returns import reinforce_plus_plus


@pytest.fixture
def ranks(monkeypatch):
    """`ranks(2)`: as many ranks as asked for, whose all_reduce is torch's while the test runs."""

    def make(count: int) -> Threads:
        found = Threads(count)
        monkeypatch.setattr(torch.distributed, "all_reduce", found.all_reduce)
        return found

    return make


def columns_of(rank: int, widths: list[int]) -> dict[str, torch.Tensor]:
    """Three rows of a rank, whose responses are at most `widths[rank]` tokens long."""
    generator = torch.Generator().manual_seed(rank)
    width = widths[rank]
    lengths = torch.randint(1, width + 1, (3,), generator=generator)
    lengths[0] = width
    mask = torch.arange(width)[None] < lengths[:, None]
    return {
        "rewards": torch.randn(3, generator=generator),
        "group_id": torch.full((3,), rank),
        "values": torch.randn(3, 2, generator=generator),
        "weights": torch.rand(3, 2, generator=generator),
        "lengths": lengths,
        "token_rewards": torch.randn(3, width, generator=generator) * mask,
        "mask": mask,
    }


def joint(widths: list[int]) -> dict[str, torch.Tensor]:
    """The same rows on one rank."""
    parts = [columns_of(rank, widths) for rank in range(len(widths))]
    wide = max(widths)
    pad = torch.nn.functional.pad
    out = {}
    for name in parts[0]:
        token = name in ("token_rewards", "mask")
        out[name] = torch.cat([pad(p[name], (0, wide - p[name].shape[1])) if token else p[name] for p in parts])
    return out


@in_turn(
    function=[batch_normalized, normalize_then_sum, reinforce_plus_plus], widths=[[4, 4], [2, 6], [6, 2], [1, 3, 5]]
)
def test_each_rank_gets_its_rows_of_the_joint_answer(function, widths, ranks):
    one = joint(widths)
    offered = {name: column for name, column in one.items() if name not in ("rewards", "group_id")}
    whole = function(one["rewards"], one["group_id"], **arguments_for(function, offered))
    parts = ranks(len(widths)).run(lambda m: m.ranks.apply(function, columns_of(m.ranks.rank, widths)))
    for rank, part in enumerate(parts):
        mine = whole[3 * rank : 3 * rank + 3]
        mine = mine[:, : widths[rank]] if mine.ndim == 2 else mine
        assert part.shape == mine.shape
        torch.testing.assert_close(part, mine)


def test_rows_come_in_the_order_of_ranks_padded_with_zero_to_the_widest(ranks):
    seen = ranks(2).run(lambda m: m.ranks.gather(torch.full((2, m.ranks.rank + 1), m.ranks.rank + 1)))
    expected = torch.tensor([[1, 0], [1, 0], [2, 2], [2, 2]])
    assert all(torch.equal(rows, expected) for rows in seen)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_the_tokens_of_all_ranks_are_all_tokens_and_no_padding(counts):
    tokens = [[10.0 * rank + i for i in range(count)] for rank, count in enumerate(counts)]
    seen = Threads(len(counts)).run(lambda m: m.ranks.gather_tokens(torch.tensor(tokens[m.ranks.rank])))
    assert [part.tolist() for part in seen] == [[x for part in tokens for x in part]] * len(counts)


def test_every_rank_knows_the_sum_the_numbers_and_the_names_of_all(ranks):
    group = ranks(3)
    mine = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert [s.tolist() for s in group.run(lambda m: m.ranks.total(mine[m.ranks.rank]))] == [[7.0, 70.0]] * 3
    assert group.run(lambda m: m.ranks.counts(5 - m.ranks.rank)) == [[5, 4, 3]] * 3
    assert group.run(lambda m: m.ranks.any(m.ranks.rank == 1)) == [True] * 3
    assert group.run(lambda m: m.ranks.any(False)) == [False] * 3
    assert group.run(lambda m: m.ranks.objects({"rank": m.ranks.rank})) == [[{"rank": i} for i in range(3)]] * 3
    known = ["b", "c"], ["a"], ["c", "a"]
    assert group.run(lambda m: m.ranks.names(known[m.ranks.rank])) == [["a", "b", "c"]] * 3


@pytest.mark.parametrize("alone", [Ranks(), GRPO("tiny", len).ranks], ids=["one rank", "no Trainer"])
def test_one_rank_or_none_asks_nobody(alone, monkeypatch):
    def forbidden(*args, **more):
        raise AssertionError("a collective")

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, forbidden)
    columns = columns_of(0, [3])
    assert torch.equal(
        alone.apply(batch_normalized, columns), batch_normalized(columns["rewards"], columns["group_id"])
    )
    assert alone.gather(columns["mask"]) is columns["mask"]
    assert alone.gather_tokens(columns["rewards"]) is columns["rewards"]
    assert torch.equal(alone.total(columns["rewards"]), columns["rewards"])
    assert alone.counts(3) == [3] and alone.any(True) and not alone.any(False)
    assert alone.objects("x") == ["x"] and alone.broadcast("x") == "x" and alone.names(["b", "a"]) == ["a", "b"]


def test_rewards_and_groups_go_by_position_whatever_they_are_called():
    seen = {}

    def estimator(scores_of_rows, whose, *, lengths):
        seen.update(first=scores_of_rows, second=whose, lengths=lengths)
        return scores_of_rows

    columns = columns_of(0, [3])
    Ranks().apply(estimator, columns)
    given = {"first": "rewards", "second": "group_id", "lengths": "lengths"}
    assert all(torch.equal(seen[name], columns[column]) for name, column in given.items())


# ---------------------------------------------------------------------- functions that users choose


def estimator(r, groups, lengths, *, scale=2.0):
    return r


def test_what_a_function_names_is_what_it_gets():
    offered = {"lengths": 1, "values": 2, "scale": 3}
    assert arguments_for(estimator, offered) == {"lengths": 1, "scale": 3}
    # a setting that the config has made is not overwritten by a column of that name
    assert arguments_for(functools.partial(estimator, scale=5), offered) == {"lengths": 1}
    assert parameters(functools.partial(estimator, scale=5)) == ("r", "groups", "lengths")
    assert reads_column(estimator, "scale") and not reads_column(functools.partial(estimator, scale=5), "scale")


def test_a_function_with_keywords_gets_everything_but_what_is_set():
    def greedy(r, groups, **columns):
        return r

    offered = {"lengths": 1, "values": 2}
    assert takes_any_keyword(greedy) and not takes_any_keyword(estimator)
    assert arguments_for(greedy, offered) == offered and reads_column(greedy, "values")
    assert arguments_for(functools.partial(greedy, values=7), offered) == {"lengths": 1}
    assert parameters(greedy) == ("r", "groups")


def test_a_setting_is_what_was_given_or_the_default():
    given_twice = functools.partial(functools.partial(estimator, scale=5), lengths=None)
    assert setting_of(estimator, "scale") == 2.0 and setting_of(given_twice, "scale") == 5
    assert unwrap(given_twice) is estimator and unwrap(estimator) is estimator


def test_positions_that_a_function_takes():
    assert [accepts_positional(estimator, count) for count in range(5)] == [False, False, False, True, False]


def test_only_a_loss_that_says_so_multiplies_the_weights_in_itself():
    def inside(logprobs, old_logprobs, advantages, mask, weights: WeightsInside = None):
        return logprobs

    def outside(logprobs, old_logprobs, advantages, mask, weights=None):
        return logprobs

    assert multiplies_weights(inside) and multiplies_weights(functools.partial(inside, mask=None))
    assert not multiplies_weights(outside)


def test_a_long_row_on_one_rank_weighs_in_every_metric_as_it_does_in_one_process(ranks):
    """Rows of 100 tokens and of 3, unscored rows and calls of `log_metric` lie unevenly; times aside."""
    lengths, missing = [100, 3, 7, 3, 3, 1, 3, 3], float("nan")
    drawn = completions(lengths, 2)
    old = drawn.sampler_logprobs + torch.linspace(-1.0, 1.5, 8)[:, None]
    values = [[1.0, missing], [0.0, 2.0], [1.0, 1.0], [1.0, 1.0], [missing] * 2, [3.0, missing], [0.5, 0.5], [0.0, 1.0]]
    words = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: [str(row) for row in ids])
    said = [{"calls": (6.0, 1)}, {"calls": (0.5, 5), "only_there": (4.0, 2)}]
    together = {"calls": (6.5, 6), "only_there": (4.0, 2)}

    def measured(rows: slice, of_functions: dict[str, tuple[float, int]], ranks: Ranks) -> dict[str, float]:
        own = select(drawn, torch.arange(8)[rows])
        own = dataclasses.replace(own, ended=torch.tensor(lengths)[rows] < 100)
        found = Scored(batch(range(8)[rows][::2]), own, scores(values[rows], metrics=of_functions))
        rewards, records = found.scores.total, RolloutRecords()
        made = rollout(rewards, rewards.nan_to_num(), own)
        tokens = int(own.lengths.sum())
        records.open(found, made, step=0, sampled_tokens=tokens, tokenizer=words, ranks=ranks)
        weights = token_truncate(old[rows], own.sampler_logprobs, own.response_mask)
        records.add(mismatch_metrics(old[rows], own.sampler_logprobs, own.response_mask, weights))
        records.add({"sampling/ess": Summed(masked_moments(weights, own.response_mask), "effective_share")})
        logged = records.close(ranks, seconds={}, within={}, coefficients={})
        return {name: value for name, value in logged.items() if name.startswith("train/")}

    halves = [slice(0, 4), slice(4, 8)]
    two = ranks(2).run(lambda module: measured(halves[module.ranks.rank], said[module.ranks.rank], module.ranks))
    one = measured(slice(0, 8), together, Ranks())
    assert two[0].keys() == one.keys() and len(one) > 30
    for rank in two:
        assert rank == pytest.approx(one, rel=1e-5, nan_ok=True)
    assert one["train/calls"] == pytest.approx(6.5 / 6) and one["train/only_there"] == 2.0
    assert one["train/completions/max_length"] == 100 and one["train/sampling/sampling_logp_difference/max"] == 1.5
