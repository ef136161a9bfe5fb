"""The choice of groups, and of members of groups, to learn from: dynamic sampling, GFPO, RAFT, and a replay buffer.

A `GroupSelection` acts on scored completions, before advantages are estimated; `GroupReplay` acts on the rollout with
its advantages, and puts good groups of earlier rollouts in the place of groups without spread.
"""

from __future__ import annotations

import copy
import dataclasses
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.rollout_plan import mix
from lit_rl.algorithms.rollouts.rollout_source import abort_on_all_ranks
from lit_rl.algorithms.rollouts.scored import Scored, Spare, check_reward_name, deciding_rewards
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError, describe_error
from lit_rl.core.process_state import is_raised_by_user_code, mix_seed, preserve_process_state, seed_generators
from lit_rl.core.rollout import Rollout, join_rollouts, select, trim_rollout
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.visual_prompts import Processor
from lit_rl.generation.collect import as_reward_input, texts_of
from lit_rl.ops.advantages import Groups
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, AtLeastZero, NotNegativeFinite
from lit_rl.ops.reductions import Metrics
from lit_rl.rewards.contract import keywords

# ------------------------------------------------------------------ selection


class GroupSelection(ABC):
    """A selection from this rank's scored rollout, which keeps the number of rows."""

    @abstractmethod
    def __call__(self, scored: Scored, *, spare: Spare, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        """Return the rollout, with `kept` if some of its rows are not learned from, and metrics."""

    def check_fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:  # noqa: B027
        """Refuse a run in which there is nothing to select.

        Args:
            group_size: Completions of a prompt.
            compares_completions: Tells whether the advantage needs several completions of one prompt. Called only if
                the answer matters: it may run a user's estimator, which may have state.

        Raises:
            ConfigError: names settings that fit.
        """

    def check_rewards(self, names: Sequence[str], of_length: Sequence[str] = ()) -> None:  # noqa: B027 (most read the sum)
        """Refuse a selection by a reward function that does not exist.

        Args:
            names: Names of the reward functions.
            of_length: Those whose values tell how long a completion is, and not whether it is right.

        Raises:
            ConfigError: names the existing ones.
        """

    def state(self) -> dict[str, Any]:
        """Return the state for an exact resume."""
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:  # noqa: B027 (most have no state)
        """Restore what `state` returned."""


_ROUNDING = 1e-5
"""Share of a tolerance by which rewards, being float32, may be beyond it: 0.2 and 0.3 are within 0.05 of their mean."""


@checked("algo.groups")
class DynamicSampling(GroupSelection):
    """Dynamic sampling: groups whose rewards are all equal, or nearly, are replaced, as in DAPO (2503.14476, section
    3.2).

    Fresh prompts are drawn, completed and scored until every place is taken by a group with some spread, or the cap is
    reached; a remaining group without spread takes no part in the loss, and its tokens are in no denominator. A group
    with fewer than two scored rows counts as one without spread. If the summed reward includes a length penalty, wrong
    answers may differ in it: then `metric` names the functions whose values decide. Rewards are those of the functions,
    before `algo/shaping`, `algo/reward_norm` and a KL. Spare prompts have a separate order over the training rows, or
    are drawn by `data.curriculum`, so the epochs, and with them the number of optimizer steps, do not change.

    Logged: `groups/dropped` (groups without spread in the first draw), `groups/drawn` (spare prompts completed) and
    `groups/empty` (places that the cap left without a group), each a count over all ranks.

    Args:
        max_draws: Spare prompts completed for one rollout, all ranks together; 0 only drops.
        metric: Names of reward functions, one or several: a group has spread if the values of one of them, before their
            weight, differ. None: if the summed rewards do.
        tolerance: Values differ if one of them is farther than this from the group's mean. So a group is refused if all
            advantages that are not divided by a deviation (`algo=dr_grpo`) lie within it.
    """

    def __init__(
        self, max_draws: AtLeastZero = 256, metric: str | list[str] | None = None, tolerance: NotNegativeFinite = 0.0
    ) -> None:
        self.max_draws, self.tolerance = max_draws, tolerance
        self.metric = [metric] if isinstance(metric, str) else metric
        named = isinstance(self.metric, list) and all(isinstance(name, str) for name in self.metric)
        if self.metric is not None and not (named and self.metric):
            raise ConfigError(
                f"algo.groups.metric={metric!r} is neither the name of a reward function nor a list of names. Without "
                "it the summed rewards decide."
            )
        self._position = 0

    def __call__(self, scored: Scored, *, spare: Spare, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        sharing, rollout = scored.batch.sharing, scored.batch.rollout
        places, own = self._without_spread(scored, ranks, sharing), ranks.rank // sharing
        missing = ranks.counts(len(places))[::sharing]  # ranks with the same prompts lack the same
        dropped, completed, position = sum(missing), 0, self._position
        while sum(missing) and completed < self.max_draws:
            shares, left = [], self.max_draws - completed
            for count in missing:  # each rank draws what its prompts lack, in the order of ranks, up to the limit
                shares.append(min(count, left))
                left -= shares[-1]
            earlier_shares, own_share, drawn = sum(shares[:own]), shares[own], None
            with abort_on_all_ranks(ranks):
                if own_share:
                    start = position + earlier_shares
                    drawn = spare.draw(
                        range(start, start + own_share), rollout=rollout, first=completed + earlier_shares
                    )
                else:
                    spare.dummy_generate(position, rollout=rollout, first=completed)
            without_spread = self._without_spread(drawn, ranks, sharing)
            if drawn is not None:
                scored, places = _fill(scored, places, drawn, set(without_spread))
            completed += sum(shares)
            position += sum(shares)
            missing = ranks.counts(len(places))[::sharing]
        self._position = position  # only now: if the generator fails, the rollout is drawn again from its beginning
        counts = {"groups/dropped": dropped, "groups/drawn": completed, "groups/empty": sum(missing)}
        if places:
            in_group = torch.ones(len(scored.batch), dtype=torch.bool)
            in_group[places] = False
            kept = in_group.repeat_interleave(scored.group_size).to(scored.completions.group_id.device)
            scored = dataclasses.replace(scored, kept=kept)
        return scored, {name: _global_count(count, ranks) for name, count in counts.items()}

    def check_fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
        check_group_has_spread("algo/groups=dynamic", group_size)

    def check_rewards(self, names: Sequence[str], of_length: Sequence[str] = ()) -> None:
        for name in self.metric or ():
            check_reward_name("algo.groups.metric", name, names)
        others = [name for name in names if name not in of_length]
        if self.metric is None and of_length and others:
            rank_zero_warn(
                f"algo/groups=dynamic keeps the groups whose summed rewards differ, and {', '.join(of_length)} is in "
                "the sum: a group of wrong answers of different lengths is kept and learned from. Set "
                f"algo.groups.metric=[{','.join(others)}], so that these decide."
            )

    def _without_spread(self, scored: Scored | None, ranks: Ranks, sharing: int) -> list[int]:
        """Return the places (indices of prompts) of the groups in which no scored row is farther from the group's mean
        than the tolerance. A collective where ranks share prompts; some may have drawn none."""
        mine = None
        if scored is not None:
            columns = [deciding_rewards(scored.scores, name) for name in self.metric or [None]]
            mine = torch.stack([column.cpu().reshape(len(scored.batch), -1) for column in columns])
        if sharing > 1:
            first = ranks.rank // sharing * sharing
            theirs = ranks.objects(mine)[first : first + sharing]
            mine = None if mine is None else torch.cat(theirs, -1)
        if mine is None:
            return []
        group_id = torch.arange(mine.shape[1]).repeat_interleave(mine.shape[2])
        distance = torch.stack([Groups.of(column.flatten(), group_id).deviation.abs() for column in mine])
        within = distance.reshape(mine.shape) <= self.tolerance * (1 + _ROUNDING)
        return within.all(0).all(-1).nonzero().flatten().tolist()

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state(self, saved: dict[str, Any]) -> None:
        self._position = saved["position"]


@checked("algo.groups")
@dataclass(frozen=True)
class TopOfGroup(GroupSelection):
    """Selection of the `keep` best completions of each group by a separate score: GFPO (2508.09726).

    Statistics of the advantages are taken over the kept ones; the others take no part in the loss or its denominator.

    Args:
        keep: Completions of a group that are learned from, from 2 to `algo.group_size`.
        score: `f(prompts, completions, rewards, lengths, **columns) -> list[float]`, the highest are kept; it may name
            any of them. Built in are `shortest` and `reward_per_token`.
    """

    keep: AtLeastTwo
    score: Callable[..., Any]

    def check_fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
        if self.keep > group_size:
            raise ConfigError(
                f"algo.groups.keep={self.keep} is more than algo.group_size={group_size}: nothing to leave out."
            )

    def __call__(self, scored: Scored, *, spare: Spare, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        values = self._user_scores(scored, tokenizer).masked_fill(scored.scores.total.isnan().cpu(), -torch.inf)
        values = scored.of_whole_groups(values, ranks)
        # A stable sort: the first of equal scores is kept, the same one on every machine.
        best = values.sort(dim=1, descending=True, stable=True).indices[:, : self.keep]
        kept = scored.of_share(torch.zeros(values.shape, dtype=torch.bool).scatter_(1, best, True))
        lengths = scored.completions.lengths.cpu()[kept].double().sum(), kept.double().sum()
        scored = dataclasses.replace(scored, kept=kept.to(scored.completions.group_id.device))
        return scored, {"groups/kept_length": lengths}

    def _user_scores(self, scored: Scored, tokenizer: Any) -> Tensor:
        completions, rewards = scored.completions, scored.scores.total
        texts = texts_of(completions, tokenizer)
        prompts, replies, columns = as_reward_input(scored.batch, texts, completions.episodes)
        columns = {**columns, "rewards": rewards.tolist(), "lengths": completions.lengths.tolist()}
        columns_by_name = {"prompts": prompts, "completions": replies, **columns}
        wanted = keywords("algo.groups.score", self.score, columns)
        named = (name for name in wanted if name in columns_by_name)
        arguments = {name: [copy.deepcopy(each) for each in columns_by_name[name]] for name in named}
        batch = scored.batch
        try:
            with preserve_process_state("algo.groups.score"):
                seed_generators(mix_seed("algo.groups.score", batch.rollout, batch.rows[0], batch.occurrences[0]))
                returned = self.score(**arguments)
        except BaseException as error:  # the user's function may raise anything
            if not is_raised_by_user_code(error):
                raise
            raise RewardError(f"algo.groups.score raised {describe_error(error)}") from error
        try:
            values = torch.as_tensor(returned, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):  # no numbers
            values = torch.tensor(torch.nan)
        if values.shape != rewards.shape or bool(values.isnan().any()):
            raise RewardError(
                f"algo.groups.score returned {reprlib.repr(returned)} for {len(texts)} completions, expected one "
                "number, and no NaN, for each."
            )
        return values


@dataclass(frozen=True)
class BestOfGroup(GroupSelection):
    """Selection of the completion with the highest reward of each group: RAFT (2304.06767, algorithm 1).

    The others take no part in the loss or in its denominator. The first of several best ones is taken: samples of a
    prompt are exchangeable, so this is a fair draw, and the same on every machine. A group in which all rewards are
    equal has a best one too. A completion without a reward is never the best; a group without any scored one takes no
    part.

    Logged: `groups/best_reward` (mean reward of the chosen ones), `groups/tied` (share of groups with several best) and
    `groups/unscored` (groups without a scored completion, over all ranks).
    """

    def __call__(self, scored: Scored, *, spare: Spare, tokenizer: Any, ranks: Ranks) -> tuple[Scored, Metrics]:
        rewards = scored.of_whole_groups(scored.scores.total.double(), ranks)
        with_unscored_last = rewards.masked_fill(rewards.isnan(), -torch.inf)
        highest, best = with_unscored_last.max(1, keepdim=True)  # of equal ones the first
        has_score = ~rewards.isnan().all(1, keepdim=True)
        kept = torch.zeros(rewards.shape, dtype=torch.bool).scatter_(1, best, has_score)
        tied = ((with_unscored_last == highest) & has_score).sum(1) > 1
        count = has_score.sum().double()
        unscored = sum(ranks.counts(int((~has_score).sum()))) // scored.batch.sharing
        metrics: Metrics = {
            "groups/best_reward": (rewards[kept].sum(), count),
            "groups/tied": (tied.sum().double(), count),
            "groups/unscored": _global_count(unscored, ranks),
        }
        own = scored.of_share(kept).to(scored.completions.group_id.device)
        return dataclasses.replace(scored, kept=own), metrics

    def check_fits(self, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
        if group_size < 2:
            raise ConfigError(
                f"algo.group_size={group_size} with algo/groups=best: the best of one completion is that one, so the "
                "rewards would teach nothing. Set it to 2 or more."
            )
        if compares_completions():
            raise ConfigError(
                "algo/groups=best keeps one completion per group, but this advantage compares several and would be 0 "
                "everywhere. Set algo/advantage=constant (algo=raft), or algo/groups=top."
            )


def check_group_has_spread(key: str, group_size: int) -> None:
    """Refuse a selection of groups by their spread if groups have one completion: the run would learn nothing.

    Raises:
        ConfigError: the group has one completion.
    """
    if group_size < 2:
        raise ConfigError(
            f"algo.group_size={group_size} with {key}: the rewards of one completion have no spread, so every "
            f"group would count as one that teaches nothing. Take algo.group_size=2 or more, or leave {key} out."
        )


def shortest(lengths: list[int]) -> list[float]:
    """Score completions by negative length (GFPO's first metric)."""
    return [-float(length) for length in lengths]


def reward_per_token(rewards: list[float], lengths: list[int]) -> list[float]:
    """Score completions by reward divided by length (GFPO's token efficiency); unscored ones come last anyway."""
    return [0.0 if reward != reward else reward / max(1, length) for reward, length in zip(rewards, lengths)]


def _fill(scored: Scored, places: list[int], fresh: Scored, without_spread: set[int]) -> tuple[Scored, list[int]]:
    """Put fresh groups that have a spread into the empty places; return the rollout and the places still empty."""
    usable = [i for i in range(len(fresh.batch)) if i not in without_spread][: len(places)]
    count = len(scored.batch)
    source = list(range(count))
    for place, new in zip(places, usable):
        source[place] = count + new
    filled = scored.followed_by(fresh).prompts(source)
    completions = dataclasses.replace(filled.completions, group_id=scored.completions.group_id)
    return dataclasses.replace(filled, completions=completions), places[len(usable) :]


def _global_count(count: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return a metric of a count over all ranks: each adds the same number, so the average is the count."""
    one = torch.ones((), device=ranks.device)
    return one * count, one


# ------------------------------------------------------------------ replay


@checked("algo.replay")
class GroupReplay:
    """A buffer of groups with spread, which replace groups whose completions all have the same advantage.

    A group's score is the sum of the sizes of its advantages times the standard deviation of its rewards; the buffer
    keeps the highest scores, and draws in proportion to them. A drawn group keeps the log-probs of the policy that
    sampled it, so its importance ratio is right; its KL is to the reference of that time. Each rank has its own buffer.

    Logged: `replay/groups`, the number of groups of the rollout from the buffer, and `replay/age`, their mean age in
    policy versions.

    Args:
        size: Number of groups to keep, on each rank.
    """

    def __init__(self, size: AtLeastOne = 64) -> None:
        self.size = size
        self._groups: list[tuple[float, Rollout]] = []
        self._rollouts = 0

    def __call__(self, rollout: Rollout, *, seed: int, ranks: Ranks) -> tuple[Rollout, Metrics]:
        """Replace the groups without spread; afterwards add the rollout's own good groups to the buffer."""
        ids = rollout.completions.group_id
        rows = {int(group): (ids == group).nonzero().flatten() for group in ids.unique()}
        priorities = {group: _replay_priority(rollout, places) for group, places in rows.items()}
        without_spread = [group for group, score in priorities.items() if score == 0]
        replacements = self._draw(len(without_spread), seed=mix(seed, self._rollouts, ranks.rank))
        good_groups = [
            (score, _group_without_padding(rollout, rows[group])) for group, score in priorities.items() if score > 0
        ]
        for group, stored in zip(without_spread, replacements):
            rollout = _with_group_replaced(rollout, rows[group], stored)
        self._groups = sorted([*self._groups, *good_groups], key=lambda item: -item[0])[: self.size]
        self._rollouts += 1
        count = torch.tensor(float(len(replacements)), device=ranks.device)
        age = sum(rollout.completions.version - stored.completions.version for stored in replacements)
        return rollout, {
            "replay/groups": (count, torch.ones_like(count)),
            "replay/age": (torch.full_like(count, age), count),
        }

    def _draw(self, count: int, *, seed: int) -> list[Rollout]:
        """Draw distinct groups in proportion to their scores."""
        count = min(count, len(self._groups))
        if not count:
            return []
        weights = torch.tensor([score for score, _ in self._groups], dtype=torch.float64)
        chosen = torch.multinomial(weights, count, generator=torch.Generator().manual_seed(seed))
        return [self._groups[i][1] for i in chosen.tolist()]

    def state(self) -> dict[str, Any]:
        return {
            "groups": [{"score": score, "rollout": checkpoints.to_plain(group)} for score, group in self._groups],
            "rollouts": self._rollouts,
        }

    def redistribute(self, saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state of rank `rank` of `world_size`, from the buffers of another number of ranks.

        Ranks take the groups in turn, from the highest score down, up to their size.

        Args:
            saved: The `state` of each rank that wrote the checkpoint.
        """
        groups = sorted((group for state in saved for group in state["groups"]), key=lambda group: -group["score"])
        return {"groups": groups[rank::world_size][: self.size], "rollouts": saved[0]["rollouts"]}

    def restore_pixels(
        self, see: Callable[[int], PromptVision | None], processor: Callable[[], Processor | None]
    ) -> None:
        """Restore the pixels of a checkpoint's groups, which names rows of the data, or contains encoded images.

        The arguments are those of `checkpoints.restore_pixels`.
        """
        self._groups = [(score, checkpoints.restore_pixels(group, see, processor)) for score, group in self._groups]

    def load_state(self, saved: dict[str, Any]) -> None:
        self._rollouts = saved["rollouts"]
        self._groups = [
            (item["score"], checkpoints.rollout_from_plain(item["rollout"], torch.device("cpu")))
            for item in saved["groups"]
        ]


def _group_without_padding(rollout: Rollout, rows: Tensor) -> Rollout:
    """Return one group, without padding and without the images of other groups."""
    group = trim_rollout(select(rollout, rows))
    if group.completions.vision is None:
        return group
    return dataclasses.replace(
        group, completions=dataclasses.replace(group.completions, vision=group.completions.vision.used())
    )


def _replay_priority(rollout: Rollout, rows: Tensor) -> float:
    assert rollout.advantages is not None
    advantages, rewards = rollout.advantages[rows], rollout.rewards[rows]
    known = rewards[~rewards.isnan()]
    return float(advantages.abs().sum() * known.std()) if len(known) > 1 else 0.0


def _with_group_replaced(rollout: Rollout, rows: Tensor, stored: Rollout) -> Rollout:
    """Return the rollout with `stored` in the place of `rows`, under their group id."""
    device, count = rollout.rewards.device, len(rollout)
    joined = join_rollouts(rollout, checkpoints.to_device_dataclass(stored, device))
    source = torch.arange(count, device=device)
    source[rows] = count + torch.arange(len(rows), device=device)
    selected = select(joined, source)
    completions = dataclasses.replace(selected.completions, group_id=rollout.completions.group_id)
    return dataclasses.replace(selected, completions=completions)
