"""Train the shipped policy with every preset, and draw it: docs/images/algorithms and the pages of docs/algorithms.

    python scripts/learning_curves.py online [PRESET ...] [--seeds 0 1 2]     # learn from what they write
    python scripts/learning_curves.py offline [PRESET ...] [--seeds 0 1 2]    # learn from a data set
    python scripts/learning_curves.py terms [TERM ...] [--seeds 0 1 2]        # terms of GRPO that have no preset

Without a name: all of the kind. Lines of other names and seeds are kept in the files of numbers.

`online`: some ten seconds a run. Every run has the same number of rollouts of the same size, the same learning rate and
the same prompts, and the preset's own settings else. A reward is that of a rollout's completions as they were first
sampled; `curves.csv` has one line a rollout.

`offline`: some fifteen seconds a run. Every run has the same sums, batches, steps and learning rate, and the preset's
own settings else; models that score have a setting of their own. What is measured are sums that no run learns from;
`offline_curves.csv` has one line a validation.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from algorithm_pages import (
    CLASSES,
    COMPLETED,
    FAMILIES,
    OFFLINE,
    ON_POLICY,
    ONLINE_PAIRS,
    PAGES,
    composed,
    parts,
    silence_lightning,
    trainer_of,
    write,
)
from matplotlib.axes import Axes
from run_curves import BLUE, GREEN, GREY, INK, ORANGE, band, look, plt, spread, styled, written

from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.reward_modeling import ScalarModule
from lit_rl.cli.build import build, plain
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation import Generator
from lit_rl.generation.native import NativeGenerator

# --------------------------------------------------------------------------------------------- runs, one after another


IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images" / "algorithms"


AnyCurves = dict[str, dict[int, Any]]
"""A curve of each preset and seed."""


@dataclass(frozen=True)
class Asked:
    """The wishes of the command line.

    Args:
        presets: Names, in the order of the runs.
        seeds: Of each of them.
        out: Folder of the numbers and the figures.
        missing: Train only what there is no curve of.
        draw_only: Train nothing.
    """

    presets: list[str]
    seeds: list[int]
    out: Path
    missing: bool
    draw_only: bool

    def jobs(self, curves: AnyCurves) -> list[tuple[str, int]]:
        """Return presets and seeds to train, a seed of all before the next; `curves` are those that there are."""
        every = [] if self.draw_only else [(preset, seed) for seed in self.seeds for preset in self.presets]
        return [(name, seed) for name, seed in every if not (self.missing and seed in curves.get(name, {}))]


def train(
    jobs: Sequence[tuple[str, int]],
    curves: AnyCurves,
    run: Callable[[str, int], Any],
    save: Callable[[AnyCurves], None],
    told: Callable[[Any], str],
) -> None:
    """Train one policy after another on one core, and save every curve as soon as it is there."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for number, (preset, seed) in enumerate(jobs, 1):
        began = time.perf_counter()
        curves.setdefault(preset, {})[seed] = curve = run(preset, seed)
        seconds = time.perf_counter() - began
        sys.stdout.write(f"{number}/{len(jobs)}  {preset} seed {seed}: {told(curve)} in {seconds:.0f} s\n")
        sys.stdout.flush()
        save(curves)


# ----------------------------------------------------------------------------------------- from what the policy writes


ONLINE = sorted([*ON_POLICY, *ONLINE_PAIRS])

PER_ROLLOUT, ROLLOUTS = 128, 60
"""Completions of a rollout, before fresh draws and greedy baselines, and rollouts of a run."""

SETTINGS = ["data.task.max_operand=12", "data.task.val_rows=10", "optimizer.lr=2e-4"]
SETTINGS += ["scheduler=constant", "scheduler.warmup_steps=5"]

_NO_READER = (
    "the shipped policy reads nothing but sums, and of those it is no better a teacher: nothing is learned here; "
    "[SmolLM2 learns](../real-model.md#its-own-teacher)"
)
OWN = {
    "high_entropy": (
        "algo.selection.share=0.5",
        "a fifth of two or three tokens is less than one, and with the default the reward does not rise here",
    ),
    "iterative_dpo": ("reference.every=15", "with the default the run has one round of 50 steps and a part of another"),
    "opd": (
        COMPLETED["opd"][0],
        "the student is the first layer of the shipped policy and begins at 0.01; its teacher, the whole policy, is at "
        "0.08",
    ),
    "sdft": (
        "algo.teacher.context.template='$context+0='",
        _NO_READER,
    ),
    "sdpo": (
        "algo.teacher.context.template='$context' algo.teacher.context.solution_template='$solution+0='",
        _NO_READER,
    ),
}
"""What a preset cannot do without here, and why."""

