"""A signal ends a run after the optimizer step, or the validation's batch, at hand: nothing is validated for it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from runs_helpers import SMALL, assert_same_run

RUN = [
    *SMALL,
    "trainer.max_steps=6",
    "data.task.max_operand=3",
    "data.val_batch_size=1",
    "trainer.val_check_interval=2",
    "reward=function",
    f"reward.fn={Path(__file__).parent / 'signalling_rewards.py'}:signals",
]
"""Before the training 2 decodings of 2 batches; then each second optimizer step has a validation of 2 batches."""
WHERE = {
    "in the rollout before a validation": (6, 2),
    "in the first batch of a validation": (7, 2),
    "in its last batch": (8, 2),
    "in the last rollout of an epoch": (9, 3),
    "in a later validation": (12, 5),
}
"""The call of the reward at which the signal comes, and the optimizer step that is saved."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.mark.parametrize("where", [pytest.param(name, marks=pytest.mark.all) for name in WHERE])
def test_nothing_is_validated_after_a_signal_and_going_on_equals_the_whole_run(
    train, whole, where, tmp_path, monkeypatch, capsys
) -> None:
    (call, step), run, calls = WHERE[where], tmp_path / "run", tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("SIGNALLED", str(os.getpid()))
    monkeypatch.setenv("SIGNAL_AT", "0")
    if not whole.exists():
        assert train(*RUN, f"run_dir={whole}") == 0
        calls.unlink()
    monkeypatch.setenv("SIGNAL_AT", str(call))
    assert train(*RUN, f"run_dir={run}") == 128 + signal.SIGTERM
    assert len(calls.read_text().split()) == call, "no reward is asked for after that one"
    assert f"Stopped at step {step}, saved" in capsys.readouterr().out
    assert [path.name for path in (run / "checkpoints").glob("*.ckpt")] == [f"step_{step:08d}.ckpt"]
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    monkeypatch.setenv("SIGNAL_AT", "0")
    assert train(*RUN, f"run_dir={run}", "ckpt_path=last") == 0
    assert_same_run(whole, run)
