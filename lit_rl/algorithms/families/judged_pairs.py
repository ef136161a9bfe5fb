"""What the online methods share that learn by a loss of pairs: a better completion and a worse one of each prompt."""

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
    """Abstract: subclasses say what the completions are compared with.

    A rollout's `verdicts` say what the judge found: 1 for the better completion of a prompt, -1 for the worse one, 0
    for all others; a prompt of a tie or without a verdict has none but 0. The objective is a mean over the pairs of the
    optimizer step that have a verdict and are no tie, on all ranks: cutting a step changes nothing.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        preference: The loss of a pair, or several by name, whose weighted sum is learned (MPO, 2411.10442).
        preference_weights: Weight of each of them by name (1 where not given).
        per_token: Losses that divide by the length (ipo, sigmoid_norm, simpo) do so. Off, a completion counts as one
            token for them: they read sums, as in TRL's online DPO. Refused where no loss is one of these.
        shared: What every `JudgedModule` takes.
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

    # ------------------------------------------------------------------ which completions are learned from

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
        """Float `(b,)`: 1 for the better completion of a prompt, -1 for the worse one, 0 for all others."""
        return best_and_worst(self.wins(scored)).flatten()

    def reference_of(self, scored: Scored) -> Tensor:
        """Of the completions that are compared: the others have nothing to teach."""
        return self.reference_in(compared(self.verdicts(scored), scored.completions.group_id), scored.completions)

    def replaced(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Two completions of each prompt: the others have nothing to teach, and are not run again."""
        assert rollout.verdicts is not None
        return select(rollout, compared(rollout.verdicts, rollout.completions.group_id)), {}

    # ------------------------------------------------------------------ loss

    def preference_loss(self, rollout: Rollout, scores: TokenScores, totals: StepTotals) -> tuple[Tensor, Metrics]:
        """The weighted sum of the preference losses, this micro-batch's share, and TRL's metrics."""
        beta, judged = self.at_epoch(self.beta), PairScores.of(rollout, scores, totals)
        count = pairs_of(totals).to(scores.logprobs.device)
        pairs = judged.pairs(self.per_token, count)
        loss = torch.zeros((), device=scores.logprobs.device)
        for name, function in self.preference.items():
            loss = loss + self.preference_weights[name] * function(pairs, beta).sum() / count
        return loss, judged.metrics(beta, scores)


def pairs_of(totals: StepTotals) -> Tensor:
    """Pairs of the optimizer step that are learned from, at least 1: two rows with loss tokens each."""
    return (torch.as_tensor(totals.unmasked_sequences) / 2).clamp(min=1)


@dataclass(frozen=True)
class PairScores:
    """A micro-batch as pairs: rows `2 i` and `2 i + 1` belong to one prompt."""

    rollout: Rollout
    logprobs: Tensor
    """Float `(2 n,)`: log-probs of the completions under the policy, with gradient."""
    ref: Tensor
    """The same under the reference."""
    nll: Tensor
    """Float `(2 n,)`: minus the log-probs over the better completion's tokens in the step, 0 of the worse one."""

    @classmethod
    def of(cls, rollout: Rollout, scores: TokenScores, totals: StepTotals) -> PairScores:
        mask, verdicts = rollout.completions.response_mask, rollout.verdicts
        assert rollout.ref_logprobs is not None and verdicts is not None
        # A sum over the better completions' tokens is then a mean over those of the step.
        tokens = torch.as_tensor(totals.better_tokens).float().clamp(min=1)
        weights = (rollout.loss_mask & (verdicts > 0)[:, None]).float() / tokens
        weighted = masked_sum(scores.logprobs * weights, rollout.loss_mask, 1)
        sums = masked_sum(scores.logprobs, mask, 1), masked_sum(rollout.ref_logprobs, mask, 1)
        return cls(rollout, *sums, nll=-weighted)

    @property
    def better(self) -> Tensor:
        """Long `(m,)`: the rows of the better completions, `m` pairs with a verdict."""
        assert self.rollout.verdicts is not None
        return (self.rollout.verdicts > 0).nonzero().flatten()

    @property
    def worse(self) -> Tensor:
        """Long `(m,)`: the other row of each."""
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
        """TRL's names. Padding is in none of them; `rewards/*` and `logps/*` are of the pairs that are learned from."""
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
    """Float `(n, g)`: 1 for the highest of each row, -1 for the lowest; 0 for the others, and where they are equal.

    Args:
        wins: `(n, g)`; NaN takes no part. Of equal ones the first is the highest, and the lowest.
    """
    missing = wins.isnan()
    high = wins.masked_fill(missing, -torch.inf).max(1, keepdim=True)
    low = wins.masked_fill(missing, torch.inf).min(1, keepdim=True)
    found = torch.zeros_like(wins).scatter(1, high.indices, 1.0).scatter(1, low.indices, -1.0)
    return torch.where(high.values > low.values, found, 0.0)


def compared(better: Tensor, group_id: Tensor) -> Tensor:
    """Long `(2 n,)`: the two rows of each prompt that were compared; of a prompt without a better one, the first two.

    Args:
        better: `(b,)`: 1, -1 and 0 as `best_and_worst` gives them.
        group_id: `(b,)`, groups of one size as neighbours.
    """
    size = int((group_id == group_id[0]).sum())
    # Stable, so that what is 0 keeps its order, and so do the two rows in the end.
    order = better.view(-1, size).abs().sort(dim=1, descending=True, stable=True).indices
    starts = torch.arange(0, len(better), size, device=better.device)
    return (starts[:, None] + order[:, :2].sort(dim=1).values).flatten()
