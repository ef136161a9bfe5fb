"""Losses of reward models: of whole completions, by pairs, and of the steps of a solution, by labels."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from lit_rl.ops.preference.common import check_not_negative


def bradley_terry(
    chosen: Float[Tensor, " b"],
    rejected: Float[Tensor, " b"],
    margins: Float[Tensor, " b"] | None = None,
    *,
    center: float = 0.0,
) -> Float[Tensor, " b"]:
    """``-ls(r_c - r_r - margin) + center (r_c + r_r)^2``: the negative log-likelihood of a choice between two rewards.

    Args:
        chosen: Reward ``r_c`` of the chosen completion, with gradient.
        rejected: ``r_r``.
        margins: By how much the chosen one is better: the gap that the rewards are to have at least (Llama 2,
            2307.09288, eq. 2). None: 0.
        center: At least 0: pulls the two rewards of a pair to a sum of 0 (2312.09244), which a choice leaves open.
            TRL recommends 0.01.

    Raises:
        ValueError: the weight of the centring is out of range.
    """
    check_not_negative("center", center)
    gap = chosen - rejected if margins is None else chosen - rejected - margins
    return -logsigmoid(gap) + center * (chosen + rejected).square()


def steps(
    logits: Float[Tensor, "b s"], labels: Float[Tensor, "b s"], mask: Bool[Tensor, "b s"]
) -> Float[Tensor, "b s"]:
    """``-y log sigma(x) - (1 - y) log(1 - sigma(x))`` at each labelled step, 0 elsewhere, for a process reward model.

    One logit a token: a head with two classes, as in TRL up to 0.26, has the same loss with the difference of its
    logits, "right" less "wrong", as ``x``. Its cross-entropy is a mean over labelled steps; here the caller reduces.

    Args:
        logits: With gradient. What stands outside the mask, NaN included, changes nothing.
        labels: 1 where the step is right, 0 where it is wrong, or a probability between: 2312.08935 estimates it by
            completing the solution.
        mask: True on the last token of each step that has a label.
    """
    logits, labels = logits.masked_fill(~mask, 0.0), labels.masked_fill(~mask, 0.0)
    losses = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return torch.where(mask, losses, 0.0)
