"""How much a row repeats of itself: the law by sets of n-grams, and what does not count."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.algorithms.evaluation.summary_statistics import repeated_share
from lit_rl.rewards import RepetitionPenalty

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=1, max_size=4)


@given(ROWS, st.integers(1, 5), st.integers(0, 12))
def test_is_the_share_of_ngrams_that_stood_there_before(rows, n, length):
    ids = torch.tensor(rows)
    share, has_one = repeated_share(ids, torch.arange(12).expand_as(ids) < length, n)
    penalty = RepetitionPenalty(ngram_size=n)
    expected = [-value for value in penalty([None] * len(rows), [""] * len(rows), [row[:length] for row in rows])]
    torch.testing.assert_close(share, torch.tensor(expected), rtol=0, atol=1e-6)
    assert has_one.tolist() == [length >= n] * len(rows)


def test_what_an_environment_wrote_is_in_no_ngram():
    ids = torch.tensor([[1, 2, 1, 2, 9, 9, 9, 1, 2, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1, 1]]).bool()
    # 12, 21, 12 and 12, 21 are five, of two kinds; 29 and 91 reach over what the environment wrote.
    assert repeated_share(ids, mask, 2)[0].tolist() == [0.6000000238418579]


def test_does_not_depend_on_which_token_has_which_number():
    ids = torch.randint(0, 4, (3, 40), generator=torch.Generator().manual_seed(0))
    mask, renamed = torch.ones_like(ids).bool(), torch.tensor([150_000, 3, 7, 0])[ids]
    assert torch.equal(repeated_share(ids, mask)[0], repeated_share(renamed, mask)[0])
    assert not repeated_share(ids[:, :3], mask[:, :3])[1].any()
