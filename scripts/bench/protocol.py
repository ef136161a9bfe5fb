"""How the benchmark talks to a contender: a process that trains one step when it is asked to, and waits in between.

One JSON object a line on the process's standard input and output; all that libraries print goes to a log. A request is

    {"do": "step"}                   train a step; "flops" counts them
    {"do": "stop"}                   leave, without the end of the run (validation, export)

and the answer to a step its seconds, from the moment it was asked for to the end of that optimizer step: between two
steps the trainer stands inside its own loop, so all that happens in a step is in it, data and logging too. The first
step is the gate's (see `gate`). Phases are by name; "flops" are those that torch saw.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.phases import Phases

TICKS = os.sysconf("SC_CLK_TCK")


class ContenderFailed(Exception):
    """A contender's process ended by itself."""


# ---------------------------------------------------------------------- in the contender's process


class Steps:
    """Stands between the steps of a trainer: `between` is called before the first and after each."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print
        self.phases = Phases()
        self._began: float | None = None
        self._counting: ExitStack | None = None
        self._flops: Any = None

    def between(self) -> None:
        """Answer for the step that ended, if there was one, and wait until the next one is asked for."""
        if self._began is not None:
            self.phases.close()
            answer: dict[str, Any] = {"seconds": time.perf_counter() - self._began, "phases": self.phases.seconds}
            if self._counting is not None:
                self._counting.close()
                answer["flops"] = self._flops.get_total_flops()
            self._answer(answer)
        else:
            self._answer({"ready": True})
        self._next()

    def _next(self) -> None:
        line = sys.stdin.readline()
        request = json.loads(line) if line.strip() else {"do": "stop"}
        if request["do"] == "stop":
            os._exit(0)
        self.phases.clear()
        self._counting = None
        if request.get("flops"):
            from torch.utils.flop_counter import FlopCounterMode

            self._counting = ExitStack()
            self._flops = self._counting.enter_context(FlopCounterMode(display=False))
        self._began = time.perf_counter()

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


class Unasked(Steps):
    """Of a further process of the same training: it goes along with the first."""

    def __init__(self) -> None:
        self.phases = Phases()

    def between(self) -> None:
        self.phases.clear()


# ---------------------------------------------------------------------- in the benchmark's process


@dataclass(frozen=True)
class Usage:
    """Of a process and its children."""

    cpu: float
    """Seconds."""
    peak: int
    """Bytes: the sum of what each had resident at most."""


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, new = [], [pid]
    while new:
        found += new
        new = [
            int(child)
            for parent in new
            for task in Path(f"/proc/{parent}/task").glob("*")
            for child in _text(task / "children").split()
        ]
    return found


def usage(pid: int) -> Usage:
    """CPU seconds and peak memory of a process and its descendants that live."""
    cpu, peak = 0, 0
    for each in tree(pid):
        fields = _text(Path(f"/proc/{each}/stat")).rpartition(")")[2].split()
        if fields:
            cpu += sum(map(int, fields[11:15]))  # user, system, and those of children that ended
        for line in _text(Path(f"/proc/{each}/status")).splitlines():
            if line.startswith("VmHWM:"):
                peak += 1024 * int(line.split()[1])
    return Usage(cpu / TICKS, peak)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended meanwhile
        return ""


@dataclass
class Process:
    """A contender that runs.

    Args:
        command: What starts it.
        environment: Its environment variables.
        log: Where its output goes.
        cores: The processor cores that it may use.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    cores: Sequence[int]
    seconds_to_start: float = field(init=False)
    """From its start to its being ready for the first step: imports, model, data."""
    _process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Process:
        began = time.perf_counter()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=dict(self.environment),
            )
        os.sched_setaffinity(self._process.pid, self.cores)
        self._receive()
        self.seconds_to_start = time.perf_counter() - began
        return self

    def __exit__(self, *failure: object) -> None:
        if self._process.poll() is None:
            others = tree(self.pid)[1:]  # ranks, workers of rewards: they are left alone by a process that just leaves
            try:
                self._send({"do": "stop"})
                self._process.wait(timeout=20)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def step(self, **how: bool) -> dict[str, Any]:
        """One optimizer step; its seconds and CPU seconds.

        Raises:
            ContenderFailed: the process ended.
        """
        before = self.usage()
        self._send({"do": "step", **how})
        answer = self._receive()
        after = self.usage()
        return answer | {"cpu": after.cpu - before.cpu, "peak": after.peak}

    @property
    def pid(self) -> int:
        return self._process.pid

    def usage(self) -> Usage:
        return usage(self.pid)

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            last = "\n".join(self.log.read_text().splitlines()[-25:])
            raise ContenderFailed(f"{' '.join(self.command)} ended with {code}. The end of {self.log}:\n{last}")
        return json.loads(line)
