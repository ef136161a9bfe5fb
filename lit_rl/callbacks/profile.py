"""A trace of some optimizer steps by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch.profiler import ProfilerActivity, profile, supported_activities

from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.core.errors import ConfigError

OPERATORS = 40
"""Rows of the table."""

_DEVICES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class Profile(L.Callback):
    """A trace of rank 0 in some optimizer steps, rollouts included.

    It writes `trace.json.gz` (for ui.perfetto.dev, or chrome://tracing) and `operators.txt`, a table of the operators
    that take longest. Traced steps take longer, and compute the same. Files that cannot be written are warned of, and
    the run goes on (`unwritten`).

    Args:
        steps: Optimizer steps taken when it begins, and when it ends: `[3, 5]` traces the fourth and the fifth.
        folder: The folder of the files.

    Raises:
        ConfigError: `steps` are not two such numbers. When the fit begins: the run ends before them.
    """

    def __init__(self, steps: Sequence[int], folder: str) -> None:
        numbers: list[Any] = list(steps) if isinstance(steps, Sequence) and not isinstance(steps, str) else [steps]
        whole = len(numbers) == 2 and all(type(number) is int for number in numbers)
        if not (whole and 0 <= numbers[0] < numbers[1]):
            shown = ",".join(map(str, numbers))
            raise ConfigError(
                f"profile.steps=[{shown}]: give two whole numbers from 0 on, the second larger than the first, such "
                "as profile.steps=[3,5] for the two optimizer steps after the first three."
            )
        self.begin, self.end = numbers
        self.folder = Path(folder)
        self.unwritten = WriteFailures("Profile")
        self._profile: profile | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and 0 <= trainer.max_steps < self.end and not trainer.fast_dev_run:  # pyright: ignore
            raise ConfigError(
                f"profile.steps=[{self.begin},{self.end}] ends after the run's last step, trainer.max_steps="
                f"{trainer.max_steps}: take earlier steps, or raise trainer.max_steps."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step > self.begin:
            at = f"step {trainer.global_step}, and profile.steps=[{self.begin},{self.end}] begins before it"
            rank_zero_warn(f"No trace is made: the run goes on from {at}.")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        begins = trainer.global_step == self.begin and self._profile is None
        if begins and trainer.is_global_zero and not trainer.fast_dev_run:  # pyright: ignore
            wanted = {ProfilerActivity.CPU, _DEVICES.get(trainer.strategy.root_device.type)}
            self._profile = profile(activities=wanted & {*supported_activities()})
            self._profile.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.end:
            self._write()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        made, self._profile = self._profile, None
        if made is not None:
            made.stop()

    def _write(self) -> None:
        """Write the trace and the table, once."""
        made, self._profile = self._profile, None
        if made is None:
            return
        made.stop()
        with self.unwritten.spared("a trace"):
            self.folder.mkdir(parents=True, exist_ok=True)
            made.export_chrome_trace(str(self.folder / "trace.json.gz"))
            averages = made.key_averages()
            on_device = any(event.self_device_time_total for event in averages)
            by = "self_device_time_total" if on_device else "self_cpu_time_total"
            (self.folder / "operators.txt").write_text(averages.table(sort_by=by, row_limit=OPERATORS))
