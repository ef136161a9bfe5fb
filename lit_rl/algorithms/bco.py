"""BCO: binary classifier optimisation, from single completions labelled desirable or undesirable, arXiv:2404.04656.

For a completion y of a prompt x:

    reward         r_y = beta (sum_t log pi(y_t) - log pi_ref(y_t))
    reward shift   delta = mean of the mean rewards of all optimizer steps up to this one, without gradient
    objective      mean over rows of - log sigma(r - delta) where desirable, - w(x) log sigma(delta - r) where not

`w` is 1. With `algo/prompt_weights=density_ratio` it is the ratio of the densities of such a prompt among desirable and
undesirable completions (the paper's underlying distribution matching), by a regression on the reference's hidden
states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.checks.data_and_trainer import NeedsAllRows
from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.terms.verdict_terms import PromptWeights, RewardShift, prompt_embeddings
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import TokenBatch, VerdictBatch
from lit_rl.data.example_set import Example
from lit_rl.ops.preference_losses import bco
from lit_rl.ops.reductions import Metrics
from lit_rl.settings.algorithms import BCOConfig
from lit_rl.settings.base import takes


class BCO(VerdictModule):
    """Binary classifier optimisation."""

    couples_rows = True

    @takes(BCOConfig)
    def __init__(self, settings: BCOConfig) -> None:
        super().__init__(config=settings)
        if settings.prompt_weights is not None and self.reference.moves:
            raise ConfigError(
                f"algo/prompt_weights=density_ratio embeds prompts with the reference, and reference="
                f"{type(self.reference).__name__} changes during the run. Take reference=auto or reference=frozen_copy."
            )
        self.prompt_weights = None if settings.prompt_weights is None else PromptWeights(settings.prompt_weights)
        self.shift = RewardShift()
        self._step_reward: Tensor | None = None

    def step_columns(self, batch: VerdictBatch) -> dict[str, Tensor]:
        return {"rewards": self.beta * self.ratios(batch, self.text_scores(batch.tokens))}

    def loss(self, batch: VerdictBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        return self._loss(batch, whole)[:2]

    def training_loss(self, batch: VerdictBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        """Return the same as `loss`, and keep the mean reward of the step for `after_step`."""
        loss, metrics, self._step_reward = self._loss(batch, whole)
        return loss, metrics

    def _loss(self, batch: VerdictBatch, whole: WholeStep | None) -> tuple[Tensor, Metrics, Tensor]:
        """Return loss, metrics and the mean reward of the step. Validation does not change the shift."""
        scores = self.text_scores(batch.tokens, stats=True)
        ratios = self.ratios(batch, scores)
        rewards = self.beta * ratios.detach() if whole is None else whole.columns["rewards"]
        mean = rewards.mean()
        delta = self.shift.with_step(mean) if self.training else mean.new_tensor(self.shift.value)
        rows = bco(ratios, batch.desirable, delta, self.beta, self._weights(batch))  # pyright: ignore
        loss, aux = self.with_aux(rows.sum() / self.denominator(batch.totals), scores.aux_loss, batch.totals)
        metrics = self.verdict_metrics(batch, scores, ratios) | {"delta": (delta, torch.ones_like(delta))} | aux
        return loss, metrics, mean

    def after_step(self) -> None:
        super().after_step()
        if self._step_reward is not None and not self.broken_steps.last:
            self.shift.add(float(self._step_reward))
        self._step_reward = None

    def rank_state(self) -> dict[str, Any]:
        weights = self.prompt_weights.ratio.state() if self.prompt_weights else {}
        return super().rank_state() | self.shift.state() | {"prompt_weights": weights}

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        super().load_rank_state(saved)
        self.shift.load_state(saved)
        if self.prompt_weights:
            self.prompt_weights.ratio.load_state(saved["prompt_weights"])

    def merge_rank_states(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the first rank: shift and weights are the same on all ranks."""
        return dict(saved[0]) | super().merge_rank_states(saved)

    # ------------------------------------------------------------------ prompt weights

    def _weights(self, batch: VerdictBatch) -> Tensor | None:
        """Return the weights `(b,)`: the density ratio for undesirable rows, 1 for the others. None: 1 everywhere."""
        if self.prompt_weights is None:
            return None
        return torch.where(batch.desirable, 1.0, self.prompt_weights.of(batch.tokens, self.embed))  # pyright: ignore

    @torch.no_grad()
    def embed(self, tokens: TokenBatch, prompts: Tensor) -> Tensor:
        """Return the reference's embeddings `(b, h)` of the prompts, the tokens under the mask `(b, s)`."""
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            return prompt_embeddings(scorer, tokens.input_ids, prompts)

    def match_prompts(self, examples: Sequence[Example]) -> None:
        """Fit the density ratio to a sample of the training rows, the same on every rank. A collective.

        Raises:
            ConfigError: the sample has only desirable or only undesirable completions.
        """
        assert self.prompt_weights is not None
        self.prompt_weights.fit(examples, self.embed, seed=self.seed, pad_id=self.model.pad_id, ranks=self.ranks)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._match_once()

    def on_validation_start(self) -> None:
        self._match_once()

    on_test_start = on_validation_start

    def _match_once(self) -> None:
        """Fit the density ratio, unless a checkpoint restored it."""
        if self.prompt_weights is not None and not self.prompt_weights.ratio.fitted:
            data: Any = self.trainer.datamodule  # pyright: ignore
            with self.rollout_context():
                self.match_prompts(data.corpus.train.examples)

    def before_release(self) -> None:
        """Embed every prompt of the run with the reference."""
        if self.prompt_weights is None:
            return
        self._match_once()
        corpus: Any = self.trainer.datamodule.corpus  # pyright: ignore
        rows = [example for data in (corpus.train, *corpus.val.values()) for example in data.examples]
        with self.rollout_context():
            self.prompt_weights.compute(rows, self.embed, pad_id=self.model.pad_id, device=self.device)

    def reads_all_rows(self) -> Iterator[NeedsAllRows]:
        yield from super().reads_all_rows()
        if self.prompt_weights is not None:
            yield NeedsAllRows(
                "algo/prompt_weights=density_ratio is fitted to a sample of", "take algo/prompt_weights=none"
            )
