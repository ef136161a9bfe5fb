"""Completions as lists of the tokens that the policy sampled."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lit_rl.core.rollout import Completions
from lit_rl.generation.collect import response_ids


@st.composite
def masks(draw: st.DrawFn) -> list[list[bool]]:
    width = draw(st.integers(0, 7))
    return draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=6))


@given(masks())
@example([[True, True, False, False, True]])  # an observation inside a response
@example([[False, True], [False, False], [True, True]])
def test_a_response_is_the_tokens_that_the_policy_sampled_wherever_they_stand(mask: list[list[bool]]) -> None:
    rows, width = len(mask), len(mask[0])
    ids = torch.arange(rows * width).view(rows, width)  # no two alike
    sampled = torch.tensor(mask, dtype=torch.bool).view(rows, width)
    completions = Completions(
        prompt_ids=torch.ones(rows, 1, dtype=torch.long),
        prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
        response_ids=ids,
        response_mask=sampled,
        sampler_logprobs=torch.zeros(rows, width),
        ended=torch.ones(rows, dtype=torch.bool),
        group_id=torch.arange(rows),
        attended=torch.ones_like(sampled),
    )
    found = response_ids(completions)
    assert found == [[row * width + i for i, was in enumerate(line) if was] for row, line in enumerate(mask)]
    assert [len(tokens) for tokens in found] == completions.lengths.tolist()
