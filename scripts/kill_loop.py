"""Kill a run again and again, at random moments and where it hurts most, and hold what it ends with against a run that
nothing killed: weights, optimizer, metrics and samples, bit for bit.

    python scripts/kill_loop.py                      # 50 rounds: some ten minutes of one core
    python scripts/kill_loop.py --rounds 3 --seed 7
    python scripts/kill_loop.py algo=ppo trainer.max_steps=40   # further settings of the run
    python scripts/kill_loop.py --ranks 2            # two processes, DDP on gloo: one of them is killed, or both
    python scripts/kill_loop.py --engine --places "engine sync"   # where weights are sent to an engine

A round starts the run in a new folder, kills it with SIGKILL up to `--kills` times, each time at a place of `PLACES`,
goes on with `ckpt_path=last`, and lets it finish. Of two ranks either is killed alone, and the other has to end by
itself within seconds, or both at once; rank 0 starts the others, as Lightning does it. The engine of `--engine` is a
process of its own (`engine_apart.py`), which gets the weights through a pipe: vLLM is not needed, and not tried. Rank 0
is forked from this one, which has loaded the libraries, so that a round of one process takes seconds; it is killed by
the kernel like any other. Leaves with 1 where a bit differs, or something half-written lies about.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_apart import SIGN
from same_bits import first_difference, measured, same

from lit_rl import cli
from lit_rl.cli import hydra_app  # noqa: F401  # loaded once, before anything is forked

RUN = [
    "data.task.max_operand=5", "data.task.val_rows=4", "data.prompts_per_rollout=4", "algo.group_size=4",
    "trainer.max_steps=28", "algo.minibatches=2", "trainer.accumulate_grad_batches=2", "logger=none", "eval.limit=2",
    "callbacks.samples.print=0", "callbacks.checkpoint.every_n_train_steps=3",
]  # fmt: skip
"""A run of a second beside its start and end."""

RANKS = ["trainer.accelerator=cpu", "strategy=ddp", "trainer.accumulate_grad_batches=1"]
TRAIN = Path(__file__).parents[1] / "train.py"
ENGINE = ["generator._target_=engine_apart.EngineApart", "allow_targets=[engine_apart]"]

LONGEST, LONGEST_OF_RANKS = 4.0, 20.0
"""Seconds from the start of a process: a random moment is before. A rank that is started loads the libraries."""
ALONE = 30.0
"""Seconds in which the ranks that were not killed have to end by themselves, on a busy machine."""
_SUBREAPER = 36
"""Of prctl(2)."""

Signs = Callable[[Path], set[str]]
PLACES: dict[str, Signs | None] = {
    "any moment": None,
    "rollout": lambda run: {str(_lines(run / "metrics.jsonl") // 3)} - {"0"},
    "checkpoint": lambda run: _names(run / "checkpoints", "*.partial-*"),
    "new checkpoint": lambda run: _names(run / "checkpoints", "*.ckpt"),
    "export": lambda run: _names(run, ".hf.tmp-*"),
    "summary": lambda run: _names(run, ".summary.json.partial") | _names(run, "hf"),
    "engine sync": lambda run: _text(_sign(run)) - {"0"},
}
"""Where a run is killed: at once when its folder shows a sign that it did not show at the start of the process."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3, help="of a round, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run")
    parser.add_argument("--engine", action="store_true", help="draw in a process of its own, which weights are sent to")
    parser.add_argument("--places", nargs="+", choices=list(PLACES), metavar="PLACE", help=f"of {', '.join(PLACES)}")
    parser.add_argument("settings", nargs="*", help="of the run, beside those of RUN")
    given = parser.parse_args()
    random.seed(given.seed)
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # ranks whose rank 0 is killed become children of this process
    places = given.places or [name for name in PLACES if name != "engine sync" or given.engine]
    with tempfile.TemporaryDirectory(prefix="kill_loop_") as temporary:
        folder = Path(temporary)
        ranks = [*RANKS, f"trainer.devices={given.ranks}"] if given.ranks > 1 else []
        run = Run([*RUN, *ranks, *(ENGINE if given.engine else []), *given.settings], given.ranks)
        whole = folder / "whole"
        if any(codes := run.start(whole).ended()):
            print((folder / "whole.log").read_text())
            raise SystemExit(f"The run itself ended with {codes}.")
        wanted, killed, wrong = measured(whole), Counter[str](), 0
        for number in range(given.rounds):
            again = folder / f"round{number}"
            at = [_kill_once(run, again, places, killed) for _ in range(random.randint(1, given.kills))]
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
        print("\n".join(["", "| killed at | times |", "|---|---|", *(f"| {at} | {n} |" for at, n in killed.items())]))
        print(f"\n{given.rounds} rounds, {sum(killed.values())} kills: {given.rounds - wrong} equal, {wrong} not.")
    return 1 if wrong else 0


