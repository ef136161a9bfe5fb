"""Curves, dots and histograms as SVG: pictures that need no script, and that read out their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_rl.reports.html_page import data, safe
from lit_rl.reports.run_files import Series

WIDTH, HEIGHT = 400, 192
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 10, 34

MOST_POINTS = 200
"""Most points of a line; of more, the lowest and the highest of each stretch are drawn."""

COLOURS = 6


@dataclass(frozen=True)
class ChartLine:
    """One metric to draw."""

    name: str
    """Name in the legend."""
    series: Series
    colour: int = 0
    """An index from 0 on, modulo `COLOURS`."""
    points: bool = False
    """True for numbers that are measurements of their own, such as validations; others are noisy, and drawn faintly
    below their running mean."""
    hollow: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    """Ends of the interval of each point."""


@dataclass(frozen=True)
class _Frame:
    """The map from numbers to places in the picture."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - self.left) / ((self.right - self.left) or 1)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - self.bottom) / ((self.top - self.bottom) or 1)


def chart(title: str, lines: Sequence[ChartLine]) -> str:
    """Return a figure with its name, its newest numbers and, of several lines, a legend.

    Args:
        title: Name of the metric.
        lines: Each with a number at least.
    """
    ends = [step for line in lines for step in (line.series.steps[0], line.series.steps[-1])]
    values = [value for line in lines for value in (*line.series.values, *(line.low or ()), *(line.high or ()))]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    frame = _Frame(min(ends), max(ends), low - margin, high + margin)
    axes = [_named_axes("optimizer step", title, _LEFT, HEIGHT)]
    for value in ticks(frame.bottom, frame.top):
        y = f"{frame.y(value):.1f}"
        axes.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        axes.append(f'<text x="{_LEFT - 5}" y="{y}" dy=".35em" text-anchor="end">{_tick(value)}</text>')
    for step in filter(float.is_integer, ticks(frame.left, frame.right, 5)):
        x = f"{frame.x(step):.1f}"
        axes.append(f'<text x="{x}" y="{HEIGHT - 19}" text-anchor="middle">{_tick(step)}</text>')
    drawn = "".join([*axes, *(_line_svg(line, frame) for line in lines)])
    newest = "; ".join(f"{line.name} {number(line.series.values[-1])}" for line in lines)
    keys = "".join(
        f'<span class="key c{line.colour % COLOURS}{" hollow" * line.hollow}">{safe(line.name)} '
        f"<b>{number(line.series.values[-1])}</b></span>"
        for line in lines
    )
    name = safe(title)
    steps = f"steps {number(frame.left)} to {number(frame.right)}"
    return (
        f'<figure class="chart"><figcaption><span class="name">{name}</span>{keys}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}, {steps}; last: {safe(newest)}" '
        f'data-frame="{frame.left:g} {frame.right:g} {_LEFT} {WIDTH - _RIGHT}">{drawn}'
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" hidden></line></svg>'
        '<output class="read" aria-hidden="true"></output></figure>\n'
    )


