"""What a name of TRL, or a key of verl, is here: in the words of docs/from-trl.md and docs/from-verl.md.

`scripts/other_names.py` writes `other_names.yaml` from the tables of these pages.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import yaml

from lit_rl.errors import nearest

OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
_PAGES = {"TRL": "docs/from-trl.md", "verl": "docs/from-verl.md"}


def said(key: str) -> str:
    """Return the hint for a key of TRL or verl, or an empty string where no table has it.

    Args:
        key: As it was typed. Its last word may be a field of TRL or, alone, the end of a key of verl.
    """
    name = key.rpartition(".")[2]
    verl, trl = _tables()["verl"], _tables()["TRL"]
    if re.search(rf"(?<![\w.]){re.escape(key)}=", f"{verl.get(key)} {trl.get(name)}"):  # a key of another choice
        return ""
    if key in verl:
        return _told(key, "verl", verl[key])
    if name in trl:
        return _told(name, "TRL", trl[name])
    ends = [whole for whole in verl if whole.endswith(f".{name}")] if "_" in name else []
    return _told(ends[0], "verl", verl[ends[0]]) if len(ends) == 1 else ""


def near(name: str) -> str:
    """Return the hint for a mistyped name of TRL."""
    found = nearest(name, _tables()["TRL"]) if len(name) > 5 else None
    return "" if found in (None, name) else f" Did you mean {found!r}?{said(found)}"


def _told(name: str, library: str, answer: str) -> str:
    whose = "TRL's name" if library == "TRL" else "verl's key"
    end = "" if answer.endswith("...") else "."
    return f" {name} is {whose}. Here: {answer}{end} More: {_PAGES[library]}."


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(OTHER_NAMES.read_text(encoding="utf-8"), loader)  # both loaders make plain data alone
