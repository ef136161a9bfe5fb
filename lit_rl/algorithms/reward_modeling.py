"""Reward modelling: training of models that score texts, from pairs (Bradley-Terry) and from labelled steps.

Pairs (`RewardModeling`, 2203.02155):

    r             score of prompt and completion at the last token, by a fresh linear head on the trunk
    objective     mean over pairs of the optimizer step of  -ls(r_c - r_r - m) + c (r_c + r_r)^2

`m` is the data's `margin` column, where there is one (2307.09288, eq. 2), and `c` is `center_coef` (2312.09244).

Steps (`ProcessRewardModeling`, 2305.20050, 2211.14275):

    x             logit of "right" less that of "wrong" at the last token of a step's separator
    objective     sum over labelled steps of  -y ls(x) - (1 - y) ls(-x)  / number of labelled steps, of the whole step

The second is the cross-entropy of two classes, which TRL trained up to 0.26. `ScalarModule` has what both share: the
head, the scores of `predict`, and the export.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_rl.algorithms.checks.model_sizes import StepFacts
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.chat_template import marks_start
from lit_rl.core.examples import PairBatch, StepwiseBatch, TokenBatch, Totals
from lit_rl.models.hf_export import ExportForm
from lit_rl.models.scoring import SEQUENCES, TOKENS, Scoring, check_scoring, load_scoring, scoring_logits
from lit_rl.ops.preference_losses import bradley_terry, step_label_loss
from lit_rl.ops.reductions import Highest, Lowest, Metrics, mean_of
from lit_rl.settings.algorithms import ProcessRewardModelingConfig, RewardModelingConfig, ScalarConfig
from lit_rl.settings.base import takes


class ScalarModule(OfflineModule, ABC):
    """Abstract base of scoring models: subclasses define what is scored, and the loss of the scores.

    Here the `policy` of the base classes is the scoring model.
    """

    scoring: ClassVar[Scoring]

    @takes(ScalarConfig)
    def __init__(self, settings: ScalarConfig) -> None:
        super().__init__(config=settings)

    def load_policy(self) -> nn.Module:
        return load_scoring(self.model, self.scoring)

    def step_facts(self) -> StepFacts:
        return replace(super().step_facts(), head="none")

    def setup(self, stage: str) -> None:
        check_scoring(self.model, self.scoring)
        super().setup(stage)

    def logits(self, tokens: TokenBatch) -> Tensor:
        """Return the logits in float32, with gradient: `(b, labels)`, or `(b, s, labels)` for tokens."""
        most = self.forward_options.most_rows
        if most is None or torch.is_grad_enabled():
            return scoring_logits(self.policy, tokens)[0]
        parts = torch.arange(len(tokens), device=tokens.input_ids.device).split(most)
        return torch.cat([scoring_logits(self.policy, tokens.take(rows))[0] for rows in parts])

    def logits_and_aux(self, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """Return the logits, and the router's load-balancing loss if that has a weight."""
        if self.router_aux_loss_coef == 0:
            return self.logits(tokens), None
        return scoring_logits(self.policy, tokens, router_aux=True)

    @abstractmethod
    def scores(self, batch: Any) -> dict[str, list[Any]]:
        """Return the scores of a batch, as columns for `predict`."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]]:
        return {"row": list(batch.rows), **self.scores(batch)}

    def reads(self) -> dict[str, Any]:
        """Return settings of the exported config that make texts be read as in training."""
        return {}

    @property
    def export_form(self) -> ExportForm:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ExportForm(scoring=self.scoring, reads=self.reads())


class RewardModeling(ScalarModule):
    """Training of a reward model, exported as a sequence classifier with one label.

    `lit_rl.rewards.RewardModel` loads the export, and gives the scores that were trained.
    """

    learns_from = "pairs"
    headline = ("loss", "accuracy", "margin")
    scoring = SEQUENCES
    reads_margins = True

    @takes(RewardModelingConfig)
    def __init__(self, settings: RewardModelingConfig) -> None:
        super().__init__(config=settings)
        self.center_coef = settings.center_coef

    def rewards(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Return the rewards of the chosen and of the rejected completions, `(b,)` each, with gradient."""
        return _sides(self.logits(batch.tokens))

    def loss(self, batch: PairBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        logits, aux_loss = self.logits_and_aux(batch.tokens)
        chosen, rejected = _sides(logits)
        rows = bradley_terry(chosen, rejected, batch.margins, center=self.center_coef)
        every = torch.ones(len(batch), dtype=torch.bool, device=rows.device)
        rewards = torch.cat([chosen, rejected]).detach()
        metrics: Metrics = {
            "accuracy": mean_of((chosen > rejected).float(), every),
            "margin": mean_of(chosen - rejected, every),
            "min_reward": Lowest(rewards.min()),
            "mean_reward": mean_of(rewards, every.repeat(2)),
            "max_reward": Highest(rewards.max()),
        }
        loss, aux = self.with_aux(rows.sum() / self.denominator(batch.totals), aux_loss, batch.totals)
        return loss, metrics | aux

    def scores(self, batch: PairBatch) -> dict[str, list[Any]]:
        chosen, rejected = self.rewards(batch)
        return {"chosen_reward": chosen.tolist(), "rejected_reward": rejected.tolist()}

    def reads(self) -> dict[str, Any]:
        return {"ends_with_eos": True, "prompt_apart": not marks_start(self.tokenizer)}


def _sides(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Split logits `(2 b, 1)` of pairs into `(b,)` of the chosen and `(b,)` of the rejected completions."""
    chosen, rejected = logits.squeeze(-1).chunk(2)
    return chosen, rejected


class ProcessRewardModeling(ScalarModule):
    """Training of a process reward model, exported as a token classifier with the labels "wrong" and "right".

    `lit_rl.rewards.ProcessRewardModel` loads the export, and scores the steps of completions with it.
    """

    learns_from = "stepwise"
    headline = ("loss", "accuracy")
    scoring = TOKENS

    @takes(ProcessRewardModelingConfig)
    def __init__(self, settings: ProcessRewardModelingConfig) -> None:
        super().__init__(config=settings)

    def denominator(self, totals: Totals) -> int:
        return max(1, totals.tokens)

    def step_logits(self, batch: StepwiseBatch) -> Tensor:
        """Return logits `(b, s)`, with gradient, of "right" against "wrong" for a step that ends at each token."""
        return _rightness(self.logits(batch.tokens))

    def loss(self, batch: StepwiseBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        assert batch.labels is not None
        class_logits, aux_loss = self.logits_and_aux(batch.tokens)
        logits, mask = _rightness(class_logits), batch.tokens.loss_mask
        is_right = (logits > 0) == (batch.labels > 0.5)
        total = step_label_loss(logits, batch.labels, mask).sum()
        loss, aux = self.with_aux(total / self.denominator(batch.totals), aux_loss, batch.totals)
        return loss, {"accuracy": mean_of(is_right, mask)} | aux

    def scores(self, batch: StepwiseBatch) -> dict[str, list[Any]]:
        right = self.step_logits(batch).sigmoid()
        return {"right": [row[mask].tolist() for row, mask in zip(right, batch.tokens.loss_mask)]}

    def reads(self) -> dict[str, Any]:
        options = getattr(getattr(self.trainer_or_none, "datamodule", None), "options", None)
        return {} if options is None else {"step_separator": options.separator}


def _rightness(logits: Tensor) -> Tensor:
    """Return the difference `(b, s)` of the two logits `(b, s, 2)`."""
    wrong, right = logits.unbind(-1)
    return right - wrong
