"""Checks of methods whose own completions are judged in pairs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lit_rl.algorithms.preflight import preferences
from lit_rl.algorithms.terms.groups import BestOfGroup, DynamicSampling, GroupSelection
from lit_rl.errors import ConfigError, in_range
from lit_rl.generation.base import Generator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.reference.base import Reference, ReferenceFree
from lit_rl.rewards.judges.base import Judge


def newest_policy(name: str, generator: Generator) -> None:
    """Refuse `generator.lag`: both completions of a pair are drawn by the current policy.

    Raises:
        ConfigError: the generator draws with weights of an earlier rollout.
    """
    if lag := generator.lag:
        raise ConfigError(
            f"generator.lag={lag}: {name} compares completions of the newest policy, and corrects for none that are "
            "older. Set generator.lag=0."
        )


def groups_are_compared(
    name: str,
    group_size: int,
    split_groups: int | Literal["auto"],
    groups: GroupSelection | None,
    rewards: Sequence[str] = (),
) -> None:
    """Refuse group sizes and cuts that leave a completion without another to be compared with.

    Raises:
        ConfigError: fewer than two completions of a prompt stand side by side in a micro-batch.
    """
    in_range("algo.group_size", group_size, low=2)
    if split_groups not in (1, "auto"):
        raise ConfigError(
            f"algo.split_groups={split_groups}: {name} compares completions of one prompt inside a micro-batch, "
            "and learns from two of them however many were drawn. Leave it at 1."
        )
    if isinstance(groups, BestOfGroup):
        raise ConfigError(
            f"algo/groups=best leaves one completion of each prompt, and {name} learns from two that were compared: "
            "every pair would be without a verdict. Take algo/groups=all, or algo=raft to imitate the best one."
        )
    if groups is not None:
        groups.fits(group_size, compares_completions=lambda: True)
        groups.check_rewards(rewards)


def opponent_can_draw_alone(name: str, groups: GroupSelection | None, *, ranks_draw_together: bool) -> None:
    """Refuse dynamic groups where an opponent writes and a rank cannot draw without the others.

    Args:
        name: Name of the method.
        groups: The selection; with dynamic sampling some ranks draw more spare groups than others.
        ranks_draw_together: Whether weights are sharded over the ranks, or engine calls are collective.

    Raises:
        ConfigError: one rank would wait for another that draws no more.
    """
    if isinstance(groups, DynamicSampling) and ranks_draw_together:
        raise ConfigError(
            f"algo/groups=dynamic: {name} has an opponent write beside the policy, and ranks that need other numbers "
            "of spare groups would wait for each other for ever. Take algo/groups=all, strategy=ddp, or one device."
        )


def judge_has_rewards(judge: Judge, rewards: Sequence[str], missing_eos_penalty: float | None) -> None:
    """Refuse a judge without the rewards it reads, and a penalty on rewards that it does not read.

    Raises:
        ConfigError: the judge compares rewards that are not there, or there is a penalty on rewards it does not read.
    """
    if judge.reads_rewards and not rewards:
        raise ConfigError(
            f"judge={type(judge).__name__} compares rewards, and there is no reward function: set reward, such "
            "as exact_match, or take another judge (judge=llm, judge=pairrm, judge=function, judge=pairwise)."
        )
    if missing_eos_penalty is None:
        return
    in_range("algo.missing_eos_penalty", missing_eos_penalty, low=0, open_low=True)
    if not judge.reads_rewards:
        raise ConfigError(
            f"algo.missing_eos_penalty={missing_eos_penalty} is taken off rewards, and the judge does not "
            "read them. Set it to null, or take judge=reward."
        )


def for_each_epoch(key: str, value: float | Sequence[float], *, high: float = float("inf"), open_low: bool) -> None:
    """Check a setting that is one number, or one for each epoch.

    Raises:
        ConfigError: the number, or one of the numbers of the epochs, is out of range, or there is none.
    """
    values = list(value) if isinstance(value, Sequence) else [value]
    if not values:
        raise ConfigError(f"{key}=[] has no number: give one, or a list of one for each epoch.")
    for number in values:
        in_range(key, number, low=0, high=high, open_low=open_low)


def two_policies(name: str, group_size: int, reference: Reference) -> None:
    """Check the settings of a method that draws from the policy and from an opponent.

    Raises:
        ConfigError: the method cannot draw one completion of the policy and one of an opponent made of the reference.
    """
    if group_size != 2:
        raise ConfigError(
            f"algo.group_size={group_size}: {name} compares one completion of the policy with one of its "
            "opponent: it is 2."
        )
    if isinstance(reference, ReferenceFree):
        raise ConfigError(f"reference=free: {name} draws completions from the reference. Take another, such as auto.")
    if getattr(reference, "device", None) == "cpu":
        raise ConfigError(
            f"reference.device=cpu: in {name} the reference writes completions, so it has to be where the policy is. "
            "Set reference.device=null."
        )


def native_generator(generator: Generator) -> None:
    """Refuse generators that cannot draw from a mixture of two models.

    Raises:
        ConfigError: the generator is not the native one.
    """
    if not isinstance(generator, NativeGenerator):
        raise ConfigError(
            f"generator={type(generator).__name__} decodes one model, and NashMD draws from the policy mixed with its "
            "reference token by token. Take generator=native, or algo=xpo, whose opponent is the reference alone."
        )


def pairs_stand_alone(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse losses that sort completions over all pairs of a step.

    Raises:
        ConfigError: names such a loss.
    """
    for name in preferences.over_step(functions):
        raise ConfigError(
            f"algo.preference.{name} sorts completions over all pairs of a step, and pairs that a policy has just "
            "written are looked at one micro-batch at a time. Take another loss, such as sigmoid or ipo."
        )
