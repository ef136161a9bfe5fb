"""`lit-rl report`: a run as one HTML page (status, curves, samples, config, time, alarms), in its folder or in a
notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import yaml
from rich.console import Console

from lit_rl.callbacks.output_files import PROFILE
from lit_rl.reports.charts import chart, histograms, number
from lit_rl.reports.config_changes import changes_from_defaults, keys_in_commands, set_by_model, typed_commands
from lit_rl.reports.html_page import PAGE_SCRIPT, PAGE_STYLE, data, document, safe, write_atomically
from lit_rl.reports.metric_groups import (
    PHASES,
    ChartGroup,
    before_and_after,
    chart_groups,
    metric_of_set,
    validation_sets,
)
from lit_rl.reports.run_files import REPORT_FILE, RunFiles, RunPaths
from lit_rl.reports.run_findings import RunFinding, run_findings
from lit_rl.reports.run_samples import SampleFiles, completion_distributions, samples_of

# ---------------------------------------------------------------------- the command, and the notebook


def report(run_dir: Path) -> int:
    """Write the page, and print its path.

    Raises:
        ConfigError: the folder holds no run.
        StorageError: the page cannot be written.
    """
    Console().print(console_line(write_run_page(run_dir)), soft_wrap=True, highlight=False, markup=False)
    return 0


def write_run_page(run_dir: Path) -> Path:
    """Write the page, and return its path."""
    target = RunPaths(run_dir).page
    write_atomically(target, run_page_html(RunFiles.of(run_dir)))
    return target


def write_run_page_at_end(run_dir: Path) -> None:
    """Write the page of a run that has ended. Failures are printed in one line, and never change the exit code."""
    try:
        line = console_line(write_run_page(run_dir))
    except Exception as error:
        line = f"not written   {REPORT_FILE} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    Console().print(line, soft_wrap=True, highlight=False, markup=False)


def write_run_page_or_hint(run_dir: RunPaths) -> None:
    """Write the page of a LightningCLI run that has ended, where it logged its metrics; else print the keys that make
    it do so."""
    if run_dir.metrics.is_file():
        return write_run_page_at_end(run_dir.path)
    keys = f"--trainer.logger=lit_rl.callbacks.JsonlLogger --trainer.logger.path={run_dir.metrics}"
    line = f"report        none without {run_dir.metrics.name}: add {keys}"
    Console().print(line, soft_wrap=True, highlight=False, markup=False)


def console_line(target: Path) -> str:
    """Return the line for the console."""
    return f"report        {target}  (one file: open it in a browser)"


@dataclass(frozen=True)
class NotebookPage:
    """A run in a notebook: the page, in a sandboxed frame."""

    run_dir: Path
    height: int = 800
    """Pixels."""

    def _repr_html_(self) -> str:
        page = html.escape(run_page_html(RunFiles.of(self.run_dir)))
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="Report of a run" width="100%" '
            f'height="{self.height}" style="border: 0"></iframe>'
        )


def show(run_dir: str | Path) -> NotebookPage:
    """Return an object that a notebook displays as the page of `lit-rl report`, as the run is at that moment. Writes
    nothing.

    Args:
        run_dir: The folder of a run, of one that still goes on too.
    """
    return NotebookPage(Path(run_dir).expanduser())


# ---------------------------------------------------------------------- the page


_FIRST = 6
"""Charts of a group that are open from the start."""

_MOST_CHARTS = 90

_MOST_CONFIG = 60_000
"""Characters of a config that are shown."""

HIGHER_IS_BETTER = (
    "reward",
    "win_rate",
    "accuracy",
    "rewards/accuracies",
    "margin",
    "rewards/margins",
    "mean_token_accuracy",
)
"""Metrics that a run is judged by, where it has them: the higher the better."""

LOWER_IS_BETTER = ("loss",)


def run_page_html(run: RunFiles) -> str:
    """Return the whole page, of a few megabytes at most whatever the run's size."""
    found, written = run_findings(run), samples_of(run)
    rows = list(_result_rows(run))
    results = html_table(("", "first", "last", "best", "at step"), rows) if rows else _NO_RESULTS
    drawn = [histograms(name, each) for name, each in completion_distributions(run)]
    distributions = f"<h3>Distributions over the completions of a rollout</h3>{_grid(drawn)}" if drawn else ""
    body = (
        f"<header>{_head(run)}</header>{_contents(found, written)}<main>"
        f'{alarm_list(found)}<h2 id="results">Results</h2>{results}'
        f'<h2 id="curves">Curves</h2>{curve_section(chart_groups([("", run)]))}{distributions}'
        f"{_samples(run, written)}{_time(run)}{_config(run)}</main>\n"
    )
    return document(f"{run.path.name}: report", PAGE_STYLE, body, PAGE_SCRIPT)


