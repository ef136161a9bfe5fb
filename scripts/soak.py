"""Train every preset of `conf/algo` for many steps, and see what grows: memory, Python objects, open files, threads,
child processes.

    python scripts/soak.py                               # every preset, 300 optimizer steps each: hours of one core
    python scripts/soak.py --steps 600 --only grpo ppo   # two of them, for longer
    python scripts/soak.py --only leaking-reward         # a reward that leaks, renewed every nine calls
    python scripts/soak.py --json FILE                   # every look, for a plot of your own
    python scripts/soak.py --markdown FILE               # the table, written anew after each run

Each is a run of the shipped policy in a process of its own, forked from this one, which has loaded the libraries. It
looks thirty times at what it holds, or at every fifth optimizer step of a short run: it collects garbage, gives freed
pages back to the system, and counts. The first third is for what is loaded or filled once; over the rest
memory is a line by Theil and Sen (the median of the slopes between all looks), which a few odd looks do not move.
Leaves with 1 where a run grows, or ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from rich.console import Console
from rich.table import Table

from lit_rl import cli
from lit_rl.cli import schemas
from lit_rl.runs.env_plays import held_resources

BOUND = 32.0
"""KiB of memory an optimizer step, over two thirds of a run: more than that is a leak."""
CHILDREN = 65536.0
"""KiB that worker processes may have gained between the first third and the end."""
FLAT = ("open files", "threads", "child processes")
"""Of which there are never more in the last third than there were before it."""
EVERY = 5
"""Optimizer steps between two looks, at least."""
LOOKS = 30
"""Looks at a run, at most."""

SMALL = [
    "logger=none", "callbacks.samples.print=0", "eval.limit=2",
    "trainer.max_epochs=-1", "trainer.limit_val_batches=0", "trainer.accelerator=cpu",
]  # fmt: skip
WRITES = ["data.prompts_per_rollout=4", "sampling.max_new_tokens=8"]
GROUPS = ["algo.group_size=4"]
PAIRS = ["data.batch_size=8", "trainer.accumulate_grad_batches=1"]
GAMES = ["experiment=guess", "data.prompts_per_rollout=4", *GROUPS, "data.val_batch_size=2"]
LEAKING = """
kept = []

def leaking(completions):
    kept.append(bytearray(b"x" * 2**22))
    return [float(len(completion)) for completion in completions]
"""
"""A reward that keeps 4 MiB of each call: its worker process is renewed before that is much. The file of it stands in
the folder of the runs."""
PRESETS = sorted(path.stem for path in (Path(cli.__file__).parents[2] / "conf" / "algo").glob("*.yaml"))

# fmt: off
OTHERS: dict[str, list[str]] = {
    "tools": ["experiment=calculator", *WRITES, *GROUPS, "data.val_batch_size=2"],
    "environment": GAMES,
    "environment-in-workers": [*GAMES, "env.workers=1"],
    "images": ["experiment=vl_digits", "data.prompts_per_rollout=4", *GROUPS],
    "leaking-reward": [
        "algo=grpo", *WRITES, *GROUPS,
        "reward=function", "reward.fn={folder}/leaking.py:leaking", "reward.recycle_after=9",
    ],
}
# fmt: on
"""Runs that are more than a preset: their settings, beside those of `SMALL`. The leaking reward's process is renewed at
other steps than are looked at: right after it there is none."""
NEEDS = {
    "gigpo": [*GAMES, "algo=gigpo"],
    "turn_ppo": [*GAMES, "algo=turn_ppo"],
    "gkd": ["experiment=gkd_addition", *PAIRS],
}
"""Presets that do not run by their name alone."""


def settings_of(name: str) -> list[str]:
    """Return the settings of a run, beside those of `SMALL`: a few small rollouts, or a few rows."""
    if name in OTHERS:
        return OTHERS[name]
    if name in NEEDS:
        return NEEDS[name]
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        config = compose("config", [f"algo={name}"])
    GlobalHydra.instance().clear()
    if "batch_size" in config.data:
        return [f"algo={name}", *PAIRS]
    return [f"algo={name}", *WRITES, *(GROUPS if config.algo.group_size > 4 else [])]


class Looks(L.Callback):
    """Writes a line about what the process holds, every so many optimizer steps.

    Args:
        path: The file.
        every: Optimizer steps between two looks.
        leak: KiB that each step leaves behind on purpose.
    """

    def __init__(self, path: str, every: int, leak: int = 0) -> None:
        self.path, self.every, self.leak, self._last = Path(path), every, leak, -1
        self._leaked: list[bytearray] = []

    def on_train_start(self, *_: Any) -> None:
        gc.collect()
        gc.freeze()  # the libraries are not gone through at every look

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        if self.leak:
            self._leaked.append(bytearray(b"x" * (self.leak * 1024)))
        if step % self.every == 0:
            look = {"step": step, **held_resources(), "KiB of children": _of_children()}
            with self.path.open("a") as file:
                file.write(json.dumps(look) + "\n")


def _of_children() -> float:
    """Return KiB that the worker processes hold, together."""
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended in between
            for child in (task / "children").read_text().split():
                total += _of(child)
    return total


def _of(child: str) -> float:
    with contextlib.suppress(FileNotFoundError):  # it has ended in between
        status = Path(f"/proc/{child}/status").read_text()
        return float(sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.M))))
    return 0.0


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
    """Return a verdict on looks in the order of their steps.

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
    """Return the highest count of these looks."""
    return max(look[name] for look in looks)


