"""DPO: direct preference optimisation, arXiv:2305.18290, and the losses over log ratios of later papers.

For a prompt with a chosen completion c and a rejected one r, and y either of them:

    log ratio      rho_y = sum_t log pi(y_t) - log pi_ref(y_t)
    score          s_y = f(rho_y), f the divergence's (2309.16240); rho_y itself for the reverse KL
    objective      mean over pairs of sum_k weight_k preference_k(c, r); sigmoid is - log sigma(beta (s_c - s_r))

Off by default: a lower weight for tokens beyond the shorter completion (LD-DPO, 2409.06411), weights of pairs by their
likelihood under the policy (WPO, 2406.11827), and a moving reference (`reference=mixing`: TR-DPO, 2404.09656).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.checks import preference_checks
from lit_rl.algorithms.families.pairs import ChosenRejected, Columns, PairModule, pair_metrics, policy_columns
from lit_rl.algorithms.terms.precomputed_reference import PrecomputedReference
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.errors import in_range
from lit_rl.core.examples import PairBatch
from lit_rl.models.forward import TextScores
from lit_rl.models.loaded_model import ModelLike
from lit_rl.models.references import ReferenceFree
from lit_rl.ops.preference_losses import reverse_kl, sigmoid, sums_of_pairs
from lit_rl.ops.reductions import Metrics, masked_mean


class DPO(PairModule):
    """Direct preference optimisation.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions for the completions that validation generates. Nothing is learned from it.
        beta: Scale of the implicit reward beta (log pi - log pi_ref), above 0.
        preference: The loss of a pair, or several by name, which are added with their weights (MPO, 2411.10442).
        preference_weights: Weight of each of them by name (1 by default).
        divergence: The divergence from the reference, as a function from a log ratio to a score.
        tail_weight: Weight of the tokens beyond the shorter completion of a pair, in [0, 1] (LD-DPO). 1 is off.
        likelihood_weights: Weigh a pair by the policy's own likelihood of both completions (WPO, 2406.11827, eq. 2).
        precompute_reference: Compute the reference's log-probs of all rows once, before the first step, keep them on
            disk, and train without the reference in memory. Batches of `data.val_batch_size` rows; the same numbers.
        reference_cache: Folder for them; runs with the same data and reference share them. null: `cache` in `run_dir`.
        shared: Arguments of every `OfflinePolicyModule`.
    """

    def __init__(
        self,
        model: ModelLike,
        reward: Any = None,
        *,
        beta: float = 0.1,
        preference: Callable | dict[str, Callable] = sigmoid,
        preference_weights: dict[str, float] | None = None,
        divergence: Callable = reverse_kl,
        tail_weight: float = 1.0,
        likelihood_weights: bool = False,
        precompute_reference: bool = False,
        reference_cache: str | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(
            model, reward, beta=beta, preference=preference, preference_weights=preference_weights, **shared
        )
        in_range("algo.tail_weight", tail_weight, low=0, high=1)
        preference_checks.check_divergence(self.preference, divergence)
        if likelihood_weights:
            preference_checks.check_pair_weights(self.preference)
        self.divergence, self.tail_weight, self.likelihood_weights = divergence, tail_weight, likelihood_weights
        self.precomputed = PrecomputedReference.of(self.reference, precompute_reference, reference_cache)

    @property
    def needs_reference(self) -> bool:
        read = any(preference_checks.reads_reference(function) for function in self.preference.values())
        return read and not isinstance(self.reference, ReferenceFree)

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
