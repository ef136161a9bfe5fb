"""What the folder of a run holds, read as far as it goes: a run may be writing it, have failed, or have been killed."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_rl.callbacks.file_names import ALARMS
from lit_rl.callbacks.sample_files import SampleTable, tables_in
from lit_rl.commands import folder_state
from lit_rl.commands.run_names import RunNames
from lit_rl.errors import ConfigError


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
    rung: list[str]
    """Messages of alarms during training: `alarms.jsonl`."""
    unread: list[str]
    """A sentence for each file that could not be read."""

    @property
    def samples(self) -> list[SampleTable]:
        """The tables in `samples/`, by name."""
        return tables_in(self.path / "samples")

    @property
    def last_step(self) -> int:
        """The last step at which anything was logged; 0 where nothing was."""
        return int(max((series.steps[-1] for series in self.series.values() if len(series)), default=0))


def read(run_dir: Path) -> RunFiles:
    """Read everything but the samples.

    Raises:
        ConfigError: it is no folder, or neither config.yaml nor metrics.jsonl is there.
    """
    names = RunNames(run_dir)
    folder_state.check_is_folder(run_dir)
    if not (names.config.is_file() or names.metrics.is_file()):
        raise ConfigError(f"run_dir={run_dir} holds no run: neither config.yaml nor metrics.jsonl is there.")
    unread: list[str] = []
    text = _text(names.config, unread)
    return RunFiles(
        path=run_dir,
        config=_config(text, unread),
        config_text=text,
        series=_series(names.metrics, unread),
        summary=_object(names.summary, unread),
        error=_object(names.error, unread),
        rung=[
            str(row["message"]) for row in _rows(run_dir / ALARMS, unread) if isinstance(row, dict) and "message" in row
        ],
        unread=unread,
    )


def _is_there(path: Path, unread: list[str]) -> bool:
    """Tell whether there is a file. A device or a pipe is none: it may have no end."""
    if path.exists() and not path.is_file():
        unread.append(f"{path.name} is no file: not read.")
    return path.is_file()


def _text(path: Path, unread: list[str]) -> str:
    if not _is_there(path, unread):
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        unread.append(f"{path.name} could not be read: {error.strerror}.")
        return ""


def _config(text: str, unread: list[str]) -> dict[str, Any]:
    try:
        found = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        unread.append(f"config.yaml is damaged: {' '.join(str(error).split())}")
        return {}
    return found if isinstance(found, dict) else {}


def _object(path: Path, unread: list[str]) -> dict[str, Any]:
    text = _text(path, unread)
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        unread.append(f"{path.name} is damaged: {error}.")
        return {}
    return found if isinstance(found, dict) else {}


def _series(path: Path, unread: list[str]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    bad = 0
    for row in _rows(path, unread):
        step = row.get("step") if isinstance(row, dict) else None
        if step is None or not _is_number(step):
            bad += 1
            continue
        for name, value in row.items():
            if name != "step" and _is_number(value):
                series = found.setdefault(name, Series())
                series.steps.append(step)
                series.values.append(value)
    if bad:
        unread.append(f"{bad} line{'s' * (bad > 1)} of metrics.jsonl could not be read: left out.")
    return found


def _rows(path: Path, unread: list[str]) -> Iterator[Any]:
    """Yield every line parsed; None for one that is no JSON. Text after the last line end is still being written."""
    if not _is_there(path, unread):
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
