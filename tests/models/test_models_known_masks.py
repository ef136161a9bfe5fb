"""transformers is told what it would ask of a mask: it makes the same masks, and does not look."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from lit_rl.models import forward_inputs as ours
from lit_rl.models.forward_inputs import known_masks


def refuse(*_: Any) -> None:
    raise AssertionError("transformers looks at the mask")


def equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    queries=st.integers(1, 6),
    cached=st.booleans(),
    window=st.sampled_from([None, 3, 6, 9]),
    skip=st.booleans(),
    known_width=st.sampled_from([6, 5]),
)
def test_a_mask_that_is_known_is_made_as_transformers_makes_it(rows, queries, cached, window, skip, known_width):
    mask = torch.tensor(rows)
    asked: dict[str, Any] = {"q_offset": 6 - queries if cached else 0, "attention_mask": mask, "local_size": window}
    if window is not None:
        asked["mask_function"] = sliding_window_causal_mask_function(window)
    size = {"batch_size": len(mask), "q_length": queries, "kv_length": 6, "allow_is_causal_skip": skip}
    expected = sdpa_mask(**size, **asked)
    with known_masks(mask[:, :known_width]):  # of other columns: another mask, of which nothing is known
        assert equal(ours._sdpa_mask(**size, **asked), expected)
    with known_masks(mask), pytest.MonkeyPatch.context() as patch:
        if queries == 6 or cached:  # others are a static cache's, which are looked at
            patch.setattr(masking_utils, "fast_all", refuse)
        assert equal(ours._sdpa_mask(**size, **asked), expected)


@given(lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3))
def test_texts_that_share_a_row_are_found_from_positions_of_the_host(lengths):
    width = max(map(sum, lengths))
    rows = [[place for n in each for place in range(n)] for each in lengths]
    positions = torch.tensor([row + list(range(row[-1] + 1, row[-1] + 1 + width - len(row))) for row in rows])
    expected = masking_utils.find_packed_sequence_indices(positions)
    with known_masks(positions=positions):
        assert equal(masking_utils.find_packed_sequence_indices(torch.full_like(positions, -1)), expected)
    assert equal(masking_utils.find_packed_sequence_indices(positions), expected)
