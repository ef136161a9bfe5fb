"""`lit-rl serve`: which model is served, and how the engine holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig

from lit_rl.algorithms.optim.precision import BF16
from lit_rl.cli import own_keys
from lit_rl.cli.build import build, plain
from lit_rl.cli.precision import AUTO, automatic_on
from lit_rl.commands.serve import Serve, serve
from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.generation.vllm.settings import EngineSettings

KEYS = ("model", "generator", "serve")
"""Keys that may be typed; all others have no meaning here."""

GENERATOR = "vllm_server"
"""The choice whose settings are read where none was typed."""


def generator_of(words: Sequence[str]) -> list[str]:
    """Return the choice of generator to add to the words of a command line: Hydra takes the keys of the chosen one
    only."""
    typed = any(word.lstrip("+").startswith("generator=") for word in words)
    return [] if typed else [f"generator={GENERATOR}"]


def run(config: DictConfig) -> int:
    """Serve until a signal ends it."""
    overrides = list(HydraConfig.get().overrides.task)
    typed = own_keys.typed()
    engine = [field.name for field in dataclasses.fields(EngineSettings)]
    _check_keys(typed, engine)
    tree = plain(config)
    settings = {name: tree["generator"][name] for name in engine if name in tree["generator"]}
    # The run describes the same model and the same engine; the generator and its address are the command's own to say.
    said = [word for word, key in zip(overrides, typed) if key.startswith(("model", "generator."))]
    model = build(tree["model"])
    precision = tree["trainer"]["precision"]
    if precision == AUTO:  # as the run will hold the policy on such a device
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        precision = automatic_on(device, SingleDeviceStrategy, model).precision
    if precision == BF16:
        model = model.held_in("bfloat16")
    return serve(Serve(model, EngineSettings(**settings), typed=said, **tree["serve"]))


def _check_keys(typed: Sequence[str], engine: Sequence[str]) -> None:
    own_keys.check("lit-rl serve", typed, KEYS)
    for key in typed:
        group, _, name = key.partition(".")
        if group == "generator" and name and name not in engine:
            raise ConfigError(
                f"{key} is a setting of the run, not of its server.{did_you_mean(name, engine)} Of the generator, "
                f"lit-rl serve takes {', '.join(engine)}."
            )
