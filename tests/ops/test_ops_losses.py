"""What every policy loss must do, whatever its formula. Values by hand: test_ops_losses_by_hand.py."""

import inspect
import math
from functools import partial
from itertools import product

import pytest
import torch

from lit_rl.ops import policy_losses
from lit_rl.ops.policy_losses import (
    cispo_loss,
    cispo_two_sided_loss,
    clip_cov_loss,
    clipped_policy_loss,
    cpgd_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    fipo_loss,
    gmpo_loss,
    importance_weighted_loss,
    kl_cov_loss,
    m2po_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
    real_loss,
    reinforce_loss,
    sapo_loss,
    sequence_mean_ratio,
    sequence_sum_ratio,
    sequence_token_ratio,
    token_ratio,
    up_grpo_loss,
    vespo_loss,
)
from lit_rl.ops.reductions import Highest, Lowest, StepTokens

RATIOS = {
    "token": token_ratio,
    "sequence_mean": sequence_mean_ratio,
    "sequence_sum": sequence_sum_ratio,
    "sequence_token": sequence_token_ratio,
}
WITH_RATIO = [clipped_policy_loss, cispo_loss, cispo_two_sided_loss, sapo_loss, importance_weighted_loss]
PLAIN = [
    *WITH_RATIO,
    cpgd_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    dro_loss,
    fipo_loss,
    gmpo_loss,
    m2po_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
    reinforce_loss,
    up_grpo_loss,
    vespo_loss,
]
LOSSES = {
    **{loss.__name__: loss for loss in PLAIN},
    **{
        f"{loss.__name__}/{level}": partial(loss, ratio=ratio)
        for loss in WITH_RATIO
        for level, ratio in RATIOS.items()
        if level != "token"
    },
    "clipped_policy_loss/delta": partial(clipped_policy_loss, delta=1.3),
    # Shares that a batch of fourteen tokens can show. With share 1 every token of the band goes: nothing is random.
    "clip_cov_loss": partial(clip_cov_loss, share=1.0, band=(0.05, 5.0)),
    "kl_cov_loss": partial(kl_cov_loss, share=0.2),
    "real_loss": real_loss,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@pytest.fixture
def batch():
    """Four rows of 6, 4, 1 and 3 tokens; ratios on both sides of every range, both signs of the advantage."""
    generator = torch.Generator().manual_seed(3)
    old = -0.05 - 3 * torch.rand(4, 6, generator=generator)
    logprobs = (old + 0.4 * torch.randn(4, 6, generator=generator)).clamp(max=-0.01).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.25])
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 3]).unsqueeze(1)
    return logprobs, old, advantages, mask


def run(loss, logprobs, old, advantages, mask, **more):
    """Losses, metrics and the gradient of their sum; every random choice is made alike."""
    torch.manual_seed(0)
    now = logprobs.detach().clone().requires_grad_()
    out, metrics = loss(now, old, advantages, mask, **more)
    (grad,) = torch.autograd.grad(out.sum(), now)
    return out.detach(), metrics, grad


def values(metric):
    return (metric.value,) if isinstance(metric, Highest | Lowest) else metric


def test_the_table_is_complete():
    losses = {
        name for name, value in vars(policy_losses).items() if inspect.isfunction(value) and name.endswith("_loss")
    }
    ratios = {"token_ratio", "sequence_mean_ratio", "sequence_sum_ratio", "sequence_token_ratio"}
    assert losses == {getattr(loss, "func", loss).__name__ for loss in LOSSES.values()}
    assert {*policy_losses.__all__} == losses | ratios | {"MAX_LOG_RATIO"}


@every_loss
def test_masked_positions_do_not_matter(loss, batch):
    logprobs, old, advantages, mask = batch
    mask = mask.clone()
    mask[3] = False  # a whole row, as for a truncated response
    advantages = advantages.unsqueeze(1).repeat(1, 6)
    clean = run(loss, logprobs, old, advantages, mask)
    for spoiled, bad in product(range(3), (math.nan, math.inf)):
        inputs = [x.detach().clone() for x in (logprobs, old, advantages)]
        inputs[spoiled][~mask] = bad
        dirty = run(loss, *inputs, mask)
        assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[2], clean[2]), spoiled
        for name, metric in clean[1].items():
            assert all(torch.equal(*pair) for pair in zip(values(dirty[1][name]), values(metric))), name
    assert clean[0][~mask].eq(0).all() and clean[2][~mask].eq(0).all()


