"""Tables of samples in the loggers of a run: every row and column of a rollout or a validation, under one key.

Cells are whole, except in TensorBoard, which shows a table as one text.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger

from lit_rl.callbacks.pictures import Pictures
from lit_rl.callbacks.text import markdown_table, printable
from lit_rl.callbacks.unwritten import Unwritten
from lit_rl.episodes import TOKENS
from lit_rl.videos import visuals_in

Row = dict[str, Any]

TENSORBOARD_CELL = 4000
"""Most characters of a cell in TensorBoard. The middle of a longer one is left out: tests of code have megabytes."""


def log_tables(
    trainer: L.Trainer,
    key: str,
    table: Mapping[str, Sequence[Any]],
    step: int,
    pictured: Sequence[Row],
    unwritten: Unwritten,
) -> None:
    """Give the table to every logger that takes one; a failure of one does not affect the others.

    Args:
        trainer: The Trainer.
        key: The table's name, in every logger: letters, digits, `_`, `-` and `.`.
        table: A table of samples, by column.
        step: Optimizer steps.
        pictured: Rows whose images TensorBoard shows beside the text.
        unwritten: Recorder of failures.
    """
    if not table["prompt"]:
        return
    rows = cache(partial(rows_of, table))  # computed once for each cell length
    for logger in trainer.loggers:
        with unwritten.spared(f"the table {key!r} for {type(logger).__name__}"):
            _log(logger, key, rows, step, pictured)


def _log(logger: Any, key: str, made: Callable[..., list[Row]], step: int, pictured: Sequence[Row]) -> None:
    takes_tables = isinstance(logger, MLFlowLogger | WandbLogger | CSVLogger) or hasattr(logger, "log_table")
    if not takes_tables:
        if hasattr(experiment := getattr(logger, "experiment", None), "add_text"):
            _to_tensorboard(experiment, key, made(TENSORBOARD_CELL), step, pictured)
        return
    rows = made()
    columns = list(rows[0])
    if isinstance(logger, MLFlowLogger):
        data = {name: [_plain(row[name]) for row in rows] for name in columns}
        logger.experiment.log_table(logger.run_id, data, f"{key}/step_{step:08d}.json")
    elif isinstance(logger, WandbLogger):
        logger.log_table(key=key, columns=columns, data=list(_for_wandb(rows)), step=step)
    elif isinstance(logger, CSVLogger):
        _to_csv(Path(logger.log_dir), key, [[_plain(row[name]) for name in columns] for row in rows], columns)
    else:
        data = [[_plain(row[name]) for name in columns] for row in rows]
        logger.log_table(key=key, columns=columns, data=data, step=step)


# ---------------------------------------------------------------------- rows


def rows_of(table: Mapping[str, Sequence[Any]], longest: int = sys.maxsize) -> list[Row]:
    """Return the rows of a table of samples. Numbers stay numbers, all else is text with escaped control characters.

    A text of more than `longest` characters is cut in the middle. Images of a row are one column, `image`, after the
    prompt. The tokens of episodes are in `samples/` only.
    """
    pictures = [Pictures.of(table, i) for i in range(len(table["prompt"]))]
    columns: dict[str, list[Any]] = {}
    for name, values in table.items():
        if name.startswith(TOKENS) or (name in ("image", "images", "video", "videos") and _shows(values)):
            continue
        columns[name] = _column(values, longest)
        if name == "prompt" and any(each.refs for each in pictures):
            columns["image"] = list(pictures)
    return [{name: values[i] for name, values in columns.items()} for i in range(len(pictures))]


def _shows(values: Sequence[Any]) -> bool:
    return any(visuals_in(value) for value in values)


def _column(values: Sequence[Any], longest: int) -> list[Any]:
    if all(value is None or isinstance(value, bool | int | float) for value in values):
        return list(values)
    return [None if value is None else _text(value, longest) for value in values]


def _text(value: Any, longest: int) -> str:
    if found := visuals_in(value):
        return str(Pictures(tuple(found)))
    messages = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
    whole = value if messages or isinstance(value, str) else str(value)
    return printable(whole, longest)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Pictures) else value


# ---------------------------------------------------------------------- loggers


def _for_wandb(rows: Sequence[Row]) -> Iterator[list[Any]]:
    """Yield rows with thumbnails, one picture for all rows that show the same."""
    import wandb  # pyright: ignore[reportMissingImports]

    wandb.Table.MAX_ROWS = max(wandb.Table.MAX_ROWS, len(rows))  # rows beyond it are dropped
    drawn: dict[Pictures, Any] = {}
    for row in rows:
        for value in row.values():
            if isinstance(value, Pictures) and value not in drawn:
                strip = value.strip()
                drawn[value] = None if strip is None else wandb.Image(strip, caption=printable(str(value)))
        yield [drawn[value] if isinstance(value, Pictures) else value for value in row.values()]


def _to_tensorboard(experiment: Any, key: str, rows: Sequence[Row], step: int, pictured: Sequence[Row]) -> None:
    """Log the table as text, and the images of some rows beside it as `samples/image_1`, and so on."""
    experiment.add_text(key, markdown_table(rows, sys.maxsize), global_step=step)
    for number, row in enumerate(pictured, 1):
        strip = row["image"].strip() if "image" in row else None
        if strip is not None:
            experiment.add_image(f"{key}/image_{number}", np.array(strip), global_step=step, dataformats="HWC")


def _to_csv(folder: Path, key: str, rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> None:
    """Append to `key.csv`; where that has other columns, to `key_2.csv`, and so on: written rows are unchanged."""
    number, path = 1, folder / f"{key}.csv"
    while path.exists() and _header(path) != list(columns):
        number += 1
        path = folder / f"{key}_{number}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(columns)
        writer.writerows(rows)


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])
