"""A generator that fails in one of two real processes: both save and end with 5, or both draw anew what was lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs_helpers import SMALL, assert_same_run, rows

pytestmark = [pytest.mark.dist, pytest.mark.all]

TWO = [*SMALL, "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=5"]
TWO += ["allow_targets=[failing_generators,losing_generators]"]
RUN = [*TWO, "generator._target_=failing_generators.FailsAt"]


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """The generators of these tests, by the processes that they start."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here.parent / "algorithms"))))


def test_both_processes_save_and_going_on_equals_the_whole_run(process, tmp_path, monkeypatch):
    def ended(run_dir: Path, *more: str) -> tuple[int, str]:
        child = process(*RUN, f"run_dir={run_dir}", *more)
        output, _ = child.communicate(timeout=200)
        return child.returncode, output

    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert ended(whole)[0] == 0
    with monkeypatch.context() as failing:
        failing.setenv("FAILS_AT_STEP", "3")
        failing.setenv("FAILS_ON_RANK", "1")
        code, output = ended(run_dir)
    assert code == 5, output
    assert "its last words" in output and "ckpt_path=last" in output
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_00000003.ckpt"]
    code, output = ended(run_dir, "ckpt_path=last")
    assert code == 0, output
    assert_same_run(whole, run_dir)


def test_what_one_process_loses_of_a_rollout_ahead_both_draw_anew(process, tmp_path):
    """The rollout after it is drawn ahead again. `tests/engines` does it with a real server, which is killed."""
    lost = ["~generator", "+generator._target_=losing_generators.LosesWhatIsDrawnAhead"]
    child = process(*TWO, *lost, f"run_dir={tmp_path}")
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 0, output
    ages = [row["train/sampling/staleness/max"] for row in rows(tmp_path) if "train/reward" in row]
    assert ages == [0, 1, 1, 0, 1], "of the older of the two ranks: rollout 3 was asked for at step 2"
