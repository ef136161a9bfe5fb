"""Bases of the online methods whose completions a judge compares: `JudgedModule`, and `JudgedPairs` with pair losses.

generate -> reward -> judge -> choice of completions -> loss. `JudgedModule` gives every completion a win rate against
the others of its prompt. `JudgedPairs` learns from the best and the worst completion of each prompt, with the losses
of preference pairs.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.checks import preference_checks
from lit_rl.algorithms.checks.policy_gradient_checks import check_sampling
from lit_rl.algorithms.checks.preference_checks import check_no_step_losses
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.optim.strategies import shards_weights
from lit_rl.algorithms.rollouts.rollout_source import abort_on_all_ranks, fail_on_all_ranks
from lit_rl.algorithms.rollouts.scored import Scored, policy_rows, without_opponent
from lit_rl.core.interrupts import interruptible
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, select
from lit_rl.generation.collect import as_reward_input, texts_of
from lit_rl.models.forward import TokenScores
from lit_rl.models.references import ReferenceFree
from lit_rl.ops.preference_losses import Pairs
from lit_rl.ops.reductions import Metrics, StepTotals, masked_sum, mean_entropy, mean_of
from lit_rl.rewards.contract import LooksAtData, check_metric_names
from lit_rl.rewards.judges import ask_judge, check_verdicts
from lit_rl.settings.algorithms import JudgedConfig, JudgedPairsConfig
from lit_rl.settings.base import takes

WIN_RATE = "judge/win_rate"
"""The samples' column of the win rate of each completion against the others of its prompt, None if unjudged."""


