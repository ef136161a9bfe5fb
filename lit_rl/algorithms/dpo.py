"""DPO: direct preference optimisation, arXiv:2305.18290, and the losses over log ratios of later papers.

For a prompt with a chosen completion c and a rejected one r, and y either of them:

    log ratio      rho_y = sum_t log pi(y_t) - log pi_ref(y_t)
    score          s_y = f(rho_y), f the divergence's (2309.16240); rho_y itself for the reverse KL
    objective      mean over pairs of sum_k weight_k preference_k(c, r); sigmoid is - log sigma(beta (s_c - s_r))

Off by default: a lower weight for tokens beyond the shorter completion (LD-DPO, 2409.06411), weights of pairs by their
likelihood under the policy (WPO, 2406.11827), and a moving reference (`reference=mixing`: TR-DPO, 2404.09656).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import preference_checks
from lit_rl.algorithms.families.pairs import ChosenRejected, Columns, PairModule, pair_metrics, policy_columns
from lit_rl.algorithms.terms.precomputed_reference import PrecomputedReference
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.examples import PairBatch
from lit_rl.models.forward import TextScores
from lit_rl.models.references import ReferenceFree
from lit_rl.ops.preference_losses import sums_of_pairs
from lit_rl.ops.reductions import Metrics, masked_mean
from lit_rl.settings.algorithms import DPOConfig
from lit_rl.settings.base import takes


class DPO(PairModule):
    """Direct preference optimisation."""

    @takes(DPOConfig)
    def __init__(self, settings: DPOConfig) -> None:
        super().__init__(config=settings)
        read = any(preference_checks.reads_reference(function) for function in self.preference.values())
        self.needs_reference = read and not isinstance(self.reference, ReferenceFree)
        preference_checks.check_divergence(self.preference, settings.divergence)
        if settings.likelihood_weights:
            preference_checks.check_pair_weights(self.preference)
        self.divergence, self.tail_weight = settings.divergence, settings.tail_weight
        self.likelihood_weights = settings.likelihood_weights
        self.precomputed = PrecomputedReference.of(
            self.reference, settings.precompute_reference, settings.reference_cache
        )

    def columns(self, batch: PairBatch, scores: TextScores) -> Columns:
        columns = policy_columns(batch, scores, tail_weight=self.tail_weight)
        ref = torch.zeros_like(columns["chosen"]), torch.zeros_like(columns["rejected"])
        if self.needs_reference:
            logprobs = self.ref_logprobs(batch)
            ref = sums_of_pairs(logprobs, batch.tokens.learned, tail_weight=self.tail_weight).chunk(2)
        return columns | {"ref_chosen": ref[0], "ref_rejected": ref[1]}

    def loss(self, batch: PairBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        scores = self.text_scores(batch.tokens, stats=True)
        columns = self.columns(batch, scores)
        weights = self._likelihoods(batch, scores) if self.likelihood_weights else None
        loss = self.preference_loss(batch, columns, whole, weights)
        loss, aux = self.with_aux(loss, scores.aux_loss, batch.totals)
        pairs = self.pairs(columns, batch)
        rewards = ChosenRejected(self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio)
        return loss, pair_metrics(rewards, ChosenRejected(pairs.chosen, pairs.rejected), batch, scores) | aux

    @torch.no_grad()
    def _likelihoods(self, batch: PairBatch, scores: TextScores) -> Tensor:
        """Return `(b,)`: exp of the mean of log pi(y_t) - log sum_v pi(v)^2 over a completion, for both multiplied."""
        assert scores.stats is not None
        aligned = scores.logprobs.detach() - scores.stats.log_sum_sq
        chosen, rejected = masked_mean(aligned, batch.tokens.learned, 1).exp().chunk(2)
        return chosen * rejected