STAYED = "and the other stayed"


def _kill_once(run: Run, folder: Path, places: Sequence[str], killed: Counter[str]) -> str:
    """Start the run, or go on with it, and kill it, or one of its ranks; says where."""
    name, longest = random.choice(places), LONGEST if run.ranks == 1 else LONGEST_OF_RANKS
    signs, deadline = PLACES[name], time.monotonic() + random.uniform(0, longest)
    before = signs(folder) if signs else set()
    going = run.start(folder)
    whom = random.choice([None, *range(run.ranks)]) if run.ranks > 1 else None
    while going.rank(whom or 0) is None or not (signs(folder) - before if signs else time.monotonic() > deadline):
        if going.has_ended():
            return "nowhere: it had finished"
    stayed = going.killed(whom)
    place = name if run.ranks == 1 else f"{name}, {'all ranks' if whom is None else f'rank {whom}'}"
    killed[place] += 1
    return f"{place}, {STAYED}" if stayed else place


@dataclass(frozen=True)
class Run:
    """The command, and how many processes it takes."""

    command: list[str]
    ranks: int

    def start(self, folder: Path) -> Going:
        """Rank 0, in a group of its own with what it starts."""
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
            os.environ[SIGN] = str(_sign(folder))
            code = cli.run([*self.command, f"run_dir={folder}", "ckpt_path=last"])
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
        """The exit codes, once all have ended: of rank 0, and of those that have stayed longer."""
        while not self.has_ended():
            time.sleep(0.02)
        return list(self._codes.values())

    def has_ended(self) -> bool:
        """Whether all have. One whose rank 0 is gone is a child of this process."""
        with contextlib.suppress(ChildProcessError):
            while not self._over:
                found, status = os.waitpid(-self._group, os.WNOHANG)
                if not found:
                    return False
                self._codes[found] = os.waitstatus_to_exitcode(status)
        self._over = True
        return True

    def rank(self, number: int) -> int | None:
        """The process of a rank; None where it is not there yet."""
        if number == 0:
            return self._group
        with contextlib.suppress(OSError):  # it has ended
            started = Path(f"/proc/{self._group}/task/{self._group}/children").read_text().split()
            return next((int(each) for each in started if f"LOCAL_RANK={number}" in _environment(each)), None)

    def killed(self, whom: int | None) -> bool:
        """Kill a rank, or all of them, with what they started. Returns whether one of the others stayed."""
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
        return stayed


def _environment(process: str) -> list[str]:
    return Path(f"/proc/{process}/environ").read_text().split("\0")


def _difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    return "" if same(wanted, found) else first_difference(wanted, found)[:200]


def _half_written(folder: Path) -> list[str]:
    """The lock of a process that was killed once all was done is let lie, and holds nobody."""
    names = sorted(path.name for path in folder.rglob("*"))
    return [name for name in names if (name.startswith(".") or "partial" in name) and name != ".lock"]


def _names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.glob(pattern)}


def _sign(folder: Path) -> Path:
    """Where the engine's updates are noted: beside the folder of the run."""
    return folder.with_suffix(".sync")


def _text(path: Path) -> set[str]:
    try:
        return {path.read_text()} - {""}
    except FileNotFoundError:
        return set()


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:  # not yet, or a run that starts anew has just removed it
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
