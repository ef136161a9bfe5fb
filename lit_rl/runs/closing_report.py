"""The console output at the end of a run: tables of results and time, and lines that name its files."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.callbacks.display import one_line
from lit_rl.callbacks.loggers import TrackioLogger, not_written
from lit_rl.callbacks.output_files import ALARMS, PROFILE
from lit_rl.core import ranks, upstream
from lit_rl.core.errors import StorageError
from lit_rl.core.rollout import PromptForm
from lit_rl.reports.metric_groups import JUDGE_COUNTS, PHASES
from lit_rl.runs.run_dir import AVERAGES

TABLE_METRICS = tuple(f"{name}{end}" for name in ("reward", "win_rate") for end in ("", "_low", "_high"))
"""Metrics in the closing table: names behind the set's."""


def phase_totals(metrics: Path) -> dict[str, dict[str, float]]:
    """Return seconds and tokens per second of each phase, summed over a metrics.jsonl; for the update its `mfu` if
    logged."""
    seconds, tokens, used = dict.fromkeys(PHASES, 0.0), 0.0, 0.0
    try:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    except json.JSONDecodeError as error:
        raise StorageError(f"{metrics} is damaged: {error}.") from error
    for row in rows:
        if "time/update" in row:
            spent = [row.get(f"time/{phase}") or 0.0 for phase in PHASES]
            for phase, value in zip(PHASES, spent):
                seconds[phase] += value
            tokens += (row.get("tokens_per_second") or 0.0) * sum(spent)
            used += (row.get("mfu") or 0.0) * row["time/update"]
    found = {
        phase: {"seconds": value, "tokens_per_second": tokens / value if value else math.nan}
        for phase, value in seconds.items()
        if value or phase == "update"
    }
    if used:
        found["update"]["mfu"] = used / seconds["update"]
    return found


@contextmanager
def report_unwritten(trainer: L.Trainer) -> Iterator[None]:
    """Print one line at the end of this block, however it ends, where loggers or samples could not be written."""
    try:
        yield
    finally:
        if missing := not_written(trainer):
            line = f"not written   {'; '.join(map(str, missing))}"
            Console().print(line, soft_wrap=True, markup=False, highlight=False)


def closing_table(summary: dict[str, Any]) -> None:
    """Print accuracy before and after, the time by phase, the alarm that ended the run if one did, and what judges were
    asked."""
    console = Console()
    _measured_table(console, summary, "reward", "Held-out reward, mean and 95 % interval")
    _measured_table(console, summary, "win_rate", "Held-out win rate, mean and 95 % interval")
    before, after = (summary.get("losses", {}).get(when, {}) for when in ("before", "after"))
    if after:
        losses = Table(title="Held-out loss", title_justify="left")
        losses.add_column("metric", no_wrap=True)
        losses.add_column("before", justify="right")
        losses.add_column("after", justify="right")
        for name, value in after.items():
            losses.add_row(Text(one_line(name)), f"{before[name]:.4f}" if name in before else "-", f"{value:.4f}")
        console.print(losses)
    times = Table(title="Where the time went", title_justify="left")
    for column, justify in (("phase", "left"), ("seconds", "right"), ("tokens per second", "right")):
        times.add_column(column, justify=justify)  # pyright: ignore
    for phase, numbers in summary.get("phases", {}).items():
        times.add_row(phase, f"{numbers['seconds']:.1f}", f"{numbers['tokens_per_second']:,.0f}")
    if mfu := summary.get("phases", {}).get("update", {}).get("mfu"):
        times.add_row("model FLOPs utilisation of the update", f"{mfu:.1%}", "")
    rest = summary["seconds"] - sum(numbers["seconds"] for numbers in summary.get("phases", {}).values())
    times.add_row("validation, checkpoints, the rest", f"{max(rest, 0.0):.1f}", "")
    times.add_row("whole run", f"{summary['seconds']:.1f}", "")
    if by := summary.get("stopped_by"):
        times.add_row(f"stopped by {by}", "", "")
    console.print(times)
    if judges := summary.get("judges"):
        table = Table(title="What judges were asked", title_justify="left")
        for column in ("judge", *JUDGE_COUNTS.values()):
            table.add_column(column, justify="left" if column == "judge" else "right")
        for name, counts in judges.items():
            table.add_row(Text(one_line(name)), *(f"{counts.get(key, 0):,}" for key in JUDGE_COUNTS))
        console.print(table)


def judge_totals(module: Any) -> dict[str, dict[str, int]]:
    """Return what each judge behind an API was asked since the command began, over all ranks. A collective."""
    judges = module.served_judges if isinstance(module, GeneratingModule) else {}
    if not judges:
        return {}
    of_ranks = ranks.gather_objects({name: judge.spent for name, judge in judges.items()})
    totals = {name: {key: sum(each[name][key] for each in of_ranks) for key in JUDGE_COUNTS} for name in judges}
    return {name: counts for name, counts in totals.items() if counts["requests"]}


