"""A step takes as many rows as a small file of yours has, where nobody said how many it takes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from lit_rl.commands.first_row import rows_in
from lit_rl.data.small_sets import fitting

SIZES = ("prompts_per_rollout", "batch_size")
"""What a data module calls the rows of a step."""

_TASKS = ("fit", "plan", "data_check")
"""Tasks that make steps, or say whether a training could."""


@dataclass(frozen=True)
class SmallStep:
    """A step of as many rows as a file has."""

    key: str
    """Of its size in the config."""
    rows: int
    said: str
    """A line for the user."""


def step_of(config: DictConfig, typed: set[str]) -> SmallStep | None:
    """The step that fits `data.path`; None where there is nothing to change.

    Rows are counted, not read: where filters leave fewer, the data module says so.

    Args:
        config: As it was composed.
        typed: Keys and groups of the command line.
    """
    data = config.data
    size = next((name for name in SIZES if isinstance(OmegaConf.select(data, name), int)), None)
    ours = str(OmegaConf.select(data, "_target_")).startswith("lit_rl.data.")  # others may mean anything by these keys
    if not ours or size is None or config.task not in _TASKS or {f"data.{size}", "experiment"} & typed:
        return None
    if not isinstance(data.path, str) or data.split is not None or data.map_row is not None:
        return None
    rows = rows_in(data.path, 2 * data[size])
    if rows is None:
        return None
    own = data.val_path is not None or data.val_split is not None or data.val_fraction == 0
    held = 0 if own else max(1, round(rows * data.val_fraction))
    fits = fitting(rows - held, data[size], _unit(config))
    if fits is None:
        return None
    whole = f"{data.path} has {rows} rows" + (f", {held} of them held out for validation" if held else "")
    return SmallStep(f"data.{size}", fits, f"data.{size}={fits} ({whole})")


def _unit(config: DictConfig) -> int:
    """What the rows of a step have to be a multiple of, as far as it is known before anything is built."""
    parts = ("algo.minibatches", "trainer.accumulate_grad_batches", "trainer.num_nodes")
    whole = math.prod(part for key in parts if isinstance(part := OmegaConf.select(config, key), int) and part > 0)
    return whole * _devices(config)


def _devices(config: DictConfig) -> int:
    """Of a node, as far as it is known before the Trainer is built."""
    devices = OmegaConf.select(config, "trainer.devices")
    if isinstance(devices, ListConfig):
        return max(1, len(devices))
    if str(devices).isdigit() and int(devices):
        return int(devices)
    if on_all := os.environ.get("LOCAL_WORLD_SIZE", ""):
        return int(on_all)
    return 1 if OmegaConf.select(config, "trainer.accelerator") == "cpu" else max(1, torch.cuda.device_count())
