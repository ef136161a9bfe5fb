"""Train the shipped policy with the presets that learn from what it writes, and draw it: docs/images/algorithms.

    python scripts/learning_curves.py [PRESET ...] [--seeds 0 1 2]

Without a preset: all of those, some ten seconds a run. Every run has the same number of rollouts of the same size, the
same learning rate and the same prompts, and the preset's own settings else. A reward is that of a rollout's completions
as they were first sampled; `curves.csv` has one line a rollout, and the lines of other presets and seeds are kept.
Presets that learn from a data set: `offline_curves.py`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import curve_runs
import lightning as L
import matplotlib.pyplot as plt
import numpy as np
from algorithm_pages import ON_POLICY, ONLINE_PAIRS, PAGES, composed, parts, silence_lightning, trainer_of, write
from curve_runs import BLUE, GREY, IMAGES, INK, band, spread, styled, written
from matplotlib.axes import Axes

PRESETS = sorted([*ON_POLICY, *ONLINE_PAIRS])

PER_ROLLOUT, ROLLOUTS = 128, 60
"""Completions of a rollout, before fresh draws and greedy baselines, and rollouts of a run."""

SETTINGS = ["data.task.max_operand=12", "data.task.val_rows=10", "optimizer.lr=2e-4"]
SETTINGS += ["scheduler=constant", "scheduler.warmup_steps=5"]

OWN = {
    "high_entropy": (
        "algo.selection.share=0.5",
        "a fifth of two or three tokens is less than one, and with the default the reward does not rise here",
    ),
    "iterative_dpo": ("reference.every=15", "with the default the run has one round of 50 steps and a part of another"),
}
"""What a preset cannot do without here, and why."""

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
                own = scores.total[:: 2 if getattr(pl_module, "opponent_writes", False) else 1]
                self.curve.append((self._completions, float(own.nanmean())))
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
    """Write all curves to a file."""
    rows = (
        (preset, seed, completions, f"{reward:.4g}")
        for preset, seeds in sorted(curves.items())
        for seed, curve in sorted(seeds.items())
        for completions, reward in curve
    )
    written(path, ["preset", "seed", "completions", "reward"], rows)


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
    """The smoothed rewards of the seeds."""
    rewards = np.stack([smooth(curve) for curve in seeds.values()])
    band(axes, range(1, rewards.shape[1] + 1), rewards, label, color, alpha)


def picture(curves: Curves, preset: str, path: Path) -> None:
    """One preset, with GRPO in grey."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    if preset != "grpo" and "grpo" in curves:
        draw(axes, curves["grpo"], "grpo", GREY, alpha=0.15)
    draw(axes, curves[preset], preset, BLUE)
    axes.set_ylim(0, 0.8)
    axes.set_xlabel(f"rollouts of {PER_ROLLOUT} completions")
    axes.set_ylabel("reward (accuracy)")
    axes.legend(frameon=False, loc="upper left")
    styled(axes, "y")
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
    axes.set_xlabel(f"reward (accuracy) in the last tenth of {ROLLOUTS} rollouts")
    axes.set_title("Each preset: a point is a seed, the tick their mean", fontsize=10, loc="left")
    styled(axes, "x")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def pictures(curves: Curves, presets: Sequence[str], out: Path) -> None:
    """The figures of these presets, and the one of all that there are."""
    curve_runs.look()
    for preset in presets:
        picture(curves, preset, out / f"{preset}.png")
    overview(curves, out / "overview.png")


def section(curves: Curves, preset: str) -> str:
    """What the page of a preset says: the figure, the command that made it, and what is seen."""
    numbers = f"Reward in the last tenth of {ROLLOUTS} rollouts: {ends(curves[preset])}"
    if preset != "grpo" and "grpo" in curves:
        numbers += f"; [grpo](grpo.md) has {ends(curves['grpo'])}"
    sampled = np.mean([curve[-1][0] for curve in curves[preset].values()]) / ROLLOUTS
    if sampled > 1.1 * PER_ROLLOUT:
        numbers += f". {sampled:.0f} completions were sampled a rollout"
    if preset in OWN:
        setting, reason = OWN[preset]
        numbers += f". This curve is with `{setting}`: {reason}"
    return f"""![Reward against rollouts, mean and range of the seeds](../images/algorithms/{preset}.png)

```bash
python scripts/learning_curves.py {preset}
```

{numbers}. The [setting](README.md#learning-curves) is the same for all presets."""


def ends(seeds: dict[int, Curve]) -> str:
    """The final reward: the mean over seeds, with the lowest and the highest."""
    return spread([final(curve) for curve in seeds.values()])


def table(curves: Curves) -> str:
    """The final rewards of the presets whose pairs a judge compares, beside those of GRPO."""
    rows = [
        f"| [{preset}]({preset}.md) | {ends(curves[preset])} |"
        for preset in [*ONLINE_PAIRS, "grpo"]
        if preset in curves
    ]
    return "\n".join(["| `algo=` | final reward |", "|---|---|", *rows])


def main() -> None:
    silence_lightning()
    asked = curve_runs.asked(__doc__, PRESETS, "learn from what the policy writes")
    presets, path = asked.presets, asked.out / "curves.csv"
    curves = read(path)
    curve_runs.train(
        asked.jobs(curves),
        curves,
        run,
        lambda measured: save(path, measured),
        lambda curve: f"{curve[0][1]:.2f} -> {final(curve):.2f}",
    )
    if "grpo" in presets:  # it stands in every figure and on every page
        presets = [preset for preset in PRESETS if preset in curves]
    pictures(curves, presets, asked.out)
    if asked.out == IMAGES:
        for preset in presets:
            write(PAGES / f"{preset}.md", {"curve": section(curves, preset)})
        write(PAGES / "README.md", {"judged": table(curves)})


if __name__ == "__main__":
    main()
