"""What rows are for, told from the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["texts", "pairs", "verdicts", "stepwise"]
"""What a method learns from. Paired rows serve those that learn from verdicts: each gives two."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "tokenised": ("input_ids",),
    "stepwise": ("prompt", "completions", "labels"),
    "unpaired preference": ("prompt", "completion", "label"),
    "prompt-completion": ("prompt", "completion"),
    "language modelling (messages)": ("messages",),
    "language modelling (text)": ("text",),
    "preference": ("chosen", "rejected"),
}
"""Formats and the columns that they need. `preference` takes a `prompt` too; without one it is implicit."""

USABLE: dict[Kind, tuple[str, ...]] = {
    "texts": (
        "tokenised",
        "prompt-completion",
        "language modelling (messages)",
        "language modelling (text)",
        "preference",
    ),
    "pairs": ("preference",),
    "verdicts": ("unpaired preference", "preference"),
    "stepwise": ("stepwise",),
}
"""Formats that serve a kind; the first whose columns a row has is the row's."""


def format_for(row: Mapping[str, Any], kind: Kind) -> str | None:
    """The format by which a row serves a kind: the first whose columns it has; None where it has those of none."""
    found = {name for name, value in row.items() if value is not None}
    return next((name for name in USABLE[kind] if found.issuperset(COLUMNS[name])), None)


VERDICTS = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0"), False),
}
"""Words for a truth value, because cells of .csv are text."""


def verdict(value: Any) -> bool | None:
    """The truth value that a label says: a boolean, 0 or 1, or one of `VERDICTS`; None where it says none."""
    if isinstance(value, str):
        return VERDICTS.get(value.strip().lower().removesuffix(".0"))
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def is_verdict(row: Mapping[str, Any]) -> bool:
    """Whether a row of `prompt-completion` says that its completion is good, or bad: nobody should imitate that."""
    return verdict(row.get("label")) is not None


_READ_AS: tuple[tuple[str, Kind], ...] = (
    ("tokenised", "texts"),
    ("stepwise", "stepwise"),
    ("preference", "pairs"),
    ("unpaired preference", "verdicts"),
    ("prompt-completion", "texts"),
    ("language modelling (messages)", "texts"),
)


def kind_of(row: Mapping[str, Any]) -> Kind | None:
    """What the columns of a row are for; None: prompts to be answered, or nothing that is known."""
    found = {name for name, value in row.items() if value is not None}
    for name, kind in _READ_AS:
        if found.issuperset(COLUMNS[name]):
            return kind
    return "texts" if "text" in found and "prompt" not in found else None
