"""Losses that know no reference: the reward of a completion is a function of its mean log-prob."""

import math

from jaxtyping import Float
from torch import Tensor

from lit_rl.ops.preference.common import alpha_reward, check_not_negative, check_smoothing, logistic
from lit_rl.ops.preference.pairs import PolicyPairs


def simpo(pairs: PolicyPairs, beta: float, *, gamma: float = 0.5, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """SimPO (2405.14734, eq. 6): ``-ls(beta (m_c - m_r) - gamma)``, ``m`` being log-probs per token.

    Args:
        pairs: Of the batch. Their reference is not read.
        beta: Scale of the reward, above 0: the paper takes 2 to 10.
        gamma: Margin of the rewards below which a pair still counts as wrong, at least 0.
        label_smoothing: ``e``, in [0, 0.5], as in :func:`~lit_rl.ops.preference.losses.sigmoid`.

    Raises:
        ValueError: a setting is out of range.
    """
    check_smoothing(label_smoothing)
    check_not_negative("gamma", gamma)
    return logistic(beta * (pairs.chosen_mean - pairs.rejected_mean) - gamma, label_smoothing)


def alphapo(
    pairs: PolicyPairs, beta: float, *, alpha: float = 0.25, gamma: float = 0.1, label_smoothing: float = 0.0
) -> Float[Tensor, " b"]:
    """AlphaPO (2501.03884): SimPO with the reward ``(1 - p^-alpha) / alpha``, ``p`` the geometric mean probability.

    The defaults are those of TRL's paper index, which cites Table 3 (Mistral-Instruct) and has beta 2.5 with them.

    Args:
        pairs: Of the batch. Their reference is not read.
        beta: Scale of the reward, above 0.
        alpha: Shape of the reward, finite. Within 1e-6 of 0 it is 0, where the reward is ``log p`` and this is SimPO.
            Above 0 the reward falls faster the less likely a completion is, below 0 slower.
        gamma: Margin of the rewards, at least 0.
        label_smoothing: ``e``, in [0, 0.5].

    Raises:
        ValueError: a setting is out of range.
    """
    check_smoothing(label_smoothing)
    check_not_negative("gamma", gamma)
    if not math.isfinite(alpha):
        raise ValueError(f"alpha={alpha} is out of range: it has to be a finite number; 0 is SimPO.")
    margin = alpha_reward(pairs.chosen_mean, alpha) - alpha_reward(pairs.rejected_mean, alpha)
    return logistic(beta * margin - gamma, label_smoothing)
