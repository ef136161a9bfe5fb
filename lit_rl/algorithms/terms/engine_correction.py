"""Weights against an engine that samples from a slightly other policy: whether there are any, and where they are made.

They compare the engine with the policy that took the rollout. Where another term needs that policy's log-probs, weights
are made once, with the rollout: `corrected`. Where nothing else does and a rollout is one optimizer step, the policy
that took it is the one that learns, so the training's own forward pass knows them, and no pass is spent on them:
`weighed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import inner
from lit_rl.generation.base import Generator
from lit_rl.models.policy.loading import drops_out
from lit_rl.ops.correction import auto_correction
from lit_rl.ops.masking import masked_moments
from lit_rl.ops.mismatch import mismatch_metrics
from lit_rl.ops.step import Effective, Highest, Metrics
from lit_rl.rollout import Rollout

if TYPE_CHECKING:
    from lit_rl.algorithms.families.policy_gradient import PolicyGradient

Correction = Callable[..., Tensor]


def resolved(correction: Correction | None, generator: Generator) -> Correction | None:
    """The correction in force: `auto_correction` is none where the generator draws from the very policy that learns."""
    if correction is not None and inner(correction) is auto_correction and generator.exact:
        return None
    return correction


def compares(module: PolicyGradient) -> bool:
    """Whether the engine's log-probs are held against the policy's: always where the engine is not the policy."""
    return module.correction is not None or module.rejection is not None or not module.generator.exact


def needs_a_pass(module: PolicyGradient) -> bool:
    """Whether the training's own forward pass will not do: with dropout it is that of a policy which drew nothing."""
    return compares(module) and module.policy is not None and drops_out(module.policy)


def corrected(module: PolicyGradient, rollout: Rollout) -> Rollout:
    """The rollout with weights, and without the tokens that are rejected, where its old log-probs are known."""
    if not compares(module):
        return rollout
    module.record(_staleness(module, rollout))
    old, mask = rollout.old_logprobs, rollout.loss_mask
    if old is None:
        return rollout
    sampler = rollout.completions.sampler_logprobs
    keep = None if module.rejection is None else module.rejection(old, sampler, mask)
    weights, metrics = _weights(module, old, sampler, mask, keep)
    module.record(metrics)
    return replace(rollout, weights=weights, loss_mask=mask if keep is None else mask & keep)


def weighed(module: PolicyGradient, rollout: Rollout, logprobs: Tensor) -> tuple[Tensor | None, Metrics]:
    """The weights of a micro-batch, and what is logged of them; made here where the rollout came without.

    Args:
        rollout: The micro-batch.
        logprobs: `(b, t)` under the policy now.
    """
    if rollout.old_logprobs is not None or not compares(module):
        return rollout.weights, {}
    return _weights(module, logprobs.detach(), rollout.completions.sampler_logprobs, rollout.loss_mask, keep=None)


def _weights(
    module: PolicyGradient, old: Tensor, sampler: Tensor, mask: Tensor, keep: Tensor | None
) -> tuple[Tensor | None, Metrics]:
    weights = None if module.correction is None else module.correction(old, sampler, mask)
    metrics = mismatch_metrics(old, sampler, mask, weights, keep)
    if weights is not None:
        metrics |= {"sampling/ess": Effective(masked_moments(weights, mask))}
    return weights, metrics


def _staleness(module: PolicyGradient, rollout: Rollout) -> Metrics:
    """How many optimizer steps the weights of now are ahead of those that drew the completions."""
    rows = torch.tensor(float(len(rollout)), device=rollout.rewards.device)
    age = torch.full_like(rows, module.step - rollout.completions.version)
    return {"sampling/staleness/mean": (age * rows, rows), "sampling/staleness/max": Highest(age)}
