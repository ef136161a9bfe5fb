"""What a shipped function declares of itself is true of its values, whatever the tensors."""

from __future__ import annotations

import inspect
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.algorithms.chosen_functions import arguments_for, name_of
from lit_rl.cli import schemas
from lit_rl.cli.lightning_app import WithKeywords
from lit_rl.ops.advantages import centered
from lit_rl.ops.policy_losses import clip_cov_loss, clipped_policy_loss, prime_rl_loss
from lit_rl.ops.preference_losses import Pairs
from lit_rl.ops.reductions import StepTotals
from lit_rl.ops.traits import (
    AdvantageTraits,
    CorrectionTraits,
    PolicyLossTraits,
    PreferenceTraits,
    ReductionTraits,
    StatisticTraits,
    traits_of,
)

CONF = Path(__file__).parents[2] / "conf" / "algo"
KINDS = {
    "advantage": AdvantageTraits,
    "loss": PolicyLossTraits,
    "reduction": ReductionTraits,
    "correction": CorrectionTraits,
    "rejection/statistic": StatisticTraits,
    "preference": PreferenceTraits,
}
REQUIRED = {"constant_mean": {"length": 6}, "unmasked_constant_mean": {"length": 6}}

reproducible = settings(derandomize=True, deadline=None, max_examples=8)
seeds = st.integers(0, 10_000)


def shipped(group: str) -> dict[str, Any]:
    """Return the functions that the files of a config group name, with the settings that they need."""
    paths = schemas.public_functions()
    texts = (path.read_text() for path in (CONF / group).glob("*.yaml"))
    names = sorted({name for text in texts for name in re.findall(r"/schemas/(\w+)@", text)} & paths.keys())
    return {name: partial(get_object(paths[name]), **REQUIRED.get(name, {})) for name in names}


def each_of(group: str) -> Any:
    return pytest.mark.parametrize("function", shipped(group).values(), ids=shipped(group))


def noise_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- the declaration


def test_every_shipped_function_declares_its_traits():
    for group, kind in KINDS.items():
        assert all(traits_of(function, kind) is not None for function in shipped(group).values()), group
    assert {group: len(shipped(group)) for group in KINDS} == {
        "advantage": 25, "loss": 20, "reduction": 8, "correction": 5, "rejection/statistic": 4, "preference": 17,
    }  # fmt: skip


def test_a_declared_function_is_the_function_itself():
    def mine(rewards, group_id, *, scale: float = 1.0):
        return rewards * scale

    declared = AdvantageTraits(compares_group=False)(mine)
    assert declared is mine and [*inspect.signature(declared).parameters] == ["rewards", "group_id", "scale"]
    assert pickle.loads(pickle.dumps(centered)) is centered


def test_traits_are_found_through_settings_and_on_objects():
    traits = AdvantageTraits(compares_group=False, of_tokens=True)

    @traits
    class Baseline:
        def __call__(self, rewards, group_id):
            return rewards

    function = traits(lambda rewards, group_id, *, scale=1.0: rewards * scale)
    for each in (function, partial(function, scale=2), WithKeywords(function, {"scale": 2}), Baseline()):
        assert traits_of(each, AdvantageTraits) is traits
    assert traits_of(partial(partial(function, 1), 2), AdvantageTraits) is traits
    assert traits_of(function, ReductionTraits) is None and traits_of(len, AdvantageTraits) is None


# ---------------------------------------------------------------------- advantages


REWARDS = (0.0, 1.0, 3.0, 2.0, 0.0, 1.0)
CHANGE = (0.5, 0.1, 0.9, 0.2, 0.7, 0.3)
"""Rewards of two groups, and a change of them that no normalisation by mean and deviation cancels."""

six_numbers = st.lists(st.integers(-8, 8).map(lambda quarters: quarters / 4), min_size=6, max_size=6)


