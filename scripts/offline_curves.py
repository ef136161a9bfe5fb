"""Train the shipped policy with the presets that learn from a data set, and draw it: docs/images/algorithms.

    python scripts/offline_curves.py [PRESET ...] [--seeds 0 1 2]

Without a preset: all of those, some fifteen seconds a run. Every run has the same sums, batches, steps and learning
rate, and the preset's own settings else; models that score have a setting of their own. What is measured are sums that
no run learns from; `offline_curves.csv` has one line a validation, and the lines of other presets and seeds are kept.
Presets that learn from what the policy writes: `learning_curves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import curve_runs
import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import torch
from algorithm_pages import (
    CLASSES,
    COMPLETED,
    FAMILIES,
    OFFLINE,
    PAGES,
    composed,
    parts,
    silence_lightning,
    trainer_of,
    write,
)
from curve_runs import BLUE, GREY, IMAGES, ORANGE, band, spread, styled
from offline_points import Curve, Curves, Point, column, read, save

from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.reward_modeling import ScalarModule

SCORERS = [name for name in OFFLINE if issubclass(CLASSES[name], ScalarModule)]

HELD_OUT, ROWS = 200, 64
"""Sums that are measured, and rows of an optimizer step."""

STEPS, EVERY, LR, OPERAND = 100, 10, "1e-4", 30
SCORER_STEPS, SCORER_EVERY, SCORER_LR, SCORER_OPERAND = 400, 40, "3e-4", 99
"""Optimizer steps, steps between validations, learning rate, largest operand: of policies, of models that score."""

SETTINGS = [f"data.task.val_rows={HELD_OUT}", f"data.val_batch_size={HELD_OUT}", f"data.batch_size={ROWS}"]
SETTINGS += ["scheduler=constant", "scheduler.warmup_steps=5"]

OWN = {
    "tr_dpo": ("reference.every=20", "the default of 512 steps is longer than the run"),
    "gkd": (COMPLETED["gkd"][0], "the student is the first layer of the shipped policy, which is its teacher"),
}
"""What a preset cannot do without here, and why."""

SEEN = {
    "apo_down": "It lets right answers become less likely: it is for data worse than the policy, and these are right",
    "discopop": "Where policy and reference are one, its loss rises with the margin, so it learns the wrong side first",
    "kto": "Its baseline is 0 at nearly every step, so the curve is that of [apo_zero_unpaired](apo_zero_unpaired.md)",
    "gkd": "The student writes no sum before; it learns the form of an answer first, and the sums need more steps",
    "process_reward_model": "It says no more than the more frequent label yet: that takes 900 steps, see above",
}
"""Why a curve is as it is, where it is not what one would think."""


class Watch(L.Callback):
    """Takes down a point at every validation, the one before the first step included."""

    def __init__(self) -> None:
        self.curve: Curve = []
        self._ratios: list[torch.Tensor] = []

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if not isinstance(pl_module, VerdictModule):
            return
        ratios = pl_module.ratios

        def watched(batch: Any, scores: Any) -> torch.Tensor:
            found = ratios(batch, scores)
            if not pl_module.training:
                self._ratios.append(found.detach())
            return found

        pl_module.ratios = watched

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        told = found.get("val/rewards/accuracies", found.get("val/accuracy"))
        if self._ratios:  # a pair gives two rows, the right one first
            ratios = torch.cat(self._ratios)
            told = float((ratios[::2] > ratios[1::2]).float().mean())
            self._ratios = []
        if pl_module.needs_reference and not pl_module.global_step:
            told = None  # policy and reference are the same
        self.curve.append(Point(pl_module.global_step, found.get("val/reward"), told, found.get("val/logps/chosen")))


def setting(preset: str, seed: int) -> Any:
    """The config of a run."""
    lr, operand = (SCORER_LR, SCORER_OPERAND) if preset in SCORERS else (LR, OPERAND)
    own = [OWN[preset][0]] if preset in OWN else []
    overrides = [*own, *SETTINGS, f"data.task.max_operand={operand}", f"optimizer.lr={lr}", f"seed={seed}"]
    return composed(preset, *overrides)[0]


def run(preset: str, seed: int, steps: int | None = None, every: int | None = None) -> Curve:
    """Train one model."""
    usual, between = (SCORER_STEPS, SCORER_EVERY) if preset in SCORERS else (STEPS, EVERY)
    module, data = parts(setting(preset, seed))
    L.seed_everything(seed, verbose=False)
    watch = Watch()
    validated = {"limit_val_batches": 1.0, "num_sanity_val_steps": -1, "check_val_every_n_epoch": None}
    validated |= {"val_check_interval": every or between, "max_steps": steps or usual}
    trainer_of(False, callbacks=[watch], **validated).fit(module, datamodule=data)
    return watch.curve


# ---------------------------------------------------------------------------------------------------------- the figures


def level(curves: Curves, preset: str) -> tuple[float, str] | None:
    """What a curve is to be compared with, and its name; None where nothing is known."""
    if preset == "process_reward_model":
        labels = [label for row in parts(setting(preset, 0))[1].task.val() for label in row["labels"]]
        right = float(np.mean(labels))
        return max(right, 1 - right), "the more frequent label"
    if preset in SCORERS:
        return 0.5, "chance"
    answered = column(curves, "sft", "answered") if "sft" in curves else None
    if answered is None:
        return None
    return float(answered[:, 0].mean()), "teacher" if preset == "gkd" else "shipped policy"


def picture(curves: Curves, preset: str, path: Path) -> None:
    """One preset: sums that are answered right, and pairs that are told apart."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    if known := level(curves, preset):
        axes.axhline(known[0], color=GREY, linestyle="--", linewidth=1.2, label=known[1])
    steps = [point.step for point in next(iter(curves[preset].values()))]
    labels = {"answered": "answered right", "told_apart": told(preset)}
    for (name, label), color in zip(labels.items(), (BLUE, ORANGE)):
        if (seeds := column(curves, preset, name)) is not None:
            band(axes, steps, seeds, label, color)
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"optimizer steps of {ROWS} rows")
    axes.set_ylabel(f"share of {HELD_OUT} held-out sums" if preset != "process_reward_model" else "share of steps")
    figure.legend(frameon=False, loc="outside upper left", ncols=3)
    styled(axes, "y")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def told(preset: str) -> str:
    """What `Point.told_apart` is of."""
    return "steps judged right" if preset == "process_reward_model" else "pairs told apart"