def _contents(found: Sequence[RunFinding], written: SampleFiles) -> str:
    present = {"alarms": bool(found), "samples-of-run": bool(written.files)}
    notes = sum(each.weight == "note" for each in found)
    counts = {"Alarms": len(found) - notes, "Notes": notes}
    names = {
        "alarms": ", ".join(f"{name} ({count})" for name, count in counts.items() if count),
        "results": "Results",
        "curves": "Curves",
        "samples-of-run": "Samples",
        "time": "Time",
        "config": "Config",
    }
    links = "".join(f'<a href="#{at}">{name}</a>' for at, name in names.items() if present.get(at, True))
    return f'<nav aria-label="Contents">{links}</nav>\n'


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] | None = None) -> str:
    """Return a table from cells of markup; the first cell of each row is its head.

    Args:
        head: Texts of ours.
        rows: Everything foreign in them `safe`.
        numbers: Columns that are aligned to the right; all but the first where nothing is said.
    """
    right = set(range(1, len(head)) if numbers is None else numbers)
    kind = ['class="number"' if i in right else "" for i in range(len(head))]
    top = "".join(f'<th scope="col" {kind[i]}>{name}</th>' for i, name in enumerate(head))
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>'
        + "".join(f"<td {kind[i]}>{row[i]}</td>" for i in range(1, len(row)))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n'


# ---------------------------------------------------------------------- head and results


def _head(run: RunFiles) -> str:
    status, data_node = status_of(run), _part(run.config, "data")
    facts = {
        "algorithm": _short_target(run.config.get("algo")),
        "model": str(_part(run.config, "model").get("name") or "-"),
        "data": str(data_node.get("path") or "") or _short_target(data_node.get("task") or data_node),
        "steps": f"{run.summary.get('steps') or run.last_step}",
        "time": duration(run.summary.get("seconds")),
    }
    by = run.summary.get("stopped_by") if status == "stopped" else None
    badge = f"{status} by {by}" if by else status
    listed = " · ".join(f'<span class="dim">{name}</span> {safe(value)}' for name, value in facts.items())
    return f'<h1>{safe(run.path.name)} <span class="status {status}">{safe(badge)}</span></h1><p>{listed}</p>\n'


def status_of(run: RunFiles) -> str:
    """Return finished, stopped, failed, running (or killed, which nothing records), or unknown."""
    status = run.summary.get("status")
    if run.error:
        return "failed"
    return str(status) if status in ("finished", "stopped", "failed", "running") else "unknown"


def duration(seconds: Any) -> str:
    """Format seconds for people; `-` where they are not known."""
    if not isinstance(seconds, (int, float)):
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config.get(key)
    return part if isinstance(part, Mapping) else {}


def _short_target(node: Any) -> str:
    target = node.get("_target_") if isinstance(node, Mapping) else None
    return str(target).rpartition(".")[2] if target else "-"


_NO_RESULTS = '<p class="dim">Nothing was measured yet.</p>\n'


