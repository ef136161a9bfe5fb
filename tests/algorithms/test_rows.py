"""Rows put together, taken apart and trimmed: whatever there is a row of goes along with its row."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import batch, completions, rollout, scores
from torch import Tensor

from lit_rl.algorithms.evaluation.summary_statistics import sample_table
from lit_rl.algorithms.ppo import with_reward_function
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.episode import Episode
from lit_rl.core.rollout import (
    Completions,
    Rollout,
    Width,
    columns_of,
    join_completions,
    join_rollouts,
    select,
    trim,
    trim_rollout,
    used_columns,
    used_columns_of_parts,
)
from lit_rl.core.vision_inputs import PromptVision, Vision
from lit_rl.rewards.contract import EPISODE_COLUMNS, SAMPLE_COLUMNS


def part(rows: list[int], weights: list[list[float]]) -> Scored:
    """Two completions a prompt."""
    values = [[float(row), 10.0 * row] for row in rows for _ in range(2)]
    drawn = completions([1 + row for row in rows for _ in range(2)], 2)
    said = dataclasses.replace(scores(values), weights=torch.tensor(weights).repeat_interleave(2, 0))
    return Scored(batch(rows), drawn, said)


def test_the_weights_of_a_row_stay_with_it():
    both = part([0, 1], [[1.0, 0.0], [2.0, 0.0]]).followed_by(part([2], [[0.0, 3.0]]))
    taken = both.prompts([2, 0]).scores
    assert taken.values.tolist() == [[2.0, 20.0]] * 2 + [[0.0, 0.0]] * 2
    assert taken.weights.tolist() == [[0.0, 3.0]] * 2 + [[1.0, 0.0]] * 2


def test_prompts_completions_and_scores_of_a_row_stay_together():
    one, two = (part(rows, [[1.0, 0.0]] * len(rows)) for rows in ([0, 1], [2]))
    one = dataclasses.replace(one, scores=dataclasses.replace(one.scores, extras={"a": [0, 0, 1, 1]}))
    two = dataclasses.replace(
        two, scores=dataclasses.replace(two.scores, extras={"b": [2, 2]}, span_rewards=[[(0, 1, 1.0)], []])
    )
    both = one.followed_by(two)
    assert both.group_size == 2 and len(both.batch) == 3
    taken = both.prompts([2, 0])
    assert taken.batch.rows == [2, 0] and taken.batch.prompts == ["prompt 2", "prompt 0"]
    assert taken.batch.prompt_ids == [[2], [0]] and taken.batch.columns == {"answer": ["2", "0"]}
    assert taken.completions.lengths.tolist() == [3, 3, 1, 1]
    assert taken.scores.extras == {"a": [None, None, 0, 0], "b": [2, 2, None, None]}
    assert taken.scores.span_rewards == [[(0, 1, 1.0)], [], [], []]


def test_what_functions_logged_of_both_is_added_up():
    one, two = (part([row], [[1.0, 0.0]]) for row in (0, 1))
    one = dataclasses.replace(one, scores=dataclasses.replace(one.scores, metrics={"x": (1.0, 2), "y": (1.0, 1)}))
    two = dataclasses.replace(two, scores=dataclasses.replace(two.scores, metrics={"x": (3.0, 4)}))
    assert one.followed_by(two).scores.metrics == {"x": (4.0, 6), "y": (1.0, 1)}


def test_a_function_beside_the_others_has_weight_one():
    said = part([1, 2], [[2.0, 0.5], [1.0, 0.0]]).scores
    said = dataclasses.replace(said, total=(said.weights * said.values).sum(1))
    more = with_reward_function(said, "adapter", torch.tensor([0.5, 1.5, 2.5, 3.5]))
    assert more.names[-1] == "adapter" and more.weights[:, -1].tolist() == [1.0] * 4
    torch.testing.assert_close((more.weights * more.values).sum(1), more.total)


# ---------------------------------------------------------------------- columns


@pytest.mark.parametrize("told", [(True, True), (True, False), (False, True), (False, False)])
def test_a_kept_mass_that_is_told_of_some_rows_only_is_told_of_none(told):
    one, two = completions([1, 2], 2), completions([3, 1], 2)
    masses = [torch.full(drawn.response_ids.shape, -1.0 - i) for i, drawn in enumerate((one, two))]
    parts = [
        dataclasses.replace(drawn, kept_logmass=mass if known else None)
        for drawn, mass, known in zip((one, two), masses, told)
    ]
    joint = join_completions(*parts)
    if all(told):
        assert joint.kept_logmass is not None
        assert joint.kept_logmass.tolist() == [[-1.0, -1.0, 0.0]] * 2 + [[-2.0, -2.0, -2.0]] * 2
    else:
        assert joint.kept_logmass is None
    assert joint.response_mask.tolist() == [[True, False, False], [True, True, False], [True] * 3, [True, False, False]]


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True), (False, False)])
def test_rows_that_see_are_joined_with_rows_that_do_not(has):
    parts = [
        dataclasses.replace(completions([1, 2], 2), vision=seen(number) if with_image else None)
        for number, with_image in enumerate(has)
    ]
    joint = join_completions(*parts)
    if not any(has):
        assert joint.vision is None
        return
    shown = [None if row is None else int(row.inputs["pixels"]) for row in joint.vision.rows]
    assert shown == [number if has[number] else None for number in (0, 1) for _ in range(2)]


def seen(number: int, rows: int = 2) -> Vision:
    """Of rows that all see an image of this number."""
    return Vision([PromptVision({"pixels": torch.tensor([number])})], torch.zeros(rows, dtype=torch.long))


def with_a_tools_tokens(drawn: Completions) -> Completions:
    """Two more columns: a tool answers the first row, in a second turn, and the policy says no more."""
    wide = join_completions(drawn, completions([drawn.response_ids.shape[1] + 2], 1))
    wide = select(wide, torch.arange(len(drawn)))
    attended, turn = wide.response_mask.clone(), torch.zeros_like(wide.response_ids)
    attended[0, -2:], turn[0, -2:] = True, 1
    return dataclasses.replace(wide, attended=attended, turn=turn)


@pytest.mark.parametrize("tool", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("lengths", [([1, 2], [3, 1]), ([2, 1], [6, 2])], ids=["narrower", "wider"])
def test_what_was_attended_survives_joining_also_where_one_side_says_nothing_of_it(tool, lengths):
    """Who says nothing has attended to what it sampled, in one turn."""
    parts = [
        with_a_tools_tokens(drawn) if has else drawn for drawn, has in zip((completions(n, 2) for n in lengths), tool)
    ]
    joint = join_completions(*parts)
    if not any(tool):
        assert joint.attended is None and joint.turn is None
    else:
        assert joint.attended is not None and joint.turn is not None
    width = joint.response_ids.shape[1]
    seen = joint.attention_mask[:, joint.prompt_ids.shape[1] :]
    for start, drawn, has in zip((0, 2), parts, tool):
        mine = drawn.attention_mask[:, drawn.prompt_ids.shape[1] :]
        padded = torch.nn.functional.pad(mine, (0, width - mine.shape[1]))
        assert torch.equal(seen[start : start + 2], padded)
        if joint.turn is not None:
            turns = drawn.turn if has and drawn.turn is not None else torch.zeros_like(drawn.response_ids)
            assert torch.equal(joint.turn[start : start + 2, : turns.shape[1]], turns)
    assert torch.equal(joint.response_mask & seen, joint.response_mask)


@pytest.mark.parametrize(("kind", "known"), [(Completions, "prompt_ids"), (Rollout, "advantages")])
def test_every_tensor_of_rows_says_what_its_second_dimension_counts(kind, known):
    """A column without a width would be neither trimmed nor joined: its rows would be those of the first part."""
    hints = get_type_hints(kind)

    def is_tensor(hint: Any) -> bool:
        return hint is Tensor or (get_origin(hint) in (Union, UnionType) and Tensor in get_args(hint))

    tensors = {each.name for each in dataclasses.fields(kind) if is_tensor(hints[each.name])}
    widths = {each.name: each.metadata.get("width") for each in dataclasses.fields(kind)}
    assert {name for name, width in widths.items() if width is not None} == tensors and known in tensors
    assert all(isinstance(widths[name], Width) for name in tensors)


ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=4)
"""Of each row, the tokens of its prompt, those that the policy sampled, and those that a tool wrote after them."""


def drawn_of(rows: list[tuple[int, int, int]], first: int, *, wider: int = 0) -> Completions:
    """Every column, told apart by its numbers; `wider` columns of padding on both sides."""
    p, t = max(row[0] for row in rows) + wider, max(row[1] + row[2] for row in rows) + wider
    prompt_mask = torch.arange(p).flip(0)[None] < torch.tensor([[row[0]] for row in rows])
    mask = torch.arange(t)[None] < torch.tensor([[row[1]] for row in rows])
    attended = torch.arange(t)[None] < torch.tensor([[row[1] + row[2]] for row in rows])
    numbers = first + torch.arange(len(rows) * 100).view(len(rows), 100)
    return Completions(
        prompt_ids=numbers[:, 50 : 50 + p] * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=numbers[:, :t] * attended,
        response_mask=mask,
        sampler_logprobs=-numbers[:, :t] * mask / 7.0,
        ended=torch.tensor([row[1] % 2 == 0 for row in rows]),
        group_id=first + torch.arange(len(rows)),
        attended=attended,
        kept_logmass=-numbers[:, :t] * mask / 9.0,
        turn=(attended & ~mask).long(),
        follows=(numbers[:, :t] % 5 - 1) * attended,
        blocked_eos=numbers[:, 95:97],
        vision=Vision([PromptVision({"pixels": row[None, :3]}) for row in numbers], torch.arange(len(rows))),
    )


def rollout_of(drawn: Completions, *, per_token: bool) -> Rollout:
    tokens = drawn.response_ids.float()
    return rollout(
        drawn.group_id.float(),
        tokens if per_token else drawn.group_id / 2,
        drawn,
        verdicts=drawn.group_id / 4,
        **{name: tokens / n for n, name in enumerate(("old_logprobs", "ref_logprobs", "weights", "old_values"), 3)},
        returns=tokens / 11,
        kl_factor=0.5,
        teacher_logprobs=tokens / 13,
        teacher_mask=drawn.response_mask,
        teacher_top_ids=torch.stack([drawn.response_ids, 2 * drawn.response_ids], -1),
        teacher_top_logprobs=torch.stack([tokens / 15, tokens / 17], -1),
    )


def same(one: Any, two: Any) -> bool:
    """In every column."""
    pairs = zip(columns_of(one), columns_of(two), strict=True)
    return all(
        name == other and x is not None and y is not None and x.shape == y.shape and torch.equal(x, y)
        for (name, _, x), (other, _, y) in pairs
    )


@given(ROWS, ROWS, st.integers(0, 2), st.booleans())
def test_joining_and_taking_apart_again_gives_every_column_back(rows, others, wider, per_token):
    one, two = drawn_of(rows, 1, wider=wider), drawn_of(others, 1001)
    parts = [rollout_of(drawn, per_token=per_token) for drawn in (one, two)]
    joint, count = join_rollouts(*parts), len(rows)
    assert joint.kl_factor == 0.5 and len(joint) == count + len(others)
    for part_of, at in zip(parts, (torch.arange(count), count + torch.arange(len(others)))):
        found, expected = trim_rollout(select(joint, at)), trim_rollout(part_of)
        assert same(found, expected) and same(found.completions, expected.completions)
        pixels = [taken.completions.vision.inputs(torch.device("cpu"))["pixels"] for taken in (found, expected)]
        assert torch.equal(*pixels)


@given(ROWS, st.integers(0, 2))
def test_trimming_takes_off_padding_and_nothing_else(rows, wider):
    drawn, tight = drawn_of(rows, 1, wider=wider), drawn_of(rows, 1)
    found = trim(drawn)
    assert found.attention_mask.any(0).all() and found.attention_mask.sum() == drawn.attention_mask.sum()
    assert found.prompt_ids.shape == tight.prompt_ids.shape and found.response_ids.shape == tight.response_ids.shape
    assert found.prompt_ids[found.prompt_mask].tolist() == drawn.prompt_ids[drawn.prompt_mask].tolist()
    assert drawn.attended is not None and found.attended is not None
    assert found.response_ids[found.attended].tolist() == drawn.response_ids[drawn.attended].tolist()
    assert same(trim(found), found)


def test_parts_that_have_other_columns_are_not_joined():
    one, two = (rollout_of(drawn_of([(1, 2, 0)], first), per_token=False) for first in (1, 1001))
    with pytest.raises(AssertionError, match="weights"):
        join_rollouts(one, dataclasses.replace(two, weights=None))


def test_no_reward_function_may_note_a_column_of_the_samples():
    drawn = completions([2, 1], 2)
    said = scores([1.0, 0.0])
    told = [Episode("prompt 0", [{"role": "assistant", "content": "a"}], "answered", 1) for _ in range(2)]
    table = sample_table(3, batch([0]), ["a", "b"], drawn, said, said.total)
    assert set(table) - {"answer", "rewards/f0"} == SAMPLE_COLUMNS - {
        "rank",
        "opponent",
        "opponent_reward",
        "win",
        "win_rate",
    }
    episodes = sample_table(3, batch([0]), ["a", "b"], dataclasses.replace(drawn, episodes=told), said, said.total)
    rare = {"returned_images", "branches", "forks"}
    assert set(episodes) - set(table) <= EPISODE_COLUMNS and EPISODE_COLUMNS - set(episodes) <= rare


def test_columns_of_many_parts_are_those_of_each():
    draw = torch.Generator().manual_seed(0)
    prompt, response = (torch.arange(w) < torch.randint(w + 1, (12, 1), generator=draw) for w in (5, 7))
    drawn = Completions(
        prompt_ids=torch.ones(12, 5, dtype=torch.long),
        prompt_mask=prompt.flip(1),
        response_ids=torch.ones(12, 7, dtype=torch.long),
        response_mask=response,
        sampler_logprobs=torch.zeros(12, 7),
        ended=torch.ones(12, dtype=torch.bool),
        group_id=torch.arange(12),
    )
    parts = [torch.tensor([row]) for row in range(12)] + [torch.tensor([3, 1]), torch.arange(12)]
    assert used_columns_of_parts(drawn, parts) == [used_columns(select(drawn, rows)) for rows in parts]
    for rows, used in zip(parts, used_columns_of_parts(drawn, parts), strict=True):
        prompt_columns, response_columns = used.values()
        mine = select(drawn, rows)
        assert not mine.prompt_mask[:, : prompt_columns.start].any()
        assert not mine.response_mask[:, response_columns.stop :].any()
        assert prompt_columns.start == 5 or mine.prompt_mask[:, prompt_columns.start].any()
        assert response_columns.stop == 1 or mine.response_mask[:, response_columns.stop - 1].any()
