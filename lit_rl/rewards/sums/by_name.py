"""Functions and weights by name, from whatever form they were given in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.rewards.functions.contract import Function, check_callable, name_of


def functions_by_name(functions: Any) -> dict[str, Function]:
    """One function, a list or a mapping as a mapping.

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
        check_callable(name, function)
    return dict(pairs)


def weights_by_name(weights: Any, names: list[str]) -> dict[str, float]:
    """A weight for each name, 1 where none is given.

    Raises:
        ConfigError: a weight has no function, or is not a finite number.
    """
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
