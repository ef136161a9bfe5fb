"""A curriculum: rows are drawn by how well the policy did on them the last time.

`Curriculum` has the settings. `RowDraws` is the state: the last mean reward of each row, by its content, the rows that
were completed and never scored, and the draws that are not used up. It is the same on every rank, and a draw is a pure
function of the seed, the number of the rollout and the rewards that are known, so a resumed run draws what the
uninterrupted one does.

Rollout k is drawn when rollout k - N begins, N being `generator.lag`, so its draw knows the rewards of the rollouts
before k - N: those before k where nothing is drawn ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import fsum, isfinite
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.data.order import RolloutOrder
from lit_rl.data.prompt_set import DIGEST_BYTES, PromptSet
from lit_rl.ops.ranges import NotNegativeFinite, PositiveFinite

_PROPER, _SPARE = 2, 3
"""Streams of random numbers, other ones than those of `RolloutOrder`."""

_SHARES_OF_SUCCESS = (0.25, 0.75)
"""Limits of pools by default: of mean rewards in [0, 1]."""

_ROUNDING = 1e-5
"""Error of a weighted sum of rewards in float32, at most."""


@checked("data.curriculum")
@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Pools of rows by their last mean reward. A rollout draws the rows of each source in proportion to the weights of
    their pools.

    Args:
        at_most: Highest mean reward of each pool but the last, ascending. A mean that is equal belongs to the pool; one
            above all of them belongs to the last pool. The default is for means in [0, 1]; others are warned of.
        weights: Weight of a row of each pool, from 0: one more than `at_most` has. Rows of a pool with weight 0 are not
            drawn, and so not measured again: they stay out for good, as long as other rows of their source have a
            weight above 0.
        unseen: Weight of a row that was in no completed rollout, above 0.
        unscored: Weight of a row that was in some, none of which scored a completion of it, from 0. With 0 it is out
            for good. A row that has a mean keeps it, and its pool, where a later rollout scores nothing.
        metric: Name of the reward function whose mean decides, before its weight. null: the weighted sum of all.
    """

    at_most: Sequence[float] = _SHARES_OF_SUCCESS
    weights: Sequence[float] = (0.2, 1.0, 0.2)
    unseen: PositiveFinite = 1.0
    unscored: NotNegativeFinite = 0.2
    metric: str | None = None

    def __post_init__(self) -> None:
        limits, weights = _numbers("at_most", self.at_most), _numbers("weights", self.weights)
        if not limits or any(low >= high for low, high in pairwise(limits)):
            raise ConfigError(
                f"data.curriculum.at_most={limits} are no limits of pools. Write mean rewards that rise, such as "
                "[0.25, 0.75]."
            )
        if len(weights) != len(limits) + 1:
            raise ConfigError(
                f"data.curriculum.weights={weights} has {len(weights)} numbers, and data.curriculum.at_most={limits} "
                f"makes {len(limits) + 1} pools: one up to each limit, and one above the last. Write a weight for each."
            )
        if min(weights) < 0 or max(weights) == 0:
            raise ConfigError(
                f"data.curriculum.weights={weights}: allowed are numbers of at least 0, one of them above 0."
            )
        if self.metric is not None and not (isinstance(self.metric, str) and self.metric):
            raise ConfigError(
                f"data.curriculum.metric={self.metric!r} is not the name of a reward function. Without it the weighted "
                "sum of the rewards decides."
            )

    @property
    def unseen_pool(self) -> int:
        """Number of the pool of rows that were in no completed rollout; those with a mean count from 0."""
        return len(self.weights)

    @property
    def unscored_pool(self) -> int:
        """Number of the pool of rows that were completed and never scored, the last."""
        return len(self.weights) + 1

    def pools(self, means: np.ndarray, completed: np.ndarray) -> np.ndarray:
        """Return the pool of each row `(n,)`.

        Args:
            means: Mean reward of each row, float32 `(n,)`: NaN is a row without any.
            completed: Bool `(n,)`: rows that were in a completed rollout.
        """
        limits = np.asarray(self.at_most, dtype=np.float32)  # as means are, so that 0.1 is at most 0.1
        without = np.where(completed, self.unscored_pool, self.unseen_pool)
        return np.where(np.isnan(means), without, np.searchsorted(limits, means, side="left"))

    def pool_weights(self) -> np.ndarray:
        """Return the weight of a row of each pool, float64; the last two are of rows without a mean."""
        return np.asarray([*self.weights, self.unseen, self.unscored], dtype=np.float64)

    def pool_names(self) -> list[str]:
        """Return the names of the pools in metrics."""
        return [*(f"pool_{i}" for i in range(len(self.weights))), "unseen", "unscored"]

    def describe(self) -> str:
        """Return what decides a draw, as one text that is equal for equal settings."""
        limits, weights = list(map(float, self.at_most)), list(map(float, self.weights))
        without = f"unseen {float(self.unseen)}, unscored {float(self.unscored)}"
        return f"at_most {limits}, weights {weights}, {without}, metric {self.metric}"


