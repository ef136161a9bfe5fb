import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import in_turn

from lit_rl.ops.reductions import masked_mean, masked_moments, masked_sum, variance

reproducible = settings(derandomize=True, deadline=None)
OPERATIONS = [masked_sum, masked_mean]


def rows(values, mask):
    return torch.tensor(values, requires_grad=True), torch.tensor(mask)


def test_by_hand():
    x, mask = rows([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[True, False, True], [False, True, False]])
    assert masked_sum(x, mask).item() == 9
    assert masked_sum(x, mask, dim=1).tolist() == [4, 5]
    assert masked_sum(x, mask, dim=0).tolist() == [1, 5, 3]
    assert masked_mean(x, mask).item() == 3
    assert masked_mean(x, mask, dim=1).tolist() == [2, 5]
    assert masked_mean(x, mask, dim=0).tolist() == [1, 5, 3]


@reproducible
@given(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=1, max_size=12))
def test_agrees_with_indexing(entries):
    x = torch.tensor([[value for value, _ in entries]], dtype=torch.float64)
    mask = torch.tensor([[kept for _, kept in entries]])
    torch.testing.assert_close(masked_sum(x, mask), x[mask].sum())
    if mask.any():
        torch.testing.assert_close(masked_mean(x, mask), x[mask].mean())


@in_turn(dim=[None, 0, 1], operation=OPERATIONS)
def test_empty_selection_is_zero_and_attached(operation, dim):
    x, mask = rows([[1.0, 2.0], [3.0, 4.0]], [[False, False], [False, False]])
    out = operation(x, mask, dim).sum()
    out.backward()
    assert out.item() == 0
    assert x.grad is not None and x.grad.eq(0).all()


@in_turn(bad=[math.nan, math.inf], dim=[None, 0, 1], operation=OPERATIONS)
def test_nothing_leaks_from_under_the_mask(operation, dim, bad):
    mask = [[True, False, True], [False, False, False]]
    clean, keep = rows([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]], mask)
    dirty, _ = rows([[1.0, bad, 3.0], [bad, bad, bad]], mask)
    # exp makes the derivative at the bad entry non-finite as well: multiplying it by zero would give NaN.
    outs = [operation(x.exp(), keep, dim) for x in (clean, dirty)]
    torch.testing.assert_close(outs[0], outs[1])
    for out in outs:
        out.sum().backward()
    torch.testing.assert_close(torch.where(keep, clean.grad, 0.0), torch.where(keep, dirty.grad, 0.0))
    assert torch.isfinite(torch.where(keep, dirty.grad, 0.0)).all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradient_under_the_mask_is_exactly_zero(operation):
    x, mask = rows([[1.0, math.nan, math.inf]], [[True, False, False]])
    operation(x, mask).backward()
    assert x.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_moments_of_parts_add_up_to_the_variance_of_the_whole():
    """Of 1, 3, 3, 9: mean 4, squared distances 9, 1, 1 and 25."""
    x, mask = rows([[1.0, math.nan], [3.0, 3.0], [9.0, math.inf]], [[True, False], [True, True], [True, False]])
    parts = [masked_moments(x[i : i + 1], mask[i : i + 1]) for i in range(3)]
    assert torch.stack(parts).sum(0).tolist() == masked_moments(x, mask).tolist() == [4, 16, 100]
    assert variance(masked_moments(x, mask)) == 9
    assert not masked_moments(x, mask).requires_grad


def test_the_variance_of_equal_values_is_zero_and_of_nothing_nan():
    x = torch.full((7, 9), 0.1)
    assert 0 <= variance(masked_moments(x, torch.ones(7, 9).bool())) < 1e-15
    assert variance(masked_moments(x, torch.zeros(7, 9).bool())).isnan()
