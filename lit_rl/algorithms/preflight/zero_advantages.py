"""A check whether rows without an advantage can be left out of a forward pass.

With `l_it` the loss of token t of row i and D the denominator of the step, the objective is `sum_it l_it / D`. D is
counted over all rows of the rollout, so leaving row i out is exact where `l_it = 0` for any log-probs of the
row: then it adds neither value nor gradient. Two functions decide: the loss must vanish where the advantage does, and
the reduction must take its denominators from the step, not from the rows at hand.

Both are tried out on a few rows where they are of `lit_rl.ops`. A user's own function may look at whatever it likes:
with one of these no row is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.preflight.estimators import is_ours
from lit_rl.algorithms.signatures import reads, unwrapped
from lit_rl.ops.reductions import StepTotals

_ROWS, _TOKENS, _EMPTY = 4, 3, 2
"""Sizes of the trial; the last `_EMPTY` rows have no advantage."""


def teach_nothing(loss: Callable[..., Any], reduction: Callable[..., Any]) -> bool:
    """Tell whether rows whose advantages are all 0 change neither value nor gradient of the objective.

    Args:
        loss: `(logprobs, old_logprobs, advantages, mask) -> ((b, t), metrics)`.
        reduction: `(per_token, mask, totals) -> scalar`.
    """
    if not (is_ours(unwrapped(loss)) and is_ours(unwrapped(reduction))) or reads(loss, "step"):
        return False
    whole, gradient = _tried(loss, reduction, slice(0, _ROWS))
    part, gradient_of_part = _tried(loss, reduction, slice(0, _ROWS - _EMPTY))
    return torch.allclose(whole, part) and torch.allclose(gradient, gradient_of_part)


def _tried(loss: Callable[..., Any], reduction: Callable[..., Any], rows: slice) -> tuple[Tensor, Tensor]:
    """Return value, and gradient `(4, 3)` with zeros for left-out rows, of the objective of these rows."""
    size, noise = (_ROWS, _TOKENS), torch.Generator().manual_seed(0)
    logprobs = (-3 * torch.rand(size, generator=noise, dtype=torch.float64) - 0.1).requires_grad_()
    old = -3 * torch.rand(size, generator=noise, dtype=torch.float64) - 0.1
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    mask = torch.ones(size, dtype=torch.bool)
    per_token, _ = loss(logprobs[rows], old[rows], advantages[rows], mask[rows])
    value = reduction(per_token, mask[rows], StepTotals.of(mask))
    (gradient,) = torch.autograd.grad(value, logprobs, materialize_grads=True)
    return value.detach(), gradient
