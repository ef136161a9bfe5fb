"""Train the shipped policy on the games and tools of docs/agents.md: its picture docs/images/agents.png and its table.

    python scripts/agent_curves.py [TASK ...] [--seeds 0 1 2] [--runs runs/agents] [--draw-only]

Each run is the commands of docs/agents.md: the form of the task by imitation, then the task by its reward. A run that
is finished in the folder of runs is not run again. `docs/images/agents.csv` has one line a rollout, and the lines of
other tasks and seeds are kept. Two minutes a task and seed on one core. What a pretrained model learns (smollm2_tool,
after `make smollm2`) takes longer, and is trained only where it is named.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from curve_runs import BLUE, GREY, band, look, spread, styled, written
from plot_run import read, series

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- scripts/agent_curves.py; not by hand -->", "<!-- end -->"
ENDS = 5
"""Rollouts at the beginning and at the end of a run whose means stand in the table."""


@dataclass(frozen=True)
class Task:
    """What is learned.

    Args:
        title: Of its figure.
        imitated: Whether `experiment=<name>_sft` comes first.
        without: The best mean reward of a policy that reads nothing of what it is answered; None where there is no
            answer.
        pretrained: Whether a pretrained model learns it, and not the shipped policy: only where it is named.
    """

    title: str
    imitated: bool = True
    without: float | None = None
    pretrained: bool = False


TASKS = {
    "calculator": Task("a product by a tool"),
    "guess": Task("guess a number by hints", without=0.4),
    "frozen_lake": Task("a way over the ice"),
    "chain_sum": Task("sums of reasoning-gym", imitated=False),
    "smollm2_tool": Task("SmolLM2: a product by a tool", pretrained=True),
}
SHIPPED = [name for name, task in TASKS.items() if not task.pretrained]

Curve = list[tuple[int, float]]
"""`(rollout, mean reward of its samples)`."""
Curves = dict[str, dict[int, Curve]]
"""Of each task and seed."""


def run(name: str, seed: int, runs: Path) -> Curve:
    """Both commands of a task, on one core."""
    task, folder = TASKS[name], runs / f"{name}_{seed}"
    learned, form = folder / "learned", folder / "form"
    if task.imitated:
        command(form, f"experiment={name}_sft", f"seed={seed}")
    command(learned, f"experiment={name}", f"seed={seed}", *([f"model.name={form}/hf"] if task.imitated else []))
    rewards = [reward for _, reward in series(read(learned), "train/reward")]
    return list(enumerate(rewards, 1))


def command(folder: Path, *settings: str) -> None:
    """One run of train.py; exits with the end of what it said where that fails."""
    if (folder / "hf" / "config.json").is_file():
        return
    words = ["train.py", *settings, f"run_dir={folder}"]
    print(f"python {shlex.join(words)}", flush=True)
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"exit {done.returncode}:\n{done.stdout[-3000:]}")


def load(path: Path) -> Curves:
    """The curves of a file; none where there is none."""
    curves: Curves = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                curve = curves.setdefault(row["task"], {}).setdefault(int(row["seed"]), [])
                curve.append((int(row["rollout"]), float(row["reward"])))
    return curves


def save(path: Path, curves: Curves) -> None:
    """Write all curves to a file."""
    rows = (
        (task, seed, rollout, f"{reward:.4g}")
        for task, seeds in sorted(curves.items())
        for seed, curve in sorted(seeds.items())
        for rollout, reward in curve
    )
    written(path, ["task", "seed", "rollout", "reward"], rows)


def picture(curves: Curves, path: Path) -> None:
    """A figure of each task that there are curves of: the mean over seeds, and from the lowest to the highest."""
    look()
    names = [name for name in TASKS if name in curves]
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.2 * columns, 2.8 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, grid.flat):
        task, seeds = TASKS[name], list(curves[name].values())
        at = [rollout for rollout, _ in min(seeds, key=len)]
        rewards = np.array([[reward for _, reward in curve[: len(at)]] for curve in seeds])
        band(axes, at, rewards, name, BLUE)
        if task.without is not None:
            axes.axhline(task.without, color=GREY, linewidth=1, linestyle="--")
            axes.text(at[-1], task.without - 0.02, "without reading", color=GREY, ha="right", va="top", fontsize=9)
        axes.set_title(f"{task.title} (experiment={name})", fontsize=10)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("rollouts")
        axes.set_ylabel("mean reward, sampled")
        styled(axes, "y")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def means(seeds: dict[int, Curve]) -> tuple[list[float], list[float]]:
    """Of each seed, the mean reward of its first rollouts and of its last."""
    rewards = [[reward for _, reward in curve] for _, curve in sorted(seeds.items())]
    return [float(np.mean(each[:ENDS])) for each in rewards], [float(np.mean(each[-ENDS:])) for each in rewards]


def table(curves: Curves) -> str:
    """In Markdown: what each task's samples are worth before and after."""
    lines = [f"| `experiment=` | rollouts | first {ENDS} rollouts | last {ENDS} |", "|---|---|---|---|"]
    for name in TASKS:
        if name in curves:
            rollouts = len(next(iter(curves[name].values())))
            lines.append(f"| `{name}` | {rollouts} | {' | '.join(map(spread, means(curves[name])))} |")
    return "\n".join(lines)


def write_table(page: Path, curves: Curves) -> None:
    """Put the table between its marks."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{page} has no lines {BEGIN!r} and {END!r}.")
    page.write_text(f"{before}{begin}\n{table(curves)}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; default: {', '.join(SHIPPED)}"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "agents", help="folder of the runs")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of agents.md, with images/ for the picture")
    parser.add_argument("--draw-only", action="store_true", help="train nothing: picture and table from the file")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.tasks) - set(TASKS)):
        parser.error(f"{', '.join(unknown)}: none of the tasks {', '.join(TASKS)}.")
    numbers = given.docs / "images" / "agents.csv"
    curves = load(numbers)
    for seed in given.seeds if not given.draw_only else []:
        for name in given.tasks or SHIPPED:
            curves.setdefault(name, {})[seed] = run(name, seed, given.runs.resolve())
            save(numbers, curves)
    picture(curves, numbers.with_suffix(".png"))
    write_table(given.docs / "agents.md", curves)
    print(table(curves))


if __name__ == "__main__":
    main()
