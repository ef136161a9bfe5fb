"""Judges: which of two completions of a prompt is better, by summed rewards or by a function of the user's.

A judge is ``judge(prompts, firsts, seconds, **columns) -> list[float | None]``: for each pair the probability in
[0, 1] that its first completion is better. 0.5 is a tie; None is no verdict (the judge failed, or cannot tell):
such a pair is counted and left out, it is never a tie. Beside the columns of the data, all of them one value a
pair, a judge is given ``first_rewards`` and ``second_rewards``: the summed rewards, None where none applies.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.process_state import preserve_process_state, seed_generators
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, Positive
from lit_rl.rewards.caller import Caller, CallSettings, FunctionScores
from lit_rl.rewards.contract import Completion, argument_names, check_callable, is_per_sample, load_function, name_of
from lit_rl.rewards.jobs import TrainerState, number_of

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


def ask_judge(judge: Judge, *pairs: Sequence[Any], trainer_state: TrainerState | None, **columns: Any) -> Any:
    """Call a judge with copies of its inputs: it may change them, and draw from the global generators.

    Args:
        judge: Of anybody's.
        pairs: Prompts, first and second completions.
        trainer_state: With the seed of the generators, which are put back behind the call; None leaves them alone.
        columns: One value a pair each, and ``log_metric``.
    """
    copies = [[copy.deepcopy(each) for each in values] for values in pairs]
    named = {
        name: values if callable(values) else [copy.deepcopy(each) for each in values]
        for name, values in columns.items()
    }
    call = partial(judge, *copies, trainer_state=trainer_state, **named)
    if trainer_state is None or trainer_state.seed is None:
        return call()
    with preserve_process_state(f"judge {type(judge).__name__}"):
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
        check_judge_columns(columns)

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


def check_judge_columns(columns: Sequence[str]) -> None:
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


@checked("judge")
class FunctionJudge:
    """A function of your own as a judge.

    ``fn(prompts, firsts, seconds, ...) -> list[float | None]`` is called once a batch, by keyword with what its
    signature names: also columns of the data, ``first_rewards``, ``second_rewards``, ``completions`` (both of each
    pair), ``trainer_state`` and ``log_metric``. One that names ``prompt`` is called once a pair, with ``prompt``,
    ``first`` and ``second``. Both may be ``async def``. One named by path runs in worker processes that are killed at
    their limits, any other in this process: just as reward functions do.

    Args:
        fn: ``package.module:name`` or ``./file.py:name``, or a callable.
        skip_errors: Count a pair as without a verdict where the function raises, hangs or ends its process, instead of
            ending the run.
        timeout: Seconds that one call may take; None is no limit.
        workers: Processes of a function named by path; 0 runs it in the training process.
        memory_mb: Address space of each worker process in MiB, Linux only; None is no limit.
        recycle_after: Calls after which a worker process is replaced; 0 is never.
        max_concurrent: Pairs that an async function of single pairs is awaited on at once.

    Raises:
        ConfigError: there is no such function, or a setting is out of range.
        RewardError: it cannot be called, or fails on import.
    """

    def __init__(
        self,
        fn: str | Callable[..., Any],
        *,
        skip_errors: bool = False,
        timeout: Positive | None = 600.0,
        workers: AtLeastZero = 1,
        memory_mb: AtLeastOne | None = None,
        recycle_after: AtLeastZero = 1000,
        max_concurrent: AtLeastOne = 32,
    ) -> None:
        self._pairs = _PairCaller(fn, skip_errors, timeout, workers, memory_mb, recycle_after, max_concurrent)
        self.reads_rewards = self._pairs.names_rewards

    def __repr__(self) -> str:
        return f"FunctionJudge({self._pairs.name})"

    def bind(self, columns: Sequence[str]) -> None:
        """Raise RewardError if the function needs an argument that is no column."""
        self._pairs.bind(columns)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        *,
        log_metric: LogMetric | None = None,
        trainer_state: TrainerState | None = None,
        **columns: Sequence[Any],
    ) -> list[Verdict]:
        values = self._pairs.ask(prompts, firsts, seconds, columns, log_metric, trainer_state)
        return check_verdicts(self._pairs.name, values, len(firsts))


@checked("judge")
class PairwiseJudge:
    """A function that names the better one of a pair: ``fn(prompt, first, second, ...) -> 0 | 1 | None``.

    0 is the first, 1 the second, None (or -1) no verdict. It may also name columns of the data and be ``async def``.

    Args:
        fn: ``package.module:name`` or ``./file.py:name``, or a callable.
        both_orders: Ask a second time with the two exchanged and average, so that a liking for a place cancels out: a
            pair of which the same place wins twice is a tie. One answer without a verdict is none for the pair.
        skip_errors: As in `FunctionJudge`.
        timeout: As in `FunctionJudge`, for all pairs of a batch.
        workers: As in `FunctionJudge`; several share the pairs of a batch.
        memory_mb: As in `FunctionJudge`.
        recycle_after: As in `FunctionJudge`.
        max_concurrent: As in `FunctionJudge`.

    Raises:
        ConfigError: there is no such function, it does not take one pair, or a setting is out of range.
        RewardError: it cannot be called, or fails on import.
    """

    def __init__(
        self,
        fn: str | Callable[..., Any],
        *,
        both_orders: bool = True,
        skip_errors: bool = False,
        timeout: Positive | None = 600.0,
        workers: AtLeastZero = 1,
        memory_mb: AtLeastOne | None = None,
        recycle_after: AtLeastZero = 1000,
        max_concurrent: AtLeastOne = 32,
    ) -> None:
        self._pairs = _PairCaller(fn, skip_errors, timeout, workers, memory_mb, recycle_after, max_concurrent)
        if not self._pairs.per_pair:
            raise ConfigError(
                f"judge.fn: {self._pairs.name!r} takes no single pair: a pairwise function names prompt, first and "
                "second. One that takes a whole batch (prompts, firsts, seconds) is judge=function."
            )
        self.both_orders = both_orders
        self.reads_rewards = self._pairs.names_rewards

    def __repr__(self) -> str:
        return f"PairwiseJudge({self._pairs.name}, both_orders={self.both_orders})"

    def bind(self, columns: Sequence[str]) -> None:
        """Raise RewardError if the function needs an argument that is no column."""
        self._pairs.bind(columns)

    def __call__(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        *,
        log_metric: LogMetric | None = None,
        trainer_state: TrainerState | None = None,
        **columns: Sequence[Any],
    ) -> list[Verdict]:
        services = log_metric, trainer_state
        forth = self._verdicts(self._pairs.ask(prompts, firsts, seconds, columns, *services))
        if not self.both_orders:
            return forth
        back = self._verdicts(self._pairs.ask(prompts, seconds, firsts, swap_columns(columns), *services))
        return average_orders(forth, back)

    def _verdicts(self, answers: Sequence[float | None]) -> list[Verdict]:
        for i, answer in enumerate(answers):
            if answer not in (0, 1, -1, None):
                raise RewardError(
                    f"judge {self._pairs.name!r} returned {answer!r} for pair {i}; allowed are 0 (the first is "
                    "better), 1 (the second) and None (no verdict). One that gives probabilities is judge=function."
                )
        return [None if answer in (-1, None) else 1.0 - answer for answer in answers]  # pyright: ignore


class _PairCaller:
    """One function of pairs under its settings, called as a reward function is (`Caller`)."""

    def __init__(
        self,
        fn: str | Callable[..., Any],
        skip_errors: bool,
        timeout: float | None,
        workers: int,
        memory_mb: int | None,
        recycle_after: int,
        max_concurrent: int,
    ) -> None:
        function = load_function(fn, "judge.fn") if isinstance(fn, str) else fn
        self.name = name_of(function)
        check_callable(self.name, function)
        self.per_pair = is_per_sample(self.name, function)
        # The score of a failed pair is never read: its entry in `failures` marks it as without a verdict.
        on_error = 0.5 if skip_errors else None
        settings = CallSettings(on_error, timeout, workers, memory_mb, recycle_after, max_concurrent, cache=0)
        self._caller = Caller(self.name, function, settings)

    @property
    def names_rewards(self) -> bool:
        return bool({"first_rewards", "second_rewards"} & argument_names(self.name, self._caller.function))

    def bind(self, columns: Sequence[str]) -> None:
        check_judge_columns(columns)
        offered = ["first", "second"] if self.per_pair else ["firsts", "seconds"]
        self._caller.bind([*columns, *offered, "first_rewards", "second_rewards"])

    def ask(
        self,
        prompts: Sequence[Prompt],
        firsts: Sequence[Completion],
        seconds: Sequence[Completion],
        columns: Mapping[str, Sequence[Any]],
        log_metric: LogMetric | None,
        trainer_state: TrainerState | None,
    ) -> list[float | None]:
        """Return its value for each pair; None also where it failed and errors are skipped."""
        names = ("first", "second") if self.per_pair else ("firsts", "seconds")
        inputs = {
            "prompts": prompts,
            "completions": [list(pair) for pair in zip(firsts, seconds, strict=True)],
            "completion_ids": None,
            names[0]: firsts,
            names[1]: seconds,
            **columns,
        }
        try:
            result = self._result(inputs, firsts, trainer_state or TrainerState())
        except RewardError as error:
            error.add_note("(It was asked as a judge: its settings are judge.timeout, judge.skip_errors and so on.)")
            raise
        for name, values in result.metrics.items():
            for value in values:
                if log_metric is not None:
                    log_metric(name, value)
        failed = [failure is not None for failure in result.failures]
        return [None if bad or math.isnan(value) else value for bad, value in zip(failed, result.values, strict=True)]

    def _result(self, inputs: Mapping[str, Any], firsts: Sequence[Completion], state: TrainerState) -> FunctionScores:
        job = self._caller.job(inputs, len(firsts), state)
        begun = self._caller.begin(job, firsts)
        try:
            return self._caller.result(job, firsts, begun)
        finally:
            if begun is not None:
                begun.cancel()


def as_judge(judge: Any) -> Judge:
    """Return a judge for a judge, a function, or None (the summed reward decides)."""
    if judge is None:
        return RewardJudge()
    if isinstance(judge, Judge):
        return judge
    return FunctionJudge(judge)