class JudgedModule(OnPolicyModule, ABC):
    """Abstract base of online methods with a judge: subclasses define the completions to learn from, and the loss."""

    @takes(JudgedConfig)
    def __init__(self, settings: JudgedConfig) -> None:
        super().__init__(config=settings)
        self.beta, self.missing_eos_penalty = settings.beta, settings.missing_eos_penalty
        name = type(self).__name__
        check_sampling(self.sampling, self.generator, weighted=False)
        preference_checks.check_no_lag(name, self.generator)
        preference_checks.check_compared_groups(
            name, settings.group_size, settings.split_groups, self.groups, self.reward_functions.names
        )
        preference_checks.check_judge_rewards(self.judge, self.reward_functions.names, settings.missing_eos_penalty)

    learns_by_judge = True
    compares_in_step = True

    # ------------------------------------------------------------------ generate -> reward -> judge

    def setup(self, stage: str) -> None:
        if stage == "fit" and (data := getattr(self.trainer, "datamodule", None)) is not None:
            self.judge.bind(getattr(data, "columns", []))
        if stage == "fit" and self.opponent_writes:
            name, together = type(self).__name__, self._ranks_draw_together
            preference_checks.check_opponent_groups(name, self.groups, ranks_draw_together=together)
        super().setup(stage)

    def _check_data(self, data: Any, stage: str) -> None:
        super()._check_data(data, stage)
        if stage == "fit" and isinstance(self.judge, LooksAtData):
            self.judge.check_columns(data.train_prompts.columns)

    @property
    def _ranks_draw_together(self) -> bool:
        return self.ranks.world_size > 1 and (shards_weights(self.trainer.strategy) or not self.generator.exact)

    def own_completions(self, batch: PromptBatch) -> Completions:
        """Generate the policy's completion of each prompt, before the opponent's."""
        # All ranks gather the opponent's weights, or none does. Ranks that generate alone must not be waited for here.
        with fail_on_all_ranks(self.ranks) if self._ranks_draw_together else nullcontext():
            return self.draw(batch, group_size=1)

    def judged(self, scored: Scored) -> Scored:
        """Return the rollout with win rates: the judge compares every pair of completions of a prompt."""
        with abort_on_all_ranks(self.ranks), self.stopwatch.measure("reward"), interruptible():
            group = scored.group_size
            texts = texts_of(scored.completions, self.tokenizer)
            duels = [(i + a, i + b) for i in range(0, len(texts), group) for a, b in combinations(range(group), 2)]
            logged: dict[str, tuple[float, int]] = dict(scored.scores.metrics)
            verdicts = self._ask(scored, texts, duels, logged)
            wins = _win_rates(len(texts), duels, verdicts)
            logged["judge/failures"] = float(verdicts.count(None)), len(verdicts)
            logged["judge/ties"] = _ties(wins, group)
            rates = [math.nan if rate is None else rate for rate in wins]
            win_rates = torch.tensor(rates, dtype=torch.float64)
            return replace(scored, scores=replace(scored.scores, metrics=logged), win_rates=win_rates)

    def _ask(
        self, scored: Scored, texts: list[str], duels: Sequence[tuple[int, int]], logged: dict[str, tuple[float, int]]
    ) -> list[float | None]:
        """Return the judge's verdict on each duel, and add what it logs to `logged`."""
        prompts, answers, columns = as_reward_input(scored.batch, texts)
        penalised = self.penalised(scored.completions, scored.scores.total).tolist()
        rewards = [None if math.isnan(value) else value for value in penalised]

        def log_metric(name: str, value: float) -> None:
            check_metric_names(type(self.judge).__name__, [name])
            total, count = logged.get(name, (0.0, 0))
            logged[name] = total + float(value), count + 1

        verdicts = ask_judge(
            self.judge,
            [prompts[a] for a, _ in duels],
            [answers[a] for a, _ in duels],
            [answers[b] for _, b in duels],
            first_rewards=[rewards[a] for a, _ in duels],
            second_rewards=[rewards[b] for _, b in duels],
            log_metric=log_metric,
            trainer_state=self.state_at(scored.batch),
            **{name: [values[a] for a, _ in duels] for name, values in columns.items()},
        )
        return list(check_verdicts(type(self.judge).__name__, verdicts, len(duels)))

    def penalised(self, completions: Completions, rewards: Tensor) -> Tensor:
        """Return the rewards `(b,)` less the penalty for truncated completions."""
        if self.missing_eos_penalty is None:
            return rewards
        return rewards - self.missing_eos_penalty * (~completions.ended).to(rewards)

    def logged_rewards(self, scored: Scored) -> Tensor:
        """Return the summed rewards `(b,)`, or the win rates if there is no reward function."""
        if self.reward_functions.names:
            return scored.scores.total
        assert scored.win_rates is not None
        return scored.win_rates.float()

    def displayed(self, scored: Scored, rollout: Rollout) -> tuple[Scored, Rollout]:
        """Return the rollout with win rates as a column of the samples, without an opponent's completions."""
        assert scored.win_rates is not None
        rates = [None if math.isnan(rate) else rate for rate in scored.win_rates.tolist()]
        extras = scored.scores.extras | {WIN_RATE: rates}
        scored = replace(scored, scores=replace(scored.scores, total=self.logged_rewards(scored), extras=extras))
        if not self.opponent_writes:
            return scored, rollout
        return without_opponent(scored, self.tokenizer), select(rollout, policy_rows(scored.completions))

    # ------------------------------------------------------------------ what losses are made with

    def wins(self, scored: Scored) -> Tensor:
        """Return win rates, float `(n, g)` of `n` prompts; NaN if a completion was not judged, or is left out."""
        assert scored.win_rates is not None
        rates = scored.win_rates.float().to(scored.completions.response_ids.device)
        if scored.kept is not None:
            rates = rates.masked_fill(~scored.kept, torch.nan)
        return rates.view(-1, scored.group_size)

    def as_rollout(self, scored: Scored, *, advantages: Tensor | None = None, **columns: Tensor | None) -> Rollout:
        """Return a rollout with the rewards that the judge was given."""
        completions = scored.completions
        rewards = self.penalised(completions, self.logged_rewards(scored)).to(completions.response_ids.device)
        rewards = rewards if scored.kept is None else rewards.masked_fill(~scored.kept, torch.nan)
        return Rollout(completions, rewards, advantages, **columns)  # pyright: ignore[reportArgumentType]

    def reference_in(self, rows: Tensor, completions: Completions) -> Tensor:
        """Return log-probs `(b, t)` under the reference in the given rows, and 0 in the others, which are unscored."""
        out = torch.zeros(completions.response_ids.shape, device=completions.response_ids.device)
        out[rows] = self.ref_logprobs(select(completions, rows))
        return out

    def at_epoch(self, value: float | Sequence[float]) -> float:
        """Return a number, or the current epoch's number of a list."""
        if not isinstance(value, Sequence):
            return float(value)
        epoch = self.trainer_or_none.current_epoch if self.trainer_or_none else 0
        return float(value[min(epoch, len(value) - 1)])

    def coefficients(self) -> dict[str, float]:
        return super().coefficients() | {"beta": self.at_epoch(self.beta)}


