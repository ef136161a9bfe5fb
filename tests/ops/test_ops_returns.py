import math
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_rl.ops.advantages import centered, remax, whiten_tokens
from lit_rl.ops.imitation import generalized_jsd
from lit_rl.ops.returns import (
    centered_return_to_go,
    discounted_return,
    gae,
    optimal_token_baseline,
    process_supervised,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax_return_to_go,
    return_to_go,
)

reproducible = settings(derandomize=True, deadline=None, max_examples=15)
share = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def remax_at_half(rewards, group_id, token_rewards, mask):
    return remax_return_to_go(rewards, group_id, torch.full_like(rewards, 0.5), token_rewards, mask)


def baseline_of_rows(rewards, group_id, token_rewards, mask):
    return reinforce_plus_plus_baseline(rewards, group_id, mask)


def norms_of(mask):
    """Squared norms of gradients that depend on the token's place in the batch's columns only; NaN outside the mask."""
    norms = (1.1 + torch.arange(mask.shape[1]).cos()).expand(mask.shape)
    return norms.masked_fill(~mask, math.nan)


def with_norms(rewards, group_id, token_rewards, mask):
    return optimal_token_baseline(rewards, group_id, token_rewards, mask, norms_of(mask))


ESTIMATORS = [
    with_norms,
    partial(reinforce_plus_plus, gamma=0.9),
    baseline_of_rows,
    centered_return_to_go,
    partial(discounted_return, gamma=0.9),
    remax_at_half,
    process_supervised,
]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@st.composite
def grids(draw, max_b=5, max_t=7):
    """Rewards of tokens (NaN outside the mask) and a mask with holes; every fourth row or so has no token at all."""
    b, t = draw(st.integers(1, max_b)), draw(st.integers(1, max_t))
    cells = st.lists(st.sampled_from([0.0, 0.0, 1.0, -0.5, 0.25]), min_size=b * t, max_size=b * t)
    mask = torch.tensor(draw(st.lists(st.sampled_from([1, 1, 0]), min_size=b * t, max_size=b * t))).bool().reshape(b, t)
    return torch.tensor(draw(cells)).reshape(b, t).masked_fill(~mask, math.nan), mask


def totals(token_rewards, mask):
    return token_rewards.masked_fill(~mask, 0.0).sum(1)


def loops(rewards, values, mask, gamma, lam):
    """Returns to go, advantages and returns by the plain recursions, one token after another, in Python floats."""
    b, t = mask.shape
    to_go, advantage, target = [torch.zeros(b, t) for _ in range(3)]
    for i in range(b):
        g, following, a = 0.0, 0.0, 0.0
        for j in reversed(range(t)):
            if not mask[i, j]:
                continue  # nothing is earned, no time passes
            r, v = rewards[i, j].item(), values[i, j].item()
            g = r + gamma * g
            a = (r + gamma * following - v) + gamma * lam * a
            following = v
            to_go[i, j], advantage[i, j], target[i, j] = g, a, a + v
    return to_go, advantage, target


@reproducible
@given(grid=grids(), gamma=share, lam=share, seed=st.integers(0, 99))
def test_against_a_plain_double_loop_with_holes_in_the_mask(grid, gamma, lam, seed):
    rewards, mask = grid
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~mask, math.inf)
    to_go, advantage, target = loops(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(return_to_go(rewards, mask, gamma=gamma), to_go)
    got = gae(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(got[0], advantage)
    torch.testing.assert_close(got[1], target)


class TestGAE:
    def test_by_hand(self):
        rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]])
        mask = torch.ones(1, 3, dtype=torch.bool)
        d3, d2, d1 = 1 - 0.75, 0.5 * 0.75 - 0.25, 0.5 * 0.25 - 0.5
        a3, a2 = d3, d2 + 0.25 * d3
        a1 = d1 + 0.25 * a2
        advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
        torch.testing.assert_close(advantages, torch.tensor([[a1, a2, a3]]))
        torch.testing.assert_close(returns, advantages + values)

    @pytest.mark.parametrize("setting", [{"gamma": 1.5}, {"gamma": -0.1}, {"lam": 1.01}, {"lam": math.nan}])
    def test_what_is_no_discount_is_refused_by_name(self, setting):
        x = torch.zeros(1, 2)
        with pytest.raises(ValueError, match=f"{next(iter(setting))}=.*allowed is"):
            gae(x, x, x.bool(), **setting)


def test_a_discount_out_of_range_is_refused_by_every_estimator_that_has_one():
    x, mask, rows = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1)
    for call in (partial(return_to_go, x, mask), partial(reinforce_plus_plus, rows, rows.long(), x, mask)):
        with pytest.raises(ValueError, match="gamma=2"):
            call(gamma=2.0)


