"""RLOO against TRL 1.16: loss, advantages with every option of theirs, and metrics."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from oracle_cases import BASE, GROUP, ROWS, Case, Outcome, assert_same_step
from oracle_ours import our_rloo, our_rollout, ours
from oracle_trl import Oracle, completions_of, theirs

from lit_rl.ops.advantages import leave_one_out, whiten_rows

WIDE = {"epsilon": 0.5}
"""Ratios of whole sequences go far: with the default range most rows of a small batch would be clipped."""

OPTIONS: dict[str, dict[str, Any]] = {
    "clip_high": {"epsilon_high": 0.9},
    "kl": {"beta": 0.3},
    "normalize": {"normalize_advantages": True},
    "reward_clip": {"reward_clip_range": (0.1, 1.5)},
    "router": {"router_aux_loss_coef": 0.5},
}
REWARDS: dict[str, dict[str, Any]] = {
    "one function": {},
    "two functions": {"second": (1.0, None, 2.0, 0.5, None, 1.5, 0.0, 0.0)},
    "equal in one group": {"first": (0.5,) * GROUP + (0.0, 1.0, 0.0, 1.0)},
    "unscorable rows": {"first": (None, 1.0, 0.35, None, 2.0, 0.0, 1.0, None)},
    "no scorable row": {"first": (None,) * GROUP + (2.0, 0.0, 1.0, 0.5)},
}


def both(oracle: Oracle, settings: dict[str, Any], case: Case) -> tuple[Outcome, Outcome]:
    completions = completions_of(oracle, case)
    return ours(oracle, our_rloo(settings), case, completions), theirs(oracle, settings, case, completions)


NAMES = [(), *((name,) for name in OPTIONS), *combinations(OPTIONS, 2)]


@pytest.mark.parametrize(
    ("names", "micro_batches"), [((), 1), *((names, 1 + at % 2) for at, names in enumerate(NAMES, start=1))]
)
def test_loss_and_gradient(rloo: Oracle, names: tuple[str, ...], micro_batches: int) -> None:
    settings = WIDE | {key: setting for name in names for key, setting in OPTIONS[name].items()}
    mine, other = both(rloo, settings, Case(micro_batches=micro_batches))
    assert_same_step(mine, other)
    if len(names) == 1:
        plain = theirs(rloo, WIDE, Case(micro_batches=micro_batches), completions_of(rloo, Case()))
        moved = (plain.gradient - other.gradient).norm() / other.gradient.norm()
        assert max(moved.item(), abs(plain.loss - other.loss)) > 1e-3, "the option does nothing here"


@pytest.mark.filterwarnings("ignore:All reward functions returned None")
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS.keys())
@pytest.mark.parametrize("names", [(), ("kl",), ("normalize",), ("reward_clip",), ("kl", "normalize", "reward_clip")])
def test_advantages(rloo: Oracle, rewards: dict[str, Any], names: tuple[str, ...]) -> None:
    settings = WIDE | {key: setting for name in names for key, setting in OPTIONS[name].items()}
    assert_same_step(*both(rloo, settings, Case(**rewards)))


@pytest.mark.parametrize("name", ["clip_high", "kl"])
def test_one_step_a_rollout(rloo: Oracle, name: str) -> None:
    """The policy is the one that took the rollout, so we score it once; TRL scores it twice and finds the same.

    The loss is then minus the mean of the advantages, which cancel: numbers of size 1, not of size 0.1.
    """
    settings = WIDE | OPTIONS[name] | {"num_iterations": 1}
    assert our_rloo(settings).ratio_is_one
    assert_same_step(*both(rloo, settings, Case(now="rollout")), size=1.0)


LONE = Case(first=(None, 1.0, None, None, 2.0, 0.0, 1.0, 0.5))
"""The second row is the only one of its group with a reward: nothing to compare it with."""


@pytest.mark.parametrize("names", [(), ("kl",), ("reward_clip",)])
def test_a_row_without_scored_siblings(rloo: Oracle, names: tuple[str, ...]) -> None:
    settings = WIDE | {key: setting for name in names for key, setting in OPTIONS[name].items()}
    mine, other = both(rloo, settings, LONE)
    assert_same_step(mine, other)
    assert mine.advantages[1] == 0


def test_a_row_without_scored_siblings_counts_in_our_whitening(rloo: Oracle) -> None:
    """Its advantage is 0 on both sides; TRL leaves it out of the mean and the deviation, we leave out unscored rows."""
    mine, other = both(rloo, WIDE | OPTIONS["normalize"], LONE)
    group_id = torch.arange(2).repeat_interleave(GROUP)
    rewards = torch.tensor([torch.nan if reward is None else reward for reward in LONE.first])
    plain, scored = leave_one_out(rewards, group_id), ~rewards.isnan()
    compared = scored & (group_id == 1)
    torch.testing.assert_close(mine.advantages, whiten_rows(plain, scored), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(other.advantages, whiten_rows(plain, compared), atol=1e-6, rtol=1e-5)


def test_a_row_without_loss_tokens(rloo: Oracle) -> None:
    """TRL adds the constant -A / rows to the value for such a row, we add nothing; the gradient is the same."""
    case, settings = Case(), WIDE | {"mask_truncated_completions": True}
    mine, other = both(rloo, settings, case)
    constant = -sum(mine.advantages[row].item() for row in case.cut) / ROWS
    assert abs(constant) > 0.01
    assert_same_step(Outcome(mine.loss + constant, mine.gradient, mine.advantages), other)


def test_the_kl_of_a_truncated_completion_counts_in_its_reward(rloo: Oracle) -> None:
    """TRL takes none off there, so that the others' baselines are higher. It is masked in the loss on both sides."""
    case, settings = Case(), WIDE | {"mask_truncated_completions": True, "beta": 0.3}
    completions = completions_of(rloo, case)
    other = theirs(rloo, settings, case, completions)
    module = our_rloo(settings)
    rollout, _ = our_rollout(rloo, module, case, completions)
    untaxed = rollout.rewards.clone()
    untaxed[list(case.cut)] = torch.tensor([case.first[row] or 0.0 for row in case.cut])
    expected = leave_one_out(untaxed, completions.group_id)
    torch.testing.assert_close(expected, other.advantages, atol=1e-5, rtol=1e-5)
    assert (rollout.advantages - other.advantages).abs().max() > 1e-3


def test_metrics(rloo: Oracle) -> None:
    """TRL counts clipped rows and we their tokens: the same for rows of one length."""
    settings = BASE | WIDE | OPTIONS["kl"] | OPTIONS["router"]
    mine, other = both(rloo, settings, Case(lengths=(5,) * ROWS))
    names = [name for name in other.metrics if name.startswith("clip_ratio/")]
    assert len(names) == 5
    for name in (*names, "kl", "entropy", "aux_loss"):
        assert mine.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-6), name
    assert any(other.metrics["clip_ratio/low_mean"]) and any(other.metrics["clip_ratio/high_mean"])