@every_loss
def test_the_advantage_of_a_masked_row_may_be_nan(loss, batch):
    logprobs, old, advantages, mask = batch
    mask = mask.clone()
    mask[3] = False
    clean = run(loss, logprobs, old, advantages, mask)
    advantages = advantages.clone()
    advantages[3] = math.nan
    dirty = run(loss, logprobs, old, advantages, mask)
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[2], clean[2])


@every_loss
def test_rows_may_come_in_any_order(loss, batch):
    order = torch.tensor([2, 0, 3, 1])
    out, metrics, grad = run(loss, *batch)
    moved, moved_metrics, moved_grad = run(loss, *(x[order] for x in batch))
    torch.testing.assert_close(moved, out[order])
    torch.testing.assert_close(moved_grad, grad[order])
    for name, metric in metrics.items():
        torch.testing.assert_close(values(moved_metrics[name]), values(metric))


@every_loss
def test_one_advantage_a_row_is_the_same_one_for_each_token(loss, batch):
    logprobs, old, advantages, mask = batch
    by_row = run(loss, logprobs, old, advantages, mask)
    by_token = run(loss, logprobs, old, advantages.unsqueeze(1).repeat(1, 6), mask)
    assert torch.equal(by_row[0], by_token[0]) and torch.equal(by_row[2], by_token[2])


AT_RATIO_ONE = {
    name: loss
    for name, loss in LOSSES.items()
    # The random drop of Clip-Cov acts here too: test_clip_cov_without_its_drop_is_the_clipped_loss.
    if name not in ("clip_cov_loss", "real_loss")  # a classifier of rows: test_real
    # A row's tokens carry as many gradients of the row's sum: test_sequence_sum_of_a_row_mean_is_reinforce. CISPO takes
    # its gradient from the log-prob, whatever the level of the weight.
    and (not name.endswith("/sequence_sum") or "cispo" in name)
}


@pytest.mark.parametrize("loss", AT_RATIO_ONE.values(), ids=AT_RATIO_ONE.keys())
def test_at_ratio_one_the_gradient_is_that_of_reinforce(loss, batch):
    logprobs, _, advantages, mask = batch
    _, metrics, grad = run(loss, logprobs, logprobs.detach().clone(), advantages, mask)
    torch.testing.assert_close(grad, -advantages.unsqueeze(1) * mask)
    assert metrics["ratio_mean"][0] == metrics["ratio_mean"][1] == 14 and metrics["approx_kl"][0] == 0


@pytest.mark.parametrize(
    "loss",
    [
        *(loss for loss in PLAIN if loss is not gmpo_loss),
        LOSSES["kl_cov_loss"],
        LOSSES["clipped_policy_loss/sequence_token"],
    ],
    ids=lambda loss: getattr(loss, "func", loss).__name__,
)
def test_at_ratio_one_each_token_follows_its_own_advantage(loss, batch):
    """Not GMPO and not the other sequence levels: there a token's log-prob moves the losses of its whole row."""
    logprobs, _, _, mask = batch
    advantages = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    _, _, grad = run(loss, logprobs, logprobs.detach().clone(), advantages, mask)
    torch.testing.assert_close(grad, -advantages * mask)


@every_loss
def test_all_masked_gives_zero_attached_to_the_graph(loss, batch):
    logprobs, old, advantages, mask = batch
    out, metrics, grad = run(loss, logprobs, old, advantages, torch.zeros_like(mask))
    assert out.eq(0).all() and grad.eq(0).all()
    for metric in metrics.values():
        if isinstance(metric, Lowest | Highest):
            assert metric.value.item() == (math.inf if isinstance(metric, Lowest) else -math.inf)
        else:
            assert metric[0].item() == metric[1].item() == 0


