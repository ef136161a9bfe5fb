"""Which groups, and which members of a group, a rollout is learned from: between reward and advantage."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lit_rl.algorithms.rollouts.rows import joined, take_rows
from lit_rl.errors import ConfigError, RewardError, in_range
from lit_rl.generation.base import is_exact
from lit_rl.generation.collect import as_reward_input, response_ids
from lit_rl.ops.advantages import group_std
from lit_rl.rewards.functions.contract import keywords
from lit_rl.rewards.sums.weighted import Scores
from lit_rl.rollout import Completions, PromptBatch

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.on_policy import OnPolicyModule

Selected = tuple[PromptBatch, Completions, Scores, Tensor | None]
"""The rollout's batch, completions and scores, and which rows are learned from: bool `(b,)`, or None for all."""


class GroupSelection(Protocol):
    """Takes a scored rollout of this rank, and gives one of the same number of rows back."""

    def __call__(
        self, module: OnPolicyModule, batch: PromptBatch, completions: Completions, scores: Scores
    ) -> Selected: ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly."""
        ...

    def load_state(self, saved: dict[str, Any]) -> None: ...


class DynamicSampling:
    """Replace groups whose completions all have the same reward, which teach nothing: DAPO (2503.14476, section 3.2).

    Fresh prompts are drawn, completed and scored until every place is taken by a group with some spread, or the cap is
    reached; a group that is left over then takes no part in the loss, and its tokens are in no denominator. A group
    without two scored rows counts as one without spread. Spare prompts come from an order of their own over the
    training rows, so the epochs, and with them the number of optimizer steps, are what they would be without.

    Logged: `groups/dropped` (groups without spread in the first draw), `groups/drawn` (spare prompts completed) and
    `groups/empty` (places that the cap left without a group), each a count over all ranks.

    Args:
        max_draws: Spare prompts completed for one rollout, all ranks together; 0 only drops.
    """

    def __init__(self, max_draws: int = 256) -> None:
        in_range("algo.groups.max_draws", max_draws, low=0)
        self.max_draws = max_draws
        self._position = 0

    def __call__(
        self, module: OnPolicyModule, batch: PromptBatch, completions: Completions, scores: Scores
    ) -> Selected:
        places = _without_spread(completions, scores)
        wanted = module.counts_of_ranks(len(places))
        dropped, drawn, position = sum(wanted), 0, self._position
        while sum(wanted) and drawn < self.max_draws:
            shares = _shares(wanted, self.max_draws - drawn)
            before = sum(shares[: module.global_rank])
            mine = shares[module.global_rank]
            if mine:
                start = position + before
                extra = _draw(module, range(start, start + mine), rollout=batch.rollout, first=drawn + before)
                batch, completions, scores, places = _fill(batch, completions, scores, places, *extra)
            elif not is_exact(module.generator):  # to ask an engine is a collective: one completion, not looked at
                spare = module.trainer.datamodule.spare  # pyright: ignore[reportAttributeAccessIssue]
                one = spare.batch(range(position, position + 1), rollout=batch.rollout, first=drawn)
                module.generate(one, group_size=1)
            drawn += sum(shares)
            position += sum(shares)
            wanted = module.counts_of_ranks(len(places))
        self._position = position  # only now: where the generator fails, the rollout is drawn again from its beginning
        one = torch.ones((), device=module.device)
        empty = sum(wanted)
        counts = {"groups/dropped": dropped, "groups/drawn": drawn, "groups/empty": empty}
        # Every rank adds the same count, so that the average over ranks is the count.
        module.record({name: (one * count, one) for name, count in counts.items()})
        return batch, completions, scores, _rows_outside(places, completions, len(batch))

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state(self, saved: dict[str, Any]) -> None:
        self._position = saved["position"]


@dataclass(frozen=True)
class TopOfGroup:
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

    def fits(self, group_size: int) -> None:
        """Raises ConfigError: a group has fewer completions than are to be kept."""
        if self.keep > group_size:
            raise ConfigError(
                f"algo.groups.keep={self.keep} is more than algo.group_size={group_size}: nothing to leave out."
            )

    def __call__(
        self, module: OnPolicyModule, batch: PromptBatch, completions: Completions, scores: Scores
    ) -> Selected:
        values = self._scores(module, batch, completions, scores).reshape(len(batch), -1)
        values = values.masked_fill(scores.total.reshape(values.shape).isnan(), -torch.inf)
        # A stable sort: of equal scores the earlier completion is kept, the same one on every machine.
        best = values.sort(dim=1, descending=True, stable=True).indices[:, : self.keep]
        kept = torch.zeros(values.shape, dtype=torch.bool).scatter_(1, best, True).flatten()
        module.record({"groups/kept_length": _mean(completions.lengths.cpu(), kept)})
        return batch, completions, scores, kept.to(completions.group_id.device)

    def _scores(self, module: OnPolicyModule, batch: PromptBatch, completions: Completions, scores: Scores) -> Tensor:
        texts = module.tokenizer.batch_decode(response_ids(completions), skip_special_tokens=True)
        prompts, answers, columns = as_reward_input(batch, texts, len(texts) // len(batch))
        columns = {**columns, "rewards": scores.total.tolist(), "lengths": completions.lengths.tolist()}
        offered = {"prompts": prompts, "completions": answers, **columns}
        wanted = keywords("algo.groups.score", self.score, columns)
        got = self.score(**{name: offered[name] for name in wanted if name in offered})
        try:
            values = torch.as_tensor(got, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):  # no numbers
            values = torch.tensor(torch.nan)
        if values.shape != scores.total.shape or bool(values.isnan().any()):
            raise RewardError(
                f"algo.groups.score returned {reprlib.repr(got)} for {len(texts)} completions; it takes one number, "
                "and no NaN, for each."
            )
        return values

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, saved: dict[str, Any]) -> None:
        pass


def shortest(lengths: list[int]) -> list[float]:
    """The shorter the better (GFPO's first metric)."""
    return [-float(length) for length in lengths]


def reward_per_token(rewards: list[float], lengths: list[int]) -> list[float]:
    """Reward divided by length (GFPO's token efficiency); an unscored completion comes last anyway."""
    return [0.0 if reward != reward else reward / max(1, length) for reward, length in zip(rewards, lengths)]


def _without_spread(completions: Completions, scores: Scores) -> list[int]:
    """Places (indices of prompts) of the groups in which every scored row has the same reward."""
    group_id = completions.group_id.cpu()
    std = group_std(scores.total, group_id)
    flat = [bool((std[group_id == group] == 0).all()) for group in group_id.unique()]
    return [place for place, is_flat in enumerate(flat) if is_flat]


def _shares(wanted: list[int], left: int) -> list[int]:
    """How many prompts each rank draws next: what it wants, in the order of ranks, as long as there are any left."""
    shares = []
    for count in wanted:
        shares.append(min(count, left))
        left -= shares[-1]
    return shares


def _draw(
    module: OnPolicyModule, positions: range, *, rollout: int, first: int
) -> tuple[PromptBatch, Completions, Scores]:
    batch = module.trainer.datamodule.spare.batch(positions, rollout=rollout, first=first)  # pyright: ignore
    completions = module.generate(batch)
    return batch, completions, module.reward(batch, completions)


def _fill(
    batch: PromptBatch,
    completions: Completions,
    scores: Scores,
    places: list[int],
    extra_batch: PromptBatch,
    extra: Completions,
    extra_scores: Scores,
) -> tuple[PromptBatch, Completions, Scores, list[int]]:
    """Put fresh groups that have some spread into the empty places; what is left of both is given back or dropped."""
    flat = set(_without_spread(extra, extra_scores))
    good = [i for i in range(len(extra_batch)) if i not in flat][: len(places)]
    count = len(batch)
    source = list(range(count))
    for place, new in zip(places, good):
        source[place] = count + new
    joint = joined((batch, completions, scores), (extra_batch, extra, extra_scores))
    kept_ids = completions.group_id
    batch, completions, scores = take_rows(*joint, source)
    return batch, dataclasses.replace(completions, group_id=kept_ids), scores, places[len(good) :]


def _rows_outside(places: list[int], completions: Completions, prompts: int) -> Tensor | None:
    if not places:
        return None
    inside = torch.zeros(prompts, dtype=torch.bool)
    inside[places] = True
    kept = ~inside.repeat_interleave(len(completions) // prompts)
    return kept.to(completions.group_id.device)


def _mean(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return values[rows].double().sum(), rows.double().sum()
