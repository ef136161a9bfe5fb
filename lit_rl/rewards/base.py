"""Several reward functions, their weights and their checked values."""

from __future__ import annotations

import copy
import math
import reprlib
import statistics
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lit_rl.errors import ConfigError, RewardError, did_you_mean
from lit_rl.rewards.contract import Function, check_callable, check_values, describe, keywords, name_of
from lit_rl.rewards.text import Completion
from lit_rl.rollout import Prompt

LARGE = 1e6
"""Beyond this a reward gets one warning: it swamps the other functions, and float32 loses its small differences."""


@dataclass(frozen=True)
class TrainerState:
    """Where training stands, for rewards that follow a schedule. Read-only."""

    step: int = 0
    """Optimizer steps taken."""
    max_steps: int = -1
    """Optimizer steps of the whole run; -1 where there is no limit."""
    epoch: int = 0

    @property
    def global_step(self) -> int:
        """``step`` under the name that it has in `transformers`."""
        return self.step


@dataclass(frozen=True)
class Scores:
    """What the reward functions said of ``b`` completions. Tensors are float32 on the CPU."""

    names: tuple[str, ...]
    """The ``k`` functions."""
    values: Tensor
    """``(b, k)``: NaN where a function does not apply."""
    total: Tensor
    """``(b,)``: weighted sum over the functions that apply; NaN where none does."""
    metrics: dict[str, float] = field(default_factory=dict)
    """From ``log_metric``: the mean over its calls."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """From ``log_extra``: one value a completion."""


class Rewards:
    """The weighted sum of named reward functions ``f(prompts, completions, **columns) -> list[float | None]``.

    A function is called by keyword with what its signature names: ``prompts``, ``completions``, columns of the data,
    ``completion_ids``, ``trainer_state``, ``log_metric(name, value)``, ``log_extra(column, values)``; with ``**kwargs``
    it gets all of them. It returns one number a completion, or None where it does not apply: None is left out of the
    sum and of every mean, it is never a zero.

    Args:
        functions: Reward functions by name, or a list of them, or one; without names they go by their own.
        weights: Weight of each function by name (1 where not given), or in the order of the functions. None: all 1.

    Raises:
        ConfigError: two functions share a name, or a weight has no function or is not a finite number.
        RewardError: a function is async or cannot be called.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]] | Callable[..., Any],
        weights: Mapping[str, float] | Sequence[float] | None = None,
    ) -> None:
        self.functions = _by_name(functions)
        self.weights = _weights_by_name(weights, list(self.functions))
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"Rewards({', '.join(f'{weight:g} * {name}' for name, weight in self.weights.items())})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.functions)

    def bind(self, columns: Sequence[str]) -> None:
        """Check every signature against the columns of the data, before anything expensive is loaded.

        Raises:
            RewardError: a function needs what is no column; names the function, the argument and the columns.
        """
        for name, function in self.functions.items():
            keywords(name, function, columns)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState | None = None,
    ) -> Scores:
        """Call every function on copies of the inputs, check what came back and sum it up.

        Args:
            prompts: One for each completion, so a prompt of a group stands there as often as it was answered.
            completions: Texts, or lists of assistant messages where the prompts are messages.
            columns: The other columns of the data, one value a completion.
            completion_ids: Token ids of each completion; None where there are none, for functions that do not ask.
            trainer_state: None is the state before the first step.

        Raises:
            RewardError: a function raised, or returned anything but one finite number or None a completion.
        """
        log = _Log(len(completions))
        inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        for key, values in inputs.items():
            if values is not None and len(values) != len(completions):
                raise RewardError(f"{key} has {len(values)} values for {len(completions)} completions.")
        services = {"trainer_state": trainer_state or TrainerState(), "log_metric": log.metric, "log_extra": log.extra}
        by_function = []
        for name, function in self.functions.items():
            wanted = keywords(name, function, columns)
            arguments = {key: services[key] if key in services else _copy(key, inputs[key]) for key in wanted}
            returned = _call(name, function, arguments, len(completions))
            by_function.append(check_values(name, returned, completions))
            self._warn_of_scale(name, by_function[-1])
        values = torch.tensor(by_function, dtype=torch.float32).T.contiguous()
        metrics = {name: statistics.fmean(logged) for name, logged in log.metrics.items()}
        return Scores(self.names, values, self._total(values), metrics, log.extras)

    def _total(self, values: Tensor) -> Tensor:
        weights = torch.tensor(list(self.weights.values()), dtype=torch.float64)
        total = (values.double() * weights).nansum(1).float()
        if total.isinf().any():
            raise RewardError(f"the weighted sum of {', '.join(self.names)} is beyond float32. Use smaller weights.")
        return total.masked_fill(values.isnan().all(1), math.nan)

    def _warn_of_scale(self, name: str, values: list[float]) -> None:
        largest = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
        if largest > LARGE and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"reward function {name!r} returned a value of size {largest:g}. Rewards beyond {LARGE:g} swamp the "
                "other functions; scale it to about 1.",
                stacklevel=3,
            )


