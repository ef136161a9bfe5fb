"""`lit-rl compare`: which two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_rl.errors import ConfigError


def run(words: Sequence[str]) -> int:
    """Compare the two folders.

    Raises:
        ConfigError: there are not two, or something else is typed.
    """
    if len(words) != 2 or any("=" in word or word.startswith("-") for word in words):
        raise ConfigError(
            f"lit-rl compare takes the folders of two runs, and got {' '.join(words) or 'none'}. Type: lit-rl compare "
            "runs/a runs/b"
        )
    from lit_rl.commands.compare import compare

    first, second = (Path(word).expanduser() for word in words)
    return compare(first, second)
