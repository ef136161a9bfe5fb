"""Which cases of a table run in `make test`, in `make test-all` and in `make test-exhaustive` (see CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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


def meetings(engines: Collection[str], kept: Collection[str], kinds: Sequence[str], first: Collection[str]) -> Any:
    """The mark of a law of `engine` and `policy`: one policy with every engine, and two engines with every policy.

    That the other engines answer other policies as these two do, `test_engines_agree_token_for_token` sees of every
    engine, with every policy; `make test-exhaustive` has the whole product.

    Args:
        engines: Names of engines, among them `native` and `hf`.
        kept: Those of them that are not for `make test-exhaustive` alone.
        kinds: Policies; the first meets every engine that is kept.
        first: Ids of the pairs that `make test` has.
    """
    pairs = [pytest.param(engine, kind, id=f"{engine}-{kind}") for engine in engines for kind in kinds]
    meet = {f"{engine}-{kind}" for engine in kept for kind in kinds if kind == kinds[0] or engine in ("native", "hf")}
    return pytest.mark.parametrize(("engine", "policy"), all_but_exhaustive(quick(pairs, first), meet), indirect=True)


def _split(cases: Iterable[Any], kept: Collection[str], mark: Any) -> list[Any]:
    params = [case if hasattr(case, "marks") else pytest.param(case, id=str(case)) for case in cases]
    unknown = set(kept) - {param.id for param in params}
    assert not unknown, f"no cases of these ids: {sorted(unknown)}"
    return [
        param if param.id in kept else pytest.param(*param.values, id=param.id, marks=[*param.marks, mark])
        for param in params
    ]
