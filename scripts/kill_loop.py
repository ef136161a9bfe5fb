"""Kill a run again and again, at random moments and where it hurts most, and hold what it ends with against a run that
nothing killed: weights, optimizer, metrics and samples, bit for bit.

    python scripts/kill_loop.py                      # 50 rounds: some ten minutes of one core
    python scripts/kill_loop.py --rounds 3 --seed 7
    python scripts/kill_loop.py algo=ppo trainer.max_steps=40   # further settings of the run

A round starts the run in a new folder, kills it with SIGKILL up to `--kills` times, each time at a place of `PLACES`,
goes on with `ckpt_path=last`, and lets it finish. The processes are forked from this one, which has loaded the
libraries, so that a round takes seconds; they are killed by the kernel like any other. Leaves with 1 where a bit
differs, or something half-written lies about.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from same_bits import first_difference, measured, same

from lit_rl import cli
from lit_rl.cli import hydra_app  # noqa: F401  # loaded once, before anything is forked

RUN = [
    "data.task.max_operand=5", "data.task.val_rows=4", "data.prompts_per_rollout=4", "algo.group_size=4",
    "trainer.max_steps=28", "algo.minibatches=2", "trainer.accumulate_grad_batches=2", "logger=none", "eval.limit=2",
    "callbacks.samples.print=0", "callbacks.checkpoint.every_n_train_steps=3",
]  # fmt: skip
"""A run of a second beside its start and end."""

LONGEST = 4.0
"""Seconds from the start of a process: a random moment is before."""

Signs = Callable[[Path], set[str]]
PLACES: dict[str, Signs | None] = {
    "any moment": None,
    "rollout": lambda run: {str(_lines(run / "metrics.jsonl") // 3)} - {"0"},
    "checkpoint": lambda run: _names(run / "checkpoints", "*.partial-*"),
    "new checkpoint": lambda run: _names(run / "checkpoints", "*.ckpt"),
    "export": lambda run: _names(run, ".hf.tmp-*"),
    "summary": lambda run: _names(run, ".summary.json.partial") | _names(run, "hf"),
}
"""Where a run is killed: at once when its folder shows a sign that it did not show at the start of the process."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3, help="of a round, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="of the run, beside those of RUN")
    given = parser.parse_args()
    random.seed(given.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kill_loop_") as temporary:
        folder = Path(temporary)
        command = [*RUN, *given.settings]
        whole = folder / "whole"
        if code := _ended(_start(command, whole)):
            print((folder / "whole.log").read_text())
            raise SystemExit(f"The run itself ended with {code}.")
        wanted, killed, wrong = measured(whole), Counter[str](), 0
        for number in range(given.rounds):
            again = folder / f"round{number}"
            places = [_kill_once(command, again, killed) for _ in range(random.randint(1, given.kills))]
            code = _ended(_start(command, again))
            left = _half_written(again)
            difference = f"ended with {code}" if code else _difference(wanted, measured(again))
            difference = difference or ", ".join(f"{name} is left" for name in left)
            wrong += bool(difference)
            print(f"{number + 1:3}  {difference or 'equal'}  killed: {', '.join(places)}", flush=True)
            if not difference:
                shutil.rmtree(again)
        print("\n".join(["", "| killed at | times |", "|---|---|", *(f"| {at} | {n} |" for at, n in killed.items())]))
        print(f"\n{given.rounds} rounds, {sum(killed.values())} kills: {given.rounds - wrong} equal, {wrong} not.")
    return 1 if wrong else 0


def _kill_once(command: list[str], folder: Path, killed: Counter[str]) -> str:
    """Start the run, or go on with it, and kill it; says where."""
    name = random.choice(list(PLACES))
    signs, deadline = PLACES[name], time.monotonic() + random.uniform(0, LONGEST)
    before = signs(folder) if signs else set()
    child = _start(command, folder)
    while not (signs(folder) - before if signs else time.monotonic() > deadline):
        if os.waitpid(child, os.WNOHANG)[0]:
            return "nowhere: it had finished"
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed[name] += 1
    return name


def _start(command: list[str], folder: Path) -> int:
    """A process that runs the command, in a group of its own."""
    sys.stdout.flush()
    if child := os.fork():
        while os.getpgid(child) == os.getpgrp():  # until it has left our group
            time.sleep(0)
        return child
    os.setsid()
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.argv = ["train.py"]
    code = 1
    try:
        code = cli.run([*command, f"run_dir={folder}", "ckpt_path=last"])
    finally:
        os._exit(code)


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    return "" if same(wanted, found) else first_difference(wanted, found)[:200]


def _half_written(folder: Path) -> list[str]:
    """The lock of a process that was killed once all was done is let lie, and holds nobody."""
    names = sorted(path.name for path in folder.rglob("*"))
    return [name for name in names if (name.startswith(".") or "partial" in name) and name != ".lock"]


def _names(folder: Path, pattern: str) -> set[str]:
    return {path.name for path in folder.glob(pattern)}


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:  # not yet, or a run that starts anew has just removed it
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
