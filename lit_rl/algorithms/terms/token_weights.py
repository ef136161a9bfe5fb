"""The tokens that the policy loss acts on, and their weights: engine correction, rejection, selection.

Weights correct for an engine that samples from a slightly different policy: they compare it with the policy that took
the rollout. Where another term needs that policy's log-probs, weights are made once, with the rollout. Where no term
does and a rollout is one optimizer step, the policy that took it is the one that learns: the training's own forward
pass knows its log-probs, the weights are made in the loss, and no pass is spent on them.

Selections may depend on all tokens of an optimizer step; `step_tokens` gathers these in one more forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_rl.algorithms.chosen_functions import arguments_for, copies_for, reads_column, unwrap
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.core.rollout import Rollout, Sampling
from lit_rl.models.forward import score
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.modes import evaluation_mode
from lit_rl.ops.engine_mismatch import auto_correction, mismatch_metrics
from lit_rl.ops.reductions import Highest, Metrics, StepTokens, StepTotals, Summed, masked_moments, masked_sum
from lit_rl.ops.selection import off_policy_sequence_mask

# ------------------------------------------------------------------ engine correction


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
        automatic = correction is not None and unwrap(correction) is auto_correction
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
        rows = torch.tensor(float(len(rollout)), device=rollout.rewards.device)
        age = torch.full_like(rows, version - rollout.completions.version)  # in optimizer steps
        staleness: Metrics = {"sampling/staleness/mean": (age * rows, rows), "sampling/staleness/max": Highest(age)}
        old, mask = rollout.old_logprobs, rollout.loss_mask
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


# ------------------------------------------------------------------ selection


class TokenSelection:
    """A selection of the loss tokens that the policy loss acts on; the KL and the denominator have all of them.

    Args:
        choose: `(entropy, mask, ...) -> bool (b, t)`; it may also name `step`. It may be called several times for a
            micro-batch with the same result, so it has no state and is not random. None: all loss tokens.
    """

    def __init__(self, choose: Callable[..., Tensor] | None) -> None:
        self.choose = choose

    @property
    def needs_step(self) -> bool:
        """True if the selection depends on all tokens of an optimizer step."""
        return self.choose is not None and reads_column(self.choose, "step")

    def __call__(self, entropy: Tensor | None, mask: Tensor, step: StepTokens | None) -> Tensor:
        """Return the selected tokens, bool `(b, t)`, a subset of `mask`.

        Args:
            entropy: `(b, t)` in nats. May be None if all loss tokens are chosen.
            mask: Loss mask.
            step: The loss tokens of the whole step. None: this micro-batch is the whole step.
        """
        if self.choose is None:
            return mask
        assert entropy is not None
        return mask & self.choose(
            *copies_for(self.choose, entropy.detach(), mask), **arguments_for(self.choose, {"step": step})
        )

    def count(self, selected: Tensor, totals: StepTotals, step: StepTokens | None) -> Tensor:
        """Return the number of tokens of the whole step that the loss acts on."""
        if self.choose is None:
            return torch.as_tensor(totals.tokens)
        return selected.sum() if step is None or step.selected is None else step.selected


class OffPolicyMask:
    """A mask that drops rows with a negative advantage whose policy moved too far from the one that sampled them.

    Args:
        threshold: Distance in nats a token, above 0 (2512.02556, eq. 9). None masks nothing.
    """

    def __init__(self, threshold: float | None) -> None:
        self.threshold = threshold

    def __call__(
        self, per_token: Tensor, logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return the losses `(b, t)` with 0 in masked rows, and the share of tokens that stay.

        Args:
            per_token: Losses.
            logprobs: `(b, t)` of the policy now.
            sampler_logprobs: `(b, t)` of the policy that sampled them.
            advantages: `(b,)` or `(b, t)`.
            mask: Loss mask.
        """
        if self.threshold is None:
            return per_token, {}
        near = off_policy_sequence_mask(logprobs, sampler_logprobs, advantages, mask, threshold=self.threshold)
        return per_token * near, {"off_policy_kept": (masked_sum(near.float(), mask), mask.sum())}


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
        token_scores = [
            score(policy, micro.completions, sampling, entropy=True, options=options) for micro in micro_batches
        ]
    parts = [
        StepTokens.of(
            micro.loss_mask,
            logprobs=scores.logprobs,
            old_logprobs=micro.old_logprobs,
            advantages=micro.advantages,
            entropy=scores.entropy,
        )
        for micro, scores in zip(micro_batches, token_scores)
    ]
    names = ("logprobs", "old_logprobs", "advantages", "entropy")
    joint = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    step = StepTokens(**{name: ranks.gather_tokens(flat) for name, flat in joint.items()})
    selected = [
        selection(scores.entropy, micro.loss_mask, step).sum() for micro, scores in zip(micro_batches, token_scores)
    ]
    total = ranks.gather(torch.stack(selected).sum()[None].float()).sum()
    return dataclasses.replace(step, selected=total)
