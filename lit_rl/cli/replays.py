"""`lit-rl replay`: the objectives to compare, each composed over the settings of the run whose rollout it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf

from lit_rl.algorithms.chosen_functions import name_of
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.optim.master_weights import BF16, FLOAT32
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.callbacks.saved_rollouts import SavedRollout, saved_rollouts
from lit_rl.cli import run_trust
from lit_rl.cli.build import build, escape_interpolations, plain
from lit_rl.cli.trainer_settings import AUTO, automatic_precision_on
from lit_rl.core.errors import ConfigError, StorageError, did_you_mean
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.models import LanguageModel
from lit_rl.rewards.weighted_rewards import Rewards
from lit_rl.runs.replay_rollout import Replay, replay
from lit_rl.runs.run_dir import RunDir

KEYS = (
    "run_dir",
    "replay.losses",
    "replay.rollout",
    "ckpt_path",
    "trainer.accelerator",
    "trainer.precision",
    "allow_targets",
    "trust_run",
    "task",
)
"""Keys that may be typed; all others are the run's."""

RUN = "run"
"""The name of the objective that the run itself learned from."""

_OF_THE_RUN = ("model", "reward", "generator", "sampling", "reference", "seed")
"""Parts of an algorithm that are no part of an objective: they are the run's, whatever preset is asked for."""

_OF_NO_USE = (
    "env",
    "judge",
    "optimizer",
    "scheduler",
    "evaluation",
    "minibatches",
    "iterations",
    "group_size",
    "split_groups",
    "ptx",
    "ptx_coef",
    "ptx_loss",
    "ptx_decay_steps",
    "ptx_final_coef",
    "echo_coef",
)
"""Parts that a replay never uses, or that the saved rollout holds."""


def run_replay(config: DictConfig) -> int:
    """Compose, build, compare."""
    _check_keys()
    names = _names(config)
    run_dir = RunDir(Path(str(config.run_dir)).expanduser())
    tree = run_dir.read().settings()
    path = _rollout(config, run_dir)
    rollout = SavedRollout.read(path)
    allow = list(config.allow_targets)
    presets = {name: tree["algo"] if name == RUN else _preset(name, tree, allow) for name in dict.fromkeys(names)}
    parts = _shared(tree["algo"], rollout, config)
    parts["model"], fabric, notes = placed(parts["model"], config, tree["trainer"])
    if rollout.completions.vision is not None:
        rollout = _seeing(rollout, path, tree, parts["model"], config)
    modules = [(name, _module(name, presets[name], parts, rollout)) for name in names]
    checkpoint = checkpoint_of(config, run_dir)
    return replay(Replay(modules, rollout, path, checkpoint, run_dir.path, fabric, notes))


def _check_keys() -> None:
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0]
        if key in KEYS:
            continue
        hint = " Name presets in replay.losses=[...]." if key == "algo" else ""
        raise ConfigError(
            f"{key} cannot be set for lit-rl replay: it is taken from the run's config.yaml.{hint} To be set are "
            f"{', '.join(KEYS[:-1])}."
        )


def _names(config: DictConfig) -> list[str]:
    if not isinstance(config.replay.losses, ListConfig) or not config.replay.losses:
        raise ConfigError(
            f"replay.losses={config.replay.losses} must be a list of algo presets, such as "
            f"replay.losses=[grpo,gspo,cispo]; {RUN!r} stands for the run's own settings."
        )
    names, known = [str(name) for name in config.replay.losses], _presets()
    for name in names:
        if name not in (RUN, *known):
            raise ConfigError(
                f"replay.losses: {name!r} is no algo preset.{did_you_mean(name, (RUN, *known))} There are: {RUN} (the "
                f"run's own settings), {', '.join(known)}."
            )
    return names


def _presets() -> list[str]:
    found: Any = GlobalHydra.instance().config_loader().get_group_options("algo")
    return sorted(found)


