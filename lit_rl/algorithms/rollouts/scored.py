"""Scored rollouts, before any credit is assigned: prompts, completions and rewards.

Callbacks see them, and groups are selected from them. Dynamic groups draw spare prompts, beyond those of the epochs, in
place of groups that teach nothing (`Spare`). Some methods have each prompt answered twice: by the policy, and by an
opponent made of its reference (`generate_opponent_pairs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts.rollout_source import RolloutSource
from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.core.rollout import Completions, PromptBatch, join_completions, select
from lit_rl.data.curriculum import RowDraws, RowOutcome
from lit_rl.generation.collect import RolloutRequest, texts_of
from lit_rl.generation.generator import InProcessGenerator
from lit_rl.generation.native import for_another_policy
from lit_rl.models.sharding import unsharded
from lit_rl.ops.reductions import Metrics
from lit_rl.rewards.weighted_rewards import Rewards, Scores


@dataclass(frozen=True)
class Scored:
    """Prompts with completions and their scores. Completions of a prompt are neighbours."""

    batch: PromptBatch
    completions: Completions
    scores: Scores
    kept: Tensor | None = None
    """Bool `(b,)`: rows that are learned from. None: all."""
    greedy_rewards: Tensor | None = None
    """Float32 `(b,)`: reward of the greedy completion of each row's prompt. None where no advantage needs it."""
    gradient_norms: Tensor | None = None
    """Float32 `(b, t)`: squared norms of the gradients of the tokens' log-probs by the logits, under the policy that
    took the rollout. None where no advantage needs them."""
    win_rates: Tensor | None = None
    """Float64 `(b,)` on the CPU: win rate of each completion against the others of its prompt, by a judge; NaN without
    a verdict. None without a judge."""

    @property
    def group_size(self) -> int:
        """Completions of each prompt here: the whole group, or this rank's share of it."""
        return len(self.completions) // len(self.batch)

    def of_whole_groups(self, column: Tensor, ranks: Ranks) -> Tensor:
        """Return a column `(b,)` as `(prompts, group)`, with the values of the ranks that share the prompts, in the
        order of samples. A collective where they are shared."""
        mine, sharing = column.reshape(len(self.batch), -1), self.batch.sharing
        if sharing == 1:
            return mine
        first = ranks.rank // sharing * sharing
        every = ranks.gather(column).reshape(ranks.world_size, *mine.shape)[first : first + sharing]
        return every.transpose(0, 1).reshape(len(mine), -1).to(column.device)

    def of_share(self, column: Tensor) -> Tensor:
        """Return this rank's rows `(b,)` of a column `(prompts, group)` of whole groups."""
        first = self.batch.share * self.group_size
        return column[:, first : first + self.group_size].flatten()

    def prompts(self, which: list[int]) -> Scored:
        """Return the given prompts, in that order, with all their completions."""
        batch = replace(
            self.batch,
            prompts=[self.batch.prompts[i] for i in which],
            prompt_ids=[self.batch.prompt_ids[i] for i in which],
            columns={name: [values[i] for i in which] for name, values in self.batch.columns.items()},
            rows=[self.batch.rows[i] for i in which],
            occurrences=[self.batch.occurrences[i] for i in which],
        )
        rows = (torch.tensor(which)[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        return Scored(batch, select(self.completions, rows), scores_of(self.scores, rows))

    def followed_by(self, more: Scored) -> Scored:
        """Return the prompts of both, these first; their completions get one width."""
        first, second = self.batch, more.batch
        batch = replace(
            first,
            prompts=[*first.prompts, *second.prompts],
            prompt_ids=[*first.prompt_ids, *second.prompt_ids],
            columns={name: [*values, *second.columns[name]] for name, values in first.columns.items()},
            rows=[*first.rows, *second.rows],
            occurrences=[*first.occurrences, *second.occurrences],
        )
        completions = join_completions(self.completions, more.completions)
        return Scored(batch, completions, _join_scores(self.scores, more.scores))


def scores_of(scores: Scores, rows: Tensor) -> Scores:
    """Return the scores of the given rows; logged metrics are those of all rows."""
    indices, rows = rows.tolist(), rows.to(scores.total.device)
    spans = scores.span_rewards
    return replace(
        scores,
        values=scores.values[rows],
        total=scores.total[rows],
        weights=scores.weights[rows],
        extras={name: [values[i] for i in indices] for name, values in scores.extras.items()},
        span_rewards=None if spans is None else [spans[i] for i in indices],
    )


def _join_scores(one: Scores, two: Scores) -> Scores:
    metrics = dict(one.metrics)
    for name, (total, count) in two.metrics.items():
        before = metrics.get(name, (0.0, 0))
        metrics[name] = (before[0] + total, before[1] + count)
    spans = None
    if one.span_rewards is not None or two.span_rewards is not None:
        spans = [*(one.span_rewards or [[]] * len(one.total)), *(two.span_rewards or [[]] * len(two.total))]
    missing = [None] * len(one.total), [None] * len(two.total)
    names = {**one.extras, **two.extras}
    extras = {name: [*one.extras.get(name, missing[0]), *two.extras.get(name, missing[1])] for name in names}
    return replace(
        one,
        values=torch.cat([one.values, two.values]),
        total=torch.cat([one.total, two.total]),
        weights=torch.cat([one.weights, two.weights]),
        metrics=metrics,
        extras=extras,
        span_rewards=spans,
    )


def deciding_rewards(scores: Scores, metric: str | None) -> Tensor:
    """Return the reward `(b,)` by which rows and groups are chosen: of one function before its weight, or the sum."""
    return scores.total if metric is None else scores.values[:, scores.names.index(metric)]


def check_reward_name(key: str, name: str, names: Sequence[str]) -> None:
    """Refuse the name of a reward function that does not exist.

    Raises:
        ConfigError: names the existing ones.
    """
    if name not in names:
        raise ConfigError(
            f"{key}={name!r} is no reward function of this run. There are: {', '.join(names) or 'none'}."
            f"{did_you_mean(name, names)}"
        )


# ---------------------------------------------------------------------- the data's curriculum


class CurriculumFeedback:
    """The link from a run to the curriculum of its data, which learns how the policy did on the rows of a rollout.

    Every prompt that was completed counts, also those of groups that are refused. Nothing is told before the rollout is
    complete, so one that fails is drawn again as it was. Evaluations tell nothing.

    Args:
        draws: The draws of the data module.
        rewards: The reward functions.
        opponent_writes: Whether every second completion is an opponent's, which does not count.

    Raises:
        ConfigError: there is no reward function, none of the name that decides, or one whose mean is always 0.
    """

    def __init__(self, draws: RowDraws, rewards: Rewards, *, opponent_writes: bool = False) -> None:
        self.draws, self._every = draws, 2 if opponent_writes else 1
        self._outcomes: list[RowOutcome] = []
        names, metric = rewards.names, draws.curriculum.metric
        if not names:
            raise ConfigError("data.curriculum draws rows by their rewards, and there is no reward function. Set one.")
        if metric is not None:
            check_reward_name("data.curriculum.metric", metric, names)
        if not rewards.has_level(metric):
            raise ConfigError(
                f"data.curriculum.metric={metric or 'null'}: what decides compares the completions of a prompt with "
                "each other, so its mean is 0 for every prompt and would put all rows into one pool. Name a reward "
                f"function that scores each completion for itself; there are: {', '.join(names)}."
            )

    def begin(self, scored: Scored, ranks: Ranks) -> Metrics:
        """Note the prompts of a rollout as it was drawn, and return the metrics of the draw."""
        self._outcomes = []
        self.note(scored.batch, scored.scores)
        number, prompts, scores = scored.batch.rollout, len(scored.batch), scored.scores
        found = self.draws.shares(number)
        before = ranks.rank // scored.batch.sharing * prompts
        factors = torch.tensor(self.draws.factors(number)[before:][:prompts], dtype=torch.float64)
        columns = {f"rewards/{name}": scores.values[:, i] for i, name in enumerate(scores.names)}
        for name, column in {"reward": scores.total, **columns}.items():
            total, known = self._of_prompts(scored.of_whole_groups(column, ranks).flatten(), prompts)
            mean, factor = total / known.clamp(min=1), factors * (known > 0)
            found[f"uniform/{name}"] = float((factor * mean).sum()), float(factor.sum())
        number_of = partial(torch.full, (), device=ranks.device)
        return {
            f"curriculum/{name}": (number_of(float(above)), number_of(float(below)))
            for name, (above, below) in found.items()
        }

    def noting(
        self, reward: Callable[[PromptBatch, Completions], Scores]
    ) -> Callable[[PromptBatch, Completions], Scores]:
        """Return the function with its results noted."""

        def noted(batch: PromptBatch, completions: Completions) -> Scores:
            scores = reward(batch, completions)
            self.note(batch, scores)
            return scores

        return noted

    def note(self, batch: PromptBatch, scores: Scores) -> None:
        """Note the outcomes of prompts on this rank."""
        total, known = self._of_prompts(deciding_rewards(scores, self.draws.curriculum.metric), len(batch))
        self._outcomes += map(RowOutcome, batch.rows, total.tolist(), known.tolist())

    def end(self, ranks: Ranks) -> None:
        """Tell the curriculum what all ranks have noted. A collective."""
        self.draws.observe(outcome for theirs in ranks.objects(self._outcomes) for outcome in theirs)

    def _of_prompts(self, rewards: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the rewards of each prompt's completions, and the number of them that are scored."""
        values = rewards[:: self._every].double().reshape(prompts, -1)
        return values.nansum(1), (~values.isnan()).sum(1)


# ---------------------------------------------------------------------- spare prompts


@dataclass(frozen=True)
class Spare:
    """Prompts beyond those of the epochs, completed and scored like those of the rollout."""

    datamodule: Any
    draw_rollout: Callable[[PromptBatch], Completions]
    """Function that completes prompts to learn from."""
    generate: Callable[..., Completions]
    """Function that completes a prompt to discard, where engine calls are collective."""
    reward: Callable[[PromptBatch, Completions], Scores]
    exact: bool
    """True where the generator is the policy itself, so that each rank can draw alone."""
    sharing: int = 1
    """Ranks that complete a prompt together."""
    share: int = 0
    """Index of this rank among them."""

    def draw(self, positions: range, *, rollout: int, first: int) -> Scored:
        """Complete and score the prompts at these positions of the spare order.

        Args:
            positions: One or more.
            rollout: The number of the rollout that they are for.
            first: The number drawn for it before, over all ranks.
        """
        batch = self.datamodule.spare.batch(positions, rollout=rollout, first=first)
        batch.sharing, batch.share = self.sharing, self.share
        completions = self.draw_rollout(batch)
        return Scored(batch, completions, self.reward(batch, completions))

    def dummy_generate(self, position: int, *, rollout: int, first: int) -> None:
        """Generate and discard one completion, so that every rank makes the same number of engine calls."""
        if not self.exact:
            one = self.datamodule.spare.batch(range(position, position + 1), rollout=rollout, first=first)
            self.generate(one, group_size=1)


# ---------------------------------------------------------------------- opponents


def generate_opponent_pairs(
    source: RolloutSource,
    request: RolloutRequest,
    policy_completions: Completions,
    opponent: Any,
    reference_policy: Any,
) -> Completions:
    """Return the policy's completions with the opponent's: rows `2 i` and `2 i + 1` for each prompt `i`.

    Args:
        source: The source of the opponent's completions.
        request: The policy's request: one completion of each prompt.
        policy_completions: The policy's completions.
        opponent: The model that answers as a policy does, with noise of its own.
        reference_policy: The reference's weights, which are gathered meanwhile where they are sharded.

    Raises:
        ConfigError: the opponent is the policy without its adapters, and the engine copies weights.
    """
    generator = source.generator
    if opponent is request.policy and not isinstance(for_another_policy(generator), InProcessGenerator):
        raise ConfigError(
            f"generator={type(generator).__name__} decodes with a copy of the weights, but this reference is the "
            "policy with its adapters switched off. Set generator=native, or reference=initial_adapter."
        )
    whole = unsharded(reference_policy) if isinstance(reference_policy, nn.Module) else nullcontext()
    with whole:
        opponent_completions = source.draw_other(replace(request, policy=opponent))
    joint = join_completions(policy_completions, replace(opponent_completions, group_id=policy_completions.group_id))
    return select(joint, torch.arange(len(joint)).view(2, -1).T.flatten())


def policy_rows(completions: Completions) -> Tensor:
    """Return long `(n,)`: the policy's rows among pairs with an opponent."""
    return torch.arange(0, len(completions), 2, device=completions.response_ids.device)


def without_opponent(scored: Scored, tokenizer: Any) -> Scored:
    """Return the policy's completions, with the opponent's text and reward as columns, for display."""
    rows = policy_rows(scored.completions)
    texts = texts_of(scored.completions, tokenizer)
    scores = scores_of(scored.scores, rows)
    opponent_columns = {"opponent": texts[1::2], "opponent_reward": scored.scores.total[1::2].tolist()}
    return replace(
        scored,
        completions=select(scored.completions, rows),
        scores=replace(scores, extras=scores.extras | opponent_columns),
        win_rates=select(scored.win_rates, rows),
    )
