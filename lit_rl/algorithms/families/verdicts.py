"""The base of the methods that learn from single completions, each labelled desirable or undesirable."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor

from lit_rl.algorithms.loop.offline import OfflinePolicyModule
from lit_rl.algorithms.terms.precomputed_reference import PrecomputedReference
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import VerdictBatch
from lit_rl.models.forward import TextScores
from lit_rl.models.references import ReferenceFree
from lit_rl.ops.reductions import Metrics, masked_sum, mean_entropy, mean_of
from lit_rl.settings.algorithms import VerdictConfig
from lit_rl.settings.base import takes


class VerdictModule(OfflinePolicyModule, ABC):
    """Abstract base: subclasses define what a reward is compared with. A pair counts as two labelled completions."""

    learns_from = "verdicts"
    headline = ("loss", "rewards/margins")
    needs_reference = True

    @takes(VerdictConfig)
    def __init__(self, settings: VerdictConfig) -> None:
        super().__init__(config=settings)
        if isinstance(self.reference, ReferenceFree):
            raise ConfigError(
                f"reference=free: a verdict of {type(self).__name__} says whether the policy is to write a completion "
                "more or less often than a reference does, so there has to be one. Take reference=auto."
            )
        self.beta = settings.beta
        self.precomputed = PrecomputedReference.of(
            self.reference, settings.precompute_reference, settings.reference_cache
        )

    def ratios(self, batch: VerdictBatch, scores: TextScores) -> Tensor:
        """Return `(b,)`: log pi - log pi_ref of each completion, summed over its tokens, with gradient."""
        return masked_sum(scores.logprobs - self.ref_logprobs(batch), batch.tokens.learned, dim=1)

    @torch.no_grad()
    def verdict_metrics(self, batch: VerdictBatch, scores: TextScores, ratios: Tensor) -> Metrics:
        """Return TRL's metrics of a micro-batch, and the counts of rows by verdict. Means over no rows are NaN."""
        good, mask, rewards = _desirable(batch), batch.tokens.learned, self.beta * ratios
        metrics = mean_entropy(scores.entropy, mask)
        logps = masked_sum(scores.logprobs, mask, dim=1)
        steps = rewards.new_full((), 1 / batch.totals.shares)  # all micro-batches of a step sum to 1
        for name, rows in (("chosen", good), ("rejected", ~good)):
            metrics[f"count/{name}"] = (rows.sum(), steps)
            metrics[f"rewards/{name}"] = mean_of(rewards, rows)
            metrics[f"logps/{name}"] = mean_of(logps, rows)
            if scores.stats is not None:
                metrics[f"logits/{name}"] = mean_of(scores.stats.mean_logit, mask & rows.unsqueeze(1))
        return metrics | self._margin(batch, rewards)

    def _margin(self, batch: VerdictBatch, rewards: Tensor) -> Metrics:
        """Return the difference of two means over the step, undefined in a step with one kind of verdict only."""
        totals, good = batch.totals, _desirable(batch)
        if not 0 < totals.desirable < totals.rows:
            nothing = rewards.new_zeros(())
            return {"rewards/margins": (nothing, nothing)}
        weights = torch.where(good, 1 / totals.desirable, -1 / (totals.rows - totals.desirable))
        # A step weighs as many rows as it has.
        return {"rewards/margins": (totals.rows * (weights * rewards).sum(), rewards.new_full((), float(len(batch))))}


def _desirable(batch: VerdictBatch) -> Tensor:
    assert batch.desirable is not None
    return batch.desirable
