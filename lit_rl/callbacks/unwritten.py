"""Loggers and samples that fail end no run: it is said once when it begins, and once at the end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

PATIENCE = 30.0
"""Seconds of training that the failed calls of one logger may cost, before it is left out."""


class Unwritten:
    """What one writer could not write.

    Args:
        name: As a warning calls the writer.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures, self.seconds = 0, 0.0
        self.error = ""
        """The newest one, in a line."""

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """Go on after this where it raises; the first time there is a warning.

        Args:
            what: That is done, such as `log_metrics`.
        """
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.note(what, error, time.monotonic() - began)

    def note(self, what: str, error: Exception, seconds: float = 0.0) -> None:
        """One failure, which took so many seconds."""
        self.failures += 1
        self.seconds += seconds
        self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if self.failures == 1:
            warnings.warn(
                f"{self.name} failed in {what}: {self.error}. Training goes on, and so do further calls; how many fail "
                "is said at the end.",
                stacklevel=2,
            )

    @property
    def left_out(self) -> bool:
        """Whether waiting for it to fail has cost so much that it is not asked any more."""
        return self.seconds > PATIENCE

    def __str__(self) -> str:
        often = "1 call" if self.failures == 1 else f"{self.failures} calls"
        return f"{self.name}, {often} failed{', then left out' if self.left_out else ''} ({self.error})"


def let_loggers_fail(trainer: L.Trainer) -> L.Trainer:
    """The same Trainer, whose loggers may raise in anything that they are asked: training goes on to the same bits.

    A call that fails is given up, and the next one is tried; a logger whose failed calls took more than `PATIENCE`
    seconds together, such as one that waits for a network, is left out. Errors of its constructor are raised as ever.
    """
    guarded: list[Any] = [
        logger if type(logger) is _Guarded else _Guarded(logger, Unwritten(type(logger).__name__))
        for logger in trainer.loggers
    ]
    trainer.loggers = guarded
    return trainer


def not_written(trainer: L.Trainer) -> list[Unwritten]:
    """The loggers and callbacks of a Trainer that failed to write something."""
    writers: list[Any] = [*trainer.loggers, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    found = [writer.unwritten for writer in writers if isinstance(getattr(writer, "unwritten", None), Unwritten)]
    return [unwritten for unwritten in found if unwritten.failures]


class _Guarded:
    """A logger, or what it logs to, of which neither a call nor an attribute raises. `isinstance` sees its class."""

    __slots__ = ("_inner", "unwritten")

    def __init__(self, inner: Any, unwritten: Unwritten) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "unwritten", unwritten)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:  # strategies that spawn processes send the Trainer to them
        return _Guarded, (self._inner, self.unwritten)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = _Nothing() if self.unwritten.left_out else self._inner
        try:
            found = getattr(inner, name)
        except AttributeError:
            raise  # it has none, and `hasattr` is told so
        except Exception as error:
            self.unwritten.note(name, error)
            found = getattr(_Nothing(), name)
        if name == "experiment":
            return _Guarded(found, self.unwritten)
        return self._spared(found, name) if callable(found) and not isinstance(found, type) else found

    def _spared(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with self.unwritten.spared(name):
                return function(*args, **keywords)

        return call


class _Nothing:
    """Stands for a logger that cannot be used: whatever is called does nothing."""

    name = version = save_dir = log_dir = root_dir = None
    experiment = property(lambda self: self)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **keywords: None
