"""Numbers and words that a constructor refuses are refused before it can be imported, in its own words.

What each allows stands in `schema_keys.yaml`, as `scripts/range_calls.py` reads it from the constructors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli.key_names import schema_keys
from lit_rl.errors import ConfigError, in_range, one_of

BUILT = ("algo", "data", "callbacks", "trainer")
"""What every task with a Trainer builds. The rest of a config is in these, where it is read at all."""

_OF_THE_DEVICE = ("accelerator", "precision", "strategy", "devices")
"""Of the Trainer: what other tasks read of it too."""

_NUMBERS = re.compile(r"\s*-?\d+\s*(,\s*\d+\s*)*,?\s*")


def check(config: DictConfig, *, whole: bool) -> None:
    """Refuse what is out of its range, or none of the words that there are.

    Args:
        config: As it was composed.
        whole: Whether the task builds all that the config says; else it is the Trainer's devices alone.

    Raises:
        ConfigError: as the constructor raises it.
    """
    for top in BUILT if whole else ("trainer",):
        for node in _nodes(_plain(config, top)):
            for name, asked in schema_keys()["_allowed_"].get(str(node.get("_target_")), {}).items():
                if whole or name in _OF_THE_DEVICE:
                    _check(node.get(name), asked)
    _check_devices(_plain(config, "trainer"))


def _check(value: Any, asked: list[dict[str, Any]]) -> None:
    for call in asked:
        if "allowed" in call:
            if isinstance(value, (str, int)) and not isinstance(value, bool):
                word = str(value).lower() if call["key"] == "trainer.strategy" else str(value)  # as Lightning reads it
                one_of(call["key"], word, call["allowed"])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            in_range(value=value, **call)


def _check_devices(trainer: Any) -> None:
    """Lightning takes a number, a list of numbers, or a text of them."""
    devices = trainer.get("devices") if isinstance(trainer, dict) else None
    words = devices if isinstance(devices, list) else [devices]
    if any(isinstance(word, str) and word != "auto" and not _NUMBERS.fullmatch(word) for word in words):
        raise ConfigError(
            f"trainer.devices={devices!r} is no number of devices. Allowed is auto, how many (2), or which "
            "(trainer.devices=[0,2]). Their kind is trainer.accelerator."
        )


def _plain(config: DictConfig, key: str) -> Any:
    """A part of the config with its references followed; None where one leads nowhere, which is said later."""
    try:
        return OmegaConf.to_container(config[key], resolve=True) if OmegaConf.is_config(config.get(key)) else None
    except OmegaConfBaseException:
        return None


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Everything that says what it builds."""
    if isinstance(tree, dict):
        yield from (tree,) if "_target_" in tree else ()
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)
