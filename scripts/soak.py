"""Train every family for many steps, and see what grows: memory, Python objects, open files, threads, child processes.

    python scripts/soak.py                               # every family, 150 optimizer steps each: an hour of one core
    python scripts/soak.py --steps 600 --only grpo ppo   # two of them, for longer
    python scripts/soak.py --only leaking-reward         # a reward that leaks, renewed every ten calls
    python scripts/soak.py --json FILE                   # every look, for a plot of your own

Each family is a run of the shipped policy in a process of its own. Every fifth optimizer step it collects garbage,
gives freed pages back to the system, and counts. The first third is for what is loaded or filled once; over the rest
memory is a line by Theil and Sen (the median of the slopes between all looks), which a few odd looks do not move.
Leaves with 1 where a family grows.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from lit_rl import cli
from lit_rl.commands.env_growth import held

BOUND = 32.0
"""KiB of memory an optimizer step, over two thirds of a run: more than that is a leak."""
CHILDREN = 65536.0
"""KiB that worker processes may have gained between the first third and the end."""
FLAT = ("open files", "threads", "child processes")
"""Of which there are never more in the last third than there were before it."""
EVERY = 5

SMALL = [
    "logger=none", "callbacks.samples.print=0", "eval.limit=2",
    "trainer.max_epochs=-1", "trainer.limit_val_batches=0", "trainer.accelerator=cpu",
]  # fmt: skip
WRITES = ["data.prompts_per_rollout=4", "algo.group_size=4", "sampling.max_new_tokens=8"]
PAIRS = ["data.batch_size=8", "trainer.accumulate_grad_batches=1"]
GAMES = ["experiment=guess", "data.prompts_per_rollout=4", "algo.group_size=4", "data.val_batch_size=2"]
LEAKING = Path(__file__).with_name("leaking_reward.py")

# fmt: off
FAMILIES: dict[str, list[str]] = {
    "grpo": ["algo=grpo", *WRITES],
    "rloo": ["algo=rloo", *WRITES],
    "reinforce": ["algo=reinforce", *WRITES],
    "dapo": ["algo=dapo", *WRITES],
    "ppo": ["algo=ppo", *WRITES],
    "sft": ["algo=sft", *PAIRS],
    "dpo": ["algo=dpo", *PAIRS],
    "kto": ["algo=kto", *PAIRS],
    "reward-model": ["algo=reward_model", *PAIRS],
    "online-dpo": ["algo=online_dpo", "data.prompts_per_rollout=4", "sampling.max_new_tokens=8"],
    "tools": ["experiment=calculator", *WRITES, "data.val_batch_size=2"],
    "environment": GAMES,
    "environment-in-workers": [*GAMES, "env.workers=1"],
    "images": ["experiment=vl_digits", "data.prompts_per_rollout=4", "algo.group_size=4"],
    "leaking-reward": [
        "algo=grpo", *WRITES, "reward=function", f"reward.fn={LEAKING}:leaking", "reward.recycle_after=10",
    ],
}
# fmt: on
"""The settings of each run, beside those of `SMALL`."""


class Looks(L.Callback):
    """Writes a line about what the process holds, every so many optimizer steps.

    Args:
        path: The file.
        leak: KiB that each step leaves behind on purpose.
    """

    def __init__(self, path: str, leak: int = 0) -> None:
        self.path, self.leak, self._last = Path(path), leak, -1
        self._leaked: list[bytearray] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        if self.leak:
            self._leaked.append(bytearray(b"x" * (self.leak * 1024)))
        if step % EVERY == 0:
            look = {"step": step, **held(), "KiB of children": _of_children()}
            with self.path.open("a") as file:
                file.write(json.dumps(look) + "\n")


def _of_children() -> float:
    """KiB that the worker processes hold, together."""
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            status = Path(f"/proc/{child}/status").read_text()
            total += sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.M)))
    return total


# ---------------------------------------------------------------------- what the looks say


@dataclass(frozen=True)
class Verdict:
    """What grew in one run."""

    steps: int
    memory: float
    """KiB an optimizer step."""
    objects: float
    """Python's own blocks of memory, an optimizer step."""
    children: float
    """KiB that worker processes hold, at most."""
    counts: dict[str, tuple[float, float]]
    """Of each of `FLAT`, the most before the last third and in it."""
    grown: tuple[str, ...]
    """What is above its bound."""


