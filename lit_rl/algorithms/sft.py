"""SFT: supervised fine-tuning, the cross-entropy of texts.

    objective      sum over learned tokens of imitation(log pi(token)) / number of learned tokens, of the whole
                   optimizer step; imitation is - log pi, or DFT's - sg(pi) log pi (2508.05629)

The data module's `learn` sets which tokens are learned (the completion, the assistant's turns, all). Off by default:
noise on the embeddings in training (NEFTune, 2310.05914).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from lit_rl.algorithms.loop.offline import OfflinePolicyModule
from lit_rl.algorithms.rollouts.rollout_plan import mix
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.examples import TextBatch, Totals
from lit_rl.models.forward_inputs import noisy_embeddings
from lit_rl.models.language_model import ForwardOptions
from lit_rl.ops.reductions import Metrics, masked_sum, mean_entropy, mean_of
from lit_rl.settings.algorithms import SFTConfig
from lit_rl.settings.base import takes


class SFT(OfflinePolicyModule):
    """Supervised fine-tuning."""

    learns_from = "texts"
    headline = ("loss", "mean_token_accuracy")

    @takes(SFTConfig)
    def __init__(self, settings: SFTConfig) -> None:
        super().__init__(config=settings)
        self.imitation, self.neftune_alpha = settings.imitation, settings.neftune_alpha

    def denominator(self, totals: Totals) -> int:
        return max(1, totals.tokens)

    def loss(self, batch: TextBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        with self.noise(batch):
            scores = self.text_scores(batch.tokens, stats=True)
        mask = batch.tokens.learned
        assert scores.stats is not None
        loss = masked_sum(self.imitation(scores.logprobs), mask) / self.denominator(batch.totals)
        loss, aux = self.with_aux(loss, scores.aux_loss, batch.totals)
        metrics = {"mean_token_accuracy": mean_of(scores.stats.correct, mask)}
        return loss, mean_entropy(scores.entropy, mask) | metrics | aux

    @property
    def forward_options(self) -> ForwardOptions:
        """The base class's options; with noise in one call, as the noise covers the embeddings of a whole batch."""
        options = super().forward_options
        return options if self.neftune_alpha is None else options.in_one_call

    def noise(self, batch: TextBatch) -> AbstractContextManager[None]:
        """Return a context that adds noise to a batch's embeddings: equal for a row and step in every run."""
        if self.neftune_alpha is None or not self.policy.training:
            return nullcontext()
        keys = [mix(self.seed, batch.step, row) for row in batch.rows]
        return noisy_embeddings(self.policy, batch.tokens, self.neftune_alpha, keys)
