"""Reward modelling: a model that scores texts, from pairs, by the likelihood of the choice (Bradley-Terry, 2203.02155).

    r             score of prompt and completion at the last token, by a fresh linear head on the trunk
    objective     mean over pairs of the optimizer step of  -ls(r_c - r_r - m) + c (r_c + r_r)^2

`m` is the data's `margin` column, where there is one (2307.09288, eq. 2), and `c` is `center_coef` (2312.09244).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.families.scalar import ScalarModule
from lit_rl.algorithms.preflight import given
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.continuation import marks_start
from lit_rl.errors import in_range
from lit_rl.examples import PairBatch
from lit_rl.models.policy.loaded import GivenModel
from lit_rl.models.scoring.model import SEQUENCES
from lit_rl.ops.preference.rewards import bradley_terry
from lit_rl.ops.step import Highest, Lowest, Metrics, mean_of


class RewardModeling(ScalarModule):
    """Training of a reward model, exported as a sequence classifier with one label.

    `lit_rl.rewards.RewardModel` loads the export, and gives the scores that were trained.

    Args:
        model: The language model whose trunk it starts from, or a reward model to train further: a description, or its
            name, folder or hub id.
        center_coef: Weight, at least 0, of the term that pulls the sum of a pair's two rewards to 0, which preferences
            leave open. TRL recommends 0.01.
        shared: Arguments of every `ScalarModule`.
    """

    learns_from = "pairs"
    headline = ("loss", "accuracy", "margin")
    scoring = SEQUENCES
    reads_margins = True

    def __init__(self, model: GivenModel, *, center_coef: float = 0.0, **shared: Any) -> None:
        given.keywords(type(self), shared, ScalarModule)
        super().__init__(model, **shared)
        in_range("algo.center_coef", center_coef, low=0)
        self.center_coef = center_coef

    def rewards(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Return the rewards of the chosen and of the rejected completions, `(b,)` each, with gradient."""
        return _sides(self.logits(batch.tokens))

    def loss(self, batch: PairBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        logits, aux_loss = self.logits_and_aux(batch.tokens)
        chosen, rejected = _sides(logits)
        rows = bradley_terry(chosen, rejected, batch.margins, center=self.center_coef)
        every = torch.ones(len(batch), dtype=torch.bool, device=rows.device)
        both = torch.cat([chosen, rejected]).detach()
        metrics: Metrics = {
            "accuracy": mean_of((chosen > rejected).float(), every),
            "margin": mean_of(chosen - rejected, every),
            "min_reward": Lowest(both.min()),
            "mean_reward": mean_of(both, every.repeat(2)),
            "max_reward": Highest(both.max()),
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
