"""Pictures of the results: times as fast as TRL, and cost against work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench import summary
from bench.contenders import OURS
from bench.summary import Result

BLUE, ORANGE, GREEN = "#2f6db3", "#d9661f", "#3b8f5a"
GREY, INK = "#8a8f98", "#2b2f36"


def draw(results: Sequence[Result], folder: Path, kind: str) -> None:
    """All pictures that these results are enough for, as `KIND_NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK})
    compared = [result for result in results if result["series"] is None and summary.is_compared(result)]
    if compared:
        _ratios(compared, folder / f"{kind}_ratios.png")
    for axis in ("completions", "tokens"):
        if points := summary.series(results, axis):
            _cost(points, axis, folder / f"{kind}_{axis}.png")


def _ratios(results: Sequence[Result], path: Path) -> None:
    """A bar for each workload: TRL's seconds over ours, as it comes and tuned, with the rounds' range."""
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.7 * len(results)), layout="constrained")
    for offset, color, label, role in (
        (-0.19, BLUE, "TRL default", "default"),
        (0.19, ORANGE, "TRL tuned", "tuned"),
    ):
        for place, result in enumerate(results):
            theirs = summary.fastest(result, role)
            if theirs is None:
                continue
            found = summary.ratio(result, theirs, OURS)
            error = [[max(0.0, found.middle - found.low)], [max(0.0, found.high - found.middle)]]
            name = label if place == 0 else None
            axes.barh(place + offset, found.middle, 0.36, xerr=error, color=color, ecolor=INK, capsize=3, label=name)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(results)), [result["workload"]["name"] for result in results])
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step over those of lit_rl (range over rounds)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    _plain(axes, grid="x")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _cost(points: Sequence[Result], axis: str, path: Path) -> None:
    """Seconds a step and peak memory against the amount of work."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    factors = [point["factor"] for point in points]
    for name, color in zip(points[0]["contenders"], (GREY, ORANGE, BLUE, GREEN)):
        seconds = [summary.spread(point, name).middle for point in points]
        memory = [(summary.peak(point, name) or 0) / 1e9 for point in points]
        left.plot(factors, seconds, "o-", color=color, label=name)
        right.plot(factors, memory, "o-", color=color)
    left.set_ylabel("seconds a step")
    right.set_ylabel("peak memory, GB")
    for axes in (left, right):
        axes.set_xlabel(f"times the {axis}")
        axes.set_xticks(factors)
        axes.set_ylim(bottom=0)
        _plain(axes, grid="y")
    left.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plain(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color=GREY, alpha=0.2, linewidth=0.7)  # pyright: ignore[reportArgumentType]
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
