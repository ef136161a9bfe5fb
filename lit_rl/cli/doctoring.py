"""`lit-rl doctor`: which model, generator and sampling are examined."""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lit_rl.cli.build import build, plain
from lit_rl.cli.replays import fabric_of, held
from lit_rl.commands.doctor import Doctor, doctor
from lit_rl.commands.doctor_advice import Planned
from lit_rl.errors import ConfigError, did_you_mean

KEYS = (
    "model",
    "generator",
    "sampling",
    "doctor",
    "seed",
    "trainer.accelerator",
    "trainer.precision",
    "data.prompts_per_rollout",
    "data.max_prompt_tokens",
    "algo.group_size",
)
"""What may be set on the command line; everything else has no meaning here. The last three are for the memory."""


def run(config: DictConfig) -> int:
    """Build what is examined, and examine it."""
    for override in HydraConfig.get().overrides.task:
        _check_key(override.lstrip("+~").partition("=")[0])
    tree = plain(config)
    fabric, _ = fabric_of(config, tree["trainer"])
    # The generator first: without vLLM nothing else has to be loaded.
    generator, sampling = build(tree["generator"]), build(tree["sampling"])
    data = tree["data"]
    planned = Planned(
        data["prompts_per_rollout"], tree["algo"]["group_size"], data["max_prompt_tokens"], sampling.max_new_tokens
    )
    model = held(build(tree["model"]), config, tree["trainer"])
    job = Doctor(model, generator, sampling, fabric, planned, seed=tree["seed"], **tree["doctor"])
    return doctor(job)


def _check_key(key: str) -> None:
    if key.startswith(tuple(f"{name}." for name in KEYS)) or key in (*KEYS, "task", "allow_targets"):
        return
    raise ConfigError(
        f"{key} cannot be set for lit-rl doctor.{did_you_mean(key, KEYS)} To be set are {', '.join(KEYS)}."
    )
