"""AOT (2406.05882): alignment by optimal transport, which compares sorted values, rank by rank.

The values are sorted over the pairs that a function is given. Their order is that of a whole optimizer step: a caller
that cuts its step gives all pairs of it, those of other micro-batches without gradient, and takes its own rows of the
result. The value of a row stands at its pair, and has a gradient by the log-probs of this pair only.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rl.ops.preference.common import check_smoothing, logistic
from lit_rl.ops.preference.pairs import StepPairs


def aot(pairs: StepPairs, beta: float, *, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """AOT on pairs: the policy's margins are to lie above the reference's as distributions, not pair by pair.

    ``-(1 - e) ls(beta d) - e ls(-beta d)``, ``d`` being the policy's ``log pi(chosen) - log pi(rejected)`` of a pair
    less the reference's margin of the same rank.

    Args:
        pairs: Of the whole optimizer step.
        beta: Strength of the divergence, above 0.
        label_smoothing: ``e``, in [0, 0.5].

    Raises:
        ValueError: the label smoothing is out of range.
    """
    check_smoothing(label_smoothing)
    margins = pairs.chosen - pairs.rejected
    references = (pairs.ref_chosen - pairs.ref_rejected).sort().values
    return logistic(beta * (margins - references[_ranks(margins)]), label_smoothing)


def aot_unpaired(pairs: StepPairs, beta: float, *, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """AOT without pairs: the log ratios of chosen completions are to lie above those of rejected ones, rank by rank.

    ``-(1 - e) ls(beta d) - e ls(-beta d)``, ``d`` being ``rho_c - rho_r`` of two completions of the same rank. They
    belong to two pairs, of which each gets half of the value and the whole gradient of its own completion: sum and
    gradient over the step are exact.

    Args:
        pairs: Of the whole optimizer step.
        beta: Strength of the divergence, above 0.
        label_smoothing: ``e``, in [0, 0.5].

    Raises:
        ValueError: the label smoothing is out of range.
    """
    check_smoothing(label_smoothing)
    chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    below = rejected.detach().sort().values[_ranks(chosen)]
    above = chosen.detach().sort().values[_ranks(rejected)]
    half = 0.5 * (
        logistic(beta * (chosen - below), label_smoothing) + logistic(beta * (above - rejected), label_smoothing)
    )
    return half + (half - half.detach())


@torch.no_grad()
def _ranks(x: Tensor) -> Tensor:
    """Return the place of each value in ascending order; equal values keep their order."""
    order = x.argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(x), device=x.device))
