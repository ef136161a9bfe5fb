"""`trainer.accumulate_grad_batches: auto`, the default of both command lines; Lightning's Trainer takes numbers."""

from __future__ import annotations

from typing import Any, Literal

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.errors import ConfigError

Accumulation = int | Literal["auto"]
"""What the key may be."""


def cut_by(module: PolicyModule, accumulate: Any) -> int:
    """Leave `auto` to the module, which knows the memory of a step; returns what the Trainer is given.

    A module whose `micro_batch_size` is set keeps it.

    Raises:
        ConfigError: it is neither `auto` nor a number of micro-batches.
    """
    if isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1:
        return accumulate
    if accumulate != "auto":
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulate!r}: allowed is auto (as many micro-batches as memory needs), "
            "or a number of 1 or more."
        )
    if module.micro_batch_size is None:
        module.micro_batch_size = "auto"
    return 1
