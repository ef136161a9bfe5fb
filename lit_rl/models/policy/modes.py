"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout and the like off; on the way out every part is in the mode that it was in, also after an error."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Part by part: `model.train()` would also wake what somebody froze in evaluation mode.
        for part, training in modes:
            part.training = training
