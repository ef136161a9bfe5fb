"""`lit-rl transcripts`: of which run, and how much of it."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lit_rl.commands.transcripts import transcripts
from lit_rl.errors import ConfigError, did_you_mean

KEYS = ("run_dir", "transcripts.files", "transcripts.rollouts", "transcripts.episodes", "transcripts.tokens")
"""What may be set on the command line."""


def run(config: DictConfig) -> int:
    """Find the folder, and write its page."""
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0]
        if key not in (*KEYS, "task"):
            raise ConfigError(
                f"{key} cannot be set for lit-rl transcripts.{did_you_mean(key, KEYS)} To be set are {', '.join(KEYS)}."
            )
    if not config.run_dir:
        raise ConfigError("lit-rl transcripts needs the folder of a run: run_dir=runs/...")
    return transcripts(Path(str(config.run_dir)).expanduser(), **config.transcripts)
