"""Rewards for parts of a completion: lists of (start, end, value)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.core.errors import RewardError
from lit_rl.rewards import Rewards

TEXT = "0123456789"
PLACES = st.tuples(st.integers(0, 9), st.integers(1, 10)).filter(lambda place: place[0] < place[1])
SPANS = st.lists(st.builds(lambda place, value: (*place, value), PLACES, st.floats(-5, 5)), max_size=4)
ENTRIES = st.lists(st.none() | st.floats(-5, 5) | SPANS, min_size=1, max_size=5)


@given(ENTRIES, st.floats(-3, 3))
def test_a_completion_earns_the_sum_of_its_spans(entries, weight):
    def some(completions):
        return entries

    def other(completions):
        return [1.0] * len(completions)

    rows = len(entries)
    scores = Rewards([some, other], {"some": weight}).score([""] * rows, [TEXT] * rows, {})
    for i, entry in enumerate(entries):
        spans = entry if isinstance(entry, list) else []
        value = math.fsum(span[2] for span in spans) if isinstance(entry, list) else entry
        expected = 1.0 if value is None else weight * value + 1.0
        assert scores.total[i].item() == pytest.approx(expected, abs=1e-5)
        if scores.span_rewards is not None:
            assert scores.span_rewards[i] == [(start, end, weight * v) for start, end, v in spans]
    assert (scores.span_rewards is None) == (not any(isinstance(entry, list) for entry in entries))


def test_spans_of_several_functions_stand_in_one_list():
    def first(completion):
        return [(0, 3, 1.0)]

    async def second(completions):
        return [[(2, 4, 2.0), (0, 10, -1.0)], 0.5]

    scores = Rewards([first, second], [2.0, 10.0]).score(["", ""], [TEXT, TEXT], {})
    assert scores.span_rewards == [[(0, 3, 2.0), (2, 4, 20.0), (0, 10, -10.0)], [(0, 3, 2.0)]]
    assert scores.values.tolist() == [[1.0, 1.0], [1.0, 0.5]]
    assert scores.total.tolist() == [12.0, 7.0]


def test_characters_of_messages_are_those_of_their_text():
    completion = [{"role": "assistant", "content": "abc"}]
    assert Rewards({"f": lambda completions: [[(0, 3, 1.0)]]}).score(["p"], [completion], {}).total.tolist() == [1.0]
    with pytest.raises(RewardError, match="3 characters"):
        Rewards({"f": lambda completions: [[(0, 4, 1.0)]]}).score(["p"], [completion], {})


def test_numpy_numbers_are_numbers():
    span = (np.int64(1), np.int32(2), np.float32(0.5))
    scores = Rewards({"f": lambda completion: [span]}).score(["p"], [TEXT], {})
    assert scores.span_rewards == [[(1, 2, 0.5)]]


WRONG = {
    "empty": ((3, 3, 1.0), "start < end"),
    "reversed": ((4, 3, 1.0), "start < end"),
    "negative": ((-1, 3, 1.0), "start < end"),
    "past_the_end": ((0, 11, 1.0), "10 characters"),
    "float_place": ((0.0, 3, 1.0), "whole numbers"),
    "nan": ((0, 3, math.nan), "not finite"),
    "inf": ((0, 3, math.inf), "not finite"),
    "text": ((0, 3, "1"), "is a str"),
    "none": ((0, 3, None), "NoneType"),
    "two": ((0, 3), "mixes spans and turns"),
    "not_a_tuple": (3, "is a list"),
}


def test_wrong_spans_are_refused():
    for span, told in WRONG.values():
        mine = Rewards({"mine": lambda completions, span=span: [0.0, [(0, 1, 1.0), span]]})
        with pytest.raises(RewardError, match=f"'mine'.*completion 1.*{told}"):
            mine.score(["", ""], [TEXT, TEXT], {})


def test_turns_earn_in_the_place_of_spans():
    def turns(completions):
        return [[(0, 1.0), (2, 0.5)], [(1, -1.0)], None]

    def number(completions):
        return [1.0, 2.0, 3.0]

    scores = Rewards([turns, number], [2.0, 1.0]).score(["?"] * 3, ["a", "b", "c"], {})
    assert scores.total.tolist() == [4.0, 0.0, 3.0]
    assert scores.span_rewards == [[(0, 2.0), (2, 1.0)], [(1, -2.0)], []]


def test_wrong_turns_are_refused():
    for part, told in (((-1, 1.0), "the turn -1"), ((0.5, 1.0), "the turn 0.5"), ((0, math.inf), "not finite")):
        with pytest.raises(RewardError, match=told):
            Rewards([lambda completions, part=part: [[part]]]).score(["?"], ["a"], {})
