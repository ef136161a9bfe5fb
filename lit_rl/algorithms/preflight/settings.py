"""Functions that refuse their own settings are asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_rl.errors import ConfigError


def settings(key: str, probe: Callable[[], Any]) -> None:
    """Call `probe`, which calls a function once on a small example.

    Raises:
        ConfigError: the function raised a ValueError; the message names `algo.{key}`.
    """
    try:
        probe()
    except ValueError as error:
        raise ConfigError(f"algo.{key}: {error}") from error
