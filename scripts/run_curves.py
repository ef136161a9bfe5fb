"""Draw the learning curve of a run from its metrics.jsonl.

python scripts/plot_run.py RUN_DIR OUT.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ModuleNotFoundError:
    raise SystemExit(
        "matplotlib draws the picture: pip install matplotlib. The run's report.html has its curves."
    ) from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE = "#2f6db3", "#d9661f", "#3b8f5a", "#7a56a8"
GREY, INK = "#8a8f98", "#2b2f36"
Points = list[tuple[float, float]]
SECOND = ("val_sampled", "val_greedy")
"""Prefixes of validations by another decoding than the `eval` group's."""


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, one a rollout or a validation."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: give the run directory of `python train.py run_dir=DIR`.")
    return [json.loads(line) for line in path.read_text().splitlines()]


def series(rows: list[dict[str, Any]], name: str) -> Points:
    """`(step, value)` of every row that has a number under this name."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def smooth(points: Points, span: int) -> Points:
    """Centred means over `span` neighbours, fewer at the ends."""
    values = [value for _, value in points]
    half = max(1, span) // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]


def validations(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """One validation a step: the last step is validated by `fit` and after it."""
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row.get(key) is not None:
            first.setdefault(row["step"], row)
    return [first[step] for step in sorted(first)]


def draw_points(axes: Axes, at: list[float], numbers: list[dict[str, float]], key: str, **style: Any) -> None:
    """Means with their intervals."""
    mean = [row[key] for row in numbers]
    below = [max(0.0, row[key] - row[f"{key}_low"]) for row in numbers]
    above = [max(0.0, row[f"{key}_high"] - row[key]) for row in numbers]
    style = {"markersize": 6, "capsize": 4, "linewidth": 1.4, "linestyle": "none", "zorder": 3, **style}
    axes.errorbar(at, mean, yerr=[below, above], **style)


def draw_reward(axes: Axes, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Training reward, raw and smoothed; validations, filled; those of the second decoding, hollow."""
    reward = series(rows, "train/reward")
    if reward:
        axes.plot(*zip(*reward), color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(reward, max(5, len(reward) // 25))), color=BLUE, linewidth=2, label="training")
    keys = dict.fromkeys(key for row in rows for key in row if re.fullmatch("val/(.+/)?reward", key))
    last = max((row["step"] for row in rows), default=0)
    for key, color in zip(keys, (ORANGE, GREEN, PURPLE, GREY)):
        name = key[len("val/") : -len("/reward")] if key != "val/reward" else ""
        decodings = [*summary.get("after", {}).get(name, {"evaluation": None})]
        found = validations(rows, key)
        label = f"{name or 'held-out'}, {decodings[0]}"
        draw_points(axes, [row["step"] for row in found], found, key, marker="o", color=color, label=label)
        for stage in SECOND:
            second = key.replace("val", stage, 1)
            if found := validations(rows, second):
                at = [row["step"] + 0.012 * last for row in found]
                label = f"{name or 'held-out'}, {decodings[1] if decodings[1:] else stage[4:]}"
                draw_points(axes, at, found, second, marker="o", mfc="white", color=color, label=label)
    axes.set_ylabel("mean reward (95 % intervals)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)


FAMILIES = (
    ("accuracy", ("rewards/accuracies", "accuracy")),
    ("margin", ("rewards/margins", "margin")),
    ("mean token accuracy", ("mean_token_accuracy",)),
)
"""What a run without rewards is read by, in the order of preference: the label, and the names of the metric."""


def draw_learned(axes: Axes, rows: list[dict[str, Any]]) -> bool:
    """Of a run that learns from a data set: accuracy or margin, training smoothed and validations as points."""
    for label, names in FAMILIES:
        train, val = (_found(rows, phase, names) for phase in ("train", "val"))
        if train or val:
            _curve(axes, train, val)
            axes.set_ylabel(label)
            return True
    return False


def draw_loss(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Training and validation loss."""
    _curve(axes, _found(rows, "train", ("loss",)), _found(rows, "val", ("loss",)))
    axes.set_ylabel("loss")
    axes.set_xlabel("optimizer step")


def _found(rows: list[dict[str, Any]], phase: str, names: tuple[str, ...]) -> Points:
    """The series of the first of these names that the run has; of several validation sets the first."""
    for name in names:
        keys = dict.fromkeys(key for row in rows for key in row if re.fullmatch(f"{phase}/(.+/)?{name}", key))
        for key in keys:
            if points := series(rows, key):
                return points
    return []


def _curve(axes: Axes, train: Points, val: Points) -> None:
    if train:
        axes.plot(*zip(*train), color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(train, max(5, len(train) // 25))), color=BLUE, linewidth=2, label="training")
    if val:
        axes.plot(*zip(*val), color=ORANGE, marker="o", linewidth=1, label="held-out")
    if train or val:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)


def draw_health(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """What says whether there is still something to learn: groups without a signal, and response lengths."""
    zero, length = series(rows, "train/frac_reward_zero_std"), series(rows, "train/completions/mean_length")
    span = max(5, len(zero) // 25)
    if zero:
        axes.plot(*zip(*smooth(zero, span)), color=INK, linewidth=1.4)
    axes.set_ylim(0, 1)
    axes.set_ylabel("groups of\nequal reward", color=INK)
    axes.set_xlabel("optimizer step")
    right = axes.twinx()
    if length:
        right.plot(*zip(*smooth(length, span)), color=GREY, linewidth=1.4)
        top = max(value for _, value in length)
        right.set_ylim(0, math.ceil(top * 1.25))
    right.set_ylabel("response length\n(tokens)", color=GREY)
    right.tick_params(axis="y", colors=GREY)
    right.spines["top"].set_visible(False)


def plot(run_dir: Path, out: Path) -> None:
    """Write the picture of a run."""
    rows, summary = read(run_dir), run_dir / "summary.json"
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK})
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.2), height_ratios=[3, 1.1], sharex=True, layout="constrained"
    )
    if series(rows, "train/reward"):
        draw_reward(top, rows, json.loads(summary.read_text()) if summary.is_file() else {})
        draw_health(bottom, rows)
    else:
        draw_learned(top, rows)
        draw_loss(bottom, rows)
    for axes in (top, bottom):
        axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    figure.savefig(out, dpi=150)
    print(f"{out} shows {run_dir}")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    plot(given.run_dir, given.out)


if __name__ == "__main__":
    main()
