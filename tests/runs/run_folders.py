"""Folders as runs leave them, written by hand in a moment: metrics, samples, config, summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_rl.callbacks.output_files import write_parquet

CONFIG: dict[str, Any] = {
    "seed": 0,
    "run_dir": "runs/x",
    "task": "fit",
    "trainer": {"_target_": "lightning.Trainer", "max_steps": 40, "gradient_clip_val": 1.0},
    "optimizer": {"_target_": "lit_rl.algorithms.optim.optimizers.AdamW", "lr": 0.001, "weight_decay": 0.0},
    "sampling": {"_target_": "lit_rl.core.rollout.Sampling", "max_new_tokens": 512, "stop": []},
    "model": {"_target_": "lit_rl.models.LanguageModel", "name": "tiny"},
    "data": {"_target_": "lit_rl.data.prompt_module.RolloutDataModule", "path": "mine.jsonl"},
}
CONFIG["algo"] = {
    "_target_": "lit_rl.algorithms.GRPO",
    "sampling": CONFIG["sampling"],
    "optimizer": CONFIG["optimizer"],
    "loss": {"_target_": "lit_rl.ops.policy_losses.clipped_policy_loss", "_partial_": True, "clip_low": 0.1},
    "mask_truncated": False,
}


def samples(
    folder: Path, name: str, prompts: Sequence[Any], rewards: Sequence[float], said: str = "7", **more: Sequence[Any]
) -> None:
    """A file of `samples/`, one row a reward; `name` begins with `step_` or `val_`, and has the step behind it."""
    rows = len(rewards)
    step = int(name.split("_")[1])
    table: dict[str, list[Any]] = {"step": [step] * rows, "prompt": list(prompts), "completion": [said] * rows}
    table |= {"reward": list(rewards), "rewards/right": list(rewards), "length": [2] * rows, "ended": [True] * rows}
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    write_parquet(table | {key: list(values) for key, values in more.items()}, folder / "samples" / f"{name}.parquet")


def run_folder(
    folder: Path,
    rows: Sequence[dict[str, Any]] = (),
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """A folder with these lines of metrics.jsonl, this config and this summary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG if config is None else config, sort_keys=False))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