@every_loss
def test_a_log_ratio_of_a_thousand_stays_finite(loss):
    far = [(-1.0, -1001.0), (-1001.0, -1.0), (0.0, -1000.0), (-1000.0, 0.0)]
    rows = torch.tensor([[*pair, advantage] for pair in far for advantage in (-1.0, 0.0, 1.0)])
    logprobs, old = (torch.stack([column, torch.full((12,), -0.5)], dim=1) for column in rows[:, :2].T)
    out, metrics, grad = run(loss, logprobs, old, rows[:, 2], torch.ones(12, 2, dtype=torch.bool))
    assert out.isfinite().all() and grad.isfinite().all()
    assert all(value.isfinite() for metric in metrics.values() for value in values(metric))


@every_loss
def test_half_precision_logprobs_give_a_float32_loss(loss, batch):
    logprobs, old, advantages, mask = batch
    half, half_old = logprobs.detach().bfloat16(), old.bfloat16()
    ours = run(loss, half, half_old, advantages, mask)[0]
    assert ours.dtype == torch.float32
    assert torch.equal(ours, run(loss, half.float(), half_old.float(), advantages, mask)[0])


@every_loss
def test_micro_batches_make_the_same_losses_and_metrics(loss, batch):
    """Numerators and denominators sum, extremes are extremes of extremes; what is of the step is told by ``step``."""
    logprobs, old, advantages, mask = batch
    step = StepTokens.of(mask, logprobs=logprobs, old_logprobs=old, advantages=advantages)
    more = {"step": step} if "step" in inspect.signature(loss).parameters else {}
    prompts = {"group_id": torch.tensor([4, 4, 2, 2])} if loss is real_loss else {}
    whole, whole_metrics, whole_grad = run(loss, *batch, **prompts)
    cut = 2 if prompts else 1  # whole groups, where the rows of a prompt are compared
    parts = [run(loss, *(x[rows] for x in batch), **more) for rows in (slice(0, cut), slice(cut, None))]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), whole_grad)
    for name, metric in whole_metrics.items():
        pieces = [torch.stack(values(part[1][name])) for part in parts]
        expected = torch.stack(values(metric))
        combined = sum(pieces)
        if isinstance(metric, Highest):
            combined = torch.maximum(*pieces)
        elif isinstance(metric, Lowest):
            combined = torch.minimum(*pieces)
        torch.testing.assert_close(combined, expected)


@every_loss
def test_metrics_carry_no_graph(loss, batch):
    metrics = loss(*batch)[1]
    assert {"ratio_mean", "approx_kl"} <= metrics.keys()
    assert not any(value.requires_grad or value.ndim for metric in metrics.values() for value in values(metric))


SMOOTH = {name: loss for name, loss in LOSSES.items() if "cispo" not in name and "/sequence_token" not in name}
for stop_gradient in ("vespo_loss", "dppo_tv_loss", "dppo_kl_loss", "up_grpo_loss", "fipo_loss"):
    del SMOOTH[stop_gradient]


@pytest.mark.parametrize("loss", SMOOTH.values(), ids=SMOOTH.keys())
def test_the_gradient_is_the_slope_of_the_value(loss, batch):
    """By central differences, where nothing is held constant. Kinks are far enough from this batch."""
    logprobs, old, advantages, mask = batch
    *_, grad = run(loss, *batch)
    step, width = StepTokens.of(mask, logprobs=logprobs, old_logprobs=old, advantages=advantages), 2e-3
    more = {"step": step} if "step" in inspect.signature(loss).parameters else {}
    for i, t in mask.nonzero().tolist():
        moved = torch.zeros_like(old)
        moved[i, t] = width
        above, below = (run(loss, logprobs + d, old, advantages, mask, **more)[0].double() for d in (moved, -moved))
        slope = (above - below).sum().item() / (2 * width)
        assert grad[i, t].item() == pytest.approx(slope, abs=4e-3, rel=4e-3), (i, t)


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        (clipped_policy_loss, 0.79, 1.21),
        (partial(clipped_policy_loss, clip_high=0.28), 0.79, 1.29),
        (partial(clip_cov_loss, band=(1e9, 2e9)), 0.79, 1.21),
        (gmpo_loss, math.exp(-0.41), math.exp(0.41)),
        (cpgd_loss, 0.79, 1.21),
        (up_grpo_loss, 0.79, None),
        (fipo_loss, 0.79, 1.21),
        # A probability of 0.5 that moves by 0.2; a binary KL of 0.05 lies at 0.5 -+ 0.15.
        (dppo_tv_loss, 0.58, 1.42),
        (partial(dppo_tv_loss, threshold_high=0.1), 0.58, 1.22),
        (dppo_kl_loss, 0.68, 1.32),
        (partial(prime_rl_loss, kl_tau=0.0), 0.58, 1.42),
        (partial(prime_rl_ipo_loss, kl_tau=0.0), 0.78, 1.22),
    ],
)
def test_beyond_its_bound_a_token_has_no_gradient(loss, low, high):
    """Two tokens, so that one that stands still shows that the other only has stopped."""

    def slope(ratio, advantage):
        now = torch.tensor([[0.5 * ratio, 0.5]]).log().requires_grad_()
        old, mask = torch.tensor([[0.5, 0.5]]).log(), torch.ones(1, 2, dtype=torch.bool)
        out, _ = loss(now, old, torch.tensor([advantage]), mask)
        (grad,) = torch.autograd.grad(out.sum(), now)
        assert grad[0, 1] != 0
        return grad[0, 0].item()

    assert slope(low, -1.0) == 0 and slope(low + 0.05, -1.0) > 0
    if high is not None:
        assert slope(high, 1.0) == 0 and slope(high - 0.05, 1.0) < 0
    if "ipo" not in str(loss):
        assert slope(low, 1.0) < 0 and slope(1.4, -1.0) > 0, "the way back is open"


