"""The folder of a run as its files tell it: the names in it, whether a run is there and has finished, and what it
logged.

Everything is read as far as it goes: a run may be writing it, have failed, or have been killed. Reading loads no
PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import warnings
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_rl.callbacks.output_files import ALARMS, SampleTable, list_tables
from lit_rl.core.errors import ConfigError, StorageError, nearest

REPORT_FILE = "report.html"
"""File name of the page that `lit-rl report` writes, and a run at each of its ends."""

_CONFIG_KEYS = {"algo", "data", "run_dir", "task", "trainer"}


@dataclass(frozen=True)
class RunPaths:
    """A run's folder, the paths in it, and what its small files say of the run."""

    path: Path

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def error(self) -> Path:
        return self.path / "error.json"

    @property
    def page(self) -> Path:
        return self.path / REPORT_FILE

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def read_config(self) -> dict[str, Any]:
        """Return config.yaml as a mapping; empty where it cannot be read."""
        try:
            config = yaml.safe_load(self.config.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return config if isinstance(config, dict) else {}

    def read_summary(self) -> dict[str, Any]:
        """Return the summary; empty where there is none. Nothing depends on a damaged one: it is written anew, with a
        warning."""
        if not self.summary.is_file():
            return {}
        try:
            summary = json.loads(self.summary.read_text())
            if isinstance(summary, dict):
                return summary
            what = f"a {type(summary).__name__}"
        except ValueError as error:
            what = f"not JSON: {error}"
        warnings.warn(
            f"{self.summary} is damaged ({what}). What it said is lost, and it is written anew.", stacklevel=2
        )
        return {}

    @property
    def holds_a_run(self) -> bool:
        """True if a run wrote config.yaml, which is there before anything else of the run is."""
        return is_run_config(self.read_config())

    @property
    def finished(self) -> bool:
        """True if a run here has finished. (A summary without a run is the user's, and is not read.)"""
        ours = self.holds_a_run or any(self.checkpoints.glob("*.ckpt"))
        return ours and self.read_summary().get("status") == "finished"


def is_run_config(config: Mapping[str, Any]) -> bool:
    """Tell whether a run wrote this config; another program's config.yaml has other keys."""
    return config.keys() >= _CONFIG_KEYS


# ---------------------------------------------------------------------- refusals of folders


def check_not_a_file(folder: Path) -> None:
    """Refuse a file in a folder's place.

    Raises:
        StorageError: names it.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"run_dir={folder} is a file; it must be a folder, or a name that is free.")


def check_is_folder(folder: Path) -> None:
    """Refuse a path that is no folder, where a run has to be.

    Raises:
        ConfigError: names it, and the nearest run that stands beside it.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"run_dir={folder} is no folder: give the folder of a run, such as runs/...{nearest_run_hint(folder)}"
        )


def check_has_config(folder: Path) -> None:
    """Refuse a folder without config.yaml, where a run's settings are read.

    Raises:
        ConfigError: names it, and the nearest run that stands beside it.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"run_dir={folder} holds no config.yaml: give the folder of a run.{nearest_run_hint(folder)}")


def check_has_checkpoint(folder: Path) -> None:
    """Refuse a folder without any checkpoint, where the newest one is asked for.

    Raises:
        StorageError: names the folder that is empty, and the nearest run that stands beside it.
    """
    if not any((folder / "checkpoints").glob("*.ckpt")):
        raise no_checkpoint_error(folder)


def no_checkpoint_error(folder: Path) -> StorageError:
    """Return the error of a command that reads the newest checkpoint of a run, where there is no whole one."""
    return StorageError(
        f"ckpt_path=last: there is no whole checkpoint in {folder / 'checkpoints'}. Set run_dir to the run that is "
        f"meant, or ckpt_path to a file.{nearest_run_hint(folder)}"
    )


def nearest_run_hint(folder: Path) -> str:
    """Return ``" Did you mean 'runs/x'?"`` for a run in the same folder; empty where none is near, or this is a run
    itself."""
    runs = {file.parent.name for file in folder.parent.glob("*/config.yaml")}
    near = None if folder.name in runs else nearest(folder.name, runs)
    return "" if near is None else f" Did you mean {str(folder.with_name(near))!r}?"


def folder_taken_error(folder: Path, state: str) -> ConfigError:
    """Return the error about a folder that holds another run.

    Args:
        folder: The folder as the user typed it.
        state: Its contents, such as "a finished run".
    """
    return ConfigError(f"run_dir={folder} holds {state}. Continue it with ckpt_path=last, or take another run_dir.")


# ---------------------------------------------------------------------- the version that made a run


_VERSION_LINE = "# lit_rl=="
"""First characters of config.yaml, as Lightning's begins with its own."""


