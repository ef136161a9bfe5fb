"""Checks of a comparison with another model (`eval.win_rate_against`), before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.errors import ConfigError
from lit_rl.rewards.judges.base import Judge, RewardJudge


def can_be_compared(against: str, judge: Judge, rewards: Sequence[str], data: Any) -> None:
    """Check the requirements of `eval.win_rate_against`.

    Args:
        against: The other model.
        judge: The judge.
        rewards: Names of the reward functions.
        data: The data module; None where the Trainer has none.

    Raises:
        ConfigError: there is nothing to compare by, or no prompt to compare at.
        RewardError: the judge needs a column that a validation set lacks.
    """
    if judge.reads_rewards and not rewards:
        raise ConfigError(
            f"eval.win_rate_against={against!r} compares completions by a judge or by the summed reward, and there "
            "is neither: set reward, such as exact_match, or take a judge that needs none (judge=llm, "
            "judge=pairrm, judge=function, judge=pairwise)."
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
