"""`lit-rl report`: a run as one HTML page (status, curves, samples, config, time, alarms), in its folder or in a
notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml
from rich.console import Console

from lit_rl.callbacks.output_files import PROFILE
from lit_rl.reports.charts import histograms, number
from lit_rl.reports.config_changes import changes_from_defaults, keys_in_commands, set_by_model, typed_commands
from lit_rl.reports.html_page import page, templates, write_atomically
from lit_rl.reports.metric_groups import (
    JUDGE_COUNTS,
    PHASES,
    before_and_after,
    chart_groups,
    drawn_groups,
    metric_of_set,
    validation_sets,
)
from lit_rl.reports.run_files import REPORT_FILE, RunFiles, RunPaths
from lit_rl.reports.run_findings import run_findings
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
    run = RunFiles.of(run_dir)
    write_atomically(run.page, run_page_html(run))
    return run.page


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
        shown = run_page_html(RunFiles.of(self.run_dir))
        return templates().get_template("notebook.html").render(page=shown, height=self.height)


def show(run_dir: str | Path) -> NotebookPage:
    """Return an object that a notebook displays as the page of `lit-rl report`, as the run is at that moment. Writes
    nothing.

    Args:
        run_dir: The folder of a run, of one that still goes on too.
    """
    return NotebookPage(Path(run_dir).expanduser())


# ---------------------------------------------------------------------- the page


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
    written, status, data_node = samples_of(run), status_of(run), _part(run.config, "data")
    by = run.summary.get("stopped_by") if status == "stopped" else None
    files = sorted(path.name for path in (run.path / PROFILE).glob("*") if path.is_file())  # of debug=profile
    return page(
        "report.html",
        "runs",
        name=run.path.name,
        status=status,
        badge=f"{status} by {by}" if by else status,
        facts={
            "algorithm": _short_target(run.config.get("algo")),
            "model": str(_part(run.config, "model").get("name") or "-"),
            "data": str(data_node.get("path") or "") or _short_target(data_node.get("task") or data_node),
            "steps": f"{run.summary.get('steps') or run.last_step}",
            "time": duration(run.summary.get("seconds")),
        },
        found=run_findings(run),
        results=list(_result_rows(run)),
        groups=drawn_groups(chart_groups([("", run)])),
        distributions=[histograms(name, rows) for name, rows in completion_distributions(run)],
        samples=written,
        missing_colours=_missing_colours(run, written),
        may_replay=_saved_rollout(run),
        time=_time(run),
        memory=_memory(run),
        judges={"columns": ["judge", *JUDGE_COUNTS.values()], "rows": list(_judge_rows(run))},
        profile={name: f"{PROFILE}/{quote(name)}" for name in files},
        config=_config(run),
    )


# ---------------------------------------------------------------------- head and results


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


class Measured(NamedTuple):
    """A number of the results, and the interval that it lies in where one was logged."""

    number: str
    interval: str = ""


def _result_rows(run: RunFiles) -> Iterator[Sequence[str | Measured]]:
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
            yield (f"{name or 'held-out'}: {leaf}", *cells, number(where[2]))
        decodings = dict.fromkeys(
            decoding for when in ("after", "before") for decoding in _part(_part(run.summary, when), name)
        )
        for decoding in list(decodings)[1:]:
            before, after = before_and_after(run.summary, name, decoding)
            cells = (_interval_of(before, "reward"), _interval_of(after, "reward"))
            yield (f"{name or 'held-out'}: reward, {decoding}", *cells, "", "")
    # A policy gradient's loss is about 0 on policy, whatever is learned.
    for leaf in HIGHER_IS_BETTER if "train/reward" in run.series else (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        if (series := run.series.get(f"train/{leaf}")) is not None:
            best = (min if leaf in LOWER_IS_BETTER else max)(range(len(series)), key=series.values.__getitem__)
            values = (series.values[i] for i in (0, len(series) - 1, best))
            yield (f"training: {leaf}", *(f"{value:.3f}" for value in values), number(series.steps[best]))


def _with_interval(run: RunFiles, name: str, step: float) -> Measured:
    numbers = {}
    for end in ("", "_low", "_high"):
        series = run.series.get(f"{name}{end}")
        found = dict(zip(reversed(series.steps), reversed(series.values))) if series is not None else {}
        if step in found:
            numbers[f"m{end}"] = found[step]
    return _interval_of(numbers, "m")


def _interval_of(numbers: Mapping[str, float], leaf: str) -> Measured:
    if leaf not in numbers:
        return Measured("-")
    low, high = (numbers.get(f"{leaf}_{end}") for end in ("low", "high"))
    between = "" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"
    return Measured(f"{numbers[leaf]:.3f}", between)


# ---------------------------------------------------------------------- samples


def _missing_colours(run: RunFiles, written: SampleFiles) -> list[str]:
    """Return the colours that no file has, where the run has a rollout to take them from, or writes tokens."""
    held = {name for each in written.files for row in each["rows"] for name in row.get("t", ())}
    if not (_saved_rollout(run) or any(table.name.startswith("tokens_") for table in run.samples)):
        return []
    return [name for name in ("logprob", "ratio", "kl", "entropy", "mask") if name not in held]


def _saved_rollout(run: RunFiles) -> bool:
    return any((run.path / "rollouts").glob("step_*.pt"))


# ---------------------------------------------------------------------- time and memory


def _time(run: RunFiles) -> dict[str, Any]:
    """Return the rows of the table, the shares of the phases and their sum in seconds, and medians of speeds."""
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
    rows = []
    for name, value in seconds.items():
        share = f"{value / whole:.0%}" if isinstance(whole, (int, float)) and whole > 0 else ""
        speed = _median_of(run, f"tokens_per_second_per_device/{name}", ",.0f") if name in phases else ""
        rows.append((name, f"{value:.1f}", share, speed, sizes.get(name, "")))
    total = sum(phases.values()) or 1
    medians = {words: _median_of(run, name, form) for name, (words, form) in _DEVICE_METRICS.items()}
    return {
        "rows": rows,
        "shares": {name: value / total for name, value in phases.items()},
        "phases": total,
        "medians": [f"{value} {words}" for words, value in medians.items() if value],
    }


def _judge_rows(run: RunFiles) -> Iterator[Sequence[str]]:
    judges = _part(run.summary, "judges")
    for name in judges:
        counts = [_part(judges, name).get(key) for key in JUDGE_COUNTS]
        yield (str(name), *(f"{count:,}" if isinstance(count, int) else "" for count in counts))


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


def _memory(run: RunFiles) -> list[tuple[str, str]]:
    """Return rank 0's peak memory, from the summary."""
    peaks = run.summary.get("peak_memory")
    peaks = peaks if isinstance(peaks, dict) else {}
    return [(name, _size(peaks[key])) for key, name in _PEAKS.items() if isinstance(peaks.get(key), int)]


def _size(size: int) -> str:
    """Format bytes with as many decimals wherever the page has them: 0.66 beside 0.662 would look like two
    measurements."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 / 10 else f"{size / 2**30:.2f} GiB"


# ---------------------------------------------------------------------- config


def _config(run: RunFiles) -> dict[str, Any]:
    """Return the text, what was typed, and the keys that differ from the defaults: those that the commands name, and
    the others."""
    preset, commands = set_by_model(run.config), typed_commands(run.summary)
    names = keys_in_commands(commands)
    rows = sorted(changes_from_defaults(run.config), key=lambda row: row[0] in preset)
    shown = {row[0]: (*map(config_value, row), preset.get(row[0], "")) for row in rows}
    own = [key for key in shown if not commands or any(f".{key}".endswith(f".{name}") for name in names)]
    return {
        "text": run.config_text[:_MOST_CONFIG],
        "left": max(0, len(run.config_text) - _MOST_CONFIG),
        "commands": commands,
        "own": [shown[key] for key in own],
        "others": [row for key, row in shown.items() if key not in own],
    }


def config_value(value: Any) -> str:
    """Format a value of a config in one line."""
    if value is None:
        return "null"
    if isinstance(value, str):
        text = value
    else:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 300 else f"{text[:300]} ..."
