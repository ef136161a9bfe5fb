"""`lit-rl transcripts`: of which run, and how much of it."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lit_rl.cli import own_keys
from lit_rl.commands.transcripts import transcripts

KEYS = ("run_dir", "transcripts.files", "transcripts.rollouts", "transcripts.episodes", "transcripts.tokens")
"""Keys that may be typed."""


def run(config: DictConfig) -> int:
    """Find the folder, and write its page."""
    own_keys.check("lit-rl transcripts", own_keys.typed(), KEYS)
    return transcripts(Path(str(config.run_dir)).expanduser(), **config.transcripts)
