"""A group takes a choice with a slash, `algo/loss=cispo`; `algo.loss=cispo` puts a word where an object belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_rl.errors import ConfigError, did_you_mean


def check(config: DictConfig) -> None:
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
