"""Which cases of a table run in `make test`, in `make test-all` and in `make test-exhaustive` (see CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], first: Collection[str]) -> list[Any]:
    """Values for `parametrize`: those whose id is in `first` run in `make test`, the others in `make test-all`.

    Args:
        cases: Strings, each its own id, or `pytest.param(..., id=...)`.
        first: Ids of `cases`; one that is none of them is an error, so that a renamed case is not lost.
    """
    return _split(cases, first, pytest.mark.all)


def all_but_exhaustive(cases: Iterable[Any], kept: Collection[str]) -> list[Any]:
    """Values for `parametrize`: those whose id is in `kept` as they are, the others in `make test-exhaustive` only."""
    return _split(cases, kept, pytest.mark.exhaustive)


def in_turn(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """A mark that has each value of each argument in some case, where their product would show nothing more.

    Args:
        axes: The values of an argument, by its name; the longest says how many cases there are.
    """
    values = [list(axis) for axis in axes.values()]
    most = max(map(len, values))
    cases = [tuple(axis[at % len(axis)] for axis in values) for at in range(most)]
    return pytest.mark.parametrize(tuple(axes), cases)


def _split(cases: Iterable[Any], kept: Collection[str], mark: Any) -> list[Any]:
    params = [case if hasattr(case, "marks") else pytest.param(case, id=str(case)) for case in cases]
    unknown = set(kept) - {param.id for param in params}
    assert not unknown, f"no cases of these ids: {sorted(unknown)}"
    return [
        param if param.id in kept else pytest.param(*param.values, id=param.id, marks=[*param.marks, mark])
        for param in params
    ]
