"""The jobs of a sweep: settings, results and ends of each, as a table on the console, Markdown, CSV and a page."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from lit_rl.callbacks.display import escape_control, escape_markdown, markdown_code, ruled_table
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.reports.charts import COLOURS, ChartLine, Drawing, chart, dots, number
from lit_rl.reports.html_page import page, write_atomically
from lit_rl.reports.metric_groups import chart_groups, drawn_groups, metric_of_set, validation_sets
from lit_rl.reports.run_files import RunFiles
from lit_rl.reports.run_findings import RunFinding
from lit_rl.reports.run_page import HIGHER_IS_BETTER, LOWER_IS_BETTER, duration
from lit_rl.reports.secrets import redact

# ---------------------------------------------------------------------- jobs, as their files tell them


JOBS_FILE = "jobs.jsonl"
"""File in the sweep's folder with a line for each start and each end of a job. The last line of a job counts."""


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep, as read from its files."""

    number: int
    overrides: dict[str, str]
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
        status = self.run.summary.get("status") if self.run is not None and not self.run.error else None
        word = status if status in ("finished", "stopped") else ("failed" if self.code else "finished")
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
    jobs: list[SweepJob]
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
    def winner(self) -> SweepJob | None:
        """The job whose last value is the best one, where all are judged by the same metric and two have a value."""
        jobs = [job for job in self.jobs if job.last is not None]
        if len(self.measures) != 1 or len(jobs) < 2:
            return None
        return (min if lower_is_better(self.measures[0]) else max)(jobs, key=lambda job: job.last or 0.0)


def lower_is_better(measure: str) -> bool:
    """Tell whether lower is better."""
    return measure.rpartition("/")[2] in LOWER_IS_BETTER


def note_job(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a line about a job. A sweep continues where that cannot be written."""
    overrides = []
    for override in row["overrides"]:
        key, equals, value = override.partition("=")
        name = key.rpartition(".")[2]
        overrides.append(f"{key}{equals}{redact({name: value})[name]}")  # without a secret that its key names
    line = json.dumps(redact({**row, "overrides": overrides})) + "\n"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / JOBS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with os.fdopen(handle, "wb", buffering=0) as file:  # one write: jobs beside this one append too
            file.write(line.encode())


def read_sweep(folder: Path) -> Sweep:
    """Read every job that began there, with the contents of its files by now.

    Raises:
        ConfigError: none did.
        StorageError: the list of jobs is damaged.
    """
    rows: dict[int, dict[str, Any]] = {}
    try:
        for line in (folder / JOBS_FILE).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows[int(row["job"])] = row
        jobs = [_read_job(folder, rows[number]) for number in sorted(rows)]
    except FileNotFoundError as error:
        raise ConfigError(f"run_dir={folder} holds no sweep: {JOBS_FILE} is not there.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{folder / JOBS_FILE} is damaged, or cannot be read: {error}") from error
    names = dict.fromkeys(key for job in jobs for key in job.overrides)
    return Sweep(folder, jobs, [key for key in names if len({job.overrides.get(key) for job in jobs}) > 1])


def _read_job(sweep: Path, row: Mapping[str, Any]) -> SweepJob:
    folder = Path(row["folder"])
    here = sweep / folder.name  # a sweep that was moved or copied has its jobs with it
    folder = here if here.is_dir() else folder
    overrides = {key.lstrip("+~"): value for key, _, value in (str(each).partition("=") for each in row["overrides"])}
    code, message = row.get("exit_code"), str(row.get("message", ""))
    if row.get("earlier_run") and code == ConfigError.exit_code:  # refused, as another run is there
        return SweepJob(int(row["job"]), overrides, folder, code, message)
    try:
        run = RunFiles.of(folder)
    except ConfigError:
        return SweepJob(int(row["job"]), overrides, folder, code, message)
    return SweepJob(int(row["job"]), overrides, folder, code, message, run, *_measure_of(run))


def _measure_of(run: RunFiles) -> tuple[str, float | None, float | None]:
    """Return the metric that a run is judged by, its last value and its best: of a validation, else of the training."""
    leaves = (*HIGHER_IS_BETTER, *LOWER_IS_BETTER)
    validations = (metric_of_set(leaf, name) for leaf in leaves for name in validation_sets(run.series))
    for name in (*validations, *(f"train/{leaf}" for leaf in leaves)):
        if (series := run.series.get(name)) is not None and len(series):
            values = series.first_of_each_step().values
            return name, values[-1], (min if lower_is_better(name) else max)(values)
    return "", None, None


