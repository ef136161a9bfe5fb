"""Curves, dots and histograms as pictures: the places of lines, dots and bars, which `templates/charts.html` draws as
SVG. They need no script, and read out their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


# ---------------------------------------------------------------------- what is drawn


class Tick(NamedTuple):
    """A number beside an axis."""

    place: float
    text: str


class Dot(NamedTuple):
    """A point, with the ends of its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Bar(NamedTuple):
    """A bar of a histogram."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class HistogramRow:
    """The bars of one set of numbers, which stand on one line."""

    label: str
    mean: str
    ground: int
    bars: list[Bar]


@dataclass(frozen=True)
class DrawnLine:
    """The paths and dots of one metric or setting."""

    colour: int
    paths: list[tuple[str, str]]
    """Kinds (`raw`, `line`, `between`) with their courses. The first one has what is read out."""
    name: str = ""
    newest: str = ""
    """The last number, for the legend."""
    read: list[list[float]] | None = None
    """Steps and numbers that are read out."""
    hollow: bool = False
    dots: Sequence[Dot] = ()
    radius: float = 2.6


@dataclass(frozen=True)
class Drawing:
    """One figure: what is drawn in it, and its words."""

    title: str
    label: str
    """Words for a screen reader."""
    across: str
    up: str
    """Names of the axes."""
    ticks_up: Sequence[Tick] = ()
    ticks_across: Sequence[Tick] = ()
    lines: Sequence[DrawnLine] = ()
    rows: Sequence[HistogramRow] = ()
    frame: str = ""
    """First and last step, and their places, for the cursor. A picture without steps has neither it nor a legend."""
    height: int = HEIGHT
    left: int = _LEFT
    width: int = WIDTH
    right: int = WIDTH - _RIGHT
    top: int = _TOP

    @property
    def bottom(self) -> int:
        """The place of the lower axis."""
        return self.height - _BOTTOM


@dataclass(frozen=True)
class _Frame:
    """The map from numbers to places in the picture."""

    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def around(cls, left: float, right: float, values: Sequence[float], margin: float) -> _Frame:
        """Return the frame of these values, with a share of their range above and below."""
        low, high = min(values), max(values)
        margin = margin * (high - low) or 0.05 * abs(high) or 1.0
        return cls(left, right, low - margin, high + margin)

    def x(self, step: float) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * (step - self.left) / ((self.right - self.left) or 1), 1)

    def y(self, value: float) -> float:
        room = HEIGHT - _TOP - _BOTTOM
        return round(HEIGHT - _BOTTOM - room * (value - self.bottom) / ((self.top - self.bottom) or 1), 1)

    def path(self, steps: Sequence[float], values: Sequence[float]) -> str:
        return "M" + "L".join(f"{self.x(step)} {self.y(value)}" for step, value in zip(steps, values))

    def ticks_up(self) -> list[Tick]:
        return [Tick(self.y(value), _tick(value)) for value in ticks(self.bottom, self.top)]


# ---------------------------------------------------------------------- curves


def chart(title: str, lines: Sequence[ChartLine]) -> Drawing:
    """Return a picture of curves, with its newest numbers and, of several lines, a legend.

    Args:
        title: Name of the metric.
        lines: Each with a number at least.
    """
    ends = [step for line in lines for step in (line.series.steps[0], line.series.steps[-1])]
    values = [value for line in lines for value in (*line.series.values, *(line.low or ()), *(line.high or ()))]
    frame = _Frame.around(min(ends), max(ends), values, margin=0.05)
    newest = "; ".join(f"{line.name} {number(line.series.values[-1])}" for line in lines)
    return Drawing(
        title=title,
        label=f"{title}, steps {number(frame.left)} to {number(frame.right)}; last: {newest}",
        across="optimizer step",
        up=_cut(title, (HEIGHT - _TOP - _BOTTOM) // 6),
        ticks_up=frame.ticks_up(),
        ticks_across=[
            Tick(frame.x(step), _tick(step)) for step in ticks(frame.left, frame.right, 5) if step.is_integer()
        ],
        lines=[_drawn_line(line, frame) for line in lines],
        frame=f"{frame.left:g} {frame.right:g} {_LEFT} {WIDTH - _RIGHT}",
    )


def _drawn_line(line: ChartLine, frame: _Frame) -> DrawnLine:
    """Return measurements as dots that are joined, few numbers as a line, and more faintly behind their mean."""
    series, shown = line.series, thinned(line.series)
    apart = max(1, len(series) // MOST_POINTS)
    dots: list[Dot] = []
    if line.points or len(series) == 1:
        kept = range(len(series) - 1, -1, -apart)
        paths = [("between", frame.path(*_every_nth(series, apart)))]
        for i in kept:
            known = line.low is not None and line.high is not None
            ends = (frame.y(line.low[i]), frame.y(line.high[i])) if known else ()  # pyright: ignore
            dots.append(Dot(frame.x(series.steps[i]), frame.y(series.values[i]), *ends))
    else:
        paths = [("line", frame.path(shown.steps, shown.values))]
        if len(series) > 12:
            paths = [("raw", paths[0][1]), ("line", frame.path(*_every_nth(smoothed(series), apart)))]
    return DrawnLine(
        colour=line.colour % COLOURS,
        paths=paths,
        name=line.name,
        newest=number(series.values[-1]),
        read=[[float(f"{step:g}"), float(f"{value:.4g}")] for step, value in zip(shown.steps, shown.values)],
        hollow=line.hollow,
        dots=dots,
        radius=2.6 if len(dots) < 60 else 1.6,
    )


def _every_nth(series: Series, apart: int) -> tuple[Sequence[float], Sequence[float]]:
    """Return steps and numbers of evenly spread points, with the last."""
    return series.steps[::-apart][::-1], series.values[::-apart][::-1]


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


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _tick(value: float) -> str:
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:.4g}"


# ---------------------------------------------------------------------- dots


def dots(measure: str, key: str, columns: Sequence[tuple[str, Sequence[float]]]) -> Drawing:
    """Return a column of dots for each value of a setting, and a line through their means.

    Args:
        measure: The metric whose last values the dots are.
        key: The setting.
        columns: A label and finite numbers, from left to right; none is empty.
    """
    frame = _Frame.around(-0.5, len(columns) - 0.5, [value for _, each in columns for value in each], margin=0.08)
    means = [sum(each) / len(each) for _, each in columns]
    longest = max(4, 56 // len(columns))
    description = "; ".join(f"{label}: {', '.join(map(number, each))}" for label, each in columns)
    title = f"{measure}, last, by {key}"
    points = [Dot(frame.x(i), frame.y(value)) for i, (_, each) in enumerate(columns) for value in each]
    return Drawing(
        title=title,
        label=f"{title}: {description}",
        across=_cut(key, 50),
        up=_cut(measure, (HEIGHT - _TOP - _BOTTOM) // 6),
        ticks_up=frame.ticks_up(),
        ticks_across=[Tick(frame.x(i), _cut(label, longest)) for i, (label, _) in enumerate(columns)],
        lines=[DrawnLine(0, [("between", frame.path(range(len(means)), means))], dots=points, radius=3.4)],
    )


# ---------------------------------------------------------------------- histograms


def histograms(title: str, rows: Sequence[tuple[str, Sequence[float]]], bins: int = 30) -> Drawing:
    """Return one row of bars for each set of numbers, all over the same range; a set's highest bar fills its row.

    Args:
        title: Name of the numbers; each set's bars count completions.
        rows: A label and finite numbers, in the order in which they are shown; no set is empty.
    """
    low, high = min(min(values) for _, values in rows), max(max(values) for _, values in rows)
    if low == high:
        low, high = low - 0.5, high + 0.5
    tall, gap, left = 30, 6, 92
    height = len(rows) * (tall + gap) + _BOTTOM
    span = WIDTH - left - _RIGHT
    wide = span / bins
    drawn, described = [], []
    for row, (label, values) in enumerate(rows):
        counts, ground = bin_counts(values, low, high, bins), (row + 1) * (tall + gap)
        mean = sum(values) / len(values)
        described.append(f"{label}: {len(values)} numbers, mean {mean:.3g}")
        mean = 0.0 if abs(mean) < 1e-5 * (high - low) else mean
        bars = []
        for i, count in enumerate(counts):
            if count:
                up = tall * count / max(counts)
                bars.append(Bar(round(left + i * wide, 1), round(ground - up, 1), round(wide - 0.6, 1), round(up, 1)))
        drawn.append(HistogramRow(label, f"{mean:.3g}", ground, bars))
    return Drawing(
        title=title,
        label=f"{title}: {'; '.join(described)}",
        across=_cut(title, 50),
        up=_cut("count", max(5, (height - _TOP - _BOTTOM) // 6)),
        ticks_across=[
            Tick(round(left + span * (value - low) / (high - low), 1), _tick(value)) for value in ticks(low, high, 5)
        ],
        rows=drawn,
        height=height,
        left=left,
    )


def bin_counts(values: Sequence[float], low: float, high: float, bins: int) -> list[int]:
    """Return the counts in `bins` parts of equal width; the last one holds its upper end too."""
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(bins * (value - low) / (high - low)))] += 1
    return counts
