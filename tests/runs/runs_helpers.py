"""Comparing whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch

from lit_rl.algorithms.rollouts.phase_costs import is_speed
from lit_rl.callbacks.checkpoint_io import is_whole, step_of

SMALL = [
    "data.task.max_operand=5",
    "data.task.val_rows=4",
    "data.prompts_per_rollout=4",
    "algo.group_size=4",
    "trainer.max_steps=12",
    "callbacks.samples.print=0",
    "logger=none",
    "eval.limit=2",
]
"""A run of a few seconds: 32 training prompts, 4 of them a rollout."""
EVERY_STEP = ["callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1"]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl less what measures time and memory."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if not is_speed(name)} for line in lines]


def newest(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint, loaded the safe way."""
    path = max((run_dir / "checkpoints").glob("*.ckpt"), key=lambda p: int(p.stem.rpartition("_")[2]))
    return torch.load(path, weights_only=True)


def whole_step(run_dir: Path) -> int:
    """The step of the newest checkpoint, every byte of which is as it was written."""
    path = max((run_dir / "checkpoints").glob("*.ckpt"), key=step_of)
    assert is_whole(path)
    return step_of(path)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal, bit for bit, through dicts and lists. A tuple may come back as a list: FSDP2 restores `betas` so."""
    sequences = isinstance(a, list | tuple) and isinstance(b, list | tuple)
    assert type(a) is type(b) or sequences, (where, type(a), type(b))
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert torch.equal(*(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))), where
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b), where
    else:
        assert a == b or (a != a and b != b), (where, a, b)  # NaN is NaN here


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimizer, schedule, metrics less times, and samples."""
    first, second = newest(a), newest(b)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(first[part], second[part], part)
    assert rows(a) == rows(b)
    names, others = (sorted(path.name for path in (run / "samples").glob("*")) for run in (a, b))
    assert names == others
    for name in names:
        first_table, second_table = (pyarrow.parquet.read_table(run / "samples" / name) for run in (a, b))
        assert first_table.schema == second_table.schema, name
        assert repr(first_table.to_pydict()) == repr(second_table.to_pydict()), name  # NaN is NaN here


def interrupted(whole: Path, again: Path, step: int) -> None:
    """The run as it was after `step`, killed at any time after that."""
    shutil.copytree(whole, again)
    shutil.rmtree(again / "hf")
    for path in (again / "checkpoints").glob("*.ckpt"):
        if int(path.stem[5:]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    summary = json.loads((again / "summary.json").read_text())
    kept = {name: summary[name] for name in ("before", "losses", "prompts") if name in summary}
    (again / "summary.json").write_text(json.dumps({"status": "running", **kept, "seconds": 1.0}))


def kept_beside(run_dir: Path) -> dict[str, Any]:
    """The state of each rank's module in the newest checkpoint, and a moving reference. A half-used rollout has times
    in it, which differ."""
    saved = newest(run_dir)
    return {"reference": saved.get("reference"), "modules": [rank["module"] for rank in saved["lit_rl"]]}