def number(value: float) -> str:
    """Format a number with four digits, without an exponent where none is needed."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value)}"
    return f"{value:.4g}"


def smoothed(series: Series) -> Series:
    """Return centred means over a twenty-fifth of the numbers, five at least; over fewer at the ends."""
    half = max(5, len(series) // 25) // 2
    sums = [0.0]
    for value in series.values:
        sums.append(sums[-1] + value)
    spans = ((max(0, i - half), min(len(series), i + half + 1)) for i in range(len(series)))
    means = Series()
    means.steps.extend(series.steps)
    means.values.extend((sums[end] - sums[start]) / (end - start) for start, end in spans)
    return means


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """Return at most `most` of the numbers: the lowest and the highest of each stretch, in their order."""
    if len(series) <= most:
        return series
    kept: list[int] = []
    stretches = most // 2
    for i in range(stretches):
        stretch = range(i * len(series) // stretches, (i + 1) * len(series) // stretches)
        ends = {min(stretch, key=series.values.__getitem__), max(stretch, key=series.values.__getitem__)}
        kept += sorted(ends)
    found = Series()
    found.steps.extend(series.steps[i] for i in kept)
    found.values.extend(series.values[i] for i in kept)
    return found


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return round numbers within the range, two at least and about `most`: multiples of 1, 2 or 5 times a power of
    ten."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [power * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5, 10)]
    largest = next(i for i, step in enumerate(steps) if i > 2 and step >= rough * (1 - 1e-9))
    # One number alone says nothing of a scale: then the next smaller step.
    step = next((step for step in steps[largest::-1] if high / step - math.ceil(low / step - 1e-9) >= 1 - 1e-9), 0.0)
    first = math.ceil(low / step - 1e-9)
    found = []
    while (value := first * step) <= high + 1e-9 * step and len(found) <= most:
        found.append(value if abs(value) > 1e-9 * step else 0.0)
        first += 1
    return found


def _named_axes(across: str, up: str, left: int, height: int) -> str:
    """Return the names of both axes, below the picture and, turned, to the left of it; long ones are cut."""
    x, y = (left + WIDTH - _RIGHT) / 2, (_TOP + height - _BOTTOM) / 2
    turned = f'transform="translate(12 {y:g}) rotate(-90)"'
    up = _cut(up, max(5, (height - _TOP - _BOTTOM) // 6))
    return (
        f'<text class="axis" x="{x:g}" y="{height - 4}" text-anchor="middle">{safe(_cut(across, 50))}</text>'
        f'<text class="axis" {turned} text-anchor="middle">{safe(up)}</text>'
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _tick(value: float) -> str:
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:.4g}"


def _line_svg(line: ChartLine, frame: _Frame) -> str:
    shown = thinned(line.series)
    points = [[float(f"{step:g}"), float(f"{value:.4g}")] for step, value in zip(shown.steps, shown.values)]
    readout = f'data-name="{safe(line.name)}" data-points="{data(points)}"'
    colour = f"c{line.colour % COLOURS}"
    if line.points or len(line.series) == 1:
        return _points_svg(line, frame, colour, readout)
    if len(line.series) <= 12:
        return f'<path class="line {colour}" {readout} d="{_path(shown, frame)}"/>'
    return (
        f'<path class="raw {colour}" {readout} d="{_path(shown, frame)}"/>'
        f'<path class="line {colour}" d="{_path(_every_nth(smoothed(line.series)), frame)}"/>'
    )


def _every_nth(series: Series) -> Series:
    """Return evenly spaced points of a smooth line, with the last."""
    apart = max(1, len(series) // MOST_POINTS)
    return Series(series.steps[::-apart][::-1], series.values[::-apart][::-1])


def _path(series: Series, frame: _Frame) -> str:
    places = (f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in zip(series.steps, series.values))
    return "M" + "L".join(places)


def _points_svg(line: ChartLine, frame: _Frame, colour: str, readout: str) -> str:
    series, parts = line.series, []
    apart = max(1, len(series) // MOST_POINTS)
    kept = range(len(series) - 1, -1, -apart)
    for i in kept:
        x, y = f"{frame.x(series.steps[i]):.1f}", f"{frame.y(series.values[i]):.1f}"
        if line.low is not None and line.high is not None:
            ends = f'y1="{frame.y(line.low[i]):.1f}" y2="{frame.y(line.high[i]):.1f}"'
            parts.append(f'<line class="interval {colour}" x1="{x}" x2="{x}" {ends}/>')
        hollow = " hollow" if line.hollow else ""
        parts.append(f'<circle class="{colour}{hollow}" cx="{x}" cy="{y}" r="{2.6 if len(kept) < 60 else 1.6}"/>')
    joined = f'<path class="between {colour}" {readout} d="{_path(_every_nth(series), frame)}"/>'
    return joined + "".join(parts)


# ---------------------------------------------------------------------- dots


def dots(measure: str, key: str, columns: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return a column of dots for each value of a setting, and a line through their means.

    Args:
        measure: The metric whose last values the dots are.
        key: The setting.
        columns: A label and finite numbers, from left to right; none is empty.
    """
    values = [value for _, each in columns for value in each]
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    frame = _Frame(-0.5, len(columns) - 0.5, low - margin, high + margin)
    parts = [_named_axes(key, measure, _LEFT, HEIGHT)]
    for value in ticks(frame.bottom, frame.top):
        y = f"{frame.y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{frame.y(value) + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    means = [sum(each) / len(each) for _, each in columns]
    path = "L".join(f"{frame.x(i):.1f} {frame.y(mean):.1f}" for i, mean in enumerate(means))
    parts.append(f'<path class="between c0" d="M{path}"/>')
    longest = max(4, 56 // len(columns))
    for i, (label, each) in enumerate(columns):
        x = f"{frame.x(i):.1f}"
        parts += [f'<circle class="c0" cx="{x}" cy="{frame.y(value):.1f}" r="3.4"/>' for value in each]
        parts.append(f'<text x="{x}" y="{HEIGHT - 19}" text-anchor="middle">{safe(_cut(label, longest))}</text>')
    description = "; ".join(f"{label}: {', '.join(map(number, each))}" for label, each in columns)
    return _figure(f"{measure}, last, by {key}", description, HEIGHT, parts)


# ---------------------------------------------------------------------- histograms


def histograms(title: str, rows: Sequence[tuple[str, Sequence[float]]], bins: int = 30) -> str:
    """Return one row of bars for each set of numbers, all over the same range; a set's highest bar fills its row.

    Args:
        title: Name of the numbers; each set's bars count completions.
        rows: A label and finite numbers, in the order in which they are shown; no set is empty.
    """
    low, high = min(min(values) for _, values in rows), max(max(values) for _, values in rows)
    if low == high:
        low, high = low - 0.5, high + 0.5
    tall, gap, left = 30, 6, 92
    height = len(rows) * (tall + gap) + 34
    wide = (WIDTH - left - _RIGHT) / bins
    parts = [_named_axes(title, "count", left, height)]
    for row, (label, values) in enumerate(rows):
        counts = bin_counts(values, low, high, bins)
        ground = (row + 1) * (tall + gap)
        for i, count in enumerate(counts):
            if count:
                up = tall * count / max(counts)
                place = f'x="{left + i * wide:.1f}" y="{ground - up:.1f}" width="{wide - 0.6:.1f}" height="{up:.1f}"'
                parts.append(f'<rect class="bar" {place}/>')
        mean = sum(values) / len(values)
        mean = 0.0 if abs(mean) < 1e-5 * (high - low) else mean
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{ground}" y2="{ground}"/>')
        parts.append(f'<text x="{left - 6}" y="{ground - 12}" text-anchor="end">{safe(label)}</text>')
        parts.append(f'<text x="{left - 6}" y="{ground - 1}" text-anchor="end">mean {mean:.3g}</text>')
    for value in ticks(low, high, 5):
        x = left + (WIDTH - left - _RIGHT) * (value - low) / (high - low)
        parts.append(f'<text x="{x:.1f}" y="{height - 19}" text-anchor="middle">{_tick(value)}</text>')
    counts = ((label, len(values), sum(values) / len(values)) for label, values in rows)
    description = "; ".join(f"{label}: {count} numbers, mean {mean:.3g}" for label, count, mean in counts)
    return _figure(title, description, height, parts)


def bin_counts(values: Sequence[float], low: float, high: float, bins: int) -> list[int]:
    """Return the counts in `bins` parts of equal width; the last one holds its upper end too."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(bins * (value - low) / (high - low)))] += 1
    return counts


def _figure(title: str, description: str, height: int, parts: Sequence[str]) -> str:
    """Return a picture without a legend; the description is for a screen reader."""
    name = safe(title)
    return (
        f'<figure class="chart"><figcaption><span class="name">{name}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}: {safe(description)}">{"".join(parts)}'
        "</svg></figure>\n"
    )
