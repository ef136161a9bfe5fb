"""TPO: preferences without a reference model, with the likelihood of a third completion, arXiv:2405.16681.

For a prompt with a chosen completion c, a rejected one r and a gold one g, the data's `reference`:

    log-prob       l_y = sum_t log pi(y_t), and m_y = l_y / number of tokens of y
    objective      mean over triples of sum_k weight_k preference_k(c, r)
                   - nll_coef sum over gold tokens of log pi / number of gold tokens, of the whole optimizer step

sigmoid is - log sigma(beta (l_c - l_r)); TPO-L is the loss `simpo` of m_c and m_r, with gamma 0.5.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_rl.algorithms.families.pairs import (
    Columns,
    PairModule,
    pair_metrics,
    per_token_reward,
    policy_columns,
    rewards_of_likelihood,
)
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.examples import PairBatch
from lit_rl.models.forward import TextScores
from lit_rl.ops.reductions import Metrics, masked_sum, mean_entropy
from lit_rl.settings.algorithms import TPOConfig
from lit_rl.settings.base import takes


class TPO(PairModule):
    """Triple preference optimisation."""

    learns_from = "triples"

    @takes(TPOConfig)
    def __init__(self, settings: TPOConfig) -> None:
        super().__init__(config=settings)
        self.nll_coef = settings.nll_coef
        self.reward_of = per_token_reward(list(self.preference.values()))

    def columns(self, batch: PairBatch, scores: TextScores) -> Columns:
        columns = policy_columns(*_pairs_of(batch, scores))
        nothing, gold = torch.zeros_like(columns["chosen"].detach()), slice(2 * len(batch), None)
        nll = -masked_sum(scores.logprobs[gold], batch.tokens.learned[gold], dim=1)
        return columns | {"ref_chosen": nothing, "ref_rejected": nothing, "nll": nll}

    def loss(self, batch: PairBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        scores, learned = self.text_scores(batch.tokens, stats=True), batch.tokens.learned
        columns = self.columns(batch, scores)
        loss = self.preference_loss(batch, columns, whole)
        nll = columns["nll"].sum()
        loss = loss + self.nll_coef * nll / max(1, batch.totals.tokens)
        loss, aux = self.with_aux(loss, scores.aux_loss, batch.totals)
        rewards, logps = rewards_of_likelihood(columns, self.reward_of, self.beta)
        metrics = pair_metrics(rewards, logps, *_pairs_of(batch, scores)) | mean_entropy(scores.entropy, learned)
        return loss, metrics | {"nll_loss": (nll.detach(), learned[2 * len(batch) :].sum())} | aux


def _pairs_of(batch: PairBatch, scores: TextScores) -> tuple[PairBatch, TextScores]:
    """Return the triples without their gold completions, and the scores of these texts."""
    rows = slice(0, 2 * len(batch))
    entropy = None if scores.entropy is None else scores.entropy[rows]
    stats = scores.stats and replace(
        scores.stats, **{name: column[rows] for name, column in vars(scores.stats).items()}
    )
    pairs = replace(scores, logprobs=scores.logprobs[rows], entropy=entropy, stats=stats)
    return replace(batch, tokens=batch.tokens.take(rows)), pairs
