"""One call of one reward function: its inputs, what it logs, its outcome or failure, as plain values.

Standard library only: worker processes load this file without PyTorch and NumPy, and recognise arrays by their
methods.
"""

from __future__ import annotations

import copy
import math
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any

from lit_rl.core.errors import ConfigError, RewardError, line_of
from lit_rl.core.process_state import is_raised_by_user_code, mix_seed, seed_generators


@dataclass(frozen=True)
class Opaque:
    """A description of an invalid reward value: no number, None or list of spans."""

    kind: str
    text: str
    hint: str = ""


def to_plain(returned: Any, rows: int) -> Any:
    """Return a list of `rows` plain values for a list, tuple or 1-D array; anything else as `Opaque`."""
    if _is_array(returned):
        if tuple(returned.shape) == (rows,):
            return [_element(value) for value in returned.tolist()]
        hint = " Flatten it: .reshape(-1)." if returned.ndim == 2 and 1 in returned.shape else ""
        return Opaque(type(returned).__name__, describe(returned), hint)
    if isinstance(returned, list | tuple) and len(returned) == rows:
        return [_element(value) for value in returned]
    hint = ""
    if type(returned).__name__ == "generator":
        hint = " Wrap the generator in list(...)."
    elif isinstance(returned, dict):
        hint = " Name each part as a function of its own, or use log_extra."
    return Opaque(type(returned).__name__, describe(returned), hint)


def _element(value: Any) -> Any:
    if value is None or type(value).__name__ == "Failure":
        return value
    if (number := number_of(value)) is not None:
        return number
    if isinstance(value, list | tuple) and all(
        isinstance(part, list | tuple) and len(part) in (2, 3) for part in value
    ):
        return [tuple(_element(each) for each in part) for part in value]  # turns, and spans
    return Opaque(type(value).__name__, reprlib.repr(value))


