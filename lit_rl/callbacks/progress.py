"""A progress bar that counts optimizer steps and shows what matters in RL: reward first, loss last."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm.auto import tqdm

from lit_rl.callbacks.text import plan_table

SHOWN = {
    "train/reward": "reward",
    "train/reward_std": "std",
    "train/frac_reward_zero_std": "zero_std",
    "train/kl": "kl",
    "train/completions/mean_length": "length",
    "train/completions/clipped_ratio": "clipped",
    "val/reward": "val",
    "train/rewards/accuracies": "accuracy",
    "train/rewards/margins": "margin",
    "train/mean_token_accuracy": "token_accuracy",
    "train/accuracy": "accuracy",
    "train/margin": "margin",
    "val/loss": "val_loss",
    "train/loss": "loss",
}
"""Metric to its name in the bar, in order. The loss stands last: on policy it is about zero while the policy learns."""


class Progress(ProgressBar):
    """The batch arithmetic as a table, then one bar over the whole run. Without a terminal, lines instead.

    Args:
        seconds_between_lines: How often a line is written where the output is no terminal.
    """

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        super().__init__()
        self.seconds_between_lines = seconds_between_lines
        self._bar: tqdm | None = None
        self._enabled = True
        self._last_line = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        total = trainer.estimated_stepping_batches
        plan = getattr(pl_module, "plan", None)
        if plan is not None:
            plan_table([*plan.table(), ("optimizer steps of this run", _length(trainer, total))])
        self._bar = tqdm(
            total=int(total) if total != float("inf") else None,
            initial=trainer.global_step,
            unit="step",
            mininterval=0.2,
            dynamic_ncols=True,
            disable=None,  # tqdm's word for: only on a terminal (and in a notebook)
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None:
            return
        # Not between two steps: a metric that is read makes a GPU finish what it was given.
        if not self._bar.disable and trainer.global_step > self._bar.n:
            self._bar.set_postfix_str(_shown(trainer), refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)
        elif (
            self._bar.disable
            and time.monotonic() - self._last_line >= self.seconds_between_lines
            and (text := _shown(trainer))
        ):
            self._last_line = time.monotonic()
            self.print(f"step {trainer.global_step}/{self._bar.total or '?'}  {text}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)))


def _length(trainer: L.Trainer, total: float) -> str:
    """How many steps the run takes, and what says so."""
    if total == float("inf"):
        return "until trainer.max_time"
    done = f" ({trainer.global_step:,} are done)" if trainer.global_step else ""
    if trainer.max_steps != -1 and total >= trainer.max_steps:
        return f"{total:,}{done}: trainer.max_steps"
    before = "" if trainer.max_steps == -1 else f", which ends before trainer.max_steps={trainer.max_steps}"
    return f"{total:,}{done}: trainer.max_epochs={trainer.max_epochs}{before}"


def _shown(trainer: L.Trainer) -> str:
    metrics = trainer.callback_metrics
    return ", ".join(f"{name}={float(metrics[key]):.3f}" for key, name in SHOWN.items() if key in metrics)