def pictures(curves: Curves, presets: Sequence[str], out: Path) -> None:
    """The figures of these presets."""
    curve_runs.look()
    for preset in presets:
        picture(curves, preset, out / f"{preset}.png")


# ------------------------------------------------------------------------------------------------------------ the pages


def section(curves: Curves, preset: str) -> str:
    """What the page of a preset says: the figure, the command that made it, and what is seen."""
    said = []
    if (answered := column(curves, preset, "answered")) is not None:
        said.append(
            f"Held-out sums answered right: {answered[:, 0].mean():.2f} before, {spread(answered[:, -1])} after"
        )
    if (apart := column(curves, preset, "told_apart")) is not None:
        said.append(f"Held-out {told(preset)}: {spread(apart[:, -1])}")
    if (logp := column(curves, preset, "logp")) is not None:
        said.append(f"`val/logps/chosen`: {logp[:, 0].mean():.2f} before, {logp[:, -1].mean():.2f} after")
    if preset in OWN:
        own, reason = OWN[preset]
        said.append(f"This curve is with `{own}`: {reason}")
    said += [SEEN[preset]] if preset in SEEN else []
    return f"""![Shares against optimizer steps, mean and range of the seeds](../images/algorithms/{preset}.png)

```bash
python scripts/offline_curves.py {preset}
```

{". ".join(said)}. The [setting](README.md#learning-curves) is shared with the other presets."""


def table(curves: Curves) -> str:
    """What every preset has come to, a table a family, the best first."""
    tables = []
    for title, belongs in FAMILIES.items():
        members = [preset for preset in OFFLINE if preset in curves and belongs(CLASSES[preset])]
        rows = []
        for preset in members:
            cells = [column(curves, preset, name) for name in ("answered", "told_apart")]
            shown = ["" if cell is None else spread(cell[:, -1]) for cell in cells]
            best = next(cell[:, -1].mean() for cell in cells if cell is not None)
            rows.append((best, f"| [{preset}]({preset}.md) | {shown[0]} | {shown[1]} |"))
        if rows:
            rows = [row for _, row in sorted(rows, reverse=True)]
            tables.append("\n".join([f"| {title} | answered right | told apart |", "|---|---|---|", *rows]))
    return "\n\n".join(tables)


def main() -> None:
    silence_lightning()
    asked = curve_runs.asked(__doc__, OFFLINE, "learn from a data set")
    presets, path = asked.presets, asked.out / "offline_curves.csv"
    curves = read(path)
    curve_runs.train(
        asked.jobs(curves),
        curves,
        run,
        lambda measured: save(path, measured),
        lambda curve: " -> ".join(_shown(point) for point in (curve[0], curve[-1])),
    )
    if "sft" in presets:  # its first point, the shipped policy, stands in the figures of all
        presets = [preset for preset in OFFLINE if preset in curves]
    pictures(curves, presets, asked.out)
    if asked.out == IMAGES:
        for preset in presets:
            write(PAGES / f"{preset}.md", {"curve": section(curves, preset)})
        write(PAGES / "README.md", {"data set": table(curves)})


def _shown(point: Point) -> str:
    return "/".join("-" if value is None else f"{value:.2f}" for value in point[1:3])


if __name__ == "__main__":
    main()
