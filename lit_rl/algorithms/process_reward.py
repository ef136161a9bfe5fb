"""Process reward modelling: a model that predicts for each step of a solution whether it is right (2305.20050).

    x             logit of "right" less that of "wrong" at the last token of a step's separator
    objective     sum over labelled steps of  -y ls(x) - (1 - y) ls(-x)  / number of labelled steps, of the whole step

That is the cross-entropy of two classes, which TRL trained up to 0.26.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.families.scalar import ScalarModule
from lit_rl.algorithms.preflight import given
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.examples import StepwiseBatch, Totals
from lit_rl.models.policy.loaded import GivenModel
from lit_rl.models.scoring.model import TOKENS
from lit_rl.ops.preference.rewards import steps
from lit_rl.ops.step import Metrics, mean_of


class ProcessRewardModeling(ScalarModule):
    """Training of a process reward model, exported as a token classifier with the labels "wrong" and "right".

    `lit_rl.rewards.ProcessRewardModel` loads the export, and scores the steps of completions with it.

    Args:
        model: The language model whose trunk it starts from, or a process reward model to train further: a description,
            or its name, folder or hub id.
        shared: Arguments of every `ScalarModule`.
    """

    learns_from = "stepwise"
    headline = ("loss", "accuracy")
    scoring = TOKENS

    def __init__(self, model: GivenModel, **shared: Any) -> None:
        given.keywords(type(self), shared, ScalarModule)
        super().__init__(model, **shared)

    def denominator(self, totals: Totals) -> int:
        return max(1, totals.tokens)

    def step_logits(self, batch: StepwiseBatch) -> Tensor:
        """Return logits `(b, s)`, with gradient, of "right" against "wrong" for a step that ends at each token."""
        return _rightness(self.logits(batch.tokens))

    def loss(self, batch: StepwiseBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        assert batch.labels is not None
        both, aux_loss = self.logits_and_aux(batch.tokens)
        logits, mask = _rightness(both), batch.tokens.loss_mask
        found = (logits > 0) == (batch.labels > 0.5)
        total = steps(logits, batch.labels, mask).sum()
        loss, aux = self.with_aux(total / self.denominator(batch.totals), aux_loss, batch.totals)
        return loss, {"accuracy": mean_of(found, mask)} | aux

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
