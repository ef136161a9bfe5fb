"""What the tokens of an optimizer step are like, before its first micro-batch is learned from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from lit_rl.algorithms import ranks as over_ranks
from lit_rl.models.policy.forward import score
from lit_rl.ops.step import StepTokens
from lit_rl.rollout import Rollout

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.on_policy import OnPolicyModule


@torch.no_grad()
def look_ahead(module: OnPolicyModule, micro_batches: list[Rollout]) -> StepTokens:
    """The loss tokens of all micro-batches of a step, over all ranks, as the policy sees them now: one more forward.

    Quantiles and shares that a term takes over a step come from here, so they do not depend on how it is cut.
    """
    was_training = module.policy.training
    module.policy.eval()
    try:
        scores = [score(module.policy, micro.completions, module.sampling) for micro in micro_batches]
    finally:
        module.policy.train(was_training)
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
    step = StepTokens(**{name: over_ranks.all_tokens(module, flat) for name, flat in joint.items()})
    acting = [module.acting(seen.entropy, micro.loss_mask, step).sum() for micro, seen in zip(micro_batches, scores)]
    total = module.everyones(torch.stack(acting).sum()[None].float()).sum()
    return dataclasses.replace(step, acting=total)
