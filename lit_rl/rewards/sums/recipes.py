"""Rewards that differ from row to row: which functions score a row, and with what weight, is said by a column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from lit_rl.errors import ConfigError, RewardError, did_you_mean
from lit_rl.named import check_weights
from lit_rl.rewards.completion import Completion
from lit_rl.rewards.execution.caller import Caller, Early
from lit_rl.rewards.execution.result import FunctionScores
from lit_rl.rewards.sums.weighted import Rewards
from lit_rl.rewards.workers.job import Job, TrainerState


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
            _check(name, recipe, self.names)
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
        rows, callers = self._rows_for(inputs), {}
        for name, caller in self._callers.items():
            callers[name] = _RowsCaller(caller, rows[name])
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
            self.bind([name for name in inputs if name not in ("prompts", "completions", "completion_ids")])
        return [self.recipes[self._recipe(row, value)] for row, value in enumerate(inputs[self.column])]

    def _recipe(self, row: int, value: Any) -> str:
        name = str(value) if value is not None else None
        if name in self.recipes:
            return name
        if self.default is None:
            raise RewardError(
                f"row {row} has {self.column}={value!r:.80}, which is no recipe: {self._listed(str(value))} Or name "
                "the recipe of all other rows: default=..."
            )
        return self.default

    def _listed(self, word: str) -> str:
        return f"recipes are {', '.join(self.recipes) or 'none'}.{did_you_mean(word, self.recipes)}"


class _RowsCaller:
    """A caller that sees only some rows: None for all others."""

    def __init__(self, caller: Caller, rows: Sequence[int]) -> None:
        self.caller, self.rows = caller, rows

    def job(self, inputs: Mapping[str, Any], rows: int, state: TrainerState) -> Job:
        return self.caller.job(inputs, rows, state).select(self.rows)

    def begin(
        self, job: Job, completions: Sequence[Completion], early: Early | None = None
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
            given = dict(zip(self.rows, values, strict=True))
            whole.extras[column] = [given.get(row) for row in range(count)]
        return whole


def _check(name: str, recipe: Mapping[str, float], functions: Sequence[str]) -> None:
    if not recipe:
        raise ConfigError(f"recipes.{name} is empty: name at least one function and its weight.")
    check_weights(f"recipes.{name}", recipe, functions)
