"""Whole runs with an environment: one that is lost ends the run with 5, and nothing that was learned is lost; what
trackers are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs_helpers import SMALL, assert_same_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

GAME = [
    *(each for each in SMALL if not each.startswith("data.task.max_operand")),
    *("data=repeated", "data.task.prompt='0..9='", "data.task.train_rows=32", "trainer.max_steps=5"),
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
    assert train(*GAME, f"run_dir={whole}") == 0
    monkeypatch.setenv("GAMES_UNTIL_LOST", str(3 * GAMES + GAMES // 2))
    child = process(*GAME, f"run_dir={run_dir}")
    output, _ = child.communicate(timeout=200)
    assert child.returncode == 5, output
    said = " ".join(output.split())
    assert "of 16 episodes failed" in said and "env.max_failed=0.1" in said
    assert "ConnectionError: the game server is gone" in said and "ckpt_path=last" in said
    assert "generator failed" not in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_00000003.ckpt"]
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    monkeypatch.delenv("GAMES_UNTIL_LOST")
    assert train(*GAME, f"run_dir={run_dir}", "ckpt_path=last") == 0
    assert_same_run(whole, run_dir)


@pytest.mark.all
def test_a_tracker_is_told_of_episodes(train, tmp_path):
    """Every number of them, in training and validation, and whole conversations in the place of completions."""
    shown = ["logger=tensorboard", "callbacks.samples.print=2", "callbacks.samples.every=1", "trainer.max_steps=2"]
    assert train(*(each for each in GAME if each != "logger=none"), *shown, f"run_dir={tmp_path}") == 0
    board = EventAccumulator(str(tmp_path)).Reload()
    scalars = set(board.Tags()["scalars"])
    for name in ("turns/mean", "tools/call_frequency", "env/failed", "env/seconds_p50"):
        assert {f"train/{name}", f"val/{name}"} <= scalars, name
    assert "time/environment" in scalars
    (tag,) = (tag for tag in board.Tags()["tensors"] if tag.split("/")[0] == "samples")
    texts = [event.tensor_proto.string_val[0].decode() for event in board.Tensors(tag)]
    assert len(texts) == 2 and all("assistant:" in text and "user: ?=" in text for text in texts), texts
