"""An alarm takes both processes back together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from alarm_runs import AtLooks, fitted, saved
from runs_helpers import assert_same

pytestmark = [pytest.mark.dist, pytest.mark.all]


def main(folder: Path) -> None:
    """Wrong at the ends of rollouts 2 and 3, of two optimizer steps each: back to step 3 after step 6."""
    fitted(folder, AtLooks({2, 3}, then="roll_back", patience=2), steps=4, strategy="ddp", devices=2)


def test_two_processes_go_back_together_and_on(two_ranks: Path) -> None:
    folder = two_ranks / "alarms"
    before, back, last = (saved(folder, step) for step in (3, 6, 8))
    assert_same(back["state_dict"], before["state_dict"])
    assert_same(back["optimizer_states"][0]["state"], before["optimizer_states"][0]["state"])
    assert back["lit_rl"][1]["module"]["tokens_seen"] > before["lit_rl"][1]["module"]["tokens_seen"]
    assert any(not torch.equal(last["state_dict"][name], weight) for name, weight in back["state_dict"].items())
    (line,) = map(json.loads, (folder / "alarms.jsonl").read_text().splitlines())  # rank 0 alone writes
    assert line["step"] == 6
