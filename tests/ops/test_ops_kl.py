"""Expectations are exact: every token of a small vocabulary is enumerated, weighted by the policy that draws it."""

import math

import pytest
import torch

from lit_rl.algorithms.terms.regularizers import KLPenalty
from lit_rl.ops.kl import (
    corrected_k1,
    corrected_k2,
    corrected_k3,
    k1,
    k2,
    k3,
    k3_with_k2_gradient,
    sequence_corrected_k3,
)

ESTIMATORS = [k1, k2, k3, corrected_k3]


@pytest.fixture
def policies():
    generator = torch.Generator().manual_seed(1)
    theta, ref, old = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), ref.log_softmax(-1), old.log_softmax(-1)


def expectation(estimator, theta, ref, old, drawn_from):
    """E over tokens of the estimator. The weights are constants, as those of samples are."""
    values = estimator(theta.log_softmax(-1).unsqueeze(0), ref.unsqueeze(0), old.unsqueeze(0))[0]
    return (drawn_from.detach().exp() * values).sum()


def reverse_kl(theta, ref):
    logprobs = theta.log_softmax(-1)
    return (logprobs.exp() * (logprobs - ref)).sum()


def gradient(value, theta):
    return torch.autograd.grad(value, theta, retain_graph=True)[0]


@pytest.mark.parametrize("estimator", [k1, k3, corrected_k3])
def test_value_is_unbiased_on_policy(estimator, policies):
    theta, ref, _ = policies
    now = theta.detach().log_softmax(-1)
    torch.testing.assert_close(expectation(estimator, theta, ref, now, now), reverse_kl(theta, ref))


def test_corrected_value_is_unbiased_off_policy_where_k3_is_not(policies):
    theta, ref, old = policies
    exact = reverse_kl(theta, ref)
    torch.testing.assert_close(expectation(corrected_k3, theta, ref, old, old), exact)
    assert abs(expectation(k3, theta, ref, old, old) - exact) > 0.05 * exact


@pytest.mark.parametrize("estimator", [k2, corrected_k3])
def test_gradient_is_that_of_the_reverse_kl_on_policy(estimator, policies):
    theta, ref, _ = policies
    now = theta.detach().log_softmax(-1)
    value = expectation(estimator, theta, ref, now, now)
    torch.testing.assert_close(gradient(value, theta), gradient(reverse_kl(theta, ref), theta))


def test_gradient_of_corrected_k3_is_that_of_the_reverse_kl_off_policy(policies):
    theta, ref, old = policies
    value = expectation(corrected_k3, theta, ref, old, old)
    torch.testing.assert_close(gradient(value, theta), gradient(reverse_kl(theta, ref), theta))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_give_exactly_zero(estimator):
    logprobs = -torch.rand(4, 6)
    assert estimator(logprobs, logprobs, logprobs - 0.3).eq(0).all()


def test_k3_is_never_negative_even_where_the_difference_is_rounding_noise():
    logprobs = -5 * torch.rand(2000, 1)
    for scale in (1e-7, 1e-4, 1e-1, 3.0):
        ref = logprobs + scale * torch.randn(2000, 1)
        assert k3(logprobs, ref, logprobs).ge(0).all()


def test_by_hand():
    logprobs, ref, old = (torch.tensor([[value]]).log() for value in (0.5, 0.25, 0.2))
    log2 = torch.tensor(2.0).log()
    torch.testing.assert_close(k1(logprobs, ref, old)[0, 0], log2)
    torch.testing.assert_close(k2(logprobs, ref, old)[0, 0], log2.square() / 2)
    torch.testing.assert_close(k3(logprobs, ref, old)[0, 0], log2 - 0.5)
    torch.testing.assert_close(corrected_k3(logprobs, ref, old)[0, 0], 2.5 * (log2 - 0.5))


SLOPES = {
    k1: lambda d, ratio: 1.0,
    k2: lambda d, ratio: d,
    k3: lambda d, ratio: -math.expm1(-d),
    k3_with_k2_gradient: lambda d, ratio: d,
    corrected_k1: lambda d, ratio: ratio * (d + 1),
    corrected_k2: lambda d, ratio: ratio * d,
    corrected_k3: lambda d, ratio: ratio * d,
    # Of two tokens, whose mean is half of each, and the other of which is no distance away.
    sequence_corrected_k3: lambda d, ratio: ratio * (0.5 * (math.expm1(-d) + d) - math.expm1(-d)),
}
"""By `log(pi)`, of `d = log(pi / ref)`: a ratio to the policy that drew the token adds the value, where it is
differentiated, and that takes `expm1` out of the slope of k3."""


@pytest.mark.parametrize("distance", [-30.0, 1e-3, 30.0])
@pytest.mark.parametrize("estimator", SLOPES, ids=lambda estimator: estimator.__name__)
def test_the_gradient_is_the_formula_far_away_too(estimator, distance):
    """Nothing is clamped or detached that the formula differentiates, alone and as the only term of an objective."""
    logprobs = torch.tensor([[-1.5, -1.5, -1.5]], requires_grad=True)
    ref, old = logprobs.detach() - torch.tensor([[distance, 0.0, distance]]), logprobs.detach() - 0.25
    mask = torch.tensor([[True, True, False]])
    penalty, _ = KLPenalty("algo.beta", 0.5, estimator)(logprobs, ref, old, mask, 1.0)
    (slope,) = torch.autograd.grad(penalty.sum(), logprobs)
    wanted = 0.5 * SLOPES[estimator](float(logprobs[0, 0].detach() - ref[0, 0]), math.exp(0.25))
    torch.testing.assert_close(slope[0, 0], torch.tensor(wanted), rtol=1e-5, atol=1e-7)
    assert slope[0, 2] == 0, "outside the mask"


def test_k3_overflows_in_float32_where_its_docstring_says():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    value = k3(logprobs, torch.tensor([[88.7, 88.8]]), logprobs.detach())
    assert value.isfinite().tolist() == [[True, False]] and math.log(torch.finfo(torch.float32).max) < 88.73
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert slope.isfinite().tolist() == [[True, False]]  # such a step is left out: algorithms/test_broken_steps.py
