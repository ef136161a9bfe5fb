"""Draw what runs on the shipped digits learned: rewards of their rollouts, and held-out images as they are read.

python scripts/digits_picture.py OUT.png GRPO_RUN_DIR PPO_RUN_DIR

The images are the first of those that training never sees, read greedily by the shipped policy and by the export of the
first run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from plot_run import BLUE, GREEN, ORANGE, plt, read, series, smooth

from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.row_visuals import image_of
from lit_rl.data.tasks import Digits
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel

ROWS, COLUMNS = 3, 6
RED = "#c0392b"


def answers(name: str, images: list[dict[str, Any]]) -> list[str]:
    """What a policy reads in each of the images."""
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


def main(target: str, *runs: str) -> None:
    """Draw the runs, of which the first has an export."""
    figure, (curves, place) = plt.subplots(1, 2, figsize=(10, 3.2), width_ratios=[1.1, 1])
    for name, run, colour in zip(("GRPO", "PPO"), runs, (BLUE, ORANGE)):
        points = series(read(Path(run)), "train/reward")
        curves.plot(*zip(*points), ".", color=colour, alpha=0.2, markeredgewidth=0)
        curves.plot(*zip(*smooth(points, 15)), color=colour, label=name)
    curves.set(xlabel="optimizer step", ylabel="sampled digits that were right", ylim=(0, 1))
    curves.legend(frameon=False, loc="lower right")
    curves.spines[["top", "right"]].set_visible(False)

    images = Digits().val()[: ROWS * COLUMNS]
    before, after = answers("digits", images), answers(str(Path(runs[0]) / "hf"), images)
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


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
