"""Small runs of policies that see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L


def quiet_trainer(folder: Path, steps: int, **more: Any) -> L.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {**dict.fromkeys(off, False), "accelerator": "cpu", "max_steps": steps, **more}
    return L.Trainer(default_root_dir=folder, **settings)


def by_letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that tells completions apart."""
    return [float(sum(map(ord, message[0]["content"])) % 7) for message in completions]
