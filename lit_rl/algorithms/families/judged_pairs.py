"""The base of the online methods with a loss of pairs: a better completion and a worse one of each prompt."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.families.judged import JudgedModule
from lit_rl.algorithms.preflight import preferences
from lit_rl.algorithms.preflight.judged import pairs_stand_alone
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.models.policy.forward import TokenScores
from lit_rl.models.reference.base import ReferenceFree
from lit_rl.ops.masking import masked_sum
from lit_rl.ops.preference.losses import sigmoid
from lit_rl.ops.preference.pairs import Pairs
from lit_rl.ops.reductions import StepTotals
from lit_rl.ops.step import Metrics, mean_entropy, mean_of
from lit_rl.rollout import Rollout, select


class JudgedPairs(JudgedModule, ABC):
    """Abstract base of online methods with a loss of pairs: subclasses define the opponent and further terms.

    A rollout's `verdicts` are 1 for the better completion of a prompt, -1 for the worse one, and 0 for all others; a
    prompt with a tie or without a verdict has 0 only. The objective is a mean over the pairs of the optimizer step that
    have a verdict and are no tie, on all ranks, so it does not depend on how the step is split.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        preference: The loss of a pair, or several by name, which are added with their weights (MPO, 2411.10442).
        preference_weights: Weight of each of them by name (1 by default).
        per_token: Divide by the length in the losses that do so (ipo, sigmoid_norm, simpo). Off, a completion counts as
            one token for them: they read sums, as in TRL's online DPO. An error if no loss is one of these.
        shared: Arguments of every `JudgedModule`.
    """

    def __init__(
        self,
        model: Any,
        reward: Any = None,
        *,
        preference: Callable | dict[str, Callable] = sigmoid,
        preference_weights: dict[str, float] | None = None,
        per_token: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, **shared)
        self.preference = preferences.by_name(preference)
        self.preference_weights = preferences.weights(self.preference, preference_weights)
        self.per_token = per_token
        pairs_stand_alone(self.preference)
        if per_token:
            preferences.lengths_are_read(self.preference)

    @property
    def needs_reference(self) -> bool:
        return not isinstance(self.reference, ReferenceFree)

    # ------------------------------------------------------------------ choice of completions

    def advantages(
        self, scored: Scored, old: Tensor | None = None, ref: Tensor | None = None
    ) -> tuple[Rollout, Metrics]:
        completions, better = scored.completions, self.verdicts(scored)
        return self.as_rollout(
            scored,
            verdicts=better,
            loss_mask=completions.response_mask & (better != 0)[:, None],
            ref_logprobs=torch.zeros(completions.response_ids.shape, device=better.device) if ref is None else ref,
        ), {}

    def verdicts(self, scored: Scored) -> Tensor:
        """Return verdicts, float `(b,)`: 1 for the better completion of a prompt, -1 for the worse, 0 for others."""
        return best_and_worst(self.wins(scored)).flatten()

    def reference_of(self, scored: Scored) -> Tensor:
        """Return the reference's log-probs of the completions that are compared, 0 for the others."""
        return self.reference_in(compared(self.verdicts(scored), scored.completions.group_id), scored.completions)

    def replaced(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Keep the two compared completions of each prompt: the others are not learned from, and not run again."""
        assert rollout.verdicts is not None
        return select(rollout, compared(rollout.verdicts, rollout.completions.group_id)), {}

    # ------------------------------------------------------------------ loss

    def preference_loss(self, rollout: Rollout, scores: TokenScores, totals: StepTotals) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the weighted sum of the preference losses, and TRL's metrics."""
        beta, judged = self.at_epoch(self.beta), PairScores.of(rollout, scores, totals)
        count = pairs_of(totals).to(scores.logprobs.device)
        pairs = judged.pairs(self.per_token, count)
        loss = torch.zeros((), device=scores.logprobs.device)
        for name, function in self.preference.items():
            loss = loss + self.preference_weights[name] * function(pairs, beta).sum() / count
        return loss, judged.metrics(beta, scores)


def pairs_of(totals: StepTotals) -> Tensor:
    """Return the number of pairs of the optimizer step that are learned from, at least 1: each has two rows."""
    return (torch.as_tensor(totals.unmasked_sequences) / 2).clamp(min=1)


@dataclass(frozen=True)
class PairScores:
    """A micro-batch as pairs: rows `2 i` and `2 i + 1` belong to one prompt."""

    rollout: Rollout
    logprobs: Tensor
    """Float `(2 n,)`: log-probs of the completions under the policy, with gradient."""
    ref: Tensor
    """Float `(2 n,)`: log-probs of the completions under the reference."""
    nll: Tensor
    """Float `(2 n,)`: minus the log-probs over the better completion's tokens in the step, 0 of the worse one."""

    @classmethod
    def of(cls, rollout: Rollout, scores: TokenScores, totals: StepTotals) -> PairScores:
        mask, verdicts = rollout.completions.response_mask, rollout.verdicts
        assert rollout.ref_logprobs is not None and verdicts is not None
        # With these weights a sum over the better completions' tokens is a mean over those of the step.
        tokens = torch.as_tensor(totals.better_tokens).float().clamp(min=1)
        weights = (rollout.loss_mask & (verdicts > 0)[:, None]).float() / tokens
        weighted = masked_sum(scores.logprobs * weights, rollout.loss_mask, 1)
        sums = masked_sum(scores.logprobs, mask, 1), masked_sum(rollout.ref_logprobs, mask, 1)
        return cls(rollout, *sums, nll=-weighted)

    @property
    def better(self) -> Tensor:
        """The rows of the better completions, long `(m,)`, of `m` pairs with a verdict."""
        assert self.rollout.verdicts is not None
        return (self.rollout.verdicts > 0).nonzero().flatten()

    @property
    def worse(self) -> Tensor:
        """The rows of the worse completions, long `(m,)`."""
        return self.better ^ 1

    def pairs(self, per_token: bool, step_pairs: Tensor) -> Pairs:
        lengths = self.rollout.completions.lengths.float()
        lengths = lengths if per_token else torch.ones_like(lengths)
        return Pairs(
            chosen=self.logprobs.index_select(0, self.better),
            rejected=self.logprobs.index_select(0, self.worse),
            ref_chosen=self.ref[self.better],
            ref_rejected=self.ref[self.worse],
            chosen_tokens=lengths[self.better],
            rejected_tokens=lengths[self.worse],
            # Its mean over the pairs of the step is then the sum of `self.nll`.
            nll=self.nll.index_select(0, self.better) * step_pairs,
            nll_tokens=1.0,
            step_rows=1.0,
        )

    @torch.no_grad()
    def metrics(self, beta: float, scores: TokenScores) -> Metrics:
        """Return metrics under TRL's names, without padding; `rewards/*` and `logps/*` over the pairs learned from."""
        completions, rewards = self.rollout.completions, self.rollout.rewards
        every, scored = torch.ones_like(rewards, dtype=torch.bool), ~rewards.isnan()
        kl = self.logprobs - self.ref
        implicit = beta * kl
        chosen, rejected = implicit[self.better], implicit[self.worse]
        pairs = torch.ones_like(chosen, dtype=torch.bool)
        gap = (rewards[0::2] - rewards[1::2]).abs()
        return {
            "objective/kl": mean_of(kl, every),
            "objective/entropy": mean_of(-self.logprobs, every),
            "objective/non_score_reward": mean_of(-implicit, every),
            "objective/rlhf_reward": mean_of(rewards - implicit, scored),
            "objective/scores": mean_of(rewards, scored),
            "objective/scores_margin": mean_of(gap, ~gap.isnan()),
            "rewards/chosen": mean_of(chosen, pairs),
            "rewards/rejected": mean_of(rejected, pairs),
            "rewards/accuracies": mean_of((chosen > rejected).float(), pairs),
            "rewards/margins": mean_of(chosen - rejected, pairs),
            "logps/chosen": mean_of(self.logprobs[self.better], pairs),
            "logps/rejected": mean_of(self.logprobs[self.worse], pairs),
            "contain_eos_token": mean_of(completions.ended.float(), every),
        } | mean_entropy(scores.entropy, completions.response_mask)


def best_and_worst(wins: Tensor) -> Tensor:
    """Mark the highest of each row with 1 and the lowest with -1, float `(n, g)`; 0 for the others, and for ties.

    Args:
        wins: `(n, g)`; NaN is ignored. The first of equal values is the highest, and the lowest.
    """
    missing = wins.isnan()
    high = wins.masked_fill(missing, -torch.inf).max(1, keepdim=True)
    low = wins.masked_fill(missing, torch.inf).min(1, keepdim=True)
    found = torch.zeros_like(wins).scatter(1, high.indices, 1.0).scatter(1, low.indices, -1.0)
    return torch.where(high.values > low.values, found, 0.0)


def compared(better: Tensor, group_id: Tensor) -> Tensor:
    """Return the two compared rows of each prompt, long `(2 n,)`; the first two if no completion is better.

    Args:
        better: `(b,)`: 1, -1 and 0 as returned by `best_and_worst`.
        group_id: `(b,)`, contiguous groups of the same size.
    """
    size = int((group_id == group_id[0]).sum())
    # A stable sort keeps the order of rows with 0; the two rows are sorted by their place in the end.
    order = better.view(-1, size).abs().sort(dim=1, descending=True, stable=True).indices
    starts = torch.arange(0, len(better), size, device=better.device)
    return (starts[:, None] + order[:, :2].sort(dim=1).values).flatten()
