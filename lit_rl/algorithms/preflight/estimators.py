"""What an advantage estimator must fit, before anything is loaded: how it is called, what it reads, what it returns.

An estimator of `lit_rl.ops` is tried out on a few rows. A user's own may hold a state: only its signature is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import named, parameters
from lit_rl.errors import ConfigError

if TYPE_CHECKING:
    from lit_rl.algorithms.families.policy_gradient import PolicyGradient

Estimator = Callable[..., Any]

_BY_POSITION = ("rewards", "group_id")


def check_call(estimator: Estimator, algorithm: str) -> None:
    """Refuse an estimator that cannot be called with rewards of rows."""
    offered = [name for name in two_prompts() if name not in _BY_POSITION and name != "ended"]
    asked = named(estimator, dict.fromkeys(offered))
    if parameters(estimator)[:1] == ("token_rewards",) or not _binds(estimator, *_BY_POSITION, **asked):
        raise ConfigError(
            f"algo.advantage={_signature(estimator)}: {algorithm} calls it as f(rewards, group_id, ...), where it may "
            f"name {', '.join(offered)}. Of the choices of algo/advantage all fit but gae, which needs the critic of "
            "algo=ppo."
        )


def check_what_it_reads(module: PolicyGradient) -> None:
    """Refuse settings that would not reach the advantages, or not alike on both sides of a comparison."""
    estimator = module.advantage
    if module.shaping is not None and "greedy_rewards" in parameters(estimator):
        raise ConfigError(
            f"algo/shaping: {_name(estimator)} compares drawn completions with a greedy one, and the greedy one is "
            "alone: there is no group that it could be shaped in. Take algo/shaping=none; a reward function "
            "(reward=soft_overlong, reward=cosine_length) judges both by their lengths."
        )
    if is_ours(estimator):
        _reads_what_is_set(module)
        whitening_fits(module.whitening, estimator, of_tokens=_of_columns(estimator).ndim == 2)


def check_of_tokens(estimator: Estimator, whitening: Callable | None) -> None:
    """Refuse what cannot stand in the place of `gae`, and a whitening that does not fit what it returns."""
    tensors = dict.fromkeys(("token_rewards", "values", "mask"))
    if parameters(estimator)[:2] == _BY_POSITION or not _binds(estimator, *tensors):
        raise ConfigError(
            f"algo.advantage={_signature(estimator)}: PPO calls it as f({', '.join(tensors)}) -> (advantages, "
            "returns). Of the choices of algo/advantage only gae fits; the others go with the algorithms that have no "
            "critic (algo=grpo, algo=rloo, algo=reinforce_pp)."
        )
    whitening_fits(whitening, estimator, of_tokens=True)


def whitening_fits(whitening: Callable | None, estimator: Estimator, *, of_tokens: bool) -> None:
    """Refuse to whiten by rows what has one advantage a token. (The other way round every token counts: see `credit`.)

    Raises:
        ConfigError: names the whitening and the estimator.
    """
    if whitening is not None and of_tokens and not by_tokens(whitening) and "scored" in parameters(whitening):
        raise ConfigError(
            f"algo/whitening: {_name(whitening)} takes one advantage a completion, and {_name(estimator)} gives one a "
            "token. Take algo/whitening=tokens."
        )


def by_tokens(whitening: Callable) -> bool:
    """Whether it asks for the mask of tokens, and so for an advantage of each."""
    return "mask" in parameters(whitening)


def compares_within_groups(estimator: Estimator) -> bool:
    """Whether an advantage estimator says nothing about the only completion of a prompt.

    Asked of two prompts with one completion each, of different rewards: an estimator that compares with other prompts,
    with a greedy completion or with nothing tells them apart.
    """
    return not bool(columns_to_rows(estimator, two_prompts()).any())


def two_prompts() -> dict[str, Tensor]:
    """Every column that a function of rows may name: two completions, each of another prompt."""
    return _columns((0.0, 1.0))


def columns_to_rows(function: Estimator, columns: dict[str, Tensor]) -> Tensor:
    others = {name: column for name, column in columns.items() if name not in _BY_POSITION}
    return function(*(columns[name] for name in _BY_POSITION), **named(function, others))


def is_ours(function: Callable) -> bool:
    """Whether it is of `lit_rl.ops`, and so a function of its arguments alone."""
    return (getattr(getattr(function, "func", function), "__module__", None) or "").startswith("lit_rl.ops.")


_REWARDS = (0.0, 1.0, 3.0, 2.0, 0.0, 1.0)
_CHANGE = (0.5, 0.1, 0.9, 0.2, 0.7, 0.3)
"""Rewards of two groups, and a change of them that no mean or deviation takes out again."""


def _columns(rewards: Sequence[float], change: Sequence[float] = (), kl: Sequence[float] = ()) -> dict[str, Tensor]:
    """Two groups of rows of two tokens, which earn at the second.

    `change` is what shaping, norm and clip make of the rewards, and `kl` what is taken off them at the first token.
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
        "ended": everywhere[:, 0],
    }


def _reads_what_is_set(module: PolicyGradient) -> None:
    """Refuse changes of the rewards that the estimator does not see: the run would be the one without them."""
    changes = {
        "algo/shaping": module.shaping is not None,
        "algo/reward_norm": module.reward_norm is not None,
        f"algo.reward_clip={list(module.reward_clip or ())}": module.reward_clip is not None,
    }
    unread = [key for key, is_set in changes.items() if is_set and not _reads_changes(module.advantage)]
    if module.reward_beta and not _reads_kl(module.advantage):
        unread.append(f"algo.reward_beta={module.reward_beta}")
    if unread:
        raise ConfigError(
            f"{', '.join(unread)}: {_name(module.advantage)} does not read what this makes of the rewards, or not at "
            "every token. Leave it out, or take another algo/advantage (group_normalized reads everything). A KL "
            "in the loss is algo.beta."
        )


def _reads_changes(estimator: Estimator) -> bool:
    """Whether advantages change with rewards when what the functions said stays."""
    return not torch.equal(_of_columns(estimator), _of_columns(estimator, change=_CHANGE))


def _reads_kl(estimator: Estimator) -> bool:
    """Whether advantages change with a KL that is taken off at a token where no reward is earned."""
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
    """Its name and what it must be given, without defaults and types."""
    given = inspect.signature(function).parameters.values()
    needed = ", ".join(parameter.name for parameter in given if parameter.default is parameter.empty)
    return f"{_name(function)}({needed})"


def _name(function: Callable) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)
