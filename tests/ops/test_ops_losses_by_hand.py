"""Value, slope and metrics of every policy loss for numbers small enough to work out: plain floats, no tensors."""

import math
from functools import partial
from math import exp, log

import pytest
import torch

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
    up_grpo_loss,
    vespo_loss,
)
from lit_rl.ops.reductions import Highest, Lowest


def one_token(loss, p, p_old, advantage, **settings):
    """Loss, and its slope by the log-prob, of a single token with these probabilities."""
    logprobs = torch.tensor([[log(p)]], requires_grad=True)
    out, _ = loss(logprobs, torch.tensor([[log(p_old)]]), torch.tensor([advantage]), torch.tensor([[True]]), **settings)
    (grad,) = torch.autograd.grad(out.sum(), logprobs)
    return out.item(), grad.item()


def one_row(loss, p, p_old, advantage, **settings):
    """Losses and slopes of the tokens of one row, with a masked token at its end."""
    logprobs = torch.tensor([[*map(log, p), -7.0]], requires_grad=True)
    old, mask = torch.tensor([[*map(log, p_old), -3.0]]), torch.tensor([[True] * len(p) + [False]])
    out, metrics = loss(logprobs, old, torch.tensor([advantage]), mask, **settings)
    (grad,) = torch.autograd.grad(out.sum(), logprobs)
    assert out[0, -1] == grad[0, -1] == 0
    return out[0, :-1].tolist(), grad[0, :-1].tolist(), metrics


def means(metrics):
    pairs = {name: metric for name, metric in metrics.items() if not isinstance(metric, Highest | Lowest)}
    return {name: (numerator / denominator).item() for name, (numerator, denominator) in pairs.items()}


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
def test_the_clip_acts_on_the_right_side_only(ratio, advantage, value, slope):
    assert one_token(clipped_policy_loss, 0.4 * ratio, 0.4, advantage) == pytest.approx((value, slope), rel=1e-5)


def test_delta_bounds_only_what_the_clip_leaves_open():
    at = partial(one_token, clipped_policy_loss, p_old=0.1)
    assert at(p=0.5, advantage=-2.0) == pytest.approx((10.0, 10.0))
    assert at(p=0.5, advantage=-2.0, delta=3.0) == pytest.approx((6.0, 0.0))
    assert at(p=0.25, advantage=-2.0, delta=3.0) == pytest.approx((5.0, 5.0))
    for p in (0.05, 0.11, 0.5):
        assert at(p=p, advantage=1.0, delta=3.0) == at(p=p, advantage=1.0)
    # As in TRL the clipped term keeps the whole ratio, so a delta inside the clip range does not bound a bad token.
    assert at(p=0.15, advantage=-1.0, clip_high=0.9, delta=1.2) == pytest.approx((1.5, 1.5))


