"""What a preference method refuses that writes its own pairs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lit_rl.algorithms.preflight import on_policy as checks
from lit_rl.algorithms.terms.best_of_group import BestOfGroup
from lit_rl.algorithms.terms.groups import TopOfGroup
from lit_rl.errors import ConfigError, in_range
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.reference.base import ReferenceFree

if TYPE_CHECKING:
    from lit_rl.algorithms.families.judged import OnlinePairs


def terms(module: OnlinePairs) -> None:
    """
    Raises:
        ConfigError: a setting is out of range, or does not fit the judge, the sampling or the group.
    """
    name = type(module).__name__
    checks.sampling_draws(module)
    if lag := module.generator.lag:
        raise ConfigError(
            f"generator.lag={lag}: {name} compares completions of the newest policy, and corrects for none that are "
            "older. Set generator.lag=0."
        )
    in_range("algo.group_size", module.group_size, low=2)
    if module.split_groups != 1:
        raise ConfigError(
            f"algo.split_groups={module.split_groups}: {name} compares completions of one prompt inside a micro-batch, "
            "and learns from two of them however many were drawn. Leave it at 1."
        )
    if isinstance(module.groups, BestOfGroup):
        raise ConfigError(
            f"algo/groups=best leaves one completion of each prompt, and {name} learns from two that were compared: "
            "every pair would be without a verdict. Take algo/groups=all, or algo=raft to imitate the best one."
        )
    if isinstance(module.groups, TopOfGroup):
        module.groups.fits(module.group_size)
    if module.judge.reads_rewards and not module.reward_functions.names:
        raise ConfigError(
            f"judge={type(module.judge).__name__} compares rewards, and there is no reward function: set reward, such "
            "as exact_match, or take another judge (judge=llm, judge=function, judge=pairwise)."
        )
    if module.missing_eos_penalty is not None:
        in_range("algo.missing_eos_penalty", module.missing_eos_penalty, low=0, open_low=True)
        if not module.judge.reads_rewards:
            raise ConfigError(
                f"algo.missing_eos_penalty={module.missing_eos_penalty} is taken off rewards, and the judge does not "
                "read them. Set it to null, or take judge=reward."
            )
    for_each_epoch("algo.beta", module.beta, open_low=True)


def for_each_epoch(key: str, value: float | Sequence[float], *, high: float = float("inf"), open_low: bool) -> None:
    """
    Raises:
        ConfigError: the number, or one of the numbers of the epochs, is out of range, or there is none.
    """
    values = list(value) if isinstance(value, Sequence) else [value]
    if not values:
        raise ConfigError(f"{key}=[] has no number: give one, or a list of one for each epoch.")
    for number in values:
        in_range(key, number, low=0, high=high, open_low=open_low)


def two_policies(module: OnlinePairs) -> None:
    """
    Raises:
        ConfigError: the method cannot draw one completion of the policy and one of an opponent made of the reference.
    """
    name = type(module).__name__
    if module.group_size != 2:
        raise ConfigError(
            f"algo.group_size={module.group_size}: {name} compares one completion of the policy with one of its "
            "opponent: it is 2."
        )
    if isinstance(module.reference, ReferenceFree):
        raise ConfigError(f"reference=free: {name} draws completions from the reference. Take another, such as auto.")
    if getattr(module.reference, "device", None) == "cpu":
        raise ConfigError(
            f"reference.device=cpu: in {name} the reference writes completions, so it has to be where the policy is. "
            "Set reference.device=null."
        )


def native_generator(generator: Any) -> None:
    """
    Raises:
        ConfigError: the engine cannot decode from a mixture of two models.
    """
    if not isinstance(generator, NativeGenerator):
        raise ConfigError(
            f"generator={type(generator).__name__} decodes one model, and NashMD draws from the policy mixed with its "
            "reference token by token. Take generator=native, or algo=xpo, whose opponent is the reference alone."
        )
