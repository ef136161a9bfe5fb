"""Weights & Biases, the real package, offline: the table of a policy that sees has thumbnails of what it saw."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="make agents")
ROOT = Path(__file__).parents[2]


def test_thumbnails_are_in_the_table_of_the_run(tmp_path: Path) -> None:
    few = ["trainer.max_steps=1", "data.prompts_per_rollout=4", "callbacks.samples.print=2"]
    off = ["trainer.limit_val_batches=0", "trainer.accelerator=cpu"]
    command = [sys.executable, "train.py", "experiment=vl_digits", "logger=wandb", f"run_dir={tmp_path}", *few, *off]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DATA_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # What waits to be sent: the table with its images, each a file.
    waiting = [path.read_bytes() for path in (tmp_path / "artifacts" / "staging").iterdir()]
    table = next(json.loads(data) for data in waiting if data.startswith(b'{"_type": "table"'))
    prompts, images = ([row[table["columns"].index(name)] for row in table["data"]] for name in ("prompt", "image"))
    assert set(prompts) == {"user: [image]Which digit?"} and len(prompts) > 4
    wanted = {"_type": "image-file", "format": "png", "width": 32, "height": 32}
    assert all(wanted.items() <= image.items() for image in images)
    pictures = {data for data in waiting if data.startswith(b"\x89PNG")}
    assert len(pictures) == 4, "one of each prompt, and prompts differ by their images"
    assert {hashlib.sha256(data).hexdigest() for data in pictures} == {image["sha256"] for image in images}