_EXAMPLES = {"at_most": "[0.25, 0.75]", "weights": "[0.2, 1.0, 0.2]"}


def _numbers(name: str, given: Any) -> list[float]:
    """Return a list of finite numbers.

    Raises:
        ConfigError: it is none.
    """
    listed: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [None]
    if not all(isinstance(each, Real) and not isinstance(each, bool) and isfinite(each) for each in listed):
        raise ConfigError(
            f"data.curriculum.{name}={given!r}: write finite numbers, such as data.curriculum.{name}={_EXAMPLES[name]}."
        )
    return listed


def draw_systematically(weights: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Draw `count` indices in proportion to the weights, by systematic sampling (Madow 1949) in a random order.

    The weights lie in a row, shuffled, and are cut at `count` points of equal distance, of which only the first is
    random. So index i is drawn `e = count * weights[i] / sum(weights)` times in expectation, and never fewer than
    floor(e) nor more than ceil(e) times: nothing comes twice before its share asks for it.

    Args:
        weights: `(n,)`, from 0, one of them above 0.
        count: Number of draws.
        random: Source of a permutation and of one uniform number.

    Returns:
        Int64 `(count,)`.
    """
    shuffled = random.permutation(len(weights))
    edges = np.cumsum(weights[shuffled])
    points = (np.arange(count) + random.random()) * (edges[-1] / count)
    last = int(np.flatnonzero(weights[shuffled])[-1])  # rounding may put the last point on the end
    return shuffled[np.minimum(np.searchsorted(edges, points, side="right"), last)]


def order_by_weight(weights: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return a random order without repeats: each index comes next in proportion to its weight among those that are
    left. Sampling by exponential keys (Efraimidis and Spirakis 2006).

    Args:
        weights: `(n,)`, from 0.
        random: Source of `n` exponential numbers.

    Returns:
        Int64 `(m,)`: the indices of weights above 0.
    """
    keys = random.standard_exponential(len(weights))
    found = np.flatnonzero(weights)
    return found[np.argsort(keys[found] / weights[found], kind="stable")]


class RowOutcome(NamedTuple):
    """The rewards of one prompt's completions in a rollout."""

    row: int
    total: float
    """Sum of the rewards that decide, over the scored completions."""
    scored: int


@dataclass(frozen=True)
class Draw:
    """The rows of a rollout, and what was known when they were drawn; plain values, for a checkpoint."""

    number: int
    """Number of the rollout."""
    rows: list[int]
    pools: list[int]
    """Pool of each of the rows."""
    sizes: list[int]
    """Rows of the data in each pool."""
    factors: list[float]
    """Inverse of the weight of each of the rows, the mean weight of its source being 1."""
    evenly: list[int]
    """Sources of which every row has weight 0, so that all of theirs were drawn as if they had 1."""
    reached: int
    """Rows of the data that could be drawn."""


class RowDraws:
    """The draws of a run. The same on every rank.

    Args:
        curriculum: The settings.
        data: The training rows. Rows of equal content have one mean.
        order: Number of rows of a rollout, the seed, and the shares of sources: of each source as many rows are drawn
            as without a curriculum, in expectation.
    """

    def __init__(self, curriculum: Curriculum, data: PromptSet, order: RolloutOrder) -> None:
        self.curriculum, self.order = curriculum, order
        places: dict[bytes, int] = {}
        self._place = np.asarray([places.setdefault(digest, len(places)) for digest in data.digests], dtype=np.int64)
        self._keys = np.frombuffer(b"".join(places), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        self._means = np.full(len(places), np.nan, dtype=np.float32)
        self._completed = np.zeros(len(places), dtype=bool)
        shares = order.sizes if order.weights is None else order.weights
        self._share_of_row = np.repeat([share / size for share, size in zip(shares, order.sizes)], order.sizes)
        self._source = np.repeat(np.arange(len(order.sizes)), order.sizes)
        self._draws: dict[int, Draw] = {}
        self._said_evenly: set[int] = set()
        self._said_outside = tuple(curriculum.at_most) != _SHARES_OF_SUCCESS  # limits that were chosen are right

    def begin(self, number: int) -> list[int]:
        """Return the rows of a rollout that begins; what was drawn for earlier ones is forgotten."""
        self._draws = {each: draw for each, draw in self._draws.items() if each >= number}
        return self.rows(number)

    def rows(self, number: int) -> list[int]:
        """Return the rows of rollout `number`, drawn when they are first asked for."""
        return self.draw(number).rows

    def draw(self, number: int) -> Draw:
        """Return the draw of rollout `number`."""
        if number not in self._draws:
            self._draws[number] = self._new_draw(number)
        return self._draws[number]

    def spare_rows(self, rollout: int, places: range) -> list[int]:
        """Return rows beyond those of a rollout, for the groups that it refuses.

        The endless order of spare rows has one pass after another, each a weighted order of rows with a weight above
        0. The first pass has those that are not in the rollout, so nothing comes a second time before every row came
        once; all later passes have all of them.

        Args:
            rollout: Number of the rollout.
            places: Their places in the endless order of spare rows of this rollout.
        """
        weights, spare, number = self._relative_weights()[0] * self._share_of_row, list[int](), 0
        others = weights.copy()
        others[self.rows(rollout)] = 0
        while len(spare) < places.stop:
            spare += order_by_weight(weights if number else others, self._random(_SPARE, rollout, number)).tolist()
            number += 1
        return spare[places.start : places.stop]

    def observe(self, outcomes: Iterable[RowOutcome]) -> None:
        """Take in a rollout: the mean of a row becomes that of its completions in this rollout.

        Args:
            outcomes: Those of all ranks, in any order. A prompt without a scored completion leaves the mean as it was;
                a row that has none is then unscored.
        """
        totals: dict[int, list[RowOutcome]] = {}
        for outcome in outcomes:
            place = int(self._place[outcome.row])
            self._completed[place] = True
            if outcome.scored:
                totals.setdefault(place, []).append(outcome)
        for place, found in totals.items():  # an exact sum, whatever the order
            self._means[place] = fsum(each.total for each in found) / sum(each.scored for each in found)
        measured = self._means[list(totals)]
        outside = (measured < -_ROUNDING) | (measured > 1 + _ROUNDING)
        if outside.any() and not self._said_outside:
            self._said_outside = True
            rank_zero_warn(
                f"data.curriculum.at_most={list(_SHARES_OF_SUCCESS)}, the default, is for mean rewards from 0 to 1, "
                f"and those of a rollout go from {measured.min():g} to {measured.max():g}. Set "
                "data.curriculum.at_most to limits between the rewards of this run, or data.curriculum.metric to the "
                "name of a reward function from 0 to 1."
            )

    def factors(self, number: int) -> list[float]:
        """Return for each row of a rollout the inverse of its weight, in proportion to the mean weight of its source:
        by it a mean over the rollout estimates the mean over rows that are drawn without a curriculum."""
        return self.draw(number).factors

    def shares(self, number: int) -> dict[str, tuple[float, float]]:
        """Return the shares that are logged of a rollout's draw, as numerators and denominators."""
        draw, found = self.draw(number), dict[str, tuple[float, float]]()
        for pool, name in enumerate(self.curriculum.pool_names()):
            found[f"rows/{name}"] = draw.sizes[pool], len(self._place)
            found[f"drawn/{name}"] = draw.pools.count(pool), len(draw.pools)
        coverage, evenly = (draw.reached, len(self._place)), (len(draw.evenly), len(self.order.sizes))
        return found | {"uniform/coverage": coverage, "evenly": evenly}

    def _new_draw(self, number: int) -> Draw:
        relative, evenly = self._relative_weights()
        if new := sorted(set(evenly) - self._said_evenly):
            several = len(self.order.sizes) > 1
            of_sources = f" of {', '.join(f'data.sources[{source}]' for source in new)}" if several else ""
            rank_zero_warn(
                f"Every row{of_sources} is in a pool of weight 0 (data.curriculum.weights="
                f"{list(self.curriculum.weights)}, unscored={self.curriculum.unscored}), so rollout {number} draws all "
                "of them alike, which measures them anew."
            )
        self._said_evenly = set(evenly)
        random = self._random(_PROPER, number)
        rows = draw_systematically(relative * self._share_of_row, self.order.prompts_per_rollout, random)
        pools = self._pools()
        sizes = np.bincount(pools, minlength=self.curriculum.unscored_pool + 1)
        return Draw(
            number,
            rows.tolist(),
            pools[rows].tolist(),
            sizes.tolist(),
            factors=(1 / relative[rows]).tolist(),
            evenly=evenly,
            reached=int(np.count_nonzero(relative)),
        )

    def _pools(self) -> np.ndarray:
        return self.curriculum.pools(self._means, self._completed)[self._place]

    def _relative_weights(self) -> tuple[np.ndarray, list[int]]:
        """Return the weight of each row relative to the mean of its source, and the sources without a row of weight
        above 0, whose rows weigh the same."""
        weights, rows = self.curriculum.pool_weights()[self._pools()], np.asarray(self.order.sizes)
        evenly = np.bincount(self._source, weights) == 0
        weights[evenly[self._source]] = 1.0
        mean = np.bincount(self._source, weights) / rows
        return weights / mean[self._source], np.flatnonzero(evenly).tolist()

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.order.seed, *key])

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Return the means of rows that were completed, by content (NaN: never scored), and the draws that are not
        used up; tensors and plain values."""
        seen = np.flatnonzero(self._completed)
        return {
            "keys": torch.from_numpy(self._keys[seen]),
            "means": torch.from_numpy(self._means[seen]),
            "draws": [asdict(draw) for draw in self._draws.values()],
        }

    def load_state(self, saved: Mapping[str, Any], *, same_rows: bool) -> None:
        """Restore what `state` returned. Means of rows that are no longer there are left out, and it is said.

        Args:
            saved: The state.
            same_rows: Whether the rows and their order are those of the state; else its draws are of other rows.
        """
        known = dict(zip(map(bytes, saved["keys"].cpu().numpy()), saved["means"].tolist()))
        keys = list(map(bytes, self._keys))
        self._completed = np.asarray([key in known for key in keys], dtype=bool)
        self._means = np.asarray([known.pop(key, np.nan) for key in keys], dtype=np.float32)
        self._draws = {each["number"]: Draw(**each) for each in saved["draws"]} if same_rows else {}
        if known:
            rank_zero_info(
                f"data.curriculum: the checkpoint knows the rewards of {len(known)} rows that are no longer in the "
                "data. They are left out."
            )
