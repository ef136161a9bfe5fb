"""The levels at which two policies are compared: values by hand, who moves whom, and what a mask hides."""

import math

import pytest
import torch

from lit_rl.ops.policy_losses import sequence_mean_ratio, sequence_sum_ratio, sequence_token_ratio, token_ratio

RATIOS = [token_ratio, sequence_mean_ratio, sequence_sum_ratio, sequence_token_ratio]
every_ratio = pytest.mark.parametrize("ratio", RATIOS)

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
NOW = torch.tensor([[-1.0, -2.0, -0.5, -9.0], [-1.0, -8.0, -3.0, -7.0], [-1.0, -1.0, -1.0, -1.0]])
OLD = torch.tensor([[-1.5, -1.0, -0.25, -4.0], [-3.0, -1.0, -2.0, -1.0], [-2.0, -2.0, -2.0, -2.0]])


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (token_ratio, [[0.5, -1.0, -0.25, 0], [2.0, 0, -1.0, 0], [0, 0, 0, 0]]),
        (sequence_sum_ratio, [[-0.75, -0.75, -0.75, 0], [1.0, 0, 1.0, 0], [0, 0, 0, 0]]),
        (sequence_mean_ratio, [[-0.25, -0.25, -0.25, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 0]]),
        (sequence_token_ratio, [[-0.25, -0.25, -0.25, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 0]]),
    ],
)
def test_by_hand(ratio, expected):
    torch.testing.assert_close(ratio(NOW, OLD, MASK), torch.tensor(expected))


@pytest.mark.parametrize(
    ("ratio", "rows"),
    [
        # The slope of the sum of a row's values by the log-prob of one loss token, for rows of 3 and 2 tokens.
        (token_ratio, (1, 1)),
        (sequence_sum_ratio, (3, 2)),
        (sequence_mean_ratio, (1, 1)),
        (sequence_token_ratio, (1, 1)),
    ],
)
def test_gradient(ratio, rows):
    now = NOW.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ratio(now, OLD, MASK).sum(), now)
    torch.testing.assert_close(grad, torch.tensor([*rows, 0.0]).unsqueeze(1) * MASK)


@every_ratio
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_tokens_change_nothing(ratio, bad):
    for spoiled in range(2):
        inputs = [NOW.clone(), OLD.clone()]
        inputs[spoiled][~MASK] = bad
        now = inputs[0].requires_grad_()
        out = ratio(now, inputs[1], MASK)
        assert torch.equal(out, ratio(NOW, OLD, MASK))
        (grad,) = torch.autograd.grad(out.sum(), now)
        assert grad[~MASK].eq(0).all() and grad.isfinite().all()


@every_ratio
def test_in_float32_whatever_comes(ratio):
    assert ratio(NOW.bfloat16(), OLD.bfloat16(), MASK).dtype == torch.float32


@every_ratio
def test_the_same_policy_has_ratio_one(ratio):
    assert ratio(NOW, NOW, MASK).eq(0).all()
