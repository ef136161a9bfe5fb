"""Parts of scored batches put together: whatever there is a row of goes along with its row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_rollouts import batch, completions, scores

from lit_rl.algorithms.ppo_parts import with_values
from lit_rl.algorithms.rollouts.rows import Part, join_completions, joined, take_rows


def part(rows: list[int], weights: list[list[float]]) -> Part:
    """Two completions a prompt."""
    values = [[float(row), 10.0 * row] for row in rows for _ in range(2)]
    drawn = completions([1 + row for row in rows for _ in range(2)], 2)
    said = dataclasses.replace(scores(values), weights=torch.tensor(weights).repeat_interleave(2, 0))
    return batch(rows), drawn, said


def test_the_weights_of_a_row_stay_with_it():
    both = joined(part([0, 1], [[1.0, 0.0], [2.0, 0.0]]), part([2], [[0.0, 3.0]]))
    _, _, taken = take_rows(*both, [2, 0])
    assert taken.values.tolist() == [[2.0, 20.0]] * 2 + [[0.0, 0.0]] * 2
    assert taken.weights.tolist() == [[0.0, 3.0]] * 2 + [[1.0, 0.0]] * 2


def test_a_function_beside_the_others_has_weight_one():
    _, _, said = part([1, 2], [[2.0, 0.5], [1.0, 0.0]])
    said = dataclasses.replace(said, total=(said.weights * said.values).sum(1))
    more = with_values(said, "adapter", torch.tensor([0.5, 1.5, 2.5, 3.5]))
    assert more.names[-1] == "adapter" and more.weights[:, -1].tolist() == [1.0] * 4
    torch.testing.assert_close((more.weights * more.values).sum(1), more.total)


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