@st.composite
def batches(draw):
    token_rewards, mask = draw(grids(max_b=6))
    rewards = totals(token_rewards, mask)
    unscored = torch.tensor(
        draw(st.lists(st.sampled_from([False] * 4 + [True]), min_size=len(mask), max_size=len(mask)))
    )
    group_id = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    return rewards.masked_fill(unscored, math.nan), group_id, token_rewards, mask


@every_estimator
@reproducible
@given(batch=batches(), data=st.data())
def test_order_of_rows_and_padding_do_not_matter(estimator, batch, data):
    rewards, group_id, token_rewards, mask = batch
    got = estimator(*batch)
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    torch.testing.assert_close(estimator(*(column[order] for column in batch)), got[order])
    width = data.draw(st.integers(1, 9))
    wide = torch.nn.functional.pad(token_rewards, (0, width), value=math.inf)
    padded = estimator(rewards, group_id, wide, torch.nn.functional.pad(mask, (0, width)))
    torch.testing.assert_close(padded, torch.nn.functional.pad(got, (0, width)))


@every_estimator
@reproducible
@given(batch=batches())
def test_unscored_rows_are_as_if_absent_and_zero_stands_outside_the_mask(estimator, batch):
    rewards, _, _, mask = batch
    got, kept = estimator(*batch), ~rewards.isnan()
    assert got[~kept].eq(0).all() and got[~mask].eq(0).all() and got.isfinite().all()
    torch.testing.assert_close(estimator(*(column[kept] for column in batch)), got[kept])


@every_estimator
def test_equal_rows_say_nothing(estimator):
    """Equal rewards at the last token: 0, exactly, where there is a comparison; ReMax's rows differ from greedy, and a
    return is itself."""
    token_rewards, mask = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)
    token_rewards[:, 2] = 0.35
    compared = not (isinstance(estimator, partial) and estimator.func is discounted_return)
    if isinstance(estimator, partial):
        estimator = partial(estimator, gamma=1.0)
    got = estimator(token_rewards.sum(1), torch.zeros(4, dtype=torch.long), token_rewards, mask)
    if estimator is remax_at_half:
        torch.testing.assert_close(got, torch.full((4, 3), -0.15))
    else:
        assert got.eq(0.0 if compared else 0.35).all()


OUTCOMES = torch.tensor([0.0, 1.0, 1.0, 5.0, math.nan, 2.0]), torch.tensor([0, 0, 0, 1, 1, 2])


def earned_at_the_end():
    rewards, group_id = OUTCOMES
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool()
    last = (torch.arange(3) * mask).argmax(1)
    token_rewards = torch.zeros(6, 3).scatter(1, last[:, None], rewards.nan_to_num()[:, None])
    return rewards, group_id, token_rewards, mask


class TestRewardAtTheLastToken:
    """Where everything is earned at the end, an estimator for tokens is the one for rows at every token."""

    def test_centered(self):
        rewards, group_id, token_rewards, mask = earned_at_the_end()
        got = centered_return_to_go(rewards, group_id, token_rewards, mask)
        torch.testing.assert_close(got, centered(rewards, group_id)[:, None] * mask)

    def test_remax(self):
        rewards, group_id, token_rewards, mask = earned_at_the_end()
        greedy = torch.tensor([1.0, 1.0, 1.0, math.nan, 0.5, 0.5])
        got = remax_return_to_go(rewards, group_id, greedy, token_rewards, mask)
        torch.testing.assert_close(got, remax(rewards, group_id, greedy)[:, None] * mask)

    def test_reinforce_plus_plus_is_the_reward_whitened(self):
        rewards, group_id, token_rewards, mask = earned_at_the_end()
        scored = mask & ~rewards.isnan()[:, None]
        flat = rewards[:, None].expand(6, 3)[scored]
        got = reinforce_plus_plus(rewards, group_id, token_rewards, mask)
        torch.testing.assert_close(got[scored], (flat - flat.mean()) / flat.std())

    def test_its_baseline_form_is_the_centred_reward_whitened(self):
        rewards, group_id, _, mask = earned_at_the_end()
        scored = mask & ~rewards.isnan()[:, None]
        got = reinforce_plus_plus_baseline(rewards, group_id, mask, eps=0.5)
        want = whiten_tokens(centered(rewards, group_id)[:, None].expand(6, 3), scored, eps=0.5)
        torch.testing.assert_close(got, want)


