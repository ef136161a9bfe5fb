"""What a module refuses when it is made: settings out of range, and terms that do not go together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.algorithms import GRPO, PPO, Reinforce
from lit_rl.algorithms.checks import policy_gradient_checks as estimator_checks
from lit_rl.algorithms.checks.policy_gradient_checks import check_ranges
from lit_rl.algorithms.terms.credit import RunningNorm
from lit_rl.algorithms.terms.groups import BestOfGroup, DynamicSampling
from lit_rl.algorithms.terms.teachers import ModelTeacher
from lit_rl.cli.lightning_app import WithKeywords
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.native import NativeGenerator
from lit_rl.ops import advantages, engine_mismatch, policy_losses, returns
from lit_rl.ops import advantages as shaping
from lit_rl.ops.traits import AdvantageTraits, CorrectionTraits, traits_of
from lit_rl.rewards import GroupJudge

partial = functools.partial

SOUND: list[tuple[Any, dict[str, list[Any]]]] = [
    (policy_losses.clipped_policy_loss, {"clip_low": [1e-6, 1.0], "clip_high": [1e-6, 5.0], "delta": [1.3]}),
    (policy_losses.up_grpo_loss, {"clip_low": [1.0], "delta": [1.01]}),
    (policy_losses.gmpo_loss, {"clip_low": [0.1, 3.0], "clip_high": [3.0]}),
    (policy_losses.cpgd_loss, {"clip_low": [1.0], "clip_high": [0.5]}),
    (policy_losses.cispo_loss, {"cap": [0.5, 8.0, math.inf]}),
    (policy_losses.cispo_two_sided_loss, {"clip_low": [1.0], "clip_high": [4.0]}),
    (policy_losses.dppo_tv_loss, {"threshold_low": [1.0], "threshold_high": [0.01], "cap": [1.01]}),
    (policy_losses.dppo_kl_loss, {"threshold_low": [2.5], "threshold_high": [3.5], "cap": [1.01]}),
    (policy_losses.prime_rl_loss, {"threshold_low": [1.0], "kl_tau": [0.0]}),
    (policy_losses.prime_rl_ipo_loss, {"threshold": [1.0, 0.001], "kl_tau": [0.0, 5.0]}),
    (policy_losses.sapo_loss, {"temperature_positive": [0.1], "temperature_negative": [9.0]}),
    (policy_losses.vespo_loss, {"positive": [(0.0, 0.1)], "negative": [[5.0, 5.0]]}),
    (policy_losses.clip_cov_loss, {"share": [1.0], "clip_range": [(1.0, 0.1)], "band": [(-1.0, 1.0), (0.0, math.inf)]}),
    (policy_losses.kl_cov_loss, {"share": [1e-9], "kl_coef": [0.0]}),
    (policy_losses.dro_loss, {"beta": [1e-6, 30.0]}),
    (policy_losses.real_loss, {"temperature": [1e-3, 30.0]}),
    (policy_losses.fipo_loss, {"half_life": [0.5], "weight_range": [(1e-3, 1.0), [1.0, 9.0]]}),
    (policy_losses.m2po_loss, {"threshold": [1e-6, math.inf]}),
]
WRONG: list[tuple[Any, dict[str, list[Any]]]] = [
    (
        policy_losses.clipped_policy_loss,
        {"clip_low": [0.0, -1, 1.1, math.nan], "clip_high": [0.0, math.nan], "delta": [1.2]},
    ),
    (policy_losses.up_grpo_loss, {"clip_low": [1.1], "delta": [1.0]}),
    (policy_losses.gmpo_loss, {"clip_low": [0.0, -1.0, math.nan], "clip_high": [0.0]}),
    (policy_losses.cpgd_loss, {"clip_low": [1.5], "clip_high": [-2.0]}),
    (policy_losses.cispo_loss, {"cap": [0.0, -1.0, math.nan]}),
    (policy_losses.cispo_two_sided_loss, {"clip_low": [2.0], "clip_high": [-0.1]}),
    (policy_losses.dppo_tv_loss, {"threshold_low": [0.0, 1.5], "threshold_high": [0.0, 1.5], "cap": [1.0]}),
    (policy_losses.dppo_kl_loss, {"threshold_low": [0.0], "threshold_high": [-1.0], "cap": [0.5]}),
    (policy_losses.prime_rl_loss, {"threshold_low": [2.0], "kl_tau": [-1e-3]}),
    (policy_losses.prime_rl_ipo_loss, {"threshold": [0.0, 1.01], "kl_tau": [math.nan]}),
    (policy_losses.sapo_loss, {"temperature_positive": [0.0], "temperature_negative": [-1.0]}),
    (
        policy_losses.vespo_loss,
        {"positive": [(-0.1, 1.0), (1.0, 0.0), (1.0,), (1.0, math.nan)], "negative": [(1.0, -1.0)]},
    ),
    (
        policy_losses.clip_cov_loss,
        {"share": [0.0, 1.1], "clip_range": [(0.0, 0.1), (0.1, 0.0), (1.1, 1.0)], "band": [(5, 1)]},
    ),
    (policy_losses.kl_cov_loss, {"share": [0.0, math.nan], "kl_coef": [-1.0]}),
    (policy_losses.dro_loss, {"beta": [0.0, -1.0]}),
    (policy_losses.real_loss, {"temperature": [0.0, -0.5]}),
    (
        policy_losses.fipo_loss,
        {
            "half_life": [0.0, -3.0],
            "weight_range": [(0.0, 1.2), (1.1, 1.2), (0.5, 0.9)],
            "clip_low": [0.0],
            "clip_high": [0.0],
        },
    ),
    (policy_losses.m2po_loss, {"threshold": [0.0, -0.04]}),
]


def test_settings_of_a_loss_pass_in_range_and_are_refused_by_their_key_out_of_it():
    for table, sound in ((SOUND, True), (WRONG, False)):
        for loss, name, value in ((loss, name, v) for loss, rows in table for name, vs in rows.items() for v in vs):
            with contextlib.nullcontext() if sound else pytest.raises(ConfigError, match=rf"algo\.loss\.{name}="):
                GRPO("tiny", len, loss=partial(loss, **{name: value}))


def test_every_number_that_a_loss_takes_has_a_range():
    """A loss that is added with a setting of another name is given a range too, in its signature."""
    for name in policy_losses.__all__:
        function = getattr(policy_losses, name)
        if not callable(function):
            continue
        for setting, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not parameter.KEYWORD_ONLY or callable(parameter.default):
                continue
            bad = (math.nan, math.nan) if isinstance(parameter.default, tuple) else math.nan
            with pytest.raises(ConfigError, match=rf"algo\.loss\.{setting}="):
                check_ranges(partial(function, **{setting: bad}), "algo.loss")


@given(low=st.floats(0.01, 1), high=st.one_of(st.none(), st.floats(0.01, 3)), delta=st.floats(0.5, 5))
def test_the_dual_clip_is_above_the_plain_one(low, high, delta):
    loss = partial(policy_losses.clipped_policy_loss, clip_low=low, clip_high=high, delta=delta)
    if delta > 1 + (low if high is None else high):
        check_ranges(loss, "algo.loss")
    else:
        with pytest.raises(ConfigError, match=r"algo\.loss\.delta"):
            check_ranges(loss, "algo.loss")


def test_the_docstrings_bounds_are_those_that_are_checked():
    said = 0
    for loss in (getattr(policy_losses, name) for name in policy_losses.__all__):
        settings = inspect.signature(loss).parameters if callable(loss) else {}
        for setting, bound in re.findall(r"^ +(\w+): [^.]*\b(at least|above) 0\b", inspect.getdoc(loss) or "", re.M):
            if setting in settings and isinstance(settings[setting].default, (float, type(None))):
                said += 1
                zero = partial(loss, **{setting: 0.0})
                with contextlib.nullcontext() if bound == "at least" else pytest.raises(ConfigError, match=setting):
                    check_ranges(zero, "algo.loss")
    assert said > 5


def test_settings_of_a_users_own_loss_are_the_users():
    def mine(logprobs, old_logprobs, advantages, mask, *, cap, clip_low):
        return policy_losses.cispo_loss(logprobs, old_logprobs, advantages, mask)

    GRPO("tiny", len, loss=partial(mine, cap=-1.0, clip_low=7.0))
    PPO("tiny", len, whitening=None)


class Blind(NativeGenerator):
    """An engine that cuts the distribution and cannot tell how much."""

    reports_kept_mass = False

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        raise NotImplementedError


TRUNCATED = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}]


@pytest.mark.parametrize("setting", TRUNCATED, ids=lambda s: next(iter(s)))
def test_truncated_sampling_needs_an_engine_that_says_what_it_cut(setting):
    name, value = next(iter(setting.items()))
    GRPO("tiny", len, sampling=Sampling(**setting))
    with pytest.raises(ConfigError, match=rf"sampling\.{name}={value}.*Blind.*generator=native"):
        GRPO("tiny", len, sampling=Sampling(**setting), generator=Blind())


CHANGES: dict[str, Any] = {
    "reward_beta": 0.1,
    "shaping": shaping.relative_length_penalty,
    "reward_norm": RunningNorm(),
    "reward_clip": (-1, 1),
}
DEAF: dict[str, set[str]] = {name: set(CHANGES) for name in ("normalize_then_sum", "constant")}
DEAF["process_supervised"] = {"reward_beta"}
DEAF["no_advantage"] = set(CHANGES)
DEAF |= {name: {"shaping"} for name in ("remax", "remax_return_to_go")}


def estimators() -> list[Any]:
    """All that ship and take the rewards of rows."""
    found = [
        function
        for function in [*vars(advantages).values(), *vars(returns).values()]
        if traits_of(function, AdvantageTraits) is not None
        if list(inspect.signature(function).parameters)[:2] == ["rewards", "group_id"]
    ]
    assert len(found) > 4
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_rewards_is_refused_exactly_where_the_advantage_does_not_see_it(change):
    for estimator in estimators():
        changed = {change: CHANGES[change]}
        if estimator is advantages.no_advantage:
            changed["teacher"] = ModelTeacher("tiny")  # else nothing would be learned at all
        if change in DEAF.get(estimator.__name__, set()):
            with pytest.raises(ConfigError, match=change):
                GRPO("tiny", len, advantage=estimator, **changed)
        else:
            GRPO("tiny", len, advantage=estimator, **changed)


def test_a_term_with_settings_from_the_other_door_names_the_same_columns():
    assert GRPO("tiny", len, advantage=WithKeywords(advantages.opo, {})).advantage
    assert GRPO("tiny", len, loss=WithKeywords(policy_losses.kl_cov_loss, {"share": 0.1})).needs_step


COMPARES_NOTHING = {"raw", "constant", "no_advantage", "remax"}
COMPARES_NOTHING |= {"discounted_return", "reinforce_plus_plus", "remax_return_to_go"}


def test_one_completion_a_prompt_is_enough_exactly_where_nothing_is_compared():
    for estimator in estimators():
        settings = {"teacher": ModelTeacher("tiny")} if estimator is advantages.no_advantage else {}
        compares = estimator.__name__ not in COMPARES_NOTHING
        assert estimator_checks.compares_within_groups(estimator) == compares, estimator
        if compares:
            with pytest.raises(ConfigError, match=r"algo\.group_size=1.*2 or more"):
                GRPO("tiny", len, advantage=estimator, group_size=1)
        else:
            assert GRPO("tiny", len, advantage=estimator, group_size=1, **settings).group_size == 1


def minus_mean_of_group(rewards, group_id):
    groups = group_id[:, None] == group_id
    return rewards - (groups * rewards).sum(1) / groups.sum(1)


def test_a_users_estimator_of_rewards_alone_is_tried_out_where_it_would_teach_nothing():
    with pytest.raises(ConfigError, match=r"algo\.group_size=1.*2 or more"):
        GRPO("tiny", len, advantage=minus_mean_of_group, group_size=1)
    with pytest.raises(ConfigError, match=r"algo/groups=best.*compares several"):
        GRPO("tiny", len, advantage=minus_mean_of_group, groups=BestOfGroup())
    GRPO("tiny", len, advantage=lambda rewards, group_id: rewards, group_size=1)


def test_a_reward_that_compares_completions_needs_several():
    judge = GroupJudge("https://h/v1", "m")
    with pytest.raises(ConfigError, match=r"'judge_group' compares.*and there is one, which has no reward.*2 or more"):
        PPO("tiny", judge, group_size=1)
    with pytest.raises(ConfigError, match=r"'judge_group' compares.*greedy completion.*Take another algo.advantage"):
        Reinforce("tiny", judge, advantage=advantages.remax, group_size=4)
    assert PPO("tiny", judge, group_size=2).group_size == 2


def test_what_a_users_estimator_declares_is_taken_at_its_word():
    @AdvantageTraits(compares_group=True, reads_kl=False)
    def mine(rewards, group_id, lengths):
        raise AssertionError("called")

    GRPO("tiny", len, advantage=mine)
    with pytest.raises(ConfigError, match=r"algo\.group_size=1.*2 or more"):
        GRPO("tiny", len, advantage=mine, group_size=1)
    with pytest.raises(ConfigError, match=r"algo\.reward_beta=0\.1: algo/advantage=mine"):
        GRPO("tiny", len, advantage=mine, reward_beta=0.1)


@pytest.mark.parametrize("declares", [False, True])
def test_weights_of_rows_are_refused_in_a_loss_that_multiplies_them(declares):
    def of_rows(old_logprobs, sampler_logprobs, mask):
        return ((old_logprobs - sampler_logprobs) * mask).sum(1, keepdim=True).exp() * mask

    correction = CorrectionTraits(of_rows=True)(of_rows) if declares else of_rows
    with pytest.raises(ConfigError, match=r"algo/correction.*token_truncate"):
        GRPO("tiny", len, correction=correction, loss=policy_losses.vespo_loss)
    # Both weights of the trial would be at the bound: whose they are, is not found by numbers.
    bounded = partial(engine_mismatch.token_truncate, high=1.0)
    GRPO("tiny", len, correction=bounded, loss=policy_losses.vespo_loss)


def test_a_users_estimator_is_not_tried_out():
    """It may keep a baseline of its own, which must see nothing but rollouts."""
    seen = []

    def mine(rewards, group_id):
        seen.append(rewards)
        return rewards

    GRPO("tiny", len, advantage=mine, shaping=mine)
    GRPO("tiny", len, advantage=mine, groups=DynamicSampling())
    assert not seen
