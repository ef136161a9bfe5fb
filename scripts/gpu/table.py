"""The table of a proof, in Markdown, made of its stages' files: what `prove` prints, and docs/benchmarks.md shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STAGES = ("machine", "sound", "kernels", "main_command", "trl", "figures", "step_trace")
"""In the order in which they run."""
ENDED = "ended"
"""A stage that came to its end. Others broke, or ran out of time."""

Found = Mapping[str, Mapping[str, Any]]
"""By stage: rows, how it ended, its seconds, and lines of the log of one in which something failed."""
SHOWN = 15
"""Lines of the log of a stage that did not end."""


def read(folder: Path) -> dict[str, Any]:
    """The files that are there."""
    files = {name: folder / f"{name}.json" for name in STAGES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def passed(found: Found) -> bool:
    """Tell whether every stage that ran came to its end, and no check failed."""
    return all(one["status"] == ENDED and not failures(one) for one in found.values())


def failures(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in one["rows"] if row["passed"] is False]


def markdown(found: Found) -> str:
    """The whole table."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Found) -> Iterator[str]:
    if any(one.get("small") for one in found.values()):
        yield "**A rehearsal in small shapes: its figures mean nothing.**\n"
    if "machine" in found:
        rows = found["machine"]["rows"]
        yield ", ".join(f"{row['what']} {_number(row)}" for row in rows) + ".\n"
    yield "| stage | ended | seconds | of at most | checks passed | not run |"
    yield "|---|---|---|---|---|---|"
    for name, one in found.items():
        checks = [row for row in one["rows"] if row["passed"] is not None]
        good, left_out = (
            sum(row["passed"] for row in checks),
            sum(row["note"].startswith("not run") for row in one["rows"]),
        )
        cells = (name, one["status"], f"{one['seconds']:.0f}", one["box"], f"{good} of {len(checks)}", left_out)
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    for name, one in found.items():
        if name != "machine" and one["rows"]:
            yield from _rows(name, one["rows"])
        if one["status"] != ENDED:
            yield f"The last lines of {name}, which {one['status']}:\n"
            yield "```text"
            yield from one["last_lines"][-SHOWN:]
            yield "```\n"


def _rows(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"| {name} | | bound | | |"
    yield "|---|---|---|---|---|"
    for row in rows:
        verdict = {None: "", True: "passed", False: "**failed**"}[row["passed"]]
        cells = (row["what"], _number(row), row["bound"], verdict, row["note"])
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
    yield ""


def _number(row: Mapping[str, Any]) -> str:
    value = row["value"]
    if not isinstance(value, int | float):
        return value or ""
    text = f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"
    return f"{text} {row['unit']}".strip()
