"""Checks of preference losses, of judges, and of comparisons with another model, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_rl.algorithms.checks.argument_checks import try_settings
from lit_rl.algorithms.checks.micro_batching import check_whole_groups
from lit_rl.algorithms.chosen_functions import name_of, unwrap
from lit_rl.algorithms.terms.groups import BestOfGroup, DynamicSampling, GroupSelection
from lit_rl.core.declared_settings import annotated_metadata, annotations_of
from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.generation.generator import Generator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.references import Reference, ReferenceFree
from lit_rl.ops.preference_losses import OfStep, Pairs, PolicyPairs, RatioPairs, reverse_kl
from lit_rl.ops.traits import PreferenceTraits, traits_of
from lit_rl.rewards.contract import LooksAtData
from lit_rl.rewards.judges import Judge, RewardJudge

# ---------------------------------------------------------------------- preference losses


def losses_by_name(functions: Any) -> dict[str, Callable[..., Tensor]]:
    """Return the losses by name, each called once on a pair, so that it may refuse its own settings.

    Raises:
        ConfigError: there is none, or one refuses its settings.
    """
    named = dict(functions) if isinstance(functions, Mapping) else {name_of(functions): functions}
    if not named:
        raise ConfigError("algo.preference is empty: there is nothing to learn without a loss, such as sigmoid.")
    half, one = torch.full((1,), -0.5), torch.ones(1)
    for name, function in named.items():
        try_settings(f"preference.{name}", partial(function, Pairs(half, 2 * half, half, half, one, one), 0.1))
    return named


def loss_weights(functions: Mapping[str, Any], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each loss, 1 by default.

    Raises:
        ConfigError: a weight belongs to no loss, or is below 0.
    """
    weights = weights or {}
    for name, weight in weights.items():
        if name not in functions:
            raise ConfigError(
                f"algo.preference_weights.{name}: there is no such loss; algo.preference has {', '.join(functions)}."
                f"{did_you_mean(name, functions)}"
            )
        if not weight >= 0:
            raise ConfigError(f"algo.preference_weights.{name}={weight} is out of range: allowed is 0 and above.")
    return {name: float(weights.get(name, 1.0)) for name in functions}


def check_divergence(functions: Mapping[str, Any], divergence: Callable[[Tensor], Tensor]) -> None:
    """Refuse a divergence that a loss would not read.

    Raises:
        ConfigError: names the losses that do not read it.
    """
    try_settings("divergence", partial(divergence, torch.zeros(1)))
    if unwrap(divergence) is reverse_kl:
        return
    unaffected = [name for name, function in functions.items() if not reads_divergence(function)]
    if unaffected:
        raise ConfigError(
            f"algo/divergence: {', '.join(unaffected)} reads the log ratios themselves, so the divergence would "
            "change nothing. Set algo/divergence=reverse_kl, or another algo/preference."
        )


def reads_reference(function: Callable[..., Any]) -> bool:
    """Tell whether a loss reads more than log-probs of the policy, by the type of its pairs."""
    return _type_of_pairs(function) is not PolicyPairs


def reads_divergence(function: Callable[..., Any]) -> bool:
    """Tell whether a loss reads scores, by the type of its pairs."""
    return _type_of_pairs(function) not in (PolicyPairs, RatioPairs)


def couples_pairs(function: Callable[..., Any]) -> bool:
    """Tell whether a loss takes the pairs of a whole optimizer step together."""
    return any(isinstance(note, OfStep) for note in annotated_metadata(_first_annotation(function)))


def losses_over_step(functions: Mapping[str, Any]) -> list[str]:
    """Return the names of losses that sort over all pairs of an optimizer step."""
    return [name for name, function in functions.items() if couples_pairs(function)]


def check_pair_weights(functions: Mapping[str, Any]) -> None:
    """Refuse weights of pairs where a loss compares no pairs of the data.

    Raises:
        ConfigError: a loss compares quantiles over pairs, which no weight of a pair fits.
    """
    if sorted_over := losses_over_step(functions):
        raise ConfigError(
            f"algo.likelihood_weights=true weights each pair of the data, but {', '.join(sorted_over)} sorts "
            "completions over all pairs of a step and does not compare pairs of the data. Leave one of the two out."
        )


def check_per_token(functions: Mapping[str, Any]) -> None:
    """Refuse `algo.per_token` where it would change nothing.

    Raises:
        ConfigError: every loss declares that it divides by no length.
    """
    declared = [traits_of(function, PreferenceTraits) for function in functions.values()]
    if any(traits is None or traits.per_token for traits in declared):
        return
    raise ConfigError(
        f"algo.per_token=true divides by the lengths of completions in losses that read them, and algo.preference "
        f"({', '.join(functions)}) reads none. Leave it out, or take a loss that does: algo/preference=[ipo], "
        "[sigmoid_norm] or [simpo]."
    )


def _type_of_pairs(function: Callable[..., Any]) -> Any:
    """Return the type of a loss's pairs; `Any` where it is not annotated: such a function gets all of `Pairs`."""
    annotation = _first_annotation(function)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _first_annotation(function: Callable[..., Any]) -> Any:
    return next(iter(annotations_of(function).values()), Any)


# ---------------------------------------------------------------------- methods with a judge


