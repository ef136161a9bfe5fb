"""`lit-rl doctor`: which model, generator and sampling are examined."""

from __future__ import annotations

from omegaconf import DictConfig

from lit_rl.cli import own_keys
from lit_rl.cli.build import build, plain
from lit_rl.cli.replays import placed
from lit_rl.commands.doctor import Doctor, doctor
from lit_rl.commands.doctor_advice import Planned
from lit_rl.data.small_sets import DEFAULT

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
"""Keys that may be typed; all others have no meaning here. The last three are for the memory."""


def run(config: DictConfig) -> int:
    """Build the policy and the generator, and examine them."""
    own_keys.check("lit-rl doctor", own_keys.typed(), KEYS)
    tree = plain(config)
    # The generator first: without vLLM nothing else has to be loaded.
    generator, sampling = build(tree["generator"]), build(tree["sampling"])
    data = tree["data"]
    prompts, longest = data["prompts_per_rollout"] or DEFAULT, data["max_prompt_tokens"]
    planned = Planned(prompts, tree["algo"]["group_size"], longest, sampling.max_new_tokens)
    model, fabric, _ = placed(build(tree["model"]), config, tree["trainer"])
    job = Doctor(model, generator, sampling, fabric, planned, seed=tree["seed"], **tree["doctor"])
    return doctor(job)
