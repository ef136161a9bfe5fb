"""Trial calls of functions that check their own settings, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_rl.errors import ConfigError


def settings(key: str, probe: Callable[[], Any]) -> None:
    """Call a term once, so that it refuses its settings now.

    Raises:
        ConfigError: names the key under `algo`.
    """
    try:
        probe()
    except ValueError as error:
        raise ConfigError(f"algo.{key}: {error}") from error
