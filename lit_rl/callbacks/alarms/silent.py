"""Metrics that alarms watch and that a run does not log: when that is known, and how it is said."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import lightning as L

from lit_rl.errors import nearest

_LINES = 3
"""Of the training's log, after which what it logs is known: nothing new is expected to come."""


class WhatIsLogged:
    """Says when the names that a run logs are known: those of its training, and of its validation where it has one."""

    def __init__(self) -> None:
        self._lines, self._newest = 0, None
        self._open = {"train", "val"}

    def now_known(self, trainer: L.Trainer, *, ended: bool = False) -> set[str]:
        """`train`, `val` or both, once all their names are known: after this optimizer step, or where the training has
        ended. Each is returned once."""
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
    """Of a metric: `val` of a validation, `train` of everything else."""
    return "val" if name.startswith("val") else "train"


def sentence(key: str, missing: Sequence[str], named_by: Mapping[str, str], logged: Collection[str]) -> str:
    """An alarm with the metrics that it waits for, what is logged under a similar name, and the key that says which."""
    said = []
    for name in missing:
        near, setting = _near(name, logged), named_by.get(name)
        hint = "" if near is None else f", did you mean {near}?"
        said.append(f"{name}{hint}" + (f" Set callbacks.{key}.{setting}" if hint and setting else ""))
    return f"{key} ({'; '.join(said)})"


def _near(name: str, logged: Collection[str]) -> str | None:
    """Of those with the same prefix: what two names share by it makes none of them like the other."""
    prefix = name[: name.find("/") + 1]
    near = nearest(name.removeprefix(prefix), (each.removeprefix(prefix) for each in logged if each.startswith(prefix)))
    return None if near is None else f"{prefix}{near}"
