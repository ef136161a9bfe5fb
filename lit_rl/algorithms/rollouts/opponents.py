"""Completions of an opponent: each prompt is answered by the policy, and by an opponent made of its reference."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.rollouts.scored import Scored, scores_of
from lit_rl.algorithms.rollouts.source import RolloutRequest, RolloutSource
from lit_rl.errors import ConfigError
from lit_rl.generation.base import InProcessGenerator
from lit_rl.generation.collect import texts_of
from lit_rl.generation.native import for_another_policy
from lit_rl.models.policy.sharding import unsharded
from lit_rl.rollout import Completions, join_completions, select


def duels(
    source: RolloutSource, asked: RolloutRequest, own: Completions, opponent: Any, reference_policy: Any
) -> Completions:
    """Return the policy's completions with the opponent's: rows `2 i` and `2 i + 1` for each prompt `i`.

    Args:
        source: The source of the opponent's completions.
        asked: The policy's request: one completion of each prompt.
        own: The policy's completions.
        opponent: The model that answers as a policy does, with noise of its own.
        reference_policy: The reference's weights, which are gathered meanwhile where they are sharded.

    Raises:
        ConfigError: the opponent is the policy without its adapters, and the engine copies weights.
    """
    generator = source.generator
    if opponent is asked.policy and not isinstance(for_another_policy(generator), InProcessGenerator):
        raise ConfigError(
            f"generator={type(generator).__name__} takes a copy of the weights, and this reference is the "
            "policy with its adapters switched off. Take generator=native, or reference=initial_adapter."
        )
    whole = unsharded(reference_policy) if isinstance(reference_policy, nn.Module) else nullcontext()
    with whole:
        theirs = source.draw_other(asked.by_another(opponent))
    joint = join_completions(own, replace(theirs, group_id=own.group_id))
    return select(joint, torch.arange(len(joint)).view(2, -1).T.flatten())


def policy_rows(completions: Completions) -> Tensor:
    """Return long `(n,)`: the policy's rows among pairs with an opponent."""
    return torch.arange(0, len(completions), 2, device=completions.response_ids.device)


def without_opponent(scored: Scored, tokenizer: Any) -> Scored:
    """Return the policy's completions, with the opponent's text and reward as columns, for display."""
    rows = policy_rows(scored.completions)
    texts = texts_of(scored.completions, tokenizer)
    own = scores_of(scored.scores, rows)
    beside = {"opponent": texts[1::2], "opponent_reward": scored.scores.total[1::2].tolist()}
    return replace(
        scored,
        completions=select(scored.completions, rows),
        scores=replace(own, extras=own.extras | beside),
        win_rates=select(scored.win_rates, rows),
    )
