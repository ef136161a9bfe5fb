"""Losses of preferences: pairs of a chosen and a rejected completion, and single completions with a verdict.

Losses of pairs share the signature ``loss(pairs, beta, *, settings) -> (b,)``: one value a pair, to be minimised,
whose mean over the pairs of an optimizer step is the loss of the step. ``beta`` is above 0; the caller checks that. A
verdict is ``verdict(ratio, desirable, baseline, beta, *, settings) -> (b,)``, with the same meaning, where ``ratio``
is ``rho``; one that reads no baseline takes none: ``verdict(ratio, desirable, beta)``. Settings that are out of range
raise a ValueError that names them. Losses of reward models (:func:`bradley_terry` of pairs, :func:`step_label_loss`
of labelled steps) have signatures of their own.

Notation: ``rho_c`` and ``rho_r`` log ratios ``log(pi / ref)`` of the chosen and the rejected completion, summed over
their tokens; ``s_c`` and ``s_r`` their scores, which are the log ratios unless a divergence changes them; ``n_c`` and
``n_r`` their numbers of tokens; ``z`` the scaled margin ``beta (s_c - s_r)``; ``ls`` the logarithm of the logistic
function ``sigma``; ``e`` the label smoothing: the share of pairs whose label is taken to be the wrong way round.
``sg`` is "without gradient".

What a loss reads stands in its signature, as the type of its first argument. Without one it is given all of `Pairs`:

    PolicyPairs  log-probs of the policy: no reference has to be scored
    RatioPairs   log-probs or log ratios as they are: no divergence but the reverse KL fits it
    StepPairs    the same, of all pairs of a step, which it couples: `Annotated[..., OfStep()]`

A divergence, ``divergence(rho) -> score`` of any shape, is what an f-divergence makes of a log ratio: ``f'(pi /
ref)``, without constants (2309.16240, Table 1). DPO solves "reward less beta times a divergence from the reference":
with the reverse KL the reward of a completion is beta times its log ratio, with another f-divergence beta times
another increasing function of it. All are 0 at ``rho = 0`` with slope 1 there, except :func:`js_divergence`, whose
slope is 1/2. Exponents are cut at :data:`MAX_EXPONENT`, with no gradient beyond.

AOT (2406.05882) compares sorted values, rank by rank: their order is that of a whole optimizer step. A caller that
cuts its step gives all pairs of it, those of other micro-batches without gradient, and takes its own rows of the
result. The value of a row stands at its pair, and has a gradient by the log-probs of this pair only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from lit_rl.ops.reductions import masked_sum
from lit_rl.ops.traits import PreferenceTraits

__all__ = [
    "Pairs",
    "alpha_divergence",
    "alphapo",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco",
    "bco_pair",
    "discopop",
    "exo_pair",
    "forward_kl",
    "hinge",
    "ipo",
    "js_divergence",
    "kto",
    "nca_pair",
    "reverse_kl",
    "robust",
    "sft",
    "sigmoid",
    "sigmoid_norm",
    "simpo",
    "sppo_hard",
]


MAX_EXPONENT = 80.0
"""float32 overflows at e^88, and the difference of two infinite scores would be NaN."""

_LIMIT = 1e-6
"""Nearer to 1 than this, alpha is 1: the quotient has no digits left in float32."""


def reverse_kl(rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``rho``: KL(policy || reference), the divergence of DPO (2305.18290)."""
    return rho


