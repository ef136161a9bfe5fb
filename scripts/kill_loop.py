"""Kill a run again and again, at random moments and where it hurts most, and hold what it ends with against a run that
nothing killed: weights, optimizer, metrics and samples, bit for bit.

    python scripts/kill_loop.py                      # 50 rounds
    python scripts/kill_loop.py --engine             # and where weights are sent to an engine
    python scripts/kill_loop.py --rounds 3 --seed 7
    python scripts/kill_loop.py algo=ppo trainer.max_steps=40   # further settings of the run
    python scripts/kill_loop.py --ranks 2            # two processes, DDP on gloo: one of them is killed, or both
    python scripts/kill_loop.py --server http://127.0.0.1:8000   # against vLLM, which `lit-rl serve model=tiny` started

A round starts the run in a new folder, kills it with SIGKILL up to `--kills` times, each time at a place of `PLACES`,
goes on with `ckpt_path=last`, and lets it finish. Of two ranks either is killed alone, and the other has to end by
itself within seconds, or both at once; rank 0 starts the others, as Lightning does it. With `--ranks` they have to be
its children, which end with it: start this script by itself, and not from what forks processes in its place, as
tests/warm.py does.
The engine of `--engine` is a process of its own (`EngineApart`), which gets the weights through a pipe: vLLM is not
needed. That of `--server` is vLLM's own, which outlives every kill and serves the run that goes on; the run that
nothing kills is made twice first, to see whether it is the same twice. Rank 0 is forked from this process, which has
loaded the libraries, so that a round of one process takes seconds; it is killed by the kernel like any other. The table
at the end says of each place how often the run was killed for its sign, and in how many of these kills it died there:
the sign still lay about afterwards. Leaves with 1 where a bit differs, or something half-written lies about.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from same_bits import first_difference, measured, same
from torch import nn

from lit_rl import cli
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.cli import hydra_app, schemas  # noqa: F401  # loaded once, before anything is forked
from lit_rl.core.errors import GenerationError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.core.speedups import SpeedupsSetting
from lit_rl.generation.generator import Generator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.vllm.server import VLLMServerGenerator

RUN = [
    "data.task.max_operand=5", "data.task.val_rows=4", "data.prompts_per_rollout=4", "algo.group_size=4",
    "trainer.max_steps=16", "algo.minibatches=2", "trainer.accumulate_grad_batches=2", "logger=none", "eval.limit=2",
    "callbacks.samples.print=0", "callbacks.checkpoint.every_n_train_steps=3",
]  # fmt: skip
"""Eight rollouts of two steps each, and five checkpoints: a second or two with start and end."""

RANKS = ["trainer.accelerator=cpu", "strategy=ddp", "trainer.accumulate_grad_batches=1"]
TRAIN = Path(__file__).parents[1] / "train.py"
SERVER = ["generator=vllm_server"]
ENGINE = ["generator._target_=kill_loop.EngineApart", "allow_targets=[kill_loop]"]

ALONE = 30.0
"""Seconds in which the ranks that were not killed have to end by themselves, on a busy machine."""
_SUBREAPER = 36
"""Of prctl(2)."""

NTH = 3
"""A run is killed at one of the first so many signs of a process: at which, chance decides."""

Signs = Callable[[Path], set[str]]
PLACES: dict[str, Signs | None] = {
    "any moment": None,
    "rollout": lambda run: _text(_note(run, "rollout")),
    "checkpoint": lambda run: _names(run / "checkpoints", "*.partial-*"),
    "new checkpoint": lambda run: _names(run / "checkpoints", "*.ckpt"),
    "export": lambda run: _names(run, ".hf.tmp-*"),
    "summary": lambda run: _names(run, ".summary.json.partial") | _names(run, "hf"),
    "engine sync": lambda run: _text(_note(run, "sync")),
}
"""Where a run is killed: at once when its folder shows a sign that it did not show at the start of the process. Of a
rollout and a sync the sign is a note that lies there as long as they last."""
ONCE = ("export", "summary")
"""Places that a process comes to once."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3, help="of a round, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process of the run")
    parser.add_argument("--engine", action="store_true", help="draw in a process of its own, which weights are sent to")
    parser.add_argument("--server", metavar="URL", help="draw on a server of vLLM that runs, which weights are sent to")
    parser.add_argument("--places", nargs="+", choices=list(PLACES), metavar="PLACE", help=f"of {', '.join(PLACES)}")
    parser.add_argument("settings", nargs="*", help="of the run, beside those of RUN")
    given = parser.parse_args()
    random.seed(given.seed)
    torch.set_num_threads(given.threads)
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # of the ranks that rank 0 starts
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # ranks whose rank 0 is killed become children of this process
    places = given.places or [name for name in PLACES if name != "engine sync" or given.engine or given.server]
    with tempfile.TemporaryDirectory(prefix="kill_loop_") as temporary:
        folder = Path(temporary)
        ranks = [*RANKS, f"trainer.devices={given.ranks}"] if given.ranks > 1 else []
        engine = [*SERVER, f"generator.urls=[{given.server}]"] if given.server else ENGINE if given.engine else []
        run = Run([*RUN, *ranks, *engine, *given.settings], given.ranks)
        whole = folder / "whole"
        wanted, kills, wrong = _unkilled(run, whole), Kills(places), 0
        if given.server:
            again = _difference(wanted, _unkilled(run, folder / "once_more"))
            print(f"Unkilled, twice: {again or 'equal'}", flush=True)
        _load_what_it_loaded(whole)
        for number in range(given.rounds):
            again = folder / f"round{number}"
            at = [_kill_once(run, again, kills) for _ in range(random.randint(1, given.kills))]
            codes = run.start(again).ended()
            left = _half_written(again)
            difference = f"ended with {codes}" if any(codes) else _difference(wanted, measured(again))
            difference = difference or ", ".join(f"{name} is left" for name in left)
            difference = difference or next((name for name in at if name.endswith(STAYED)), "")
            wrong += bool(difference)
            print(f"{number + 1:3}  {difference or 'equal'}  killed: {', '.join(at)}", flush=True)
            if difference:
                print(again.with_suffix(".log").read_text()[-3000:])
            else:
                shutil.rmtree(again)
        equal = f"{given.rounds} rounds, {sum(kills.tried.values())} kills: {given.rounds - wrong} equal, {wrong} not."
        print(f"\n{equal}\n\n{kills.table()}")
    return 1 if wrong else 0


