"""A whole post-training chain on the shipped policy, each stage learning from the last: `make chain`.

    python scripts/chain.py OUT [--picture FILE.png] [--share 0.5]

On sums up to 30, of which 150 are held out from every stage:

    tiny -> sft -> rollouts -> dpo            pairs of the policy's own completions
                       |
    tiny -> judge -> reward_model -> ppo, online_dpo     both from sft, and neither sees a right answer

`sft` imitates for a moment and `judge` for long: the reward model begins as the one that knows more. Its pairs are
completions of `sft` on training sums, right ones and wrong ones; all that ppo and online_dpo learn comes through it.

Every stage is one command, printed as it starts; stages that do not wait for each other run beside each other. A stage
whose run in OUT is finished is not run again. `chain.json` has the numbers, and so has the table at the end: accuracy
on the held-out sums, and the gain over the stage that it began with, each with its 95 % interval over prompts. Five to
six minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from run_curves import BLUE, GREY, INK, look, plt

from lit_rl.algorithms import SFT
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.cli.process import filter_warnings
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.tasks import AdditionText
from lit_rl.rewards import exact_match

ROOT = Path(__file__).resolve().parents[1]
MAX_OPERAND, HELD_OUT, DRAWS = 30, 150, 8
SUMS = (f"data.task.max_operand={MAX_OPERAND}", f"data.task.val_rows={HELD_OUT}")
SCORED = ("reward=reward_model", "reward.functions.reward_model.name={out}/reward_model/hf")


@dataclass(frozen=True)
class Stage:
    """One run of the chain.

    Args:
        does: What it is, in a few words.
        begins: The stage whose model it begins with; None is the shipped policy.
        steps: Optimizer steps.
        settings: Of `train.py`; `{out}` stands for the folder of all runs.
    """

    does: str
    begins: str | None
    steps: int
    settings: tuple[str, ...]

    def command(self, name: str, out: Path, share: float) -> list[str]:
        """Return the run that takes this share of the steps, and two at least."""
        start = [f"model.name={out}/{self.begins}/hf"] if self.begins else []
        settings = [setting.format(out=out) for setting in self.settings]
        ends = [f"trainer.max_steps={max(2, round(self.steps * share))}", "trainer.max_epochs=-1"]
        return ["train.py", "model=tiny", *start, *settings, *ends, f"run_dir={out}/{name}"]


STAGES = {
    "sft": Stage("imitates right answers for a moment", None, 30, ("algo=sft", *SUMS, "optimizer.lr=3e-4")),
    "judge": Stage(
        "imitates right answers for long", None, 300, ("algo=sft", *SUMS, "optimizer.lr=2e-3", "scheduler=cosine")
    ),
    "rollouts": Stage(
        "writes completions and pairs them; learns nothing",
        "sft",
        30,
        (
            *("algo=grpo", *SUMS, "callbacks=preference_sets", "callbacks.preference_sets.ranked_per_group=8"),
            *("sampling.temperature=1.5", "data.prompts_per_rollout=128"),
            "optimizer.lr=1e-12",  # only what it writes is wanted
        ),
    ),
    "reward_model": Stage(
        "tells right from wrong completions",
        "judge",
        1000,
        (
            *("algo=reward_model", "data=preferences", "data.path={out}/rollouts/datasets/ranked.jsonl"),
            *("data.val_fraction=0.1", "data.batch_size=64", "optimizer.lr=5e-4", "scheduler=cosine"),
        ),
    ),
    "dpo": Stage(
        "prefers its better completions (algo=rpo)",
        "sft",
        100,
        (
            *("algo=rpo", "data=preferences", "data.path={out}/rollouts/datasets/pairs.jsonl"),
            *("data.batch_size=64", "optimizer.lr=3e-4"),
        ),
    ),
    "ppo": Stage(
        "is scored by the reward model",
        "sft",
        320,
        (
            *("algo=ppo", *SUMS, *SCORED, "algo.reward_beta=0.3", "data.prompts_per_rollout=256"),
            "optimizer.lr=5e-4",
        ),
    ),
    "online_dpo": Stage(
        "is judged by the reward model, pair by pair",
        "sft",
        120,
        ("algo=online_dpo", *SUMS, *SCORED, "data.prompts_per_rollout=128", "optimizer.lr=3e-4"),
    ),
}
WAVES = (("sft", "judge"), ("rollouts",), ("reward_model", "dpo"), ("ppo", "online_dpo"))
"""Stages of a wave run beside each other."""

POLICIES = ("sft", "dpo", "ppo", "online_dpo")


def run(wave: Sequence[str], out: Path, share: float) -> None:
    """Run the stages of a wave that are not finished. Exits where one fails, with the end of what it said.

    Args:
        wave: Names of stages.
        out: Folder of the runs.
        share: Of the steps of each stage, above 0.
    """
    began = time.perf_counter()
    started = {}
    for name in wave:
        if not (out / name / "hf" / "config.json").is_file():
            command = STAGES[name].command(name, out, share)
            print(f"{name}: {STAGES[name].does}\n  python {shlex.join(command)}", flush=True)
            with (out / f"{name}.log").open("w") as log:
                threads = {**os.environ, "OMP_NUM_THREADS": "1"}
                started[name] = subprocess.Popen(
                    [sys.executable, *command], cwd=ROOT, env=threads, stdout=log, stderr=subprocess.STDOUT
                )
    failed = [name for name, process in started.items() if process.wait()]
    for name in failed:
        print(f"{name} failed:\n{(out / f'{name}.log').read_text()[-3000:]}", file=sys.stderr)
    if failed:
        raise SystemExit(1)
    if started:
        print(f"  {' and '.join(started)}: {time.perf_counter() - began:.0f} s", flush=True)


def shares(model: str, temperature: float) -> np.ndarray:
    """Return, of each held-out sum, the share of right answers among `DRAWS` draws; of one, where greedy."""
    draws = Evaluation(group_size=DRAWS if temperature else 1, temperature=temperature)
    data = SupervisedDataModule(task=AdditionText(MAX_OPERAND, HELD_OUT))
    return answered(lambda right: SFT(model, reward=right, sampling=Sampling(max_new_tokens=6), evaluation=draws), data)


def answered(module_of: Callable[[Any], L.LightningModule], data: L.LightningDataModule, **trainer: Any) -> np.ndarray:
    """Return the mean of `exact_match` of each held-out question, in one order.

    Args:
        module_of: Makes the module of a reward.
        data: The questions.
        trainer: Further arguments of the Trainer.
    """
    found: dict[str, list[float]] = defaultdict(list)

    def right(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float | None]:
        scores = exact_match(prompts, completions, answer=answer)
        for prompt, score in zip(prompts, scores, strict=True):
            found[str(prompt)].append(float(score or 0))
        return scores

    quiet: dict[str, Any] = {f"enable_{part}": False for part in ("checkpointing", "progress_bar", "model_summary")}
    validating = L.Trainer(accelerator="cpu", inference_mode=False, logger=False, **quiet, **trainer)
    validating.validate(module_of(right), data, verbose=False)
    return np.array([np.mean(scores) for _, scores in sorted(found.items())])


def interval(values: np.ndarray) -> list[float]:
    """Return mean, and its 95 % interval over prompts."""
    mean, half = values.mean(), 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    return [round(float(value), 4) for value in (mean, mean - half, mean + half)]


def told_apart(out: Path) -> list[float]:
    """Return share of the pairs of held-out prompts that the reward model tells apart, before and after its
    training."""
    lines = [json.loads(line) for line in (out / "reward_model" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    return [round(accuracy[0], 4), round(accuracy[-1], 4)]


def measured(out: Path) -> dict[str, Any]:
    """Return what every stage has learned. `sampled`, `greedy` and `gain`, which is of `sampled`, are `[mean, low,
    high]`."""
    models = {"tiny": "tiny", **{name: str(out / name / "hf") for name in POLICIES}}
    sampled = {name: shares(model, 1.0) for name, model in models.items()}
    found: dict[str, Any] = {}
    for name, model in models.items():
        found[name] = {"sampled": interval(sampled[name]), "greedy": interval(shares(model, 0.0))}
        if name != "tiny":
            begins = STAGES[name].begins or "tiny"
            found[name] |= {"begins": begins, "gain": interval(sampled[name] - sampled[begins])}
    return {"policies": found, "reward_model": told_apart(out)}


def show(found: dict[str, Any]) -> None:
    table = Table("policy", "begins with", "sampled at 1", "greedy", "gain, sampled", title="Right answers, held out")
    for name, of in found["policies"].items():
        gain = _cell(of["gain"], "+.2f") if "gain" in of else ""
        table.add_row(name, of.get("begins", ""), _cell(of["sampled"]), _cell(of["greedy"]), gain)
    console = Console(width=96, highlight=False)
    console.print(table)
    before, after = found["reward_model"]
    console.print(
        f"Pairs of held-out prompts that the reward model tells apart: {before:.2f} before, {after:.2f} after"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the accuracy of each policy with its interval, and a line from the stage that it began with."""
    look()
    of = found["policies"]
    figure, axes = plt.subplots(figsize=(6.4, 2.9))
    places = {name: place for place, name in enumerate(of)}
    for name, place in places.items():
        mean, low, high = of[name]["sampled"]
        if "begins" in of[name]:
            before = of[of[name]["begins"]]["sampled"][0]
            axes.plot([before, mean], [places[of[name]["begins"]], place], color=GREY, lw=1, ls=":", zorder=1)
        axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=BLUE, capsize=3, zorder=2)
        axes.annotate(  # behind the interval, where no line from another stage passes
            f"{mean:.2f}", (high, place), (7, 0), textcoords="offset points", va="center", color=INK, size=9
        )
    axes.set_yticks(list(places.values()), list(places))
    axes.set_ylim(len(places) - 0.5, -0.7)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of right answers on held-out sums, sampled at temperature 1, 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _cell(values: Sequence[float], style: str = ".2f") -> str:
    mean, low, high = (format(value, style) for value in values)
    return f"{mean}  [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--picture", type=Path, help="where to draw the accuracies")
    parser.add_argument("--share", type=float, default=1, help="of the steps of each stage, for a shorter chain (1)")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for wave in WAVES:
        run(wave, out, given.share)
    print("measuring ...", flush=True)
    filter_warnings()
    torch.set_num_threads(1)
    found = measured(out)
    (out / "chain.json").write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    if given.picture:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