def test_the_optimal_token_baseline_by_hand():
    """One group. Returns to go: 3, 2 | 1, 1, 1 | 4; sums of norms: 1, 3 | 2, 2, 3 | 1."""
    token_rewards = torch.tensor([[1.0, 9.0, 2.0, 0.0], [0.0, 0.0, 1.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    norms = torch.tensor([[1.0, 7.0, 2.0, 7.0], [2.0, 0.0, 1.0, 7.0], [1.0, 7.0, 7.0, 7.0]])
    rewards = totals(token_rewards, mask)
    first, second = (3 * 1 + 1 * 2 + 4 * 1) / (1 + 2 + 1), (2 * 3 + 1 * 2) / (3 + 2)
    want = [[3 - first, 0, 2 - second, 0], [1 - first, 1 - second, 0, 0], [4 - first, 0, 0, 0]]
    got = optimal_token_baseline(rewards, torch.zeros(3, dtype=torch.long), token_rewards, mask, norms)
    torch.testing.assert_close(got, torch.tensor(want))  # the third token of the second row has no counterpart
    certain = optimal_token_baseline(
        rewards, torch.zeros(3, dtype=torch.long), token_rewards, mask, torch.zeros_like(norms)
    )
    assert certain.eq(0).all()


@reproducible
@given(batch=batches())
def test_the_optimal_token_baseline_has_the_least_variance(batch):
    """``sum W (G - B)^2`` of a position has its least value at B, where ``sum W (G - B)`` is 0."""
    rewards, group_id, token_rewards, mask = batch
    got, mask = with_norms(*batch), mask & ~rewards.isnan()[:, None]
    weighted = got * norms_of(mask).nan_to_num(0.0).cumsum(1)
    place = mask.cumsum(1)
    for group in group_id.unique():
        for t in range(1, mask.shape[1] + 1):
            there = mask & (place == t) & (group_id == group)[:, None]
            assert weighted[there].sum().item() == pytest.approx(0.0, abs=1e-5)


def test_reinforce_plus_plus_by_hand():
    token_rewards = torch.tensor([[0.0, 1.0, 9.0], [0.5, 2.0, 4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    returns = [0.5, 1.0, 0.5 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4.0]
    mean = sum(returns) / 5
    scale = (sum((g - mean) ** 2 for g in returns) / 4 + 0.25) ** 0.5
    want = [(g - mean) / scale for g in returns]
    got = reinforce_plus_plus(torch.zeros(2), torch.zeros(2).long(), token_rewards, mask, gamma=0.5, eps=0.25)
    torch.testing.assert_close(got, torch.tensor([[want[0], want[1], 0], want[2:]]))


def test_spans_credit_only_the_tokens_before_their_end():
    token_rewards = torch.tensor([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    got = centered_return_to_go(token_rewards.sum(1), torch.zeros(2).long(), token_rewards, mask)
    torch.testing.assert_close(got, torch.tensor([[1.0, 1, -1, -1], [-1, -1, -1, -1]]))


class TestProcessSupervised:
    def test_by_hand(self):
        token_rewards = torch.tensor([[0.0, 1.0, 0.0, 3.0], [0.0, 0.0, 5.0, 7.0]])
        mask = torch.tensor([[True] * 4, [True, True, True, False]])
        rewards, group_id = torch.tensor([4.0, 5.0]), torch.zeros(2, dtype=torch.long)
        # steps worth 1, 3 and 5: mean 3, deviation 2
        z1, z3, z5 = -2 / 2.5, 0.0, 2 / 2.5
        got = process_supervised(rewards, group_id, token_rewards, mask, eps=0.5)
        torch.testing.assert_close(got, torch.tensor([[z1 + z3, z1 + z3, z3, z3], [z5, z5, z5, 0.0]]))

    def test_steps_worth_nothing_count_where_their_ends_are_known(self):
        token_rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
        ends = torch.tensor([[True, True, False], [True, True, False]])
        mask, group_id = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
        rewards = token_rewards.sum(1)
        got = process_supervised(rewards, group_id, token_rewards, mask, ends, eps=0.0)
        # steps worth 1, 0, 1, 1: mean 3/4, deviation 1/2
        torch.testing.assert_close(got, torch.tensor([[-1.0, -1.5, 0.0], [1.0, 0.5, 0.0]]))
        assert process_supervised(rewards, group_id, token_rewards, mask).eq(0).all()

    def test_groups_do_not_mix(self):
        token_rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0], [100.0, 200.0]])
        mask, group_id = torch.ones(3, 2, dtype=torch.bool), torch.tensor([7, 7, 3])
        got = process_supervised(token_rewards.sum(1), group_id, token_rewards, mask)
        alone = process_supervised(token_rewards[:2].sum(1), group_id[:2], token_rewards[:2], mask[:2])
        torch.testing.assert_close(got[:2], alone)


# ------------------------------------------------------------------ turns: a policy that may stop, enumerated


def stopping_episodes(logits: Tensor, rewards: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """Every episode of a policy that goes on or stops at each of its turns.

    Each: log-probs of its turns `(t,)`, with gradient; what each turn earned `(t,)`; its probability. A turn that goes
    on earns `rewards[turn, 0]`, one that stops `rewards[turn, 1]`.
    """
    go, stop = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
    found = []
    for turns in range(1, len(logits) + 1):
        for stops in (True, False):
            if not stops and turns < len(logits):
                continue
            last = stop[turns - 1] if stops else go[turns - 1]
            logprobs = torch.cat([go[: turns - 1], last[None]])
            earned = torch.cat([rewards[: turns - 1, 0], rewards[turns - 1, 1 if stops else 0][None]])
            found.append((logprobs, earned, float(logprobs.sum().exp())))
    return found


def expected_gradient(estimator: Callable[..., Tensor], logits: Tensor, rewards: Tensor) -> Tensor:
    """The mean over all pairs of episodes of ``sum_t A_t grad log pi(a_t)``, of one row of two."""
    episodes, most = stopping_episodes(logits, rewards), len(logits)
    total = torch.zeros_like(logits)
    for first, second in product(episodes, episodes):
        mask, earned = torch.zeros(2, most, dtype=torch.bool), torch.zeros(2, most, dtype=torch.float64)
        for row, (logprobs, got, _) in enumerate((first, second)):
            mask[row, : len(logprobs)], earned[row, : len(logprobs)] = True, got
        group = torch.zeros(2, dtype=torch.long)
        advantages = estimator(earned.sum(1), group, token_rewards=earned, mask=mask)
        objective = sum((advantages[row][mask[row]] * each[0]).sum() for row, each in enumerate((first, second))) / 2
        (gradient,) = torch.autograd.grad(objective, logits, retain_graph=True)
        total += first[2] * second[2] * gradient
    return total


@reproducible
@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_credit_of_turns_points_where_the_expected_reward_rises(logits: list[float], earned: list[float]) -> None:
    """Half of the gradient, since a group of two compares a row with itself too: 1 - 1 / group size."""
    at, rewards = (
        torch.tensor(logits, dtype=torch.float64, requires_grad=True),
        torch.tensor(earned).double().view(3, 2),
    )
    expected = sum(logprobs.sum().exp() * got.sum() for logprobs, got, _ in stopping_episodes(at, rewards))
    (gradient,) = torch.autograd.grad(expected, at)  # type: ignore[arg-type]
    found = expected_gradient(centered_return_to_go, at, rewards)
    torch.testing.assert_close(found, gradient / 2, rtol=1e-9, atol=1e-9)


def test_normalised_step_rewards_do_not_teach_to_go_on() -> None:
    """Where each turn earns the same, the mean over steps is that reward, however many there were: a trap of
    `process_supervised` with turns, which return-to-go does not have."""
    at = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    rewards = torch.ones(3, 2, dtype=torch.float64)
    assert expected_gradient(process_supervised, at, rewards).abs().max() == 0
    assert (expected_gradient(centered_return_to_go, at, rewards)[:2] > 0.05).all()


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_with_the_kl_to_a_teacher_as_the_reward_the_policy_gradient_is_that_of_the_reverse_kl(gamma):
    """Over every response of two tokens: at each position for gamma 0, of the whole response for gamma 1; and what GKD
    computes from the logits at beta 1."""
    torch.manual_seed(0)
    vocabulary = 5
    student = [torch.randn(1, vocabulary), torch.randn(vocabulary, vocabulary)]  # of the second token: by the first
    teacher = [torch.randn(1, vocabulary), torch.randn(vocabulary, vocabulary)]
    student = [logits.double().requires_grad_() for logits in student]
    ids = torch.tensor(list(product(range(vocabulary), repeat=2)))

    def logprobs(model):
        first, second = (logits.double().log_softmax(-1) for logits in model)
        return torch.stack([first[0, ids[:, 0]], second[ids[:, 0], ids[:, 1]]], 1)

    mask = torch.ones(len(ids), 2, dtype=torch.bool)
    own = logprobs(student)
    earned = (logprobs(teacher) - own).detach()
    advantages = discounted_return(torch.zeros(len(ids)), torch.arange(len(ids)), earned, mask, gamma=gamma)
    chance = own.detach().sum(1, keepdim=True).exp()
    gradients = torch.autograd.grad(-(chance * advantages * own).sum(), student)
    kls = [
        generalized_jsd(mine[None], theirs[None].double(), beta=1.0, temperature=1.0)[0]
        for mine, theirs in zip(student, teacher)
    ]
    reached = student[0].softmax(-1)[0]
    reached = reached if gamma else reached.detach()  # what a first token leads to counts, or does not
    expected = torch.autograd.grad(kls[0].sum() + (reached * kls[1]).sum(), student)
    for found, wanted in zip(gradients, expected):
        assert torch.allclose(found, wanted, atol=1e-6)
