"""An environment that is lost ends the run with 5, and nothing that was learned is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_helpers import SMALL, assert_same_run

GAME = [
    *(*SMALL, "data=repeated", "data.task.prompt='0..9='", "data.task.train_rows=32", "trainer.max_steps=5"),
    *("env=environment", f"env.path={Path(__file__).parent / 'failing_games.py'}:Unreachable", "reward=environment"),
    *("env.max_turns=2", "env.max_tokens=24", "env.max_observation_tokens=8", "sampling.max_new_tokens=4"),
]
GAMES = 4 * 4
"""Of a rollout."""


@pytest.mark.all
def test_too_many_failures_save_the_run_and_it_goes_on_when_the_environment_is_repaired(
    train, process, tmp_path, monkeypatch
):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    game = [each for each in GAME if not each.startswith("data.task.max_operand")]
    assert train(*game, f"run_dir={whole}") == 0
    monkeypatch.setenv("GAMES_UNTIL_LOST", str(3 * GAMES + GAMES // 2))
    child = process(*game, f"run_dir={run_dir}")
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 5, output
    said = " ".join(output.split())
    assert "of 16 episodes failed" in said and "env.max_failed=0.1" in said
    assert "ConnectionError: the game server is gone" in said and "ckpt_path=last" in said
    assert "generator failed" not in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_00000003.ckpt"]
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    monkeypatch.delenv("GAMES_UNTIL_LOST")
    assert train(*game, f"run_dir={run_dir}", "ckpt_path=last") == 0
    assert_same_run(whole, run_dir)
