"""Keys that nothing reads are refused: those that a command has no use for, and those that are no key at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_rl.cli import listing
from lit_rl.cli.typed_values import unquoted
from lit_rl.errors import ConfigError, did_you_mean

_OF_METHODS = ("sampling", "eval", "generator", "reward", "judge", "reference", "optimizer", "scheduler")
"""Groups that some methods take, and others do not."""
_EVERYWHERE = ("task", "allow_targets")


def typed() -> list[str]:
    """Return the keys of the command line."""
    return [override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task]


def typed_value(words: Sequence[str], key: str, default: str | None = None) -> str | None:
    """Return the value of a key on a command line that Hydra has not read yet; the last word counts.

    Args:
        words: Settings, and whatever else was typed.
        default: Where the key was not typed.
    """
    found = next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), None)
    return default if found is None else unquoted(found)


def check_read(groups: Iterable[str], config: DictConfig) -> None:
    """Refuse a key at the top that nothing reads: added by `+name=value`, or by a file of the user's.

    Args:
        groups: Of the configuration, as Hydra lists its choices: without those of which several were chosen.
        config: As it was composed: a name that it refers to, as `${name}`, is read.

    Raises:
        ConfigError: names the first such key, and the nearest that is read.
    """
    experiment = HydraConfig.get().runtime.choices.get("experiment")
    of_experiment = {*listing.keys(f"experiment/{experiment}.yaml")} - {*typed()}  # what it refers to may be replaced
    known = {*groups, *listing.defaults(), "hydra", *listing.keys(), *of_experiment}
    for name in (str(key) for key in config):
        if name not in known and not re.search(rf"\$\{{{name}[.}}]", OmegaConf.to_yaml(config, resolve=False)):
            raise ConfigError(f"{name} is no key: nothing would read it.{did_you_mean(name, known)}")


def say_unread(config: DictConfig) -> None:
    """Warn about typed groups that the algorithm of a training does not take.

    Args:
        config: As it was composed, with references in the place of what they name.
    """
    from lightning.pytorch.utilities import rank_zero_warn  # this module is read before it is loaded

    parts = [OmegaConf.to_yaml(config[name], resolve=False) for name in ("algo", "callbacks") if config.get(name)]
    text = "\n".join(parts)
    if config.task != "fit" or "${model}" not in text:  # of a stored run: nothing is referred to
        return
    groups = dict.fromkeys(key.partition("@")[0].partition(".")[0] for key in typed())
    unread = [name for name in groups if name in _OF_METHODS and not re.search(rf"\$\{{{name}[.}}]", text)]
    if unread:
        method = HydraConfig.get().runtime.choices.get("algo")
        keys = [key for key in typed() if key.partition("@")[0].partition(".")[0] in unread]
        rank_zero_warn(
            f"{', '.join(keys)}: nothing reads what was typed, as algo={method} takes no {' or '.join(unread)}."
        )


def check(command: str, typed: Sequence[str], keys: Sequence[str]) -> None:
    """Refuse keys that the command does not read.

    Args:
        command: Name of the command.
        typed: Keys of the command line.
        keys: Keys that it reads; a group stands for everything in it.

    Raises:
        ConfigError: names the first other key, and those that are read.
    """
    for key in typed:
        if key not in (*keys, *_EVERYWHERE) and not key.startswith(tuple(f"{name}." for name in keys)):
            raise ConfigError(
                f"{key} cannot be set for {command}.{did_you_mean(key, keys)} To be set are {', '.join(keys)}."
            )
