"""Text that was coloured for a terminal, as text in which the colours are words."""

from __future__ import annotations

import re

_CODES = re.compile(r"\x1b\[([0-9;]*)m")
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_FIRSTS = (30, 40, 90, 100)
"""First codes of eight colours each, for text and background, dark and bright (ECMA-48, SGR)."""


def colours_as_words(text: str) -> str:
    """Put coloured text into brackets with the colour's name: ``[red S]FFF`` of FrozenLake's map.

    Environments that render with ``render_mode="ansi"`` tell by colour alone where one is.
    """
    told, colours = "", list[str]()
    for number, part in enumerate(_CODES.split(text)):
        if number % 2:
            colours = _after(colours, part)
        elif part:
            told += f"[{' '.join(colours)} {part}]" if colours else part
    return told


def _after(colours: list[str], codes: str) -> list[str]:
    """Return the colours that hold after some codes. 0 or no code ends them all; bold and the like are ignored."""
    colours = list(colours)
    for code in codes.split(";"):
        value = int(code or 0)
        first = next((first for first in _FIRSTS if first <= value < first + len(_NAMES)), None)
        if value == 0:
            colours = []
        elif first is not None:
            colours.append(_NAMES[value - first])
    return colours
