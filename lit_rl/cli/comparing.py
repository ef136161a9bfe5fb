"""`lit-rl compare`: which two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_rl.commands.compare import compare
from lit_rl.commands.folder_state import nearest_run
from lit_rl.errors import ConfigError


def run(words: Sequence[str]) -> int:
    """Compare the two folders.

    Raises:
        ConfigError: there are not two, one is no folder, or something else is typed.
    """
    first, second = folders_of(words)
    for folder in (first, second):
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is no folder: give the folders of two runs, such as runs/a runs/b.{nearest_run(folder)}"
            )
    return compare(first, second)


def folders_of(words: Sequence[str]) -> tuple[Path, Path]:
    """Return the two typed folders, whether or not they exist.

    Raises:
        ConfigError: there are not two, or something else is typed.
    """
    if len(words) != 2 or any("=" in word or word.startswith("-") for word in words):
        raise ConfigError(
            f"lit-rl compare takes the folders of two runs, and got {' '.join(words) or 'none'}. Type: lit-rl compare "
            "runs/a runs/b"
        )
    first, second = (Path(word).expanduser() for word in words)
    return first, second
