"""Weighted sums of reward functions, with their checked values: `Rewards`, and `from_paths` for a config.

`Rewards` has a `Caller` and a `ValueWatch` for each of its functions. `score` calls them on a batch, checks and sums
their values, and returns `Scores`. `begin` returns `PendingRewards`, which score completions as they are finished.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lit_rl.core.declared_settings import checked
from lit_rl.core.episode import Prompt
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.user_functions import weights_by_name
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, Positive
from lit_rl.rewards.caller import GROUPS, Caller, CallSettings, EarlyCalls, EarlyRows, FunctionScores
from lit_rl.rewards.classifiers import Classifier, OnRunDevice
from lit_rl.rewards.contract import (
    Completion,
    Function,
    FunctionFromPath,
    LooksAtData,
    Part,
    TakesRewardName,
    argument_names,
    check_callable,
    check_extra_names,
    columns_read,
    load_function,
    name_of,
    text_of,
)
from lit_rl.rewards.jobs import TrainerState


def functions_by_name(functions: Any) -> dict[str, Function]:
    """Return one function, a list or a mapping as a mapping.

    Raises:
        ConfigError: there is none, or two share a name.
        RewardError: one cannot be called.
    """
    if isinstance(functions, str):
        raise ConfigError(f"functions={functions!r} is a string. Load a path with lit_rl.rewards.from_paths.")
    if isinstance(functions, Mapping):
        pairs = [(str(name), function) for name, function in functions.items()]
    elif isinstance(functions, Sequence):
        pairs = [(name_of(function), function) for function in functions]
    else:
        pairs = [(name_of(functions), functions)]
    if not pairs:
        raise ConfigError("functions is empty: there is nothing to learn from without a reward function.")
    duplicates = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if duplicates:
        raise ConfigError(
            f"two reward functions are called {duplicates[0]!r}. Name them by a dictionary: {{'a': f, 'b': g}}."
        )
    for name, function in pairs:
        if not name.strip() or len(name.splitlines()) > 1:
            raise ConfigError(
                f"a reward function is called {name!r}. Give it a name that is not empty and has no line break."
            )
        check_callable(name, function)
    return dict(pairs)


LARGE = 1e6
"""Beyond this a reward gets one warning: it swamps the other functions, and float32 loses its small differences."""

CONSTANT = 50
"""Batches in a row of one and the same value after which a function gets one warning."""


class ValueWatch:
    """A check of one function's values over batches. It is no training state.

    Args:
        name: Of the function.
        constant_limit: Batches in a row of one value that end the run; 0 is never.
    """

    def __init__(self, name: str, constant_limit: int) -> None:
        self.name, self.constant_limit = name, constant_limit
        self._large = False
        self._value, self._batches = math.nan, 0

    def observe(self, values: Sequence[float], completions: Sequence[Completion]) -> None:
        """Take in a batch; NaN is a completion that the function does not apply to.

        Raises:
            RewardError: the last `constant_limit` batches held one and the same value.
        """
        rows = [i for i, value in enumerate(values) if not math.isnan(value)]
        largest = max((abs(values[i]) for i in rows), default=0.0)
        if largest > LARGE and not self._large:
            self._large = True
            warnings.warn(
                f"reward function {self.name!r} returned a value of size {largest:g}. Rewards beyond {LARGE:g} swamp "
                "the other functions; scale it to about 1.",
                stacklevel=3,
            )
        if not rows:
            return
        first = values[rows[0]]
        if any(values[i] != first for i in rows):
            self._batches = 0
            return
        self._batches = self._batches + 1 if first == self._value else 1
        self._value = first
        if self._batches not in (CONSTANT, self.constant_limit):
            return
        text = (
            f"reward function {self.name!r} returned {first:g} for every completion of {self._batches} batches in a "
            "row: it teaches nothing. Look at what it is given; the last completion starts "
            f"{text_of(completions[rows[-1]])[:80]!r}."
        )
        if self._batches == self.constant_limit:
            raise RewardError(f"{text} The run ends because of reward.constant_limit={self.constant_limit}.")
        warnings.warn(text, stacklevel=4)


class PendingRewards:
    """Early calls of several functions.

    Args:
        callers: Of each function, by name.
        inputs: Prompts and columns of the whole batch, under their plural names, one value a completion.
        rows: The rows that each function scores.
        state: The progress of training.
    """

    def __init__(
        self,
        callers: Mapping[str, Caller],
        inputs: Mapping[str, Sequence[Any]],
        rows: Mapping[str, Sequence[int]],
        state: TrainerState,
    ) -> None:
        count = len(inputs["prompts"])
        self._rows = {name: frozenset(of_function) for name, of_function in rows.items()}
        self._completions: list[Any] = [None] * count
        self._ids: list[Any] = [None] * count
        written = {**inputs, "completions": self._completions, "completion_ids": self._ids}
        calls = {
            name: caller.early(caller.job(written, count, state), self._completions) for name, caller in callers.items()
        }
        self._calls: dict[str, EarlyCalls] = {name: each for name, each in calls.items() if each is not None}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def tell(self, row: int, completion: Completion, completion_ids: Sequence[int]) -> None:
        """Record a finished completion and begin to score it. Once a row; a second one for the same row is ignored."""
        if self._completions[row] is not None:
            return
        self._completions[row], self._ids[row] = completion, list(completion_ids)
        for name, calls in self._calls.items():
            if row in self._rows[name]:
                calls.tell(row)

    def of(self, completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]]) -> dict[str, EarlyRows]:
        """Return the early calls of each function, and the recorded rows that are unchanged in the batch."""
        pairs = zip(self._completions, self._ids, completions, completion_ids, strict=True)
        same = {row for row, (text, ids, now, ids_now) in enumerate(pairs) if text == now and ids == list(ids_now)}
        return {name: (calls, same) for name, calls in self._calls.items()}

    def cancel(self) -> None:
        """Cancel the calls, as nobody waits for them any longer."""
        for calls in self._calls.values():
            calls.cancel()


_ROUNDING = 1e-12
"""A sum that is smaller than this share of its parts is rounding error: 1 - 0.7 - 0.3 is 0."""


@dataclass(frozen=True)
class Scores:
    """The scores of ``b`` completions by the reward functions. Tensors are float32 on the CPU."""

    names: tuple[str, ...]
    """The ``k`` functions."""
    values: Tensor
    """``(b, k)``: NaN where a function does not apply; the sum of the spans where it gave spans."""
    total: Tensor
    """``(b,)``: weighted sum over the functions that apply; NaN where none does."""
    weights: Tensor
    """``(b, k)``: the weight of each function in the row's sum; 0 where the row's recipe does not contain it."""
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and count of each metric: over the calls of ``log_metric``, or over completions."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Values from ``log_extra``: one value a completion."""
    span_rewards: list[list[Part]] | None = None
    """The part of ``total`` that was earned at known places: for each completion ``(start, end, weight * value)`` of
    every function that gave spans, in characters of its text, and ``(turn, weight * value)`` of those that gave turns.
    None where no function gave any."""

    def among(self, rows: Sequence[int], count: int) -> Scores:
        """Return scores of `count` completions: these are at `rows`, and the others are unscored."""
        at = torch.tensor(rows, dtype=torch.long)

        def spread(values: Tensor, nothing: float) -> Tensor:
            return values.new_full((count, *values.shape[1:]), nothing).index_copy(0, at, values)

        def listed(values: Sequence[Any], nothing: Any) -> list[Any]:
            by_row = dict(zip(rows, values, strict=True))
            return [by_row.get(row, nothing) for row in range(count)]

        return replace(
            self,
            values=spread(self.values, math.nan),
            total=spread(self.total, math.nan),
            weights=spread(self.weights, 0.0),
            extras={name: listed(values, None) for name, values in self.extras.items()},
            span_rewards=None if self.span_rewards is None else listed(self.span_rewards, []),
        )