WINDOW = 9
"""Rollouts that a point of a drawn curve is the mean of."""

Curve = list[tuple[int, float]]
"""`(completions sampled so far, mean reward)` of each rollout."""
Curves = dict[str, dict[int, Curve]]
"""Of each preset and seed."""


class RolloutWatch(L.Callback):
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
    overrides += OWN[preset][0].split() if preset in OWN else []
    module, data = parts(composed(preset, *overrides)[0])
    watch = RolloutWatch()
    fit_one(module, data, seed, module.minibatches * module.iterations * rollouts, watch)
    return watch.curve


def fit_one(module: Any, data: Any, seed: int, steps: int, *callbacks: L.Callback, **settings: Any) -> Any:
    """Train for some optimizer steps, and return the module."""
    L.seed_everything(seed, verbose=False)
    trainer_of(False, max_steps=steps, callbacks=[*callbacks], **settings).fit(module, datamodule=data)
    return module


def read(path: Path) -> Curves:
    """Return the curves of a file; none where there is none."""
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


def smooth(curve: Curve) -> np.ndarray:
    """Return centred means of the reward over `WINDOW` rollouts, fewer at the ends."""
    rewards = np.array([reward for _, reward in curve])
    half = WINDOW // 2
    return np.array([rewards[max(0, i - half) : i + half + 1].mean() for i in range(len(rewards))])


