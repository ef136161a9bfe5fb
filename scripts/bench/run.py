"""Measure the machine, run a suite, write its results and the page.

    PYTHONPATH=scripts python -m bench.run bench --peer-python .venv-peer/bin/python

After each benchmark its results go to docs/benchmarks/cpu.json, those of `smoke` nowhere unless `--docs` names a
folder. What an earlier run measured on the same machine with the same versions, and this one has not, stays, with its
own commit, day and load: so `--only` measures some benchmarks anew.

Some workloads and some contenders of a suite, in fewer rounds:

    PYTHONPATH=scripts python -m bench.run full --list
    PYTHONPATH=scripts python -m bench.run full --peer-python .venv-peer/bin/python --kept --rounds 2 --steps 3 \\
        --only "C1, prompt 64" DPO SFT --contenders "TRL, default" "threads and memory as train.py's" "lit_rl, float32"
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench import machine, measure, page
from bench.contenders import BASES
from bench.gate import GateError
from bench.protocol import ContenderFailed
from bench.suites import SUITES, Benchmark, only, without_bfloat16


def header(suite: str, place: measure.Place, **settings: int) -> dict[str, Any]:
    """What is the same for all benchmarks of a run: the machine, measured, and the versions.

    Args:
        suite: The name of what runs.
        place: Where.
        settings: How `machine.measure` measures, in place of its defaults.
    """
    print("Measuring what the machine can do ...", flush=True)
    limits = machine.measure(place.device, **settings)
    found = asdict(limits) | {"has_bfloat16": limits.has_bfloat16} | machine.describe(place.device)
    print(f"machine: {found}", flush=True)
    return {"suite": suite, "machine": found, "threads": place.threads, "versions": versions(place.peer_python)}


def of_machine(run: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A benchmark's result with what the machine could do: shared cores are not equally fast at all hours."""
    return result | {"rates": {name: run["machine"][name] for name in ("flops", "copy", "read")}}


def merged(run: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """The run, with those benchmarks of an earlier one, on the same machine, that it has not measured anew."""
    if earlier is None or any(_where(run)[key] != _where(earlier)[key] for key in _where(run)):
        return run
    new = {one["workload"]["name"]: one for one in run["benchmarks"]}
    old = {one["workload"]["name"]: one for one in earlier["benchmarks"]}
    return run | {"benchmarks": list((old | new).values())}


def _where(run: dict[str, Any]) -> dict[str, Any]:
    named = {key: run["machine"].get(key) for key in ("processor", "cores", "torch")}
    return named | {"threads": run["threads"], "versions": run["versions"]}


def save(run: dict[str, Any], file: Path, docs: Path) -> None:
    """Results, page and pictures. Benchmarks that were measured earlier stay, each with its own day and load."""
    earlier = json.loads(file.read_text()) if file.is_file() and run["suite"] != "smoke" else None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(merged(run, earlier), indent=1) + "\n")
    page.write(file.parent, docs / "benchmarks.md", docs / "images" / "benchmarks")


def versions(python: str) -> dict[str, str | None]:
    """Of what the peer runs on; None for what is not there."""
    code = (
        "import importlib.metadata as m, json\n"
        "there = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: there.get(name) for name in ('trl', 'transformers', 'torch')}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def chosen(given: argparse.Namespace) -> list[Benchmark]:
    """The benchmarks of a suite that are asked for, in rounds and turns as they are asked for."""
    found = [
        one
        for one in SUITES[given.suite](BASES[given.base])
        if given.only is None or any(text in one.workload.name for text in given.only)
    ]
    if not found:
        raise SystemExit(f"--only {' '.join(given.only)}: no benchmark of {given.suite} has one of these in its name.")
    named = {"rounds": given.rounds, "steps": given.steps, "resident": given.kept}
    return [replace(one, **{name: value for name, value in named.items() if value is not None}) for one in found]


def contenders_of(benchmarks: Sequence[Benchmark], wanted: Sequence[str] | None) -> list[Benchmark]:
    """The benchmarks with those contenders that are asked for; one that has none of them is left out.

    Raises:
        SystemExit: no benchmark has a contender with such a name; says which text it was.
    """
    if wanted is None:
        return list(benchmarks)
    for text in wanted:
        if not any(only(one, [text]).contenders for one in benchmarks):
            raise SystemExit(f"--contenders {text!r}: nobody has that in the name; --list tells the names.")
    return [some for one in benchmarks if (some := only(one, wanted)).contenders]


def names(benchmarks: Sequence[Benchmark]) -> str:
    """Workloads, and under each its contenders."""
    lines = []
    for one in benchmarks:
        lines.append(f"{one.workload.name}: {one.rounds} rounds of {one.steps} steps")
        lines += [f"    {contender.name}" for contender in one.contenders]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--rounds", type=int, help="rounds, in place of the suite's own")
    parser.add_argument("--steps", type=int, help="timed steps of a turn, in place of the suite's own")
    parser.add_argument("--only", nargs="+", help="only benchmarks with one of these in their name")
    parser.add_argument(
        "--contenders", nargs="+", help="only these: names, or what their names hold; the gate's reference comes along"
    )
    parser.add_argument("--base", choices=list(BASES), default="float32", help="whose techniques are switched off")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process (all cores)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument(
        "--fresh", dest="kept", action="store_false", default=None, help="each turn is a fresh process: more minutes"
    )
    ends.add_argument(
        "--kept", action="store_true", default=None, help="processes wait between turns, in half of the memory at most"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and leave")
    parser.add_argument("--docs", type=Path, help="write results, page and pictures below this folder, not in docs/")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    benchmarks = chosen(given)
    if given.list:
        return print(names(contenders_of(benchmarks, given.contenders)))
    if versions(given.peer_python)["trl"] is None:
        raise SystemExit(f"{given.peer_python} has no TRL: give the interpreter of one that has (--peer-python).")
    contenders_of(benchmarks, given.contenders)  # a wrong name is told before anything is measured
    docs: Path | None = given.docs or (None if given.suite == "smoke" else page.DOCS)
    with tempfile.TemporaryDirectory(prefix="lit_rl_bench_") as root:
        place = measure.Place(Path(root), given.peer_python, "cpu", given.threads)
        torch.set_num_threads(place.threads)
        os.sched_setaffinity(0, place.cores)
        run: dict[str, Any] = header(given.suite, place) | {"benchmarks": []}
        try:
            if not run["machine"]["has_bfloat16"]:
                benchmarks = [without_bfloat16(one) for one in benchmarks]
            for result in measure.run(contenders_of(benchmarks, given.contenders), place):
                run["benchmarks"].append(of_machine(run, result))
                if docs is not None:
                    save(run, docs / "benchmarks" / "cpu.json", docs)
        except (GateError, ContenderFailed) as error:
            raise SystemExit(f"No figures of this workload. {error}") from error
    if docs is not None:
        print(f"{docs / 'benchmarks.md'} is written.")


if __name__ == "__main__":
    main()
