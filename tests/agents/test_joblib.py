"""Jobs of a sweep that joblib runs beside each other, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from doc_runs import SMALL

from lit_rl.reports import sweep


def test_jobs_of_joblib_are_in_the_table_too(root: Path, tmp_path: Path) -> None:
    """And the sweep ends with the error of the job that fails."""
    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *SMALL, "logger=none"]
    words += ["data.prompts_per_rollout=4", "data.task.max_operand=5", "trainer.accelerator=cpu"]
    words += ["data.task.val_rows=0", "run_dir=mine", "algo.group_size=1,2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(root / "train.py"), *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    refused, finished = sweep.read_sweep(tmp_path / "mine").jobs
    assert (refused.code, refused.state) == (2, "failed, code 2") and "group_size" in refused.message
    assert (finished.code, finished.state) == (0, "finished") and finished.last is not None
    assert done.returncode == 2 and "sweep.html" in done.stdout
    assert (tmp_path / "mine" / "sweep.md").read_text().count("failed, code 2") == 1
