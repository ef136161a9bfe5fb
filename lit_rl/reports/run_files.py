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
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lit_rl.callbacks.output_files import ALARMS, SampleTable, list_tables
from lit_rl.core.errors import ConfigError, StorageError, nearest

REPORT_FILE = "report.html"
"""File name of the page that `lit-rl report` writes, and a run at each of its ends."""

_CONFIG_KEYS = {"algo", "data", "run_dir", "task", "trainer"}
"""Keys of a config that a run wrote; another program's config.yaml has other ones."""


@dataclass(frozen=True)
class RunPaths:
    """The paths in a run's folder."""

    path: Path

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def error_file(self) -> Path:
        return self.path / "error.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def page(self) -> Path:
        return self.path / REPORT_FILE

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_folder(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"


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
class RunFiles(RunPaths):
    """The contents of a run's files. Each is read when it is first asked for, and then kept."""

    _unread: dict[Path, list[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, run_dir: Path) -> RunFiles:
        """Return those of a folder in which a run is.

        Raises:
            ConfigError: it is no folder, or neither config.yaml nor metrics.jsonl is there.
        """
        run = cls(run_dir)
        check_is_folder(run_dir)
        if not (run.config_file.is_file() or run.metrics.is_file()):
            raise ConfigError(f"run_dir={run_dir} holds no run: neither config.yaml nor metrics.jsonl is there.")
        return run

    @cached_property
    def config_text(self) -> str:
        """`config.yaml`, from which the run has left out secrets."""
        return self._text(self.config_file)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The same as a mapping; empty where it is none."""
        try:
            config = yaml.load(self.config_text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (ValueError, yaml.YAMLError) as error:  # ValueError: a date that is none
            self._note(self.config_file, f"config.yaml is damaged: {' '.join(str(error).split())}")
            return {}
        return config if isinstance(config, dict) else {}

    def settings(self) -> dict[str, Any]:
        """Return the config of a run whose settings are used again.

        Raises:
            ConfigError: there is none, or it is another program's.
            StorageError: it is damaged, or cannot be read.
        """
        check_has_config(self.path)
        if not self.config and (why := self.unread_of(self.config_file)):
            raise StorageError(f"The settings of {self.path} cannot be read: {why[0]}")
        try:
            self.config_file.read_text(encoding="utf-8")  # a page shows what can be read; here half a path is another
        except UnicodeDecodeError as error:
            raise StorageError(
                f"The settings of {self.path} cannot be read: config.yaml is damaged, it is not UTF-8."
            ) from error
        groups = ("algo", "sampling", "trainer")
        if not all(isinstance(self.config.get(name), dict) for name in groups):
            raise ConfigError(
                f"{self.config_file} is not the config of a run: it lacks the settings of {', '.join(groups)}."
            )
        return self.config

    @cached_property
    def series(self) -> dict[str, Series]:
        """Series by the names of `metrics.jsonl`, in the order in which they appear there."""
        series, bad = dict[str, Series](), 0
        for row in self._rows(self.metrics):
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
            self._note(self.metrics, f"{bad} line{'s' * (bad > 1)} of metrics.jsonl could not be read: left out.")
        return series

    @cached_property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty where there is none."""
        return self._object(self.summary_file)

    @cached_property
    def error(self) -> dict[str, Any]:
        """`error.json`; empty where nothing ended the run."""
        return self._object(self.error_file)

    @cached_property
    def alarms(self) -> list[str]:
        """Messages of alarms during training: `alarms.jsonl`."""
        rows = self._rows(self.path / ALARMS)
        return [str(row["message"]) for row in rows if isinstance(row, dict) and "message" in row]

    @property
    def unread(self) -> list[str]:
        """A sentence for each file that could not be read."""
        _ = self.config, self.series, self.summary, self.error, self.alarms  # read: each notes what it could not
        files = (self.config_file, self.metrics, self.summary_file, self.error_file, self.path / ALARMS)
        return [sentence for path in files for sentence in self.unread_of(path)]

    def unread_of(self, path: Path) -> Sequence[str]:
        """Return the sentences about one file, where it has been read."""
        return self._unread.get(path, ())

    @property
    def samples(self) -> list[SampleTable]:
        """The tables in `samples/`, by name."""
        return list_tables(self.samples_folder)

    @property
    def last_step(self) -> int:
        """The last step at which anything was logged; 0 where nothing was."""
        return int(max((series.steps[-1] for series in self.series.values() if len(series)), default=0))

    @property
    def holds_a_run(self) -> bool:
        """True if a run wrote config.yaml, which is there before anything else of the run is."""
        return self.config.keys() >= _CONFIG_KEYS

    @property
    def finished(self) -> bool:
        """True if a run here has finished. (A summary without a run is the user's, and is not read.)"""
        ours = self.holds_a_run or any(self.checkpoints.glob("*.ckpt"))
        return ours and self.summary.get("status") == "finished"

    # What reads the files. Each notes what it could not read.

    def _note(self, path: Path, sentence: str) -> None:
        self._unread.setdefault(path, []).append(sentence)

    def _is_file(self, path: Path) -> bool:
        """Tell whether there is a file. A device or a pipe is none: it may have no end."""
        if path.exists() and not path.is_file():
            self._note(path, f"{path.name} is no file: not read.")
        return path.is_file()

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8", errors="replace") if self._is_file(path) else ""
        except OSError as error:
            self._note(path, f"{path.name} could not be read: {error.strerror}.")
            return ""

    def _object(self, path: Path) -> dict[str, Any]:
        text = self._text(path)
        try:
            found = json.loads(text) if text else {}
        except ValueError as error:
            self._note(path, f"{path.name} is damaged: {error}.")
            return {}
        if not isinstance(found, dict):
            self._note(path, f"{path.name} is damaged: it holds a {type(found).__name__}.")
            return {}
        return found

    def _rows(self, path: Path) -> Iterator[Any]:
        """Yield every line parsed; None for one that is no JSON. Text after the last line end is still being
        written."""
        if not self._is_file(path):
            return
        try:
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        self._note(path, f"The last line of {path.name} is not whole: left out.")
                        return
                    try:
                        yield json.loads(line)
                    except ValueError:
                        yield None
        except OSError as error:
            self._note(path, f"{path.name} could not be read: {error.strerror}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