def test_clip_metrics():
    """Rows of 3 and 2 loss tokens: one good token clipped above in the first, one bad one below in the second."""
    ratios = torch.tensor([[1.5, 0.5, 1.0], [1.5, 0.5, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    logprobs, old, advantages = ratios.log(), torch.zeros(3, 3), torch.tensor([1.0, -1.0, 1.0])
    _, metrics = clipped_policy_loss(logprobs, old, advantages, mask, delta=1.4)
    kl = sum(r - 1 - log(r) for r in (1.5, 0.5, 1.0, 1.5, 0.5)) / 5
    assert means(metrics) == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 5,
            "clip_ratio/high_mean": 1 / 5,
            "clip_ratio/region_mean": 2 / 5,
            "clip_ratio/delta_mean": 1 / 5,
            "ratio_mean": 1.0,
            "approx_kl": kl,
        }
    )
    assert metrics["clip_ratio/low_min"] == Lowest(torch.tensor(0.0)), "the masked row has no share"
    assert metrics["clip_ratio/high_max"].value.item() == pytest.approx(1 / 3)
    _, wider = clipped_policy_loss(logprobs, old, advantages, mask, clip_high=0.6)
    assert wider["clip_ratio/high_mean"][0] == 0 and wider["clip_ratio/low_mean"][0] == 1
    assert "clip_ratio/delta_mean" not in wider
    _, bad = clipped_policy_loss(logprobs, old, -torch.ones(3), mask, delta=1.4)
    assert means(bad)["clip_ratio/delta_mean"] == pytest.approx(2 / 5), "bad tokens alone, and all of them"


def test_a_row_that_is_clipped_as_a_whole_counts_with_all_its_tokens():
    logs = torch.tensor([[0.5, 0.5], [0.0, 0.0], [3.0, 3.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    _, metrics = clipped_policy_loss(logs, torch.zeros(3, 2), torch.ones(3), mask, ratio=sequence_sum_ratio)
    assert means(metrics)["clip_ratio/high_mean"] == pytest.approx(2 / 3)
    assert metrics["clip_ratio/high_max"].value == 1
    assert means(metrics)["ratio_mean"] == pytest.approx((2 * math.e + 1) / 3)


@pytest.mark.parametrize(
    ("ratio", "value", "slope"),
    [
        # Token ratios 1.5 and 1.1: their product is 1.65, beyond 1.5; their geometric mean is 1.2845.
        (sequence_sum_ratio, 1.5, 0.0),
        (sequence_mean_ratio, math.sqrt(1.65), math.sqrt(1.65)),  # each of two tokens, half the gradient
        (sequence_token_ratio, math.sqrt(1.65), math.sqrt(1.65)),
    ],
)
def test_clipped_at_sequence_levels(ratio, value, slope):
    losses, grads, _ = one_row(clipped_policy_loss, (0.6, 0.22), (0.4, 0.2), 2.0, clip_low=0.5, ratio=ratio)
    assert losses == pytest.approx([-2 * value] * 2) and grads == pytest.approx([-2 * slope] * 2)


def test_reinforce_and_importance_weights():
    assert one_token(reinforce_loss, 0.6, 0.1, 2.0) == pytest.approx((-2 * log(0.6), -2.0))
    assert one_token(importance_weighted_loss, 0.6, 0.1, 2.0) == pytest.approx((-12.0, -12.0))
    assert one_token(importance_weighted_loss, 0.1, 0.6, -2.0) == pytest.approx((1 / 3, 1 / 3))


def test_cispo_caps_the_ratio_itself():
    at = partial(one_token, cispo_loss, p_old=0.1)
    assert at(p=0.6, advantage=1.0) == pytest.approx((-5 * log(0.6), -5.0))  # ratio 6, cap 5
    assert at(p=0.6, advantage=-1.0) == pytest.approx((5 * log(0.6), 5.0))
    assert at(p=0.3, advantage=2.0) == pytest.approx((-6 * log(0.3), -6.0))
    assert at(p=0.01, advantage=1.0) == pytest.approx((-0.1 * log(0.01), -0.1)), "no lower bound"
    assert at(p=0.3, advantage=1.0, cap=2.0) == pytest.approx((-2 * log(0.3), -2.0))
    for advantage, share in ((1.0, 0.5), (-1.0, 0.0)):  # TRL counts the positive side only
        *_, metrics = one_row(cispo_loss, (0.6, 0.2), (0.1, 0.1), advantage)
        assert means(metrics)["cispo_clip_ratio"] == share


def test_cispo_of_minimax_clips_both_sides():
    at = partial(one_token, cispo_two_sided_loss, p_old=0.4)
    assert at(p=0.8, advantage=1.0) == pytest.approx((-1.2 * log(0.8), -1.2))
    assert at(p=0.2, advantage=-1.0) == pytest.approx((0.8 * log(0.2), 0.8))
    assert at(p=0.44, advantage=1.0) == pytest.approx((-1.1 * log(0.44), -1.1))
    assert at(p=0.8, advantage=1.0, clip_low=1.0, clip_high=4.0) == pytest.approx((-2 * log(0.8), -2.0))
    assert at(p=0.1, advantage=1.0, clip_low=1.0) == pytest.approx((-0.25 * log(0.1), -0.25))
    *_, metrics = one_row(cispo_two_sided_loss, (0.8, 0.2, 0.4), (0.4, 0.4, 0.4), 1.0)
    assert means(metrics)["cispo_clip_ratio"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.5, 2.0, 1.0), (0.5, 2.0, 1.0), (1.5, -1.0, 1.05)])
def test_sapo(ratio, advantage, tau):
    gate = 1 / (1 + exp(-tau * (ratio - 1)))
    value, slope = -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage
    assert one_token(sapo_loss, 0.4 * ratio, 0.4, advantage) == pytest.approx((value, slope), rel=1e-5)


@pytest.mark.parametrize(("advantage", "k", "lam"), [(1.0, 2, 3), (-2.0, 3, 2), (0.0, 2, 3)])
def test_vespo(advantage, k, lam):
    """Ratios 1.5 and 0.8: w = 1.2 for both tokens of the row."""
    phi = 1.2**k * exp(lam * (1 - 1.2))
    losses, grads, metrics = one_row(vespo_loss, (0.6, 0.2), (0.4, 0.25), advantage)
    assert losses == pytest.approx([-phi * advantage * log(0.6), -phi * advantage * log(0.2)], rel=1e-5)
    assert grads == pytest.approx([-phi * advantage] * 2, rel=1e-5)
    assert means(metrics)["vespo/phi_seq_mean"] == pytest.approx(phi, rel=1e-5)


def test_vespo_settings_and_weights():
    weights = torch.tensor([[0.5, 3.0, math.nan]])  # w = 1.2 * 1.5 = 1.8
    _, grads, _ = one_row(vespo_loss, (0.6, 0.2), (0.4, 0.25), 1.0, weights=weights, positive=(1.5, 2.5))
    assert grads == pytest.approx([-(1.8**1.5) * exp(2.5 * (1 - 1.8))] * 2, rel=1e-5)
    _, grads, _ = one_row(vespo_loss, (0.6, 0.2), (0.4, 0.25), -1.0, weights=weights, negative=(1.0, 0.5))
    assert grads == pytest.approx([1.8 * exp(0.5 * (1 - 1.8))] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("advantage", "logs", "slopes"),
    [
        # Token ratios 2 and 0.5: log 2 = 0.693 is beyond 0.4 on both sides.
        (1.0, (0.4, -log(2)), (0, 1)),  # the good row gains nothing more from the first token
        (-1.0, (log(2), -0.4), (1, 0)),
    ],
)
def test_gmpo(advantage, logs, slopes):
    row = exp(sum(logs) / 2)
    losses, grads, metrics = one_row(gmpo_loss, (0.4, 0.2), (0.2, 0.4), advantage)
    assert losses == pytest.approx([-row * advantage] * 2)
    assert grads == pytest.approx([-row * advantage * slope for slope in slopes])
    share = means(metrics)
    side, other = ("high", "low") if advantage > 0 else ("low", "high")
    assert (share[f"clip_ratio/{side}_mean"], share[f"clip_ratio/{other}_mean"]) == (0.5, 0)


def test_gmpo_has_a_bound_for_each_side():
    losses, _, _ = one_row(gmpo_loss, (0.4, 0.2), (0.2, 0.4), 1.0, clip_low=0.1, clip_high=0.6)
    assert losses == pytest.approx([-exp((0.6 - log(2)) / 2)] * 2)


@pytest.mark.parametrize(
    ("p", "p_old", "advantage", "weight"),
    [
        (0.65, 0.40, 1.0, None),  # rose by 0.25: too far for a good token
        (0.65, 0.40, -1.0, 1.625),
        (0.15, 0.40, -1.0, None),
        (0.15, 0.40, 1.0, 0.375),
        (0.001, 0.0001, 1.0, 10.0),  # a rare token may change its ratio as it likes
        (0.41, 0.01, -1.0, 20.0),  # ratio 41, cap 20
    ],
)
def test_dppo_tv(p, p_old, advantage, weight):
    expected = (0.0, 0.0) if weight is None else (-weight * advantage * log(p), -weight * advantage)
    assert one_token(dppo_tv_loss, p, p_old, advantage) == pytest.approx(expected, rel=1e-5)


def test_dppo_settings():
    at = partial(one_token, dppo_tv_loss, 0.5, 0.4)
    assert at(1.0, threshold_high=0.05) == at(1.0, threshold_low=0.05) == (0, 0), "threshold_high follows threshold_low"
    assert at(1.0, threshold_low=0.05, threshold_high=0.2) == pytest.approx((-1.25 * log(0.5), -1.25))
    assert at(-1.0, cap=1.1) == pytest.approx((1.1 * log(0.5), 1.1))
    *_, metrics = one_row(dppo_tv_loss, (0.65, 0.4, 0.3), (0.4, 0.4, 0.4), 1.0)
    assert means(metrics)["clip_ratio/region_mean"] == pytest.approx(1 / 3)
    assert metrics["clip_ratio/high_max"].value.item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("p", [0.3, 0.45, 0.55, 0.8])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_dppo_kl(p, advantage):
    kl = 0.5 * log(0.5 / p) + 0.5 * log(0.5 / (1 - p))
    away = (p > 0.5) == (advantage > 0)
    weight = 0.0 if away and kl > 0.05 else p / 0.5
    expected = (-weight * advantage * log(p), -weight * advantage)
    assert one_token(dppo_kl_loss, p, 0.5, advantage) == pytest.approx(expected)
    assert one_token(dppo_kl_loss, p, 0.5, advantage, threshold_low=1.01 * kl)[1] == pytest.approx(-2 * p * advantage)
    if away:
        assert one_token(dppo_kl_loss, p, 0.5, advantage, threshold_low=0.99 * kl)[1] == 0


def test_dppo_kl_has_a_threshold_for_each_side_and_a_cap():
    assert one_token(dppo_kl_loss, 0.8, 0.5, 1.0, threshold_high=1.0)[1] == pytest.approx(-1.6)
    assert one_token(dppo_kl_loss, 0.2, 0.5, -1.0, threshold_high=1.0)[1] == 0
    assert one_token(dppo_kl_loss, 0.8, 0.5, -1.0, cap=1.5)[1] == pytest.approx(1.5)


def test_up_grpo():
    at = partial(one_token, up_grpo_loss, p_old=0.1)
    for p in (0.01, 0.1, 0.9):
        assert at(p=p, advantage=2.0) == pytest.approx((-2.0, -2.0)), "value -A, slope -A, whatever the ratio"
    assert at(p=0.05, advantage=-1.0) == pytest.approx((0.8, 0.0))
    assert at(p=0.05, advantage=-1.0, clip_low=0.6) == pytest.approx((0.5, 0.5))
    assert at(p=0.25, advantage=-1.0) == pytest.approx((2.5, 2.5))
    assert at(p=0.5, advantage=-1.0) == pytest.approx((3.0, 0.0))
    assert at(p=0.5, advantage=-1.0, delta=None) == pytest.approx((5.0, 5.0))


def test_dro_draws_a_token_to_the_log_ratio_that_its_advantage_is_worth():
    at = partial(one_token, dro_loss, p_old=0.4)
    assert at(p=0.6, advantage=2.0) == pytest.approx((-2 * log(0.6) + log(1.5) ** 2 / 2, -2 + log(1.5)))
    assert at(p=0.6, advantage=2.0, beta=0.5)[1] == pytest.approx(-2 + 0.5 * log(1.5))
    for beta in (0.5, 3.0):
        assert at(p=0.4 * exp(-0.3 / beta), advantage=-0.3, beta=beta)[1] == pytest.approx(0.0, abs=1e-6)
    assert at(p=0.2, advantage=0.0)[1] == pytest.approx(-log(2)), "without an advantage it is drawn back"


def test_fipo_weighs_a_token_by_what_became_of_its_continuation():
    """Log ratios 0.1, -0.05 and 0.08, whose sums from a token on halve with every token."""
    moved = (0.1, -0.05, 0.08)
    later = [0.1 + (-0.05 + 0.08 / 2) / 2, -0.05 + 0.08 / 2, 0.08]
    p = [0.4 * exp(d) for d in moved]
    plain = [exp(d) for d in moved]
    losses, grads, metrics = one_row(fipo_loss, p, [0.4] * 3, -2.0, half_life=1.0, weight_range=(0.5, 2.0))
    expected = [2 * r * exp(s) for r, s in zip(plain, later)]
    assert losses == pytest.approx(expected) and grads == pytest.approx(expected), "the weight has no gradient"
    assert means(metrics)["fipo/weight_mean"] == pytest.approx(sum(map(exp, later)) / 3)
    losses, *_ = one_row(fipo_loss, p, [0.4] * 3, -2.0, half_life=1.0, weight_range=(1.0, 1.08))
    weights = [1.08, 1.0, 1.08]
    assert losses == pytest.approx([2 * r * f for r, f in zip(plain, weights)]), "never below 1, nor above the highest"
    *_, metrics = one_row(fipo_loss, p, [0.4] * 3, 1.0, clip_high=0.09)
    assert means(metrics)["clip_ratio/high_mean"] == pytest.approx(1 / 3)
    halved = one_row(fipo_loss, [0.4] * 32 + [0.4 * exp(0.1)], [0.4] * 33, -1.0)[0][0]
    assert halved == pytest.approx(exp(0.05)), "a token 32 places later counts half"


def test_m2po_drops_the_largest_log_ratios_until_the_mean_of_their_squares_is_low():
    """Squares 0.01, 0.04, 0.09 and 0.16 of log ratios of both signs: their means from below are 0.01, 0.025, 0.0467
    and 0.075."""
    moved = (0.3, -0.1, 0.2, -0.4)
    p, kept = [0.4 * exp(d) for d in moved], {0.075: 4, 0.0749: 3, 0.04: 2, 0.0251: 2, 0.0249: 1, 0.0099: 0}
    for threshold, count in kept.items():
        losses, grads, metrics = one_row(m2po_loss, p, [0.4] * 4, -1.0, threshold=threshold + 1e-5)
        bound = sorted(map(abs, moved))[count - 1] if count else 0
        expected = [exp(d) if abs(d) <= bound else 0 for d in moved]
        assert losses == pytest.approx(expected) and grads == pytest.approx(expected), threshold
        assert means(metrics)["m2po/dropped"] == pytest.approx(1 - count / 4)
    *_, metrics = one_row(m2po_loss, [0.4 * exp(d) for d in (0.3, -0.1, 0.3, 0.1)], [0.4] * 4, -1.0, threshold=0.04)
    assert means(metrics)["m2po/dropped"] == 0.5, "equal ones go together: with one of them the mean would be 0.037"
    losses, *_ = one_row(m2po_loss, p, [0.4] * 4, -1.0)
    assert [value > 0 for value in losses] == [False, True, True, False], "a second moment of 0.04"


def test_real():
    """Two prompts, in turn: mean log-probs -1, -0.5 and -2 of a good, a good and a bad row; -3 of a bad one alone."""
    logprobs = torch.tensor([[-1.0, -1.0], [-3.0, -9.0], [-0.5, -9.0], [-1.0, -3.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]]).bool()
    advantages, prompts = torch.tensor([0.1, -1.0, 0.3, -0.4]), torch.tensor([8, 3, 8, 8])
    out, _ = real_loss(logprobs, logprobs.detach(), advantages, mask, prompts, temperature=0.5)
    good, bad, alone = exp(2) + exp(1), exp(-4), exp(-6)
    first, second = log(1 + good) + log(1 + bad), log(1 + alone)
    for found, row in zip(out.tolist(), [[first, first], [second, 0], [first, 0], [first, first]]):
        assert found == pytest.approx(row)
    (grad,) = torch.autograd.grad(out[:, 0].sum() / 3, logprobs)
    slopes = [-2 * exp(2) / (1 + good), 2 / 3 * alone / (1 + alone), -2 * exp(1) / (1 + good), 2 * bad / (1 + bad)]
    expected = [[slopes[0] / 2] * 2, [slopes[1], 0], [slopes[2], 0], [slopes[3] / 2] * 2]
    for found, row in zip(grad.tolist(), expected):
        assert found == pytest.approx(row), "good rows rise and bad ones fall, the worse ranked by more"
    nothing, _ = real_loss(logprobs, logprobs.detach(), torch.zeros(4), mask, prompts)
    assert nothing.eq(0).all() and nothing.requires_grad
    middle = torch.tensor([-0.1, -2.5e-9, 0.1])  # of rewards 0.1, 0.2 and 0.3, by a mean that is rounded
    out, _ = real_loss(logprobs[:3], logprobs[:3].detach(), middle, mask[:3])
    assert out[1].eq(0).all() and out[0, 0] > 0


def test_cpgd():
    at = partial(one_token, cpgd_loss, p_old=0.4)
    assert at(p=0.44, advantage=2.0) == pytest.approx((-2 * log(0.44), -2.0)), "no ratio in the slope"
    assert at(p=0.8, advantage=2.0) == pytest.approx((-2 * log(0.48), 0.0))
    assert at(p=0.8, advantage=-1.0) == pytest.approx((log(0.8), 1.0))
    assert at(p=0.2, advantage=-1.0) == pytest.approx((log(0.32), 0.0))
    assert at(p=0.2, advantage=-1.0, clip_low=1.0) == pytest.approx((log(0.2), 1.0)), "1 is no bound"
    assert at(p=0.55, advantage=1.0, clip_high=0.5) == pytest.approx((-log(0.55), -1.0))
    *_, metrics = one_row(cpgd_loss, (0.8, 0.2), (0.4, 0.4), -1.0)
    assert means(metrics)["clip_ratio/low_mean"] == 0.5 and means(metrics)["clip_ratio/high_mean"] == 0


@pytest.mark.parametrize(
    ("p", "advantage", "kept", "kept_by_ipo"),
    [(0.65, 1.0, False, False), (0.65, -1.0, True, False), (0.45, 1.0, True, True), (0.15, -1.0, False, False)],
)
def test_prime_rl(p, advantage, kept, kept_by_ipo):
    ratio = p / 0.4
    for loss, keep in ((prime_rl_loss, kept), (prime_rl_ipo_loss, kept_by_ipo)):
        value = -ratio * advantage * keep + 1e-3 * log(ratio) ** 2
        slope = -ratio * advantage * keep + 2e-3 * log(ratio)
        assert one_token(loss, p, 0.4, advantage) == pytest.approx((value, slope), rel=1e-4)


def test_prime_rl_settings():
    at = partial(one_token, prime_rl_loss, 0.5, 0.4, 1.0, kl_tau=0.0)
    assert at(threshold_high=0.05) == at(threshold_low=0.05) == (0, 0)
    assert at(threshold_low=0.05, threshold_high=0.2) == pytest.approx((-1.25, -1.25))
    assert one_token(prime_rl_loss, 0.9, 0.03, -1.0, kl_tau=0.0) == pytest.approx((30.0, 30.0)), "no cap on the ratio"
    assert one_token(prime_rl_ipo_loss, 0.65, 0.4, -1.0, threshold=0.3, kl_tau=0.0) == pytest.approx((1.625, 1.625))
    *_, metrics = one_row(prime_rl_ipo_loss, (0.65, 0.15, 0.4), (0.4, 0.4, 0.4), 1.0)
    assert means(metrics)["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert means(metrics)["clip_ratio/high_mean"] == pytest.approx(1 / 3)


LP, OLD = ((-0.2, -1.0), (-0.4, -2.4)), ((-0.5, -1.1), (-0.3, -2.4))
"""Means -1 and 0, advantages +1 and -1: the covariances are 0.8 and 0 in the good row, -0.6 and 1.4 in the bad one."""


def two_rows(loss, **settings):
    logprobs = torch.tensor(LP, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    out, metrics = loss(logprobs, torch.tensor(OLD), torch.tensor([1.0, -1.0]), mask, **settings)
    (grad,) = torch.autograd.grad(out.sum(), logprobs)
    return out.flatten().tolist(), grad.flatten().tolist(), metrics


def test_clip_cov():
    """Ratios e^0.3 (clipped, so it cannot be dropped), e^0.1, e^-0.1 and 1."""
    plain = [-1.2, -exp(0.1), exp(-0.1), 1.0]
    losses, grads, metrics = two_rows(clip_cov_loss, share=1.0, band=(1.0, 5.0))
    assert losses == pytest.approx([*plain[:3], 0]) and grads == pytest.approx([0, *plain[1:3], 0])
    assert means(metrics)["clip_cov/share"] == 1 / 4 and means(metrics)["clip_ratio/high_mean"] == 1 / 4
    losses, _, metrics = two_rows(clip_cov_loss, share=1.0, band=(0.5, 5.0))
    assert losses == pytest.approx([*plain[:3], 0]) and means(metrics)["clip_cov/share"] == 1 / 4
    losses, _, _ = two_rows(clip_cov_loss, share=1.0, band=(0.5, 5.0), clip_range=(0.2, 0.5))
    assert losses == pytest.approx([0, *plain[1:3], 0])
    losses, _, _ = two_rows(clip_cov_loss, share=1.0, band=(-0.1, 1.2), clip_range=(0.05, 0.5))
    assert losses == pytest.approx([0, 0, 0.95, 1.0])
    assert two_rows(clip_cov_loss)[0] == pytest.approx([*plain[:3], 0]), "at least one, however small the share"


def test_clip_cov_drops_its_whole_share_of_the_tokens_that_the_clip_leaves():
    """Two tokens are in the band and the first of them is clipped: a share of one token in four is always the other."""
    for seed in range(20):
        torch.manual_seed(seed)
        *_, metrics = two_rows(clip_cov_loss, share=0.25, band=(0.5, 5.0))
        assert means(metrics)["clip_cov/share"] == 1 / 4


def test_kl_cov():
    ratios = [exp(0.3), exp(0.1), exp(-0.1), 1.0]
    plain = [-ratios[0], -ratios[1], ratios[2], ratios[3]]
    losses, grads, metrics = two_rows(kl_cov_loss, share=0.5)
    assert losses == pytest.approx([plain[0] + 0.3, *plain[1:]])  # 0.8 and 1.4 are the top; the latter has not moved
    assert grads == pytest.approx([plain[0] + 1, *plain[1:]])
    assert means(metrics)["kl_cov/share"] == 0.5
    losses, _, _ = two_rows(kl_cov_loss, share=1.0, kl_coef=0.1)
    assert losses == pytest.approx([value + 0.1 * gap for value, gap in zip(plain, (0.3, 0.1, 0.1, 0))])
    losses, _, metrics = two_rows(kl_cov_loss)
    assert losses == pytest.approx(plain) and means(metrics)["kl_cov/share"] == 0.25
