"""What `offline_curves.py` measures, and the file that it is kept in."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from curve_runs import written


class Point(NamedTuple):
    """What one validation found; None where a preset has no such thing.

    Args:
        step: Optimizer steps so far.
        answered: Share of the held-out sums that greedy decoding gets right.
        told_apart: Share of the held-out pairs whose right answer has the higher reward, by the preset's own; of the
            labelled steps those that are called what they are.
        logp: Mean log-prob of the right answers, as the preset's `val/logps/chosen` has it.
    """

    step: int
    answered: float | None
    told_apart: float | None
    logp: float | None


Curve = list[Point]
Curves = dict[str, dict[int, Curve]]
"""Of each preset and seed."""


def read(path: Path) -> Curves:
    """The curves of a file; none where there is none."""
    curves: Curves = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values = (float(row[name]) if row[name] else None for name in Point._fields[1:])
                curve = curves.setdefault(row["preset"], {}).setdefault(int(row["seed"]), [])
                curve.append(Point(int(row["step"]), *values))
    return curves


def save(path: Path, curves: Curves) -> None:
    """Write all curves to a file."""
    rows = (
        (preset, seed, step, *("" if value is None else f"{value:.4g}" for value in values))
        for preset, seeds in sorted(curves.items())
        for seed, curve in sorted(seeds.items())
        for step, *values in curve
    )
    written(path, ["preset", "seed", *Point._fields], rows)


def column(curves: Curves, preset: str, name: str) -> np.ndarray | None:
    """`(seeds, points)` of a field of `Point`; None where the preset has no such thing."""
    values = [[getattr(point, name) for point in curve] for curve in curves[preset].values()]
    found = np.array(values, dtype=float)
    return None if np.isnan(found).all() else found
