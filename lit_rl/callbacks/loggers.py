"""Loggers: JSON Lines, Trackio, tables of samples in any logger; and failures to write, which end no run.

A logger or a callback that cannot write is warned of once when it begins to fail, and once at the end of the run
(`WriteFailures`). Cells of tables are whole, except in TensorBoard, which shows a table as one text.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_rl.callbacks.display import Pictures, markdown_table, printable
from lit_rl.core.episode import TOKENS
from lit_rl.core.errors import ConfigError
from lit_rl.core.visuals import visuals_in

# ---------------------------------------------------------------------- failures to write


PATIENCE = 30.0
"""Seconds of training that the failed calls of one logger may cost before it is left out."""


class WriteFailures:
    """The failures of one writer.

    Args:
        name: Name of the writer, for the warning.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures, self.seconds = 0, 0.0
        self.error = ""
        """The newest error, in a line."""

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """Suppress and record an exception of the block, with a warning the first time.

        Args:
            what: The activity, such as `log_metrics`.
        """
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.note(what, error, time.monotonic() - began)

    def note(self, what: str, error: Exception, seconds: float = 0.0) -> None:
        """Record a failure and the seconds it took."""
        self.failures += 1
        self.seconds += seconds
        self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if self.failures == 1:
            warnings.warn(
                f"{self.name} failed in {what}: {self.error}. Training goes on, and further calls are tried; failures "
                "are counted at the end.",
                stacklevel=2,
            )

    @property
    def left_out(self) -> bool:
        """True where its failures have cost so much time that it is no longer called."""
        return self.seconds > PATIENCE

    def __str__(self) -> str:
        often = "1 call" if self.failures == 1 else f"{self.failures} calls"
        return f"{self.name}, {often} failed{', then left out' if self.left_out else ''} ({self.error})"


def let_loggers_fail(trainer: L.Trainer) -> L.Trainer:
    """Return the same Trainer, whose loggers may raise in any call: training goes on to the same bits.

    A failed call is dropped, and the next one is tried; a logger whose failed calls took more than `PATIENCE` seconds
    in sum, such as one that waits for a network, is left out. Errors of its constructor are still raised.
    """
    guarded: list[Any] = [
        logger
        if type(logger) is _FaultTolerantLogger
        else _FaultTolerantLogger(logger, WriteFailures(type(logger).__name__))
        for logger in trainer.loggers
    ]
    trainer.loggers = guarded
    return trainer


def not_written(trainer: L.Trainer) -> list[WriteFailures]:
    """Return the failures of the loggers and callbacks of a Trainer, where there are any."""
    writers: list[Any] = [*trainer.loggers, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    found = [writer.unwritten for writer in writers if isinstance(getattr(writer, "unwritten", None), WriteFailures)]
    return [unwritten for unwritten in found if unwritten.failures]


class _FaultTolerantLogger:
    """A wrapper of a logger or its experiment whose calls and attributes do not raise. `isinstance` sees its class."""

    __slots__ = ("_inner", "unwritten")

    def __init__(self, inner: Any, unwritten: WriteFailures) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "unwritten", unwritten)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:  # spawning strategies pickle the Trainer
        return _FaultTolerantLogger, (self._inner, self.unwritten)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__slots__:  # these are missing before `__init__`, as in a copy
            raise AttributeError(name)
        inner = _NoOpLogger() if self.unwritten.left_out else self._inner
        try:
            found = getattr(inner, name)
        except AttributeError:
            raise  # it has none, and `hasattr` depends on it
        except Exception as error:
            self.unwritten.note(name, error)
            found = getattr(_NoOpLogger(), name)
        if name == "experiment":
            return _FaultTolerantLogger(found, self.unwritten)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*args: Any, **keywords: Any) -> Any:
            with self.unwritten.spared(name):
                return found(*args, **keywords)

        return call


class _NoOpLogger:
    """A no-op stand-in for a logger that cannot be used."""

    name = version = save_dir = log_dir = root_dir = None
    experiment = property(lambda self: self)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **keywords: None


# ---------------------------------------------------------------------- JSON Lines


class JsonlLogger(Logger):
    """A logger of metrics as JSON lines `{"step": ..., name: value, ...}`.

    Lines that cannot be written wait in memory for the next call; the file never ends within a line.

    Args:
        path: The file to append to, which a resumed run continues. None, for `lit-rl fit` only: `metrics.jsonl` in the
            folder of the Trainer's first logger.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__()
        self.path = None if path is None else Path(path)
        self._waiting: list[str] = []

    @property
    def name(self) -> str:
        return "jsonl"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **{name: _json_number(value) for name, value in metrics.items()}}
        self._waiting.append(json.dumps(row) + "\n")
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Append the waiting lines.

        Raises:
            OSError: the file cannot be written. It is unchanged.
            ConfigError: there is no path.
        """
        if not self._waiting:
            return
        if self.path is None:
            raise ConfigError("JsonlLogger(path=None) is for lit-rl fit: give the file, such as runs/x/metrics.jsonl.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("".join(self._waiting))
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, before)
            raise
        self._waiting.clear()

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""


