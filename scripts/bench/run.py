"""Measure the machine, run a suite, write its results and the page.

    PYTHONPATH=scripts python -m bench.run bench --peer-python .venv-peer/bin/python

The results of `bench` and `full` go to docs/benchmarks/cpu.json, those of `gpu` to gpu.json; of `smoke` nowhere unless
`--docs` names a folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from bench import machine, measure, page
from bench.gate import GateError
from bench.protocol import ContenderFailed
from bench.suites import SUITES, Benchmark, without_peer


def measured(suite: str, benchmarks: Sequence[Benchmark], place: measure.Place, **limits: int) -> dict[str, Any]:
    """Everything that a run finds out.

    Args:
        suite: The name of what runs.
        benchmarks: What runs.
        place: Where.
        limits: How `machine.measure` measures, in place of its defaults.
    """
    before = os.getloadavg()[0]
    found = dataclasses.asdict(machine.measure(place.device, **limits)) | machine.describe(place.device)
    print(f"machine: {found}", flush=True)
    if place.device == "cuda":
        torch.cuda.empty_cache()
    results = measure.run(benchmarks, place)
    return {
        "suite": suite,
        "date": f"{datetime.now():%Y-%m-%d}",
        "machine": found,
        "threads": place.threads,
        "load": [before, os.getloadavg()[0]],
        "versions": versions(place.peer_python),
        "benchmarks": results,
    }


def versions(python: str) -> dict[str, str | None]:
    """Of what the peer runs on; None for what is not there."""
    code = (
        "import importlib.metadata as m, json\n"
        "there = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: there.get(name) for name in ('trl', 'transformers', 'torch')}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def chosen(suite: str, rounds: int | None, only: str | None) -> list[Benchmark]:
    """The benchmarks of a suite, in rounds of one's own, those whose name holds a text."""
    found = [one for one in SUITES[suite]() if only is None or only in one.workload.name]
    if not found:
        raise SystemExit(f"--only {only}: no benchmark of {suite} has that in its name.")
    return [one if rounds is None else dataclasses.replace(one, rounds=rounds) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--rounds", type=int, help="rounds, in place of the suite's own")
    parser.add_argument("--only", help="only benchmarks with this in their name")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process (all cores)")
    parser.add_argument("--fresh", action="store_true", help="one process at a time: less memory, more minutes")
    parser.add_argument("--docs", type=Path, help="write results, page and pictures below this folder, not in docs/")
    given = parser.parse_args()
    kind = "gpu" if given.suite == "gpu" else "cpu"
    if kind == "gpu" and not torch.cuda.is_available():
        raise SystemExit("bench gpu needs a GPU that torch sees; `make bench` measures on the CPU.")
    benchmarks = chosen(given.suite, given.rounds, given.only)
    if given.fresh:
        benchmarks = [dataclasses.replace(one, resident=False) for one in benchmarks]
    if versions(given.peer_python)["trl"] is None:
        if kind == "cpu":
            raise SystemExit(f"{given.peer_python} has no TRL: give the interpreter of one that has (--peer-python).")
        benchmarks = [without_peer(one) for one in benchmarks]
    with tempfile.TemporaryDirectory(prefix="lit_rl_bench_") as root:
        device = "cuda" if kind == "gpu" else "cpu"
        place = measure.Place(Path(root), given.peer_python, device, given.threads)
        torch.set_num_threads(place.threads)
        os.sched_setaffinity(0, place.cores)
        try:
            run = measured(given.suite, benchmarks, place)
        except (GateError, ContenderFailed) as error:
            raise SystemExit(f"No figures. {error}") from error
    if given.suite == "smoke" and given.docs is None:
        return
    docs = given.docs or page.DOCS
    (docs / "benchmarks").mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks" / f"{kind}.json").write_text(json.dumps(run, indent=1) + "\n")
    page.write(docs / "benchmarks", docs / "benchmarks.md", docs / "images" / "benchmarks")
    print(f"{docs / 'benchmarks.md'} is written.")


if __name__ == "__main__":
    main()