def _measured_table(console: Console, summary: dict[str, Any], measure: str, title: str) -> None:
    """Print one row a validation set and decoding; nothing where it was not measured."""
    table = Table(title=title, title_justify="left")
    for column in ("set", "decoding", "before", "after"):
        table.add_column(column, no_wrap=True)
    for name, decodings in summary.get("after", {}).items():
        for decoding, after in decodings.items():
            if measure in after:
                before = summary.get("before", {}).get(name, {}).get(decoding)
                row = (_interval_cell(numbers, measure) for numbers in (before, after))
                table.add_row(Text(one_line(name or "held-out")), decoding, *row)
    if table.row_count:
        console.print(table)


def _interval_cell(numbers: dict[str, float] | None, measure: str) -> str:
    found = [(numbers or {}).get(f"{measure}{end}") for end in ("", "_low", "_high")]
    mean = found[0]
    if mean is None or math.isnan(mean):
        return "-"
    if any(value is None or not math.isfinite(value) for value in found):  # None: read from summary.json
        return f"{mean:.3f}  (one prompt)"
    return "{:.3f}  [{:.3f}, {:.3f}]".format(*found)


@dataclass(frozen=True)
class RunOutputs:
    """The paths that a run has written, through either command line."""

    run_dir: Path
    """Folder of the metrics."""
    root: Path
    """The Trainer's `default_root_dir`, where callbacks write."""
    model: Path | None
    """An export, or None."""
    verified: str = ""
    """Result of its verification."""
    curves: Path | None = None
    """Folder of TensorBoard, where that logs."""


def closing_lines(
    written: RunOutputs,
    evaluation: str,
    chat: str | None,
    loaded_by: str = "AutoModelForCausalLM",
    prompts: PromptForm | None = None,
    trackers: Sequence[str] = (),
) -> list[str]:
    """Return a line for each file that there is, and the commands to continue with.

    Args:
        written: Paths that the run has written.
        evaluation: The command that evaluates the run; empty where there is none.
        chat: The command that talks to its model; None where there is none.
        loaded_by: transformers' class for the export.
        prompts: Kind of prompt that the run learned to answer.
        trackers: Lines of `tracker_lines`.
    """
    samples, metrics, alarms = written.root / "samples", written.run_dir / "metrics.jsonl", written.root / ALARMS
    lines = [f"samples       {samples}/ (parquet, every completion)"] if samples.is_dir() else []
    lines += [f"metrics       {metrics}"] if metrics.is_file() else []
    if alarms.is_file():
        lines.append(f"alarms        {alarms}  ({len(alarms.read_text().splitlines())})")
    if written.curves is not None:
        lines.append(f"curves        tensorboard --logdir {shlex.quote(str(written.curves))}")
    if (written.root / PROFILE).is_dir():
        lines.append(f"profile       {written.root / PROFILE}/ (a trace, and its operators)")
    lines += trackers
    if written.model is not None:
        lines.append(f"model         {written.model}" + (f"  ({written.verified})" if written.verified else ""))
        beside = "AutoProcessor" if loaded_by == _SEES else "AutoTokenizer"
        lines.append(f"use it        {loaded_by}.from_pretrained({str(written.model)!r}), {beside} likewise")
    lines += [f"average       {path}" for name in AVERAGES if (path := written.root / name).is_dir()]
    if chat is not None and loaded_by in (_SEES, "AutoModelForCausalLM"):  # it writes completions
        hint = {"text": "  (each line is a prompt, as in training)", "messages": "  (a conversation)", None: ""}[
            prompts
        ]
        lines.append(f"talk to it    {chat}{hint}")
    return [*lines, f"evaluate it   {evaluation}"] if evaluation else lines


_SEES = "AutoModelForImageTextToText"


def tracker_lines(loggers: Sequence[Logger]) -> Iterator[str]:
    """Yield a line for each of W&B, MLflow, Trackio and CSV with the place of its logs. A logger that fails to name it
    has none."""
    for logger in loggers:
        line = None
        with contextlib.suppress(Exception):  # a logger that fails ends no run
            if isinstance(logger, WandbLogger):
                folder = Path(logger.experiment.dir).parent
                line = f"wandb         {logger.experiment.url or f'{folder}  (wandb sync sends it)'}"
            elif isinstance(logger, MLFlowLogger):
                uri = upstream.mlflow_address(logger)
                if uri.startswith("sqlite:///"):  # of the current folder
                    uri = f"{Path(uri.removeprefix('sqlite:///')).absolute()}  (mlflow ui --backend-store-uri {uri})"
                line = f"mlflow        {uri}, run {logger.run_id}"
            elif isinstance(logger, TrackioLogger):
                line = f"trackio       trackio show --project {logger.project}  (run {logger.run})"
            elif isinstance(logger, CSVLogger):
                line = f"csv           {Path(logger.log_dir) / 'metrics.csv'}"
        if line is not None:
            yield line
