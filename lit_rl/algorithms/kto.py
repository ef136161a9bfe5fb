"""KTO: learning from completions labelled desirable or undesirable, without pairs, arXiv:2402.01306.

For a completion y, and y' a completion of another prompt:

    log ratio      rho_y = sum_t log pi(y_t) - log pi_ref(y_t)
    baseline       z0 = max(0, mean of rho_y' over the whole optimizer step), without gradient: about the KL
    objective      mean over rows of w_d sigma(-beta (rho - z0)) where desirable, w_u sigma(beta (rho - z0)) where not

`algo/verdict=apo_zero_unpaired` (2408.06266) takes 0 in place of z0, and scores no mismatched completions.

The weights w_d and w_u balance the two classes: the paper recommends w_d n_d / (w_u n_u) in [1, 4/3].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_rl.algorithms.checks.argument_checks import try_settings
from lit_rl.algorithms.chosen_functions import accepts_positional, setting_of
from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.terms.verdict_terms import RunLength, mismatched_texts
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import VerdictBatch
from lit_rl.data.example_set import ExampleSet
from lit_rl.models.forward import score_texts
from lit_rl.models.modes import evaluation_mode
from lit_rl.ops.reductions import Metrics, masked_sum
from lit_rl.settings.algorithms import KTOConfig
from lit_rl.settings.base import takes

BALANCE = (1.0, 4 / 3)
"""The range of w_d n_d / (w_u n_u) that section 4.2 of the paper recommends."""


class KTO(VerdictModule):
    """Kahneman-Tversky optimisation."""

    @takes(KTOConfig)
    def __init__(self, settings: KTOConfig) -> None:
        super().__init__(config=settings)
        zero = torch.zeros(1)
        baseline = [zero[0]] if _reads_baseline(settings.verdict) else []
        try_settings("verdict", partial(settings.verdict, zero, zero > 0, *baseline, 0.1))
        self.verdict = settings.verdict

    @property
    def couples_rows(self) -> bool:
        return _reads_baseline(self.verdict)

    def step_columns(self, batch: VerdictBatch) -> dict[str, Tensor]:
        return {"mismatched": self._mismatched(batch)}

    def loss(self, batch: VerdictBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        scores = self.text_scores(batch.tokens, stats=True)
        ratios, found, baseline = self.ratios(batch, scores), {}, []
        if self.couples_rows:
            others = self._mismatched(batch) if whole is None else whole.columns["mismatched"]
            baseline = [others.mean().clamp(min=0)]
            found = {"kl": (baseline[0], torch.ones_like(baseline[0]))}
        rows = self.verdict(ratios, batch.desirable, *baseline, self.beta)
        loss, aux = self.with_aux(rows.sum() / self.denominator(batch.totals), scores.aux_loss, batch.totals)
        return loss, self.verdict_metrics(batch, scores, ratios) | found | aux

    @torch.no_grad()
    def _mismatched(self, batch: VerdictBatch) -> Tensor:
        """Return `(b,)`: log pi - log pi_ref of the completion of the previous row, without dropout."""
        tokens = batch.mismatched
        assert tokens is not None
        with evaluation_mode(self.policy):
            logprobs = score_texts(self.policy, tokens, options=self.forward_options).logprobs
        return masked_sum(logprobs - self.ref_logprobs(batch, tokens), tokens.learned, dim=1)

    def extra_reference_texts(self) -> Iterable[tuple[str, ExampleSet]]:
        """Return the prompts of the run with their mismatched completions, which differ from epoch to epoch."""
        if not self.couples_rows:
            return ()
        data: Any = self.trainer.datamodule  # pyright: ignore
        epochs = RunLength.of(self.trainer).epochs(data.train_dataloader())
        return mismatched_texts(data.corpus.train, epochs, data.corpus.val)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = self.trainer.datamodule  # pyright: ignore
        if stage != "fit":
            return
        if self.couples_rows and self.precomputed is not None:
            RunLength.of(self.trainer).check()
        if self.couples_rows and data.batch_size < 2:
            raise ConfigError(
                "data.batch_size=1: the baseline of KTO is taken from completions of other rows of the step, so a step "
                "has 2 rows at least. Raise it, or take algo/verdict=apo_zero_unpaired, which has no baseline."
            )
        good = sum(bool(example.desirable) for example in data.corpus.train.examples)
        self._warn_of_imbalance(good, len(data.corpus.train) - good)

    def _warn_of_imbalance(self, good: int, bad: int) -> None:
        """Warn if the balance of the two classes is not what the paper recommends."""
        names = ("desirable_weight", "undesirable_weight")
        if not set(names) <= inspect.signature(self.verdict).parameters.keys():
            return
        good_weight, bad_weight = (setting_of(self.verdict, name) for name in names)
        good_total, bad_total = good_weight * good, bad_weight * bad
        low, high = BALANCE[0] * bad_total, BALANCE[1] * bad_total * (1 + 1e-6)
        if good_total and low <= good_total * (1 + 1e-6) and good_total <= high:
            return
        counts = f"Of the training rows {good} are desirable and {bad} are not"
        if not (good_total and bad_total):
            rank_zero_warn(f"{counts}, with weights {good_weight:g} and {bad_weight:g}: only one kind is learned from.")
            return
        up, down = (
            (f"{b * bad_total / good:.3g}" for b in BALANCE),
            (f"{good_total / b / bad:.3g}" for b in BALANCE[::-1]),
        )
        rank_zero_warn(
            f"{counts}, which weigh {good_total / bad_total:.3g} to 1; the paper recommends 1 to 1.33. Set "
            f"algo.verdict.desirable_weight to {' to '.join(up)}, or algo.verdict.undesirable_weight to "
            f"{' to '.join(down)}."
        )


def _reads_baseline(verdict: Callable) -> bool:
    """Tell whether it is `verdict(ratio, desirable, baseline, beta)`, not `verdict(ratio, desirable, beta)`."""
    return accepts_positional(verdict, 4)
