"""What the tokens of an optimizer step are like, before its first micro-batch is learned from."""

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
    """The loss tokens of all micro-batches of a step, over all ranks, as the policy sees them now: one more forward.

    Quantiles and shares that a term takes over a step come from here, so they do not depend on how it is cut.

    Args:
        policy: Scored in evaluation mode.
        micro_batches: Of this rank's step.
        sampling: What drew the tokens.
        options: How the forward pass is computed.
        selection: Which of them the policy loss acts on.
        ranks: The step is of all of them.
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