def final(curve: Curve) -> float:
    """Return mean reward of the last tenth of the rollouts."""
    last = curve[-max(1, len(curve) // 10) :]
    return float(np.mean([reward for _, reward in last]))


def draw(axes: Axes, seeds: dict[int, Curve], label: str, color: str, alpha: float = 0.2) -> None:
    """Draw the smoothed rewards of the seeds."""
    rewards = np.stack([smooth(curve) for curve in seeds.values()])
    band(axes, range(1, rewards.shape[1] + 1), rewards, label, color, alpha)


def picture(curves: Curves, preset: str, path: Path) -> None:
    """Draw one preset, with GRPO in grey."""
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
    """Draw the final reward of every preset: each seed, and their mean."""
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
    """Draw these presets, and the figure of all that there are."""
    look()
    for preset in presets:
        picture(curves, preset, out / f"{preset}.png")
    overview(curves, out / "overview.png")


def section(curves: Curves, preset: str) -> str:
    """Return what the page of a preset says: the figure, and its numbers."""
    numbers = f"Reward in the last tenth of {ROLLOUTS} rollouts: {ends(curves[preset])}"
    if preset != "grpo" and "grpo" in curves:
        numbers += f"; [grpo](grpo.md): {ends(curves['grpo'])}"
    sampled = np.mean([curve[-1][0] for curve in curves[preset].values()]) / ROLLOUTS
    if sampled > 1.1 * PER_ROLLOUT:
        numbers += f". {sampled:.0f} completions were sampled a rollout"
    if preset in OWN:
        setting, reason = OWN[preset]
        numbers += f". This curve is with `{setting}`: {reason}"
    return f"""![Reward against rollouts](../images/algorithms/{preset}.png)

{numbers}. [Setting and command](README.md#learning-curves)."""


def ends(seeds: dict[int, Curve]) -> str:
    """Return the final reward: the mean over seeds, with the lowest and the highest."""
    return spread([final(curve) for curve in seeds.values()])


def table(curves: Curves) -> str:
    """Return the final rewards of the presets whose pairs a judge compares, beside those of GRPO."""
    rows = [
        f"| [{preset}]({preset}.md) | {ends(curves[preset])} |"
        for preset in [*ONLINE_PAIRS, "grpo"]
        if preset in curves
    ]
    return "\n".join(["| `algo=` | final reward |", "|---|---|", *rows])


# ---------------------------------------------------------------------------------- terms of GRPO that have no preset


LAG = 2
"""Rollouts between the weights that draw and those that learn."""


class Behind(Generator):
    """A generator that draws with the weights of `LAG` rollouts ago, as an engine that draws ahead, in this process."""

    exact = False
    reports_kept_mass = True

    def __init__(self) -> None:
        self._engine = NativeGenerator()
        self._weights: deque[tuple[Any, int]] = deque(maxlen=LAG + 1)

    def sync(self, policy: torch.nn.Module, version: int) -> None:
        self._weights.append((copy.deepcopy(policy), version))
        self._engine.sync(*self._weights[0])

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        return self._engine.generate(prompts, sampling)


BEHIND = {
    "behind": ["algo/correction=none"],
    "token_truncate": ["algo/correction=token_truncate"],
    "sequence_tv": ["algo/correction=none", "algo/rejection=sequence_tv"],
    "trust_region": ["algo/correction=none", "algo/rejection=trust_region"],
}
"""GRPO on the sums, drawn by `Behind`: without a weight or a filter, with a weight, and with filters alone."""

ECHO = {
    "guess": ["data.learn=completion", "algo.echo_coef=0"],
    "echo": ["data.learn=completion", "algo.echo_coef=0.1"],
    "echo_after_reading": ["data.learn=all", "algo.echo_coef=0.1"],
    "guess_after_reading": ["data.learn=all", "algo.echo_coef=0"],
}
"""`experiment=guess`: what the first run learns of the texts, and the weight of what the game answers."""
ECHO_ROLLOUTS = 30

TERMS = [*BEHIND, *ECHO]
FIGURES = {"behind": (BEHIND, PAGES / "README.md"), "echo": (ECHO, PAGES.parent / "agents.md")}
"""What is drawn together, and the page that shows it."""


def run_term(name: str, seed: int, rollouts: int | None = None) -> Curve:
    """Train one policy."""
    watch = RolloutWatch()
    if name in BEHIND:
        few = f"data.prompts_per_rollout={PER_ROLLOUT // 8}"
        tree = plain(composed("grpo", *SETTINGS, few, f"seed={seed}", *BEHIND[name])[0])
        tree["algo"]["generator"] = Behind()
        fit_one(build(tree["algo"]), build(tree["data"]), seed, rollouts or ROLLOUTS, watch)
        return watch.curve
    learn, weight = ECHO[name]
    with tempfile.TemporaryDirectory() as folder:
        form = parts(composed("sft", "experiment=guess_sft", learn, f"seed={seed}")[0])
        module = fit_one(*form, seed, 80 if rollouts is None else rollouts)
        module.policy.save_pretrained(folder)
        module.tokenizer.save_pretrained(folder)
        game = parts(composed("grpo", "experiment=guess", f"model.name={folder}", weight, f"seed={seed}")[0])
        fit_one(*game, seed, rollouts or ECHO_ROLLOUTS, watch, gradient_clip_val=0.2)
    return watch.curve


def terms_picture(curves: Curves, names: Sequence[str], path: Path) -> None:
    """Draw the terms of one setting; the first is GRPO without any."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, color in zip(names, (GREY, BLUE, ORANGE, GREEN)):
        draw(axes, curves[name], name, color, alpha=0.15)
    axes.set_ylim(0, 0.8 if path.stem == "echo" else 0.4)
    axes.set_xlabel("rollouts")
    axes.set_ylabel("mean reward, sampled")
    figure.legend(frameon=False, loc="outside upper left", ncols=len(names))
    styled(axes, "y")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def terms_table(curves: Curves, names: Sequence[str]) -> str:
    """Return in Markdown what each term has come to."""
    told = {**BEHIND, **ECHO}
    rows = [f"| {name} | {' '.join(f'`{word}`' for word in told[name])} | {ends(curves[name])} |" for name in names]
    return "\n".join(["| | set | final reward |", "|---|---|---|", *rows])


# ----------------------------------------------------------------------------------------------------- from a data set


class Point(NamedTuple):
    """The findings of one validation; None where a preset has no such thing.

    Args:
        step: Optimizer steps so far.
        answered: Share of the held-out sums that greedy decoding gets right.
        told_apart: Share of the held-out pairs whose right answer has the higher reward, by the preset's own; of the
            labelled steps those that are called what they are.
        logp: Mean log-prob of the right answers, as the preset's `val/logps/chosen` has it.
    """

    step: int
    answered: float | None
    told_apart: float | None
    logp: float | None


OfflineCurve = list[Point]
OfflineCurves = dict[str, dict[int, OfflineCurve]]
"""Of each preset and seed."""


def read_points(path: Path) -> OfflineCurves:
    """Return the curves of a file; none where there is none."""
    curves: OfflineCurves = {}
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                values = (float(row[name]) if row[name] else None for name in Point._fields[1:])
                curve = curves.setdefault(row["preset"], {}).setdefault(int(row["seed"]), [])
                curve.append(Point(int(row["step"]), *values))
    return curves


def save_points(path: Path, curves: OfflineCurves) -> None:
    """Write all curves to a file."""
    rows = (
        (preset, seed, step, *("" if value is None else f"{value:.4g}" for value in values))
        for preset, seeds in sorted(curves.items())
        for seed, curve in sorted(seeds.items())
        for step, *values in curve
    )
    written(path, ["preset", "seed", *Point._fields], rows)


def column(curves: OfflineCurves, preset: str, name: str) -> np.ndarray | None:
    """Return `(seeds, points)` of a field of `Point`; None where the preset has no such thing."""
    values = [[getattr(point, name) for point in curve] for curve in curves[preset].values()]
    found = np.array(values, dtype=float)
    return None if np.isnan(found).all() else found


SCORERS = [name for name in OFFLINE if issubclass(CLASSES[name], ScalarModule)]

HELD_OUT, ROWS = 200, 64
"""Sums that are measured, and rows of an optimizer step."""

STEPS, EVERY, LR, OPERAND = 100, 10, "1e-4", 30
SCORER_STEPS, SCORER_EVERY, SCORER_LR, SCORER_OPERAND = 400, 40, "3e-4", 99
"""Optimizer steps, steps between validations, learning rate, largest operand: of policies, of models that score."""

OFFLINE_SETTINGS = [f"data.task.val_rows={HELD_OUT}", f"data.val_batch_size={HELD_OUT}", f"data.batch_size={ROWS}"]
OFFLINE_SETTINGS += ["scheduler=constant", "scheduler.warmup_steps=5"]

OFFLINE_OWN = {
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


class ValidationWatch(L.Callback):
    """Takes down a point at every validation, the one before the first step included."""

    def __init__(self) -> None:
        self.curve: OfflineCurve = []
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
    """Return the config of a run."""
    lr, operand = (SCORER_LR, SCORER_OPERAND) if preset in SCORERS else (LR, OPERAND)
    own = [OFFLINE_OWN[preset][0]] if preset in OFFLINE_OWN else []
    overrides = [*own, *OFFLINE_SETTINGS, f"data.task.max_operand={operand}", f"optimizer.lr={lr}", f"seed={seed}"]
    return composed(preset, *overrides)[0]


def run_offline(preset: str, seed: int, steps: int | None = None, every: int | None = None) -> OfflineCurve:
    """Train one model."""
    usual, between = (SCORER_STEPS, SCORER_EVERY) if preset in SCORERS else (STEPS, EVERY)
    module, data = parts(setting(preset, seed))
    L.seed_everything(seed, verbose=False)
    watch = ValidationWatch()
    validated = {"limit_val_batches": 1.0, "num_sanity_val_steps": -1, "check_val_every_n_epoch": None}
    validated |= {"val_check_interval": every or between, "max_steps": steps or usual}
    trainer_of(False, callbacks=[watch], **validated).fit(module, datamodule=data)
    return watch.curve


def level(curves: OfflineCurves, preset: str) -> tuple[float, str] | None:
    """Return what a curve is to be compared with, and its name; None where nothing is known."""
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


def offline_picture(curves: OfflineCurves, preset: str, path: Path) -> None:
    """Draw one preset: sums that are answered right, and pairs that are told apart."""
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
    """Return what `Point.told_apart` is of."""
    return "steps judged right" if preset == "process_reward_model" else "pairs told apart"


def offline_pictures(curves: OfflineCurves, presets: Sequence[str], out: Path) -> None:
    """Draw these presets."""
    look()
    for preset in presets:
        offline_picture(curves, preset, out / f"{preset}.png")


def offline_section(curves: OfflineCurves, preset: str) -> str:
    """Return what the page of a preset says: the figure, and its numbers."""
    said = []
    if (answered := column(curves, preset, "answered")) is not None:
        said.append(
            f"Held-out sums answered right: {answered[:, 0].mean():.2f} before, {spread(answered[:, -1])} after"
        )
    if (apart := column(curves, preset, "told_apart")) is not None:
        said.append(f"Held-out {told(preset)}: {spread(apart[:, -1])}")
    if (logp := column(curves, preset, "logp")) is not None:
        said.append(f"`val/logps/chosen`: {logp[:, 0].mean():.2f} before, {logp[:, -1].mean():.2f} after")
    if preset in OFFLINE_OWN:
        own, reason = OFFLINE_OWN[preset]
        said.append(f"This curve is with `{own}`: {reason}")
    said += [SEEN[preset]] if preset in SEEN else []
    return f"""![Shares against optimizer steps](../images/algorithms/{preset}.png)

{". ".join(said)}. [Setting and command](README.md#learning-curves)."""


def offline_table(curves: OfflineCurves) -> str:
    """Return what every preset has come to, a table a family, the best first."""
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


def _shown(point: Point) -> str:
    return "/".join("-" if value is None else f"{value:.2f}" for value in point[1:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {"online": (ONLINE, curves_online), "offline": (OFFLINE, curves_offline), "terms": (TERMS, curves_terms)}
    parser.add_argument("kind", choices=kinds, help="presets that learn from rollouts, from a data set; or terms")
    parser.add_argument(
        "presets", nargs="*", metavar="NAME", help="choices of algo=, or terms; default: all of the kind"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the numbers and the figures")
    parser.add_argument(
        "--missing", action="store_true", help="train only what is not in the file; goes on after a stop"
    )
    parser.add_argument("--draw-only", action="store_true", help="train nothing: figures and pages from the file")
    given = parser.parse_args()
    known, curves_of = kinds[given.kind]
    if unknown := sorted(set(given.presets) - set(known)):
        parser.error(f"{', '.join(unknown)}: none of the {given.kind} ones. Those: {', '.join(known)}.")
    given.out.mkdir(parents=True, exist_ok=True)
    silence_lightning()
    asked = Asked(given.presets or list(known), given.seeds, given.out, given.missing, given.draw_only)
    curves_of(asked)


def curves_online(asked: Asked) -> None:
    """Train, draw and write the pages of the presets that learn from what they write."""
    presets, path = asked.presets, asked.out / "curves.csv"
    curves = read(path)
    train(
        asked.jobs(curves),
        curves,
        run,
        lambda measured: save(path, measured),
        lambda curve: f"{curve[0][1]:.2f} -> {final(curve):.2f}",
    )
    if "grpo" in presets:  # it stands in every figure and on every page
        presets = [preset for preset in ONLINE if preset in curves]
    pictures(curves, presets, asked.out)
    if asked.out == IMAGES:
        for preset in presets:
            write(PAGES / f"{preset}.md", {"curve": section(curves, preset)})
        write(PAGES / "README.md", {"judged": table(curves)})


def curves_offline(asked: Asked) -> None:
    """Train, draw and write the pages of the presets that learn from a data set."""
    presets, path = asked.presets, asked.out / "offline_curves.csv"
    curves = read_points(path)
    train(
        asked.jobs(curves),
        curves,
        run_offline,
        lambda measured: save_points(path, measured),
        lambda curve: " -> ".join(_shown(point) for point in (curve[0], curve[-1])),
    )
    if "sft" in presets:  # its first point, the shipped policy, stands in the figures of all
        presets = [preset for preset in OFFLINE if preset in curves]
    offline_pictures(curves, presets, asked.out)
    if asked.out == IMAGES:
        for preset in presets:
            write(PAGES / f"{preset}.md", {"curve": offline_section(curves, preset)})
        write(PAGES / "README.md", {"data set": offline_table(curves)})


def curves_terms(asked: Asked) -> None:
    """Train and draw the terms without a preset, and write what the index and the page of agents say of them."""
    path = asked.out / "terms_curves.csv"
    curves = read(path)
    train(
        asked.jobs(curves),
        curves,
        run_term,
        lambda measured: save(path, measured),
        lambda curve: f"{curve[0][1]:.2f} -> {final(curve):.2f}",
    )
    look()
    for figure, (names, page) in FIGURES.items():
        if names.keys() <= curves.keys():
            terms_picture(curves, list(names), asked.out / f"{figure}.png")
            if asked.out == IMAGES:
                write(page, {figure: terms_table(curves, list(names))})


if __name__ == "__main__":
    main()
