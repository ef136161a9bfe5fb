"""Functions by name, from whatever form they were given in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.errors import ConfigError
from lit_rl.rewards.functions.contract import Function, check_callable, name_of


def functions_by_name(functions: Any) -> dict[str, Function]:
    """Return one function, a list or a mapping as a mapping.

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
        if not name.strip() or len(name.splitlines()) > 1:
            raise ConfigError(
                f"a reward function is called {name!r}: its name is a text on one line, not an empty one."
            )
        check_callable(name, function)
    return dict(pairs)