def test_clip_cov_drops_its_share_on_average_however_the_step_is_cut():
    """Where the policy has moved so far that the clip stops a third of the tokens."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(16, 64, generator=generator)
    old = logprobs + 0.4 * torch.randn(16, 64, generator=generator)
    advantages, mask = torch.randn(16, generator=generator), torch.ones(16, 64, dtype=torch.bool)
    step = StepTokens.of(mask, logprobs=logprobs, old_logprobs=old, advantages=advantages)
    loss = partial(clip_cov_loss, share=0.02, band=(0.1, 5.0), step=step)
    torch.manual_seed(0)

    def dropped(rows):
        parts = [loss(logprobs[at], old[at], advantages[at], mask[at]) for at in torch.arange(16).split(rows)]
        return sum(part[1]["clip_cov/share"][0].item() for part in parts)

    for rows in (16, 2):
        assert sum(dropped(rows) for _ in range(60)) / 60 == pytest.approx(int(0.02 * 1024), rel=0.1)


def test_kl_cov_takes_the_top_of_the_step_and_not_of_the_micro_batch(batch):
    logprobs, old, advantages, mask = batch
    step = StepTokens.of(mask, logprobs=logprobs.detach() * (1 + 1e-6), advantages=advantages)  # of another pass
    for share, count in ((0.01, 1), (0.15, 2), (0.5, 7), (1.0, 14)):
        loss = partial(kl_cov_loss, share=share)
        whole = run(loss, *batch)
        assert whole[1]["kl_cov/share"] == (count, 14)
        parts = [run(loss, *(x[rows] for x in batch), step=step) for rows in (slice(0, 2), slice(2, 4))]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole[0])
        alone = [run(loss, *(x[rows] for x in batch)) for rows in (slice(0, 2), slice(2, 4))]
        assert count in (1, 14) or not torch.equal(torch.cat([part[0] for part in alone]), whole[0])


def test_prime_rl_pulls_dropped_tokens_back():
    """The squared log ratio acts where the policy gradient is gone, and beyond the cut of the ratio."""
    for now, then in ((0.8, 0.4), (0.1, 0.5)):
        logprobs, old = torch.tensor([[now]]).log(), torch.tensor([[then]]).log()
        advantage, mask = torch.tensor([1.0 if now > then else -1.0]), torch.tensor([[True]])
        for loss in (prime_rl_loss, prime_rl_ipo_loss):
            *_, grad = run(partial(loss, kl_tau=0.5), logprobs, old, advantage, mask)
            assert grad.item() == pytest.approx(math.log(now / then))
    *_, grad = run(
        partial(prime_rl_loss, kl_tau=0.5), torch.tensor([[-1.0]]), torch.tensor([[-41.0]]), -advantage, mask
    )
    assert grad.item() == pytest.approx(40)
