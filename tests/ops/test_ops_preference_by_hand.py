"""Every loss of pairs on one pair whose numbers can be worked out on paper: plain floats, no second implementation.

Pair ``A`` has log ratios log 2 and -log 3: with beta 1 sigma of its rewards is 2/3 and 1/4, its margin is log 6, and
sigma of that 6/7.
"""

from functools import partial
from math import exp, log, sqrt

import pytest
import torch

from lit_rl.ops.preference_losses import (
    Pairs,
    alpha_divergence,
    alphapo,
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco_pair,
    discopop,
    exo_pair,
    forward_kl,
    hinge,
    ipo,
    js_divergence,
    nca_pair,
    reverse_kl,
    robust,
    sft,
    sigmoid,
    sigmoid_norm,
    simpo,
    sppo_hard,
)


def pairs(chosen, rejected, ref_chosen=0.0, ref_rejected=0.0, tokens=(1.0, 1.0), **more):
    """One pair, or several where `chosen` is a list; the same reference and lengths for all of them."""
    columns = [torch.tensor(x).reshape(-1) for x in (chosen, rejected)]
    refs = [torch.tensor(x).expand(len(columns[0])) for x in (ref_chosen, ref_rejected)]
    counts = [torch.tensor(x).expand(len(columns[0])) for x in tokens]
    return Pairs(*(x.requires_grad_() for x in columns), *refs, *counts, **more)


def value_and_slopes(loss, chosen, rejected, *more, beta=1.0, divergence=reverse_kl, tokens=(1.0, 1.0), **settings):
    """Loss of one pair, and its slopes by the log-probs of the chosen and the rejected completion."""
    given = pairs(chosen, rejected, *more, tokens=tokens, divergence=divergence)
    out = loss(given, beta, **settings)
    slopes = torch.autograd.grad(out.sum(), (given.chosen, given.rejected), allow_unused=True)
    return (out.item(), *(0.0 if x is None else x.item() for x in slopes))


A = {"chosen": -3 + log(2), "rejected": -5 - log(3), "ref_chosen": -3.0, "ref_rejected": -5.0}


def at_a(loss, **settings):
    return value_and_slopes(loss, *A.values(), **settings)


@pytest.mark.parametrize(
    ("loss", "settings", "expected"),
    [
        (sigmoid, {}, (log(7 / 6), -1 / 7, 1 / 7)),
        (sigmoid, {"beta": 2.0}, (log(37 / 36), -2 / 37, 2 / 37)),
        (sigmoid, {"label_smoothing": 0.25}, (0.75 * log(7 / 6) + 0.25 * log(7), 3 / 28, -3 / 28)),
        (hinge, {"beta": 0.5}, (1 - log(6) / 2, -0.5, 0.5)),
        (hinge, {}, (0.0, 0.0, 0.0)),  # log 6 is above 1
        (exo_pair, {"label_smoothing": 1 / 7}, (0.0, 0.0, 0.0)),  # the policy's choice is that of the labels
        (exo_pair, {"label_smoothing": 0.5}, (log(2) - log(7) + 6 / 7 * log(6), 6 * log(6) / 49, -6 * log(6) / 49)),
        # slopes: -1/3 + 2/6 = 0 of the chosen one, sigma/2 = 1/8 of the rejected one
        (nca_pair, {}, (log(1.5) + log(3) / 2 + log(4 / 3) / 2, 0.0, 1 / 8)),
        (robust, {"label_smoothing": 0.25}, (2 * (0.75 * log(7 / 6) - 0.25 * log(7)), -9 / 14, 9 / 14)),
        (robust, {}, (log(7 / 6), -1 / 7, 1 / 7)),
        (bco_pair, {}, (log(1.5) + log(4 / 3), -1 / 3, 1 / 4)),
        (apo_zero, {}, (1 / 3 + 1 / 4, -2 / 9, 3 / 16)),
        (apo_down, {}, (2 / 3 + 1 / 7, 2 / 9 - 6 / 49, 6 / 49)),
    ],
)
def test_values_and_slopes(loss, settings, expected):
    assert at_a(loss, **settings) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_losses_per_token():
    """Margins of 2 / 2 tokens and -2 / 4 tokens: 1 and -0.5."""
    at = partial(value_and_slopes, chosen=-1.0, rejected=-5.0, beta=0.5)
    lengths = {"ref_chosen": -3.0, "ref_rejected": -3.0}
    given = pairs(-1.0, -5.0, **lengths, tokens=(2.0, 4.0))
    assert ipo(given, 0.5).item() == pytest.approx(0.25)  # (1.5 - 1)^2
    assert ipo(given, 1.0).item() == pytest.approx(1.0)
    assert sigmoid_norm(given, 2.0).item() == pytest.approx(log(1 + exp(-3)))
    slopes = torch.autograd.grad(ipo(given, 0.5).sum(), (given.chosen, given.rejected))
    assert [x.item() for x in slopes] == pytest.approx([0.5, -0.25])  # 2 * 0.5 over 2 and over 4 tokens
    assert at(ipo, tokens=(0.0, 0.0))[0] == pytest.approx(9.0), "an empty completion has no tokens to divide by"