def check_no_lag(name: str, generator: Generator) -> None:
    """Refuse `generator.lag`: both completions of a pair are drawn by the current policy.

    Raises:
        ConfigError: the generator draws with weights of an earlier rollout.
    """
    if lag := generator.lag:
        raise ConfigError(
            f"generator.lag={lag}: {name} compares completions of the newest policy, and has no correction for older "
            "ones. Set generator.lag=0."
        )


def check_compared_groups(
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
    check_whole_groups(name, split_groups)
    if isinstance(groups, BestOfGroup):
        raise ConfigError(
            f"algo/groups=best keeps one completion of each prompt, but {name} learns from two that were compared, so "
            "every pair would lack a verdict. Set algo/groups=all, or algo=raft to imitate the best one."
        )
    if groups is not None:
        groups.check_fits(group_size, compares_completions=lambda: True)
        groups.check_rewards(rewards)


def check_opponent_groups(name: str, groups: GroupSelection | None, *, ranks_draw_together: bool) -> None:
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
            f"algo/groups=dynamic: in {name} an opponent generates too, and ranks that draw different numbers of spare "
            "groups would wait for each other forever. Set algo/groups=all, strategy=ddp, or one device."
        )


def check_judge_rewards(judge: Judge, rewards: Sequence[str], missing_eos_penalty: float | None) -> None:
    """Refuse a judge without the rewards it reads, and a penalty on rewards that it does not read.

    Raises:
        ConfigError: the judge compares rewards that are not there, or there is a penalty on rewards it does not read.
    """
    if judge.reads_rewards and not rewards:
        raise ConfigError(
            f"judge={type(judge).__name__} compares rewards, but there is no reward function. Set reward, such as "
            "exact_match, or another judge (judge=llm, judge=pairrm, judge=function, judge=pairwise)."
        )
    if missing_eos_penalty is None:
        return
    if not judge.reads_rewards:
        raise ConfigError(
            f"algo.missing_eos_penalty={missing_eos_penalty} is subtracted from rewards, but the judge does not read "
            "them. Set it to null, or judge=reward."
        )


def check_two_policies(name: str, group_size: int, reference: Reference) -> None:
    """Check the settings of a method that draws from the policy and from an opponent.

    Raises:
        ConfigError: the method cannot draw one completion of the policy and one of an opponent made of the reference.
    """
    if group_size != 2:
        raise ConfigError(
            f"algo.group_size={group_size}: {name} compares one completion of the policy with one of its opponent. Set "
            "it to 2."
        )
    if isinstance(reference, ReferenceFree):
        raise ConfigError(f"reference=free: {name} draws completions from the reference. Take another, such as auto.")
    if getattr(reference, "device", None) == "cpu":
        raise ConfigError(
            f"reference.device=cpu: in {name} the reference generates completions, so it has to be on the policy's "
            "device. Set reference.device=null."
        )


def check_native_generator(generator: Generator) -> None:
    """Refuse generators that cannot draw from a mixture of two models.

    Raises:
        ConfigError: the generator is not the native one.
    """
    if not isinstance(generator, NativeGenerator):
        raise ConfigError(
            f"generator={type(generator).__name__} decodes one model, but NashMD samples from the policy mixed with "
            "its reference, token by token. Set generator=native, or algo=xpo, whose opponent is the reference alone."
        )


def check_no_step_losses(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse losses that sort completions over all pairs of a step.

    Raises:
        ConfigError: names such a loss.
    """
    for name in losses_over_step(functions):
        raise ConfigError(
            f"algo.preference.{name} sorts completions over all pairs of a step, but pairs that the policy has just "
            "generated are learned from one micro-batch at a time. Set another loss, such as sigmoid or ipo."
        )


# ---------------------------------------------------------------------- comparison with another model


def check_win_rate(against: str, judge: Judge, rewards: Sequence[str], data: Any) -> None:
    """Check the requirements of `eval.win_rate_against`.

    Args:
        against: The other model.
        judge: The judge.
        rewards: Names of the reward functions.
        data: The data module; None where the Trainer has none.

    Raises:
        ConfigError: there is nothing to compare by, or no prompt to compare at.
        RewardError: the judge needs a column that a validation set lacks, or reads text where its prompts show images.
    """
    if judge.reads_rewards and not rewards:
        raise ConfigError(
            f"eval.win_rate_against={against!r} compares completions by a judge or by the summed reward, but there is "
            "neither. Set reward, such as exact_match, or a judge that needs none (judge=llm, judge=pairrm, "
            "judge=function, judge=pairwise)."
        )
    if not getattr(data, "val_names", True):
        raise ConfigError(
            f"eval.win_rate_against={against!r} compares completions of validation prompts, but there are none. Set "
            "data.val_path, or data.val_fraction above 0; rows of whole texts have no prompts."
        )
    for prompts in getattr(data, "val_prompts", {}).values():
        judge.bind(list(prompts.columns))
        if isinstance(judge, LooksAtData):
            judge.check_columns(prompts.columns)


def warn_unused_judge(method: str, judge: Judge) -> None:
    """Warn of a judge in a run that learns from none and compares with no other model."""
    if not isinstance(judge, RewardJudge):
        rank_zero_warn(
            f"judge={type(judge).__name__} is never asked: {method} learns from no judge, and eval.win_rate_against is "
            "not set."
        )
