"""Rewards that are no single weighted sum: recipes that differ by row, and a joint function of several values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.core.errors import ConfigError, RewardError, did_you_mean
from lit_rl.core.user_functions import check_weights
from lit_rl.rewards.caller import GROUPS, Caller, EarlyRows, FunctionScores
from lit_rl.rewards.contract import Completion, load_function
from lit_rl.rewards.jobs import Job, TrainerState
from lit_rl.rewards.weighted_rewards import Rewards


class RewardRecipes(Rewards):
    """Named recipes of weighted reward functions; a column of the data names the recipe of each row.

    A function is called with the rows of the recipes that hold it, and all others count as None. The reward of a row
    is the sum of their values by the weights of its recipe: within a recipe it is computed as in `Rewards`.

    Args:
        functions: Reward functions by name, as `Rewards` takes them.
        recipes: The weight of each function of a recipe by its name, by the name of the recipe.
        column: The column that names a row's recipe.
        default: The recipe of rows whose column names none. None: such a row ends the run.
        settings: Further arguments of `Rewards`, such as ``timeout`` and ``on_error``.

    Raises:
        ConfigError: a recipe names no function or is empty, a function is in no recipe, a weight is not a finite
            number, or ``default`` is no recipe.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        recipes: Mapping[str, Mapping[str, float]],
        column: str = "source",
        default: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(functions, None, **settings)
        self.recipes = {str(name): dict(recipe) for name, recipe in recipes.items()}
        self.column = column
        self.default = default
        for name, recipe in self.recipes.items():
            if not recipe:
                raise ConfigError(f"recipes.{name} is empty: name at least one function and its weight.")
            check_weights(f"recipes.{name}", recipe, self.names)
        if unused := [name for name in self.names if not any(name in recipe for recipe in self.recipes.values())]:
            raise ConfigError(f"functions holds {unused[0]!r}, which is in no recipe: add it to one, or leave it out.")
        if default is not None and default not in self.recipes:
            raise ConfigError(f"default={default!r} is no recipe: {self._listed(default)}")

    every_function_scores = False

    def __repr__(self) -> str:
        return f"RewardRecipes({self.recipes})"

    def bind(self, columns: Sequence[str]) -> None:
        """Check the signatures, and that the column of the recipes is there; see `Rewards.bind`."""
        super().bind(columns)
        if self.column not in columns:
            raise RewardError(
                f"the data has no column {self.column!r} that names each row's recipe; it has: "
                f"{', '.join(columns) or 'none'}.{did_you_mean(self.column, columns)} Set column, or add it."
            )

    def reads(self, columns: Sequence[str]) -> set[str]:
        return super().reads(columns) | {self.column}

    def _seen_by(self, name: str, columns: Mapping[str, Sequence[Any]]) -> Mapping[str, Sequence[Any]]:
        rows = self._rows_for(columns)[name]
        return {column: [values[row] for row in rows] for column, values in columns.items()}

    def _callers_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Caller]:
        rows = self._rows_for(inputs)
        callers: dict[str, Any] = {name: _RowsCaller(each, rows[name]) for name, each in self._callers.items()}
        return callers

    def _rows_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
        recipes = self._recipes(inputs)
        return {name: [row for row, recipe in enumerate(recipes) if name in recipe] for name in self.names}

    def _weights(self, inputs: Mapping[str, Any], rows: int) -> Tensor:
        """Return float64 ``(b, k)``: by the recipe of each row."""
        table = [[float(recipe.get(name, 0.0)) for name in self.names] for recipe in self._recipes(inputs)]
        return torch.tensor(table, dtype=torch.float64).reshape(rows, len(self.names))

    def _recipes(self, inputs: Mapping[str, Any]) -> list[dict[str, float]]:
        """Return the recipe of each row."""
        if self.column not in inputs:
            self.bind([name for name in inputs if name not in ("prompts", "completions", "completion_ids", GROUPS)])
        recipes: list[dict[str, float]] = []
        for row, value in enumerate(inputs[self.column]):
            name = self.default if value is None or str(value) not in self.recipes else str(value)
            if name is None:
                raise RewardError(
                    f"row {row} has {self.column}={value!r:.80}, which is no recipe: {self._listed(str(value))} Or "
                    "name the recipe of all other rows: default=..."
                )
            recipes.append(self.recipes[name])
        return recipes

    def _listed(self, word: str) -> str:
        return f"recipes are {', '.join(self.recipes) or 'none'}.{did_you_mean(word, self.recipes)}"


class _RowsCaller:
    """A caller that sees only some rows: None for all others."""

    def __init__(self, caller: Caller, rows: Sequence[int]) -> None:
        self.caller, self.rows = caller, rows

    def job(self, inputs: Mapping[str, Any], rows: int, state: TrainerState) -> Job:
        return self.caller.job(inputs, rows, state).select(self.rows)

    def begin(
        self, job: Job, completions: Sequence[Completion], early: EarlyRows | None = None
    ) -> Future[FunctionScores] | None:
        return self.caller.begin(job, completions, early) if job.rows else None

    def result(
        self, job: Job, completions: Sequence[Completion], begun: Future[FunctionScores] | None
    ) -> FunctionScores:
        count = len(completions)
        whole = FunctionScores([math.nan] * count, [None] * count, [None] * count)
        if not job.rows:
            return whole
        part = self.caller.result(job, completions, begun)
        for place, row in enumerate(self.rows):
            whole.values[row] = part.values[place]
            whole.spans[row] = part.spans[place]
            whole.failures[row] = part.failures[place]
        whole.metrics, whole.output, whole.cache_hits = part.metrics, part.output, part.cache_hits
        for column, values in part.extras.items():
            by_row = dict(zip(self.rows, values, strict=True))
            whole.extras[column] = [by_row.get(row) for row in range(count)]
        return whole


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
        early: Mapping[str, EarlyRows],
    ) -> dict[str, FunctionScores]:
        by_function = super()._call(inputs, completions, state, early)
        if JOINT not in self.functions:
            return by_function
        by_function = {name: replace(s, spans=[None] * len(s.values)) for name, s in by_function.items()}
        values = {name: [None if math.isnan(v) else v for v in s.values] for name, s in by_function.items()}
        joint = self._callers[JOINT]
        job = joint.job({**inputs, **values}, len(completions), state)
        return by_function | {JOINT: joint.result(job, completions, joint.begin(job, completions))}

    def _callers_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Caller]:
        return {name: self._callers[name] for name in self.parts}

    def _rows_for(self, inputs: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
        return {name: rows for name, rows in super()._rows_for(inputs).items() if name != JOINT}

    def _total(self, values: Tensor, weights: Tensor) -> Tensor:
        return values[:, -1].float()
