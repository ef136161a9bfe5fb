"""What ends a run, and that its start says so: `max_steps` means that many steps, on small files too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import QUICK, Command, metrics, write_jsonl

from lit_rl.cli import run_info


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A run on four prompts, two of them a step."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    path = write_jsonl(tmp_path / "small.jsonl", rows)
    quick = [word for word in QUICK if not word.startswith("trainer.max_")]
    return [*quick, f"data.path={path}", "data.val_fraction=0", "run_dir=run"]


@pytest.mark.parametrize(
    ("typed", "steps", "said"),
    [
        (["trainer.max_steps=9"], 9, "9 (set by trainer.max_steps)"),  # two steps an epoch
        (["trainer.max_steps=9", "trainer.max_epochs=1"], 2, "max_epochs=1, which ends before trainer.max_steps=9"),
        ([], 2 * run_info.EPOCHS, f"6 (set by trainer.max_epochs={run_info.EPOCHS})"),
    ],
)
def test_a_run_takes_the_steps_that_its_start_says(typed, steps, said, command: Command, cwd, small):
    outcome = command(*small, *typed)
    assert outcome.code == 0, outcome.err
    assert said in outcome.out
    assert json.loads((cwd / "run" / "summary.json").read_text())["steps"] == steps == metrics(cwd / "run")["step"]