def plain_copy(value: Any) -> Any:
    """Return a copy of a value that later changes do not affect: arrays and tensors as lists and numbers.

    Objects that cannot be copied, such as a lock, are returned as they are.
    """
    if _is_array(value):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain_copy(each) for each in value]
    if isinstance(value, dict):
        return {key: plain_copy(each) for key, each in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # an object of the user's may refuse in its own way
        return value


def number_of(value: Any) -> int | float | None:
    """Return a value as a number, if it is one of Python or NumPy, or a tensor without dimensions; else None."""
    if _is_array(value) and value.ndim == 0:
        value = value.item()
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:  # Fraction(10**400)
        return math.inf
    except ValueError:  # Decimal("sNaN")
        return math.nan


def _is_array(value: Any) -> bool:
    """Tell whether a value is a NumPy array or scalar, or a tensor, by its methods: neither package is imported
    here."""
    return hasattr(value, "ndim") and hasattr(value, "shape") and hasattr(value, "tolist")


def describe(returned: Any) -> str:
    """Describe a value: its type, its shape or length, its first three items."""
    kind = type(returned).__name__
    if _is_array(returned):
        first = returned[:3].tolist() if returned.ndim else returned.item()
        return f"a {kind} of shape {tuple(returned.shape)} starting with {reprlib.repr(first)}"
    if isinstance(returned, list | tuple):
        return f"a {kind} of {len(returned)} values starting with {reprlib.repr(list(returned[:3]))}"
    return f"{reprlib.repr(returned)} ({kind})"


OBJECTS = "environments"
"""The argument of reward functions by which they get the objects that answered the policy, as TRL passes them."""

SERVICES = ("trainer_state", "log_metric", "log_extra")
"""Arguments that are no data."""


@dataclass(frozen=True)
class TrainerState:
    """The progress of training, for rewards that follow a schedule. Read-only."""

    step: int = 0
    """Optimizer steps taken."""
    max_steps: int = -1
    """Optimizer steps of the whole run; -1 where there is no limit."""
    epoch: int = 0
    seed: int | None = None
    """A number in [0, 2^32): another one for every batch of a run, the same one in an equal run. The global random
    generators are seeded with it, the function and the completion (`Job.seed`). None outside of a run: they are left
    alone."""

    @property
    def global_step(self) -> int:
        """``step`` under the name that it has in `transformers`."""
        return self.step


@dataclass(frozen=True)
class Failure:
    """The reason why a function returned no value."""

    kind: str
    """Name of the exception's class."""
    text: str
    place: str = ""
    """``line 3 of file.py``."""
    trace: str = ""
    row: int | None = None
    """The completion of the batch that it happened on, where that is known."""
    timed_out: bool = False
    died: bool = False
    """True if the worker process ended; `text` says how."""
    output: str = ""
    """The worker process's output, shortened."""


class CallFailed(Exception):
    """A reward function did not return."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class TooManyFailures(RewardError):
    """More failures of a reward's own server than it allows: the run ends, and ``on_error`` scores nothing."""


def ends_the_run(error: BaseException | None) -> bool:
    """Tell whether an error of a function ends the run whatever ``on_error`` is: it is wrong for every row."""
    return isinstance(error, ConfigError | TooManyFailures)


@dataclass(frozen=True)
class Job:
    """A call of a function: its inputs, by the names of its own arguments."""

    numbers: Sequence[int]
    """The place of each completion in the whole batch."""
    inputs: Mapping[str, Sequence[Any] | None]
    """One value a completion; None for ``completion_ids`` where there are none."""
    services: tuple[str, ...] = ()
    trainer_state: TrainerState = field(default_factory=TrainerState)
    per_sample: bool = False
    catch: bool = False
    """Per-sample functions: give a Failure in the place of a completion that it raised on, and go on."""
    max_concurrent: int = 1
    """Per-sample async functions: completions awaited at once."""
    seed: int | None = None
    """Seed of the function's draws from the global random generators in this batch. None: they are not seeded."""

    @property
    def rows(self) -> int:
        return len(self.numbers)

    def select(self, rows: Sequence[int]) -> Job:
        """Return the same job for some of its rows."""
        inputs = {key: None if values is None else [values[i] for i in rows] for key, values in self.inputs.items()}
        return replace(self, numbers=[self.numbers[i] for i in rows], inputs=inputs)

    def row(self, i: int) -> dict[str, Any]:
        """Return the inputs of one row."""
        return {key: None if values is None else values[i] for key, values in self.inputs.items()}

    def copy(self) -> Job:
        """Return the same job with inputs of each completion's own, which a function may change freely."""
        return replace(self, inputs={key: _copy(key, values) for key, values in self.inputs.items()})

    def seed_call(self, row: int | None) -> None:
        """Seed the global random generators for the call for all rows (None) or one, by its first completion."""
        if self.seed is not None and self.rows:
            seed_generators(mix_seed(self.seed, self.numbers[row or 0]))

    def arguments(self, log: Log, row: int | None) -> dict[str, Any]:
        """Return keyword arguments of the call for all rows (None) or one."""
        services = {"trainer_state": self.trainer_state, "log_metric": log.metric, "log_extra": log.extra}
        if row is None:
            values = dict(self.inputs)
        else:
            values = self.row(row)

            def log_extra(column: str, value: Any) -> None:
                log.row_extra(row, column, value)

            services["log_extra"] = log_extra
        return {**values, **{name: services[name] for name in self.services}}


@dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    returned: Any
    """A list of numbers, None, spans, `Opaque` and `Failure`; or one `Opaque` where the function returned no list."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    output: str = ""

    @classmethod
    def concatenate(cls, parts: Sequence[Outcome], rows: Sequence[int]) -> Outcome:
        """Concatenate parts with `rows[i]` rows each; an extra column that a part lacks is None there."""
        columns = dict.fromkeys(column for part in parts for column in part.extras)
        names = dict.fromkeys(name for part in parts for name in part.metrics)
        return cls(
            [value for part in parts for value in part.returned],
            {name: [value for part in parts for value in part.metrics.get(name, [])] for name in names},
            {c: [v for part, n in zip(parts, rows) for v in part.extras.get(c, [None] * n)] for c in columns},
            "".join(part.output for part in parts),
        )


class Log:
    """The metrics and columns that a function logs during one call."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}
        self._given: set[tuple[str, int]] = set()

    def metric(self, name: str, value: float) -> None:
        """Record a metric. Functions know it as ``log_metric``."""
        _check_name("log_metric", name)
        number = number_of(value)
        if number is None or not math.isfinite(number):
            raise RewardError(
                f"log_metric({name!r}, ...) got {reprlib.repr(value)}, expected one finite number. For one value per "
                "completion use log_extra."
            )
        self.metrics.setdefault(name, []).append(float(number))

    def extra(self, column: str, values: Any) -> None:
        """Record a column. Functions that take the batch know it as ``log_extra``."""
        _check_name("log_extra", column)
        rows = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(rows, list | tuple) or len(rows) != self.rows:
            raise RewardError(
                f"log_extra({column!r}, ...) got {describe(values)}, expected a list with one value per completion "
                f"({self.rows})."
            )
        if column in self.extras:
            raise RewardError(f"log_extra({column!r}, ...) was called twice for one batch. Use two names.")
        self.extras[column] = [plain_copy(row) for row in rows]

    def row_extra(self, row: int, column: str, value: Any) -> None:
        """Record one row of a column. Per-sample functions know it as ``log_extra``."""
        _check_name("log_extra", column)
        if (column, row) in self._given:
            raise RewardError(f"log_extra({column!r}, ...) was called twice for one completion. Use two names.")
        self._given.add((column, row))
        self.extras.setdefault(column, [None] * self.rows)[row] = plain_copy(value)


Log.metric.__qualname__, Log.extra.__qualname__ = "log_metric", "log_extra"  # by which Python calls a wrong call


def _check_name(service: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or len(name.splitlines()) > 1:
        raise RewardError(
            f"{service}({name!r:.80}, ...): the name must be a text that is not empty and has no line break."
        )


def _copy(key: str, values: Sequence[Any] | None) -> list[Any] | None:
    if values is None:
        return None
    if key == "completion_ids":  # plain integers, and too many for deepcopy, which visits each
        return [list(row) for row in values]
    if key == OBJECTS:  # of the user's: a copy would be another object, and may not be possible
        return list(values)
    return [copy.deepcopy(row) for row in values]


def run(function: Callable[..., Any], job: Job, wait: Callable[[Awaitable[Any]], Any]) -> Outcome:
    """Call a function on this thread, once or once a completion; `wait` is for one that returns a coroutine.

    Its inputs are copies: also in a worker process, where rows of one prompt share an object.

    Raises:
        CallFailed: it raised (for a per-sample function with ``job.catch``: never).
    """
    log, job = Log(job.rows), job.copy()

    def call(row: int | None) -> Any:
        try:
            job.seed_call(row)
            value = function(**job.arguments(log, row))
            return wait(value) if hasattr(value, "__await__") else value
        except BaseException as error:  # a reward that calls sys.exit() must not end training with status 0
            if not is_raised_by_user_code(error):
                raise
            return _failure_or_raise(error, job, row)

    returned = [call(row) for row in range(job.rows)] if job.per_sample else call(None)
    return Outcome(to_plain(returned, job.rows), log.metrics, log.extras)


async def run_async(function: Callable[..., Any], job: Job) -> Outcome:
    """Await a coroutine function, once or once a completion, then `job.max_concurrent` of them at a time.

    Its inputs are copies. The generators are seeded for draws of a call before its first await.

    Raises:
        CallFailed: as `run`.
    """
    import asyncio  # half of a worker's start, and few functions are async

    log, job = Log(job.rows), job.copy()
    gate = asyncio.Semaphore(job.max_concurrent)

    async def call(row: int | None) -> Any:
        async with gate:
            try:
                job.seed_call(row)
                value = function(**job.arguments(log, row))
                return await value if hasattr(value, "__await__") else value
            except BaseException as error:  # Ctrl-C is raised in the main thread only: here the function raised it
                if not (is_raised_by_user_code(error) or isinstance(error, KeyboardInterrupt)):
                    raise
                return _failure_or_raise(error, job, row)

    if not job.per_sample:
        return Outcome(to_plain(await call(None), job.rows), log.metrics, log.extras)
    tasks = [asyncio.ensure_future(call(row)) for row in range(job.rows)]
    try:
        returned = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return Outcome(to_plain(returned, job.rows), log.metrics, log.extras)


def _failure_or_raise(error: BaseException, job: Job, row: int | None) -> Failure:
    failure = failure_of(error, None if row is None else job.numbers[row])
    if job.catch and row is not None and not ends_the_run(error):
        return failure
    raise CallFailed(failure) from error


def n_completions(rows: int) -> str:
    """Return ``1 completion``, ``2 completions``."""
    return f"{rows} completion{'' if rows == 1 else 's'}"


def failure_of(error: BaseException, row: int | None = None) -> Failure:
    """Return an exception as text, which can be sent to any process."""
    trace = "".join(traceback.format_exception(error))
    return Failure(type(error).__name__, str(error)[:2000], line_of(error), trace[-8000:], row)
