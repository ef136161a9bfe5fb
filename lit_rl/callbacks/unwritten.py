"""Failures to write logs and samples, which end no run: they are reported at the first, and at the end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

PATIENCE = 30.0
"""Seconds of training that the failed calls of one logger may cost before it is left out."""


class Unwritten:
    """The failures of one writer.

    Args:
        name: Name of the writer, for the warning.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures, self.seconds = 0, 0.0
        self.error = ""
        """The newest error, in a line."""

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """Suppress and record an exception of the block, with a warning the first time.

        Args:
            what: The activity, such as `log_metrics`.
        """
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self.note(what, error, time.monotonic() - began)

    def note(self, what: str, error: Exception, seconds: float = 0.0) -> None:
        """Record a failure and the seconds it took."""
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
        """Whether its failures have cost so much time that it is no longer called."""
        return self.seconds > PATIENCE

    def __str__(self) -> str:
        often = "1 call" if self.failures == 1 else f"{self.failures} calls"
        return f"{self.name}, {often} failed{', then left out' if self.left_out else ''} ({self.error})"


def let_loggers_fail(trainer: L.Trainer) -> L.Trainer:
    """Return the same Trainer, whose loggers may raise in any call: training goes on to the same bits.

    A failed call is dropped, and the next one is tried; a logger whose failed calls took more than `PATIENCE` seconds
    in sum, such as one that waits for a network, is left out. Errors of its constructor are still raised.
    """
    guarded: list[Any] = [
        logger if type(logger) is _Guarded else _Guarded(logger, Unwritten(type(logger).__name__))
        for logger in trainer.loggers
    ]
    trainer.loggers = guarded
    return trainer


def not_written(trainer: L.Trainer) -> list[Unwritten]:
    """Return the failures of the loggers and callbacks of a Trainer, where there are any."""
    writers: list[Any] = [*trainer.loggers, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    found = [writer.unwritten for writer in writers if isinstance(getattr(writer, "unwritten", None), Unwritten)]
    return [unwritten for unwritten in found if unwritten.failures]


class _Guarded:
    """A wrapper of a logger or its experiment whose calls and attributes do not raise. `isinstance` sees its class."""

    __slots__ = ("_inner", "unwritten")

    def __init__(self, inner: Any, unwritten: Unwritten) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "unwritten", unwritten)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:  # spawning strategies pickle the Trainer
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
            raise  # it has none, and `hasattr` depends on it
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
    """A no-op stand-in for a logger that cannot be used."""

    name = version = save_dir = log_dir = root_dir = None
    experiment = property(lambda self: self)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **keywords: None
