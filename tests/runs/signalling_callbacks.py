"""A callback that sends its own process a signal in the middle of an optimizer step."""

from __future__ import annotations

import os
import signal
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
