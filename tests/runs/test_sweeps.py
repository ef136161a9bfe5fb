"""Sweeps whose jobs take several processes: nothing of one job reaches the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from runs_helpers import SMALL, assert_same_run

pytestmark = [pytest.mark.dist, pytest.mark.all]

SWEEP = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from lit_rl import cli

def held():
    return {name for name in map(target, os.listdir("/proc/self/fd")) if name.startswith("socket:")}

def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # of the listing itself
        return ""

before, sockets = dict(os.environ), held()
code = cli.run(sys.argv[1:])
if "LOCAL_RANK" not in before:
    words = ("RANK", "MASTER", "WORLD", "LIT_RL", "PL_GLOBAL", "TORCHELASTIC")
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    left = {
        "variables": sorted(name for name in changed if any(word in name for word in words)),
        "group": dist.is_initialized(),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "sockets": sorted(held() - sockets),
        "argv": sys.argv[1:],
    }
    Path("left.json").write_text(json.dumps(left))
sys.exit(code)
"""


def test_two_jobs_of_two_processes_leave_each_other_nothing(root, tmp_path):
    """Of one seed: the second job ends with the bits of the first one."""
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    words = [
        "-m",
        *SMALL,
        "trainer.max_steps=2",
        "data.task.val_rows=0",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
        "run_dir=mine",
        "seed=1,1",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(script), *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("Starting with 2 processes") + done.stdout.count("Starting with 2 processes") == 2
    left = json.loads((tmp_path / "left.json").read_text())
    settings_first = [*words[1:], "-m"]
    assert left == {"variables": [], "group": False, "children": [], "sockets": [], "argv": settings_first}
    first, second = (tmp_path / "mine" / job for job in ("0", "1"))
    assert_same_run(first, second)
    assert (tmp_path / "mine" / "sweep.md").read_text().count("| finished |") == 2