# ---------------------------------------------------------------------- the table: console, Markdown, CSV


SWEEP_FILES = "sweep"
"""Name of the files that are written: `sweep.md`, `sweep.csv`, `sweep.html`."""


def write_sweep_at_end(folder: Path) -> None:
    """Write the table of a sweep that has ended. Failures are printed in one line, and never change the exit code."""
    if not (folder / JOBS_FILE).is_file():
        return
    try:
        write_sweep(folder)
    except Exception as error:
        line = f"not written   {SWEEP_FILES}.md ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        Console().print(line, soft_wrap=True, highlight=False, markup=False)


def write_sweep(folder: Path) -> int:
    """Print the table, write it and the page into the folder, and print their paths.

    Raises:
        ConfigError: no job of a sweep has begun there.
        StorageError: a file cannot be written.
    """
    sweep = read_sweep(folder)
    errors = [f"{jobs}: {message}" for jobs, message in _messages(sweep)]
    _print_table(sweep, errors)
    write_atomically(folder / f"{SWEEP_FILES}.md", sweep_markdown(sweep))
    write_atomically(folder / f"{SWEEP_FILES}.csv", sweep_csv(sweep))
    write_atomically(folder / f"{SWEEP_FILES}.html", sweep_html(_title(sweep), _cells(sweep), errors, sweep))
    for name, path in (("table", f"{SWEEP_FILES}.md and {SWEEP_FILES}.csv"), ("page", f"{SWEEP_FILES}.html")):
        line = f"{name:<14}{folder / path}" + ("  (one file: open it in a browser)" if name == "page" else "")
        Console().print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


