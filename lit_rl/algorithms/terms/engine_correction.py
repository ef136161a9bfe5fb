"""Importance weights for an engine that samples from a slightly different policy.

They compare the engine with the policy that took the rollout. If another term needs that policy's log-probs, weights
are made once, with the rollout. If no term does and a rollout is one optimizer step, the policy that took it is the one
that learns: the training's own forward pass computes its log-probs, the weights are made in the loss, and no extra pass
is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lit_rl.algorithms.signatures import unwrapped
from lit_rl.ops.correction import auto_correction
from lit_rl.ops.masking import masked_moments
from lit_rl.ops.mismatch import mismatch_metrics
from lit_rl.ops.reductions import StepTotals
from lit_rl.ops.step import Highest, Metrics, Summed
from lit_rl.rollout import Rollout


class EngineCorrection:
    """Weights and rejection of tokens by the ratio of the policy's to the engine's probability.

    Args:
        correction: `(old_logprobs, sampler_logprobs, mask) -> (b, t)`: the weights. None: no weights.
        rejection: `(old_logprobs, sampler_logprobs, mask) -> bool (b, t)`: the tokens that stay. None: all.
        normalisation: `(weights, totals) -> (b, t)`: the weights scaled to mean 1 over the step. None: unscaled.
        exact: Whether the generator samples from the very policy that learns, so that there is nothing to correct:
            `auto_correction` is off then.
    """

    def __init__(
        self,
        correction: Callable[..., Tensor] | None,
        rejection: Callable[..., Tensor] | None,
        normalisation: Callable[..., Tensor] | None,
        *,
        exact: bool,
    ) -> None:
        automatic = correction is not None and unwrapped(correction) is auto_correction
        self.correction = None if automatic and exact else correction
        self.rejection, self.normalisation = rejection, normalisation
        self.measures_mismatch = self.correction is not None or rejection is not None or not exact
        """True if the engine's log-probs are compared with the policy's: always if the generator is not exact."""
        self.needs_old_logprobs = bool(rejection or normalisation)
        """True if a term needs the weights before the loss is computed."""

    def at_rollout(self, rollout: Rollout, version: int) -> tuple[Rollout, Metrics]:
        """Add weights to the rollout and remove rejected tokens, if its old log-probs are known.

        Args:
            rollout: The rollout as it was drawn.
            version: The version of the policy now.
        """
        if not self.measures_mismatch:
            return rollout, {}
        staleness, old, mask = _staleness(rollout, version), rollout.old_logprobs, rollout.loss_mask
        if old is None:
            return rollout, staleness
        sampler = rollout.completions.sampler_logprobs
        keep = None if self.rejection is None else self.rejection(old, sampler, mask)
        weights, metrics = self._weights(old, sampler, mask, keep)
        rollout = replace(rollout, weights=weights, loss_mask=mask if keep is None else mask & keep)
        return rollout, staleness | metrics

    def in_loss(self, rollout: Rollout, logprobs: Tensor, totals: StepTotals) -> tuple[Tensor | None, Metrics]:
        """Return the weights `(b, t)` of a micro-batch, made here if the rollout has none; None for 1 everywhere.

        Args:
            rollout: The micro-batch.
            logprobs: `(b, t)` under the policy now.
            totals: Totals of the optimizer step.
        """
        if rollout.old_logprobs is not None or not self.measures_mismatch:
            weights = rollout.weights
            if weights is not None and self.normalisation is not None:
                weights = self.normalisation(weights, totals.weights)
            return weights, {}
        return self._weights(logprobs.detach(), rollout.completions.sampler_logprobs, rollout.loss_mask, keep=None)

    def _weights(
        self, old: Tensor, sampler: Tensor, mask: Tensor, keep: Tensor | None
    ) -> tuple[Tensor | None, Metrics]:
        weights = None if self.correction is None else self.correction(old, sampler, mask)
        metrics = mismatch_metrics(old, sampler, mask, weights, keep)
        if weights is not None:
            metrics |= {"sampling/ess": Summed(masked_moments(weights, mask), "effective_share")}
        return weights, metrics


def _staleness(rollout: Rollout, version: int) -> Metrics:
    """Return the number of optimizer steps since the weights that drew the completions, as metrics."""
    rows = torch.tensor(float(len(rollout)), device=rollout.rewards.device)
    age = torch.full_like(rows, version - rollout.completions.version)
    return {"sampling/staleness/mean": (age * rows, rows), "sampling/staleness/max": Highest(age)}
