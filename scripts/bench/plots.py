"""Pictures of the results: times as fast as TRL, and cost against work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench import summary
from bench.contenders import BF16_TRUE, OURS
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
    """Ours in float32, and beside it with bf16-true: TRL's seconds over ours, a pair of bars for each workload."""
    there = [name for name in (OURS, BF16_TRUE) if any(name in result["contenders"] for result in results)]
    if not there:
        return
    size = (2.5 + 4.5 * len(there), 1.2 + 0.7 * len(results))
    figure, panels = plt.subplots(
        1, len(there), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axes, ours in zip(panels[0], there):
        _bars(axes, results, ours)
    panels[0][0].set_yticks(range(len(results)), [result["workload"]["name"] for result in results])
    panels[0][0].invert_yaxis()
    panels[0][0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: Axes, results: Sequence[Result], ours: str) -> None:
    """TRL's seconds over those of one contender of ours, TRL as it comes and tuned, with the rounds' range."""
    for offset, color, label, which in (
        (-0.19, BLUE, "TRL default", summary.default),
        (0.19, ORANGE, "TRL tuned", summary.tuned),
    ):
        for place, result in enumerate(results):
            theirs = which(result)
            if theirs is None or ours not in result["contenders"]:
                continue
            found = summary.ratio(result, theirs, ours)
            error = [[max(0.0, found.middle - found.low)], [max(0.0, found.high - found.middle)]]
            axes.barh(place + offset, found.middle, 0.36, xerr=error, color=color, ecolor=INK, capsize=3, label=label)
            label = None
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel(f"seconds a step over those of\n{ours} (range over rounds)")
    _plain(axes, grid="x")


def _cost(points: Sequence[Result], axis: str, path: Path) -> None:
    """Seconds a step and peak memory against the amount of work."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    factors = [point["factor"] for point in points]
    for name, color in zip(points[0]["contenders"], (GREY, ORANGE, BLUE, GREEN)):
        seconds = [summary.spread(point, name).middle for point in points]
        memory = [summary.peak(point, name) / 1e9 for point in points]
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
