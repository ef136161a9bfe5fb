"""A loss that breaks, as an overflow in a forward pass would break it."""

from __future__ import annotations

import math
import os
from typing import Any

from torch import Tensor

from lit_rl.ops.policy_losses import clipped_policy_loss

_called: list[int] = []


def breaks_after(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **preset: Any) -> Any:
    """The clipped surrogate, and NaN after `GOOD` micro-batches of this process.

    Args:
        preset: The settings of the loss in whose place this one stands.
    """
    per_token, metrics = clipped_policy_loss(logprobs, old_logprobs, advantages, mask)
    if len(mask) > 1:  # a module tries its loss on one row when it is made
        _called.append(len(mask))
    return per_token * (math.nan if len(_called) > int(os.environ["GOOD"]) else 1.0), metrics
