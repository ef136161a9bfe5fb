"""Credit: from reward scores to the rewards of rows and tokens, and the treatment of the advantages made of them.

scores -> shaping -> running normalisation -> clip -> rewards at tokens (`CreditAssignment`), from which an estimator of
`lit_rl.ops` (or `RoleBaseline`) makes advantages -> whitening -> clip. With `Roles` completions of a prompt are
compared with those of their role, and of their part of it, only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F

from lit_rl.algorithms.chosen_functions import arguments_for, copies_for, name_of, parameters, unwrap
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, RewardError, did_you_mean
from lit_rl.core.rollout import Completions
from lit_rl.core.transfers import to_device
from lit_rl.generation import noise
from lit_rl.generation.collect import response_ids
from lit_rl.ops.ranges import NotNegative, Portion
from lit_rl.ops.reductions import Metrics
from lit_rl.ops.returns import process_supervised
from lit_rl.ops.traits import AdvantageTraits
from lit_rl.rewards.contract import Part, is_turn_reward

# ------------------------------------------------------------------ from scores to credit


@dataclass(frozen=True)
class Credit:
    """The rewards that an advantage is estimated from."""

    rewards: Tensor
    """Float32 `(b,)`: shaped, normalised, clipped, less the KL of the row; NaN if no function applied."""
    token_rewards: Tensor
    """Float32 `(b, t)`: the same rewards, at the tokens that earned them."""
    step_ends: Tensor
    """Bool `(b, t)`: the tokens that earned a reward: ends of spans, and of rows without spans."""
    values: Tensor
    """Float32 `(b, k)`: the value of each reward function; NaN if it, or all of them, did not apply."""
    weights: Tensor
    """Float32 `(b, k)`: the weights of the functions."""
    compared: Tensor
    """Long `(b,)`: equal for completions that are compared with each other: of one prompt, in one role, and of one part
    of it."""
    data_row: Tensor
    """Long `(b,)`: the training row of each."""
    role: Tensor | None = None
    """Long `(b,)`: a number for the role of each row, the same in every process. None without roles."""
    greedy_rewards: Tensor | None = None
    """Float32 `(b,)`: the reward of the greedy completion of each row's prompt, on the scale of `rewards`."""
    gradient_norms: Tensor | None = None
    """Float32 `(b, t)`: squared norm of the gradient of each token's log-prob by the logits."""
    end_id: int | None = None
    """The token that ends a turn: the environment's answer begins with it if the policy did not write it."""

    def columns(self, completions: Completions) -> dict[str, Tensor]:
        """Return all columns that an estimator of advantages may have parameters for."""
        columns = {
            "rewards": self.rewards,
            "group_id": self.compared,
            "data_row": self.data_row,
            "values": self.values,
            "weights": self.weights,
            "lengths": completions.lengths,
            "token_rewards": self.token_rewards,
            "mask": completions.response_mask,
            "step_ends": self.step_ends,
            "turn": turns_of(completions),
            "state": states_of(completions, self.end_id),
        }
        further = {"greedy_rewards": self.greedy_rewards, "gradient_norms": self.gradient_norms, "role": self.role}
        return columns | {name: column for name, column in further.items() if column is not None}

    def less(self, penalty: Tensor, mask: Tensor) -> Credit:
        """Subtract a penalty `(b, t)` of the tokens in `mask`, except in rows without a reward."""
        penalty = penalty.masked_fill(~mask, 0.0)
        per_token = self.token_rewards - penalty.masked_fill(self.rewards.isnan()[:, None], 0.0)
        return replace(self, rewards=self.rewards - penalty.sum(1), token_rewards=per_token)