def _unkilled(run: Run, folder: Path) -> dict[str, Any]:
    """Return what the run ends with where nothing kills it."""
    began = time.monotonic()
    if any(codes := run.start(folder).ended()):
        print(folder.with_suffix(".log").read_text())
        raise SystemExit(f"The run itself ended with {codes}.")
    run.seconds = time.monotonic() - began
    return measured(folder)


STAYED = "and the other stayed"


class Kills:
    """Counts of kills at each place.

    Args:
        places: Of `PLACES`; they are taken in turns, in an order that is shuffled for each turn.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self.places = places
        self.tried, self.died = Counter[str](), Counter[str]()
        self._turn: list[str] = []

    def next_place(self) -> str:
        """Return where the next process is killed."""
        if not self._turn:
            self._turn = random.sample(self.places, len(self.places))
        return self._turn.pop()

    def count(self, place: str, there: bool) -> None:
        """Count a process that was killed for the sign of a place; `there` says whether it died there."""
        self.tried[place] += 1
        self.died[place] += there

    def table(self) -> str:
        """Return the table for a page."""
        rows = [f"| {place} | {self.tried[place]} | {self.died[place]} |" for place in self.places]
        return "\n".join(["| place | kills | died there |", "|---|---|---|", *rows])


def _kill_once(run: Run, folder: Path, kills: Kills) -> str:
    """Start the run, or go on with it, and kill it, or one of its ranks; says where."""
    place = kills.next_place()
    signs, nth = PLACES[place], 1 if place in ONCE else random.randint(1, NTH)
    seen = before = signs(folder) if signs else set()
    going = run.start(folder)
    deadline = time.monotonic() + random.uniform(0, run.seconds)
    whom = random.choice([None, *range(run.ranks)]) if run.ranks > 1 else None
    while going.rank(whom or 0) is None or (len(seen) < len(before) + nth if signs else time.monotonic() < deadline):
        if going.has_ended():
            return f"not at {place}: it had finished"
        time.sleep(0.0005)  # who sleeps is awake at once, also on a busy machine
        seen = seen | signs(folder) if signs else seen
    stayed, code = going.killed(whom)
    if code == 0:
        return f"not at {place}: it had finished"
    there = not signs or bool(signs(folder) - before)
    kills.count(place, there)
    whose = "" if run.ranks == 1 else f", {'all ranks' if whom is None else f'rank {whom}'}"
    ended = f", exit code {code}{f', {STAYED}' if stayed else ''}"
    return f"{place}{'' if there else ' (just past it)'}{whose}{ended}"


@dataclass
class Run:
    """The command, and how many processes it takes."""

    command: list[str]
    ranks: int
    seconds: float = 0.0
    """That the whole run took: a random moment is one of them."""

    def start(self, folder: Path) -> Going:
        """Start rank 0, in a group of its own with what it starts."""
        sys.stdout.flush()
        if child := os.fork():
            while os.getpgid(child) == os.getpgrp():  # until it has left our group
                time.sleep(0)
            return Going(child)
        code = 1
        try:
            os.setsid()
            log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            sys.argv = [str(TRAIN)]  # which Lightning starts for other ranks
            _noted(OnPolicyModule, "take_rollout", _note(folder, "rollout"))
            for engine in (EngineApart, VLLMServerGenerator):
                _noted(engine, "sync", _note(folder, "sync"))
            code = cli.run([*self.command, f"run_dir={folder}", "ckpt_path=last"])
            _note(folder, "modules").write_text("\n".join(sys.modules))
        finally:
            os._exit(code)


class Going:
    """A run that was started.

    Args:
        group: Its rank 0, which leads the group of all its processes.
    """

    def __init__(self, group: int) -> None:
        self._group, self._over = group, False
        self._codes: dict[int, int] = {}

    def ended(self) -> list[int]:
        """Return the exit codes, once all have ended: of rank 0, and of those that have stayed longer."""
        while not self.has_ended():
            time.sleep(0.02)
        return list(self._codes.values())

    def has_ended(self) -> bool:
        """Return whether all have. One whose rank 0 is gone is a child of this process."""
        with contextlib.suppress(ChildProcessError):
            while not self._over:
                found, status = os.waitpid(-self._group, os.WNOHANG)
                if not found:
                    return False
                self._codes[found] = os.waitstatus_to_exitcode(status)
        self._over = True
        return True

    def rank(self, number: int) -> int | None:
        """Return the process of a rank; None where it is not there yet."""
        if number == 0:
            return self._group
        with contextlib.suppress(OSError):  # it has ended
            started = Path(f"/proc/{self._group}/task/{self._group}/children").read_text().split()
            return next((int(each) for each in started if f"LOCAL_RANK={number}" in _environment(each)), None)

    def killed(self, whom: int | None) -> tuple[bool, int]:
        """Kill a rank, or all of them, with what they started. Returns whether one of the others stayed, and the exit
        code of rank 0, as a shell has it."""
        if whom is None:
            os.killpg(self._group, signal.SIGKILL)
        elif (process := self.rank(whom)) is not None:
            os.kill(process, signal.SIGKILL)
        until = time.monotonic() + ALONE
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(0.02)
        if stayed := not self.has_ended():
            os.killpg(self._group, signal.SIGKILL)
        self.ended()
        code = self._codes[self._group]
        return stayed, code if code >= 0 else 128 - code


def _environment(process: str) -> list[str]:
    return Path(f"/proc/{process}/environ").read_text().split("\0")


def _difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    return "" if same(wanted, found) else first_difference(wanted, found)[:200]


def _half_written(folder: Path) -> list[str]:
    """Return the lock of a process that was killed once all was done is let lie, and holds nobody."""
    names = sorted(path.name for path in folder.rglob("*"))
    return [name for name in names if (name.startswith(".") or "partial" in name) and name != ".lock"]


def _names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.glob(pattern)}


def _note(folder: Path, name: str) -> Path:
    """Return what a process says of itself: beside the folder of the run."""
    return folder.with_suffix(f".{name}")


def _noted(owner: type, name: str, path: Path) -> None:
    """Let a note lie at `path`, which differs for each call, while this method runs."""
    method = getattr(owner, name)
    calls = itertools.count()

    @functools.wraps(method)
    def noted(*given: Any) -> Any:
        path.write_text(f"call {next(calls)} of process {os.getpid()}")
        try:
            return method(*given)
        finally:
            path.unlink()

    setattr(owner, name, noted)


def _load_what_it_loaded(folder: Path) -> None:
    """Let what is forked from now on find every library loaded, and the schemas of the config registered."""
    schemas.register_stored()
    for name in _note(folder, "modules").read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _text(path: Path) -> set[str]:
    try:
        return {path.read_text()} - {""}
    except FileNotFoundError:
        return set()


# ------------------------------------------- an engine in a process of its own: what a server is to a run, on one core


class EngineApart(Generator):
    """Draws in another process, which has nothing but the weights that are sent to it, one after the other.

    Its samples are those of `NativeGenerator`, whose settings it takes. The process ends with the one that started it.
    """

    reports_kept_mass = True

    def __init__(self, batch_size: int | None = None, speedups: SpeedupsSetting = "auto") -> None:
        self._drawing = NativeGenerator(batch_size, speedups)
        self._pipe: Connection | None = None
        self._process = 0

    def sync(self, policy: nn.Module, version: int) -> None:
        if self._pipe is None:
            self._pipe, self._process = _started(policy, self._drawing)
        for name, weight in policy.state_dict().items():
            _send(self._pipe, ("weight", name, weight))
        _send(self._pipe, ("synced", version))
        _receive(self._pipe)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if self._pipe is None:
            raise GenerationError("EngineApart.generate was called before sync: it holds no policy yet.")
        told = dataclasses.replace(prompts, decode=None, encode=None, on_finished=None)
        _send(self._pipe, ("generate", told, sampling))
        return _receive(self._pipe)

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            os.waitpid(self._process, 0)
        self._pipe = None


def _started(policy: nn.Module, generator: NativeGenerator) -> tuple[Connection, int]:
    ours, its = multiprocessing.Pipe()
    process = os.fork()
    if process == 0:
        ours.close()
        try:
            _engine(its, policy, generator)
        finally:
            os._exit(0)
    its.close()
    return ours, process


def _engine(pipe: Connection, policy: nn.Module, generator: NativeGenerator) -> None:
    """Serve until nobody is at the other end. The policy is this process's own, since it was forked."""
    weights = dict(policy.state_dict())
    try:
        while True:
            what, *given = _receive(pipe)
            if what == "weight":
                weights[given[0]].copy_(given[1])
            elif what == "synced":
                generator.sync(policy, given[0])
                _send(pipe, None)
            else:
                _send(pipe, generator.generate(*given))
    except (EOFError, OSError):
        return


def _send(pipe: Connection, what: Any) -> None:
    pipe.send_bytes(pickle.dumps(what))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


if __name__ == "__main__":
    import kill_loop  # as the config of the run names it: the class that it builds is the one whose calls are noted

    raise SystemExit(kill_loop.main())
