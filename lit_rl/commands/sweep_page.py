"""A sweep as one HTML page: its table, what each key changes, and the curves of its jobs in the same pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lit_rl.commands.curves import COLOURS, Line, chart, dots
from lit_rl.commands.html_file import document, safe
from lit_rl.commands.run_curves import groups_of
from lit_rl.commands.run_page import curves, table
from lit_rl.commands.run_page_style import SCRIPT, STYLE
from lit_rl.commands.sweep import Job, Sweep, is_lower

MOST_CURVES = COLOURS
"""Jobs whose curves are drawn: as many as there are colours."""


def page(title: str, cells: tuple[Sequence[str], Sequence[Sequence[str]]], errors: Sequence[str], sweep: Sweep) -> str:
    """Return the whole page.

    Args:
        title: Number of jobs, and the metric that they are judged by.
        cells: Heads of the table, and its rows.
        errors: Messages of jobs that failed.
        sweep: For the pictures.
    """
    (head, rows), name = cells, sweep.folder.name
    right = range(1, len(head) - 2)  # all but the job, its state and its folder
    said = "".join(f'<li class="failed"><b>failed</b>{safe(each[:2000])}</li>' for each in errors)
    star = '<p class="aside">* the best last value</p>' if sweep.winner is not None else ""
    jobs = table([safe(each) for each in head], [tuple(map(safe, row)) for row in rows], right)
    body = (
        f"<h1>{safe(name)}</h1><p>{safe(title)}</p>"
        '<nav aria-label="Contents"><a href="#jobs">Jobs</a><a href="#keys">Keys</a><a href="#curves">Curves</a></nav>'
        f'<main><h2 id="jobs">Jobs</h2>{jobs}'
        f'{star}<ul class="alarms">{said}</ul>'
        f'<h2 id="keys">What each key changes</h2>{_keys(sweep)}<h2 id="curves">Curves</h2>{_curves(sweep)}</main>\n'
    )
    return document(f"{name}: sweep", STYLE, body, SCRIPT)


def _keys(sweep: Sweep) -> str:
    """Return a chart for each key: its values from left to right, and above each the last values of its jobs."""
    drawn = []
    for measure in sweep.measures:
        for key in sweep.keys:
            found: dict[str, list[float]] = {}
            for job in sweep.jobs:
                if job.measure == measure and job.last is not None:
                    found.setdefault(job.given.get(key, "-"), []).append(job.last)
            if len(found) > 1:
                drawn.append(dots(measure, key, [(each, found[each]) for each in _ordered(found)]))
    none = '<p class="dim">No key has two values that ended with a number of the same metric.</p>'
    return f'<div class="charts">{"".join(drawn)}</div>\n' if drawn else none


def _ordered(values: Iterable[str]) -> list[str]:
    """Sort numbers by size; keep the order of anything else."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def _curves(sweep: Sweep) -> str:
    """Return the curves of the jobs; of those with the best last values, where there are more than colours."""
    there = [job for job in sweep.jobs if job.run is not None]
    if len(there) > MOST_CURVES and len(sweep.measures) == 1:
        sign = 1 if is_lower(sweep.measures[0]) else -1
        there.sort(key=lambda job: (job.last is None, sign * (job.last or 0.0)))
    shown = sorted(there[:MOST_CURVES], key=lambda job: job.number)
    note = ""
    if len(there) > len(shown):
        best = "the best by their last value" if len(sweep.measures) == 1 else "the first ones"
        note = f'<p class="aside">{len(shown)} of {len(there)} jobs: {best}.</p>'
    keys = (f'<span class="key c{i}">{safe(_label(sweep, job))}</span>' for i, job in enumerate(shown))
    runs = [(f"job {job.number}", job.run) for job in shown if job.run is not None]
    return f"{note}<p>{' '.join(keys)}</p>{_measured(shown)}{curves(groups_of(runs))}"


def _measured(shown: Sequence[Job]) -> str:
    """Return a chart of its own for each metric by which jobs are judged."""
    lines: dict[str, list[Line]] = {}
    for i, job in enumerate(shown):
        if job.run is not None and job.measure:
            series = job.run.series[job.measure].first_of_each_step()
            points = job.measure.startswith("val/")
            lines.setdefault(job.measure, []).append(Line(f"job {job.number}", series, i, points=points))
    return f'<div class="charts">{"".join(chart(name, each) for name, each in lines.items())}</div>\n' if lines else ""


def _label(sweep: Sweep, job: Job) -> str:
    """Return the job's number, and the settings in which it differs from the others."""
    said = (f"{head}={job.given.get(key, '-')}" for head, key in zip(sweep.heads, sweep.keys))
    return " ".join([f"job {job.number}:", *said]) if sweep.keys else f"job {job.number}"
