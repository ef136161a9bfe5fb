"""The base of the online methods whose completions a judge compares.

generate -> reward -> judge -> choice of completions -> loss. No term of an objective is here.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.optim.strategies import shards
from lit_rl.algorithms.preflight import judged as preflight
from lit_rl.algorithms.preflight.sampling import sampling_teaches
from lit_rl.algorithms.rollouts.opponents import policy_rows, without_opponent
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.rollouts.source import failing_together, given_up_together
from lit_rl.generation.collect import as_reward_input, texts_of
from lit_rl.interruption import may_be_given_up
from lit_rl.rewards.functions.names import check_metrics
from lit_rl.rewards.judges.base import Judge, ask, check_verdicts
from lit_rl.rollout import Completions, PromptBatch, Rollout, select

WIN_RATE = "judge/win_rate"
"""The samples' column of the win rate of each completion against the others of its prompt, None if unjudged."""


class JudgedModule(OnPolicyModule, ABC):
    """Abstract base of online methods with a judge: subclasses define the completions to learn from, and the loss.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function, whose sum the default judge compares; None if the judge
            needs no rewards.
        judge: Judge of which of two completions is better: a judge of `lit_rl.rewards`, or a function. None compares
            the summed rewards. With more than two completions a prompt it compares every pair. It also gives the win
            rates of validation (`eval.win_rate_against`).
        beta: Strength of the KL to the reference, above 0; or a list, one for each epoch, the last for all after it.
        missing_eos_penalty: Penalty on the reward of a completion that `max_new_tokens` truncated, before it is judged.
            None: no penalty.
        group_size: Completions a prompt.
        shared: Arguments of every `OnPolicyModule`.
    """

    def __init__(
        self,
        model: Any,
        reward: Any = None,
        *,
        judge: Judge | Callable[..., Any] | None = None,
        beta: float | Sequence[float] = 0.1,
        missing_eos_penalty: float | None = None,
        group_size: int = 2,
        **shared: Any,
    ) -> None:
        super().__init__(model, reward, group_size=group_size, judge=judge, **shared)
        self.beta, self.missing_eos_penalty = beta, missing_eos_penalty
        name = type(self).__name__
        sampling_teaches(self.sampling, self.generator, weighted=False)
        preflight.newest_policy(name, self.generator)
        preflight.groups_are_compared(name, group_size, self.split_groups, self.groups, self.reward_functions.names)
        preflight.judge_has_rewards(self.judge, self.reward_functions.names, missing_eos_penalty)
        preflight.for_each_epoch("algo.beta", beta, open_low=True)

    learns_by_judge = True
    compares_in_step = True

    opponent_writes = False
    """True if the second completion of each prompt is an opponent's. Samples and the logged reward leave it out."""

    # ------------------------------------------------------------------ generate -> reward -> judge

    def setup(self, stage: str) -> None:
        if stage == "fit" and (data := getattr(self.trainer, "datamodule", None)) is not None:
            self.judge.bind(getattr(data, "columns", []))
        if stage == "fit" and self.opponent_writes:
            name, together = type(self).__name__, self._ranks_draw_together
            preflight.opponent_can_draw_alone(name, self.groups, ranks_draw_together=together)
        super().setup(stage)

    @property
    def _ranks_draw_together(self) -> bool:
        return self.data_ranks > 1 and (shards(self.trainer.strategy) or not self.generator.exact)

    def own_completions(self, batch: PromptBatch) -> Completions:
        """Generate the policy's completion of each prompt, before the opponent's."""
        # All ranks gather the opponent's weights, or none does. Ranks that generate alone must not be waited for here.
        with failing_together(self.ranks) if self._ranks_draw_together else nullcontext():
            return self.generate(batch, group_size=1)

    def judged(self, scored: Scored) -> Scored:
        """Return the rollout with win rates: the judge compares every pair of completions of a prompt."""
        with given_up_together(self.ranks), self.stopwatch.measure("reward"), may_be_given_up():
            group = scored.group_size
            texts = texts_of(scored.completions, self.tokenizer)
            duels = [(i + a, i + b) for i in range(0, len(texts), group) for a, b in combinations(range(group), 2)]
            logged: dict[str, tuple[float, int]] = dict(scored.scores.metrics)
            verdicts = self._ask(scored, texts, duels, logged)
            wins = _win_rates(len(texts), duels, verdicts)
            logged["judge/failures"] = float(verdicts.count(None)), len(verdicts)
            logged["judge/ties"] = _ties(wins, group)
            return replace(scored, scores=replace(scored.scores, metrics=logged), win_rates=_numbers(wins))

    def _ask(
        self, scored: Scored, texts: list[str], duels: Sequence[tuple[int, int]], logged: dict[str, tuple[float, int]]
    ) -> list[float | None]:
        """Return the judge's verdict on each duel, and add what it logs to `logged`."""
        prompts, answers, columns = as_reward_input(scored.batch, texts, scored.group_size)
        penalised = self.penalised(scored.completions, scored.scores.total).tolist()
        rewards = [None if math.isnan(value) else value for value in penalised]

        def log_metric(name: str, value: float) -> None:
            check_metrics(type(self.judge).__name__, [name])
            total, count = logged.get(name, (0.0, 0))
            logged[name] = total + float(value), count + 1

        verdicts = ask(
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

    def shown(self, scored: Scored, rollout: Rollout) -> tuple[Scored, Rollout]:
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


def _numbers(rates: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if rate is None else rate for rate in rates], dtype=torch.float64)