def slope(looks: Sequence[dict[str, float]], name: str) -> float:
    """Return the median slope of the lines through any two looks, an optimizer step (Theil 1950, Sen 1968)."""
    return statistics.median((b[name] - a[name]) / (b["step"] - a["step"]) for a, b in combinations(looks, 2))


# ---------------------------------------------------------------------- running them


def looked_at(name: str, steps: int, folder: Path, *more: str) -> list[dict[str, float]]:
    """Train one preset in a process of its own, and read what it saw of itself.

    Raises:
        RuntimeError: the run ended with an error.
    """
    path, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    looks = ["_target_=soak.Looks", f"path={path}", f"every={max(EVERY, steps // LOOKS)}"]
    own = [f"trainer.max_steps={steps}", f"run_dir={folder / name}", *(f"+callbacks.looks.{each}" for each in looks)]
    (folder / "leaking.py").write_text(LEAKING)
    settings = [setting.replace("{folder}", str(folder)) for setting in settings_of(name)]
    command = [*SMALL, *settings, *own, *more, "allow_targets=[soak]"]
    sys.stdout.flush()
    child = os.fork() or _train(command, log)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"{name} ended with exit code {code}:\n{log.read_text()[-2000:]}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _train(command: list[str], log: Path) -> int:
    """Be the process of a run: does not return."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
    os.close(handle)
    sys.argv = ["train.py"]
    code = 1
    try:
        code = cli.run(command)
    finally:
        os._exit(code)


COLUMNS = ("run", "steps", "KiB a step", "objects a step", "workers, MiB", *FLAT, "grown")


def row(name: str, verdict: Verdict) -> list[str]:
    """Return one of the table; counts are the most before the last third and in it, where they differ."""
    counts = [f"{a:g}" if a == b else f"{a:g} then {b:g}" for a, b in verdict.counts.values()]
    numbers = (f"{verdict.memory:+.1f}", f"{verdict.objects:+.1f}", f"{verdict.children / 1024:.0f}")
    return [name, str(verdict.steps), *numbers, *counts, ", ".join(verdict.grown) or "-"]


def shown(verdicts: dict[str, Verdict]) -> Table:
    """Return the table for a terminal."""
    table = Table(title=f"What grows (bound: {BOUND:g} KiB an optimizer step)", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, no_wrap=name == "run", justify="left" if name == "run" else "right")
    for name, verdict in verdicts.items():
        table.add_row(*row(name, verdict))
    return table


def markdown(verdicts: dict[str, Verdict]) -> str:
    """Return the table for a page."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(row(name, verdict) for name, verdict in verdicts.items())]
    return "".join(f"| {' | '.join(each)} |\n" for each in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*OTHERS, *PRESETS]
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--json", type=Path, help="a file for every look")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    verdicts: dict[str, Verdict] = {}
    looks: dict[str, list[dict[str, float]]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            began = time.monotonic()
            try:
                looks[name] = looked_at(name, given.steps, Path(folder))
            except RuntimeError as error:
                failed.append(name)
                print(error, flush=True)
                continue
            verdicts[name] = judged(looks[name])
            print(f"{name}: {time.monotonic() - began:.0f} s, {verdicts[name]}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(looks))
            if given.markdown:
                given.markdown.write_text(markdown(verdicts))
    Console(width=140).print(shown(verdicts))
    if failed:
        print(f"Ended with an error: {', '.join(failed)}.")
    return int(bool(failed) or any(verdict.grown for verdict in verdicts.values()))


if __name__ == "__main__":
    raise SystemExit(main())
