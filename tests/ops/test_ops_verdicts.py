"""KTO, unpaired APO and BCO: numbers worked out on paper, laws, gradients, refused settings."""

from math import log

import pytest
import torch

from lit_rl.ops.preference_losses import Pairs, apo_zero, apo_zero_unpaired, bco, kto

GOOD, BAD = torch.tensor([True]), torch.tensor([False])


def said(verdict, ratio, desirable, baseline, beta, *more, **settings):
    """What a verdict says; one without a baseline is given none."""
    given = [] if verdict is apo_zero_unpaired else [baseline]
    return verdict(ratio, desirable, *given, beta, *more, **settings)


def value_and_slope(verdict, ratio, desirable, baseline, beta, *more, **settings):
    at = torch.tensor([ratio], requires_grad=True)
    out = said(verdict, at, desirable, torch.tensor(baseline), beta, *more, **settings)
    (slope,) = torch.autograd.grad(out.sum(), at)
    return out.item(), slope.item()


@pytest.mark.parametrize(
    ("verdict", "ratio", "desirable", "baseline", "beta", "expected"),
    [
        (kto, 1.0 + log(3), GOOD, 1.0, 1.0, (1 / 4, -3 / 16)),  # sigma = 3/4
        (kto, 1.0 + log(3), BAD, 1.0, 1.0, (3 / 4, 3 / 16)),
        (kto, 1.0 + 2 * log(3), BAD, 1.0, 0.5, (3 / 4, 3 / 32)),
        (apo_zero_unpaired, log(3), GOOD, 9.0, 1.0, (1 / 4, -3 / 16)),
        (apo_zero_unpaired, log(3), BAD, 9.0, 1.0, (3 / 4, 3 / 16)),
        (bco, 4.0 * log(3), GOOD, log(3), 0.5, (log(4 / 3), -1 / 8)),  # the reward is 2 log 3, log 3 above delta
        (bco, 4.0 * log(3), BAD, log(3), 0.5, (log(4), 3 / 8)),
    ],
)
def test_by_hand(verdict, ratio, desirable, baseline, beta, expected):
    assert value_and_slope(verdict, ratio, desirable, baseline, beta) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("verdict", [kto, apo_zero_unpaired])
def test_each_class_has_its_weight(verdict):
    ratio, desirable, z0 = torch.tensor([0.7, 0.7]), torch.tensor([True, False]), torch.tensor(0.2)
    plain = said(verdict, ratio, desirable, z0, 0.5)
    weighted = said(verdict, ratio, desirable, z0, 0.5, desirable_weight=3.0, undesirable_weight=0.5)
    assert torch.allclose(weighted, plain * torch.tensor([3.0, 0.5]))


def test_weights_of_rows():
    ratio, desirable, weights = torch.tensor([0.7, -2.0]), torch.tensor([True, False]), torch.tensor([1.0, 2.5])
    delta = torch.tensor(0.3)
    assert torch.allclose(bco(ratio, desirable, delta, 0.5, weights), weights * bco(ratio, desirable, delta, 0.5))


def test_unpaired_apo_of_both_completions_is_apo_of_the_pair():
    chosen, rejected, zero, one = torch.randn(4), torch.randn(4), torch.zeros(4), torch.ones(4)
    of_pair = apo_zero(Pairs(chosen, rejected, zero, zero, one, one), 0.7)
    alone = apo_zero_unpaired(chosen, one.bool(), 0.7) + apo_zero_unpaired(rejected, zero.bool(), 0.7)
    assert torch.allclose(of_pair, alone, atol=1e-6)


@pytest.mark.parametrize("verdict", [kto, apo_zero_unpaired, bco])
def test_gradients(verdict):
    ratio, desirable = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.arange(5) % 2 == 0
    z0 = torch.tensor(0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: said(verdict, x, desirable, z0, 0.6), ratio)
    far = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    out = said(verdict, far, torch.tensor([True, True, False, False]), torch.tensor(0.3), 0.6)
    (slope,) = torch.autograd.grad(out.sum(), far)
    assert out.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("name", ["desirable_weight", "undesirable_weight"])
@pytest.mark.parametrize("verdict", [kto, apo_zero_unpaired])
def test_weights_below_0_are_refused_by_name(verdict, name):
    with pytest.raises(ValueError, match=f"^{name}=-1"):
        said(verdict, torch.zeros(1), GOOD, torch.tensor(0.0), 0.1, **{name: -1.0})
