"""What a run refuses of its validation before any weight is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.rewards.base import Rewards
from lit_rl.rewards.judges import Judge, RewardJudge


def rewards_fit_columns(rewards: Rewards, val_columns: Mapping[str, Sequence[str]]) -> None:
    """Check the rewards against the columns of every validation set.

    Raises:
        RewardError: a reward needs what is no column.
    """
    for name, columns in val_columns.items():
        try:
            rewards.bind(columns)
        except Exception as error:
            error.add_note(f"(in the validation set {name or 'data.val_*'})")
            raise


def context_holds(
    model: LanguageModel, longest: int, group: str, new_tokens: int, prompt_key: str = "data.max_prompt_tokens"
) -> None:
    """
    Args:
        model: Whose context has to hold a prompt with its completion.
        longest: Tokens of the longest prompt.
        group: Of the config, with the key `max_new_tokens`.
        new_tokens: Tokens of the longest completion.
        prompt_key: What bounds prompts.

    Raises:
        ConfigError: the context does not hold them.
    """
    holds = model.context_length
    if holds is None or longest + new_tokens <= holds:
        return
    prompts = f", or {prompt_key} to {holds - new_tokens}" if holds > new_tokens else ""
    raise ConfigError(
        f"The longest prompt has {longest} tokens; with {group}.max_new_tokens={new_tokens} that is "
        f"{longest + new_tokens}, but the context of {model.name} holds {holds}. Lower "
        f"{group}.max_new_tokens to {max(1, holds - longest)}{prompts}."
    )


def monitors(callbacks: Iterable[Any], logged: Collection[str]) -> None:
    """At the end of a validation every metric has been logged once: a monitor of any other would wait for ever.

    Raises:
        ConfigError: a callback watches a metric that is none of those logged.
    """
    known = {*logged, "step", "epoch"}
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is not None and monitor not in known:
            raise ConfigError(
                f"{type(callback).__name__}(monitor={monitor!r}) watches a metric that is never logged."
                f"{did_you_mean(monitor, known)} Logged are: {', '.join(sorted(known))}."
            )


def win_rate(against: str, judge: Judge, rewards: Sequence[str], data: Any) -> None:
    """
    Args:
        against: The other model.
        judge: Who compares.
        rewards: Names of the reward functions.
        data: The data module; None where the Trainer has none.

    Raises:
        ConfigError: there is nothing to compare by, or no prompt to compare at.
        RewardError: the judge needs what is no column of a validation set.
    """
    if judge.reads_rewards and not rewards:
        raise ConfigError(
            f"eval.win_rate_against={against!r} compares completions by a judge or by the summed reward, and there "
            "is neither: set reward, such as exact_match, or take a judge that needs none (judge=llm, "
            "judge=function, judge=pairwise)."
        )
    if not getattr(data, "val_names", True):
        raise ConfigError(
            f"eval.win_rate_against={against!r} compares completions of validation prompts, and there are none. "
            "Set data.val_path, or data.val_fraction above 0; rows of whole texts have no prompts."
        )
    for columns in getattr(data, "val_columns", {}).values():
        judge.bind(columns)


def judge_is_asked(method: str, judge: Judge) -> None:
    """Warn of a judge in a run that learns from none and compares with no other model."""
    if not isinstance(judge, RewardJudge):
        rank_zero_warn(
            f"judge={type(judge).__name__} is never asked: {method} learns from no judge, and eval.win_rate_against is "
            "not set."
        )
