"""Run the stages of the proof, each in a process and a time box of its own, and print the table.

    python -m gpu.prove OUT [--only STAGE ...] [--docs]

A stage writes a row as soon as it has found it, to OUT/STAGE.json, anew each time, so that one that breaks loses none;
with how it ended and its seconds; where it broke or a check failed, with what its log says there. The table goes to
OUT/table.md, and docs/benchmarks.md shows it. It ends with 1 where a stage broke or a check failed. Boxes add up to
510 s; `prove.sh` imports for 25 s at most before the first of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# --------------------------------------------------------------------------------------------------- what a stage finds


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
        """Let a part that breaks be a check that failed; the next ones are run all the same."""
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
        """Return seconds that the stage still has."""
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


def stage(stages: Mapping[str, Callable[[Result, Path], None]]) -> None:
    """Run a stage as a program: `python -m gpu.MODULE STAGE FILE WORK`.

    Args:
        stages: By name; each takes the result to fill, and the folder that stages share, with models in it.
    """
    name, file, work = sys.argv[1:]
    stages[name](Result(Path(file)), Path(work))


# ------------------------------------------------------------------------------------------------------------ the table


STAGES = ("machine", "sound", "kernels", "main_command", "trl", "figures", "step_trace")
"""In the order in which they run."""
ENDED = "ended"
"""A stage that came to its end. Others broke, or ran out of time."""

Found = Mapping[str, Mapping[str, Any]]
"""By stage: rows, how it ended, its seconds, and lines of the log of one in which something failed."""
SHOWN = 15
"""Lines of the log of a stage that did not end."""


def read_stages(folder: Path) -> dict[str, Any]:
    """Return the files that are there."""
    files = {name: folder / f"{name}.json" for name in STAGES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def passed(found: Found) -> bool:
    """Tell whether every stage that ran came to its end, and no check failed."""
    return all(one["status"] == ENDED and not failures(one) for one in found.values())


def failures(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in one["rows"] if row["passed"] is False]


def markdown(found: Found) -> str:
    """Return the whole table."""
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


# ----------------------------------------------------------------------------------------------------------- the stages


ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "benchmarks" / "gpu"
BOXES = {"machine": 30, "sound": 70, "kernels": 75, "main_command": 120, "trl": 110, "figures": 60, "step_trace": 45}
"""Seconds. A rehearsal has `SLOW` times as many: here are two cores, shared."""
SLOW = 6
LAST, BEFORE = 150, 40
"""Lines that are kept of a log in which something failed: the last ones, and those before each row that failed."""
ON_A_CPU = ("trl",)
"""In a rehearsal on the pretended GPU: PyTorch has a CPU kernel of all that ours asks for, not of all that TRL does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument(
        "--docs", action="store_true", help="put the results into docs/benchmarks/gpu, and write docs/benchmarks.md"
    )
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lit_rl_proof_") as work:
        for name in STAGES:
            if name in given.only:
                box = BOXES[name] * (SLOW if SMALL else 1)
                module = "gpu.checks" if name in ("sound", "kernels") else "gpu.speed"
                command = [sys.executable, "-m", module, name, str(out / f"{name}.json"), work]
                more = {"PRETEND": ""} if SMALL and name in ON_A_CPU else {}
                run_stage(name, command, out, box, more)
    found = read_stages(out)
    text = markdown(found)
    (out / "table.md").write_text(text)
    print(text)
    if given.docs:
        from bench import page

        DOCS.mkdir(parents=True, exist_ok=True)
        for stage in found:
            shutil.copy(out / f"{stage}.json", DOCS)
        page.write(page.RESULTS, page.PAGE, page.PICTURES)
    sys.exit(0 if passed(found) else 1)


def run_stage(name: str, command: list[str], out: Path, box: float, environment: Mapping[str, str] = {}) -> None:
    """Run a stage, which writes rows to `OUT/NAME.json`; how it ended is added there.

    It is killed with all that it started once its time is over: a signal that asks would be taken for a wish to save.
    """
    file, began = out / f"{name}.json", time.perf_counter()
    file.unlink(missing_ok=True)
    print(f"{name}: at most {box:g} s ...", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment, "PROOF_UNTIL": str(time.time() + box)},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=box)
            status = ENDED if code == 0 else f"broke with {code}"
        except subprocess.TimeoutExpired:
            status = "ran out of time"
        finally:
            kill(process)
        log.seek(0)
        lines = [line.rstrip()[:300] for line in log]
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    told = {"status": status, "seconds": time.perf_counter() - began, "box": box, "small": SMALL, "rows": rows}
    good = status == ENDED and not failures(told)
    write(file, told | ({} if good else {"last_lines": excerpt(lines)}))
    print(f"{name}: {status} after {told['seconds']:.0f} s", flush=True)


def excerpt(lines: list[str]) -> list[str]:
    """Return what is kept of a log: its end, and what stands before the row of each part that failed."""
    ends = [number + 1 for number, line in enumerate(lines) if line.startswith("Row(") and "passed=False" in line]
    kept = {*range(max(0, len(lines) - LAST), len(lines))}
    kept.update(number for end in ends for number in range(max(0, end - BEFORE), end))
    return [lines[number] for number in sorted(kept)]


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which are of its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


if __name__ == "__main__":
    main()
