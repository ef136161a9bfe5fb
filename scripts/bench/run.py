"""Measure the machine, run a suite in rounds, write its results and the page.

    PYTHONPATH=scripts python -m bench.run bench --peer-python .venv-peer/bin/python

After each benchmark its results go to docs/benchmarks/cpu.json, those of `smoke` nowhere unless `--docs` names a
folder. What an earlier run measured on the same machine with the same versions, and this one has not, stays, with its
own commit, day and load: so `--only` measures some benchmarks anew.

Some workloads and some contenders of a suite, in fewer rounds:

    PYTHONPATH=scripts python -m bench.run full --list
    PYTHONPATH=scripts python -m bench.run full --peer-python .venv-peer/bin/python --kept --rounds 2 --steps 3 \\
        --only "C1, prompt 64" DPO SFT --contenders "TRL, default" "threads and memory as train.py's" "lit_rl, float32"

Contenders take turns, A B C and then C B A, so that a neighbour's load falls on all of them. A turn is a few timed
steps after untimed ones; where all rollouts are of the same lengths, it ends after `LONG` seconds with fewer. Where
other processes took more than 5 % of the processor in a turn, its round is given up and begun anew, a few times at
most; what is kept says how much they took.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import page
from bench.bounds import (
    GateError,
    busy_seconds,
    check,
    compare,
    describe_machine,
    machine_memory,
    measure_machine,
    revision,
)
from bench.page import FOREIGN
from bench.protocol import ContenderFailed, Process, read_first_step, tree
from bench.suites import BASES, SUITES, Benchmark, Contender, only, without_bfloat16
from bench.workload import Spec, write

LONG = 30.0
"""Seconds after which a turn takes no further step: bfloat16 without units for it takes ten times as long."""
KEPT = 0.5
"""Share of the memory that processes may have which wait for their next turn, with the one that is measured."""
SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Place:
    """The machine's part in which the benchmark runs."""

    root: Path
    """For files, which are many and large."""
    peer_python: str
    """The interpreter of an environment with TRL."""
    device: str
    threads: int

    @property
    def cores(self) -> list[int]:
        """Return as many cores as threads."""
        return sorted(os.sched_getaffinity(0))[: self.threads]