class _Log:
    """Takes what the functions log during one call of ``Rewards.score``."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        number = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
        if not isinstance(number, Real) or not math.isfinite(number):
            raise RewardError(f"log_metric({name!r}, ...) takes a finite number; it got {reprlib.repr(value)}.")
        self.metrics.setdefault(name, []).append(float(number))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        rows = values.tolist() if hasattr(values, "tolist") else values  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(rows, list | tuple) or len(rows) != self.rows:
            raise RewardError(f"log_extra({column!r}, ...) takes a list of {self.rows}; it got {describe(values)}.")
        if column in self.extras:
            raise RewardError(f"log_extra({column!r}, ...) was called twice for one batch. Use two names.")
        self.extras[column] = list(rows)


def _copy(key: str, values: Sequence[Any] | None) -> list[Any] | None:
    """A list that a function may change freely."""
    if values is None:
        return None
    if key == "completion_ids":  # plain integers, and too many for deepcopy, which visits each
        return [list(row) for row in values]
    return [copy.deepcopy(row) for row in values]


def _call(name: str, function: Function, arguments: Mapping[str, Any], rows: int) -> Any:
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:  # a reward that calls sys.exit() must not end training with status 0
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(
            f"reward function {name!r} raised {type(error).__name__} while it scored {rows} completions: {error} "
            f"(line {frame.lineno} of {frame.filename})."
        ) from error


def _by_name(functions: Any) -> dict[str, Function]:
    if isinstance(functions, str):
        raise ConfigError(f"functions={functions!r} is a string. Load a path with lit_rl.rewards.from_paths.")
    if isinstance(functions, Mapping):
        named = [(str(name), function) for name, function in functions.items()]
    elif isinstance(functions, Sequence):
        named = [(name_of(function), function) for function in functions]
    else:
        named = [(name_of(functions), functions)]
    if not named:
        raise ConfigError("functions is empty: there is nothing to learn from without a reward function.")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(f"two reward functions are called {twice[0]!r}. Name them: functions={{'a': f, 'b': g}}.")
    for name, function in named:
        check_callable(name, function)
    return dict(named)


def _weights_by_name(weights: Any, names: list[str]) -> dict[str, float]:
    given = {} if weights is None else weights
    if not isinstance(given, Mapping):
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(names):
            raise ConfigError(f"weights={weights!r} must be {len(names)} numbers, for {', '.join(names)}.")
        given = dict(zip(names, given))
    for name, weight in given.items():
        if name not in names:
            raise ConfigError(
                f"weights names {name!r}, which is no reward function. Functions: {', '.join(names)}."
                f"{did_you_mean(str(name), names)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"weights.{name}={weight!r} must be a finite number.")
    return {name: float(given.get(name, 1.0)) for name in names}