def advantages(estimator: Any, rewards: Any, *, change: Any = (0.0,) * 6, kl: Any = (0.0,) * 6, alone: bool = False):
    """Call an estimator on rows of two tokens in two groups, or in groups of one, with the reward at the second.

    Args:
        estimator: Of rows, or with a critic whose values are 0.
        rewards: Of each row, as the reward functions returned them.
        change: Added to it by shaping, normalisation or a clip.
        kl: Subtracted at the first token.
        alone: Every row is the only one of its prompt.
    """
    returned, rows = torch.tensor(rewards), len(rewards)
    earned, first = returned + torch.tensor(change), -torch.tensor(kl)
    at_tokens, mask = torch.stack([first, earned], dim=1), torch.ones(rows, 2, dtype=torch.bool)
    turn = torch.zeros(rows, 2, dtype=torch.long)
    if next(iter(inspect.signature(estimator).parameters)) == "token_rewards":
        return estimator(at_tokens, torch.zeros(rows, 2), mask, **arguments_for(estimator, {"turn": turn}))[0]
    columns = {
        "values": returned[:, None],
        "weights": torch.ones(rows, 1),
        "lengths": torch.full((rows,), 2),
        "greedy_rewards": torch.zeros(rows),
        "gradient_norms": torch.linspace(0.2, 1.4, 2 * rows).view(rows, 2),
        "token_rewards": at_tokens,
        "mask": mask,
        "step_ends": torch.tensor([False, True]).expand(rows, 2),
        "turn": turn,
        "state": turn,
    }
    group_id = torch.arange(rows) if alone else torch.arange(rows) * 2 // rows
    return estimator(earned + first, group_id, **arguments_for(estimator, columns))


@each_of("advantage")
@reproducible
@given(rewards=six_numbers.filter(lambda rewards: len(set(rewards)) > 1))
def test_an_advantage_of_a_single_completion_is_zero_exactly_where_completions_are_compared(function, rewards):
    declared = traits_of(function, AdvantageTraits)
    found = advantages(function, rewards, alone=True)
    nothing = declared.compares_group or name_of(function) == "no_advantage"
    assert bool(found.any()) != nothing
    assert found.ndim == 1 + declared.of_tokens


@each_of("advantage")
@reproducible
@given(rewards=six_numbers, change=six_numbers)
def test_an_advantage_changes_with_processed_rewards_exactly_where_it_reads_them(function, rewards, change):
    if not traits_of(function, AdvantageTraits).reads_rewards:
        assert torch.equal(advantages(function, rewards), advantages(function, rewards, change=change))
    else:
        assert not torch.equal(advantages(function, REWARDS), advantages(function, REWARDS, change=CHANGE))


@each_of("advantage")
@reproducible
@given(rewards=six_numbers, kl=six_numbers)
def test_an_advantage_changes_with_a_kl_exactly_where_it_reads_it(function, rewards, kl):
    if not traits_of(function, AdvantageTraits).reads_kl:
        assert torch.equal(advantages(function, rewards), advantages(function, rewards, kl=kl))
    else:
        assert not torch.equal(advantages(function, REWARDS), advantages(function, REWARDS, kl=CHANGE))


# ---------------------------------------------------------------------- losses and reductions


def learns_from_rows_without_advantage(loss: Any, seed: int) -> bool:
    """Tell whether the last two of four rows, whose advantages are 0, add anything to the sum of losses."""
    noise = noise_of(seed)
    logprobs = (-3 * torch.rand(4, 5, generator=noise) - 0.1).requires_grad_()
    old = logprobs.detach() + 0.5 * torch.randn(4, 5, generator=noise)
    values = 3 * torch.randn((4, 5)[: 1 + seed % 2], generator=noise)  # of rows or of tokens
    values[2:] = 0
    mask = torch.rand(4, 5, generator=noise) < 0.8
    found = []
    for rows in (slice(0, 4), slice(0, 2)):
        torch.manual_seed(seed)
        total = loss(logprobs[rows], old[rows], values[rows], mask[rows])[0].sum()
        found += [total, *torch.autograd.grad(total, logprobs)]
    return not (torch.allclose(found[0], found[2], atol=1e-6) and torch.allclose(found[1], found[3], atol=1e-6))


@each_of("loss")
@reproducible
@given(seed=seeds)
def test_a_loss_learns_nothing_without_advantage_where_it_says_so(function, seed):
    declared = traits_of(function, PolicyLossTraits)
    if declared.but_for is not None:
        function = partial(function, **{declared.but_for: 0.0})
    if declared.zero_without_advantage:
        assert not learns_from_rows_without_advantage(function, seed)


