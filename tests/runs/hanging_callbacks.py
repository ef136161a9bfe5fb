"""Callbacks that make a rank wait for what never comes."""

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
