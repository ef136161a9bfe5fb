"""The jobs of a sweep: what each was given, what came of it and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_rl.commands import run_files
from lit_rl.commands.redaction import redact
from lit_rl.commands.run_curves import of_set, sets_of
from lit_rl.commands.run_files import RunFiles
from lit_rl.commands.run_page import HIGHER, LOWER
from lit_rl.errors import ConfigError, StorageError

JOBS = "jobs.jsonl"
"""File in the sweep's folder with a line for each start and each end of a job. The last line of a job counts."""


@dataclass(frozen=True)
class Job:
    """One job of a sweep, as read from its files."""

    number: int
    given: dict[str, str]
    """Its overrides as they were typed, by key."""
    folder: Path
    code: int | None = None
    """Its exit code; None while it has not ended."""
    message: str = ""
    """The message of its error."""
    run: RunFiles | None = None
    """None where it has left no files of a run."""
    measure: str = ""
    """The metric by which it is judged; empty where it logged none of those."""
    last: float | None = None
    best: float | None = None

    @property
    def state(self) -> str:
        """The state in words: finished, stopped (and by which alarm) or failed, with the exit code where it is not 0;
        or not ended."""
        if self.code is None:
            return "not ended"
        said = self.run.summary.get("status") if self.run is not None and not self.run.error else None
        word = said if said in ("finished", "stopped") else ("failed" if self.code else "finished")
        if word == "stopped" and self.run is not None and (by := self.run.summary.get("stopped_by")):
            word += f" by {by}"
        return f"{word}, code {self.code}" if self.code else word

    @property
    def steps(self) -> int | None:
        """Optimizer steps."""
        return int(self.run.summary.get("steps") or self.run.last_step) if self.run is not None else None

    @property
    def seconds(self) -> Any:
        """Seconds of the run; None where it has not logged them."""
        return self.run.summary.get("seconds") if self.run is not None else None


@dataclass(frozen=True)
class Sweep:
    """The jobs of one folder."""

    folder: Path
    jobs: list[Job]
    """Jobs by number."""
    keys: list[str] = field(default_factory=list)
    """Keys that differ between jobs."""

    @property
    def heads(self) -> list[str]:
        """Column heads of the keys: their last words, or all of a key where two end alike."""
        ends = [key.rpartition(".")[2] for key in self.keys]
        return [end if ends.count(end) == 1 else key for end, key in zip(ends, self.keys)]

    @property
    def measures(self) -> list[str]:
        """The metrics that jobs are judged by, each once."""
        return list(dict.fromkeys(job.measure for job in self.jobs if job.measure))

    @property
    def winner(self) -> Job | None:
        """The job whose last value is the best one, where all are judged by the same metric and two have a value."""
        there = [job for job in self.jobs if job.last is not None]
        if len(self.measures) != 1 or len(there) < 2:
            return None
        return (min if is_lower(self.measures[0]) else max)(there, key=lambda job: job.last or 0.0)


def is_lower(measure: str) -> bool:
    """Tell whether lower is better."""
    return measure.rpartition("/")[2] in LOWER


def note(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a line about a job. A sweep continues where that cannot be written."""
    line = json.dumps(redact({**row, "overrides": [_hidden(each) for each in row["overrides"]]})) + "\n"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / JOBS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with os.fdopen(handle, "wb", buffering=0) as file:  # one write: jobs beside this one append too
            file.write(line.encode())


def read(folder: Path) -> Sweep:
    """Read every job that began there, with the contents of its files by now.

    Raises:
        ConfigError: none did.
        StorageError: the list of jobs is damaged.
    """
    rows: dict[int, dict[str, Any]] = {}
    try:
        for line in (folder / JOBS).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[int(row["job"])] = row
        jobs = [_job(folder, rows[number]) for number in sorted(rows)]
    except FileNotFoundError as error:
        raise ConfigError(f"run_dir={folder} holds no sweep: {JOBS} is not there.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / JOBS} is damaged, or cannot be read: {error}") from error
    names = dict.fromkeys(key for job in jobs for key in job.given)
    return Sweep(folder, jobs, [key for key in names if len({job.given.get(key) for job in jobs}) > 1])


def _job(sweep: Path, row: Mapping[str, Any]) -> Job:
    folder = Path(row["folder"])
    here = sweep / folder.name  # a sweep that was moved or copied has its jobs with it
    folder = here if here.is_dir() else folder
    given = {key.lstrip("+~"): value for key, _, value in (str(each).partition("=") for each in row["overrides"])}
    code, message = row.get("exit_code"), str(row.get("message", ""))
    if row.get("earlier_run") and code == ConfigError.exit_code:  # refused, as another run is there
        return Job(int(row["job"]), given, folder, code, message)
    try:
        run = run_files.read(folder)
    except ConfigError:
        return Job(int(row["job"]), given, folder, code, message)
    return Job(int(row["job"]), given, folder, code, message, run, *_measured(run))


def _measured(run: RunFiles) -> tuple[str, float | None, float | None]:
    """Return the metric that a run is judged by, its last value and its best: of a validation, else of the training."""
    for name in (*_of_validations(run), *(f"train/{leaf}" for leaf in (*HIGHER, *LOWER))):
        if (series := run.series.get(name)) is not None and len(series):
            values = series.first_of_each_step().values
            return name, values[-1], (min if is_lower(name) else max)(values)
    return "", None, None


def _of_validations(run: RunFiles) -> Iterator[str]:
    for leaf in (*HIGHER, *LOWER):
        for name in sets_of(run.series):
            yield of_set(leaf, name)


def _hidden(override: str) -> str:
    """Return an override without a secret that its key names."""
    key, between, value = override.partition("=")
    return f"{key}{between}{redact({key.rpartition('.')[2]: value})[key.rpartition('.')[2]]}"
