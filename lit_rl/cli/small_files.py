"""A step takes as many rows as a small file of yours has, where nobody said how many it takes."""

from __future__ import annotations

import math

from omegaconf import DictConfig, OmegaConf

from lit_rl.commands.first_row import rows_in

SIZES = ("prompts_per_rollout", "batch_size")
"""What a data module calls the rows of a step."""

_TASKS = ("fit", "plan", "data_check")
"""Tasks that make steps, or say whether a training could."""


def step_of(config: DictConfig, typed: set[str]) -> tuple[str, str]:
    """The override that makes a step fit `data.path`, and a line that says so; both empty where there is nothing to do.

    Rows are counted, not read: where filters leave fewer, the data module says so.

    Args:
        config: As it was composed.
        typed: Keys and groups of the command line.
    """
    size = next((name for name in SIZES if OmegaConf.select(config, f"data.{name}") is not None), None)
    if size is None or config.task not in _TASKS or {f"data.{size}", "experiment"} & typed:
        return "", ""
    data, unit = config.data, _unit(config)
    if not isinstance(data.path, str) or data.split is not None or data.map_row is not None:
        return "", ""
    rows = rows_in(data.path, 2 * data[size])
    if rows is None:
        return "", ""
    own = data.val_path is not None or data.val_split is not None or data.val_fraction == 0
    held = 0 if own else max(1, round(rows * data.val_fraction))
    fits = (rows - held) // unit * unit
    if fits < 1 or fits >= data[size]:
        return "", ""
    whole = f"{data.path} has {rows} rows" + (f", {held} of them held out for validation" if held else "")
    return f"data.{size}={fits}", f"data.{size}={fits} ({whole})"


def _unit(config: DictConfig) -> int:
    """What the rows of a step have to be a multiple of, as far as it is known before anything is built."""
    parts = ("algo.minibatches", "trainer.accumulate_grad_batches", "trainer.devices", "trainer.num_nodes")
    return math.prod(part for key in parts if isinstance(part := OmegaConf.select(config, key), int) and part > 0)
