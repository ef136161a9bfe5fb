"""Infer the kind of examples (texts, pairs, triples, verdicts, stepwise) from the names of a row's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["texts", "pairs", "triples", "verdicts", "stepwise"]
"""The kind of examples that a method learns from. A pair also serves as two verdicts, and a triple as a pair."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "tokenised": ("input_ids",),
    "stepwise": ("prompt", "completions", "labels"),
    "unpaired preference": ("prompt", "completion", "label"),
    "prompt-completion": ("prompt", "completion"),
    "language modelling (messages)": ("messages",),
    "language modelling (text)": ("text",),
    "triple preference": ("chosen", "rejected", "reference"),
    "preference": ("chosen", "rejected"),
}
"""Formats and the columns that they need. Those of preferences take a `prompt` too; without one it is implicit."""

USABLE: dict[Kind, tuple[str, ...]] = {
    "texts": (
        "tokenised",
        "prompt-completion",
        "language modelling (messages)",
        "language modelling (text)",
        "preference",
    ),
    "pairs": ("preference",),
    "triples": ("triple preference",),
    "verdicts": ("unpaired preference", "preference"),
    "stepwise": ("stepwise",),
}
"""Formats that serve a kind; the first whose columns a row has is the row's."""


def format_for(row: Mapping[str, Any], kind: Kind) -> str | None:
    """Return the format by which a row serves a kind: the first whose columns it has; None where there is none."""
    found = {name for name, value in row.items() if value is not None}
    return next((name for name in USABLE[kind] if found.issuperset(COLUMNS[name])), None)


VERDICTS = {
    **dict.fromkeys(("true", "yes", "1"), True),
    **dict.fromkeys(("false", "no", "0"), False),
}
"""Words for a truth value, because cells of .csv are text."""


def parse_verdict(value: Any) -> bool | None:
    """Return the truth value of a label: a boolean, 0 or 1, or one of `VERDICTS`; None for any other value."""
    if isinstance(value, str):
        return VERDICTS.get(value.strip().lower().removesuffix(".0"))
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def is_verdict(row: Mapping[str, Any]) -> bool:
    """Tell whether a row of `prompt-completion` carries a verdict: its completion must not be imitated as it is."""
    return parse_verdict(row.get("label")) is not None


_KIND_OF_FORMAT: tuple[tuple[str, Kind], ...] = (
    ("tokenised", "texts"),
    ("stepwise", "stepwise"),
    ("preference", "pairs"),
    ("unpaired preference", "verdicts"),
    ("prompt-completion", "texts"),
    ("language modelling (messages)", "texts"),
)


def kind_of(row: Mapping[str, Any]) -> Kind | None:
    """Return the kind that a row's columns serve; None for prompts to be answered, or unknown columns."""
    found = {name for name, value in row.items() if value is not None}
    for name, kind in _KIND_OF_FORMAT:
        if found.issuperset(COLUMNS[name]):
            return kind
    return "texts" if "text" in found and "prompt" not in found else None
