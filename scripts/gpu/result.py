"""The rows that a stage finds, in a JSON file that is written anew after each: a stage that breaks loses none."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

SMALL = bool(os.environ.get("PROOF_SMALL"))
"""A rehearsal: tiny shapes."""
TRACE = 15
"""Lines of a traceback that a row keeps."""


@dataclass(frozen=True)
class Row:
    """A figure; with a bound, a check."""

    what: str
    value: float | str | None = None
    unit: str = ""
    bound: str = ""
    passed: bool | None = None
    """None where nothing was to be passed."""
    note: str = ""
    trace: tuple[str, ...] = ()
    """The last lines of the traceback of a part that broke."""


class Result:
    """Rows of a stage.

    Args:
        file: Where they go.
    """

    def __init__(self, file: Path) -> None:
        self._file, self.folder = file, file.parent
        self.rows: list[Row] = []

    def figure(self, what: str, value: float | str, unit: str = "", note: str = "") -> None:
        """Add a number that no bound holds."""
        self._add(Row(what, value, unit, note=note))

    def check(
        self,
        what: str,
        value: float | None,
        *,
        most: float = math.inf,
        least: float = -math.inf,
        unit: str = "",
        note: str = "",
    ) -> None:
        """Add a number that has to lie within bounds. None, where nothing was compared, and NaN lie within none."""
        value = math.nan if value is None else float(value)
        bounds = [f">= {least:g}"] * (least > -math.inf) + [f"<= {most:g}"] * (most < math.inf)
        self._add(Row(what, value, unit, " and ".join(bounds), bool(least <= value <= most), note))

    def not_run(self, what: str, reason: str) -> None:
        """Say why a part was left out."""
        self._add(Row(what, note=f"not run: {reason}"))

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """A part that breaks is a check that failed; the next ones are run all the same."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            said = (str(error).strip().splitlines() or [""])[0]
            trace = tuple(line[:300] for line in traceback.format_exc().splitlines()[-TRACE:])
            note = f"broke: {type(error).__name__}: {said[:300]}"
            self._add(Row(what, passed=False, bound="runs", note=note, trace=trace))

    @property
    def left(self) -> float:
        """Seconds that the stage still has."""
        return float(os.environ.get("PROOF_UNTIL", "inf")) - time.time()

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)
        write(self._file, {"rows": [asdict(each) for each in self.rows]})


def write(file: Path, found: Mapping[str, object]) -> None:
    """Write a JSON file whole or not at all."""
    half = file.with_suffix(".tmp")
    half.write_text(json.dumps(found, indent=1) + "\n")
    half.replace(file)


def stage(run: Callable[[Result, Path], None]) -> None:
    """Run a stage as a program: `python -m gpu.NAME FILE WORK`.

    Args:
        run: Takes the result to fill, and the folder that stages share, with models in it.
    """
    file, work = map(Path, sys.argv[1:])
    run(Result(file), work)
