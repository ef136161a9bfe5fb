"""ORPO: odds ratio preference optimisation, without a reference, arXiv:2403.07691.

For a prompt x with a chosen completion c and a rejected one r, and y either of them:

    log-prob       m_y = mean over the tokens of y of log pi(y_t)
    odds           log odds(y) = m_y - log(1 - exp(m_y)), eq. 4
    likelihood     - sum over the tokens of x and c of log pi / number of them, of the whole optimizer step
    objective      likelihood + beta * mean over pairs of - log sigma(log odds(c) - log odds(r)), eq. 6 and 7

The likelihood covers prompt and completion, as in the authors' code and in TRL, without a text's first token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lit_rl.algorithms.families.pairs import ChosenRejected, pair_metrics
from lit_rl.algorithms.loop.offline import OfflinePolicyModule
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.examples import PairBatch
from lit_rl.ops.preference_losses import odds_ratio
from lit_rl.ops.reductions import Metrics, masked_mean, masked_sum, mean_of
from lit_rl.settings.algorithms import ORPOConfig
from lit_rl.settings.base import takes


class ORPO(OfflinePolicyModule):
    """Odds ratio preference optimisation."""

    learns_from = "pairs"
    headline = ("loss", "nll_loss", "rewards/accuracies", "log_odds_chosen")

    @takes(ORPOConfig)
    def __init__(self, settings: ORPOConfig) -> None:
        super().__init__(config=settings)
        self.beta = settings.beta

    def most_scored_tokens(self) -> int:
        return self.longest_text()  # the likelihood of a chosen text is that of its prompt, too

    def loss(self, batch: PairBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        tokens, totals = batch.tokens, batch.totals
        is_chosen = (torch.arange(len(tokens), device=tokens.input_ids.device) < len(tokens) // 2).unsqueeze(1)
        with_prompts = tokens.loss_mask | (tokens.attention_mask & is_chosen)  # of the chosen texts
        with_prompts[:, 0] = False  # no text's first token is predicted
        read = dataclasses.replace(tokens, loss_mask=with_prompts)
        scores, mask = self.text_scores(read, stats=True), tokens.learned
        means = masked_mean(scores.logprobs, mask, dim=1)
        losses, log_odds = odds_ratio(*means.chunk(2))
        chosen = read.learned & is_chosen
        nll = -masked_sum(scores.logprobs, chosen)
        loss = nll / max(1, totals.chosen_attended - totals.rows)
        loss = loss + self.beta * losses.sum() / self.denominator(totals)
        loss, aux = self.with_aux(loss, scores.aux_loss, totals)
        every = torch.ones_like(losses, dtype=torch.bool)
        own: Metrics = {
            "nll_loss": (nll.detach(), chosen.sum()),
            "log_odds_ratio": mean_of(-losses, every),
            "log_odds_chosen": mean_of(log_odds, every),
        }
        logps = ChosenRejected(*means.chunk(2))  # rewards and log-probs are means over tokens, as TRL logs them
        return loss, own | pair_metrics(
            ChosenRejected(*(self.beta * logp for logp in logps)), logps, batch, scores
        ) | aux
