"""Callbacks of a user's that raise, in hooks of Lightning's that are named."""

from __future__ import annotations

import builtins

import lightning as L
import torch


class Failing(L.Callback):
    """Raises in one hook of a fit, from an optimizer step on: an error of Python's, a SystemExit with `code`, or what
    PyTorch says where memory is out (`error="no memory"`)."""

    def __init__(self, hook: str, step: int = 0, error: str = "ValueError", code: int | None = None) -> None:
        self.hook, self.step, self.error, self.code = hook, step, error, code


def _failing(name: str):
    def hook(self: Failing, trainer: L.Trainer, *_: object, **__: object) -> None:
        if name == self.hook and trainer.global_step >= self.step and trainer.state.fn == "fit":
            if self.error == "no memory":
                torch.empty(2**50, dtype=torch.uint8)
            raise getattr(builtins, self.error)(self.code if self.error == "SystemExit" else f"mine in {name}")

    return hook


for _name in (
    *("on_train_end", "on_fit_end", "teardown", "on_save_checkpoint", "on_train_epoch_end", "on_validation_end"),
    *("on_train_batch_end", "on_train_batch_start", "on_before_optimizer_step"),
    *("on_validation_batch_end", "on_train_epoch_start", "on_exception"),
):
    setattr(Failing, _name, _failing(_name))


class FailingAtTheEnd(L.Callback):
    """Raises in the validation that ends a run."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate" and trainer.global_step:
            raise ValueError("mine in the last validation")
