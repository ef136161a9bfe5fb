"""Judges that are functions of yours: of a batch of pairs, or of one pair."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.errors import ConfigError, RewardError, in_range
from lit_rl.rewards.completion import Completion
from lit_rl.rewards.execution.caller import Caller
from lit_rl.rewards.execution.result import FunctionScores
from lit_rl.rewards.execution.settings import CallSettings
from lit_rl.rewards.functions.by_path import load_function
from lit_rl.rewards.functions.contract import argument_names, check_callable, is_per_sample, name_of
from lit_rl.rewards.judges.base import (
    Judge,
    LogMetric,
    RewardJudge,
    Verdict,
    average_orders,
    check_columns,
    check_verdicts,
    swap_columns,
)
from lit_rl.rewards.workers.job import TrainerState
from lit_rl.rollout import Prompt


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
        timeout: float | None = 600.0,
        workers: int = 1,
        memory_mb: int | None = None,
        recycle_after: int = 1000,
        max_concurrent: int = 32,
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
        timeout: float | None = 600.0,
        workers: int = 1,
        memory_mb: int | None = None,
        recycle_after: int = 1000,
        max_concurrent: int = 32,
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
        if timeout is not None:
            in_range("judge.timeout", timeout, low=0, open_low=True)
        if memory_mb is not None:
            in_range("judge.memory_mb", memory_mb, low=1)
        in_range("judge.workers", workers, low=0)
        in_range("judge.recycle_after", recycle_after, low=0)
        in_range("judge.max_concurrent", max_concurrent, low=1)
        function = _load(fn) if isinstance(fn, str) else fn
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
        check_columns(columns)
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


def _load(path: str) -> Callable[..., Any]:
    """Return the function at a path, with the judge's key in errors in place of the reward's."""
    try:
        return load_function(path)
    except (ConfigError, RewardError) as error:
        raise type(error)(re.sub(r"^reward\.fn\b", "judge.fn", str(error))) from error


def as_judge(judge: Any) -> Judge:
    """Return a judge for a judge, a function, or None (the summed reward decides)."""
    if judge is None:
        return RewardJudge()
    if isinstance(judge, Judge):
        return judge
    return FunctionJudge(judge)
