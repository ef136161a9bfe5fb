"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, inside; at the end every part is in its former mode, also after an error."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Part by part: `model.train()` would also wake what somebody froze in evaluation mode.
        for part, training in modes:
            part.training = training
