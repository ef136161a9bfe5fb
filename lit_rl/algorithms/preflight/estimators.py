"""Checks of advantage estimators before anything is loaded: their arguments, inputs and outputs.

An estimator of `lit_rl.ops` is tried out on a few rows. A user's own may hold a state: only its signature is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.preflight.settings import settings
from lit_rl.algorithms.signatures import arguments_for, name_of, parameters
from lit_rl.algorithms.terms.advantages import Whitening
from lit_rl.algorithms.terms.credit import CreditAssignment
from lit_rl.errors import ConfigError

Estimator = Callable[..., Any]

_BY_POSITION = ("rewards", "group_id")


def is_there(estimator: Estimator | None, such_as: str) -> None:
    """Refuse a method without an estimator of advantages, and name one.

    Raises:
        ConfigError: there is none.
    """
    if estimator is None:
        raise ConfigError(f"algo.advantage=null: advantages need an estimator, such as algo/advantage={such_as}.")


def check_of_rows(estimator: Estimator, algorithm: str) -> None:
    """Refuse an estimator that cannot be called with rewards of rows, or that refuses its own settings."""
    offered = [name for name in two_prompts() if name not in _BY_POSITION and name != "ended"]
    asked = arguments_for(estimator, dict.fromkeys(offered))
    if parameters(estimator)[:1] == ("token_rewards",) or not _binds(estimator, *_BY_POSITION, **asked):
        raise ConfigError(
            f"algo.advantage={_signature(estimator)}: {algorithm} calls it as f(rewards, group_id, ...), where it may "
            f"name {', '.join(offered)}. Of the choices of algo/advantage all fit but gae and gae_of_turns, which need "
            "the critic of algo=ppo."
        )
    if is_ours(estimator):
        settings("advantage", partial(columns_to_rows, estimator, two_prompts()))


def check_what_it_reads(
    estimator: Estimator, credit: CreditAssignment, reward_beta: float, whitening: Whitening
) -> None:
    """Refuse settings that the estimator ignores, or would apply to one side of a comparison only."""
    if credit.shaping is not None and "greedy_rewards" in parameters(estimator):
        raise ConfigError(
            f"algo/shaping: {name_of(estimator)} compares drawn completions with a greedy one, and the greedy one is "
            "alone: there is no group that it could be shaped in. Take algo/shaping=none; a reward function "
            "(reward=soft_overlong, reward=cosine_length) judges both by their lengths."
        )
    if is_ours(estimator):
        _reads_what_is_set(estimator, credit, reward_beta)
        whitening.fits(of_tokens=_of_columns(estimator).ndim == 2)


def check_of_tokens(estimator: Estimator, whitening: Whitening) -> None:
    """Refuse an estimator that cannot replace `gae`, settings that it refuses, and a whitening that does not fit."""
    tensors = dict.fromkeys(("token_rewards", "values", "mask"))
    row, numbers = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long)
    turns = arguments_for(estimator, {"turn": numbers})
    if parameters(estimator)[:2] == _BY_POSITION or not _binds(estimator, *tensors, **turns):
        raise ConfigError(
            f"algo.advantage={_signature(estimator)}: PPO calls it as f({', '.join(tensors)}) -> (advantages, "
            "returns), where it may name turn. Of the choices of algo/advantage gae and gae_of_turns fit; the others "
            "go with the algorithms that have no critic (algo=grpo, algo=rloo, algo=reinforce_pp)."
        )
    whitening.fits(of_tokens=True)
    settings("advantage", partial(estimator, row, row, torch.ones(1, 2, dtype=torch.bool), **turns))


def compares_within_groups(estimator: Estimator) -> bool:
    """Tell whether an advantage estimator is zero for the only completion of a prompt.

    It is called on two prompts with one completion each and different rewards: an estimator that compares with other
    prompts, with a greedy completion or with nothing distinguishes them.
    """
    return not bool(columns_to_rows(estimator, two_prompts()).any())


def two_prompts() -> dict[str, Tensor]:
    """Return every column that a function of rows may name, for two completions of two prompts."""
    return _columns((0.0, 1.0))


def columns_to_rows(function: Estimator, columns: dict[str, Tensor]) -> Tensor:
    others = {name: column for name, column in columns.items() if name not in _BY_POSITION}
    return function(*(columns[name] for name in _BY_POSITION), **arguments_for(function, others))


def is_ours(function: Callable) -> bool:
    """Tell whether a function is of `lit_rl.ops`, and so depends on its arguments alone."""
    return (getattr(getattr(function, "func", function), "__module__", None) or "").startswith("lit_rl.ops.")


_REWARDS = (0.0, 1.0, 3.0, 2.0, 0.0, 1.0)
_CHANGE = (0.5, 0.1, 0.9, 0.2, 0.7, 0.3)
"""Rewards of two groups, and a change of them that no normalisation by mean and deviation cancels."""


def _columns(rewards: Sequence[float], change: Sequence[float] = (), kl: Sequence[float] = ()) -> dict[str, Tensor]:
    """Return the columns of two groups of rows of two tokens, with the reward at the second.

    Args:
        rewards: One for each row.
        change: What shaping, norm and clip add to the rewards.
        kl: A penalty at the first token.
    """
    said, rows = torch.tensor(rewards), len(rewards)
    earned = said + torch.tensor(change) if change else said
    first = -torch.tensor(kl) if kl else torch.zeros(rows)
    everywhere = torch.ones(rows, 2, dtype=torch.bool)
    return {
        "rewards": earned + first,
        "group_id": torch.arange(rows) * 2 // rows,
        "values": said[:, None],
        "weights": torch.ones(rows, 1),
        "lengths": torch.full((rows,), 2),
        "greedy_rewards": torch.zeros(rows),
        "token_rewards": torch.stack([first, earned], dim=1),
        "mask": everywhere,
        "step_ends": torch.tensor([False, True]).expand(rows, 2),
        "turn": torch.zeros(rows, 2, dtype=torch.long),
        "state": torch.zeros(rows, 2, dtype=torch.long),
        "ended": everywhere[:, 0],
    }


def _reads_what_is_set(estimator: Estimator, credit: CreditAssignment, reward_beta: float) -> None:
    """Refuse changes of the rewards that the estimator does not read: they would have no effect."""
    changes = {
        "algo/shaping": credit.shaping is not None,
        "algo/reward_norm": credit.norm is not None,
        f"algo.reward_clip={list(credit.clip or ())}": credit.clip is not None,
    }
    unread = [key for key, is_set in changes.items() if is_set and not _reads_changes(estimator)]
    if reward_beta and not _reads_kl(estimator):
        unread.append(f"algo.reward_beta={reward_beta}")
    if unread:
        raise ConfigError(
            f"{', '.join(unread)}: {name_of(estimator)} does not read what this makes of the rewards, or not at "
            "every token. Leave it out, or take another algo/advantage (group_normalized reads everything). A KL "
            "in the loss is algo.beta."
        )


def _reads_changes(estimator: Estimator) -> bool:
    """Tell whether advantages change with the processed rewards while the functions' own values stay."""
    return not torch.equal(_of_columns(estimator), _of_columns(estimator, change=_CHANGE))


def _reads_kl(estimator: Estimator) -> bool:
    """Tell whether advantages change with a KL penalty at a token without reward."""
    return not torch.equal(_of_columns(estimator), _of_columns(estimator, kl=_CHANGE))


def _of_columns(estimator: Estimator, **differences: Sequence[float]) -> Tensor:
    return columns_to_rows(estimator, _columns(_REWARDS, **differences))


def _binds(function: Callable, *arguments: Any, **keywords: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def _signature(function: Callable) -> str:
    """Return the function's name and its required arguments."""
    given = inspect.signature(function).parameters.values()
    needed = ", ".join(parameter.name for parameter in given if parameter.default is parameter.empty)
    return f"{name_of(function)}({needed})"
