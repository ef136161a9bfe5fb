"""Gradients whose terms are added in one order, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

_SETTINGS: Any = deterministic


@contextmanager
def fixed_order(device: torch.device) -> Iterator[None]:
    """Make backward passes on a CPU add in one order, so that equal passes give equal gradients on several threads.

    The gradient of ``x[index]`` is ``index_put_(accumulate=True)``. Where an index names a row twice, torch's threads
    add to that row in the order in which they arrive. This library takes ``index_select`` instead; the code of a model
    (transformers' mixtures of experts) or a loss from elsewhere may not. Inside this context torch runs that one kernel
    on one thread. Other devices, and runs with ``trainer.deterministic``, stay as they are.

    Args:
        device: Where the loss is.
    """
    if device.type != "cpu" or torch.get_deterministic_debug_mode():
        yield
        return
    fills = _SETTINGS.fill_uninitialized_memory
    _SETTINGS.fill_uninitialized_memory = False  # writing NaN into all new memory finds bugs, and costs time
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        _SETTINGS.fill_uninitialized_memory = fills
