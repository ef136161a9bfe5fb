"""A LightningCLI of the user's own, over our classes, takes a path and a task."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm

SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lit_rl import GRPO, RolloutDataModule

usual = ["--trainer.max_steps=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
usual += ["--trainer.limit_val_batches=0"]
usual += ["--trainer.enable_checkpointing=false", "--data.prompts_per_rollout=2", "--data.val_fraction=0"]
usual += ["--model.model=tiny", "--model.reward=lit_rl.rewards.exact_match", "--model.group_size=2"]
usual += ["--model.sampling.max_new_tokens=2"]
for rows in ("--data.path=rows.jsonl", "--data.task=lit_rl.data.tasks.Addition"):
    cli = LightningCLI(GRPO, RolloutDataModule, save_config_callback=None, args=["fit", *usual, rows])
    print("trained", cli.trainer.global_step, "step over", rows)
"""


@pytest.mark.all
def test_it_trains(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+1=", "answer": "3"}\n')
    done = warm.run([sys.executable, "-c", SCRIPT], cwd=tmp_path)
    assert done.stdout.count("trained 1 step over --data.") == 2, done.stderr[-2000:]
