"""Functions of rows on several ranks see the rows of all of them, and give each rank its own."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import Ranks

from lit_rl.algorithms import ranks as over_ranks
from lit_rl.algorithms.ranks import all_tokens, everyones, named, over_all_ranks, parameters
from lit_rl.ops.advantages import batch_normalized, normalize_then_sum
from lit_rl.ops.returns import reinforce_plus_plus


@pytest.fixture
def ranks(monkeypatch):
    """`ranks(2)`: as many ranks as asked for, whose all_reduce is torch's while the test runs."""

    def make(count: int) -> Ranks:
        found = Ranks(count)
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


@pytest.mark.parametrize("widths", [[4, 4], [2, 6], [6, 2], [1, 3, 5]])
@pytest.mark.parametrize("function", [batch_normalized, normalize_then_sum, reinforce_plus_plus])
def test_each_rank_gets_its_rows_of_the_joint_answer(function, widths, ranks):
    one = joint(widths)
    offered = {name: column for name, column in one.items() if name not in ("rewards", "group_id")}
    whole = function(one["rewards"], one["group_id"], **named(function, offered))
    parts = ranks(len(widths)).run(lambda m: over_all_ranks(m, function, columns_of(m.global_rank, widths)))
    for rank, part in enumerate(parts):
        mine = whole[3 * rank : 3 * rank + 3]
        mine = mine[:, : widths[rank]] if mine.ndim == 2 else mine
        assert part.shape == mine.shape
        torch.testing.assert_close(part, mine)


def test_rows_come_in_the_order_of_ranks_padded_with_zero_to_the_widest(ranks):
    seen = ranks(2).run(lambda m: everyones(m, torch.full((2, m.global_rank + 1), m.global_rank + 1)))
    expected = torch.tensor([[1, 0], [1, 0], [2, 2], [2, 2]])
    assert all(torch.equal(rows, expected) for rows in seen)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_the_tokens_of_all_ranks_are_all_tokens_and_no_padding(counts):
    tokens = [[10.0 * rank + i for i in range(count)] for rank, count in enumerate(counts)]
    seen = Ranks(len(counts)).run(lambda m: all_tokens(m, torch.tensor(tokens[m.global_rank])))
    assert [part.tolist() for part in seen] == [[x for part in tokens for x in part]] * len(counts)


def test_what_a_function_names_is_what_it_gets():
    def estimator(r, groups, lengths, *, scale):
        return r

    offered = {"lengths": 1, "values": 2, "scale": 3}
    assert named(estimator, offered) == {"lengths": 1, "scale": 3}
    # a setting that the config has made is not overwritten by a column of that name
    assert named(functools.partial(estimator, scale=5), offered) == {"lengths": 1}
    assert parameters(functools.partial(estimator, scale=5)) == ("r", "groups", "lengths")


def test_one_rank_or_none_asks_nobody(monkeypatch):
    def forbidden(*args):
        raise AssertionError("a collective")

    monkeypatch.setattr(torch.distributed, "all_reduce", forbidden)
    module = Ranks(1).module(0)
    module.all_gather = forbidden
    columns = columns_of(0, [3])
    assert torch.equal(
        over_all_ranks(module, batch_normalized, columns), batch_normalized(columns["rewards"], columns["group_id"])
    )
    assert everyones(module, columns["mask"]) is columns["mask"]
    assert all_tokens(module, columns["rewards"]) is columns["rewards"]
    module._trainer = None
    assert over_ranks.over_all_ranks(module, batch_normalized, columns).shape == (3,)