def _result_rows(run: RunFiles) -> Iterator[Sequence[str]]:
    """Yield the metrics that the run is judged by: of each validation set, with intervals where there are any, and of
    the training."""
    for name in validation_sets(run.series):
        for leaf in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
            series = run.series.get(metric_of_set(leaf, name))
            if series is None:
                continue
            series = series.first_of_each_step()
            best = (min if leaf in LOWER_IS_BETTER else max)(range(len(series)), key=series.values.__getitem__)
            where = [series.steps[i] for i in (0, len(series) - 1, best)]
            cells = [_with_interval(run, metric_of_set(leaf, name), step) for step in where]
            yield (safe(f"{name or 'held-out'}: {leaf}"), *cells, number(where[2]))
        decodings = dict.fromkeys(
            decoding for when in ("after", "before") for decoding in _part(_part(run.summary, when), name)
        )
        for decoding in list(decodings)[1:]:
            before, after = before_and_after(run.summary, name, decoding)
            cells = (_interval_of(before, "reward"), _interval_of(after, "reward"))
            yield (safe(f"{name or 'held-out'}: reward, {decoding}"), *cells, "", "")
    # A policy gradient's loss is about 0 on policy, whatever is learned.
    for leaf in HIGHER_IS_BETTER if "train/reward" in run.series else (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        if (series := run.series.get(f"train/{leaf}")) is not None:
            best = (min if leaf in LOWER_IS_BETTER else max)(range(len(series)), key=series.values.__getitem__)
            values = (series.values[i] for i in (0, len(series) - 1, best))
            yield (safe(f"training: {leaf}"), *(f"{value:.3f}" for value in values), number(series.steps[best]))


def _with_interval(run: RunFiles, name: str, step: float) -> str:
    numbers = {}
    for end in ("", "_low", "_high"):
        series = run.series.get(f"{name}{end}")
        found = dict(zip(reversed(series.steps), reversed(series.values))) if series is not None else {}
        if step in found:
            numbers[f"m{end}"] = found[step]
    return _interval_of(numbers, "m")


def _interval_of(numbers: Mapping[str, float], leaf: str) -> str:
    if leaf not in numbers:
        return "-"
    ends = [numbers.get(f"{leaf}_{end}") for end in ("low", "high")]
    between = "" if None in ends else f' <span class="interval-of">[{ends[0]:.3f}, {ends[1]:.3f}]</span>'
    return f"{numbers[leaf]:.3f}{between}"


# ---------------------------------------------------------------------- alarms and curves


def alarm_list(found: Sequence[RunFinding]) -> str:
    """Return the findings under a title; nothing where there is none."""
    if not found:
        return ""
    lines = "".join(f'<li class="{each.weight}"><b>{each.weight}</b>{safe(each.text[:2000])}</li>' for each in found)
    name = "Notes" if all(each.weight == "note" for each in found) else "Alarms"
    return f'<h2 id="alarms">{name}</h2><ul class="alarms">{lines}</ul>\n'


def curve_section(groups: Sequence[ChartGroup]) -> str:
    """Return groups with a title each, their first charts open."""
    parts, left = [], _MOST_CHARTS
    for group in groups:
        taken = group.charts[:left]
        left -= len(taken)
        drawn = [chart(name, lines) for name, lines in taken]
        parts.append(f"<h3>{group.title}</h3>" + _grid(drawn[:_FIRST]))
        if rest := drawn[_FIRST:]:
            parts.append(f"<details><summary>{len(rest)} more</summary>{_grid(rest)}</details>")
        asides = []
        if group.constant:
            listed = ", ".join(f"{safe(name)} {number(value)}" for name, value in group.constant)
            asides.append(f"always the same: {listed}")
        if group.repeated:
            listed = ", ".join(f"{safe(name)} = {safe(other)}" for name, other in group.repeated)
            asides.append(f"equal curves: {listed}")
        if left_out := len(group.charts) - len(taken):
            asides.append(f"{left_out} more in metrics.jsonl")
        if asides:
            parts.append(f'<p class="aside">{"; ".join(asides)}</p>\n')
    return "".join(parts) if parts else '<p class="dim">metrics.jsonl holds no number yet.</p>'


def _grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>\n' if charts else ""


# ---------------------------------------------------------------------- samples


_COLOURS = {
    "advantage": "advantage",
    "logprob": "log-prob of the sampler",
    "ratio": "ratio",
    "kl": "KL to the reference",
    "entropy": "entropy",
    "value": "value (critic)",
    "mask": "why it is (not) learned from",
    "none": "nothing",
}

_SORTS = {
    "row": "as drawn",
    "high": "highest reward",
    "low": "lowest reward",
    "advantage": "largest advantage",
    "long": "longest",
}


def _samples(run: RunFiles, written: SampleFiles) -> str:
    left_out = "".join(f'<p class="dim">{safe(each)}</p>' for each in written.left_out)
    if not written.files:
        return f'<h2 id="samples-of-run">Samples</h2>{left_out or _NO_SAMPLES}'
    files = "".join(f'<option value="{i}">{html.escape(each["name"])}</option>' for i, each in enumerate(written.files))
    sorts, colours = (
        "".join(f'<option value="{key}">{name}</option>' for key, name in choices.items())
        for choices in (_SORTS, _COLOURS)
    )
    return (
        '<h2 id="samples-of-run">Samples</h2><noscript><p>The browser of samples needs JavaScript.</p></noscript>'
        f'<div class="tools"><label>of<select id="file">{files}</select></label>'
        f'<label>order<select id="sort">{sorts}</select></label>'
        f'<label>colour by<select id="by">{colours}</select></label>'
        '<label>search<input id="words" type="search"></label><output id="count"></output></div>'
        '<p class="dim" id="held"></p><p id="legend"></p><div class="browser">'
        '<div id="rows" role="listbox" tabindex="0" aria-label="Completions; arrow keys choose one"></div>'
        '<div id="shown" aria-live="polite"></div></div>'
        f"{_by_tokens(run, written)}{left_out}"
        f'<script type="application/json" id="samples">{data(written.files)}</script>\n'
    )


_NO_SAMPLES = '<p class="dim">This run wrote no samples (callbacks.samples writes them).</p>'


def _by_tokens(run: RunFiles, written: SampleFiles) -> str:
    """Return a note on colours that no file has, and on the command that adds them, where there is a rollout to take
    them from."""
    held = {name for each in written.files for row in each["rows"] for name in row.get("t", ())}
    missing = [_COLOURS[name] for name in ("logprob", "ratio", "kl", "entropy", "mask") if name not in held]
    saved = any((run.path / "rollouts").glob("step_*.pt"))
    if not missing or not (saved or any(table.name.startswith("tokens_") for table in run.samples)):
        return ""
    replay = (
        "<code>lit-rl replay run_dir=... replay.losses=[run]</code> writes them of the newest rollout (a KL where the "
        "objective has one), and <code>lit-rl report run_dir=...</code> then shows them."
    )
    return (
        f'<p class="dim">No file here holds, token by token: {", ".join(missing)}. A run writes what its loss computes '
        "(<code>callbacks.token_samples</code>): a KL where <code>algo.beta</code> is above 0, an entropy where "
        f"<code>algo.log_entropy</code> is on. {replay if saved else ''}</p>"
    )


# ---------------------------------------------------------------------- time and memory


def _time(run: RunFiles) -> str:
    spent = {name[5:]: sum(series.values) for name, series in run.series.items() if name.startswith("time/")}
    phases = {name: spent[name] for name in PHASES if name in spent}
    within = {f"of generate: {name}": value for name, value in spent.items() if name not in PHASES}
    seconds, whole = phases | within, run.summary.get("seconds")
    if isinstance(whole, (int, float)):
        seconds |= {"validation, checkpoints, the rest": whole - sum(phases.values()), "whole run": whole}
    held = run.summary.get("phase_memory")
    sizes = (
        {name: _size(size) for name, size in held.items() if isinstance(size, int)} if isinstance(held, dict) else {}
    )
    speeds = {name: _median_of(run, f"tokens_per_second_per_device/{name}", ",.0f") for name in phases}
    rows = []
    for name, value in seconds.items():
        share = f"{value / whole:.0%}" if isinstance(whole, (int, float)) and whole > 0 else ""
        rows.append((safe(name), f"{value:.1f}", share, speeds.get(name, ""), sizes.get(name, "")))
    head = ("phase", "seconds", "of the run", "tokens a second and device", "rank 0 held")
    shown = _phase_bar(phases) + html_table(head, rows) if rows else ""
    medians = {words: _median_of(run, name, form) for name, (words, form) in _DEVICE_METRICS.items()}
    listed = " · ".join(f"{value} {words}" for words, value in medians.items() if value)
    if rows and listed:
        shown += f'<p class="dim">Medians over the lines of the log: {listed}.</p>'
    files = sorted(path.name for path in (run.path / PROFILE).glob("*") if path.is_file())  # of debug=profile
    links = " · ".join(f'<a href="{PROFILE}/{quote(name)}">{safe(name)}</a>' for name in files)
    hint = "a trace opens in ui.perfetto.dev, or chrome://tracing"
    traces = f"<h3>Profile</h3><p>{links} ({hint})</p>" if files else ""
    return f'<h2 id="time">Time and memory</h2>{shown}{_memory(run)}{traces}\n'


def _median_of(run: RunFiles, name: str, form: str) -> str:
    """Return the median of a metric over the lines of the log; empty where it was not logged."""
    found = run.series.get(name)
    return format(median(found.values), form) if found else ""


_DEVICE_METRICS = {
    "mfu": ("of a device's peak in the update (mfu)", ".1%"),
    "tflops_per_second": ("TFLOP/s a device in the update", ",.3g"),
    "idle_share": ("of the time in no phase (idle_share)", ".1%"),
}


_PEAKS = {
    "process": "memory of the process",
    "tensors": "tensors on the GPU",
    "reserved": "with what PyTorch keeps for the next",
}


def _memory(run: RunFiles) -> str:
    """Return a table of rank 0's peak memory, from the summary."""
    peaks = run.summary.get("peak_memory")
    peaks = peaks if isinstance(peaks, dict) else {}
    rows = [(name, _size(peaks[key])) for key, name in _PEAKS.items() if isinstance(peaks.get(key), int)]
    if not rows:
        return '<p class="dim">No memory was measured yet; lit-rl plan says what a step needs.</p>'
    return html_table(("rank 0 held", "at most"), rows)


def _size(size: int) -> str:
    """Format bytes with as many decimals wherever the page has them: 0.66 beside 0.662 would look like two
    measurements."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 / 10 else f"{size / 2**30:.2f} GiB"


def _phase_bar(phases: Mapping[str, float]) -> str:
    """Return a bar of the phases, its legend, and the total that they are shares of."""
    total = sum(phases.values()) or 1
    parts = [(f"c{i}", safe(name), value / total) for i, (name, value) in enumerate(phases.items())]
    bar = "".join(f'<i class="{colour}" style="flex: {share:.4f}"></i>' for colour, _, share in parts)
    keys = " ".join(f'<span class="key {colour}">{name} <b>{share:.0%}</b></span>' for colour, name, share in parts)
    of = f"Shares of {total:.1f} s, the phases together; the table's are of the whole run."
    return f'<div class="share" aria-hidden="true">{bar}</div><p>{keys}</p><p class="dim">{of}</p>'


# ---------------------------------------------------------------------- config


def _config(run: RunFiles) -> str:
    if not run.config_text:
        return '<h2 id="config">Config</h2><p class="dim">There is no config.yaml.</p>\n'
    preset, commands = set_by_model(run.config), typed_commands(run.summary)
    names = keys_in_commands(commands)
    rows = {row[0]: row for row in sorted(changes_from_defaults(run.config), key=lambda row: row[0] in preset)}
    own = [key for key in rows if not commands or any(f".{key}".endswith(f".{name}") for name in names)]
    shown = _changes_table([rows[key] for key in own], preset)
    if others := [row for key, row in rows.items() if key not in own]:
        what = "other key" if len(others) == 1 else "other keys"
        shown += f"<details><summary>{len(others)} {what} that the chosen presets set</summary>"
        shown += f"{_changes_table(others, preset)}</details>"
    typed = "".join(f"<pre>{safe(each)}</pre>" for each in commands)
    typed = f"<h3>What was typed</h3>{typed}" if typed else ""
    text, left = run.config_text[:_MOST_CONFIG], len(run.config_text) - _MOST_CONFIG
    more = f'<p class="dim">{left} characters more are in config.yaml.</p>' if left > 0 else ""
    return (
        f'<h2 id="config">Config</h2>{typed}<h3>What differs from the defaults</h3>{shown and _DEFAULTS_NOTE}{shown}'
        f"<details><summary>config.yaml</summary><pre>{safe(text)}</pre>{more}</details>\n"
    )


_DEFAULTS_NOTE = (
    '<p class="dim">The default without presets is the constructor\'s, or what conf/trainer/default.yaml says. '
    "Without a word that was typed a key may have another value: that of the chosen data, model or experiment.</p>"
)


def _changes_table(rows: Sequence[tuple[str, Any, Any]], preset: Mapping[str, str]) -> str:
    cells = []
    for row in rows:
        set_by = f'<span class="dim">set by model={preset[row[0]]}</span>' if row[0] in preset else ""
        cells.append((*(f'<span class="mono">{safe(config_value(each))}</span>' for each in row), set_by))
    return html_table(("key", "this run", "default without presets", ""), cells, numbers=()) if cells else ""


def config_value(value: Any) -> str:
    """Format a value of a config in one line."""
    if value is None:
        return "null"
    if isinstance(value, str):
        text = value
    else:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 300 else f"{text[:300]} ..."
