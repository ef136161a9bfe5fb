"""What the methods share that learn from pairs by the log-probs of their completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.algorithms.loop.offline_policy import OfflinePolicyModule
from lit_rl.algorithms.preflight import given
from lit_rl.algorithms.preflight import preferences as pair_checks
from lit_rl.algorithms.signatures import copies_for
from lit_rl.algorithms.terms.whole_step import WholeStep, share_of
from lit_rl.errors import in_range
from lit_rl.examples import PairBatch
from lit_rl.models.policy.text_forward import TextScores
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.preference.divergences import reverse_kl
from lit_rl.ops.preference.losses import sigmoid
from lit_rl.ops.preference.pairs import Pairs, sums_of_pairs
from lit_rl.ops.step import Metrics, mean_entropy, mean_of

Preference = Callable[..., Tensor]
"""A function of `lit_rl.ops.preference`: `(pairs, beta)` to one loss a pair."""

Columns = dict[str, Tensor]
"""Columns `(b,)` by their name in `Pairs`."""


class PairModule(OfflinePolicyModule, ABC):
    """Abstract: subclasses say what the log-probs are compared with.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions for the completions that validation writes. Nothing is learned from it.
        beta: Scale of the implicit reward, above 0.
        preference: The loss of a pair, or several by name, whose weighted sum is learned (MPO, 2411.10442).
        preference_weights: Weight of each of them by name (1 where not given).
        shared: What every `OfflinePolicyModule` takes.
    """

    learns_from = "pairs"
    headline = ("loss", "rewards/accuracies", "rewards/margins")

    def __init__(
        self,
        model: Any,
        reward: Any = None,
        *,
        beta: float = 0.1,
        preference: Callable | dict[str, Callable] = sigmoid,
        preference_weights: dict[str, float] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, **shared)
        in_range("algo.beta", beta, low=0, open_low=True)
        self.beta = beta
        self.preference = pair_checks.by_name(preference)
        self.preference_weights = pair_checks.weights(self.preference, preference_weights)
        self.coupled_losses = pair_checks.over_step(self.preference)
        self.couples_rows = bool(self.coupled_losses)

    @abstractmethod
    def columns(self, batch: PairBatch, scores: TextScores) -> Columns:
        """The columns of `Pairs`, with gradient where the policy is in them."""

    divergence: Callable[[Tensor], Tensor] = staticmethod(reverse_kl)
    """What turns a log ratio into a score."""

    def pairs(self, columns: Columns, batch: PairBatch) -> Pairs:
        """The columns as what a loss reads."""
        return Pairs(**columns, **self._constants(batch))  # pyright: ignore[reportArgumentType]

    def _constants(self, batch: PairBatch) -> dict[str, Any]:
        """What a loss reads beside the columns: what the step counts, and the divergence."""
        totals = batch.totals
        return {
            "nll_tokens": float(totals.tokens),
            "step_rows": float(totals.rows),
            "divergence": self.divergence,
        }

    def look(self, batch: PairBatch) -> Columns:
        return self.columns(batch, self.text_scores(batch.tokens))

    def preference_loss(
        self, batch: PairBatch, columns: Columns, whole: WholeStep | None, weights: Tensor | None = None
    ) -> Tensor:
        """The weighted sum of the preference losses, this micro-batch's share.

        Args:
            batch: The micro-batch, of `b` pairs.
            columns: Its columns.
            whole: Those of the whole step, where a loss couples rows.
            weights: `(b,)`: what each pair's loss is multiplied by. None: 1.
        """
        total, constants = torch.zeros((), device=self.device), self._constants(batch)
        for name, function in self.preference.items():
            compared = partial(_losses_of_pairs, function, self.beta, constants)
            rows = share_of(compared, batch, whole if name in self.coupled_losses else None, **columns)
            if weights is not None:
                rows = rows * weights
            total = total + self.preference_weights[name] * rows.sum() / self.denominator(batch.totals)
        return total


def _losses_of_pairs(function: Preference, beta: float, constants: dict[str, Any], **columns: Tensor) -> Tensor:
    columns = dict(zip(columns, copies_for(function, *columns.values())))
    losses = function(Pairs(**columns, **constants), beta)
    given.of_shape("preference", losses, tuple(next(iter(columns.values())).shape[:1]))
    return losses


class Sides(NamedTuple):
    """One value `(b,)` of the chosen completions, and one of the rejected ones."""

    chosen: Tensor
    rejected: Tensor


@torch.no_grad()
def pair_metrics(rewards: Sides, logps: Sides, batch: PairBatch, scores: TextScores) -> Metrics:
    """TRL's metrics of a micro-batch.

    Args:
        rewards: What the method takes for the reward of a completion.
        logps: Log-probs of the completions.
        batch: The micro-batch.
        scores: Of its texts, with their statistics.
    """
    assert scores.stats is not None
    mask, every = batch.tokens.learned, torch.ones_like(rewards.chosen, dtype=torch.bool)
    of_chosen, of_rejected = mask.chunk(2)
    logits = scores.stats.mean_logit.chunk(2)
    return {
        "rewards/chosen": mean_of(rewards.chosen, every),
        "rewards/rejected": mean_of(rewards.rejected, every),
        "rewards/accuracies": mean_of((rewards.chosen > rewards.rejected).float(), every),
        "rewards/margins": mean_of(rewards.chosen - rewards.rejected, every),
        "logps/chosen": mean_of(logps.chosen, every),
        "logps/rejected": mean_of(logps.rejected, every),
        "logits/chosen": mean_of(logits[0], of_chosen),
        "logits/rejected": mean_of(logits[1], of_rejected),
        "mean_token_accuracy": mean_of(scores.stats.correct.chunk(2)[0], of_chosen),
    } | mean_entropy(scores.entropy, mask)


def policy_columns(batch: PairBatch, scores: TextScores, *, tail_weight: float = 1.0) -> Columns:
    """The columns of `Pairs` that the policy is in, and the lengths."""
    mask = batch.tokens.learned
    chosen, rejected = sums_of_pairs(scores.logprobs, mask, tail_weight=tail_weight).chunk(2)
    lengths = mask.sum(1).float().chunk(2)
    nll = -masked_sum(scores.logprobs, mask, dim=1).chunk(2)[0]
    return {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_tokens": lengths[0],
        "rejected_tokens": lengths[1],
        "nll": nll,
    }
