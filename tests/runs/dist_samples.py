"""A short run that writes its samples, in one process or in two."""

from __future__ import annotations

from pathlib import Path

import dist_equal
from lightning.pytorch.loggers import CSVLogger

from lit_rl.callbacks import Samples, TokenSamples


def run(folder: Path, devices: int) -> None:
    """Two rollouts of 16 completions, and a validation of 3 prompts, which do not divide over two processes."""
    few = ["data.task.max_operand=5", "data.task.val_rows=3", "data.prompts_per_rollout=4", "algo.group_size=4"]
    few += ["algo.skip_zero_advantages=false"]
    module, data = dist_equal.parts(*few)
    callbacks = [Samples(print=0, every=1), TokenSamples(completions=16 // devices, every=1)]
    logger = CSVLogger(folder, name="csv", version="")
    trainer = dist_equal.trainer(folder, devices, max_steps=2, callbacks=callbacks, logger=logger)
    trainer.fit(module, datamodule=data)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.strategy.barrier()


def main(folder: Path) -> None:
    run(folder, 2)
