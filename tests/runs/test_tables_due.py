"""`callbacks.samples.every` and `callbacks.histograms.every` count optimizer steps, however many a rollout has."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lit_rl.callbacks.samples import EveryNSteps


def due(every: int, steps: range) -> list[int]:
    clock = EveryNSteps(every)
    return [step for step in steps if clock.at(step)]


def test_with_many_steps_a_rollout_it_is_due_at_the_first_rollout_after_each_multiple():
    assert due(50, range(0, 420, 16)) == [0, 64, 112, 160, 208, 256, 304, 352, 400]
    assert due(10, range(0, 100, 16)) == list(range(0, 100, 16))


@given(every=st.integers(1, 60), steps=st.integers(1, 20))
def test_two_of_them_are_never_further_apart_than_the_setting_and_a_rollout(every, steps):
    at = due(every, range(0, 1000, steps))
    assert all(b - a < every + steps for a, b in itertools.pairwise(at))
    assert {step // every for step in range(0, 1000, steps)} == {step // every for step in at}
    assert steps > 1 or at == list(range(0, 1000, every))
