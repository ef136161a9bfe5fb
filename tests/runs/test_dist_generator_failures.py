"""A generator that fails in one of two real processes: both save what was learned, and end with 5."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_helpers import SMALL, assert_same_run

pytestmark = [pytest.mark.dist, pytest.mark.all]

RUN = [
    *(*SMALL, "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=5"),
    *("generator._target_=failing_generators.FailsAt", "allow_targets=[failing_generators]"),
]


def test_both_processes_save_and_going_on_equals_the_whole_run(process, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

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
