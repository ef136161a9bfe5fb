"""Instantiation of a resolved config without resolving interpolations a second time: a `${...}` in a text stays
text."""

from __future__ import annotations

import re
from typing import Any

from hydra.utils import instantiate

_BEGINS = re.compile(r"(\\*)\$\{")


def escape_interpolations(node: Any) -> Any:
    """Escape each `${` of plain values, with the backslashes before it, so that OmegaConf gives them back unchanged."""
    if isinstance(node, str):
        return _BEGINS.sub(lambda found: found[1] * 2 + "\\${", node)
    if isinstance(node, list):
        return [escape_interpolations(item) for item in node]
    return {key: escape_interpolations(item) for key, item in node.items()} if isinstance(node, dict) else node


def instantiate_plain(node: Any) -> Any:
    """Instantiate plain values. Hydra resolves them before it builds, and once more as it reads each."""
    return instantiate(escape_interpolations(escape_interpolations(node)), _convert_="all")
