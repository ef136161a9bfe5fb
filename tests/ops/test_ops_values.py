"""The value loss by hand, its gradient at and beyond the clip, and explained variance over any cut of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.ops.returns import clipped_value_loss, explained_variance, value_sums

ALL = torch.ones(1, 4, dtype=torch.bool)


def loss_of(values, old, returns, *, clip=0.2):
    leaf = torch.tensor([values], requires_grad=True)
    mask = torch.ones_like(leaf, dtype=torch.bool)
    per_token, metrics = clipped_value_loss(leaf, torch.tensor([old]), torch.tensor([returns]), mask, clip=clip)
    per_token.sum().backward()
    return per_token.detach()[0], leaf.grad[0], metrics


def test_by_hand():
    # Inside the clip; past it towards the return (the clipped error, 0.8^2, counts); away from the return; unmoved.
    per_token, grad, metrics = loss_of([0.1, 0.5, -0.5, 0.0], [0.0] * 4, [1.0] * 4)
    assert per_token.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 2.25 / 2, 0.5])
    assert grad.tolist() == pytest.approx([-0.9, 0.0, -1.5, -1.0])
    means = {name: float(a / b) for name, (a, b) in metrics.items()}
    assert means == {
        "value/clipfrac_avg": pytest.approx(0.25),
        "value/error": pytest.approx((0.81 + 0.25 + 2.25 + 1.0) / 4),
        "value/mean": pytest.approx(0.025),
        "return/mean": pytest.approx(1.0),
    }


@given(st.lists(st.tuples(*[st.floats(-3, 3, width=32)] * 3), min_size=1, max_size=6), st.floats(0.01, 1.0))
def test_the_clip_is_pessimistic_and_never_pushes_past_its_range(triples, clip):
    values, old, returns = [list(column) for column in zip(*triples)]
    clipped, plain = (loss_of(values, old, returns, clip=c) for c in (clip, None))
    assert (clipped[0] >= plain[0]).all()
    for v, o, r, gradient in zip(values, old, returns, clipped[1]):
        if abs(v - o) > clip + 1e-6 and (v - o) * (r - v) > 0:  # outside already, and the return is further out
            assert gradient == 0


@pytest.mark.parametrize("bad", [math.nan])
def test_masked_tokens_change_nothing(bad):
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [False, True, False]])
    clean = [torch.randn(2, 3) for _ in range(3)]
    dirty = [part.masked_fill(~mask, bad) for part in clean]
    found = []
    for values, old, returns in (clean, dirty):
        leaf = values.clone().requires_grad_()
        per_token, metrics = clipped_value_loss(leaf, old, returns, mask)
        per_token.sum().backward()
        found.append((per_token.detach(), leaf.grad, metrics, value_sums(leaf, returns, mask)))
    (loss, grad, metrics, sums), (dirty_loss, dirty_grad, dirty_metrics, dirty_sums) = found
    assert torch.equal(loss, dirty_loss) and torch.equal(grad, dirty_grad) and torch.equal(sums, dirty_sums)
    assert metrics == dirty_metrics
    assert loss[~mask].eq(0).all() and grad[~mask].eq(0).all()


def test_nothing_but_the_values_gets_a_gradient():
    parts = [torch.randn(1, 4, requires_grad=True) for _ in range(3)]
    per_token, metrics = clipped_value_loss(*parts, ALL)
    per_token.sum().backward()
    assert parts[0].grad is not None and parts[1].grad is None and parts[2].grad is None
    assert not any(part.requires_grad for pair in metrics.values() for part in pair)


def test_half_precision_values_are_compared_in_float32():
    """3.01 is no bfloat16: rounded, the error of 0.01 would be lost."""
    values = torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    per_token, _ = clipped_value_loss(values, values, torch.full((1, 4), 3.01), ALL)
    assert per_token.dtype == torch.float32 and per_token[0].tolist() == pytest.approx([0.5e-4] * 4, rel=1e-3)


class TestExplainedVariance:
    def test_by_hand(self):
        returns = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        assert explained_variance(value_sums(returns, returns, ALL)).item() == pytest.approx(1.0)
        assert explained_variance(value_sums(torch.zeros(1, 4), returns, ALL)).item() == pytest.approx(0.0)
        assert explained_variance(value_sums(returns / 2, returns, ALL)).item() == pytest.approx(0.75)
        assert explained_variance(value_sums(-returns, returns, ALL)).item() == pytest.approx(-3.0)

    def test_returns_that_do_not_vary_leave_nothing_to_explain(self):
        for returns in (torch.full((1, 4), 0.3), torch.zeros(1, 4)):
            assert explained_variance(value_sums(torch.randn(1, 4), returns, ALL)).isnan()
        assert explained_variance(value_sums(torch.randn(1, 4), torch.randn(1, 4), ~ALL)).isnan()

    @given(st.integers(0, 10_000), st.sampled_from([1, 2, 3, 6]), st.floats(-100, 100))
    def test_sums_of_any_cut_give_the_variance_of_the_whole(self, seed, rows, offset):
        generator = torch.Generator().manual_seed(seed)
        returns = torch.randn(6, 5, generator=generator) + offset
        values = returns + torch.randn(6, 5, generator=generator)
        mask = torch.rand(6, 5, generator=generator) < 0.7
        mask[0] = True
        sums = sum(value_sums(*parts) for parts in zip(values.split(rows), returns.split(rows), mask.split(rows)))
        r, e = returns[mask].double(), (returns - values)[mask].double()
        expected = 1 - e.var(correction=0) / r.var(correction=0)
        torch.testing.assert_close(explained_variance(sums), expected, rtol=1e-4, atol=1e-4)
