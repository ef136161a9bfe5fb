"""Losses of the margin between the chosen and the rejected completion, and of how far each has moved on its own."""

import math

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_rl.ops.preference.common import check_smoothing, logistic
from lit_rl.ops.preference.divergences import MAX_EXPONENT
from lit_rl.ops.preference.pairs import Pairs, RatioPairs


def sigmoid(pairs: Pairs, beta: float, *, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """DPO (2305.18290, eq. 7): ``-ls(z)``. Without a reference it is CPO (2401.08417).

    Args:
        pairs: Of the batch.
        beta: How far the policy may go for its reward: the strength of the divergence, above 0.
        label_smoothing: ``e``, in [0, 0.5]: ``-(1 - e) ls(z) - e ls(-z)``, which is conservative DPO (Mitchell, "A note
            on DPO with noisy preferences", 2023): margins stop growing at ``log((1 - e) / e) / beta``.

    Raises:
        ValueError: the label smoothing is out of range.
    """
    check_smoothing(label_smoothing)
    return logistic(beta * pairs.margin, label_smoothing)


def sigmoid_norm(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """Length-normalised DPO (Tulu 3, 2411.15124): ``-ls(beta (s_c / n_c - s_r / n_r))``.

    Its margins are those of one token, so it wants a beta that is larger by the length: 5 in the paper.
    """
    return logistic(beta * (pairs.chosen_mean_score - pairs.rejected_mean_score))


def hinge(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """SLiC (2305.10425) on log ratios, as in RSO (2309.06657): ``max(0, 1 - z)``."""
    return (1 - beta * pairs.margin).clamp(min=0)


def ipo(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """IPO (2310.12036, eq. 17) per token: ``(s_c / n_c - s_r / n_r - 1 / (2 beta))^2``; beta is the paper's tau.

    The paper writes sums; means are what its authors ran, by TRL's account, and make one beta fit all lengths. Without
    a reference it is the ``ipo`` of CPO.
    Under the forward KL a score below -1e19, a log ratio below -44, has a square that float32 does not hold.
    """
    return (pairs.chosen_mean_score - pairs.rejected_mean_score - 1 / (2 * beta)).square()


def exo_pair(pairs: Pairs, beta: float, *, label_smoothing: float = 1e-3) -> Float[Tensor, " b"]:
    """EXO with two completions (2402.00856, eq. 16): KL of the policy's choice from the labels, in this order.

    ``q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e)`` with ``q = sigma(z)``; 0 where ``q = 1 - e``.

    Args:
        pairs: Of the batch.
        beta: Strength of the divergence, above 0.
        label_smoothing: ``e``, in (0, 0.5]. At 0 the divergence is infinite.

    Raises:
        ValueError: the label smoothing is out of range.
    """
    check_smoothing(label_smoothing, allow_zero=False)
    z = beta * pairs.margin
    right = z.sigmoid() * (logsigmoid(z) - math.log1p(-label_smoothing))
    return right + (-z).sigmoid() * (logsigmoid(-z) - math.log(label_smoothing))


def nca_pair(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """NCA with two completions (2402.05369): ``-ls(beta rho_c) - ls(-beta rho_c) / 2 - ls(-beta rho_r) / 2``.

    The second term holds the chosen completion where it is, so its probability does not fall as it may in DPO.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def robust(pairs: Pairs, beta: float, *, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """Robust DPO (2403.00409): ``(-(1 - e) ls(z) + e ls(-z)) / (1 - 2 e)``.

    Where a share ``e`` of the labels was flipped, its expectation is the loss of DPO on the right labels. It falls
    below 0: a single pair may weigh against its own label. At 0 it is :func:`sigmoid`.

    Args:
        pairs: Of the batch.
        beta: Strength of the divergence, above 0.
        label_smoothing: ``e``, in [0, 0.5). At 1/2 the labels say nothing.

    Raises:
        ValueError: the label smoothing is out of range.
    """
    check_smoothing(label_smoothing, allow_half=False)
    z, e = beta * pairs.margin, label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def bco_pair(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """BCO on pairs (2404.04656) without its baseline: ``-ls(beta rho_c) - ls(-beta rho_r)``. The quality loss of MPO.

    :func:`~lit_rl.ops.preference.verdicts.bco` has the baseline, the running mean of rewards.
    """
    return -logsigmoid(beta * pairs.chosen_ratio) - logsigmoid(-beta * pairs.rejected_ratio)


def sppo_hard(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """SPPO (2405.00675, eq. 4.7) where the chosen completion wins with certainty.

    ``(rho_c - 1 / (2 beta))^2 + (rho_r + 1 / (2 beta))^2``; the paper's eta is ``1 / beta``.
    """
    goal = 1 / (2 * beta)
    return (pairs.chosen_ratio - goal).square() + (pairs.rejected_ratio + goal).square()


def discopop(pairs: Pairs, beta: float, *, tau: float = 0.05) -> Float[Tensor, " b"]:
    """DiscoPOP (2406.08414, eq. 5), a loss found by search: ``-ls(z) (1 - g) + exp(-z) g`` with ``g = sigma(z / tau)``.

    It is not convex: with the default tau it has a local minimum near ``z = -0.1``, where a small margin of the wrong
    sign can stay.

    Args:
        pairs: Of the batch.
        beta: Strength of the divergence, above 0.
        tau: Width of the change from the logistic to the exponential loss, above 0. Above 1 the loss grows without
            bound, as ``exp(-z (1 - 1 / tau))``, where the margin is negative; the exponent is cut at 80.

    Raises:
        ValueError: tau is out of range.
    """
    if not tau > 0:
        raise ValueError(f"tau={tau} is out of range: it has to be above 0; the paper takes 0.05.")
    z = beta * pairs.margin
    # One exponential: exp(-z) alone overflows where its gate is 0, and inf * 0 is NaN.
    exponential = (logsigmoid(z / tau) - z).clamp(max=MAX_EXPONENT).exp()
    return -logsigmoid(z) * (-z / tau).sigmoid() + exponential


def sft(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """Minus the log-prob of the chosen tokens, whose mean over the step is a mean over tokens; beta is not read.

    The generation loss of MPO (2411.10442), and beside :func:`sigmoid` what RPO (2404.19733) adds to DPO.
    """
    return pairs.nll_share