def _preset(name: str, run: dict[str, Any], allow: list[str]) -> dict[str, Any]:
    """Return `algo=name`, with references to other parts replaced by the run's."""
    composed = compose("config", [f"algo={name}"]).algo
    _check_objective(name, get_class(composed._target_))
    algo = OmegaConf.to_container(composed)
    elsewhere = dict.fromkeys((*_OF_THE_RUN, *_OF_NO_USE, "eval")) | {
        "sampling": escape_interpolations(run["sampling"]),
        "allow_targets": allow,
    }
    return plain(OmegaConf.create(elsewhere | {"algo": algo}))["algo"]


def _check_objective(name: str, made: Any) -> None:
    if not isinstance(made, type) or not issubclass(made, PolicyGradient):
        called = getattr(made, "__name__", type(made).__name__)
        raise ConfigError(
            f"replay.losses: {name} is no objective over the rewards of a rollout ({called} learns from pairs, "
            "verdicts or texts, or is no algorithm): leave it out."
        )


def _rollout(config: DictConfig, run_dir: RunDir) -> Path:
    if config.replay.rollout is not None:
        path = Path(str(config.replay.rollout)).expanduser()
        if not path.is_file():
            raise ConfigError(f"replay.rollout={path} does not exist. Null is the newest one of run_dir/rollouts.")
        return path
    found = saved_rollouts(run_dir.path / "rollouts")
    if not found:
        raise ConfigError(
            f"There is no rollout in {run_dir.path / 'rollouts'}. A run writes its newest one with callbacks=default "
            "(callbacks.rollouts); runs with callbacks=none have none."
        )
    return found[-1]


def checkpoint_of(config: DictConfig, run_dir: RunDir) -> Path:
    """Return the file whose weights are the policy."""
    if config.ckpt_path not in (None, "last"):
        path = Path(str(config.ckpt_path)).expanduser()
        if not path.exists():
            raise ConfigError(f"ckpt_path={path} does not exist. Null is the newest whole checkpoint of run_dir.")
    else:
        last = run_dir.last_checkpoint()
        if last is None:
            raise StorageError(
                f"There is no whole checkpoint in {run_dir.checkpoints}, and a replay needs a policy: set ckpt_path."
            )
        path = last
    if path.is_dir():
        raise StorageError(
            f"{path} is a folder of pieces, and a replay reads one file. Make one of it with the strategy's own tool "
            "(DeepSpeed: zero_to_fp32), or take another checkpoint with ckpt_path."
        )
    return path


def _seeing(
    rollout: SavedRollout, path: Path, run: dict[str, Any], model: LanguageModel, config: DictConfig
) -> SavedRollout:
    """Return the rollout with the pixels of its completions, made again from the run's data: the file keeps none."""
    if rollout.data is None:
        raise ConfigError(
            f"{path} is a rollout over images without the name of its data, because its prompts came from no "
            "RolloutDataModule. Replay a rollout of a run of train.py."
        )
    run_trust.check({"data": run["data"]}, config)
    data: RolloutDataModule = build(run["data"])
    data.prepare(model.tokenizer, processor=model.processor, stage="predict")
    if data.fingerprint != rollout.data:
        raise ConfigError(
            f"The data of {path} have changed since it was written, and its completions would see other images. Put "
            "the rows, the images and the processor of the run back, or replay a run of the data as they are now."
        )
    completions = checkpoints.restore_pixels(rollout.completions, data.vision, lambda: model.processor)
    return replace(rollout, completions=completions)


def _shared(algo: dict[str, Any], rollout: SavedRollout, config: DictConfig) -> dict[str, Any]:
    """Build the parts that all objectives have in common, once. The rewards are those that were saved: nothing is
    called."""
    tree = {name: algo[name] for name in _OF_THE_RUN if name in algo and name != "reward"}
    built = {name: node for name, node in algo.items() if name not in ("reward", *_OF_NO_USE)}
    run_trust.check({"algo": built}, config)
    parts = {name: build(node) if isinstance(node, dict) else node for name, node in tree.items()}
    if not isinstance(parts.get("model"), LanguageModel):
        raise ConfigError(
            "algo.model of the run's config.yaml is no lit_rl.models.LanguageModel: the config is damaged."
        )
    parts["reward"] = Rewards(dict.fromkeys(rollout.scores.names, _not_called))
    return parts