def forward_kl(rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``1 - exp(-rho)``: KL(reference || policy). Below 1; losing probability costs exponentially."""
    return -torch.expm1((-rho).clamp(max=MAX_EXPONENT))


def js_divergence(rho: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``log 2 + ls(rho)``: Jensen-Shannon. Below log 2; near ``rho + log 2`` where the policy has lost probability."""
    return math.log(2) + logsigmoid(rho)


def alpha_divergence(rho: Float[Tensor, "*shape"], *, alpha: float = 0.5) -> Float[Tensor, "*shape"]:
    """``(exp((alpha - 1) rho) - 1) / (alpha - 1)``: from the forward KL at 0 to the reverse KL at 1.

    Args:
        rho: Log ratio.
        alpha: Any finite number, as in TRL 1.16: 1 less the alpha of the paper. Within 1e-6 of 1 it is 1, where the
            score is ``rho``.

    Raises:
        ValueError: alpha is not finite.
    """
    if not math.isfinite(alpha):
        raise ValueError(f"alpha={alpha} is out of range: it has to be a finite number; 1 is the reverse KL.")
    order = alpha - 1
    if abs(order) < _LIMIT:
        return rho
    return torch.expm1((order * rho).clamp(max=MAX_EXPONENT)) / order


Divergence = Callable[[Tensor], Tensor]
"""A function from a log ratio to a score, such as :func:`reverse_kl`."""


class PolicyPairs:
    """The pairs of a loss without a reference: log-probs of the policy, and lengths."""

    chosen: Float[Tensor, " b"]
    rejected: Float[Tensor, " b"]
    chosen_tokens: Float[Tensor, " b"]
    rejected_tokens: Float[Tensor, " b"]

    @property
    def chosen_mean(self) -> Tensor:
        """Log-prob of the chosen completion per token, under the policy alone, ``(b,)``."""
        return self.chosen / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean(self) -> Tensor:
        """Log-prob of the rejected completion per token, under the policy alone, ``(b,)``."""
        return self.rejected / self.rejected_tokens.clamp(min=1)


class RatioPairs(PolicyPairs):
    """The pairs of a loss that reads log-probs and log ratios as they are: no divergence but the reverse KL fits it."""

    ref_chosen: Float[Tensor, " b"]
    ref_rejected: Float[Tensor, " b"]

    @property
    def chosen_ratio(self) -> Tensor:
        """``rho_c``, ``(b,)``."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """``rho_r``, ``(b,)``."""
        return self.rejected - self.ref_rejected


@dataclass(frozen=True)
class OfStep:
    """A mark for pairs that have to be all those of an optimizer step, since the loss couples them."""


StepPairs = Annotated[RatioPairs, OfStep()]
"""All pairs of an optimizer step, read as log ratios."""


@dataclass(frozen=True)
class Pairs(RatioPairs):
    """Pairs of a chosen and a rejected completion of one prompt: log-probs in nats, summed over completion tokens.

    A loss names the part of it that it reads as the type of its first argument: `PolicyPairs`, `RatioPairs`, or all.
    """

    chosen: Float[Tensor, " b"]
    """Log-prob of the chosen completion under the policy, with gradient."""
    rejected: Float[Tensor, " b"]
    ref_chosen: Float[Tensor, " b"]
    """Log-prob of the chosen completion under the reference, without gradient. 0 where a method has no reference."""
    ref_rejected: Float[Tensor, " b"]
    chosen_tokens: Float[Tensor, " b"]
    """Number of tokens of the chosen completion."""
    rejected_tokens: Float[Tensor, " b"]
    divergence: Divergence = reverse_kl
    """The function from a log ratio to a score."""
    nll: Float[Tensor, " b"] | None = None
    """Minus the log-prob of ALL chosen tokens, none weighed down, with gradient. None: ``-chosen``."""
    nll_tokens: int | float | Float[Tensor, ""] | None = None
    """Chosen tokens of the whole optimizer step, over all ranks. None: of these pairs."""
    step_rows: int | float | None = None
    """Pairs of the whole optimizer step, over all ranks. None: of these pairs."""

    @property
    def chosen_score(self) -> Tensor:
        """``s_c``, ``(b,)``."""
        return self.divergence(self.chosen_ratio)

    @property
    def rejected_score(self) -> Tensor:
        """``s_r``, ``(b,)``."""
        return self.divergence(self.rejected_ratio)

    @property
    def margin(self) -> Tensor:
        """``s_c - s_r``, ``(b,)``."""
        return self.chosen_score - self.rejected_score

    @property
    def chosen_mean_score(self) -> Tensor:
        """``s_c / n_c``, ``(b,)``; 0 / 1 of an empty completion."""
        return self.chosen_score / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean_score(self) -> Tensor:
        """``s_r / n_r``, ``(b,)``."""
        return self.rejected_score / self.rejected_tokens.clamp(min=1)

    @property
    def nll_share(self) -> Tensor:
        """``(b,)``: the mean of it over the pairs of the step is the mean of ``-log pi`` over its chosen tokens."""
        nll = -self.chosen if self.nll is None else self.nll
        tokens = self.chosen_tokens.sum() if self.nll_tokens is None else torch.as_tensor(self.nll_tokens)
        rows = len(nll) if self.step_rows is None else self.step_rows
        return nll * (rows / tokens.clamp(min=1))


def sums_of_pairs(
    logprobs: Float[Tensor, "n t"], mask: Bool[Tensor, "n t"], *, tail_weight: float = 1.0
) -> Float[Tensor, " n"]:
    """Sum log-probs of completions, at least in float32; the longer one of a pair may count less beyond the shorter
    one.

    LD-DPO (2409.06411): with ``L = min(n_c, n_r)`` the tokens of both completions up to the L-th weigh 1 and
    those after it ``tail_weight``. The policy and the reference are summed alike.

    Args:
        logprobs: Of ``n = 2 b`` rows: ``b`` chosen ones, then their rejected ones. What stands outside the mask, NaN
            included, changes nothing.
        mask: True on tokens of completions.
        tail_weight: Weight of the tokens beyond the shorter completion, in [0, 1]. 1: the plain sum.

    Raises:
        ValueError: the number of rows is odd, or the weight is out of range.
    """
    if not 0 <= tail_weight <= 1:
        raise ValueError(f"tail_weight={tail_weight} is out of range: allowed is [0, 1]; 1 is the plain sum.")
    if len(logprobs) % 2:
        raise ValueError(f"{len(logprobs)} rows are no pairs: all chosen rows come first, then as many rejected ones.")
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    if tail_weight == 1:
        return masked_sum(logprobs, mask, dim=1)
    shorter = torch.minimum(*mask.sum(1).chunk(2)).repeat(2)
    tail = mask & (mask.cumsum(1) > shorter.unsqueeze(1))
    return masked_sum(logprobs, mask & ~tail, dim=1) + tail_weight * masked_sum(logprobs, tail, dim=1)


def logistic(z: Float[Tensor, " b"], smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """``-(1 - e) ls(z) - e ls(-z)``: the negative log-likelihood where a share ``e`` of the labels is wrong."""
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def check_smoothing(value: float, *, allow_zero: bool = True, allow_half: bool = True) -> None:
    """Check a label smoothing, the probability that a label is wrong: above 1/2 the data would say the opposite.

    Raises:
        ValueError: it is out of range.
    """
    low, high = value > 0 or (allow_zero and value == 0), value < 0.5 or (allow_half and value == 0.5)
    if not (low and high):
        allowed = f"{'[' if allow_zero else '('}0, 0.5{']' if allow_half else ')'}"
        raise ValueError(f"label_smoothing={value} is out of range: allowed is {allowed}, the share of wrong labels.")


def check_not_negative(name: str, value: float) -> None:
    """Check a setting of a preference loss.

    Raises:
    ValueError: the setting of this name is below 0, or NaN.
    """
    if not value >= 0:
        raise ValueError(f"{name}={value} is out of range: it has to be at least 0.")


def alpha_reward(mean: Float[Tensor, " b"], alpha: float) -> Float[Tensor, " b"]:
    """Return AlphaPO's reward (2501.03884) ``(1 - p^-alpha) / alpha`` of ``p = exp(mean)``; the log-prob itself at 0.

    From the log-prob, not from p: that is 0 in float32 from -104 on, and its negative power infinite.
    """
    if abs(alpha) < 1e-6:
        return mean
    return -torch.expm1((-alpha * mean).clamp(max=MAX_EXPONENT)) / alpha


@PreferenceTraits(per_token=False)
def sigmoid(pairs: Pairs, beta: float, *, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """DPO (2305.18290, eq. 7): ``-ls(z)``. Without a reference it is CPO (2401.08417).

    Args:
        pairs: Of the batch.
        beta: How far the policy may go for its reward: the strength of the divergence, above 0.
        label_smoothing: ``e``, in [0, 0.5]: ``-(1 - e) ls(z) - e ls(-z)``, which is conservative DPO (Mitchell, 2023).

    Raises:
        ValueError: the label smoothing is out of range.
    """
    check_smoothing(label_smoothing)
    return logistic(beta * pairs.margin, label_smoothing)


@PreferenceTraits(per_token=True)
def sigmoid_norm(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """Length-normalised DPO (Tulu 3, 2411.15124): ``-ls(beta (s_c / n_c - s_r / n_r))``.

    Its margins are those of one token, so it wants a beta that is larger by the length: 5 in the paper.
    """
    return logistic(beta * (pairs.chosen_mean_score - pairs.rejected_mean_score))


@PreferenceTraits(per_token=False)
def hinge(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """SLiC (2305.10425) on log ratios, as in RSO (2309.06657): ``max(0, 1 - z)``."""
    return (1 - beta * pairs.margin).clamp(min=0)


@PreferenceTraits(per_token=True)
def ipo(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """IPO (2310.12036, eq. 17) per token: ``(s_c / n_c - s_r / n_r - 1 / (2 beta))^2``; beta is the paper's tau.

    The paper writes sums; means are what its authors ran, by TRL's account, and make one beta fit all lengths. Without
    a reference it is the ``ipo`` of CPO.
    Under the forward KL a score below -1e19, a log ratio below -44, has a square that float32 does not hold.
    """
    return (pairs.chosen_mean_score - pairs.rejected_mean_score - 1 / (2 * beta)).square()


@PreferenceTraits(per_token=False)
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


@PreferenceTraits(per_token=False)
def nca_pair(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """NCA with two completions (2402.05369): ``-ls(beta rho_c) - ls(-beta rho_c) / 2 - ls(-beta rho_r) / 2``.

    The second term holds the chosen completion where it is, so its probability does not fall as it may in DPO.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@PreferenceTraits(per_token=False)
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


@PreferenceTraits(per_token=False)
def bco_pair(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """BCO on pairs (2404.04656) without its baseline: ``-ls(beta rho_c) - ls(-beta rho_r)``. The quality loss of MPO.

    :func:`bco` has the baseline, the running mean of rewards.
    """
    return -logsigmoid(beta * pairs.chosen_ratio) - logsigmoid(-beta * pairs.rejected_ratio)


@PreferenceTraits(per_token=False)
def sppo_hard(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """SPPO (2405.00675, eq. 4.7) where the chosen completion wins with certainty.

    ``(rho_c - 1 / (2 beta))^2 + (rho_r + 1 / (2 beta))^2``; the paper's eta is ``1 / beta``.
    """
    goal = 1 / (2 * beta)
    return (pairs.chosen_ratio - goal).square() + (pairs.rejected_ratio + goal).square()


@PreferenceTraits(per_token=False)
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


@PreferenceTraits(per_token=False)
def sft(pairs: Pairs, beta: float) -> Float[Tensor, " b"]:
    """Minus the log-prob of the chosen tokens, whose mean over the step is a mean over tokens; beta is not read.

    The generation loss of MPO (2411.10442), and beside :func:`sigmoid` what RPO (2404.19733) adds to DPO.
    """
    return pairs.nll_share


@PreferenceTraits(per_token=False)
def apo_zero(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """``sigma(-beta rho_c) + sigma(beta rho_r)`` (eq. 7): the chosen one rises, the rejected one falls.

    For chosen completions that are better than what the policy writes.
    """
    return (-beta * pairs.chosen_ratio).sigmoid() + (beta * pairs.rejected_ratio).sigmoid()


@PreferenceTraits(per_token=False)
def apo_down(pairs: RatioPairs, beta: float) -> Float[Tensor, " b"]:
    """``sigma(beta rho_c) + sigma(-beta (rho_c - rho_r))`` (eq. 8): both fall, the rejected one further.

    For chosen completions that are worse than what the policy writes.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


@PreferenceTraits(per_token=True)
def simpo(pairs: PolicyPairs, beta: float, *, gamma: float = 0.5, label_smoothing: float = 0.0) -> Float[Tensor, " b"]:
    """SimPO (2405.14734, eq. 6): ``-ls(beta (m_c - m_r) - gamma)``, ``m`` being log-probs per token.

    Args:
        pairs: Of the batch. Their reference is not read.
        beta: Scale of the reward, above 0: the paper takes 2 to 10.
        gamma: Margin of the rewards below which a pair still counts as wrong, at least 0.
        label_smoothing: ``e``, in [0, 0.5], as in :func:`sigmoid`.

    Raises:
        ValueError: a setting is out of range.
    """
    check_smoothing(label_smoothing)
    check_not_negative("gamma", gamma)
    return logistic(beta * (pairs.chosen_mean - pairs.rejected_mean) - gamma, label_smoothing)


@PreferenceTraits(per_token=True)
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


@PreferenceTraits(per_token=False)
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


@PreferenceTraits(per_token=False)
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
        desirable_weight: Weight of desirable completions, at least 0.
        undesirable_weight: Weight of the others, at least 0.

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


_HALF = -math.log(2)


def odds_ratio(
    chosen_mean: Float[Tensor, " b"], rejected_mean: Float[Tensor, " b"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """``(-ls(o), o)`` with the log odds ratio ``o = log(odds(chosen) / odds(rejected))``, ``odds(p) = p / (1 - p)``.

    Eqs. 4 and 7 of the paper; the weight and the likelihood term of ORPO are the caller's.

    Args:
        chosen_mean: Log-prob per token of the chosen completion, at most 0: ``log p`` is the mean of its tokens.
        rejected_mean: The same of the rejected one.

    Both are taken as at most ``-eps`` of their dtype, 1.2e-7 in float32: nearer to 0 the probability is 1 there, and
    its odds infinite. No gradient beyond.
    """
    log_odds = _log_odds(chosen_mean) - _log_odds(rejected_mean)
    return -logsigmoid(log_odds), log_odds


def _log_odds(log_p: Tensor) -> Tensor:
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    return log_p - _log1mexp(log_p)


def _log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x < 0``, without cancellation on either side of ``-log 2``.

    The far branch never sees what is near: ``exp(x)`` may round to 1 there, and its infinite slope times 0 is NaN.
    """
    near = (-torch.expm1(x)).log()
    far = torch.log1p(-x.clamp(max=_HALF).exp())
    return torch.where(x < _HALF, far, near)


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


def step_label_loss(
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
