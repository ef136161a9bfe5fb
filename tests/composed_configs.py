"""Composed configs, each made once a session: composing is deterministic, and takes the better part of a second."""

from __future__ import annotations

import copy
import functools
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lit_rl.cli import schemas
from lit_rl.cli.build import plain


@functools.cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("lit_rl.conf", version_base="1.3"):
            return compose("config", list(overrides))
    finally:
        GlobalHydra.instance().clear()


def config_of(*overrides: str) -> DictConfig:
    """The config of `train.py *overrides`, a copy of the caller's own."""
    return copy.deepcopy(_composed(overrides))


def tree_of(*overrides: str) -> dict[str, Any]:
    """The same resolved, as `lit_rl.cli.build.build` takes it, the caller's own too."""
    return plain(_composed(overrides))
