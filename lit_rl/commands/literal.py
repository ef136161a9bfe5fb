"""Texts of a config that stay texts, behind the check of what may be built: a `${...}` in them is not followed."""

from __future__ import annotations

import re
from typing import Any

from hydra.utils import instantiate

_BEGINS = re.compile(r"(\\*)\$\{")


def literal(node: Any) -> Any:
    """Escape each `${` of plain values, with the backslashes before it, so that OmegaConf gives them back unchanged."""
    if isinstance(node, str):
        return _BEGINS.sub(lambda found: found[1] * 2 + "\\${", node)
    if isinstance(node, list):
        return [literal(item) for item in node]
    return {key: literal(item) for key, item in node.items()} if isinstance(node, dict) else node


def instantiated(node: Any) -> Any:
    """Instantiate plain values. Hydra resolves them before it builds, and once more as it reads each."""
    return instantiate(literal(literal(node)), _convert_="all")
