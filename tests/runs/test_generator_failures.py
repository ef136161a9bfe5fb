"""A generator that fails ends the run with 5, and nothing that was learned is lost."""

from __future__ import annotations

import json

import pytest
import torch
from failing_generators import FailsAt
from runs_helpers import SMALL, assert_same_run

GENERATOR = ["generator._target_=failing_generators.FailsAt", "allow_targets=[failing_generators]"]

SHAPES = {
    "one-step": [],
    "several-steps": ["algo.minibatches=2", "trainer.accumulate_grad_batches=2"],
    "redrawn": ["algo/groups=dynamic", "algo.groups.max_draws=8"],
    "validated": ["data.val_batch_size=1", "data.task.max_operand=3", "trainer.val_check_interval=2"],
}
# 8 rollouts an epoch (3 where it is validated in two batches after every second), each of 1 optimizer step or 2
CASES = [
    ("one-step", 8, 0, 8),  # the validation at the end of an epoch
    ("several-steps", 6, 0, 6),
    ("redrawn", 5, 2, 5),  # the second draw of fresh groups
    ("validated", 5, 1, 5),
]


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.mark.all
@pytest.mark.parametrize(("shape", "step", "call", "saved"), CASES)
def test_it_saves_where_it_stands_and_going_on_equals_the_whole_run(
    train, whole_runs, tmp_path, monkeypatch, capsys, shape, step, call, saved
):
    overrides = [*SMALL, *SHAPES[shape]]
    whole, run_dir = whole_runs / shape, tmp_path / "run"
    if not whole.exists():
        assert train(*overrides, f"run_dir={whole}") == 0
    with monkeypatch.context() as failing:
        failing.setattr(FailsAt, "step", step)
        failing.setattr(FailsAt, "call", call)
        assert train(*overrides, *GENERATOR, f"run_dir={run_dir}") == 5
    said = capsys.readouterr()
    assert "the engine died: its last words" in said.err and "ckpt_path=last" in said.out
    newest = max((run_dir / "checkpoints").glob("*.ckpt"))
    assert newest.name == f"step_{saved:08d}.ckpt"
    assert torch.load(newest, weights_only=True)["global_step"] == saved
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    assert train(*overrides, *GENERATOR, f"run_dir={run_dir}", "ckpt_path=last") == 0
    assert_same_run(whole, run_dir)


def test_before_the_first_step_there_is_nothing_to_save(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FailsAt, "step", 0)
    monkeypatch.setattr(FailsAt, "call", 2)  # after the validations
    assert train(*SMALL, *GENERATOR, f"run_dir={tmp_path / 'run'}") == 5
    assert not list((tmp_path / "run").rglob("*.ckpt")) and "ckpt_path=last" not in capsys.readouterr().out