def _win_rates(rows: int, duels: Sequence[tuple[int, int]], verdicts: Sequence[float | None]) -> list[float | None]:
    """Return each row's mean probability to win, over its pairs with a verdict."""
    won, judged = [0.0] * rows, [0] * rows
    for (first, second), verdict in zip(duels, verdicts, strict=True):
        if verdict is not None:
            for row, chance in ((first, verdict), (second, 1.0 - verdict)):
                won[row] += chance
                judged[row] += 1
    return [total / count if count else None for total, count in zip(won, judged)]


def _ties(wins: Sequence[float | None], group: int) -> tuple[float, int]:
    """Return the number of prompts whose completions all have the same win rate, and the number of prompts."""
    starts = range(0, len(wins), group)
    equal = [len({rate for rate in wins[i : i + group] if rate is not None}) == 1 for i in starts]
    return float(sum(equal)), len(equal)


class JudgedPairs(JudgedModule, ABC):
    """Abstract base of online methods with a loss of pairs: subclasses define the opponent and further terms.

    A rollout's `verdicts` are 1 for the better completion of a prompt, -1 for the worse one, and 0 for all others; a
    prompt with a tie or without a verdict has 0 only. The objective is a mean over the pairs of the optimizer step that
    have a verdict and are no tie, on all ranks, so it does not depend on how the step is split.
    """

    @takes(JudgedPairsConfig)
    def __init__(self, settings: JudgedPairsConfig) -> None:
        super().__init__(config=settings)
        self.preference = preference_checks.losses_by_name(settings.preference)
        self.preference_weights = preference_checks.loss_weights(self.preference, settings.preference_weights)
        self.per_token = settings.per_token
        check_no_step_losses(self.preference)
        if settings.per_token:
            preference_checks.check_per_token(self.preference)

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
        return self.reference_in(compared_rows(self.verdicts(scored), scored.completions.group_id), scored.completions)

    def rollout_to_learn(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Keep the two compared completions of each prompt: the others are not learned from, and not run again."""
        assert rollout.verdicts is not None
        return select(rollout, compared_rows(rollout.verdicts, rollout.completions.group_id)), {}

    # ------------------------------------------------------------------ loss

    def preference_loss(self, rollout: Rollout, scores: TokenScores, totals: StepTotals) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the weighted sum of the preference losses, and TRL's metrics."""
        beta, judged = self.at_epoch(self.beta), PairScores.of(rollout, scores, totals)
        count = learned_pairs(totals).to(scores.logprobs.device)
        pairs = judged.pairs(self.per_token, count)
        loss = torch.zeros((), device=scores.logprobs.device)
        for name, function in self.preference.items():
            loss = loss + self.preference_weights[name] * function(pairs, beta).sum() / count
        return loss, judged.metrics(beta, scores)


def learned_pairs(totals: StepTotals) -> Tensor:
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


def compared_rows(better: Tensor, group_id: Tensor) -> Tensor:
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
