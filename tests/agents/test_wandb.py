"""Weights & Biases, the real package, which needs no account offline: transcripts are a table in its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="make agents")
ROOT = Path(__file__).parents[2]


def test_transcripts_are_a_table_of_the_run(tmp_path: Path) -> None:
    few = ["trainer.max_steps=1", "trainer.limit_val_batches=0", "data.prompts_per_rollout=2"]
    command = [sys.executable, "train.py", "experiment=guess", "logger=wandb", f"run_dir={tmp_path}", *few]
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    found = json.loads(table.read_text())
    assert {"step", "rank", "prompt", "completion", "turns", "end", "messages"} <= set(found["columns"])
    prompt, transcript = (found["data"][0][found["columns"].index(name)] for name in ("prompt", "completion"))
    assert prompt == "0..9="
    assert transcript.startswith("assistant: ") and "\nuser: " in transcript, "who wrote what"
