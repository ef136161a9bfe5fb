"""Every term of the policy in the order in which it enters the objective; see `policy_gradient`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import named, parameters
from lit_rl.algorithms.terms.engine_correction import weighed
from lit_rl.models.policy.forward import TokenScores
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.reductions import StepTotals
from lit_rl.ops.selection import off_policy_sequence_mask
from lit_rl.ops.step import Metrics, StepTokens
from lit_rl.rollout import Rollout

if TYPE_CHECKING:
    from lit_rl.algorithms.families.policy_gradient import PolicyGradient


def policy_objective(
    module: PolicyGradient, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None
) -> tuple[Tensor, Metrics]:
    """The policy's share of the objective, for a micro-batch whose tokens are scored already, and its metrics."""
    mask, logprobs = rollout.loss_mask, scores.logprobs
    old = logprobs.detach() if rollout.old_logprobs is None else rollout.old_logprobs
    weights, weighing = weighed(module, rollout, logprobs)

    offered = {"weights": weights, "step": step}
    loss = module.policy_loss
    per_token, metrics = loss(logprobs, old, rollout.advantages, mask, **named(loss, offered))
    metrics = metrics | weighing
    per_token, metrics = _near_enough(module, rollout, logprobs, old, per_token, metrics)
    acting = module.acting(scores.entropy, mask, step)
    if module.selection is not None:
        per_token = per_token * acting
    if weights is not None and "weights" not in parameters(loss):
        per_token = per_token * weights
    if rollout.ref_logprobs is not None:
        kl = module.kl(logprobs, rollout.ref_logprobs, old, **named(module.kl, {"mask": mask}))
        per_token = per_token + module.beta * module.kl_factor * kl
        metrics |= {"kl": (masked_sum(kl.detach(), mask), mask.sum())}

    objective = module.reduction(per_token, mask, totals)
    metrics |= {"entropy": (masked_sum(scores.entropy.detach(), mask), mask.sum())}
    if module.entropy is not None:
        one = torch.ones((), device=objective.device)
        metrics |= {"policy_loss": (objective.detach(), one / totals.micro_batches)}
        objective = objective - _entropy_bonus(module, scores.entropy, acting, totals, step)
    if module.router_aux_loss_coef:
        assert scores.aux_loss is not None
        # Balance is a property of a batch: the router's loss is defined for a micro-batch, and averaged over them.
        objective = objective + module.router_aux_loss_coef * scores.aux_loss / totals.micro_batches
        metrics |= {"aux_loss": (scores.aux_loss.detach(), torch.ones_like(scores.aux_loss))}
    return objective, metrics


def _near_enough(
    module: PolicyGradient, rollout: Rollout, logprobs: Tensor, old: Tensor, per_token: Tensor, metrics: Metrics
) -> tuple[Tensor, Metrics]:
    """Without rows that went too far from the policy that sampled them, where the advantage is negative."""
    threshold, mask = module.off_policy_threshold, rollout.loss_mask
    if threshold is None:
        return per_token, metrics
    sampler = rollout.completions.sampler_logprobs if module.correction is not None else old
    near = off_policy_sequence_mask(logprobs, sampler, rollout.advantages, mask, threshold=threshold)
    return per_token * near, metrics | {"off_policy_kept": (masked_sum(near.float(), mask), mask.sum())}


def _entropy_bonus(
    module: PolicyGradient, entropy: Tensor, acting: Tensor, totals: StepTotals, step: StepTokens | None
) -> Tensor:
    """The coefficient times this micro-batch's share of the mean entropy of the tokens that the policy loss acts on."""
    assert module.entropy is not None
    total = masked_sum(entropy, acting)
    module.entropy_seen(total.detach(), acting.sum())
    if module.selection is None:
        tokens = torch.as_tensor(totals.tokens)
    else:
        tokens = acting.sum() if step is None or step.acting is None else step.acting
    return module.entropy.coefficient * total / tokens.clamp(min=1)