def test_sppo_hard():
    """With beta 0.25 the goals are 2 and -2; the log ratios are 3 and -1."""
    assert value_and_slopes(sppo_hard, 0.0, -2.0, -3.0, -1.0, beta=0.25) == pytest.approx((2.0, 2.0, 2.0))


def test_discopop():
    assert value_and_slopes(discopop, 0.0, 0.0)[0] == pytest.approx((log(2) + 1) / 2), "the gate is half open"
    # tau 1: the gate is sigma(z) = 3/4 at z = log 3, the logistic loss log(4/3), the exponential 1/3
    assert value_and_slopes(discopop, log(3), 0.0, tau=1.0)[0] == pytest.approx(log(4 / 3) / 4 + 0.25)
    assert value_and_slopes(discopop, 3.0, 0.0)[0] == pytest.approx(exp(-3)), "right pairs: exponential"
    assert value_and_slopes(discopop, -3.0, 0.0)[0] == pytest.approx(3 + log(1 + exp(-3))), "wrong pairs: logistic"
    at = [value_and_slopes(discopop, z, 0.0)[0] for z in (-0.3, -0.1, 0.05)]
    assert at[0] > at[1] < at[2], "a local minimum near -0.1"


def test_simpo():
    """Means -0.5 and -1: with beta 2 the margin is 1, less gamma."""
    given = pairs(-1.0, -4.0, tokens=(2.0, 4.0))
    assert simpo(given, 2.0, gamma=0.0).item() == pytest.approx(log(1 + exp(-1)))
    assert simpo(given, 2.0, gamma=1.0).item() == pytest.approx(log(2))
    assert simpo(given, 2.0).item() == pytest.approx(log(1 + exp(-0.5))), "0.5 by default"
    smoothed = 0.9 * log(1 + exp(-1)) + 0.1 * log(1 + exp(1))
    assert simpo(given, 2.0, gamma=0.0, label_smoothing=0.1).item() == pytest.approx(smoothed)
    assert simpo(pairs(-1.0, -4.0, -9.0, -1.0, tokens=(2.0, 4.0)), 2.0, gamma=1.0).item() == pytest.approx(log(2))


def test_alphapo():
    """Probabilities 1/4 and 1/16 per token. Alpha 0.5: 1/sqrt(p) is 2 and 4, the rewards -2 and -6."""
    given = pairs(2 * log(1 / 4), 3 * log(1 / 16), tokens=(2.0, 3.0))
    assert alphapo(given, 0.25, alpha=0.5, gamma=0.0).item() == pytest.approx(log(1 + exp(-1)))
    assert alphapo(given, 0.25, alpha=0.5, gamma=1.0).item() == pytest.approx(log(2))
    # Alpha -1: the reward is p - 1
    assert alphapo(given, 16.0, alpha=-1.0, gamma=3.0).item() == pytest.approx(log(2), rel=1e-5)
    # Alpha 1/4: p^-1/4 is sqrt 2 and 2
    gap = 4 * (2 - sqrt(2))
    assert alphapo(given, 1.0).item() == pytest.approx(log(1 + exp(0.1 - gap)), rel=1e-5)
    smoothed = 0.8 * log(1 + exp(-1)) + 0.2 * log(1 + exp(1))
    assert alphapo(given, 0.25, alpha=0.5, gamma=0.0, label_smoothing=0.2).item() == pytest.approx(smoothed)


def test_alphapo_without_a_shape_is_simpo():
    given = pairs([-1.0, -7.0], [-4.0, -2.0], tokens=(2.0, 4.0))
    for alpha in (0.0, 1e-7, -1e-7):
        assert torch.equal(alphapo(given, 2.0, alpha=alpha, gamma=0.5), simpo(given, 2.0))
    assert torch.allclose(alphapo(given, 2.0, alpha=1e-4, gamma=0.5), simpo(given, 2.0), rtol=1e-2)


