"""Rounds: contenders take turns, A B C and then C B A, so that a neighbour's load falls on all of them.

A turn is a few timed steps after untimed ones; where all rollouts are of the same lengths, it ends after `LONG` seconds
with fewer. Where other processes took more than 5 % of the processor in a turn, its round is given up and begun anew, a
few times at most; what is kept says how much they took.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench import gate, machine, record
from bench.contenders import Contender
from bench.protocol import Process, tree
from bench.revision import revision
from bench.suites import Benchmark
from bench.waiting import Waiting
from bench.workload import Spec, write

FOREIGN = 0.05
"""Share of the processor that others may take in a turn."""
LONG = 30.0
"""Seconds after which a turn takes no further step: bfloat16 without units for it takes ten times as long."""
KEPT = 0.5
"""Share of the memory that processes may have which wait for their next turn, with the one that is measured."""
SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Place:
    """Where the benchmark runs."""

    root: Path
    """For files, which are many and large."""
    peer_python: str
    """The interpreter of an environment with TRL."""
    device: str
    threads: int

    @property
    def cores(self) -> list[int]:
        """As many cores as threads."""
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
        """All rounds; what came out, as JSON holds it.

        Raises:
            GateError: a contender computes something else.
            ContenderFailed: a process ended.
        """
        benchmark, began, load = self._benchmark, time.time(), os.getloadavg()[0]
        code = revision()
        self._write_files()
        if benchmark.reference is not None:
            self._take_reference(benchmark.reference)
        with Waiting(KEPT * machine.memory() if benchmark.resident and self._is_even else 0) as waiting:
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
        """The workload's files. The model is kept where the last benchmark had one of this shape."""
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
        """What the gate compares with, of a contender that takes no turns."""
        with self._process(contender) as process:
            process.step()
            self._reference = record.read(process.log.parent)
        print(f"  gate: against {contender.name}, which takes no turns", flush=True)

    def _begin(self, contender: Contender, process: Process) -> None:
        """The gate's step, then the others that do not count."""
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
        workload, first = self._benchmark.workload, record.read(folder)
        if self._reference is None:
            self._reference = first
        given = Spec(workload, self._folder, folder, self._place.device, {}).given()
        if contender.side == "peer" and contender.dtype == "bfloat16":
            found = gate.compare(self._reference, first, gradients=False).logprobs
            self._peer_rounds = max(self._peer_rounds, found or 0.0)
        return gate.check(contender, workload, first, given, self._reference, self._peer_rounds)

    # ------------------------------------------------------------------ turns

    def _take_round(self, number: int, waiting: Waiting) -> None:
        """A turn of each. A loud one ends the round, which begins anew, but for the last time that it may."""
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
        began, before = time.perf_counter(), machine.busy(cores)
        answers = [process.step()]
        while len(answers) < self._benchmark.steps and not (self._is_even and time.perf_counter() - began > LONG):
            answers.append(process.step())
        now = os.times()
        wall, ours = time.perf_counter() - began, sum(answer["cpu"] for answer in answers)
        ours += now.user + now.system - own.user - own.system
        foreign = max(0.0, machine.busy(cores) - before - ours) / (wall * len(cores))
        turn = {name: [answer[name] for answer in answers] for name in ("seconds", "cpu", "phases")}
        return turn | {
            "peak": max(answer["peak"] for answer in answers),
            "foreign": foreign,
            "load": [load, os.getloadavg()[0]],
        }

    @property
    def _is_even(self) -> bool:
        """Whether every step asks for the same work.

        Then a turn of fewer steps is as good, and so is one of a process that has been further in the rollouts.
        """
        return self._benchmark.workload.lengths == "fixed"

    def _look_inside(self, contender: Contender, process: Process) -> None:
        """A step that nobody times: FLOPs executed."""
        result = self.results[contender.name]
        result["flops"] = process.step(flops=True)["flops"]
        result["processes"] = len(tree(process.pid))


def run(benchmarks: Sequence[Benchmark], place: Place) -> Iterator[dict[str, Any]]:
    """All of them, one after another: what each found out, as soon as it is over."""
    for benchmark in benchmarks:
        print(f"{benchmark.workload.name}: {benchmark.rounds} rounds", flush=True)
        yield Turns(benchmark, place).run()