class Turns:
    """A benchmark that runs.

    Args:
        benchmark: What runs.
        place: Where.
    """

    def __init__(self, benchmark: Benchmark, place: Place) -> None:
        self._benchmark, self._place = benchmark, place
        self._folder = place.root / "workload"
        self._reference: dict[str, Any] | None = None
        self._peer_rounds = 0.0
        self.results: dict[str, dict[str, Any]] = {
            one.name: {
                "side": one.side,
                "dtype": one.dtype,
                "technique": one.technique,
                "role": one.role,
                "settings": one.settings(benchmark.workload),
                "turns": [],
            }
            for one in benchmark.contenders
        }

    def run(self) -> dict[str, Any]:
        """Return all rounds; what came out, as JSON holds it.

        Raises:
            GateError: a contender computes something else.
            ContenderFailed: a process ended.
        """
        benchmark, began, load = self._benchmark, time.time(), os.getloadavg()[0]
        code = revision()
        self._write_files()
        if benchmark.reference is not None:
            self._take_reference(benchmark.reference)
        with Waiting(KEPT * machine_memory() if benchmark.resident and self._is_even else 0) as waiting:
            for number in range(benchmark.rounds):
                self._take_round(number, waiting)
        return {
            "workload": asdict(benchmark.workload),
            "rounds": benchmark.rounds,
            "steps": benchmark.steps,
            "warmups": benchmark.warmups,
            "resident": benchmark.resident,
            "series": benchmark.series,
            "factor": benchmark.factor,
            "code": code,
            "date": f"{datetime.now():%Y-%m-%d}",
            "load": [load, os.getloadavg()[0]],
            "minutes": (time.time() - began) / 60,
            "contenders": self.results,
        }

    def _write_files(self) -> None:
        """Write the workload's files. The model is kept where the last benchmark had one of this shape."""
        mark, shape = self._folder / "shape", self._benchmark.workload.shape
        if not mark.is_file() or mark.read_text() != shape:
            shutil.rmtree(self._folder, ignore_errors=True)
        write(self._benchmark.workload, self._folder)
        mark.write_text(shape)
        gc.collect()

    # ------------------------------------------------------------------ starting

    def _process(self, contender: Contender) -> Process:
        work = self._place.root / "".join(c if c.isalnum() else "_" for c in contender.name)
        shutil.rmtree(work, ignore_errors=True)
        settings = contender.settings(self._benchmark.workload)
        spec = Spec(self._benchmark.workload, self._folder, work, self._place.device, settings)
        paths = [str(SCRIPTS), *([str(SCRIPTS.parent)] if contender.side == "ours" else [])]
        waiting = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment = waiting | {
            "BENCH_SPEC": str(spec.write()),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(contender.threads or self._place.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **contender.environment,
        }
        python = sys.executable if contender.side == "ours" else self._place.peer_python
        command = [python, "-m", f"bench.{contender.side}"]
        return Process(command, environment, work / "log.txt", self._place.cores)

    def _take_reference(self, contender: Contender) -> None:
        """Take what the gate compares with, of a contender that takes no turns."""
        with self._process(contender) as process:
            process.step()
            self._reference = read_first_step(process.log.parent)
        print(f"  gate: against {contender.name}, which takes no turns", flush=True)

    def _begin(self, contender: Contender, process: Process) -> None:
        """Take the gate's step, then the others that do not count."""
        result, folder = self.results[contender.name], process.log.parent
        began = time.perf_counter() - process.seconds_to_start
        process.step()
        result.setdefault("first_step", time.perf_counter() - began)
        if "gate" not in result:
            result["gate"] = self._gate(contender, folder)
            print(f"  gate: {contender.name}: {result['gate']}", flush=True)
        for _ in range(self._benchmark.warmups - 1):
            process.step()

    def _gate(self, contender: Contender, folder: Path) -> dict[str, Any]:
        workload, first = self._benchmark.workload, read_first_step(folder)
        if self._reference is None:
            self._reference = first
        given = Spec(workload, self._folder, folder, self._place.device, {}).given()
        if contender.side == "peer" and contender.dtype == "bfloat16":
            found = compare(self._reference, first, gradients=False).logprobs
            self._peer_rounds = max(self._peer_rounds, found or 0.0)
        return check(contender, workload, first, given, self._reference, self._peer_rounds)

    # ------------------------------------------------------------------ turns

    def _take_round(self, number: int, waiting: Waiting) -> None:
        """Take a turn of each. A loud one ends the round, which begins anew, but for the last time that it may."""
        benchmark = self._benchmark
        for tries in range(1, 2 + benchmark.again):
            turns: dict[str, dict[str, Any]] = {}
            for contender in benchmark.contenders if number % 2 == 0 else benchmark.contenders[::-1]:
                start, begin = partial(self._process, contender), partial(self._begin, contender)
                with waiting.turn(contender.name, start, begin) as process:
                    turn = self._timed(process) | {"round": number, "tries": tries}
                    self._tell(contender, turn)
                    if number == benchmark.rounds - 1 and "flops" not in self.results[contender.name]:
                        self._look_inside(contender, process)
                turns[contender.name] = turn
                if turn["foreign"] > FOREIGN and tries <= benchmark.again:
                    print(f"  round {number + 1} begins anew", flush=True)
                    break
            else:
                for name, turn in turns.items():
                    self.results[name]["turns"].append(turn)
                return

    def _tell(self, contender: Contender, turn: Mapping[str, Any]) -> None:
        median = statistics.median(turn["seconds"])
        where = f"  round {turn['round'] + 1}: {contender.name}"
        print(f"{where}: {median:.3f} s, others {turn['foreign']:.0%}", flush=True)

    def _timed(self, process: Process) -> dict[str, Any]:
        cores, load, own = self._place.cores, os.getloadavg()[0], os.times()
        began, before = time.perf_counter(), busy_seconds(cores)
        answers = [process.step()]
        while len(answers) < self._benchmark.steps and not (self._is_even and time.perf_counter() - began > LONG):
            answers.append(process.step())
        now = os.times()
        wall, ours = time.perf_counter() - began, sum(answer["cpu"] for answer in answers)
        ours += now.user + now.system - own.user - own.system
        foreign = max(0.0, busy_seconds(cores) - before - ours) / (wall * len(cores))
        turn = {name: [answer[name] for answer in answers] for name in ("seconds", "cpu", "phases")}
        return turn | {
            "peak": max(answer["peak"] for answer in answers),
            "foreign": foreign,
            "load": [load, os.getloadavg()[0]],
        }

    @property
    def _is_even(self) -> bool:
        """Return whether every step asks for the same work.

        Then a turn of fewer steps is as good, and so is one of a process that has been further in the rollouts.
        """
        return self._benchmark.workload.lengths == "fixed"

    def _look_inside(self, contender: Contender, process: Process) -> None:
        """Count the FLOPs of a step that nobody times."""
        result = self.results[contender.name]
        result["flops"] = process.step(flops=True)["flops"]
        result["processes"] = len(tree(process.pid))


def results_of(benchmarks: Sequence[Benchmark], place: Place) -> Iterator[dict[str, Any]]:
    """Yield all of them, one after another: what each found out, as soon as it is over."""
    for benchmark in benchmarks:
        print(f"{benchmark.workload.name}: {benchmark.rounds} rounds", flush=True)
        yield Turns(benchmark, place).run()


# ------------------------------------------------------------------------------------------------- processes that wait


class Waiting:
    """Processes by name, the one that was used last at the end.

    Args:
        most: Bytes that they, and the one that is measured, may have together, by the highest that each had.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._running: dict[str, Process] = {}
        self._peaks: dict[str, int] = {}
        self._unknown = 0

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *failure: object) -> None:
        for name in list(self._running):
            self._end(name)

    @property
    def names(self) -> list[str]:
        """Return those that run."""
        return list(self._running)

    @contextmanager
    def turn(self, name: str, start: Callable[[], Process], begin: Callable[[Process], None]) -> Iterator[Process]:
        """Lend the process of this name: the one that waits, or a fresh one, for which the oldest make room.

        Args:
            name: Its name.
            start: Makes it.
            begin: Takes its first steps.
        """
        process = self._running.pop(name, None)
        self._make_room(self._peaks.get(name, self._unknown))
        if process is None:
            process = self._running[name] = start().__enter__()
            begin(process)
        self._running[name] = process
        yield process
        peak = self._peaks[name] = process.usage().peak
        self._unknown = max(self._unknown, peak)
        self._make_room(0)

    def _make_room(self, needed: int) -> None:
        """End the oldest until there is room for so many bytes."""
        while self._running and needed + sum(self._peaks.get(name, 0) for name in self._running) > self._most:
            self._end(next(iter(self._running)))

    def _end(self, name: str) -> None:
        self._running.pop(name).__exit__(None, None, None)


# --------------------------------------------------------------------------------------------------------- the command


def header(suite: str, place: Place, **settings: int) -> dict[str, Any]:
    """Return what is the same for all benchmarks of a run: the machine, measured, and the versions.

    Args:
        suite: The name of what runs.
        place: Where.
        settings: How `measure_machine` measures, in place of its defaults.
    """
    print("Measuring what the machine can do ...", flush=True)
    limits = measure_machine(place.device, **settings)
    found = asdict(limits) | {"has_bfloat16": limits.has_bfloat16} | describe_machine(place.device)
    print(f"machine: {found}", flush=True)
    return {"suite": suite, "machine": found, "threads": place.threads, "versions": versions(place.peer_python)}


def of_machine(run: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return a benchmark's result with what the machine could do: shared cores are not equally fast at all hours."""
    return result | {"rates": {name: run["machine"][name] for name in ("flops", "copy", "read")}}


def merged(run: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return the run, with those benchmarks of an earlier one, on the same machine, that it has not measured anew."""
    if earlier is None or any(_where(run)[key] != _where(earlier)[key] for key in _where(run)):
        return run
    new = {one["workload"]["name"]: one for one in run["benchmarks"]}
    old = {one["workload"]["name"]: one for one in earlier["benchmarks"]}
    return run | {"benchmarks": list((old | new).values())}


def _where(run: dict[str, Any]) -> dict[str, Any]:
    named = {key: run["machine"].get(key) for key in ("processor", "cores", "torch")}
    return named | {"threads": run["threads"], "versions": run["versions"]}


def save(run: dict[str, Any], file: Path, docs: Path) -> None:
    """Write results, page and pictures. Benchmarks measured earlier stay, each with its own day and load."""
    earlier = json.loads(file.read_text()) if file.is_file() and run["suite"] != "smoke" else None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(merged(run, earlier), indent=1) + "\n")
    page.write(file.parent, docs / "benchmarks.md", docs / "images" / "benchmarks")


def versions(python: str) -> dict[str, str | None]:
    """Return the versions that the peer runs on; None for what is not there."""
    code = (
        "import importlib.metadata as m, json\n"
        "there = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: there.get(name) for name in ('trl', 'transformers', 'torch')}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def chosen(given: argparse.Namespace) -> list[Benchmark]:
    """Return the benchmarks of a suite that are asked for, in rounds and turns as they are asked for."""
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
    """Return the benchmarks with those contenders that are asked for; one that has none of them is left out.

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
    """Return workloads, and under each its contenders, as lines."""
    lines = []
    for one in benchmarks:
        lines.append(f"{one.workload.name}: {one.rounds} rounds of {one.steps} steps")
        lines += [f"    {contender.name}" for contender in one.contenders]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Return the command line."""
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
        place = Place(Path(root), given.peer_python, "cpu", given.threads)
        torch.set_num_threads(place.threads)
        os.sched_setaffinity(0, place.cores)
        run: dict[str, Any] = header(given.suite, place) | {"benchmarks": []}
        try:
            if not run["machine"]["has_bfloat16"]:
                benchmarks = [without_bfloat16(one) for one in benchmarks]
            for result in results_of(contenders_of(benchmarks, given.contenders), place):
                run["benchmarks"].append(of_machine(run, result))
                if docs is not None:
                    save(run, docs / "benchmarks" / "cpu.json", docs)
        except (GateError, ContenderFailed) as error:
            raise SystemExit(f"No figures of this workload. {error}") from error
    if docs is not None:
        print(f"{docs / 'benchmarks.md'} is written.")


if __name__ == "__main__":
    main()
