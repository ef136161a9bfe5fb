"""`trainer.accumulate_grad_batches: auto`, the default of both command lines; Lightning's Trainer takes numbers."""

from __future__ import annotations

from typing import Any, Literal

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.cli.allowed import check_accumulation

Accumulation = int | Literal["auto"]
"""Values of the key."""


def cut_by(module: PolicyModule, accumulate: Any) -> int:
    """Leave `auto` to the module, which knows the memory of a step; return the Trainer's value.

    A module whose `micro_batch_size` is set keeps it.

    Raises:
        ConfigError: it is neither `auto` nor a number of micro-batches.
    """
    check_accumulation(accumulate)
    if accumulate != "auto":
        return accumulate
    if module.micro_batch_size is None:
        module.micro_batch_size = "auto"
    return 1