@checked("reward")
class Rewards:
    """The weighted sum of named reward functions ``f(prompts, completions, **columns) -> list[float | None]``.

    A function is called by keyword with what its signature names: ``prompts``, ``completions``, columns of the data,
    ``completion_ids``, ``trainer_state``, ``log_metric(name, value)``, ``log_extra(column, values)``; with ``**kwargs``
    it gets all of them. It returns one number a completion, or None where it does not apply: None is left out of the
    sum and of every mean, it is never a zero. In the place of a number it may return a list of ``(start, end, value)``:
    characters of the completion's text that earned a value; or of ``(turn, value)``: turns of the policy that did. The
    completion's reward is their sum.

    A function that names ``prompt`` or ``completion`` instead is called once a completion, with one value of each, and
    returns one number. Both kinds may be ``async def``; these run at the same time as each other.

    A function named by path (`FunctionFromPath`) runs in worker processes that are killed at their limits. Any other
    callable runs in this process: sync ones one after another, with a warning at the limit; nothing can end them.

    Args:
        functions: Reward functions by name, or a list of them, or one; without names they go by their own. None: no
            function, so every completion is unscored.
        weights: Weight of each function by name (1 where not given), or in the order of the functions. None: all 1.
        on_error: Score of a completion that a function raised on, hung on or ended its process on; None ends the run.
        timeout: Seconds that one call of a function may take; None is no limit.
        workers: Processes of each function named by path; several share the completions of a per-sample function, and 0
            runs it in the training process.
        memory_mb: Address space of each worker process in MiB, Linux only; None is no limit.
        recycle_after: Calls after which a worker process is replaced; 0 is never.
        max_concurrent: Completions that an async per-sample function is awaited on at once.
        cache: Values of each function kept in memory, for functions that depend on the prompt, the completion and its
            columns alone; 0 is off. What such a function logs is the mean over completions that were not known.
        constant_limit: Batches in a row of one and the same value after which a function ends the run; 0 is never.
        while_generating: Call per-sample functions for completions that are over, while others are still written.
            Values and metrics are the same; see `begin`.

    Raises:
        ConfigError: two functions share a name, a weight has no function or is not a finite number, or a setting is out
            of range.
        RewardError: a function cannot be called.
    """

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        functions: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]] | Callable[..., Any] | None,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        *,
        on_error: float | None = None,
        timeout: Positive | None = 600.0,
        workers: AtLeastZero = 1,
        memory_mb: AtLeastOne | None = None,
        recycle_after: AtLeastZero = 1000,
        max_concurrent: AtLeastOne = 32,
        cache: AtLeastZero = 0,
        constant_limit: AtLeastZero = 0,
        while_generating: bool = True,
    ) -> None:
        self.functions = {} if functions is None else functions_by_name(functions)
        self.weights = weights_by_name(weights, list(self.functions))
        self.constant_limit, self.while_generating = constant_limit, while_generating
        settings = CallSettings(on_error, timeout, workers, memory_mb, recycle_after, max_concurrent, cache)
        self.settings = settings
        self._callers = {name: Caller(name, function, settings) for name, function in self.functions.items()}
        self._watches = {name: ValueWatch(name, constant_limit) for name in self.functions}
        for name, function in self.functions.items():
            if isinstance(function, TakesRewardName):
                function.take_reward_name(name)

    def __repr__(self) -> str:
        return f"Rewards({', '.join(f'{weight:g} * {name}' for name, weight in self.weights.items())})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.functions)

    @property
    def comparing(self) -> tuple[str, ...]:
        """The functions whose values depend on the other completions of a prompt."""
        return tuple(name for name, caller in self._callers.items() if caller.compares_rows)

    @property
    def of_length(self) -> tuple[str, ...]:
        """The functions of the sum whose values tell how long a completion is, and not whether it is right."""
        return tuple(name for name, each in self._callers.items() if each.measures_length and self.weights[name])

    def naming(self, argument: str) -> tuple[str, ...]:
        """Return the functions whose signature has the argument."""
        return tuple(name for name, each in self.functions.items() if argument in argument_names(name, each))

    def has_level(self, metric: str | None = None) -> bool:
        """Tell whether a prompt's mean reward can be another than 0: that of one function, or of the weighted sum."""
        deciding = [name for name in self.names if self.weights.get(name, 1.0)] if metric is None else [metric]
        return not all(self._callers[name].is_centred for name in deciding)

    def only(self, name: str) -> Rewards:
        """Return one of the functions, with weight 1. Models and workers of its calls are shared."""
        alone = copy.copy(self)
        alone.functions, alone.weights = {name: self.functions[name]}, {name: 1.0}
        alone._callers = {name: self._callers[name]}
        return alone

    def bind(self, columns: Sequence[str]) -> None:
        """Check every signature against the columns of the data, before anything expensive is loaded.

        Raises:
            RewardError: a function needs an argument that is no column; names the function, the argument and the
                columns.
        """
        for caller in self._callers.values():
            caller.bind(columns)

    def reads(self, columns: Sequence[str]) -> set[str]:
        """Return the columns that a function may read."""
        by_function = (columns_read(name, function, columns) for name, function in self.functions.items())
        return set[str]().union(*by_function)

    def check(self, columns: Mapping[str, Sequence[Any]], also: Sequence[str] = ()) -> None:
        """Let those functions refuse the data that look at its values, before anything expensive is loaded.

        Args:
            columns: Of a set of the data, by name.
            also: Further arguments of functions by name, from episodes.
        """
        for name, function in self.functions.items():
            inner = function.function if isinstance(function, FunctionFromPath) else function
            if isinstance(inner, LooksAtData):
                inner.check_columns(self._seen_by(name, columns), also)

    def _seen_by(self, name: str, columns: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
        """Return the rows of the data that a function scores."""
        return columns

    def run_on(self, device: torch.device) -> None:
        """Have reward models loaded on the device of a run, where they name none of their own."""
        for function in self.functions.values():
            if isinstance(function, OnRunDevice):
                function.run_device = device

    def load(self, mesh: DeviceMesh | None = None) -> None:
        """Load the reward models now: a bad one ends the run before it begins. The first call would load them too.

        Args:
            mesh: Of one dimension: ranks that all call `score` equally often, over which weights may be spread. They
                stay whole where a rank could leave a function out, or call it once more: with `cache`, with
                `on_error`, and in recipes.

        Raises:
            ConfigError, StorageError, BackendError: see `RewardModel.load`.
        """
        together = self.every_function_scores and not self.settings.cache and self.settings.on_error is None
        for function in self.functions.values():
            if not isinstance(function, Classifier):
                continue
            if mesh is not None and together:
                function.load_spread(mesh)
            else:
                function.load()

    @property
    def logs_metrics(self) -> bool:
        """True if a function may log metrics under names of its own."""
        return any(caller.logs_metrics for caller in self._callers.values())

    every_function_scores = True
    """True if each function is called for every batch."""

    @property
    def waits_for_ranks(self) -> bool:
        """True if a call of `score` is a collective, which a signal may not leave on one rank alone."""
        return any(isinstance(each, Classifier) and each.lockstep is not None for each in self.functions.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded reward models on the run's device."""
        return sum(function.weight_bytes for function in self.functions.values() if isinstance(function, Classifier))

    def begin(
        self, prompts: Sequence[Prompt], columns: Mapping[str, Sequence[Any]], trainer_state: TrainerState | None = None
    ) -> PendingRewards | None:
        """Prepare for completions that are finished one by one: `tell` the result of each, then pass it on as `begun`.

        Called early are functions that name `prompt` or `completion`, where they are `async def` or run in
        worker processes, and functions whose attribute ``independent_rows`` is True. All others see the whole batch, in
        `score`.

        Args:
            prompts: One for each completion that will come.
            columns: The other columns of the data, one value a completion.
            trainer_state: None is the state before the first step.

        Returns:
            None if no function can be called early.
        """
        if not self.while_generating or not self.functions:
            return None
        inputs = {"prompts": prompts, **columns}
        rows = self._rows_for(inputs)
        callers = {name: self._callers[name] for name in rows}
        begun = PendingRewards(callers, inputs, rows, trainer_state or TrainerState())
        return begun or None

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState | None = None,
        begun: PendingRewards | None = None,
        rows: Sequence[int] | None = None,
        group_ids: Sequence[int] | None = None,
    ) -> Scores:
        """Call every function on copies of the inputs, check the results and sum them up.

        Args:
            prompts: One for each completion, so a prompt of a group is repeated for each of its completions.
            completions: Texts, or lists of assistant messages where the prompts are messages.
            columns: The other columns of the data, one value a completion.
            completion_ids: Token ids of each completion; None where there are none, for functions that do not ask.
            trainer_state: None is the state before the first step.
            begun: The result of `begin`, to which completions of this batch were passed.
            rows: The completions to score; the others are unscored. None: all.
            group_ids: The same number for the completions of one draw of a prompt, for functions that compare them.
                None: not known; such a function then goes by equal prompts.

        Raises:
            RewardError: a function raised, hung or ended its process while ``on_error`` is None, or returned anything
                but one finite number, list of spans or None a completion.
        """
        inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        inputs[GROUPS] = group_ids
        for key, values in inputs.items():
            if values is not None and len(values) != len(completions):
                raise RewardError(
                    f"Rewards.score got {len(values)} values of {key!r} for {len(completions)} completions. Pass one "
                    "value per completion in every column."
                )
        if rows is not None:
            inputs = {key: None if values is None else [values[i] for i in rows] for key, values in inputs.items()}
            return self._scores(inputs, trainer_state, {}).among(rows, len(completions))
        early = begun.of(completions, completion_ids) if begun and completion_ids is not None else {}
        return self._scores(inputs, trainer_state, early)

    def _scores(
        self, inputs: Mapping[str, Any], trainer_state: TrainerState | None, early: Mapping[str, EarlyRows]
    ) -> Scores:
        """Return the scores of all completions of the inputs. Functions are not called on none: they divide by the
        number."""
        completions: Sequence[Completion] = inputs["completions"]
        by_function = {name: FunctionScores([], [], []) for name in self.names}
        if completions:
            by_function = self._call(inputs, completions, trainer_state or TrainerState(), early)
        for name, scores in by_function.items():
            with contextlib.suppress(OSError, ValueError):  # a closed output must not end a run
                if scores.output and sys.stdout is not None:
                    sys.stdout.write(scores.output)
            self._watches[name].observe(scores.values, completions)
        for name, scores in by_function.items():  # after all outputs are printed
            # A function may log the column that it computes in place of one of the data, or repeat one as it is.
            replaced = getattr(self.functions[name], "replaces_column", None)
            changed = [column for column, values in scores.extras.items() if not _equal(values, inputs.get(column))]
            check_extra_names(name, changed, {column for column in inputs if column != replaced})
        weights = self._weights(inputs, len(completions))
        table = torch.tensor([scores.values for scores in by_function.values()], dtype=torch.float64)
        values = table.reshape(len(by_function), len(completions)).T.contiguous()
        return Scores(
            names=self.names,
            values=values.float(),
            total=self._total(values, weights),
            weights=weights.float(),
            metrics=self._metrics(by_function),
            extras=_merged("log_extra", {name: scores.extras for name, scores in by_function.items()}),
            span_rewards=_span_rewards(by_function, weights),
        )

    def _call(
        self,
        inputs: Mapping[str, Any],
        completions: Sequence[Completion],
        state: TrainerState,
        early: Mapping[str, EarlyRows],
    ) -> dict[str, FunctionScores]:
        """Call every function. Those that run elsewhere run while the others run here, one after another."""
        callers = self._callers_for(inputs)
        jobs = {name: caller.job(inputs, len(completions), state) for name, caller in callers.items()}
        begun: dict[str, Future[FunctionScores] | None] = {}
        by_function: dict[str, FunctionScores] = {}
        try:
            for name, caller in callers.items():
                begun[name] = caller.begin(jobs[name], completions, early.get(name))
            for name, future in sorted(begun.items(), key=lambda item: item[1] is not None):
                by_function[name] = callers[name].result(jobs[name], completions, future)
        finally:
            for future in begun.values():
                if future is not None:
                    future.cancel()
        return {name: by_function[name] for name in callers}

    def _callers_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Caller]:
        """Return the caller of each function for these inputs."""
        return self._callers

    def _rows_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
        """Return the rows that each function scores."""
        return dict.fromkeys(self.names, range(len(inputs["prompts"])))

    def _weights(self, inputs: Mapping[str, Any], rows: int) -> Tensor:
        """Return float64 ``(b, k)``: the same for every row."""
        return torch.tensor(list(self.weights.values()), dtype=torch.float64).repeat(rows, 1)

    def _total(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return float32 `(b,)`: sums of float64 that are rounded once, so that 0.1 + 0.6 and 0.7 are the same
        reward."""
        parts = values * weights
        total = parts.nansum(1)
        total = total.masked_fill(total.abs() < _ROUNDING * parts.abs().nansum(1), 0.0).float()
        if total.isinf().any():
            raise RewardError(
                f"the weighted sum of {', '.join(self.names)} does not fit into float32. Use smaller weights."
            )
        return total.masked_fill(values.isnan().all(1), math.nan)

    def _metrics(self, by_function: Mapping[str, FunctionScores]) -> dict[str, tuple[float, int]]:
        """Return the logged metrics, and the shares of completions that failed, hung or were cached."""
        logged = _merged("log_metric", {name: scores.metrics for name, scores in by_function.items()})
        # fsum: the order in which concurrent calls logged must not show
        metrics = {name: (math.fsum(values), len(values)) for name, values in logged.items()}
        for name, scores in by_function.items():
            rows = len(scores.values)
            if self.settings.on_error is not None:
                failures = [failure for failure in scores.failures if failure is not None]
                metrics[f"rewards/{name}/failure_ratio"] = float(len(failures)), rows
                metrics[f"rewards/{name}/timeout_ratio"] = float(sum(f.timed_out for f in failures)), rows
            if self.settings.cache:
                metrics[f"rewards/{name}/cache_hit_ratio"] = float(scores.cache_hits), rows
        return metrics


def _span_rewards(by_function: Mapping[str, FunctionScores], weights: Tensor) -> list[list[Part]] | None:
    if not any(spans is not None for scores in by_function.values() for spans in scores.spans):
        return None
    weighted: list[list[Part]] = [[] for _ in weights]
    for scores, row_weights in zip(by_function.values(), weights.T.tolist(), strict=True):
        for row, (spans, weight) in enumerate(zip(scores.spans, row_weights, strict=True)):
            weighted[row] += [(*place, weight * value) for *place, value in spans or ()]  # pyright: ignore
    return weighted


def _equal(values: Sequence[Any], others: Sequence[Any] | None) -> bool:
    """Tell whether two columns are equal, as functions of TRL log the column of the answers."""
    try:
        return others is not None and list(values) == list(others)
    except ValueError:  # arrays compare elementwise
        return False


def _merged(service: str, by_function: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the values that all functions passed to a service, by their names there."""
    merged: dict[str, list[Any]] = {}
    for function, named in by_function.items():
        for name, values in named.items():
            if name in merged and not (service == "log_extra" and _equal(values, merged[name])):
                raise RewardError(
                    f"{service}({name!r}, ...) was called by {function!r} and by a function before it. Use two names, "
                    f"such as {function + '/' + name!r}."
                )
            merged[name] = values
    return merged


def from_paths(  # noqa: PLR0913 (one keyword a setting, as in the config)
    fn: str | list[str],
    weights: list[float] | None = None,
    *,
    on_error: float | None = None,
    timeout: Positive | None = 600.0,
    workers: AtLeastZero = 1,
    memory_mb: AtLeastOne | None = None,
    recycle_after: AtLeastZero = 1000,
    max_concurrent: AtLeastOne = 32,
    cache: AtLeastZero = 0,
    constant_limit: int = 0,
    while_generating: bool = True,
) -> Rewards:
    """Make rewards from one path or several; functions of the same name are called ``file.name``.

    Args:
        fn: ``package.module:name`` or ``./file.py:name``, or a list of these.
        weights: One for each path. None: all 1.
        on_error: Score of a completion that a function raised on, hung on or ended its process on; None ends the run.
        timeout: Seconds that one call of a function may take; None is no limit. Then its process is killed.
        workers: Processes of each function named by path; several share the completions of a per-sample function, and 0
            runs it in the training process.
        memory_mb: Address space of each worker process in MiB, Linux only; None is no limit.
        recycle_after: Calls after which a worker process is replaced; 0 is never.
        max_concurrent: Completions that an async per-sample function is awaited on at once.
        cache: Values of each function kept in memory, for functions that depend on the prompt, the completion and its
            columns alone; 0 is off. What such a function logs is the mean over completions that were not known.
        constant_limit: Batches in a row of one and the same value after which a function ends the run; 0 is never.
        while_generating: Call per-sample functions for completions that are over, while others are still written.
            Values and metrics are the same.

    Raises:
        ConfigError: `fn` is neither a path nor a list of them, a path does not exist, two functions share a name, or a
            setting is out of range.
        RewardError: a module or file fails on import.
    """
    paths = [fn] if isinstance(fn, str) else fn
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, str) for path in paths):
        raise ConfigError(
            f"reward.fn={fn!r} names no function. Give './my_reward.py:score' or 'package.module:name', or a list of "
            "these."
        )
    functions = [load_function(path) for path in paths]
    counts = Counter(function.__name__ for function in functions)
    names = [f.__name__ if counts[f.__name__] == 1 else f"{f.owner}.{f.__name__}" for f in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"reward.fn holds the same function or file name twice: {', '.join(names)}.")
    return Rewards(
        dict(zip(names, functions)),
        weights,
        on_error=on_error,
        timeout=timeout,
        workers=workers,
        memory_mb=memory_mb,
        recycle_after=recycle_after,
        max_concurrent=max_concurrent,
        cache=cache,
        constant_limit=constant_limit,
        while_generating=while_generating,
    )