def judged(looks: Sequence[dict[str, float]]) -> Verdict:
    """A verdict on looks in the order of their steps.

    Raises:
        ValueError: there are fewer than nine.
    """
    third = len(looks) // 3
    if third < 3:
        raise ValueError(f"{len(looks)} looks say nothing: let it run for more than {9 * EVERY} optimizer steps.")
    warm, late = looks[third:], looks[2 * third :]
    memory, objects = slope(warm, "KiB of memory"), slope(warm, "Python objects")
    counts = {name: (most(looks[third : 2 * third], name), most(late, name)) for name in FLAT if name in looks[0]}
    early, later = (most(part, "KiB of children") for part in (looks[:third], late))
    grown = [name for name, (before, after) in counts.items() if after > before]
    grown += ["memory"] * (memory > BOUND) + ["worker processes"] * (later - early > CHILDREN)
    return Verdict(int(looks[-1]["step"]), memory, objects, max(early, later), counts, tuple(grown))


def most(looks: Sequence[dict[str, float]], name: str) -> float:
    """The highest count of these looks."""
    return max(look[name] for look in looks)


def slope(looks: Sequence[dict[str, float]], name: str) -> float:
    """The median slope of the lines through any two looks, an optimizer step (Theil 1950, Sen 1968)."""
    return statistics.median((b[name] - a[name]) / (b["step"] - a["step"]) for a, b in combinations(looks, 2))


# ---------------------------------------------------------------------- running them


def looked_at(family: str, steps: int, folder: Path, *more: str) -> list[dict[str, float]]:
    """Train one family in a process of its own, and read what it saw of itself.

    Raises:
        SystemExit: the run ended with an error.
    """
    path = folder / f"{family}.jsonl"
    own = [f"trainer.max_steps={steps}", f"run_dir={folder / family}", f"+callbacks.looks.path={path}"]
    settings = [*SMALL, *FAMILIES[family], *own, "+callbacks.looks._target_=soak.Looks", *more]
    command = [sys.executable, __file__, "--train", *settings, "allow_targets=[soak]"]
    with (folder / f"{family}.log").open("w") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if ended.returncode:
        said = (folder / f"{family}.log").read_text()[-2000:]
        raise SystemExit(f"{family} ended with exit code {ended.returncode}:\n{said}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(verdicts: dict[str, Verdict]) -> Table:
    """One row a family."""
    table = Table(title=f"What grows (bound: {BOUND:g} KiB an optimizer step)", title_justify="left")
    columns = ("steps", "KiB a step", "objects a step", "workers, MiB", *FLAT, "grown")
    table.add_column("family", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for family, verdict in verdicts.items():
        counts = [f"{before:g} {after:g}" for before, after in verdict.counts.values()]
        numbers = (f"{verdict.memory:+.1f}", f"{verdict.objects:+.1f}", f"{verdict.children / 1024:.0f}")
        table.add_row(family, str(verdict.steps), *numbers, *counts, ", ".join(verdict.grown) or "-")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each run")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--json", type=Path, help="a file for every look")
    given = parser.parse_args()
    verdicts: dict[str, Verdict] = {}
    looks: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in given.only:
            began = time.monotonic()
            looks[family] = looked_at(family, given.steps, Path(folder))
            verdicts[family] = judged(looks[family])
            print(f"{family}: {time.monotonic() - began:.0f} s, {verdicts[family]}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(looks))
    Console(width=140).print(shown(verdicts))
    return int(any(verdict.grown for verdict in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(cli.run(sys.argv[2:]) if sys.argv[1:2] == ["--train"] else main())