class CreditAssignment:
    """The pipeline from scores to credit: shaping, normalisation and clipping of rows' rewards, then tokens.

    Args:
        shaping: `(rewards, group_id, ...) -> rewards`; it may also name `lengths` and `ended`. None: no shaping.
        norm: Running normalisation, after the shaping. None: no normalisation.
        clip: Lowest and highest reward of a row, after the normalisation. None: no bounds.
        roles: The roles in which completions were written. None: all are compared with their whole group.
    """

    def __init__(
        self,
        shaping: Callable[..., Tensor] | None,
        norm: RunningNorm | None,
        clip: Sequence[float] | None,
        roles: Roles | None = None,
    ) -> None:
        self.shaping, self.norm, self.roles = shaping, norm, roles
        self.clip = None if clip is None else tuple(clip)
        if self.clip is not None and not (len(self.clip) == 2 and self.clip[0] < self.clip[1]):
            raise ConfigError(f"algo.reward_clip={list(self.clip)} must be [lowest, highest], such as [-10, 10].")

    def __call__(self, scored: Scored, *, tokenizer: Any, ranks: Ranks) -> Credit:
        """Return the rewards of rows and of tokens.

        Args:
            scored: Scores of `b` completions.
            tokenizer: The policy's tokenizer, to find the tokens of spans.
            ranks: The ranks over whose rewards a running norm is taken.

        Raises:
            ConfigError: the functions returned spans, and a setting changes the reward of the row as a whole.
        """
        completions, scores = scored.completions, scored.scores
        mask = completions.response_mask
        changes = {"shaping": self.shaping, "reward_norm": self.norm, "reward_clip": self.clip}
        changed = [f"algo.{name}" for name, setting in changes.items() if setting is not None]
        if scores.span_rewards is not None and changed:
            raise ConfigError(
                f"{', '.join(changed)} changes the rewards of whole completions, but the reward functions returned "
                "values for spans, which stay as they are. Leave it out, or change the values of the spans in the "
                "reward function."
            )
        # Rewards come from the host: the copies are asynchronous.
        total, values, weights = (
            to_device(each, mask.device) for each in (scores.total, scores.values, scores.weights)
        )
        total = total if scored.kept is None else total.masked_fill(~scored.kept, torch.nan)
        role, compared = None, completions.group_id
        if self.roles is not None:
            role, whole = self.roles.numbers(scored)
            compared = within_roles(compared, whole)
        rewards = self._process_rows(completions, total, compared, ranks)
        per_token, step_ends = token_rewards(rewards, completions, scores.span_rewards, tokenizer)
        values = values.masked_fill(rewards.isnan()[:, None], torch.nan)
        greedy = scored.greedy_rewards
        if greedy is not None:  # scaled like sampled ones, which alone update the norm: their variance is another
            greedy = self._clip_rewards(greedy if self.norm is None else self.norm.scaled(greedy))
        end_id = getattr(tokenizer, "eos_token_id", None)
        data_row = torch.tensor(scored.batch.rows)
        data_row = to_device(data_row.repeat_interleave(len(mask) // len(data_row)), mask.device)
        of_rows = rewards, per_token, step_ends, values, weights, compared, data_row, role
        return Credit(*of_rows, greedy, scored.gradient_norms, end_id)

    def _process_rows(self, completions: Completions, rewards: Tensor, compared: Tensor, ranks: Ranks) -> Tensor:
        """Apply shaping, running normalisation and clipping to the rewards of rows, in this order."""
        if self.shaping is not None:
            columns = {"lengths": completions.lengths, "ended": completions.ended}
            rewards = self.shaping(*copies_for(self.shaping, rewards, compared), **arguments_for(self.shaping, columns))
        if self.norm is not None:
            all_ranks = self.norm(ranks.gather(rewards))
            rewards = all_ranks[ranks.rank * len(rewards) :][: len(rewards)]
        return self._clip_rewards(rewards)

    def _clip_rewards(self, rewards: Tensor) -> Tensor:
        return rewards if self.clip is None else rewards.clamp(*self.clip)


def token_rewards(
    rewards: Tensor, completions: Completions, spans: Sequence[Sequence[Part]] | None, tokenizer: Any
) -> tuple[Tensor, Tensor]:
    """Return rewards `(b, t)` at the tokens that earned them, and a mask of these tokens.

    A span's value is at the token that completes its last character, a turn's at the turn's last token. The rest of the
    row's reward (all of it, if no function returned spans or turns) is at the row's last token. So a row always sums to
    its reward; a row without a reward is 0 everywhere.

    Raises:
        RewardError: there is a reward for a turn that the row does not have.
    """
    mask = completions.response_mask
    per_token, ends = torch.zeros(mask.shape, device=rewards.device), torch.zeros_like(mask)
    remaining = rewards.nan_to_num(0.0).clone()
    if spans is not None:
        ids = response_ids(completions)
        for row, row_spans in enumerate(spans):
            columns = mask[row].nonzero().flatten().tolist()
            if columns and not rewards[row].isnan():
                for *place, value in row_spans:
                    if len(place) == 1:
                        token = _last_of_turn(completions, row, int(place[0]))
                    else:
                        token = columns[_token_at(ids[row], int(place[1]), tokenizer)]
                    per_token[row, token] += value
                    ends[row, token] = True
                    remaining[row] -= value
    has_tokens = mask.any(1)
    last = (torch.arange(mask.shape[1], device=mask.device) * mask).amax(1, keepdim=True)
    per_token.scatter_(1, last, per_token.gather(1, last) + (remaining * has_tokens)[:, None].to(per_token.dtype))
    without_spans = (has_tokens & ~ends.any(1))[:, None]
    return per_token, ends.scatter(1, last, ends.gather(1, last) | without_spans)


def turns_of(completions: Completions) -> Tensor:
    """Return the turn of each token, long `(b, t)`; 0 in responses of one turn."""
    mask = completions.response_mask
    return torch.zeros_like(mask, dtype=torch.long) if completions.turn is None else completions.turn


def states_of(completions: Completions, end_id: int | None) -> Tensor:
    """Return a number for the state in which the turn of each token began, long `(b, t)`.

    The state is the environment's answer since the policy's previous turn. Equal answers have equal numbers in every
    row and process, whatever ended the turn before them. A row's first turn has 0: its state is the prompt.
    """
    turn, attended = turns_of(completions), completions.attended
    if attended is None:
        return torch.zeros_like(turn)
    read = attended & ~completions.response_mask
    turn_count = int(turn.max()) + 1
    position = read.cumsum(1)
    first_position = position.new_full((len(turn), turn_count), turn.shape[1]).scatter_reduce(
        1, turn, position.masked_fill(~read, turn.shape[1]), "amin"
    )
    position = position - first_position.gather(1, turn)
    if end_id is not None:  # the answer to a truncated turn begins with the end token
        ended = read & (position == 0) & (completions.response_ids == end_id)
        read = read & ~ended
        position = position - torch.zeros_like(first_position).scatter_add(1, turn, ended.long()).gather(1, turn)
    # Each token is hashed with its place in the answer, so that the sum identifies the text.
    nothing = torch.zeros_like(turn)
    keys = noise.prompt_key(nothing, nothing, completions.response_ids, position)
    answers = keys.new_zeros(len(turn), turn_count).scatter_add(1, turn, keys.masked_fill(~read, 0))
    return F.pad(answers + 1, (1, 0)).gather(1, turn)


def _last_of_turn(completions: Completions, row: int, turn: int) -> int:
    """Return the column of the last token that the policy sampled in a turn."""
    mask, turns = completions.response_mask[row], turns_of(completions)[row]
    columns = (mask & (turns == turn)).nonzero().flatten()
    if not len(columns):
        raise RewardError(
            f"A reward function returned a reward for turn {turn} of a completion with {int(turns[mask].max()) + 1} "
            "turns. Turns are counted from 0."
        )
    return int(columns[-1])


def _token_at(ids: list[int], end: int, tokenizer: Any) -> int:
    """Return the index of the token that completes the text's first `end` characters, by a search over prefixes.

    A part of a character's bytes decodes to other text, so prefixes are compared and not counted.
    """
    wanted = tokenizer.decode(ids, skip_special_tokens=True)[:end]
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        if tokenizer.decode(ids[: middle + 1], skip_special_tokens=True)[:end] == wanted:
            high = middle
        else:
            low = middle + 1
    return low


# ------------------------------------------------------------------ roles

_MOST_ROLES = 64
"""Most roles of a column: one with more holds something else, and each has a metric."""


class Roles:
    """The role in which each completion was written: a column of the data's rows, or of the episodes.

    What stands behind a colon is a part of the role: completions of `solver:p7` are those of the role `solver`, which
    has one baseline, and are compared with others of `solver:p7` only: the attempts at one of the problems that
    proposers made of a prompt.

    Args:
        column: The name of the column. Its values are written as text: 1 and "1" are one role.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self._numbers: dict[str, int] = {}

    def check(self, columns: Mapping[str, Sequence[Any]], of_episodes: Sequence[str]) -> None:
        """Refuse data without the column, or with a row that has no role.

        Args:
            columns: Of the training rows, by name.
            of_episodes: Names of the columns that episodes have besides.

        Raises:
            ConfigError: names the columns that there are, or the row.
        """
        if self.column in of_episodes:
            return
        if self.column not in columns:
            names = [*columns, *of_episodes]
            raise ConfigError(
                f"algo.role={self.column!r} is no column of the training rows. Columns: {', '.join(names) or 'none'}."
                f"{did_you_mean(self.column, names)} Add it with data.map_row, name another with data.rename, or let "
                "a function of env=rollout_function return it (env.columns)."
            )
        for row, value in enumerate(columns[self.column]):
            self._number(value, f"row {row} of the training rows")

    def numbers(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Return a number for the role of each completion, and one for the role with its part, long `(b,)` each: equal
        for equal texts, in every process."""
        values, device = self._of(scored), scored.completions.group_id.device
        roles = [self._number(value, f"completion {i}") for i, value in enumerate(values)]
        wholes = [_digest(":".join(_parts(value))) for value in values]
        return torch.tensor(roles, device=device), torch.tensor(wholes, device=device)

    def metrics(self, scored: Scored, baseline: Callable[[int], float] | None) -> Metrics:
        """Return the mean reward of each role of the rollout, and the baseline that the next one will have.

        Args:
            scored: The rollout.
            baseline: From the number of a role to its baseline. None: there is none.
        """
        found: Metrics = {}
        total, names = scored.scores.total.double(), [_parts(value)[0] for value in self._of(scored)]
        one = torch.ones((), dtype=torch.float64)
        for name in dict.fromkeys(names):
            mine = torch.tensor([each == name for each in names]) & ~total.isnan()
            found[f"role/{name}/reward"] = total[mine].sum(), mine.sum()
            if baseline is not None:
                found[f"role/{name}/baseline"] = one * baseline(self._numbers[name]), one
        return found

    def _of(self, scored: Scored) -> list[Any]:
        if (episodes := scored.completions.episodes) and self.column in episodes[0].extra:
            return [each.extra[self.column] for each in episodes]
        return [value for value in scored.batch.columns[self.column] for _ in range(scored.group_size)]

    def _number(self, value: Any, where: str) -> int:
        if value is None or (name := _parts(value)[0]) == "":
            came = "no value in this column" if value is None or not str(value).strip() else f"{value!r}"
            raise ConfigError(
                f"algo.role={self.column!r}: {where} has {came}, which is no role: allowed is ROLE, or ROLE:PART. Give "
                "every row its role, or leave such rows out (data.map_row)."
            )
        if name not in self._numbers:
            if len(self._numbers) == _MOST_ROLES:
                raise ConfigError(
                    f"algo.role={self.column!r}: the column has more than {_MOST_ROLES} values, so it names no roles. "
                    f"Among them are {', '.join(map(repr, list(self._numbers)[:3]))}. Name a column with few values. "
                    "What differs within a role stands behind a colon: solver:problem7."
                )
            self._numbers[name] = _digest(name)
        return self._numbers[name]


def _parts(value: Any) -> list[str]:
    """Return the role, and the part of it where one is named."""
    return [part.strip() for part in str(value).split(":", 1)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def within_roles(group_id: Tensor, role: Tensor) -> Tensor:
    """Return numbers that are equal for rows of one group and one role, long `(b,)`, the same on every rank.

    Groups of equal numbers and different roles never meet; any two others do so once in 2^64.
    """
    return (group_id * -7046029254386353131) ^ role  # an odd number that spreads small ones over 64 bits


@checked("algo.advantage")
@AdvantageTraits(compares_group=False)
class RoleBaseline:
    """``r - b_role``: the estimator of SPIRAL (role-conditioned advantage estimation, 2506.24119).

    ``b`` is a moving average of what a role has earned: in a game one side may be easier to win, and with a baseline of
    both sides it would be told that it plays well. Rewards are compared with the average of earlier rollouts, which is
    then updated once with the rollout's mean over the scored rows of all ranks: ``b <- decay b + (1 - decay) mean(r)``.
    It begins at 0, the mean of a game that one side wins and the other loses. Without roles there is one average.

    Args:
        decay: Weight of the average so far; 0 compares with the rollout before, 1 with 0.
    """

    def __init__(self, decay: Portion = 0.95) -> None:
        self.decay = decay
        self._baselines: dict[int, float] = {}

    def __call__(self, rewards: Tensor, group_id: Tensor, role: Tensor | None = None) -> Tensor:
        """Return advantages `(b,)`, 0 for rows without a reward, and update the averages with these rewards.

        Args:
            rewards: `(b,)`, of all ranks; NaN: not scored.
            group_id: Not used.
            role: A number for the role of each row. None: all have the same.
        """
        role = torch.zeros_like(group_id) if role is None else role
        advantages, updated = torch.zeros_like(rewards), dict(self._baselines)
        for each in sorted(set(role.tolist())):
            mine, before = (role == each) & ~rewards.isnan(), self.baseline(each)
            advantages = torch.where(mine, rewards - before, advantages)
            if bool(mine.any()):
                updated[each] = self.decay * before + (1 - self.decay) * float(rewards[mine].double().mean())
        self._baselines = updated
        return advantages

    def baseline(self, role: int) -> float:
        """Return the average of a role, by its number."""
        return self._baselines.get(role, 0.0)

    def state(self) -> dict[str, Any]:
        return {"baselines": dict(self._baselines)}

    def load_state(self, saved: dict[str, Any]) -> None:
        self._baselines = dict(saved["baselines"])


# ------------------------------------------------------------------ normalisation


@checked("algo.reward_norm")
class RunningNorm:
    """Running normalisation: rewards less their mean, divided by their standard deviation, since the start of the run.

    Welford's algorithm over every scored reward of every rank. The current rollout is included; rewards that are all
    equal become 0.

    Args:
        eps: Added to the deviation.
    """

    def __init__(self, eps: NotNegative = 1e-8) -> None:
        self.eps = eps
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def __call__(self, rewards: Tensor) -> Tensor:
        """Update with the rewards `(n,)` of all ranks, NaN for unscored ones, and return them normalised."""
        known = rewards[~rewards.isnan()].double()
        if len(known):
            count = self._count + len(known)
            mean, squares = float(known.mean()), float((known - known.mean()).square().sum())
            delta = mean - self._mean
            self._squares += squares + delta * delta * self._count * len(known) / count
            self._mean += delta * len(known) / count
            self._count = count
        return self.scaled(rewards)

    def scaled(self, rewards: Tensor) -> Tensor:
        """Return rewards normalised by the current statistics, without an update."""
        std = math.sqrt(self._squares / max(1, self._count - 1))
        return (rewards - self._mean) / (std + self.eps) if std else rewards - self._mean

    def state(self) -> dict[str, float]:
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state(self, saved: dict[str, float]) -> None:
        self._count, self._mean, self._squares = int(saved["count"]), saved["mean"], saved["squares"]


class Whitening:
    """Normalisation of advantages to mean 0 and variance 1, without rows that have no reward.

    If tokens are whitened and there is one advantage a row, each of the row's tokens gets it: long rows weigh more.

    Args:
        function: `(advantages, ...) -> advantages`; it names `scored` (rows) or `mask` (tokens). None: no whitening.
        of: Name of the estimator, for messages.
    """

    def __init__(self, function: Callable[..., Tensor] | None, of: str) -> None:
        self.function, self.of = function, of

    def __call__(self, advantages: Tensor, rewards: Tensor, completions: Completions, ranks: Ranks) -> Tensor:
        """Return the whitened advantages, `(b,)` or `(b, t)`.

        Args:
            advantages: `(b,)` or `(b, t)`.
            rewards: `(b,)`, NaN for rows without a reward.
            completions: `b` completions.
            ranks: The ranks over whose rows mean and variance are taken.

        Raises:
            ConfigError: rows are to be whitened, and the advantages are of tokens.
        """
        whiten = self.function
        if whiten is None:
            return advantages
        self.check_fits(of_tokens=advantages.ndim == 2)
        scored = ~rewards.isnan()
        mask = completions.response_mask & scored[:, None]
        if advantages.ndim == 1 and "mask" in parameters(whiten):
            advantages = torch.where(mask, advantages[:, None], 0.0)
        columns = {"rewards": advantages, "group_id": completions.group_id, "scored": scored, "mask": mask}

        def over_all(advantages: Tensor, group_id: Tensor, mask: Tensor, scored: Tensor) -> Tensor:
            return whiten(advantages, **arguments_for(whiten, {"mask": mask, "scored": scored}))

        return ranks.apply(over_all, columns)

    def check_fits(self, *, of_tokens: bool) -> None:
        """Refuse to whiten advantages of tokens by rows; advantages of rows may be whitened by tokens.

        Raises:
            ConfigError: names the whitening and the estimator.
        """
        if self.function is None or not of_tokens:
            return
        names = parameters(self.function)
        if "mask" not in names and "scored" in names:
            raise ConfigError(
                f"algo/whitening: {name_of(self.function)} takes one advantage per completion, but {self.of} returns "
                "one per token. Set algo/whitening=tokens."
            )


class AdvantageClip:
    """A bound on the size of advantages.

    Args:
        limit: Largest size, above 0. None: no bound.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit

    def __call__(self, advantages: Tensor) -> Tensor:
        return advantages if self.limit is None else advantages.clamp(-self.limit, self.limit)


class TurnRewardWarning:
    """A warning, given once, if rewards of turns are used with `process_supervised`.

    That estimator compares a step with the mean over all steps of the group. Four episodes that earn 1 a turn over one
    to three turns then have advantage 0 at every token, though each further turn adds 1: it compares the rewards of
    turns, and not their number.

    Args:
        estimator: The estimator of the advantages.
    """

    def __init__(self, estimator: Callable[..., Any]) -> None:
        self._normalises_steps, self._warned = unwrap(estimator) is process_supervised, False

    def check(self, scored: Scored) -> None:
        """Warn if the rollout has rewards of turns. Called before they are credited."""
        if not self._normalises_steps or self._warned or scored.completions.turn is None:
            return
        if any(is_turn_reward(part) for parts in scored.scores.span_rewards or () for part in parts):
            self._warned = True
            rank_zero_warn(
                "algo/advantage=process_supervised compares the reward of a turn with the mean over all turns of its "
                "group, so an episode gains nothing by going on: where every turn earns the same, every advantage is "
                "0, however many turns there were. Take algo/advantage=centered_turns, which compares what was earned "
                "from a turn on with that of the group's other turns of its number, or centered_return_to_go."
            )
