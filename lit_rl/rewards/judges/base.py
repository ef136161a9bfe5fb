"""Judges: which of two completions of a prompt is better.

A judge is ``judge(prompts, firsts, seconds, **columns) -> list[float | None]``: for each pair the probability in [0, 1]
that its first completion is better. 0.5 is a tie; None is no verdict (the judge failed, or cannot tell): such a pair is
counted and left out, it is never a tie. Beside the columns of the data, all of them one value a pair, a judge is given
``first_rewards`` and ``second_rewards``: the summed rewards, None where none applies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from lit_rl.errors import RewardError
from lit_rl.process_state import process_kept, seed_generators
from lit_rl.rewards.completion import Completion
from lit_rl.rewards.workers.job import TrainerState
from lit_rl.rewards.workers.plain_values import number_of
from lit_rl.rollout import Prompt

Verdict = float | None
"""Probability that the first completion is better, or None."""

LogMetric = Callable[[str, float], None]

_RESERVED = ("firsts", "seconds", "first", "second", "first_rewards", "second_rewards")


@runtime_checkable
class Judge(Protocol):
    """A judge of pairs, as preference methods call it. `as_judge` makes one of a plain function."""

    reads_rewards: bool
    """True if its verdict depends on ``first_rewards`` and ``second_rewards``."""

    def bind(self, columns: Sequence[str]) -> None:
        """Check the columns of the data, before anything expensive is loaded."""
        ...

    def __call__(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        *,
        log_metric: LogMetric | None = None,
        trainer_state: TrainerState | None = None,
        **columns: Sequence[Any],
    ) -> list[Verdict]: ...


def ask(judge: Judge, *pairs: Sequence[Any], trainer_state: TrainerState | None, **columns: Any) -> Any:
    """Call a judge with copies of its inputs: it may change them, and draw from the global generators.

    Args:
        judge: Of anybody's.
        pairs: Prompts, first and second completions.
        trainer_state: With the seed of the generators, which are put back behind the call; None leaves them alone.
        columns: One value a pair each, and ``log_metric``.
    """
    given = [[copy.deepcopy(each) for each in values] for values in pairs]
    named = {
        name: values if callable(values) else [copy.deepcopy(each) for each in values]
        for name, values in columns.items()
    }
    call = partial(judge, *given, trainer_state=trainer_state, **named)
    if trainer_state is None or trainer_state.seed is None:
        return call()
    with process_kept(f"judge {type(judge).__name__}"):
        seed_generators(trainer_state.seed)
        return call()


class RewardJudge:
    """The completion with the higher summed reward is better; equal rewards are a tie.

    Args:
        soft: Give ``sigma(first - second)``, the Bradley-Terry probability, instead of 1, 0.5 or 0. Only methods that
            read a probability (Nash-MD) see a difference.
    """

    reads_rewards = True

    def __init__(self, soft: bool = False) -> None:
        self.soft = soft

    def __repr__(self) -> str:
        return f"RewardJudge(soft={self.soft})"

    def bind(self, columns: Sequence[str]) -> None:
        """Accept any columns but those with a reserved name."""
        check_columns(columns)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        *,
        first_rewards: Sequence[float | None],
        second_rewards: Sequence[float | None],
        **columns: Any,
    ) -> list[Verdict]:
        return [self._verdict(one, two) for one, two in zip(first_rewards, second_rewards, strict=True)]

    def _verdict(self, first: float | None, second: float | None) -> Verdict:
        if first is None or second is None:
            return None
        gap = first - second
        if self.soft:
            return 0.5 + 0.5 * math.tanh(gap / 2)
        return 0.5 + 0.5 * ((gap > 0) - (gap < 0))


def check_columns(columns: Sequence[str]) -> None:
    """Refuse columns of the data that have the name of a judge's argument.

    Raises:
        RewardError: a column of the data has the name of an argument of judges.
    """
    if clashing := [column for column in columns if column in _RESERVED]:
        raise RewardError(
            f"the data column {clashing[0]!r} has the name of an argument that a judge may take. Rename it: "
            f"data.rename={{{clashing[0]}:{clashing[0]}_column}}."
        )


def check_verdicts(name: str, verdicts: Any, pairs: int) -> list[Verdict]:
    """Return the verdicts after checking them.

    Raises:
        RewardError: they are not one probability or None a pair.
    """
    if not isinstance(verdicts, list | tuple) or len(verdicts) != pairs:
        raise RewardError(f"judge {name!r} returned {verdicts!r:.80}; expected a list of {pairs}, one entry a pair.")
    numbers = [number_of(verdict) for verdict in verdicts]
    for i, (verdict, number) in enumerate(zip(verdicts, numbers, strict=True)):
        if verdict is not None and not (number is not None and 0 <= number <= 1):
            raise RewardError(
                f"judge {name!r} returned {verdict!r:.80} for pair {i}; allowed are the probability that the first "
                "completion is better, in [0, 1], and None where there is no verdict."
            )
    return [None if number is None else float(number) for number in numbers]


def swap_columns(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the columns of the same pairs in the other order."""
    other = {"first_rewards": "second_rewards", "second_rewards": "first_rewards"}
    return {name: columns.get(other.get(name, name), values) for name, values in columns.items()}


def average_orders(forth: Sequence[Verdict], back: Sequence[Verdict]) -> list[Verdict]:
    """Return the mean verdicts of both orders; in the second order, the first completion is the other one."""
    return [
        None if one is None or two is None else 0.5 * (one + 1.0 - two) for one, two in zip(forth, back, strict=True)
    ]
