"""Train the shipped policy with the presets that learn from rewards, and draw what they learn: docs/images/algorithms.

    python scripts/learning_curves.py [PRESET ...] [--seeds 0 1 2]

Without a preset: all of those, some ten seconds a run. Every run has the same number of rollouts of the same size, the
same learning rate and the same prompts, and the preset's own settings else. A reward is that of a rollout's completions
as they were first sampled; `curves.csv` has one line a rollout, and the lines of other presets and seeds are kept.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib
import numpy as np
import torch
from algorithm_pages import ON_POLICY, PAGES, composed, parts, trainer_of, write

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images" / "algorithms"

PER_ROLLOUT, ROLLOUTS = 128, 60
"""Completions of a rollout, before fresh draws and greedy baselines, and rollouts of a run."""

SETTINGS = ["data.task.max_operand=12", "data.task.val_rows=10", "optimizer.lr=2e-4"]
SETTINGS += ["scheduler=constant", "scheduler.warmup_steps=5"]

OWN = {"high_entropy": ("algo.selection.share=0.5", "a fifth of two or three tokens is less than one")}
"""What a preset cannot do without here, and why."""

BLUE, GREY, INK = "#2f6db3", "#8a8f98", "#2b2f36"
WINDOW = 9
"""Rollouts that a point of a drawn curve is the mean of."""

Curve = list[tuple[int, float]]
"""`(completions sampled so far, mean reward)` of each rollout."""
Curves = dict[str, dict[int, Curve]]
"""Of each preset and seed."""


class Watch(L.Callback):
    """Counts completions, and takes down the mean reward of every rollout's first draw."""

    def __init__(self) -> None:
        self.curve: Curve = []
        self._completions, self._first = 0, False

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        reward = pl_module.reward

        def watched(batch: Any, completions: Any) -> Any:
            scores = reward(batch, completions)
            self._completions += len(completions)
            if self._first:
                self.curve.append((self._completions, float(scores.total.nanmean())))
                self._first = False
            return scores

        pl_module.reward = watched

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._first = batch.slot == 0


def run(preset: str, seed: int, rollouts: int = ROLLOUTS) -> Curve:
    """Train one policy."""
    config, _ = composed(preset)
    prompts = max(8, PER_ROLLOUT // config.algo.group_size)
    overrides = [*SETTINGS, f"data.prompts_per_rollout={prompts}", f"seed={seed}"]
    overrides += [OWN[preset][0]] if preset in OWN else []
    module, data = parts(composed(preset, *overrides)[0])
    L.seed_everything(seed, verbose=False)
    watch = Watch()
    steps = module.minibatches * module.iterations * rollouts
    trainer_of(False, max_steps=steps, callbacks=[watch]).fit(module, datamodule=data)
    return watch.curve


# ------------------------------------------------------------------------------------------------------------- the file


def read(path: Path) -> Curves:
    """The curves of a file; none where there is none."""
    curves: Curves = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                curve = curves.setdefault(row["preset"], {}).setdefault(int(row["seed"]), [])
                curve.append((int(row["completions"]), float(row["reward"])))
    return curves


def save(path: Path, curves: Curves) -> None:
    """Write them beside the file first: a run that is ended in the middle leaves the last whole one."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["preset", "seed", "completions", "reward"])
        for preset, seeds in sorted(curves.items()):
            for seed, curve in sorted(seeds.items()):
                writer.writerows([preset, seed, completions, f"{reward:.4g}"] for completions, reward in curve)
    fresh.replace(path)


# ---------------------------------------------------------------------------------------------------------- the figures


def smooth(curve: Curve) -> np.ndarray:
    """Centred means of the reward over `WINDOW` rollouts, fewer at the ends."""
    rewards = np.array([reward for _, reward in curve])
    half = WINDOW // 2
    return np.array([rewards[max(0, i - half) : i + half + 1].mean() for i in range(len(rewards))])


def final(curve: Curve) -> float:
    """Mean reward of the last tenth of the rollouts."""
    last = curve[-max(1, len(curve) // 10) :]
    return float(np.mean([reward for _, reward in last]))


def draw(axes: Axes, seeds: dict[int, Curve], label: str, color: str, alpha: float = 0.2) -> None:
    """The mean over seeds, and the band from the lowest to the highest."""
    rewards = np.stack([smooth(curve) for curve in seeds.values()])
    at = np.arange(1, rewards.shape[1] + 1)
    axes.fill_between(at, rewards.min(0), rewards.max(0), color=color, alpha=alpha, linewidth=0)
    axes.plot(at, rewards.mean(0), color=color, linewidth=2, label=label)


def styled(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.set_axisbelow(True)


def picture(curves: Curves, preset: str, path: Path) -> None:
    """One preset, with GRPO in grey."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    if preset != "grpo" and "grpo" in curves:
        draw(axes, curves["grpo"], "grpo", GREY, alpha=0.15)
    draw(axes, curves[preset], preset, BLUE)
    axes.set_ylim(0, 0.8)
    axes.set_xlabel(f"rollouts of {PER_ROLLOUT} completions")
    axes.set_ylabel("reward (accuracy)")
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.7)
    axes.legend(frameon=False, loc="lower right")
    styled(axes)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def overview(curves: Curves, path: Path) -> None:
    """The final reward of every preset: each seed, and their mean."""
    ends = {preset: [final(curve) for curve in seeds.values()] for preset, seeds in curves.items()}
    order = sorted(ends, key=lambda preset: float(np.mean(ends[preset])))
    figure, axes = plt.subplots(figsize=(6.4, 0.6 + 0.19 * len(order)), layout="constrained")
    for place, preset in enumerate(order):
        values = ends[preset]
        axes.plot([min(values), max(values)], [place, place], color=BLUE, alpha=0.35, linewidth=3)
        axes.plot(values, [place] * len(values), "o", color=BLUE, markersize=3)
        axes.plot([float(np.mean(values))], [place], "|", color=INK, markersize=9)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlabel("final reward: a point is a seed, the bar their mean")
    axes.grid(axis="x", color=GREY, alpha=0.2, linewidth=0.7)
    styled(axes)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def pictures(curves: Curves, presets: Sequence[str], out: Path) -> None:
    """The figures of these presets, and the one of all that there are."""
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK})
    for preset in presets:
        picture(curves, preset, out / f"{preset}.png")
    overview(curves, out / "overview.png")


