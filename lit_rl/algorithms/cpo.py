"""CPO: preferences without a reference, with the likelihood of the chosen completions, arXiv:2401.08417.

For a prompt with a chosen completion c and a rejected one r, and y either of them:

    log-prob       l_y = sum_t log pi(y_t), and m_y = l_y / number of tokens of y
    objective      mean over pairs of sum_k weight_k preference_k(c, r)
                   - nll_coef sum over chosen tokens of log pi / number of chosen tokens, of the whole optimizer step

sigmoid is - log sigma(beta (l_c - l_r)), eq. 4 of the paper. SimPO (2405.14734) is the loss `simpo` of m_c and m_r with
`nll_coef` 0, CPO-SimPO the same with a likelihood, AlphaPO (2501.03884) the loss `alphapo`.
"""

from __future__ import annotations

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
from lit_rl.ops.reductions import Metrics
from lit_rl.settings.algorithms import CPOConfig
from lit_rl.settings.base import takes


class CPO(PairModule):
    """Contrastive preference optimisation."""

    @takes(CPOConfig)
    def __init__(self, settings: CPOConfig) -> None:
        super().__init__(config=settings)
        self.nll_coef = settings.nll_coef
        self.reward_of = per_token_reward(list(self.preference.values()))

    def columns(self, batch: PairBatch, scores: TextScores) -> Columns:
        columns = policy_columns(batch, scores)
        nothing = torch.zeros_like(columns["chosen"].detach())
        return columns | {"ref_chosen": nothing, "ref_rejected": nothing}

    def loss(self, batch: PairBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        scores = self.text_scores(batch.tokens, stats=True)
        columns = self.columns(batch, scores)
        loss = self.preference_loss(batch, columns, whole)
        nll, tokens = columns["nll"].sum(), columns["chosen_tokens"].sum()
        if self.nll_coef:
            loss = loss + self.nll_coef * nll / max(1, batch.totals.tokens)
        loss, aux = self.with_aux(loss, scores.aux_loss, batch.totals)
        rewards, logps = rewards_of_likelihood(columns, self.reward_of, self.beta)
        metrics = pair_metrics(rewards, logps, batch, scores)
        return loss, metrics | {"nll_loss": (nll.detach(), tokens)} | aux
