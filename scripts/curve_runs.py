"""What the scripts share that draw learning curves: the command line, the runs one after another, and the look."""

from __future__ import annotations

import argparse
import csv
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images" / "algorithms"

BLUE, ORANGE, GREY, INK = "#2f6db3", "#d9661f", "#8a8f98", "#2b2f36"

Curves = dict[str, dict[int, Any]]
"""A curve of each preset and seed."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Args:
        presets: Names, in the order of the runs.
        seeds: Of each of them.
        out: Folder of the numbers and the figures.
        missing: Train only what there is no curve of.
        draw_only: Train nothing.
    """

    presets: list[str]
    seeds: list[int]
    out: Path
    missing: bool
    draw_only: bool

    def jobs(self, curves: Curves) -> list[tuple[str, int]]:
        """Presets and seeds to train, a seed of all presets before the next; `curves` are those that there are."""
        every = [] if self.draw_only else [(preset, seed) for seed in self.seeds for preset in self.presets]
        return [(name, seed) for name, seed in every if not (self.missing and seed in curves.get(name, {}))]


def asked(description: str | None, known: Sequence[str], kind: str) -> Asked:
    """Read the command line of a script that can measure the presets `known`, which are of this kind."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"choices of algo= that {kind}; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the numbers and the figures")
    parser.add_argument(
        "--missing", action="store_true", help="train only what is not in the file; goes on after a stop"
    )
    parser.add_argument("--draw-only", action="store_true", help="train nothing: figures and pages from the file")
    given = parser.parse_args()
    if unknown := sorted(set(given.presets) - set(known)):
        parser.error(f"{', '.join(unknown)}: no choice of algo= that {kind}. Those: {', '.join(known)}.")
    given.out.mkdir(parents=True, exist_ok=True)
    return Asked(given.presets or list(known), given.seeds, given.out, given.missing, given.draw_only)


def train(
    jobs: Sequence[tuple[str, int]],
    curves: Curves,
    run: Callable[[str, int], Any],
    save: Callable[[Curves], None],
    told: Callable[[Any], str],
) -> None:
    """Train one policy after another on one core, and save every curve as soon as it is there."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for number, (preset, seed) in enumerate(jobs, 1):
        began = time.perf_counter()
        curves.setdefault(preset, {})[seed] = curve = run(preset, seed)
        seconds = time.perf_counter() - began
        sys.stdout.write(f"{number}/{len(jobs)}  {preset} seed {seed}: {told(curve)} in {seconds:.0f} s\n")
        sys.stdout.flush()
        save(curves)


def written(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV beside the file first: a run that is ended in the middle leaves the last whole one."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    fresh.replace(path)


def spread(values: Sequence[float] | np.ndarray) -> str:
    """The mean over seeds, with the lowest and the highest."""
    return f"{np.mean(values):.2f} (seeds: {min(values):.2f} to {max(values):.2f})"


def look() -> None:
    """The fonts and the colours of all figures."""
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK})


def styled(axes: Axes, along: str) -> None:
    """Two spines, and a faint grid of one axis, behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.grid(axis="y" if along == "y" else "x", color=GREY, alpha=0.2, linewidth=0.7)
    axes.set_axisbelow(True)


def band(axes: Axes, at: Sequence[float], seeds: np.ndarray, label: str, color: str, alpha: float = 0.2) -> None:
    """The mean over seeds, and the band from the lowest to the highest.

    Args:
        axes: Where.
        at: `(points,)`, the horizontal places.
        seeds: `(seeds, points)`.
        label: In the legend.
        color: Of the line and the band.
        alpha: Of the band.
    """
    axes.fill_between(at, seeds.min(0), seeds.max(0), color=color, alpha=alpha, linewidth=0)
    axes.plot(at, seeds.mean(0), color=color, linewidth=2, label=label)
