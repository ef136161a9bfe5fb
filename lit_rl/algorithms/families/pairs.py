"""The base of the methods that learn from pairs by the log-probs of their completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_rl.algorithms.checks import preference_checks
from lit_rl.algorithms.checks.strategy_checks import Feature
from lit_rl.algorithms.chosen_functions import check_shape, copies_for, setting_of, unwrap
from lit_rl.algorithms.loop.offline import OfflinePolicyModule
from lit_rl.algorithms.terms.whole_step import WholeStep, micro_batch_share
from lit_rl.core.examples import PairBatch
from lit_rl.models.forward import TextScores
from lit_rl.ops.preference_losses import Pairs, alpha_reward, alphapo, reverse_kl, sums_of_pairs
from lit_rl.ops.reductions import Metrics, masked_sum, mean_entropy, mean_of
from lit_rl.ops.traits import PreferenceTraits, traits_of
from lit_rl.settings.algorithms import PairConfig
from lit_rl.settings.base import takes

Preference = Callable[..., Tensor]
"""A function of `lit_rl.ops.preference_losses`: `(pairs, beta)` to the loss of each pair."""

Columns = dict[str, Tensor]
"""Columns `(b,)` by their name in `Pairs`."""


class PairModule(OfflinePolicyModule, ABC):
    """Abstract base of methods that learn from pairs: subclasses define what the log-probs are compared with."""

    learns_from = "pairs"
    headline = ("loss", "rewards/accuracies", "rewards/margins")

    @takes(PairConfig)
    def __init__(self, settings: PairConfig) -> None:
        super().__init__(config=settings)
        self.beta = settings.beta
        self.preference = preference_checks.losses_by_name(settings.preference)
        self.preference_weights = preference_checks.loss_weights(self.preference, settings.preference_weights)
        self.coupled_losses = preference_checks.losses_over_step(self.preference)
        self.couples_rows = bool(self.coupled_losses)

    def features(self) -> Iterator[Feature]:
        yield from super().features()
        if self.coupled_losses:
            yield Feature("coupled loss", "A loss that couples the rows of a step", "Leave it out")

    @abstractmethod
    def columns(self, batch: PairBatch, scores: TextScores) -> Columns:
        """Return the columns of `Pairs`, with the gradient of the policy."""

    divergence: Callable[[Tensor], Tensor] = staticmethod(reverse_kl)
    """The function from a log ratio to a score."""

    def pairs(self, columns: Columns, batch: PairBatch) -> Pairs:
        """Return the argument of a preference loss, made of the columns."""
        return Pairs(**columns, **self._constants(batch))  # pyright: ignore[reportArgumentType]

    def _constants(self, batch: PairBatch) -> dict[str, Any]:
        """Return the arguments of a loss that are no columns: totals of the step, and the divergence."""
        totals = batch.totals
        return {
            "nll_tokens": float(totals.tokens),
            "step_rows": float(totals.rows),
            "divergence": self.divergence,
        }

    def step_columns(self, batch: PairBatch) -> Columns:
        return self.columns(batch, self.text_scores(batch.tokens))

    def preference_loss(
        self, batch: PairBatch, columns: Columns, whole: WholeStep | None, weights: Tensor | None = None
    ) -> Tensor:
        """Return this micro-batch's share of the weighted sum of the preference losses.

        Args:
            batch: The micro-batch, of `b` pairs.
            columns: The columns of the micro-batch.
            whole: The columns of the whole step, if a loss couples rows.
            weights: `(b,)`: a factor for each pair's loss. None: 1.
        """
        total, constants = torch.zeros((), device=self.device), self._constants(batch)
        for name, function in self.preference.items():
            compared = partial(_losses_of_pairs, function, self.beta, constants)
            if whole is not None and name in self.coupled_losses:
                rows = micro_batch_share(compared, batch, whole, **columns)
            else:
                rows = compared(**columns)
            if weights is not None:
                rows = rows * weights
            total = total + self.preference_weights[name] * rows.sum() / self.denominator(batch.totals)
        return total


def _losses_of_pairs(function: Preference, beta: float, constants: dict[str, Any], **columns: Tensor) -> Tensor:
    columns = dict(zip(columns, copies_for(function, *columns.values())))
    losses = function(Pairs(**columns, **constants), beta)
    check_shape("preference", losses, tuple(next(iter(columns.values())).shape[:1]))
    return losses


class ChosenRejected(NamedTuple):
    """Values `(b,)` of the chosen and of the rejected completions."""

    chosen: Tensor
    rejected: Tensor


@torch.no_grad()
def pair_metrics(rewards: ChosenRejected, logps: ChosenRejected, batch: PairBatch, scores: TextScores) -> Metrics:
    """Return TRL's metrics of a micro-batch.

    Args:
        rewards: The method's implicit rewards of the completions.
        logps: Log-probs of the completions.
        batch: The micro-batch.
        scores: Log-probs of its texts, with statistics.
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
    """Return the columns of `Pairs` that depend on the policy, and the lengths."""
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


def per_token_reward(preferences: list[Callable]) -> Callable[[Tensor], Tensor] | None:
    """Return the reward of a log-prob per token, without beta; None if one of the losses reads sums over tokens."""
    declared = [traits_of(function, PreferenceTraits) for function in preferences]
    if not all(traits is not None and traits.per_token for traits in declared):
        return None
    is_alphapo = len(preferences) == 1 and unwrap(preferences[0]) is alphapo
    return partial(alpha_reward, alpha=setting_of(preferences[0], "alpha")) if is_alphapo else lambda mean: mean


def rewards_of_likelihood(
    columns: Columns, reward_of: Callable[[Tensor], Tensor] | None, beta: float
) -> tuple[ChosenRejected, ChosenRejected]:
    """Return rewards and log-probs of a method without a reference as TRL logs them: per token if every loss is.

    Args:
        columns: Columns of the pairs.
        reward_of: The reward of a log-prob per token; None: losses are of sums.
        beta: Scale of the rewards.
    """
    logps = ChosenRejected(columns["chosen"], columns["rejected"])
    if reward_of is not None:
        lengths = columns["chosen_tokens"], columns["rejected_tokens"]
        logps = ChosenRejected(*(logp / length.clamp(min=1) for logp, length in zip(logps, lengths)))
    return ChosenRejected(*(beta * (reward_of(logp) if reward_of else logp) for logp in logps)), logps