def section(curves: Curves, preset: str) -> str:
    """What the page of a preset says: the figure, the command that made it, and what is seen."""
    numbers = f"Reward in the last tenth of {ROLLOUTS} rollouts: {spread(curves[preset])}"
    if preset != "grpo" and "grpo" in curves:
        numbers += f"; [grpo](grpo.md) has {spread(curves['grpo'])}"
    sampled = np.mean([curve[-1][0] for curve in curves[preset].values()]) / ROLLOUTS
    if sampled > 1.1 * PER_ROLLOUT:
        numbers += f". {sampled:.0f} completions were sampled a rollout"
    if preset in OWN:
        setting, reason = OWN[preset]
        numbers += f". This curve is with `{setting}`: {reason}, and with the default the reward does not rise here"
    return f"""![Reward against rollouts, mean and range of the seeds](../images/algorithms/{preset}.png)

```bash
python scripts/learning_curves.py {preset}
```

{numbers}. The [setting](README.md#learning-curves) is the same for all presets."""


def spread(seeds: dict[int, Curve]) -> str:
    """The mean over seeds, with the lowest and the highest."""
    ends = [final(curve) for curve in seeds.values()]
    return f"{np.mean(ends):.2f} (seeds: {min(ends):.2f} to {max(ends):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "presets", nargs="*", metavar="PRESET", help="choices of algo= that learn from rewards; default: all"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of curves.csv and the figures")
    parser.add_argument(
        "--missing", action="store_true", help="train only what curves.csv has not; goes on after a stop"
    )
    parser.add_argument("--draw-only", action="store_true", help="train nothing: figures and pages from curves.csv")
    given = parser.parse_args()
    if unknown := sorted(set(given.presets) - set(ON_POLICY)):
        parser.error(
            f"{', '.join(unknown)}: no choice of algo= that learns from rewards. Those: {', '.join(ON_POLICY)}."
        )
    presets, out = given.presets or ON_POLICY, given.out
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    curves = read(out / "curves.csv")
    jobs = [] if given.draw_only else [(preset, seed) for preset in presets for seed in given.seeds]
    if given.missing:
        jobs = [(preset, seed) for preset, seed in jobs if seed not in curves.get(preset, {})]
    for number, (preset, seed) in enumerate(jobs, 1):
        began = time.perf_counter()
        curves.setdefault(preset, {})[seed] = curve = run(preset, seed)
        seconds = time.perf_counter() - began
        sys.stdout.write(
            f"{number}/{len(jobs)}  {preset} seed {seed}: {curve[0][1]:.2f} -> {final(curve):.2f} in {seconds:.0f} s\n"
        )
        sys.stdout.flush()
        save(out / "curves.csv", curves)
    if "grpo" in presets:  # it stands in every figure and on every page
        presets = [preset for preset in ON_POLICY if preset in curves]
    pictures(curves, presets, out)
    if out == IMAGES:
        for preset in presets:
            write(PAGES / f"{preset}.md", {"curve": section(curves, preset)})


if __name__ == "__main__":
    main()
