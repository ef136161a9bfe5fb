"""What `lit-rl replay` found, for people and for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lit_rl.commands.run_dir import finite
from lit_rl.errors import StorageError

_ACROSS = 7
"""Objectives in one block of the matrix: as many as 80 columns hold."""

CLIP_SHARES = ("clip_ratio/region_mean", "cispo_clip_ratio")
"""Names under which losses report the share of tokens that they clip."""


@dataclass(frozen=True)
class Outcome:
    """One objective at the rollout."""

    name: str
    loss: float
    gradient_norm: float
    metrics: dict[str, float]
    """Metrics by the names of `docs/metrics.md`, without `train/`; and `advantage_size` and `no_gradient`."""


@dataclass(frozen=True)
class Report:
    """All results of a replay."""

    rollout: str
    rollout_step: int
    """Optimizer steps of the policy that drew it."""
    completions: int
    checkpoint: str
    policy_step: int
    """Optimizer steps of the policy whose gradients these are."""
    notes: list[str]
    objectives: list[Outcome]
    cosines: list[list[float]]
    """Cosines of every gradient with every other; NaN where one of them is 0."""


def say(report: Report) -> None:
    """Print two tables that fit into 80 columns, and the notes."""
    console = Console()
    title = (
        f"Rollout of step {report.rollout_step} ({report.completions} completions), policy of step {report.policy_step}"
    )
    table = _table(title, "objective", ["loss", "gradient\nnorm", "cosine", "clipped", "mean\n|A|", "no\ngradient"])
    for outcome, cosine in zip(report.objectives, report.cosines[0]):
        clipped = next((outcome.metrics[name] for name in CLIP_SHARES if name in outcome.metrics), math.nan)
        sizes = [f"{outcome.loss:.3g}", f"{outcome.gradient_norm:.3g}", _share(cosine), _share(clipped)]
        rest = [f"{outcome.metrics['advantage_size']:.3g}", _share(outcome.metrics["no_gradient"])]
        table.add_row(outcome.name, *sizes, *rest)
    console.print(table)
    names = [outcome.name for outcome in report.objectives]
    for start in range(0, len(names) if len(names) > 2 else 0, _ACROSS):
        columns = range(start, min(start + _ACROSS, len(names)))
        matrix = _table("Cosines of the gradients", "", [str(column + 1) for column in columns])
        for row, name in enumerate(names):
            matrix.add_row(f"{row + 1} {name}", *(_share(report.cosines[row][column]) for column in columns))
        console.print()
        console.print(matrix)
    console.print()
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _table(title: str, first: str, numbers: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def write(report: Report, folder: Path) -> None:
    """Write `replay_<time>.json` in the run's folder, and print its path."""
    path = folder / f"replay_{datetime.now():%Y-%m-%d_%H%M%S_%f}.json"
    try:
        path.write_text(json.dumps(finite(asdict(report)), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}.") from error
    Console().print(f"numbers  {path}", soft_wrap=True, highlight=False)