def test_aot_compares_ranks():
    """The policy's margins are 3, 1, 2, the reference's sorted ones 0, 0.5, 4: by rank 1-0, 2-0.5, 3-4."""
    chosen = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    zero, ones = torch.zeros(3), torch.ones(3)
    given = Pairs(chosen, zero, torch.tensor([0.0, 4.0, 0.5]), zero, ones, ones)
    expected = [log(1 + exp(-d)) for d in (-1.0, 1.0, 1.5)]
    assert aot(given, 1.0).tolist() == pytest.approx(expected), "each at its own pair"
    smoothed = [0.9 * log(1 + exp(-d)) + 0.1 * log(1 + exp(d)) for d in (-1.0, 1.0, 1.5)]
    assert aot(given, 1.0, label_smoothing=0.1).tolist() == pytest.approx(smoothed)
    (slopes,) = torch.autograd.grad(aot(given, 1.0).sum(), chosen)
    assert slopes.tolist() == pytest.approx([-1 / (1 + exp(d)) for d in (-1.0, 1.0, 1.5)])


def test_aot_unpaired_compares_ranks():
    """Chosen ratios 3, 1 and rejected ones 0, 2.5: by rank 1 - 0 and 3 - 2.5. Both pairs hold half of each."""
    given = pairs([3.0, 1.0], [0.0, 2.5])
    low, high = log(1 + exp(-1)), log(1 + exp(-0.5))
    out = aot_unpaired(given, 1.0)
    # pair 0: chosen 3 is the high rank, rejected 0 the low one; pair 1 the other way round
    assert out.tolist() == pytest.approx([(high + low) / 2] * 2)
    slopes = torch.autograd.grad(out.sum(), (given.chosen, given.rejected))
    at_low, at_high = 1 / (1 + exp(1)), 1 / (1 + exp(0.5))
    assert slopes[0].tolist() == pytest.approx([-at_high, -at_low])
    assert slopes[1].tolist() == pytest.approx([at_low, at_high])
    smoothed = aot_unpaired(given, 1.0, label_smoothing=0.5).sum().item()
    assert smoothed == pytest.approx(low + 0.5 + high + 0.25), "-ls(-d) = d - ls(d)"


def test_sft_is_a_mean_over_tokens_of_the_step():
    """3 nats over 2 tokens and 5 nats over 6 tokens: 8 nats over 8 tokens, although the means are 1.5 and 5/6."""
    given = Pairs(torch.tensor([-3.0, -5.0]), *[torch.zeros(2)] * 3, torch.tensor([2.0, 6.0]), torch.ones(2))
    assert sft(given, 0.1).mean().item() == pytest.approx(1.0)
    assert sft(given, 7.0).tolist() == pytest.approx([0.75, 1.25])
    whole = [
        Pairs(*[torch.zeros(1)] * 4, torch.ones(1), torch.ones(1), nll=torch.tensor([x]), nll_tokens=8, step_rows=2)
        for x in (3.0, 5.0)
    ]
    assert [sft(part, 0.1).item() for part in whole] == pytest.approx([0.75, 1.25]), "however the step is cut"
    empty = Pairs(*[torch.zeros(1)] * 6, nll_tokens=torch.tensor(0.0), step_rows=1)
    assert sft(empty, 0.1).tolist() == [0.0]


@pytest.mark.parametrize(
    ("divergence", "rho", "score", "slope"),
    [
        (reverse_kl, log(2), log(2), 1.0),
        (forward_kl, log(2), 0.5, 0.5),
        (forward_kl, -log(3), -2.0, 3.0),
        (js_divergence, log(2), log(4 / 3), 1 / 3),
        (js_divergence, -log(3), log(1 / 2), 3 / 4),
        (alpha_divergence, log(4), 1.0, 0.5),  # alpha 1/2: 2 (1 - e^(-rho / 2))
        (partial(alpha_divergence, alpha=3.0), log(3), 4.0, 9.0),  # (e^(2 rho) - 1) / 2
        (partial(alpha_divergence, alpha=0.0), log(2), 0.5, 0.5),
        (partial(alpha_divergence, alpha=1.0), 0.7, 0.7, 1.0),
    ],
)
def test_divergences(divergence, rho, score, slope):
    at = torch.tensor(rho, requires_grad=True)
    out = divergence(at)
    (grad,) = torch.autograd.grad(out, at)
    assert (out.item(), grad.item()) == pytest.approx((score, slope), rel=1e-5)


def test_scores_enter_by_the_divergence():
    """Forward KL at log ratios log 2 and -log 3: scores 1/2 and -2, a margin of 5/2."""
    assert at_a(sigmoid, divergence=forward_kl)[0] == pytest.approx(log(1 + exp(-2.5)))
    value, by_chosen, by_rejected = at_a(hinge, divergence=forward_kl, beta=0.2)
    assert (value, by_chosen, by_rejected) == pytest.approx((0.5, -0.1, 0.6), rel=1e-5)
    given = pairs(*A.values(), tokens=(2.0, 4.0), divergence=forward_kl)
    assert ipo(given, 1.0).item() == pytest.approx(0.25**2, rel=1e-4)  # 1/4 + 1/2 - 1/2