def _json_number(value: Any) -> float | int | None:
    """Return a number for JSON, with null for NaN and infinity."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if isinstance(value, int) else number


# ---------------------------------------------------------------------- Trackio


class TrackioLogger(Logger):
    """A logger of metrics and samples to Trackio's database, `trackio/` in the Hugging Face cache or `TRACKIO_DIR`.

    `trackio show` opens the dashboard. Nothing leaves the machine unless a Space is named.

    Args:
        project: Project of the dashboard.
        run: The run's name there; null takes a generated one. An existing run is continued.
        space_id: A Space of the hub that receives the logs, such as user/name; null keeps them local.

    Raises:
        ModuleNotFoundError: Trackio is not installed.
    """

    def __init__(self, project: str = "lit_rl", run: str | None = None, space_id: str | None = None) -> None:
        super().__init__()
        import trackio  # pyright: ignore[reportMissingImports]  # noqa: F401  # if missing, fail at the start

        self.project, self.run, self.space_id = project, run, space_id
        self._experiment: Any = None

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str | None:
        return self.run

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Trackio, started by the first access."""
        if self._experiment is None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._experiment = trackio.init(
                self.project, name=self.run, space_id=self.space_id, resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip
            self.run = self._experiment.name  # logs after `end` continue it
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int) -> None:
        """Log rows as one table."""
        import trackio  # pyright: ignore[reportMissingImports]

        self.experiment.log({key: trackio.Table(columns=list(columns), data=list(data))}, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""

    def finalize(self, status: str) -> None:
        """Do nothing: Lightning calls it several times in a run, with each validation."""

    def end(self) -> None:
        """Write pending logs, and end Trackio's run, which a later call resumes; else it ends with the process."""
        if self._experiment is not None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._experiment = None
            trackio.finish()


# ---------------------------------------------------------------------- tables of samples


Row = dict[str, Any]

TENSORBOARD_CELL = 4000
"""Most characters of a cell in TensorBoard. The middle of a longer one is left out: tests of code have megabytes."""


def log_tables(
    trainer: L.Trainer,
    key: str,
    table: Mapping[str, Sequence[Any]],
    step: int,
    pictured: Sequence[Row],
    unwritten: WriteFailures,
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
    rows = cache(partial(table_rows, table))  # computed once for each cell length
    for logger in trainer.loggers:
        with unwritten.spared(f"the table {key!r} for {type(logger).__name__}"):
            _log_table(logger, key, rows, step, pictured)


def _log_table(logger: Any, key: str, rows_of: Callable[..., list[Row]], step: int, pictured: Sequence[Row]) -> None:
    takes_tables = isinstance(logger, MLFlowLogger | WandbLogger | CSVLogger) or hasattr(logger, "log_table")
    if not takes_tables:  # text with some images beside it, `samples/image_1` and so on
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "add_text"):
            experiment.add_text(key, markdown_table(rows_of(TENSORBOARD_CELL), sys.maxsize), global_step=step)
            strips = (row["image"].strip() if "image" in row else None for row in pictured)
            for number, strip in enumerate(strips, 1):
                if strip is not None:
                    experiment.add_image(f"{key}/image_{number}", np.array(strip), global_step=step, dataformats="HWC")
        return
    rows = rows_of()
    columns = list(rows[0])
    if isinstance(logger, MLFlowLogger):
        data = {name: [_plain_cell(row[name]) for row in rows] for name in columns}
        logger.experiment.log_table(logger.run_id, data, f"{key}/step_{step:08d}.json")
    elif isinstance(logger, WandbLogger):
        logger.log_table(key=key, columns=columns, data=list(_for_wandb(rows)), step=step)
    elif isinstance(logger, CSVLogger):
        _to_csv(Path(logger.log_dir), key, [[_plain_cell(row[name]) for name in columns] for row in rows], columns)
    else:
        data = [[_plain_cell(row[name]) for name in columns] for row in rows]
        logger.log_table(key=key, columns=columns, data=data, step=step)


# ---------------------------------------------------------------------- rows of tables


def table_rows(table: Mapping[str, Sequence[Any]], longest: int = sys.maxsize) -> list[Row]:
    """Return the rows of a table of samples. Numbers stay numbers, all else is text with escaped control characters.

    A text of more than `longest` characters is cut in the middle. Images of a row are one column, `image`, after the
    prompt. The tokens of episodes are in `samples/` only.
    """
    pictures = [Pictures.of(table, i) for i in range(len(table["prompt"]))]
    columns: dict[str, list[Any]] = {}
    for name, values in table.items():
        shows = name in ("image", "images", "video", "videos") and any(visuals_in(value) for value in values)
        if name.startswith(TOKENS) or shows:
            continue
        columns[name] = _column(values, longest)
        if name == "prompt" and any(each.refs for each in pictures):
            columns["image"] = list(pictures)
    return [{name: values[i] for name, values in columns.items()} for i in range(len(pictures))]


def _column(values: Sequence[Any], longest: int) -> list[Any]:
    if all(value is None or isinstance(value, bool | int | float) for value in values):
        return list(values)
    column: list[Any] = []
    for value in values:
        if value is None:
            column.append(None)
        elif found := visuals_in(value):
            column.append(str(Pictures(tuple(found))))
        else:
            messages = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
            column.append(printable(value if messages or isinstance(value, str) else str(value), longest))
    return column


def _plain_cell(value: Any) -> Any:
    return str(value) if isinstance(value, Pictures) else value


# ---------------------------------------------------------------------- tables in each logger


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


def _to_csv(folder: Path, key: str, rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> None:
    """Append to `key.csv`; where that has other columns, to `key_2.csv`, and so on: written rows are unchanged."""
    path = folder / f"{key}.csv"
    for number in itertools.count(2):
        if not path.exists():
            break
        with path.open(newline="", encoding="utf-8") as file:
            if next(csv.reader(file), []) == list(columns):
                break
        path = folder / f"{key}_{number}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(columns)
        writer.writerows(rows)
