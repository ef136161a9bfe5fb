"""Checks of typed keys before torch loads: keys that nothing reads, and a word where an object belongs
(`algo.loss=cispo` for `algo/loss=cispo`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_rl.cli import listing
from lit_rl.cli.typed_words import unquoted
from lit_rl.core.errors import ConfigError, did_you_mean

_OF_METHODS = ("sampling", "eval", "generator", "reward", "judge", "reference", "optimizer", "scheduler")
"""Groups that some methods take, and others do not."""
_EVERYWHERE = ("task", "allow_targets")


def overridden_keys() -> list[str]:
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


def check_top_keys(groups: Iterable[str], config: DictConfig) -> None:
    """Refuse a key at the top that nothing reads: added by `+name=value`, or by a file of the user's.

    Args:
        groups: Of the configuration, as Hydra lists its choices: without those of which several were chosen.
        config: As it was composed: a name that it refers to, as `${name}`, is read.

    Raises:
        ConfigError: names the first such key, and the nearest that is read.
    """
    experiment = HydraConfig.get().runtime.choices.get("experiment")
    of_experiment = {*listing.top_keys(f"experiment/{experiment}.yaml")} - {
        *overridden_keys()
    }  # what it refers to may be replaced
    known = {*groups, *listing.default_choices(), "hydra", *listing.top_keys(), *of_experiment}
    for name in (str(key) for key in config):
        if name not in known and not re.search(rf"\$\{{{name}[.}}]", OmegaConf.to_yaml(config, resolve=False)):
            raise ConfigError(f"{name} is no key: nothing would read it.{did_you_mean(name, known)}")


def warn_unread(config: DictConfig) -> None:
    """Warn about typed groups that the algorithm of a training does not take.

    Args:
        config: As it was composed, with references in the place of what they name.
    """
    from lightning.pytorch.utilities import rank_zero_warn  # this module is read before it is loaded

    parts = [OmegaConf.to_yaml(config[name], resolve=False) for name in ("algo", "callbacks") if config.get(name)]
    text = "\n".join(parts)
    if config.task != "fit" or "${model}" not in text:  # of a stored run: nothing is referred to
        return
    groups = dict.fromkeys(key.partition("@")[0].partition(".")[0] for key in overridden_keys())
    unread = [name for name in groups if name in _OF_METHODS and not re.search(rf"\$\{{{name}[.}}]", text)]
    if unread:
        method = HydraConfig.get().runtime.choices.get("algo")
        keys = [key for key in overridden_keys() if key.partition("@")[0].partition(".")[0] in unread]
        rank_zero_warn(
            f"{', '.join(keys)}: nothing reads what was typed, as algo={method} takes no {' or '.join(unread)}."
        )


def check_command_keys(command: str, typed: Sequence[str], keys: Sequence[str]) -> None:
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


def check_choices(config: DictConfig) -> None:
    """Refuse a value in the place of a group, before anything is built.

    Raises:
        ConfigError: says how the choice is written, and which there are.
    """
    # Shortest first: where algo.loss is a word there is no algo.loss.ratio to look at.
    for group in sorted(HydraConfig.get().runtime.choices, key=len):
        for key in _keys(group):
            value = OmegaConf.select(config, key, throw_on_resolution_failure=False, throw_on_missing=False)
            if isinstance(value, (str, int, float)):
                raise ConfigError(_message(key, value, group, _options(group)))


def _keys(group: str) -> tuple[str, ...]:
    """Return the keys of a group's choice: its own, and the slot of the algorithm that a group at the top fills
    (`algo.reference`).

    The exception is `algo.model`: the name of a model is a model.
    """
    key = group.replace("/", ".")
    slot = {"eval": "evaluation"}.get(group, key)
    return (key,) if "/" in group or group == "model" else (key, f"algo.{slot}")


def _options(group: str) -> list[str]:
    loader: Any = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group))


def _message(key: str, value: object, group: str, options: Sequence[str]) -> str:
    listed = f"(choices: {', '.join(options)}; in a file: `override /{group}:` in its defaults)"
    if value in options:
        return f"{key}={value!r} is a choice of a group: write {group}={value} {listed}."
    near = did_you_mean(str(value), options)
    return f"{key}={value!r} is no object, and no choice of the group {group}.{near} Write {group}=... {listed}."
