"""A progress bar that counts optimizer steps and shows the metrics that matter in RL: reward first, loss last."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm.auto import tqdm

from lit_rl.callbacks.display import plan_table

SHOWN = {
    "train/reward": "reward",
    "train/reward_std": "std",
    "train/frac_reward_zero_std": "dead_groups",
    "train/kl": "kl",
    "train/completions/mean_length": "length",
    "train/completions/clipped_ratio": "cut",
    "val/reward": "val",
    "train/rewards/accuracies": "accuracy",
    "train/rewards/margins": "margin",
    "train/mean_token_accuracy": "token_accuracy",
    "train/accuracy": "accuracy",
    "train/margin": "margin",
    "val/loss": "val_loss",
    "train/loss": "loss",
}
"""Names in the bar by metric, in order. The loss stands last: on policy it is about zero while the policy learns."""

LARGE = 2**30
"""Bytes of weights that take seconds to read."""

_COLUMNS_OF_COUNTS = 50
"""Columns for the share, a bar, steps, times and speed."""

_FORMAT_WITHOUT_BAR = "{n_fmt}/{total_fmt} [{remaining}{postfix}]"


class Progress(ProgressBar):
    """The progress of a run: a table of its batch arithmetic, a bar over the run, and a bar over each validation.

    Without a terminal it prints lines.

    Args:
        seconds_between_lines: Seconds between two lines where the output is no terminal.
    """

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        super().__init__()
        self.seconds_between_lines = seconds_between_lines
        self._bar: tqdm | None = None
        self._validation: tqdm | None = None
        self._enabled = True
        self._last_line = 0.0
        self._last_step = -1
        self._began = (0.0, 0)

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        path = Path(str(getattr(getattr(pl_module, "model", None), "path", "")))
        size = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
        if self._enabled and trainer.is_global_zero and size >= LARGE:
            self.print(f"reading {size / 2**30:.1f} GiB of weights from {path} ...")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        total = trainer.estimated_stepping_batches
        plan = getattr(pl_module, "plan", None)
        if plan is not None:
            plan_table([*plan.table(), ("optimizer steps of this run", _describe_length(trainer, total))])
        self._began = (time.monotonic(), trainer.global_step)
        self._bar = tqdm(
            total=int(total) if total != float("inf") else None,
            initial=trainer.global_step,
            unit="step",
            mininterval=0.2,
            dynamic_ncols=True,
            disable=None,  # in tqdm: only on a terminal (and in a notebook)
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None:
            return
        # Not between two steps: reading a metric waits for the GPU.
        if not self._bar.disable and trainer.global_step > self._bar.n:
            _show_values(self._bar, _values(trainer))
            self._bar.update(trainer.global_step - self._bar.n)
        elif (
            self._bar.disable
            and time.monotonic() - self._last_line >= self.seconds_between_lines
            and (values := _values(trainer))
        ):
            self._last_line, self._last_step = time.monotonic(), trainer.global_step
            self.print(self._line(trainer, pl_module, values))

    def _line(self, trainer: L.Trainer, pl_module: L.LightningModule, values: dict[str, str]) -> str:
        """Return a line with the step and the last metrics, with their step where that is an earlier one."""
        assert self._bar is not None
        step, total, (at, first) = trainer.global_step, self._bar.total, self._began
        left = ""
        if total and first < step < total:
            seconds = (time.monotonic() - at) / (step - first) * (total - step)
            left = f"  {tqdm.format_interval(seconds)} left"
        metrics_step = getattr(pl_module, "metrics_step", None)
        of = f"at step {metrics_step}: " if values and metrics_step not in (None, step) else ""
        return f"step {step}/{total or '?'}{left}  {of}{', '.join(values.values())}"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None and self._bar.disable and self._last_step != trainer.global_step:
            # The last line is the last step, whatever the clock says.
            self.print(self._line(trainer, pl_module, _values(trainer)))
        self._close()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        self._validation = tqdm(
            total=sum(_counts_of(trainer)) or None, desc="validation", unit="batch", leave=False, disable=None
        )
        self._last_line = time.monotonic()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._validation is None:
            return
        done = sum(_counts_of(trainer)[:dataloader_idx]) + batch_idx + 1
        self._validation.update(done - self._validation.n)
        if self._validation.disable and time.monotonic() - self._last_line >= self.seconds_between_lines:
            self._last_line = time.monotonic()
            self.print(f"validation: {done} of {self._validation.total or '?'} batches")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close_validation()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close_validation()
        self._close()

    def _close_validation(self) -> None:
        if self._validation is not None:
            self._validation.close()
            self._validation = None

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)))


def _counts_of(trainer: L.Trainer) -> list[int]:
    """Return the batches of each validation set; 0 where a set does not know its length."""
    return [int(count) if count != float("inf") else 0 for count in trainer.num_val_batches]


def _describe_length(trainer: L.Trainer, total: float) -> str:
    """Describe how many steps the run takes, and which setting limits them."""
    if total == float("inf"):
        return "until trainer.max_time"
    done = f" ({trainer.global_step:,} are done)" if trainer.global_step else ""
    if trainer.max_steps != -1 and total >= trainer.max_steps:
        return f"{total:,}{done} (set by trainer.max_steps)"
    before = "" if trainer.max_steps == -1 else f", which ends before trainer.max_steps={trainer.max_steps}"
    return f"{total:,}{done} (set by trainer.max_epochs={trainer.max_epochs}{before})"


def _values(trainer: L.Trainer) -> dict[str, str]:
    """Return the available metrics of `SHOWN`, in its order: texts `name=value` by the metric's name in the bar."""
    metrics = trainer.callback_metrics
    return {name: f"{name}={float(metrics[key]):.3f}" for key, name in SHOWN.items() if key in metrics}


def _show_values(bar: tqdm, values: dict[str, str]) -> None:
    """Show the values beside the counts; in a narrow terminal in place of the bar, which tqdm would keep."""
    room = (bar.format_dict["ncols"] or 120) - _COLUMNS_OF_COUNTS
    text = _values_that_fit(values, room)
    bar.bar_format = _FORMAT_WITHOUT_BAR if len(text) > room else None
    bar.set_postfix_str(text, refresh=False)


def _values_that_fit(values: dict[str, str], room: int) -> str:
    """Join the values that fit, in their order: the first and the loss always."""
    kept = {name for place, name in enumerate(values) if place == 0 or name == "loss"}
    for name in values:
        if len(", ".join(values[each] for each in kept | {name})) > room:
            break
        kept.add(name)
    return ", ".join(text for name, text in values.items() if name in kept)