def _not_called(completions: list[str]) -> list[float]:
    raise AssertionError("a replay takes the rewards that were saved")


def _module(name: str, algo: dict[str, Any], parts: dict[str, Any], rollout: SavedRollout) -> PolicyGradient:
    """Return the objective of a preset, for the whole rollout as one optimizer step."""
    left_out = {*_OF_THE_RUN, *_OF_NO_USE}
    settings = {key: value for key, value in algo.items() if key not in left_out}
    made = build(settings | {"_partial_": True})
    _check_objective(name, getattr(made, "func", made))
    if made.func.trained_beside:
        raise ConfigError(
            f"losses: {name} learns with a {made.func.trained_beside[0]}, and a rollout is saved without: leave it out."
        )
    group_size = len(rollout) // len(rollout.rows)
    try:
        module = made(**parts, group_size=group_size, split_groups=rollout.split_groups)
    except ConfigError as error:
        error.add_note(f"(in losses, for {name}: the rollout has {group_size} completions a prompt)")
        raise
    if module.needs_greedy_rewards and rollout.greedy_rewards is None:
        raise ConfigError(
            f"losses: {name} compares with the reward of greedy completions, and this rollout has none: only runs of "
            "algo=remax draw them. Leave it out."
        )
    if module.needs_teacher:
        raise ConfigError(
            f"losses: {name} learns from what a teacher said of the rollout (algo/teacher), which no rollout file "
            "holds. Leave it out."
        )
    if module.needs_gradient_norms and rollout.gradient_norms is None:
        raise ConfigError(
            f"losses: {name} reads how large a gradient each token had when the rollout was taken, and this rollout "
            "does not say: only runs whose algo.advantage reads it do, such as algo=otb. Leave it out."
        )
    if module.credit.roles is not None or hasattr(module.advantage, "load_state"):
        what = "algo.role" if module.credit.roles is not None else f"algo.advantage={name_of(module.advantage)}"
        raise ConfigError(
            f"losses: {name} has {what}, and a saved rollout holds neither the roles of its rows nor what earlier "
            "rollouts earned. Leave it out."
        )
    if isinstance(module.groups, DynamicSampling):
        module.groups = DynamicSampling(
            0, module.groups.metric, module.groups.tolerance
        )  # nothing to draw from: these only drop
    return module


def placed(
    model: LanguageModel, config: DictConfig, trainer: dict[str, Any]
) -> tuple[LanguageModel, L.Fabric, list[str]]:
    """Place the model on one device, in the type that the run's precision gives its weights; return it, and a note on
    another precision."""
    accelerator, precision = (_chosen(config, trainer, key) for key in ("accelerator", "precision"))
    notes = []
    if str(precision) in ("16", "16-mixed"):
        precision = FLOAT32
        notes.append("computed in float32: float16 gradients would need the loss scale of the training")
    narrow = precision in (AUTO, BF16)  # of the model alone: as in training, nothing else is bfloat16
    fabric = L.Fabric(
        accelerator=accelerator or "auto", devices=1, precision=FLOAT32 if narrow else precision or FLOAT32
    )
    if precision == AUTO:
        precision = automatic_precision_on(fabric.device, type(fabric.strategy), model).precision
    return model.held_in("bfloat16") if precision == BF16 else model, fabric, notes


def _chosen(config: DictConfig, trainer: dict[str, Any], key: str) -> Any:
    """Return a setting of the Trainer: the typed one, else the run's."""
    typed = [override.partition("=")[0] for override in HydraConfig.get().overrides.task]
    return config.trainer[key] if f"trainer.{key}" in typed else trainer.get(key)
