"""Commands that read some keys only refuse the others, which would have no effect."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig

from lit_rl.errors import ConfigError, did_you_mean

_EVERYWHERE = ("task", "allow_targets")


def typed() -> list[str]:
    """The keys of the command line."""
    return [override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task]


def check(command: str, typed: Sequence[str], keys: Sequence[str]) -> None:
    """Refuse what the command does not read.

    Args:
        command: As it is called.
        typed: Keys of the command line.
        keys: What it reads; of a group, also everything in it.

    Raises:
        ConfigError: names the first other key, and those that are read.
    """
    for key in typed:
        if key not in (*keys, *_EVERYWHERE) and not key.startswith(tuple(f"{name}." for name in keys)):
            raise ConfigError(
                f"{key} cannot be set for {command}.{did_you_mean(key, keys)} To be set are {', '.join(keys)}."
            )
