"""Prompts answered twice: once by the policy, once by an opponent that is made of its reference."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.records import Scored
from lit_rl.algorithms.rollouts.plan import mix
from lit_rl.algorithms.rollouts.rows import join_completions
from lit_rl.errors import ConfigError
from lit_rl.generation.base import InProcessGenerator
from lit_rl.generation.collect import Vocabulary, collect, response_ids
from lit_rl.generation.native import for_another_policy
from lit_rl.models.policy.sharding import unsharded
from lit_rl.rollout import Completions, PromptBatch, Rollout, select

if TYPE_CHECKING:
    from lit_rl.algorithms.families.judged import OnlinePairs


def duels(module: OnlinePairs, batch: PromptBatch, own: Completions, opponent: nn.Module) -> Completions:
    """Rows `2 i` of the policy and `2 i + 1` of the opponent, for each prompt `i`.

    Args:
        module: Whose generator, sampling and seed the opponent is drawn with.
        batch: The prompts.
        own: One completion of each by the policy.
        opponent: Answers the prompts as a policy does, with noise of its own.

    Raises:
        ConfigError: the opponent is the policy with its adapters switched off, and the engine takes a copy of weights.
    """
    started, held = time.perf_counter(), module.reference_policy
    if opponent is module.policy and not isinstance(for_another_policy(module.generator), InProcessGenerator):
        raise ConfigError(
            f"generator={type(module.generator).__name__} takes a copy of the weights, and this reference is the "
            "policy with its adapters switched off. Take generator=native, or reference=initial_adapter."
        )
    if isinstance(held, nn.Module):
        with unsharded(held):
            theirs = _drawn(module, batch, opponent)
    else:
        theirs = _drawn(module, batch, opponent)
    module._seconds["generate"] += time.perf_counter() - started
    module._sampled += int(theirs.lengths.sum())
    joint = join_completions(own, replace(theirs, group_id=own.group_id))
    return select(joint, torch.arange(len(joint)).view(2, -1).T.flatten())


def _drawn(module: OnlinePairs, batch: PromptBatch, opponent: Any) -> Completions:
    return collect(
        for_another_policy(module.generator),
        opponent,
        batch,
        sampling=module.sampling,
        group_size=1,
        vocabulary=Vocabulary.of(module.model),
        version=module.step,
        seed=mix(module.seed, 1),  # with the policy's own noise two equal models would write the same
    )


def policys_own(module: OnlinePairs, scored: Scored, drawn: Rollout) -> tuple[Scored, Rollout]:
    """What is shown of duels: the policy's completions, with the opponent's text and reward as columns beside them."""
    rows = firsts(scored.completions)
    scores, mine = scored.scores, rows.tolist()
    texts = module.tokenizer.batch_decode(response_ids(scored.completions), skip_special_tokens=True)
    extras = {name: [values[i] for i in mine] for name, values in scores.extras.items()}
    extras |= {"opponent": texts[1::2], "opponent_reward": scores.total[1::2].tolist()}
    spans = scores.span_rewards
    own = replace(
        scores,
        values=scores.values[mine],
        total=scores.total[mine],
        weights=scores.weights[mine],
        extras=extras,
        span_rewards=None if spans is None else [spans[i] for i in mine],
    )
    return replace(scored, completions=select(scored.completions, rows), scores=own), select(drawn, rows)


def firsts(completions: Completions) -> Tensor:
    """Long `(n,)`: the policy's rows."""
    return torch.arange(0, len(completions), 2, device=completions.response_ids.device)