@pytest.mark.parametrize("function", [f for f in shipped("loss").values() if f.func is not clip_cov_loss])
def test_other_losses_learn_from_some_rows_without_advantage(function):
    declared = traits_of(function, PolicyLossTraits)
    always_zero = declared.zero_without_advantage and declared.but_for is None
    assert any(learns_from_rows_without_advantage(function, seed) for seed in range(12)) != always_zero


def test_clip_cov_couples_rows():
    """With a share of 1 every token within the band is dropped, so nothing is left to chance."""
    assert not traits_of(clip_cov_loss, PolicyLossTraits).zero_without_advantage
    loss = partial(clip_cov_loss, share=1.0, band=(0.1, 2.0))
    assert any(learns_from_rows_without_advantage(loss, seed) for seed in range(40))


def sees_rows_of_zeros(reduction: Any, seed: int) -> bool:
    noise = noise_of(seed)
    tokens, mask = torch.randn(4, 5, generator=noise), torch.rand(4, 5, generator=noise) < 0.8
    tokens[2:], totals = 0, StepTotals.of(mask)
    return not torch.allclose(reduction(tokens, mask, totals), reduction(tokens[:2], mask[:2], totals))


@each_of("reduction")
@reproducible
@given(seed=seeds)
def test_a_reduction_adds_rows_where_it_says_so(function, seed):
    if traits_of(function, ReductionTraits).adds_rows:
        assert not sees_rows_of_zeros(function, seed)
    else:
        assert any(sees_rows_of_zeros(function, each) for each in range(9))


# ---------------------------------------------------------------------- engine corrections


@each_of("correction")
@reproducible
@given(seed=seeds)
def test_weights_are_of_rows_or_of_tokens_as_declared(function, seed):
    noise = noise_of(seed)
    old, sampler = (-torch.rand(3, 4, generator=noise) for _ in range(2))
    mask = torch.rand(3, 4, generator=noise) < 0.8
    changed, first = old.clone(), slice(0, 1)
    changed[:, 1:] -= torch.rand(3, 3, generator=noise)
    weights = function(old, sampler, mask)
    if traits_of(function, CorrectionTraits).of_rows:
        assert all(len(row[inside].unique()) <= 1 for row, inside in zip(weights, mask))
    else:
        assert torch.equal(weights[:, first], function(changed, sampler, mask)[:, first])


@each_of("rejection/statistic")
@reproducible
@given(d=st.floats(-5, 5))
def test_a_distance_has_either_sign_exactly_where_it_says_so(function, d):
    both = function(torch.tensor([d, -d, 0.0]))
    assert both[2] == 0
    if traits_of(function, StatisticTraits).signed:
        assert both.min() < 0 or abs(d) < 1e-30
    else:
        assert both.min() >= -1e-6


# ---------------------------------------------------------------------- losses of pairs


@each_of("preference")
@reproducible
@given(seed=seeds, lengths=st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_a_loss_of_pairs_reads_lengths_exactly_where_it_says_so(function, seed, lengths):
    noise = noise_of(seed)
    chosen, rejected, *reference = (-9 * torch.rand(4, generator=noise) for _ in range(4))
    fixed: Any = {"nll": -chosen, "nll_tokens": 1.0, "step_rows": 1.0}

    def losses(lengths: Any) -> torch.Tensor:
        return function(Pairs(chosen, rejected, *reference, *torch.tensor(lengths).float().chunk(2), **fixed), 0.1)

    if traits_of(function, PreferenceTraits).per_token:
        assert not torch.equal(losses([1] * 8), losses([2] * 8))
    else:
        assert torch.equal(losses([1] * 8), losses(lengths))


def test_a_setting_of_a_term_beside_the_advantage_counts():
    assert traits_of(prime_rl_loss, PolicyLossTraits).but_for == "kl_tau"
    assert learns_from_rows_without_advantage(prime_rl_loss, 1)
    assert not learns_from_rows_without_advantage(clipped_policy_loss, 1)
