"""A reward that is a function of several: it gets their values, and what it returns is the total."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.rewards.completion import Completion
from lit_rl.rewards.execution.caller import Caller, Early
from lit_rl.rewards.execution.result import FunctionScores
from lit_rl.rewards.functions.by_path import load_function
from lit_rl.rewards.sums.weighted import Rewards
from lit_rl.rewards.workers.job import TrainerState

JOINT = "joint"
"""Its name among the functions."""


class JointRewards(Rewards):
    """Rewards whose total is one function of the values of several others.

    The function is called after the others, like any reward function, and gets by keyword also the values of each of
    them under its name: a list of numbers, None where that one does not apply. Its result is the total, None
    included; its metrics are those of a function called `joint`. The others are logged, and count nothing by
    themselves: their spans and turns are summed up before.

    Args:
        functions: Reward functions by name, as `Rewards` takes them. A column of the data may not have such a name.
        joint: ``package.module:name`` or ``./file.py:name`` of the function of their values, or the function.
        settings: Further arguments of `Rewards`, such as ``timeout`` and ``on_error``. They hold for
            the joint function too.

    Raises:
        ConfigError: there is no function to join, one of them is called `joint`, or the path names nothing.
        RewardError: a function cannot be called.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], joint: str | Callable[..., Any], **settings: Any
    ) -> None:
        if not functions or JOINT in functions:
            raise ConfigError(
                f"reward.functions={list(functions or ())}: allowed is one function or more, and none that is called "
                f"{JOINT!r}, the name of what joins them."
            )
        function = load_function(joint, "reward.joint") if isinstance(joint, str) else joint
        weights = dict.fromkeys(functions, 0.0) | {JOINT: 1.0}
        super().__init__({**functions, JOINT: function}, weights, **settings)

    @property
    def parts(self) -> tuple[str, ...]:
        """The functions that are joined."""
        return tuple(name for name in self.names if name != JOINT)

    def only(self, name: str) -> Rewards:
        """Return one of the functions; the joint one comes with all that it joins."""
        if name == JOINT:
            return self
        return super().only(name)

    def bind(self, columns: Sequence[str]) -> None:
        """Check the signatures, and that no column has the name of a function; see `Rewards.bind`."""
        if taken := [name for name in self.parts if name in columns]:
            raise ConfigError(
                f"reward.functions.{taken[0]}: the data have a column of this name, and the joint function would get "
                "one of the two. Give the function another name."
            )
        for name in self.parts:
            self._callers[name].bind(columns)
        self._callers[JOINT].bind([*columns, *self.parts])

    def _call(
        self,
        inputs: Mapping[str, Any],
        completions: Sequence[Completion],
        state: TrainerState,
        early: Mapping[str, Early],
    ) -> dict[str, FunctionScores]:
        by_function = super()._call(inputs, completions, state, early)
        if JOINT not in self.functions:
            return by_function
        by_function = {name: replace(s, spans=[None] * len(s.values)) for name, s in by_function.items()}
        values = {name: [_none_for_nan(v) for v in scores.values] for name, scores in by_function.items()}
        joint = self._callers[JOINT]
        job = joint.job({**inputs, **values}, len(completions), state)
        return by_function | {JOINT: joint.result(job, completions, joint.begin(job, completions))}

    def _callers_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Caller]:
        return {name: self._callers[name] for name in self.parts}

    def _rows_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
        return {name: rows for name, rows in super()._rows_for(inputs).items() if name != JOINT}

    def _total(self, values: Tensor, weights: Tensor) -> Tensor:
        return values[:, -1].float()


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
