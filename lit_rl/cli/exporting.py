"""`lit-rl export`: the run, its checkpoint, and the target folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig

from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.master_weights import BF16
from lit_rl.algorithms.reward_modeling import RewardModeling
from lit_rl.callbacks.checkpoint_io import step_of
from lit_rl.cli import data_choice, key_checks, run_trust
from lit_rl.cli.build import build, plain
from lit_rl.cli.replays import checkpoint_of
from lit_rl.cli.targets import ALLOWED, check_target
from lit_rl.cli.trainer_settings import precision_of
from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.core.signals import exit_on_sigterm
from lit_rl.models.language_model import LanguageModel
from lit_rl.runs.export_checkpoint import CheckpointExport, card_facts, export
from lit_rl.runs.run_dir import HF_STEPS, RunDir

KEYS = ("run_dir", "ckpt_path", "export", "trust_run", "model.name")
"""Keys that may be typed; all others are the run's. A base model may have moved since."""


def run_export(config: DictConfig) -> int:
    """Find the run and its checkpoint, and export it."""
    key_checks.check_command_keys("lit-rl export", key_checks.overridden_keys(), KEYS)
    run_dir = RunDir(Path(str(config.run_dir)).expanduser())
    tree = run_dir.read().settings()
    checkpoint = checkpoint_of(config, run_dir)
    if "model.name" in key_checks.overridden_keys():
        tree["algo"]["model"]["name"] = str(config.model.name)
    with _naming_base_model(str(tree["algo"]["model"].get("name"))):
        module = _module(tree["algo"], config)
    module.model = _held(module.model, checkpoint, tree["trainer"])
    algorithm = str(tree["algo"]["_target_"]).rpartition(".")[2].lower()
    summary = run_dir.read_summary()
    ended = checkpoint == run_dir.last_checkpoint()
    if not ended:
        summary = summary | {"after": {}}  # measured at another step
    own = plain(config)["export"]
    default = run_dir.hf if ended else run_dir.path / HF_STEPS / f"step_{step_of(checkpoint):08d}"
    folder = Path(own.pop("folder") or default).expanduser()
    facts = card_facts(module.model.name, algorithm, data_choice.name_of(tree["data"]), summary)
    with exit_on_sigterm(), _naming_base_model(module.model.name):  # what is half written goes
        return export(CheckpointExport(module, checkpoint, folder, facts, **own))


def _held(model: LanguageModel, checkpoint: Path, trainer: Mapping[str, Any]) -> LanguageModel:
    """Return the model in the type of the run's weights, as the run's own export has them."""
    shards = "fsdp" in str(trainer.get("strategy")).lower()  # held in float32, whatever they compute in
    return model.held_in("bfloat16") if precision_of(checkpoint) == BF16 and not shards else model


@contextlib.contextmanager
def _naming_base_model(name: str) -> Iterator[None]:
    """Add the base model's path to errors: a checkpoint of an adapter does not hold it, and it may have moved since."""
    try:
        yield
    except (ConfigError, BackendError, StorageError) as error:
        if str(error).startswith("model.name"):
            error.add_note(
                f"(the run was trained on {name!r}, and its checkpoint is whole without it: set model.name to where "
                "that model is now; another one is refused)"
            )
        raise


def _module(algo: dict[str, Any], config: DictConfig) -> PolicyModule:
    """Build the module that the run trained: a policy needs its model alone, and neither rewards nor data."""
    allowed = (*ALLOWED, *(f"{name}." for name in config.allow_targets))
    made = get_class(check_target("algo", str(algo["_target_"]), allowed))
    kept = {"model": algo["model"]}
    run_trust.check(kept, config)
    if issubclass(made, GeneratingModule):
        return PolicyModule(build(algo["model"]), seed=algo.get("seed", 0))
    if issubclass(made, RewardModeling):
        return made(build(algo["model"]), seed=algo.get("seed", 0))
    raise ConfigError(
        f"lit-rl export knows policies and reward models, and this run trains a {made.__name__}, whose export depends "
        "on its data. Take hf/ of the finished run, or callbacks.export.every while it trains."
    )
