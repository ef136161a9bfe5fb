"""Reports of metrics that alarms watch and that a run does not log."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import lightning as L

from lit_rl.errors import nearest

_LINES = 3
"""Lines of the training's log after which no new metrics are expected."""


class WhatIsLogged:
    """A detector of when all metrics of the training, and of the validation where there is one, have been logged."""

    def __init__(self) -> None:
        self._lines, self._newest = 0, None
        self._open = {"train", "val"}

    def now_known(self, trainer: L.Trainer, *, ended: bool = False) -> set[str]:
        """Return `train`, `val` or both, once all their names are known, each once.

        Called after an optimizer step, or at the end of the training.
        """
        logged = trainer.callback_metrics if self._open else {}
        newest: Any = next((value for name, value in logged.items() if kind_of(name) == "train"), None)
        if newest is not self._newest:
            self._lines, self._newest = self._lines + 1, newest
        if self._lines < _LINES and not ended:
            return set()
        validated = ended or not trainer.enable_validation or any(kind_of(name) == "val" for name in logged)
        found = self._open & ({"train", "val"} if validated else {"train"})
        self._open -= found
        return found


def kind_of(name: str) -> str:
    """Return the stage of a metric: `val`, or `train` for everything else."""
    return "val" if name.startswith("val") else "train"


def sentence(key: str, missing: Sequence[str], named_by: Mapping[str, str], logged: Collection[str]) -> str:
    """Describe an alarm's missing metrics, with similar names that are logged, and the key that names the metric."""
    said = []
    for name in missing:
        near, setting = _near(name, logged), named_by.get(name)
        hint = "" if near is None else f", did you mean {near}?"
        said.append(f"{name}{hint}" + (f" Set callbacks.{key}.{setting}" if hint and setting else ""))
    return f"{key} ({'; '.join(said)})"


def _near(name: str, logged: Collection[str]) -> str | None:
    """Return the nearest metric name, compared without the common prefix."""
    prefix = name[: name.find("/") + 1]
    near = nearest(name.removeprefix(prefix), (each.removeprefix(prefix) for each in logged if each.startswith(prefix)))
    return None if near is None else f"{prefix}{near}"
