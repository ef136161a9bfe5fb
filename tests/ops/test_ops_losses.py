import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.ops.losses import clipped_policy_loss, sequence_clipped_loss

reproducible = settings(derandomize=True, deadline=None)
LOSSES = [clipped_policy_loss, sequence_clipped_loss]
every_loss = pytest.mark.parametrize("loss", LOSSES)


def one_token(ratio, advantage, **settings):
    """Loss and gradient by the log-prob of a single token whose ratio is given."""
    logprobs = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    old = torch.tensor([[-1.0]])
    loss, _ = clipped_policy_loss(logprobs, old, torch.tensor([advantage]), torch.tensor([[True]]), **settings)
    loss.sum().backward()
    return loss.item(), logprobs.grad.item()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(4, 6, generator=generator)
    logprobs = (old + 0.4 * torch.randn(4, 6, generator=generator)).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.25])
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3]).unsqueeze(1)
    return logprobs, old, advantages, mask


@pytest.mark.parametrize("advantage", [-1.5, 2.0])
def test_at_ratio_one_value_is_minus_the_advantage_and_gradient_that_of_reinforce(advantage):
    assert one_token(1.0, advantage) == pytest.approx((-advantage, -advantage))


@every_loss
def test_gradient_at_ratio_one_equals_reinforce(loss, batch):
    logprobs, _, advantages, mask = batch
    out, _ = loss(logprobs, logprobs.detach().clone(), advantages, mask)
    (ours,) = torch.autograd.grad(out.sum(), logprobs)
    reinforce = -(advantages.unsqueeze(1) * logprobs * mask).sum()
    (expected,) = torch.autograd.grad(reinforce, logprobs)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.5, 1.0, -1.2, 0.0),  # above the range, good token: stop
        (1.5, -1.0, 1.5, 1.5),  # above the range, bad token: push it down, however far it went
        (0.5, -1.0, 0.8, 0.0),  # below the range, bad token: stop
        (0.5, 1.0, -0.5, -0.5),  # below the range, good token: push it up
        (1.1, 1.0, -1.1, -1.1),  # inside: the plain ratio
        (0.9, -1.0, 0.9, 0.9),
    ],
)
def test_clip_acts_on_the_right_side_only(ratio, advantage, value, slope):
    assert one_token(ratio, advantage) == pytest.approx((value, slope), rel=1e-5)


def test_upper_bound_has_its_own_setting():
    assert one_token(1.25, 1.0) == pytest.approx((-1.2, 0.0))
    assert one_token(1.25, 1.0, clip_high=0.28) == pytest.approx((-1.25, -1.25))
    assert one_token(0.75, -1.0, clip_high=0.28) == pytest.approx((0.8, 0.0))
    assert one_token(1.35, 1.0, clip_low=0.4) == pytest.approx((-1.35, -1.35)), "clip_high follows clip_low"


def test_delta_bounds_only_what_the_clip_leaves_open():
    assert one_token(5.0, -1.0) == pytest.approx((5.0, 5.0))
    assert one_token(5.0, -1.0, delta=3.0) == pytest.approx((3.0, 0.0))
    assert one_token(2.5, -1.0, delta=3.0) == pytest.approx((2.5, 2.5))
    for ratio in (0.5, 1.1, 5.0):
        assert one_token(ratio, 1.0, delta=3.0) == one_token(ratio, 1.0)
    # As in TRL the clipped term keeps the whole ratio, so a delta inside the clip range does not bound a bad token.
    assert one_token(1.5, -1.0, clip_high=0.9, delta=1.2) == pytest.approx((1.5, 1.5))


@reproducible
@given(st.floats(0.05, 20), st.floats(-3, 3))
def test_never_less_than_the_plain_surrogate(ratio, advantage):
    """Clipping makes the objective pessimistic: a lower bound of r A."""
    value, _ = one_token(ratio, advantage)
    assert value >= -ratio * advantage - 1e-4 * max(1.0, abs(ratio * advantage))


def test_sequence_ratio_is_the_product_over_loss_tokens(batch):
    logprobs, old, advantages, mask = batch
    out, _ = sequence_clipped_loss(logprobs, old, advantages, mask, clip_low=1.0, clip_high=1e9)
    product = torch.stack([(logprobs - old).exp()[i][mask[i]].prod() for i in range(4)])
    torch.testing.assert_close(out, -product * advantages)


