"""Draw what runs learned: one run, the games and tools of docs/agents.md, the shipped digits.

    python scripts/run_curves.py plot RUN_DIR OUT.png                 # from its metrics.jsonl
    python scripts/run_curves.py agents [TASK ...] [--seeds 0 1 2] [--runs runs/agents] [--draw-only]
    python scripts/run_curves.py digits OUT.png GRPO_RUN_DIR PPO_RUN_DIR

`agents` trains the shipped policy on the tasks of docs/agents.md, and makes its picture docs/images/agents.png and its
table. Each run is the commands of that page: the form of the task by imitation, then the task by its reward. A run that
is finished in the folder of runs is not run again. `docs/images/agents.csv` has one line a rollout, and the lines of
other tasks and seeds are kept. Two minutes a task and seed on one core. What a pretrained model learns (smollm2_tool,
after `make smollm2`) takes longer, and is trained only where it is named.

`digits` draws rewards of rollouts, and held-out images as they are read: the first of those that training never sees,
read greedily by the shipped policy and by the export of the first run.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:
    import matplotlib
except ModuleNotFoundError:
    raise SystemExit(
        "matplotlib draws the picture: pip install matplotlib. The run's report.html has its curves."
    ) from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PURPLE = "#2f6db3", "#d9661f", "#3b8f5a", "#7a56a8"
GREY, INK = "#8a8f98", "#2b2f36"


# --------------------------------------------------------------------------------------------- the look of all figures


def written(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV beside the file first: a run that is ended in the middle leaves the last whole one."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    fresh.replace(path)


def spread(values: Sequence[float] | np.ndarray) -> str:
    """Return the mean over seeds, with the lowest and the highest."""
    return f"{np.mean(values):.2f} (seeds: {min(values):.2f} to {max(values):.2f})"


def look() -> None:
    """Set the fonts and the colours of all figures."""
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK})


def styled(axes: Axes, along: str, *, behind: bool = True) -> None:
    """Leave two spines, and draw a faint grid of one axis, behind what is drawn or between its patches and lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.grid(axis="y" if along == "y" else "x", color=GREY, alpha=0.2, linewidth=0.7)
    if behind:
        axes.set_axisbelow(True)


def band(axes: Axes, at: Sequence[float], seeds: np.ndarray, label: str, color: str, alpha: float = 0.2) -> None:
    """Draw the mean over seeds, and the band from the lowest to the highest.

    Args:
        axes: Where.
        at: `(points,)`, the horizontal places.
        seeds: `(seeds, points)`.
        label: In the legend.
        color: Of the line and the band.
        alpha: Of the band.
    """
    axes.fill_between(at, seeds.min(0), seeds.max(0), color=color, alpha=alpha, linewidth=0)
    axes.plot(at, seeds.mean(0), color=color, linewidth=2, label=label)


# ------------------------------------------------------------------------------------------------------------- one run


Points = list[tuple[float, float]]
SECOND = ("val_sampled", "val_greedy")
"""Prefixes of validations by another decoding than the `eval` group's."""


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, one a rollout or a validation."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: give the run directory of `python train.py run_dir=DIR`.")
    return [json.loads(line) for line in path.read_text().splitlines()]


def series(rows: list[dict[str, Any]], name: str) -> Points:
    """Return `(step, value)` of every row that has a number under this name."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def smooth(points: Points, span: int) -> Points:
    """Return centred means over `span` neighbours, fewer at the ends."""
    values = [value for _, value in points]
    half = max(1, span) // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]


def validations(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return one validation a step: the last step is validated by `fit` and after it."""
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row.get(key) is not None:
            first.setdefault(row["step"], row)
    return [first[step] for step in sorted(first)]


def draw_points(axes: Axes, at: list[float], numbers: list[dict[str, float]], key: str, **style: Any) -> None:
    """Draw means with their intervals."""
    mean = [row[key] for row in numbers]
    below = [max(0.0, row[key] - row[f"{key}_low"]) for row in numbers]
    above = [max(0.0, row[f"{key}_high"] - row[key]) for row in numbers]
    style = {"markersize": 6, "capsize": 4, "linewidth": 1.4, "linestyle": "none", "zorder": 3, **style}
    axes.errorbar(at, mean, yerr=[below, above], **style)


