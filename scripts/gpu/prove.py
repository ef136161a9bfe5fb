"""Run the stages of the proof, each in a process and a time box of its own, and print the table.

    python -m gpu.prove OUT [--only STAGE ...] [--docs]

Each stage's rows go to OUT/STAGE.json as they are found, with how it ended and its seconds; where it broke or a check
failed, with what its log says there. The table goes to OUT/table.md. It ends with 1 where a stage broke or a check
failed. Boxes add up to 510 s; `prove.sh` imports for 25 s at most before the first of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from gpu.result import ENDED, SMALL, STAGES, failures, markdown, passed, read_stages, write

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
