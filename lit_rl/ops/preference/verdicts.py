"""Losses of single completions that were found desirable or not: ``verdict(ratio, desirable, baseline, beta)``.

One that reads no baseline takes none: ``verdict(ratio, desirable, beta)``. ``ratio`` is ``rho``, the log ratio of a
completion to the reference, summed over its tokens.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_rl.ops.preference.common import check_not_negative


def kto(
    ratio: Float[Tensor, " b"],
    desirable: Bool[Tensor, " b"],
    baseline: Float[Tensor, ""],
    beta: float,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " b"]:
    """KTO (2402.01306): ``w_d sigma(-beta (rho - z0))`` if desirable, else ``w_u sigma(beta (rho - z0))``.

    Args:
        ratio: With gradient.
        desirable: The verdict.
        baseline: ``z0``, in nats: the KL of the policy from the reference as the mean log ratio of mismatched
            completions over the whole step, at least 0, without gradient.
        beta: Strength of the divergence, above 0.
        desirable_weight: ``w_d``, at least 0. The paper wants ``w_d n_d / (w_u n_u)`` in [1, 4/3], with the numbers
            ``n_d`` and ``n_u`` of desirable and undesirable rows.
        undesirable_weight: ``w_u``, at least 0.

    Raises:
        ValueError: a weight is out of range.
    """
    check_not_negative("desirable_weight", desirable_weight)
    check_not_negative("undesirable_weight", undesirable_weight)
    reward = beta * (ratio - baseline)
    return torch.where(desirable, desirable_weight * (-reward).sigmoid(), undesirable_weight * reward.sigmoid())


def apo_zero_unpaired(
    ratio: Float[Tensor, " b"],
    desirable: Bool[Tensor, " b"],
    beta: float,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " b"]:
    """APO-zero on single completions (2408.06266): :func:`kto` with 0 in place of the baseline.

    Args:
        ratio: With gradient.
        desirable: The verdict.
        beta: Strength of the divergence, above 0.
        desirable_weight: At least 0.
        undesirable_weight: At least 0.

    Raises:
        ValueError: a weight is out of range.
    """
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    return kto(ratio, desirable, ratio.new_zeros(()), beta, **weights)


def bco(
    ratio: Float[Tensor, " b"],
    desirable: Bool[Tensor, " b"],
    baseline: Float[Tensor, ""],
    beta: float,
    weights: Float[Tensor, " b"] | None = None,
) -> Float[Tensor, " b"]:
    """BCO (2404.04656): ``-ls(beta rho - delta)`` if desirable, else ``-ls(delta - beta rho)``, times the weights.

    Args:
        ratio: With gradient.
        desirable: The verdict.
        baseline: ``delta``, the running mean of the rewards ``beta rho`` of all completions, without gradient. Unlike
            the baseline of :func:`kto` it is a reward, already scaled by beta.
        beta: Strength of the divergence, above 0.
        weights: Of each row, such as the density ratio of its prompt (UDM). None: 1.
    """
    reward = beta * ratio - baseline
    losses = -logsigmoid(torch.where(desirable, reward, -reward))
    return losses if weights is None else weights * losses
