"""Which groups, and which members of groups, are learned from: dynamic sampling, GFPO, RAFT."""

from __future__ import annotations

import copy
import dataclasses
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_rl.algorithms.ranks import Ranks
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.rollouts.source import given_up_together
from lit_rl.errors import ConfigError, RewardError, did_you_mean, in_range, with_its_line
from lit_rl.generation.collect import as_reward_input, texts_of
from lit_rl.ops.advantages import group_std
from lit_rl.ops.step import Metrics
from lit_rl.process_state import mixed, process_kept, raised_by_itself, seed_generators
from lit_rl.rewards.functions.contract import keywords
from lit_rl.rollout import Completions


class SpareGroups(Protocol):
    """Prompts beyond those of the epochs, completed and scored when they are asked for."""

    def draw(self, positions: range, *, rollout: int, first: int) -> Scored:
        """Complete and score the prompts at `positions` of the spare order.

        Args:
            positions: One or more.
            rollout: The number of the rollout that they are for.
            first: How many were drawn for it before, over all ranks.
        """
        ...

    def keep_pace(self, position: int, *, rollout: int, first: int) -> None:
        """Other ranks draw, and this one needs nothing: take part where asking the engine is a collective."""
        ...


class GroupSelection(ABC):
    """Takes a scored rollout of this rank, and gives one of the same number of rows back."""

    @abstractmethod
    def __call__(self, scored: Scored, *, spare: SpareGroups, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        """The rollout, with `kept` where some of its rows are not learned from, and what is logged of the choice."""

    def fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:  # noqa: B027 (any run may fit)
        """Refuse a run in which there is nothing to choose.

        Args:
            group_size: Completions of a prompt.
            compares_completions: Says whether the advantage needs several completions of one prompt. To be asked only
                where it matters: the estimator is tried out, and a user's own may hold a state.

        Raises:
            ConfigError: says what fits.
        """

    def check_rewards(self, names: Sequence[str]) -> None:  # noqa: B027 (most read the sum)
        """Refuse a choice by a reward function that is not there.

        Args:
            names: Of the reward functions.

        Raises:
            ConfigError: says which there are.
        """

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:  # noqa: B027 (most have no state)
        """The counterpart of `state`."""


class DynamicSampling(GroupSelection):
    """Replace groups whose completions all have the same reward, which teach nothing: DAPO (2503.14476, section 3.2).

    Fresh prompts are drawn, completed and scored until every place is taken by a group with some spread, or the cap is
    reached; a group that is left over then takes no part in the loss, and its tokens are in no denominator. A group
    without two scored rows counts as one without spread. Wrong answers may differ in the summed reward, where a penalty
    for length is a part of it: `metric` names the functions whose values decide then. Spare prompts come from an order
    of their own over the training rows, so the epochs, and with them the number of optimizer steps, are what they would
    be without.

    Logged: `groups/dropped` (groups without spread in the first draw), `groups/drawn` (spare prompts completed) and
    `groups/empty` (places that the cap left without a group), each a count over all ranks.

    Args:
        max_draws: Spare prompts completed for one rollout, all ranks together; 0 only drops.
        metric: Names of reward functions, one or several: a group has spread where the values of one of them, before
            their weight, differ. None: where the summed rewards do.
    """

    def __init__(self, max_draws: int = 256, metric: str | list[str] | None = None) -> None:
        in_range("algo.groups.max_draws", max_draws, low=0)
        self.max_draws = max_draws
        self.metric = [metric] if isinstance(metric, str) else metric
        named = isinstance(self.metric, list) and all(isinstance(name, str) for name in self.metric)
        if self.metric is not None and not (named and self.metric):
            raise ConfigError(
                f"algo.groups.metric={metric!r} is neither the name of a reward function nor a list of names. Without "
                "it the summed rewards decide."
            )
        self._position = 0

    def __call__(self, scored: Scored, *, spare: SpareGroups, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        places, rollout = self._without_spread(scored), scored.batch.rollout
        wanted = ranks.counts(len(places))
        dropped, completed, position = sum(wanted), 0, self._position
        while sum(wanted) and completed < self.max_draws:
            shares = _shares(wanted, self.max_draws - completed)
            before, mine = sum(shares[: ranks.rank]), shares[ranks.rank]
            with given_up_together(ranks):
                if mine:
                    start = position + before
                    extra = spare.draw(range(start, start + mine), rollout=rollout, first=completed + before)
                    scored, places = _fill(scored, places, extra, set(self._without_spread(extra)))
                else:
                    spare.keep_pace(position, rollout=rollout, first=completed)
            completed += sum(shares)
            position += sum(shares)
            wanted = ranks.counts(len(places))
        self._position = position  # only now: where the generator fails, the rollout is drawn again from its beginning
        counts = {"groups/dropped": dropped, "groups/drawn": completed, "groups/empty": sum(wanted)}
        scored = dataclasses.replace(scored, kept=_rows_outside(places, scored.completions, len(scored.batch)))
        return scored, {name: _count(count, ranks) for name, count in counts.items()}

    def fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
        needs_spread("algo/groups=dynamic", group_size)

    def check_rewards(self, names: Sequence[str]) -> None:
        for name in self.metric or ():
            if name not in names:
                raise ConfigError(
                    f"algo.groups.metric={name!r} is no reward function of this run. There are: "
                    f"{', '.join(names) or 'none'}.{did_you_mean(name, names)}"
                )

    def _without_spread(self, scored: Scored) -> list[int]:
        """Places (indices of prompts) of the groups in which every scored row has the same reward."""
        scores, group_id = scored.scores, scored.completions.group_id.cpu()
        columns = [scores.total]
        if self.metric is not None:
            columns = [scores.values[:, scores.names.index(name)] for name in self.metric]
        std = torch.stack([group_std(column, group_id) for column in columns])
        flat = [bool((std[:, group_id == group] == 0).all()) for group in group_id.unique()]
        return [place for place, is_flat in enumerate(flat) if is_flat]

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state(self, saved: dict[str, Any]) -> None:
        self._position = saved["position"]


@dataclass(frozen=True)
class TopOfGroup(GroupSelection):
    """Learn from the `keep` best completions of each group by a score of their own: GFPO (2508.09726).

    Statistics of the advantages are taken inside the kept ones; the others take no part in the loss or its denominator.

    Args:
        keep: Completions of a group that are learned from, from 2 to `algo.group_size`.
        score: `f(prompts, completions, rewards, lengths, **columns) -> list[float]`, highest kept; it may name any of
            them. Built in are `shortest` and `reward_per_token`.
    """

    keep: int
    score: Callable[..., Any]

    def __post_init__(self) -> None:
        in_range("algo.groups.keep", self.keep, low=2)

    def fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
        if self.keep > group_size:
            raise ConfigError(
                f"algo.groups.keep={self.keep} is more than algo.group_size={group_size}: nothing to leave out."
            )

    def __call__(self, scored: Scored, *, spare: SpareGroups, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        values = self._scores(scored, tokenizer).reshape(len(scored.batch), -1)
        values = values.masked_fill(scored.scores.total.reshape(values.shape).isnan(), -torch.inf)
        # A stable sort: of equal scores the earlier completion is kept, the same one on every machine.
        best = values.sort(dim=1, descending=True, stable=True).indices[:, : self.keep]
        kept = torch.zeros(values.shape, dtype=torch.bool).scatter_(1, best, True).flatten()
        length = _mean(scored.completions.lengths.cpu(), kept)
        return dataclasses.replace(scored, kept=kept.to(scored.completions.group_id.device)), {
            "groups/kept_length": length
        }

    def _scores(self, scored: Scored, tokenizer: Any) -> Tensor:
        completions, rewards = scored.completions, scored.scores.total
        texts = texts_of(completions, tokenizer)
        prompts, answers, columns = as_reward_input(scored.batch, texts, scored.group_size, completions.episodes)
        columns = {**columns, "rewards": rewards.tolist(), "lengths": completions.lengths.tolist()}
        offered = {"prompts": prompts, "completions": answers, **columns}
        wanted = keywords("algo.groups.score", self.score, columns)
        named = (name for name in wanted if name in offered)
        given = {name: [copy.deepcopy(each) for each in offered[name]] for name in named}
        batch = scored.batch
        try:
            with process_kept("algo.groups.score"):
                seed_generators(mixed("algo.groups.score", batch.rollout, batch.rows[0], batch.occurrences[0]))
                returned = self.score(**given)
        except BaseException as error:  # the user's function may raise anything
            if not raised_by_itself(error):
                raise
            raise RewardError(f"algo.groups.score raised {with_its_line(error)}") from error
        try:
            values = torch.as_tensor(returned, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):  # no numbers
            values = torch.tensor(torch.nan)
        if values.shape != rewards.shape or bool(values.isnan().any()):
            raise RewardError(
                f"algo.groups.score returned {reprlib.repr(returned)} for {len(texts)} completions; it takes one "
                "number, and no NaN, for each."
            )
        return values


@dataclass(frozen=True)
class BestOfGroup(GroupSelection):
    """Learn from the completion with the highest reward of each group alone: RAFT (2304.06767, algorithm 1).

    The others take no part in the loss or in its denominator. Of several best ones the first is taken: the order of the
    samples of a prompt says nothing about them, so it is a fair draw, and the same one on every machine. A group in
    which all rewards are equal gives one too. A completion without a reward is never the best; a group without any
    scored one takes no part.

    Logged: `groups/best_reward` (mean reward of the chosen ones), `groups/tied` (share of groups with several best) and
    `groups/unscored` (groups without a scored completion, over all ranks).
    """

    def __call__(self, scored: Scored, *, spare: SpareGroups, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        rewards = scored.scores.total.double().reshape(len(scored.batch), -1)
        lowest = rewards.masked_fill(rewards.isnan(), -torch.inf)
        highest, best = lowest.max(1, keepdim=True)  # of equal ones the first
        has_score = ~rewards.isnan().all(1, keepdim=True)
        kept = torch.zeros(rewards.shape, dtype=torch.bool).scatter_(1, best, has_score)
        tied = ((lowest == highest) & has_score).sum(1) > 1
        count = has_score.sum().double()
        unscored = sum(ranks.counts(int((~has_score).sum())))
        metrics: Metrics = {
            "groups/best_reward": (rewards[kept].sum(), count),
            "groups/tied": (tied.sum().double(), count),
            "groups/unscored": _count(unscored, ranks),
        }
        return dataclasses.replace(scored, kept=kept.flatten().to(scored.completions.group_id.device)), metrics

    def fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
        if group_size < 2:
            raise ConfigError(
                f"algo.group_size={group_size} with algo/groups=best: the best of one completion is that one, so "
                "nothing would be learned of the rewards. Take 2 or more."
            )
        if compares_completions():
            raise ConfigError(
                "algo/groups=best leaves one completion a group, and this advantage compares several: it would be 0 "
                "everywhere. Take algo/advantage=constant (algo=raft), or algo/groups=top."
            )


def needs_spread(key: str, group_size: int) -> None:
    """What chooses groups by their spread finds none in a group of one completion, and the run would learn nothing.

    Raises:
        ConfigError: the group has one completion.
    """
    if group_size < 2:
        raise ConfigError(
            f"algo.group_size={group_size} with {key}: the rewards of one completion have no spread, so every "
            f"group would count as one that teaches nothing. Take algo.group_size=2 or more, or leave {key} out."
        )


def shortest(lengths: list[int]) -> list[float]:
    """The shorter the better (GFPO's first metric)."""
    return [-float(length) for length in lengths]


def reward_per_token(rewards: list[float], lengths: list[int]) -> list[float]:
    """Reward divided by length (GFPO's token efficiency); an unscored completion comes last anyway."""
    return [0.0 if reward != reward else reward / max(1, length) for reward, length in zip(rewards, lengths)]


def _shares(wanted: list[int], left: int) -> list[int]:
    """How many prompts each rank draws next: what it wants, in the order of ranks, as long as there are any left."""
    shares = []
    for count in wanted:
        shares.append(min(count, left))
        left -= shares[-1]
    return shares


def _fill(scored: Scored, places: list[int], extra: Scored, flat: set[int]) -> tuple[Scored, list[int]]:
    """Put fresh groups into the empty places, those of `flat` aside; what is left of both is given back or dropped."""
    good = [i for i in range(len(extra.batch)) if i not in flat][: len(places)]
    count = len(scored.batch)
    source = list(range(count))
    for place, new in zip(places, good):
        source[place] = count + new
    filled = scored.followed_by(extra).prompts(source)
    completions = dataclasses.replace(filled.completions, group_id=scored.completions.group_id)
    return dataclasses.replace(filled, completions=completions), places[len(good) :]


def _rows_outside(places: list[int], completions: Completions, prompts: int) -> Tensor | None:
    if not places:
        return None
    inside = torch.zeros(prompts, dtype=torch.bool)
    inside[places] = True
    kept = ~inside.repeat_interleave(len(completions) // prompts)
    return kept.to(completions.group_id.device)


def _count(count: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """A count over all ranks: each adds the same number, so that the average over ranks is the count."""
    one = torch.ones((), device=ranks.device)
    return one * count, one


def _mean(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return values[rows].double().sum(), rows.double().sum()
