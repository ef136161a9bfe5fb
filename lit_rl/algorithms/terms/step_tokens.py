"""The loss tokens of a whole optimizer step, computed before its first micro-batch is learned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.terms.selection import TokenSelection
from lit_rl.models.policy.forward import score
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.options import ForwardOptions
from lit_rl.ops.step import StepTokens
from lit_rl.rollout import Rollout, Sampling


@torch.no_grad()
def step_tokens(
    policy: nn.Module,
    micro_batches: Sequence[Rollout],
    sampling: Sampling,
    options: ForwardOptions,
    selection: TokenSelection,
    ranks: Ranks,
) -> StepTokens:
    """Return the loss tokens of all micro-batches of a step, over all ranks, under the policy now: one more forward.

    Terms take quantiles and shares over a step from these, so they do not depend on how the step is split.

    Args:
        policy: The policy, scored in evaluation mode.
        micro_batches: The micro-batches of this rank's step.
        sampling: The sampling settings of the tokens.
        options: Options of the forward pass.
        selection: The selection of tokens that the policy loss acts on.
        ranks: The ranks that share the step.
    """
    with evaluation_mode(policy):
        scores = [score(policy, micro.completions, sampling, entropy=True, options=options) for micro in micro_batches]
    parts = [
        StepTokens.of(
            micro.loss_mask,
            logprobs=seen.logprobs,
            old_logprobs=micro.old_logprobs,
            advantages=micro.advantages,
            entropy=seen.entropy,
        )
        for micro, seen in zip(micro_batches, scores)
    ]
    names = ("logprobs", "old_logprobs", "advantages", "entropy")
    joint = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    step = StepTokens(**{name: ranks.gather_tokens(flat) for name, flat in joint.items()})
    selected = [selection(seen.entropy, micro.loss_mask, step).sum() for micro, seen in zip(micro_batches, scores)]
    total = ranks.gather(torch.stack(selected).sum()[None].float()).sum()
    return dataclasses.replace(step, selected=total)
