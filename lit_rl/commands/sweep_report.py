"""The table of a sweep: on the console, as Markdown and CSV, and its page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.callbacks.text import as_markdown, in_code_marks, visible
from lit_rl.commands import html_file, sweep_page
from lit_rl.commands.curves import number
from lit_rl.commands.run_page import duration
from lit_rl.commands.sweep import JOBS, Job, Sweep, read

NAME = "sweep"
"""Name of the files that are written: `sweep.md`, `sweep.csv`, `sweep.html`."""


def write_at_the_end(folder: Path) -> None:
    """Write the table of a sweep that has ended. Failures are printed in one line, and never change the exit code."""
    if not (folder / JOBS).is_file():
        return
    try:
        write(folder)
    except Exception as error:
        said = f"not written   {NAME}.md ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        Console().print(said, soft_wrap=True, highlight=False, markup=False)


def write(folder: Path) -> int:
    """Print the table, write it and the page into the folder, and print their paths.

    Raises:
        ConfigError: no job of a sweep has begun there.
        StorageError: a file cannot be written.
    """
    sweep = read(folder)
    _say(sweep)
    html_file.write(folder / f"{NAME}.md", markdown(sweep))
    html_file.write(folder / f"{NAME}.csv", as_csv(sweep))
    html_file.write(folder / f"{NAME}.html", sweep_page.page(_title(sweep), _cells(sweep), _errors(sweep), sweep))
    for name, path in (("table", f"{NAME}.md and {NAME}.csv"), ("page", f"{NAME}.html")):
        said = f"{name:<14}{folder / path}" + ("  (one file: open it in a browser)" if name == "page" else "")
        Console().print(said, soft_wrap=True, highlight=False, markup=False)
    return 0


# ---------------------------------------------------------------------- as text


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


def _row(sweep: Sweep, job: Job, names_it: bool) -> list[str]:
    star = "*" if job is sweep.winner else ""
    cells = [f"{job.number}{star}", *(job.given.get(key, "-") for key in sweep.keys)]
    cells += [job.measure or "-"] if names_it else []
    cells += ["-" if value is None else number(value) for value in (job.last, job.best)]
    cells += ["-" if job.steps is None else f"{job.steps}", duration(job.seconds), job.state]
    inside = job.folder.parent.absolute() == sweep.folder.absolute()
    where = job.folder.name if inside else str(job.folder)
    return [visible(" ".join(cell.split())) for cell in (*cells, where if job.folder.is_dir() else "-")]


def _messages(sweep: Sweep) -> list[tuple[str, str]]:
    """Return each message after the jobs that ended with it: ``("jobs 0, 2", "optimizer.lr=...")``."""
    found: dict[str, list[str]] = {}
    for job in sweep.jobs:
        if job.message:
            found.setdefault(" ".join(job.message.split()), []).append(f"{job.number}")
    return [(f"job{'s' * (len(each) > 1)} {', '.join(each)}", visible(text)) for text, each in found.items()]


def _errors(sweep: Sweep) -> list[str]:
    """Return a line for each message."""
    return [f"{jobs}: {message}" for jobs, message in _messages(sweep)]


def markdown(sweep: Sweep) -> str:
    """Return a table for GitHub, and the messages of jobs that failed, which may quote a completion."""
    head, rows = _cells(sweep)
    lines = [
        f"# {as_markdown(sweep.folder.name)}",
        "",
        f"{as_markdown(_title(sweep))}.",
        "",
        _line(map(as_markdown, head)),
        _line(["---"] * len(head)),
        *(_line([number, *map(as_markdown, rest)]) for number, *rest in rows),
        "",
    ]
    if sweep.winner is not None:
        lines += ["\\* the best last value", ""]
    said = (f"- {jobs}: {in_code_marks(message)}" for jobs, message in _messages(sweep))
    return "\n".join([*lines, *said]).rstrip() + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_csv(sweep: Sweep) -> str:
    """Return one row a job, with numbers as they were logged; missing values are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ours = ("measure", "last", "best", "steps", "seconds", "state", "exit_code", "error", "folder")
    writer.writerow(["job", *sweep.keys, *ours])
    for job in sweep.jobs:
        given = [job.given.get(key) for key in sweep.keys]
        ends = (job.state, job.code, " ".join(job.message.split()), job.folder)
        writer.writerow([job.number, *given, job.measure, job.last, job.best, job.steps, job.seconds, *ends])
    return out.getvalue()


def _say(sweep: Sweep) -> None:
    head, rows = _cells(sweep)
    console = Console()
    style: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = Table(title=Text(f"The sweep: {_title(sweep)}"), show_edge=False, **style)
    for name in head:
        table.add_column(Text(name), overflow="fold", no_wrap=name in ("last", "best", "steps", "time", "state"))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    if sweep.winner is not None:
        console.print("* the best last value", highlight=False, markup=False)
    for each in _errors(sweep):
        console.print(each[:400], soft_wrap=True, highlight=False, markup=False)
    console.print()
