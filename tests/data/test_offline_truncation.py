"""Cuts in token space: limits hold, pairs keep one prompt, and labels stay with their tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.data.encode import kept_windows, truncate, truncate_labels
from lit_rl.data.example_set import Encoded


def text(prompt: int, completion: int, base: int) -> Encoded:
    ids = [*range(prompt), *range(base, base + completion)]
    return Encoded(ids, [i > 0 and i >= prompt for i in range(len(ids))], prompt)


LIMIT = st.none() | st.integers(2, 14)


@settings(deadline=None)
@given(
    prompt=st.integers(1, 10),
    sizes=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    limit=LIMIT,
    own=st.none() | st.integers(1, 10),
    keep=st.sampled_from(["start", "end"]),
)
def test_both_sides_of_a_pair_keep_the_same_prompt_within_the_limits(prompt, sizes, limit, own, keep):
    pair = [text(prompt, size, 100 * (i + 1)) for i, size in enumerate(sizes)]
    kept = [truncate(side, window) for side, window in zip(pair, kept_windows(pair, limit, own, keep))]
    one, other = ([token for token in side.ids if token < 100] for side in kept)
    assert one == other and one == kept[0].ids[: kept[0].prompt_tokens] == kept[1].ids[: kept[1].prompt_tokens]
    for whole, side in zip(pair, kept):
        assert len(side) <= (limit or 99) and len(side) - side.prompt_tokens <= (own or 99)
        assert len(side.learned) == len(side.ids) and not any(side.learned[: max(1, side.prompt_tokens)])
        assert all(side.learned[max(1, side.prompt_tokens) :])
        place = whole.ids.index(side.ids[0])
        assert side.ids == whole.ids[place : place + len(side)], "one stretch of the text"
        if keep == "start":
            assert place == 0
        elif own is None:
            assert side.ids[-1] == whole.ids[-1]
    if max(map(len, kept)) < (limit or 99) and own is None:
        assert kept == pair, "nothing is cut without need"


def test_keep_end_cuts_by_what_the_longer_side_needs():
    pair = [text(5, 2, 100), text(5, 4, 200)]
    kept = [truncate(side, window) for side, window in zip(pair, kept_windows(pair, 6, None, "end"))]
    assert kept[0] == Encoded([3, 4, 100, 101], [False, False, True, True], 2)
    assert kept[1] == Encoded([3, 4, 200, 201, 202, 203], [False, False, True, True, True, True], 2)
    kept = [truncate(side, window) for side, window in zip(pair, kept_windows(pair, 3, None, "end"))]
    assert kept[0] == Encoded([100, 101], [False, True], 0)
    assert kept[1] == Encoded([201, 202, 203], [False, True, True], 0)


def test_a_completion_is_cut_before_the_whole():
    (window,) = kept_windows([text(5, 6, 100)], 7, 3, "end")
    assert truncate(text(5, 6, 100), window).ids == [1, 2, 3, 4, 100, 101, 102]


def test_labels_stay_with_the_tokens_that_are_left():
    steps = Encoded([1, 2, 3, 4, 5, 6, 7], [False, False, True, False, True, False, True], 1)
    labels = (1.0, 0.0, 1.0)
    assert truncate_labels(steps, labels, range(7)) == labels
    assert truncate_labels(steps, labels, range(0, 5)) == (1.0, 0.0)
    assert truncate_labels(steps, labels, range(3, 7)) == (0.0, 1.0)
    assert truncate_labels(steps, labels, range(2, 7)) == (0.0, 1.0), "a first token is not learned"
    for window in (range(0, 5), range(2, 7), range(3, 7)):
        assert sum(truncate(steps, window).learned) == len(truncate_labels(steps, labels, window))