def installed_version(package: str = "lit-rl") -> str:
    """Return the version of lit_rl, or of another package; empty where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def with_version_line(config: str) -> str:
    """Return the text of config.yaml under a line with the version of lit_rl that writes it."""
    return f"{_VERSION_LINE}{installed_version()}\n{config}" if installed_version() else config


def version_of_run(folder: Path) -> str:
    """Return the version of lit_rl that wrote config.yaml; empty where the file does not name one."""
    with contextlib.suppress(OSError, ValueError), (folder / "config.yaml").open(encoding="utf-8") as file:
        first = file.readline(200)
        return first.removeprefix(_VERSION_LINE).strip() if first.startswith(_VERSION_LINE) else ""
    return ""


@contextlib.contextmanager
def note_other_version(folder: Path) -> Iterator[None]:
    """Add a note to errors about settings or a checkpoint of a run that another version of lit_rl made."""
    made_by, installed = version_of_run(folder), installed_version()
    try:
        yield
    except (ConfigError, StorageError) as error:
        if made_by and installed and made_by != installed:
            error.add_note(
                f"The run in {folder} was made by lit_rl {made_by}, and this is {installed}: what one of the two "
                f"knows, the other may not. lit_rl {made_by} reads it."
            )
        raise


# ---------------------------------------------------------------------- everything that a run logged


@dataclass(frozen=True)
class Series:
    """The numbers of one metric in the order in which they were written, without missing values."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    """Optimizer steps."""
    values: array[float] = field(default_factory=lambda: array("d"))
    """Finite."""

    def __len__(self) -> int:
        return len(self.steps)

    def first_of_each_step(self) -> Series:
        """Return one value a step: the last step is validated by `fit` and after it."""
        found = {step: value for step, value in zip(reversed(self.steps), reversed(self.values))}
        steps = sorted(found)
        return Series(array("d", steps), array("d", (found[step] for step in steps)))


@dataclass(frozen=True)
class RunFiles:
    """A run as read from its files."""

    path: Path
    config: dict[str, Any]
    """`config.yaml`, from which the run has left out secrets."""
    config_text: str
    series: dict[str, Series]
    """Series by the names of `metrics.jsonl`, in the order in which they appear there."""
    summary: dict[str, Any]
    error: dict[str, Any]
    """`error.json`; empty where nothing ended the run."""
    alarms: list[str]
    """Messages of alarms during training: `alarms.jsonl`."""
    unread: list[str]
    """A sentence for each file that could not be read."""

    @property
    def samples(self) -> list[SampleTable]:
        """The tables in `samples/`, by name."""
        return list_tables(self.path / "samples")

    @property
    def last_step(self) -> int:
        """The last step at which anything was logged; 0 where nothing was."""
        return int(max((series.steps[-1] for series in self.series.values() if len(series)), default=0))


def read_run_files(run_dir: Path) -> RunFiles:
    """Read everything but the samples.

    Raises:
        ConfigError: it is no folder, or neither config.yaml nor metrics.jsonl is there.
    """
    names = RunPaths(run_dir)
    check_is_folder(run_dir)
    if not (names.config.is_file() or names.metrics.is_file()):
        raise ConfigError(f"run_dir={run_dir} holds no run: neither config.yaml nor metrics.jsonl is there.")
    unread: list[str] = []
    text, config = _read_text(names.config, unread), None
    try:
        config = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        unread.append(f"config.yaml is damaged: {' '.join(str(error).split())}")
    series, bad = dict[str, Series](), 0
    for row in _read_rows(names.metrics, unread):
        step = row.get("step") if isinstance(row, dict) else None
        if step is None or not _is_number(step):
            bad += 1
            continue
        for name, value in row.items():
            if name != "step" and _is_number(value):
                numbers = series.setdefault(name, Series())
                numbers.steps.append(step)
                numbers.values.append(value)
    if bad:
        unread.append(f"{bad} line{'s' * (bad > 1)} of metrics.jsonl could not be read: left out.")
    return RunFiles(
        path=run_dir,
        config=config if isinstance(config, dict) else {},
        config_text=text,
        series=series,
        summary=_read_object(names.summary, unread),
        error=_read_object(names.error, unread),
        alarms=[
            str(row["message"])
            for row in _read_rows(run_dir / ALARMS, unread)
            if isinstance(row, dict) and "message" in row
        ],
        unread=unread,
    )


def _is_file(path: Path, unread: list[str]) -> bool:
    """Tell whether there is a file. A device or a pipe is none: it may have no end."""
    if path.exists() and not path.is_file():
        unread.append(f"{path.name} is no file: not read.")
    return path.is_file()


def _read_text(path: Path, unread: list[str]) -> str:
    if not _is_file(path, unread):
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        unread.append(f"{path.name} could not be read: {error.strerror}.")
        return ""


def _read_object(path: Path, unread: list[str]) -> dict[str, Any]:
    text = _read_text(path, unread)
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        unread.append(f"{path.name} is damaged: {error}.")
        return {}
    return found if isinstance(found, dict) else {}


def _read_rows(path: Path, unread: list[str]) -> Iterator[Any]:
    """Yield every line parsed; None for one that is no JSON. Text after the last line end is still being written."""
    if not _is_file(path, unread):
        return
    try:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    unread.append(f"The last line of {path.name} is not whole: left out.")
                    return
                try:
                    yield json.loads(line)
                except ValueError:
                    yield None
    except OSError as error:
        unread.append(f"{path.name} could not be read: {error.strerror}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
