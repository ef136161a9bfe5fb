"""The talk of the benchmark with a contender: a process that trains one step when it is asked to, and waits in between.

One JSON object a line on the process's standard input and output; all that libraries print goes to a log. A request is

    {"do": "step"}                   train a step; "flops" counts them
    {"do": "stop"}                   leave, without the end of the run (validation, export)

and the answer to a step its seconds, from the moment it was asked for to the end of that optimizer step: between two
steps the trainer stands inside its own loop, so all that happens in a step is in it, data and logging too. Phases are
by name; "flops" are those that torch saw. The first step is the gate's (see `bounds`): of it the contender writes down
its loss, the log-probs of its tokens and its gradient.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Phases:
    """Seconds by phase, of the step that runs.

    Phases of a GPU overlap unless it is waited for at their borders, which makes a step slower: `exact` waits.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self.exact = False
        self.seconds: dict[str, float] = {}
        self._open: tuple[str, float] | None = None

    def clear(self) -> None:
        self.seconds, self._open = {}, None

    def now(self) -> float:
        if self.exact:
            self._synchronize()
        return time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, its seconds added to a phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(name, self.now() - before)

        return call

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def until_the_end(self, name: str) -> None:
        """Count what follows, to the end of the step, as this phase."""
        self._open = name, self.now()

    def close(self) -> None:
        """End the step."""
        if self._open is not None:
            name, began = self._open
            self.add(name, self.now() - began)
            self._open = None


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
    """The further process of a training, which goes along with the first."""

    def __init__(self) -> None:
        self.phases = Phases()

    def between(self) -> None:
        self.phases.clear()


# ---------------------------------------------------------------------- in the benchmark's process


@dataclass(frozen=True)
class Usage:
    """CPU time and memory of a process and its children."""

    cpu: float
    """Seconds."""
    peak: int
    """Bytes: the sum of what each had resident at most."""


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
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
    """Return CPU seconds and peak memory of a process and its descendants that live."""
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
        """Return one optimizer step; its seconds and CPU seconds.

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


# ---------------------------------------------------------------------------------------- the first step, written down


class FirstStep:
    """Collects while the first step runs, then writes to a folder and collects no more."""

    def __init__(self) -> None:
        self.open = True
        self.loss = 0.0
        self.logprobs: dict[str, list[float]] = {}

    def add_loss(self, share: Tensor) -> None:
        """Add a micro-batch's share of the step's loss."""
        if self.open:
            self.loss += float(share)

    def add_logprobs(self, ids: Tensor, logprobs: Tensor, mask: Tensor) -> None:
        """Add `logprobs` of rows of `ids` where `mask` is true, all `(b, t)`. A row is known by its tokens."""
        if self.open:
            for row, values, there in zip(ids, logprobs.detach().float(), mask.bool()):
                self.logprobs[key_of(row[there].tolist())] = values[there].tolist()

    def add_gradient(self, named: Iterable[tuple[str, Tensor]], folder: Path, *, whole: bool = True) -> None:
        """Add the gradient as it is before clipping; what was collected is written, and the step is over.

        Args:
            named: Gradients by parameter.
            folder: Where to.
            whole: Whether this process took the loss of all rows. Of a part there is no loss to compare.
        """
        if not self.open:
            return
        from safetensors.torch import save_file

        self.open = False
        gradient = {name: grad.detach().float().cpu().contiguous() for name, grad in named}
        save_file(gradient, folder / "gradient.safetensors")
        (folder / "first_step.json").write_text(
            json.dumps({"loss": self.loss if whole else None, "logprobs": self.logprobs})
        )


def key_of(ids: Sequence[int]) -> str:
    """Return the name of a completion."""
    return " ".join(map(str, ids))


def read_first_step(folder: Path) -> dict[str, Any]:
    """Return loss and log-probs of `FirstStep`, and under "gradient" the file, to be read tensor by tensor."""
    from safetensors import safe_open

    return json.loads((folder / "first_step.json").read_text()) | {
        "gradient": safe_open(folder / "gradient.safetensors", framework="pt")
    }


def cosine_and_ratio(one: Any, other: Any) -> tuple[float, float]:
    """Return the cosine of two gradients, and the norm of the second over that of the first.

    Raises:
        KeyError: a tensor of one has no counterpart, which says which.
    """
    names = set(one.keys()) ^ set(other.keys())
    if names:
        raise KeyError(f"only one side has a gradient of {', '.join(sorted(names)[:5])}")
    dot = torch.zeros(3, dtype=torch.float64)
    for name in one.keys():  # noqa: SIM118 (a file, no dict)
        a, b = one.get_tensor(name).double().flatten(), other.get_tensor(name).double().flatten()
        dot += torch.stack([a @ b, a @ a, b @ b])
    return float(dot[0] / (dot[1] * dot[2]).sqrt()), float((dot[2] / dot[1]).sqrt())
