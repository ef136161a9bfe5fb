"""Callbacks that send their own process a signal: in an optimizer step, before the first one, behind the last one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning as L
from signalling_rewards import say_when_and_send


class InAnUpdate(L.Callback):
    """Before the backward pass of optimizer step `UPDATE_AT` (from 1), where that is set."""

    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == int(os.environ.get("UPDATE_AT", "0")):
            say_when_and_send(os.getpid())


class InTheSetup(L.Callback):
    """Slurm's signal, once the folder of the run is there and nothing is trained."""

    def on_fit_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


class BehindTheLastStep(L.Callback):
    """Where `BEHIND` says: in the last `validation`, and once more while that is left; or in the `export`, between the
    weights and the tokenizer."""

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.state.fn != "validate" or not trainer.global_step:
            return
        if os.environ.get("BEHIND") == "validation":
            _send_and_wait()
        if os.environ.get("BEHIND") == "export":
            module.model.tokenizer.save_pretrained = _send_and_wait

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])


def _send_and_wait(*_: Any) -> None:
    say_when_and_send(os.getpid())
    time.sleep(60)
