"""`callbacks.samples.every` and `callbacks.histograms.every` count optimizer steps, however many a rollout has."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_helpers import SMALL, interrupted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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


@pytest.mark.all
def test_a_run_and_one_that_is_resumed_inside_a_rollout_show_the_same_tables(train, tmp_path, capsys):
    shape = ["algo.minibatches=2", "algo.iterations=2", "trainer.max_steps=24", "data.task.max_operand=5"]
    every = ["callbacks.samples.print=1", "callbacks.samples.every=6"]
    every += ["callbacks.histograms.every=6", "logger=tensorboard"]
    keep = ["callbacks.checkpoint.every_n_train_steps=6", "callbacks.checkpoint.save_top_k=-1"]
    overrides = [*SMALL, *shape, *every, *keep]

    def run(folder, *more) -> tuple[list[int], list[int]]:
        capsys.readouterr()
        assert train(*overrides, f"run_dir={folder}", *more) == 0
        shown = [int(step) for step in re.findall(r"rollout at step (\d+)", capsys.readouterr().out)]
        board = EventAccumulator(str(folder), size_guidance={"histograms": 0})
        board.Reload()
        return shown, [event.step for event in board.Histograms("histograms/reward")]

    assert run(tmp_path / "whole") == ([0, 8, 12, 20], [0, 8, 12, 20])
    interrupted(tmp_path / "whole", tmp_path / "again", 6)
    shown, drawn = run(tmp_path / "again", "ckpt_path=last")
    assert shown == [8, 12, 20] and drawn == [0, 8, 12, 20]
