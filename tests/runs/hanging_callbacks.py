"""Callbacks that make a rank wait for what never comes, or ask for memory that is not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch


class WaitsForAWord(L.Callback):
    """Rank 1 waits in optimizer step 3 for a word of rank 0, which goes on to wait for its gradients. It leaves `met_1`
    in the folder `MET` before."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            Path(os.environ["MET"], "met_1").touch()
            torch.distributed.recv(torch.zeros(1), src=0)


class FindsNoMemory(L.Callback):
    """Asks PyTorch for a pebibyte in the first batch, of a validation or of the training."""

    def on_train_batch_start(self, *_: Any) -> None:
        torch.empty(2**50, dtype=torch.uint8)

    on_validation_batch_start = on_train_batch_start