def _cells(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return the heads of the columns and the rows as text; the winner's number has a star."""
    several = len(sweep.measures) > 1
    head = ["job", *sweep.heads, *(["measured"] if several else [])]
    return [*head, "last", "best", "steps", "time", "state", "folder"], [
        _row(sweep, job, several) for job in sweep.jobs
    ]


def _title(sweep: Sweep) -> str:
    """Return the number of jobs, and the metric that they are judged by."""
    jobs = f"{len(sweep.jobs)} job{'s' * (len(sweep.jobs) != 1)}"
    return f"{jobs}, measured by {sweep.measures[0]}" if len(sweep.measures) == 1 else jobs


def _row(sweep: Sweep, job: SweepJob, names_it: bool) -> list[str]:
    star = "*" if job is sweep.winner else ""
    cells = [f"{job.number}{star}", *(job.overrides.get(key, "-") for key in sweep.keys)]
    cells += [job.measure or "-"] if names_it else []
    cells += ["-" if value is None else number(value) for value in (job.last, job.best)]
    cells += ["-" if job.steps is None else f"{job.steps}", duration(job.seconds), job.state]
    inside = job.folder.parent.absolute() == sweep.folder.absolute()
    where = job.folder.name if inside else str(job.folder)
    return [escape_control(" ".join(cell.split())) for cell in (*cells, where if job.folder.is_dir() else "-")]


def _messages(sweep: Sweep) -> list[tuple[str, str]]:
    """Return each message after the jobs that ended with it: ``("jobs 0, 2", "optimizer.lr=...")``."""
    found: dict[str, list[str]] = {}
    for job in sweep.jobs:
        if job.message:
            found.setdefault(" ".join(job.message.split()), []).append(f"{job.number}")
    return [(f"job{'s' * (len(each) > 1)} {', '.join(each)}", escape_control(text)) for text, each in found.items()]


def _print_table(sweep: Sweep, errors: Sequence[str]) -> None:
    head, rows = _cells(sweep)
    console = Console()
    columns = (
        Column(Text(name), overflow="fold", no_wrap=name in ("last", "best", "steps", "time", "state")) for name in head
    )
    table = ruled_table(Text(f"The sweep: {_title(sweep)}"), columns)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    if sweep.winner is not None:
        console.print("* the best last value", highlight=False, markup=False)
    for each in errors:
        console.print(each[:400], soft_wrap=True, highlight=False, markup=False)
    console.print()


def sweep_markdown(sweep: Sweep) -> str:
    """Return a table for GitHub, and the messages of jobs that failed, which may quote a completion."""
    head, rows = _cells(sweep)
    lines = [
        f"# {escape_markdown(sweep.folder.name)}",
        "",
        f"{escape_markdown(_title(sweep))}.",
        "",
        _markdown_row(map(escape_markdown, head)),
        _markdown_row(["---"] * len(head)),
        *(_markdown_row([number, *map(escape_markdown, rest)]) for number, *rest in rows),
        "",
    ]
    if sweep.winner is not None:
        lines += ["\\* the best last value", ""]
    messages = (f"- {jobs}: {markdown_code(message)}" for jobs, message in _messages(sweep))
    return "\n".join([*lines, *messages]).rstrip() + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def sweep_csv(sweep: Sweep) -> str:
    """Return one row a job, with numbers as they were logged; missing values are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ours = ("measure", "last", "best", "steps", "seconds", "state", "exit_code", "error", "folder")
    writer.writerow(["job", *sweep.keys, *ours])
    for job in sweep.jobs:
        overrides = [job.overrides.get(key) for key in sweep.keys]
        ends = (job.state, job.code, " ".join(job.message.split()), job.folder)
        writer.writerow([job.number, *overrides, job.measure, job.last, job.best, job.steps, job.seconds, *ends])
    return out.getvalue()


# ---------------------------------------------------------------------- the page


MOST_CURVES = COLOURS
"""Jobs whose curves are drawn: as many as there are colours."""


def sweep_html(
    title: str, cells: tuple[Sequence[str], Sequence[Sequence[str]]], errors: Sequence[str], sweep: Sweep
) -> str:
    """Return the whole page.

    Args:
        title: Number of jobs, and the metric that they are judged by.
        cells: Heads of the table, and its rows.
        errors: Messages of jobs that failed.
        sweep: For the pictures.
    """
    head, rows = cells
    jobs = [job for job in sweep.jobs if job.run is not None]
    if len(jobs) > MOST_CURVES and len(sweep.measures) == 1:
        sign = 1 if lower_is_better(sweep.measures[0]) else -1
        jobs.sort(key=lambda job: (job.last is None, sign * (job.last or 0.0)))
    drawn = sorted(jobs[:MOST_CURVES], key=lambda job: job.number)
    lines: dict[str, list[ChartLine]] = {}  # a chart of its own for each metric by which jobs are judged
    for i, job in enumerate(drawn):
        if job.run is not None and job.measure:
            series, points = job.run.series[job.measure].first_of_each_step(), job.measure.startswith("val/")
            lines.setdefault(job.measure, []).append(ChartLine(f"job {job.number}", series, i, points=points))
    return page(
        "sweep.html",
        "runs",
        name=sweep.folder.name,
        title=title,
        head=head,
        rows=rows,
        numbers=range(1, len(head) - 2),  # all but the job, its state and its folder
        winner=sweep.winner is not None,
        errors=[RunFinding("failed", each) for each in errors],
        keys=_key_pictures(sweep),
        jobs=len(jobs),
        one_measure=len(sweep.measures) == 1,
        labels=[_label(sweep, job) for job in drawn],
        curves_of_measures=[chart(name, each) for name, each in lines.items()],
        groups=drawn_groups(chart_groups([(f"job {job.number}", job.run) for job in drawn if job.run is not None])),
    )


def _label(sweep: Sweep, job: SweepJob) -> str:
    settings = (f"{head}={job.overrides.get(key, '-')}" for head, key in zip(sweep.heads, sweep.keys))
    return " ".join([f"job {job.number}:", *settings]) if sweep.keys else f"job {job.number}"


def _key_pictures(sweep: Sweep) -> list[Drawing]:
    """Return a picture for each key: its values from left to right, and above each the last values of its jobs."""
    drawn = []
    for measure in sweep.measures:
        for key in sweep.keys:
            found: dict[str, list[float]] = {}
            for job in sweep.jobs:
                if job.measure == measure and job.last is not None:
                    found.setdefault(job.overrides.get(key, "-"), []).append(job.last)
            order = list(found)
            with contextlib.suppress(ValueError):  # numbers by size; anything else in the order of jobs
                order = sorted(found, key=float)
            if len(found) > 1:
                drawn.append(dots(measure, key, [(each, found[each]) for each in order]))
    return drawn