def draw_reward(axes: Axes, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Draw the training reward, raw and smoothed; validations, filled; those of the second decoding, hollow."""
    reward = series(rows, "train/reward")
    if reward:
        axes.plot(*zip(*reward), color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(reward, max(5, len(reward) // 25))), color=BLUE, linewidth=2, label="training")
    keys = dict.fromkeys(key for row in rows for key in row if re.fullmatch("val/(.+/)?reward", key))
    last = max((row["step"] for row in rows), default=0)
    for key, color in zip(keys, (ORANGE, GREEN, PURPLE, GREY)):
        name = key[len("val/") : -len("/reward")] if key != "val/reward" else ""
        decodings = [*summary.get("after", {}).get(name, {"evaluation": None})]
        found = validations(rows, key)
        label = f"{name or 'held-out'}, {decodings[0]}"
        draw_points(axes, [row["step"] for row in found], found, key, marker="o", color=color, label=label)
        for stage in SECOND:
            second = key.replace("val", stage, 1)
            if found := validations(rows, second):
                at = [row["step"] + 0.012 * last for row in found]
                label = f"{name or 'held-out'}, {decodings[1] if decodings[1:] else stage[4:]}"
                draw_points(axes, at, found, second, marker="o", mfc="white", color=color, label=label)
    axes.set_ylabel("mean reward (95 % intervals)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)


FAMILIES = (
    ("accuracy", ("rewards/accuracies", "accuracy")),
    ("margin", ("rewards/margins", "margin")),
    ("mean token accuracy", ("mean_token_accuracy",)),
)
"""What a run without rewards is read by, in the order of preference: the label, and the names of the metric."""


def draw_learned(axes: Axes, rows: list[dict[str, Any]]) -> bool:
    """Draw accuracy or margin of a run that learns from a data set, training smoothed and validations as points."""
    for label, names in FAMILIES:
        train, val = (_found(rows, phase, names) for phase in ("train", "val"))
        if train or val:
            _curve(axes, train, val)
            axes.set_ylabel(label)
            return True
    return False


def draw_loss(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw training and validation loss."""
    _curve(axes, _found(rows, "train", ("loss",)), _found(rows, "val", ("loss",)))
    axes.set_ylabel("loss")
    axes.set_xlabel("optimizer step")


def _found(rows: list[dict[str, Any]], phase: str, names: tuple[str, ...]) -> Points:
    """Return the series of the first of these names that the run has; of several validation sets the first."""
    for name in names:
        keys = dict.fromkeys(key for row in rows for key in row if re.fullmatch(f"{phase}/(.+/)?{name}", key))
        for key in keys:
            if points := series(rows, key):
                return points
    return []


def _curve(axes: Axes, train: Points, val: Points) -> None:
    if train:
        axes.plot(*zip(*train), color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(train, max(5, len(train) // 25))), color=BLUE, linewidth=2, label="training")
    if val:
        axes.plot(*zip(*val), color=ORANGE, marker="o", linewidth=1, label="held-out")
    if train or val:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=9)


def draw_health(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw what says whether there is still something to learn: groups without a signal, and response lengths."""
    zero, length = series(rows, "train/frac_reward_zero_std"), series(rows, "train/completions/mean_length")
    span = max(5, len(zero) // 25)
    if zero:
        axes.plot(*zip(*smooth(zero, span)), color=INK, linewidth=1.4)
    axes.set_ylim(0, 1)
    axes.set_ylabel("groups of\nequal reward", color=INK)
    axes.set_xlabel("optimizer step")
    right = axes.twinx()
    if length:
        right.plot(*zip(*smooth(length, span)), color=GREY, linewidth=1.4)
        top = max(value for _, value in length)
        right.set_ylim(0, math.ceil(top * 1.25))
    right.set_ylabel("response length\n(tokens)", color=GREY)
    right.tick_params(axis="y", colors=GREY)
    right.spines["top"].set_visible(False)


def plot(run_dir: Path, out: Path) -> None:
    """Write the picture of a run."""
    rows, summary = read(run_dir), run_dir / "summary.json"
    look()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.2), height_ratios=[3, 1.1], sharex=True, layout="constrained"
    )
    if series(rows, "train/reward"):
        draw_reward(top, rows, json.loads(summary.read_text()) if summary.is_file() else {})
        draw_health(bottom, rows)
    else:
        draw_learned(top, rows)
        draw_loss(bottom, rows)
    for axes in (top, bottom):
        styled(axes, "y", behind=False)
    figure.savefig(out, dpi=150)
    print(f"{out} shows {run_dir}")
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------- games and tools


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- scripts/run_curves.py; not by hand -->", "<!-- end -->"
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
    """Run both commands of a task, on one core."""
    task, folder = TASKS[name], runs / f"{name}_{seed}"
    learned, form = folder / "learned", folder / "form"
    if task.imitated:
        command(form, f"experiment={name}_sft", f"seed={seed}")
    command(learned, f"experiment={name}", f"seed={seed}", *([f"model.name={form}/hf"] if task.imitated else []))
    rewards = [reward for _, reward in series(read(learned), "train/reward")]
    return list(enumerate(rewards, 1))


def command(folder: Path, *settings: str) -> None:
    """Run train.py once; exits with the end of what it said where that fails."""
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
    """Return the curves of a file; none where there is none."""
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
    """Draw each task that there are curves of: the mean over seeds, and from the lowest to the highest."""
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
    """Return the mean reward of each seed's first rollouts and of its last."""
    rewards = [[reward for _, reward in curve] for _, curve in sorted(seeds.items())]
    return [float(np.mean(each[:ENDS])) for each in rewards], [float(np.mean(each[-ENDS:])) for each in rewards]


def table(curves: Curves) -> str:
    """Return in Markdown what each task's samples are worth before and after."""
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


# -------------------------------------------------------------------------------------------------------------- digits


ROWS, COLUMNS = 3, 6
RED = "#c0392b"


def answers(name: str, images: list[dict[str, Any]]) -> list[str]:
    """Return what a policy reads in each of the images."""
    import torch

    from lit_rl.core.rollout import Prompts, Sampling
    from lit_rl.data.prompt_module import RolloutDataModule
    from lit_rl.generation.native import NativeGenerator
    from lit_rl.models import LanguageModel

    model = LanguageModel(name)
    data = RolloutDataModule(rows=images, prompts_per_rollout=len(images), val_fraction=0.0)
    data.prepare(model.tokenizer, processor=model.processor)
    batch = data.peek(len(images))
    assert batch.vision is not None
    asked = Prompts(batch.prompt_ids, batch.rows, 1, model.eos_ids, model.pad_id, vision=batch.vision(batch.rows))
    generator = NativeGenerator()
    generator.sync(model.load().eval(), 0)
    with torch.no_grad():
        said = generator.generate(asked, Sampling(temperature=0.0, max_new_tokens=2)).response_ids
    return [str(model.tokenizer.decode(ids[:1])).strip() for ids in said]


def draw_digits(target: Path, *runs: Path) -> None:
    """Draw the runs, of which the first has an export."""
    from lit_rl.data.row_visuals import image_of
    from lit_rl.data.tasks import Digits

    figure, (curves, place) = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=[1.1, 1])
    for name, run, colour in zip(("GRPO", "PPO"), runs, (BLUE, ORANGE)):
        points = series(read(run), "train/reward")
        curves.plot(*zip(*points), ".", color=colour, alpha=0.2, markeredgewidth=0)
        curves.plot(*zip(*smooth(points, 15)), color=colour, label=name)
    curves.set(xlabel="optimizer step", ylabel="sampled digits that were right", ylim=(0, 1))
    curves.legend(frameon=False, loc="lower right")
    curves.spines[["top", "right"]].set_visible(False)

    images = Digits().val()[: ROWS * COLUMNS]
    before, after = answers("digits", images), answers(str(runs[0] / "hf"), images)
    place.axis("off")
    grid = place.get_subplotspec().subgridspec(ROWS, COLUMNS, hspace=0.5, wspace=0.1)
    for i, row in enumerate(images):
        panel = figure.add_subplot(grid[i // COLUMNS, i % COLUMNS])
        panel.imshow(image_of(row["image"], "digit").open())
        right = after[i] == images[i]["answer"]
        panel.set_title(f"{before[i]} → {after[i]}", color=GREEN if right else RED, fontsize=9, pad=3)
        panel.axis("off")
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def train_agents(given: argparse.Namespace) -> None:
    """Train what is asked for, then draw the picture and write the table of all that there is."""
    numbers = given.docs / "images" / "agents.csv"
    curves = load(numbers)
    for seed in given.seeds if not given.draw_only else []:
        for name in given.tasks or SHIPPED:
            curves.setdefault(name, {})[seed] = run(name, seed, given.runs.resolve())
            save(numbers, curves)
    picture(curves, numbers.with_suffix(".png"))
    write_table(given.docs / "agents.md", curves)
    print(table(curves))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("plot", help="one run")
    one.add_argument("run_dir", type=Path)
    one.add_argument("out", type=Path)
    agents = commands.add_parser("agents", help="games and tools")
    agents.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; default: {', '.join(SHIPPED)}"
    )
    agents.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    agents.add_argument("--runs", type=Path, default=ROOT / "runs" / "agents", help="folder of the runs")
    agents.add_argument("--docs", type=Path, default=DOCS, help="folder of agents.md, with images/ for the picture")
    agents.add_argument("--draw-only", action="store_true", help="train nothing: picture and table from the file")
    digits = commands.add_parser("digits", help="runs on the shipped digits")
    digits.add_argument("out", type=Path)
    digits.add_argument("runs", type=Path, nargs=2, metavar="RUN_DIR", help="of GRPO, with its export, and of PPO")
    given = parser.parse_args(arguments)
    if given.command == "plot":
        plot(given.run_dir, given.out)
    elif given.command == "digits":
        draw_digits(given.out, *given.runs)
    elif unknown := sorted(set(given.tasks) - set(TASKS)):
        agents.error(f"{', '.join(unknown)}: none of the tasks {', '.join(TASKS)}.")
    else:
        train_agents(given)


if __name__ == "__main__":
    main()
