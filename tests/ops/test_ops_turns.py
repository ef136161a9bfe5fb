"""Credit of whole turns: cases by hand, what it is where turns are rows or tokens, and a policy that may stop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops_returns import expected_gradient, stopping_episodes

from lit_rl.ops.advantages import centered, group_normalized
from lit_rl.ops.returns import centered_turns, gae, gae_of_turns, gigpo

reproducible = settings(derandomize=True, deadline=None, max_examples=15)
NAN = math.nan

# Two tokens of turn 0, an answer, two of turn 1, an answer, one of turn 2; the second row ends with turn 1.
MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 0, 0]]).bool()
TURN = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 1, 1, 1, 0]])
EARNED = torch.tensor([[0.0, 1.0, NAN, 0.0, 2.0, NAN, 4.0], [0.5, 0.5, NAN, 3.0, 0.0, NAN, NAN]])
GROUP = torch.zeros(2, dtype=torch.long)
TOTALS = torch.tensor([7.0, 4.0])


def test_a_turn_is_compared_with_the_turns_of_its_number() -> None:
    """Returns: 7, 6, 4 and 4, 3. Turn 2 is alone."""
    found = centered_turns(TOTALS, GROUP, EARNED, MASK, TURN)
    assert found.tolist() == [[1.5, 1.5, 0, 1.5, 1.5, 0, 0], [-1.5, -1.5, 0, -1.5, -1.5, 0, 0]]
    halved = centered_turns(TOTALS, GROUP, EARNED, MASK, TURN, gamma=0.5)  # 1 + 2/2 + 4/4, 2 + 4/2; 1 + 3/2, 3
    assert halved.tolist() == [[0.25, 0.25, 0, 0.5, 0.5, 0, 0], [-0.25, -0.25, 0, -0.5, -0.5, 0, 0]]


def test_gigpo_compares_turns_that_began_in_one_state_at_any_time() -> None:
    """The first row's turn 2 and the second row's turn 1 began in state 7, with returns of 4 and 3."""
    state = torch.tensor([[0, 0, 0, 5, 5, 0, 7], [0, 0, 0, 7, 7, 0, 0]])
    z = math.sqrt(0.5)  # of two values, by n - 1
    found = gigpo(TOTALS, GROUP, EARNED, MASK, TURN, state, gamma=1.0)
    expected = [[2 * z, 2 * z, 0, z, z, 0, 2 * z], [-2 * z, -2 * z, 0, -2 * z, -2 * z, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)
    weighed = gigpo(TOTALS, GROUP, EARNED, MASK, TURN, state, gamma=1.0, step_weight=0.5)
    torch.testing.assert_close(weighed[0], torch.tensor([1.5 * z, 1.5 * z, 0, z, z, 0, 1.5 * z]), atol=1e-5, rtol=0)


def test_gae_of_turns_by_hand() -> None:
    """Values of turns: 1, 2, 3 and 4, 5; what stands at their other tokens, and at answers, is not read."""
    values = torch.tensor([[1.0, 90, NAN, 2, 90, NAN, 3], [4.0, 90, NAN, 5, 90, NAN, NAN]])
    advantages, returns = gae_of_turns(EARNED, values, MASK, TURN, gamma=0.5, lam=0.5)
    third = 4.0 - 3
    second = 2 + 0.5 * 3 - 2 + 0.25 * third
    first = 1 + 0.5 * 2 - 1 + 0.25 * second
    assert advantages[0].tolist() == [first, first, 0, second, second, 0, third]
    assert returns[0].tolist() == [first + 1, first + 1, 0, second + 2, second + 2, 0, 4]
    last = 3.0 - 5
    first = 1 + 0.5 * 5 - 4 + 0.25 * last
    assert advantages[1].tolist() == [first, first, 0, last, last, 0, 0]


@st.composite
def episodes(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """Turns of 1 to 3 tokens with an answer of one token between them; rewards at any token; two groups."""
    rows = []
    for _ in range(draw(st.integers(2, 5))):
        row: list[tuple[int, bool, float]] = []
        for turn in range(draw(st.integers(1, 3))):
            tokens = draw(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=1, max_size=3))
            row += [(turn, True, earned) for earned in tokens] + [(turn, False, NAN)]
        rows.append(row[:-1])
    width = max(map(len, rows))
    padded = [row + [(0, False, NAN)] * (width - len(row)) for row in rows]
    turn, mask, earned = (torch.tensor([[each[i] for each in row] for row in padded]) for i in range(3))
    return torch.arange(len(rows)) % 2, turn, mask, earned


@reproducible
@given(episodes())
def test_where_in_a_turn_something_was_earned_is_nothing(case: tuple[torch.Tensor, ...]) -> None:
    """Moved to the first token of its turn, a reward is worth the same; so is a row in another place."""
    group, turn, mask, earned = case
    moved = torch.zeros_like(earned).masked_fill(~mask, NAN)
    for row in range(len(turn)):
        for number in turn[row][mask[row]].unique():
            at = mask[row] & (turn[row] == number)
            moved[row, int(at.nonzero()[0])] = earned[row, at].sum()
    totals, order = earned.nansum(1), torch.arange(len(turn)).flip(0)
    values = torch.randn(earned.shape, generator=torch.Generator().manual_seed(0))
    for of_turns in (
        lambda r: centered_turns(totals, group, r, mask, turn, gamma=0.9),
        lambda r: gigpo(totals, group, r, mask, turn, turn * 3),
        lambda r: gae_of_turns(r, values, mask, turn)[1],
    ):
        torch.testing.assert_close(of_turns(moved), of_turns(earned))
        assert (of_turns(earned)[~mask] == 0).all()
    turned = centered_turns(totals[order], group[order], earned[order], mask[order], turn[order])
    torch.testing.assert_close(turned[order], centered_turns(totals, group, earned, mask, turn))


@reproducible
@given(episodes())
def test_rows_of_one_turn_and_turns_of_one_token_are_what_they_were(case: tuple[torch.Tensor, ...]) -> None:
    group, _, mask, earned = case
    alone, totals = torch.zeros(mask.shape, dtype=torch.long), earned.nansum(1)
    rows = centered(totals, group)[:, None].expand(mask.shape).masked_fill(~mask, 0.0)
    torch.testing.assert_close(centered_turns(totals, group, earned, mask, alone, gamma=0.5), rows)
    normalized = group_normalized(totals, group, eps=1e-6)[:, None].expand(mask.shape).masked_fill(~mask, 0.0)
    torch.testing.assert_close(gigpo(totals, group, earned, mask, alone, alone, step_weight=0.5), 1.5 * normalized)
    values = torch.randn(earned.shape, generator=torch.Generator().manual_seed(1))
    of_tokens = (mask.cumsum(1) - 1).clamp(min=0)
    for ours, plain in zip(
        gae_of_turns(earned, values, mask, of_tokens, gamma=0.9, lam=0.7),
        gae(earned.nan_to_num(), values, mask, gamma=0.9, lam=0.7),
    ):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("at", [2, 4])
def test_rows_without_a_reward_take_no_part(at: int) -> None:
    rewards = torch.cat([TOTALS, torch.tensor([NAN])])
    group, mask, turn = torch.zeros(3, dtype=torch.long), MASK[[0, 1, 0]], TURN[[0, 1, 0]]
    earned = torch.cat([EARNED, torch.full((1, 7), float(at))])
    alone = centered_turns(TOTALS, GROUP, EARNED, MASK, TURN)
    beside = centered_turns(rewards, group, earned, mask, turn)
    assert torch.equal(beside[:2], alone)
    assert not beside[2].any()


@reproducible
@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_the_baseline_of_turns_points_where_the_expected_reward_rises(logits: list[float], earned: list[float]) -> None:
    """Every pair of episodes of a policy that may stop, enumerated. The gradient at a turn is the true one, times the
    chance that the other row of the two comes to that turn, times 1 - 1/2 for the comparison with itself."""
    at = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor(earned).double().view(3, 2)
    expected = sum(logprobs.sum().exp() * got.sum() for logprobs, got, _ in stopping_episodes(at, rewards))
    (gradient,) = torch.autograd.grad(expected, at)  # type: ignore[arg-type]
    numbers = torch.arange(3).expand(2, 3)
    found = expected_gradient(
        lambda rewards, group, token_rewards, mask: centered_turns(rewards, group, token_rewards, mask, numbers),
        at,
        rewards,
    )
    goes_on = at.detach().sigmoid()
    reached = torch.stack([torch.ones_like(goes_on[0]), goes_on[0], goes_on[0] * goes_on[1]])
    torch.testing.assert_close(found, gradient * reached / 2, rtol=1e-9, atol=1e-9)
