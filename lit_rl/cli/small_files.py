"""A step takes as many rows as a small file of yours has, where nobody said how many it takes; a number of prompts that
was typed, and that the file cannot fill, is refused without torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from omegaconf import DictConfig, ListConfig, OmegaConf

from lit_rl.commands.first_row import rows_in
from lit_rl.data.small_sets import fitting
from lit_rl.errors import DataError

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
    if size is None or config.task not in _TASKS or {f"data.{size}", "experiment"} & typed or not _is_counted(data):
        return None
    rows = rows_in(data.path, 2 * data[size])
    if rows is None:
        return None
    held = _held(data, rows)
    fits = fitting(rows - held, data[size], _unit(config))
    if fits is None:
        return None
    return SmallStep(f"data.{size}", fits, f"data.{size}={fits} ({_whole(data, rows, held)})")


def check(config: DictConfig, typed: set[str]) -> None:
    """Refuse `data.prompts_per_rollout` of which `data.path` has fewer rows, whatever filters leave of them.

    Rows of a data set are not told here: packing and pairs make more or fewer of them.

    Args:
        config: As it was composed.
        typed: Keys and groups of the command line.

    Raises:
        DataError: says how many rows there are, and what to do.
    """
    data, key = config.data, "data.prompts_per_rollout"
    size = OmegaConf.select(config, key)
    if config.task not in ("fit", "plan") or not {"data.path", key} <= typed or not isinstance(size, int):
        return
    if not _is_counted(data):
        return
    least = min(1, _held(data, size))  # rows of equal prompts are held out together, so it may be fewer than the share
    rows = rows_in(data.path, size - 1 + least)
    if rows is None:
        return
    held = _held(data, rows)
    fixes = ["add rows"]
    if held:
        fixes.append("hold none out with data.val_fraction=0" + ("" if rows >= size else f" and lower {key} to {rows}"))
    if rows > held:
        fixes.append(f"lower {key} to {rows - held} or less")
    raise DataError(f"{key}={size}, and {_whole(data, rows, held)}. A{' or '.join(fixes)[1:]}.")


def _is_counted(data: DictConfig) -> bool:
    """Whether the lines of its file are its rows. Data modules of others may mean anything by these keys."""
    ours = str(OmegaConf.select(data, "_target_")).startswith("lit_rl.data.")
    return ours and isinstance(data.path, str) and data.split is None and data.map_row is None


def _held(data: DictConfig, rows: int) -> int:
    """How many rows are held out, where each has a prompt of its own."""
    own = data.val_path is not None or data.val_split is not None or data.val_fraction == 0
    return 0 if own else max(1, round(rows * data.val_fraction))


def _whole(data: DictConfig, rows: int, held: int) -> str:
    return f"{data.path} has {rows} rows" + (f", {held} of them held out for validation" if held else "")


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
    if OmegaConf.select(config, "trainer.accelerator") == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
