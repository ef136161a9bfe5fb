"""Medians, ratios and shares of the limit, from the results of `run`: arithmetic only.

A contender's seconds are the median over rounds of the median step of each; a ratio is one of such medians, and its
interval the lowest and highest ratio of a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.bounds import Bound, Work
from bench.workload import Workload

FOREIGN = 0.05
"""Share of the processor that others may take in a turn."""

Result = Mapping[str, Any]
"""One benchmark, as `Turns.run` gives it."""


@dataclass(frozen=True)
class Spread:
    """A number, and the lowest and highest of its rounds."""

    middle: float
    low: float
    high: float


def of_rounds(result: Result, name: str, what: str = "seconds") -> dict[int, float]:
    """Return the median step of each round."""
    return {turn["round"]: statistics.median(turn[what]) for turn in result["contenders"][name]["turns"]}


def spread(result: Result, name: str, what: str = "seconds") -> Spread:
    """Return seconds of a step, or CPU seconds."""
    rounds = list(of_rounds(result, name, what).values())
    return Spread(statistics.median(rounds), min(rounds), max(rounds))


def ratio(result: Result, slower: str, faster: str, what: str = "seconds") -> Spread:
    """Return how many times as long one takes."""
    a, b = of_rounds(result, slower, what), of_rounds(result, faster, what)
    rounds = [a[number] / b[number] for number in a if number in b]
    middle = statistics.median(a.values()) / statistics.median(b.values())
    return Spread(middle, min(rounds), max(rounds))


def fastest(result: Result, *roles: str) -> str | None:
    """Return the name of the peer's fastest setting of some roles, "default" or "tuned"; None where none takes part."""
    names = [name for name, one in result["contenders"].items() if one["role"] in roles]
    return min(names, key=lambda name: spread(result, name).middle) if names else None


def default(result: Result) -> str | None:
    """Return the peer as it comes: the fastest of its ways to wait."""
    return fastest(result, "default")


def tuned(result: Result) -> str | None:
    """Return the fastest of all settings of the peer, the default too."""
    return fastest(result, "default", "tuned")


def ours(result: Result) -> list[str]:
    """Return our contenders with every technique on."""
    return [name for name, one in result["contenders"].items() if one["side"] == "ours" and one["technique"] is None]


def is_compared(result: Result) -> bool:
    """Return whether ours and the peer as it comes both take part."""
    return bool(ours(result)) and default(result) is not None


def phases(result: Result, name: str) -> dict[str, float]:
    """Return median seconds of each phase; "train" is what is left of the step."""
    one = result["contenders"][name]
    steps = [(s, p) for turn in one["turns"] for s, p in zip(turn["seconds"], turn["phases"])]
    names = ("generate", "reward", "optimize")
    found = {phase: statistics.median(p.get(phase, 0.0) for _, p in steps) for phase in names}
    return found | {"train": statistics.median(s - sum(p.values()) for s, p in steps)}


def peak(result: Result, name: str) -> float:
    """Return highest memory of any turn, bytes."""
    return max(turn["peak"] for turn in result["contenders"][name]["turns"])


def work_of(result: Result) -> list[Work]:
    """Return what each of the timed rollouts asked for."""
    workload = Workload(**result["workload"])
    first = result["warmups"]
    count = result["steps"] if workload.lengths == "variable" else 1
    return [Work.of(workload, first + number) for number in range(count)]


def limit(result: Result, machine: Mapping[str, Any]) -> Bound:
    """Return the bound of the median rollout."""
    bounds = [work.bound(*rates(machine)) for work in work_of(result)]
    return sorted(bounds, key=lambda bound: bound.step)[len(bounds) // 2]


def rates(machine: Mapping[str, Any]) -> tuple[float, float]:
    """Return FLOP/s and bytes/s, the best that were measured."""
    return max(machine["flops"].values()), max(machine["copy"], machine["read"])


def share_of_limit(result: Result, name: str, machine: Mapping[str, Any]) -> float:
    """Return the bound of a contender's step over its seconds."""
    return limit(result, machine).step / spread(result, name).middle


def noisy(result: Result, allowed: float) -> tuple[int, int]:
    """Count turns in which others took more of the processor, and all turns."""
    turns = [turn for one in result["contenders"].values() for turn in one["turns"]]
    return sum(turn["foreign"] > allowed for turn in turns), len(turns)


def series(results: Sequence[Result], axis: str) -> list[Result]:
    """Return the points of cost against work, the least work first."""
    return sorted((r for r in results if r["series"] == axis), key=lambda r: r["factor"])