def test_a_response_of_one_token_is_the_same_in_both_losses():
    old, mask = torch.tensor([[-1.0], [-1.0], [-1.0]]), torch.ones(3, 1, dtype=torch.bool)
    logprobs, advantages = torch.tensor([[-0.5], [-1.1], [-2.0]]), torch.tensor([1.0, -1.0, -1.0])
    by_token, token_metrics = clipped_policy_loss(logprobs, old, advantages, mask, clip_high=0.3)
    by_row, row_metrics = sequence_clipped_loss(logprobs, old, advantages, mask, clip_high=0.3)
    torch.testing.assert_close(by_token[:, 0], by_row)
    torch.testing.assert_close(token_metrics, row_metrics)


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_positions_do_not_matter(loss, batch, bad):
    logprobs, old, advantages, mask = batch
    mask = mask.clone()
    mask[3] = False  # a whole row, as for a truncated response
    clean, clean_metrics = loss(logprobs, old, advantages, mask)
    (clean_grad,) = torch.autograd.grad(clean.sum(), logprobs)
    for spoiled in ("logprobs", "old", "advantages"):
        now = logprobs.detach().clone()
        then, weights = old.clone(), advantages.clone()
        if spoiled == "logprobs":
            now[~mask] = bad
        elif spoiled == "old":
            then[~mask] = bad
        else:
            weights[3] = bad
        now.requires_grad_()
        dirty, metrics = loss(now, then, weights, mask)
        assert torch.equal(dirty, clean), spoiled
        torch.testing.assert_close(metrics, clean_metrics, rtol=0, atol=0)
        (grad,) = torch.autograd.grad(dirty.sum(), now)
        assert torch.equal(grad, clean_grad), spoiled


@every_loss
def test_all_masked_gives_zero_attached_to_the_graph(loss, batch):
    logprobs, old, advantages, mask = batch
    out, metrics = loss(logprobs, old, advantages, torch.zeros_like(mask))
    assert out.eq(0).all()
    (grad,) = torch.autograd.grad(out.sum(), logprobs)
    assert grad.eq(0).all()
    assert all(numerator.item() == denominator.item() == 0 for numerator, denominator in metrics.values())


@every_loss
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_a_huge_ratio_stays_finite(loss, advantage, gap):
    logprobs = torch.tensor([[gap, 0.0]], requires_grad=True)
    out, metrics = loss(logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.tensor([[True, True]]))
    out.sum().backward()
    assert out.isfinite().all() and logprobs.grad.isfinite().all()
    assert all(numerator.isfinite() for numerator, _ in metrics.values())


@every_loss
def test_half_precision_logprobs_give_a_float32_ratio(loss, batch):
    logprobs, old, advantages, mask = batch
    half, half_old = logprobs.detach().bfloat16(), old.bfloat16()
    ours, _ = loss(half, half_old, advantages, mask)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, loss(half.float(), half_old.float(), advantages, mask)[0])


def test_metrics_by_hand():
    """Five tokens: two clipped above (one good, one bad), two below (one good, one bad), one inside; one masked."""
    ratios = torch.tensor([[1.5, 0.5, 1.0], [1.5, 0.5, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    logprobs, old, advantages = ratios.log().requires_grad_(), torch.zeros(2, 3), torch.tensor([1.0, -1.0])
    _, metrics = clipped_policy_loss(logprobs, old, advantages, mask)
    means = {name: (numerator / denominator).item() for name, (numerator, denominator) in metrics.items()}
    kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.0, 1.5, 0.5)) / 5
    assert means == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 5,
            "clip_ratio/high_mean": 1 / 5,
            "clip_ratio/region_mean": 2 / 5,
            "ratio_mean": 1.0,
            "approx_kl": kl,
        }
    )
    assert not any(part.requires_grad for pair in metrics.values() for part in pair)
    _, wider = clipped_policy_loss(logprobs, old, advantages, mask, clip_high=0.6)
    assert wider["clip_ratio/high_mean"][0] == 0 and wider["clip_ratio/low_mean"][0] == 1


def test_row_metrics_count_rows_with_loss_tokens():
    logs = torch.tensor([[0.5, 0.5], [0.0, 0.0], [3.0, 3.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    _, metrics = sequence_clipped_loss(logs, torch.zeros(3, 2), torch.ones(3), mask)
    high, rows = metrics["clip_ratio/high_mean"]
    assert (high.item(), rows.item()) == (1, 2)
    assert metrics["ratio_mean"][0].item() == pytest.approx(math.e + 1)


@every_loss
def test_metrics_sum_over_micro_batches(loss, batch):
    logprobs, old, advantages, mask = batch
    _, whole = loss(logprobs, old, advantages, mask)
    halves = [
        loss(logprobs[rows], old[rows], advantages[rows], mask[rows])[1] for rows in (slice(0, 1), slice(1, None))
    ]
    for name, (numerator, denominator) in whole.items():
        torch.testing.assert_close(sum(half[name][0] for half in halves), numerator)
        torch.testing.assert_close(sum(half[name][1] for half in halves), denominator)
