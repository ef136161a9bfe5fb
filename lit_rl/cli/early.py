"""What is out of range, or names a file that is not there, is refused before torch is loaded, in the words of who needs
it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_rl.cli import accelerators, allowed, listing, own_keys
from lit_rl.cli.own_keys import typed_value
from lit_rl.cli.whereabouts import entered, folder_of, is_launched, is_over_a_run, is_sweep, writes_nothing
from lit_rl.commands import folder_state
from lit_rl.data.sources import local_path
from lit_rl.errors import ConfigError, check_draws
from lit_rl.named import check_can_be_read, check_function, local_model, weights_by_name
from lit_rl.vllm_package import require_vllm

TELL_THE_DATA = {"data", "algo", "experiment", "data.prompt_key"}
"""Keys with which the columns of a file choose nothing, or not before Hydra composes."""
_OF_A_RUN = ("report", "transcripts")
"""Tasks that need a folder with a run in it, and nothing else."""
_OF_ITS_CONFIG = ("replay", "export", "chat")
"""Tasks that need a run's settings."""
_OVER_A_RUN = ("eval", "best_of_n")
"""Tasks that evaluate a run where its folder is all that is typed."""
_OF_THE_EVALUATION = (
    *("task", "run_dir", "eval", "seed", "trust_run", "trainer", "strategy", "generator", "logger", "callbacks"),
    *("allow_targets", "hydra"),
)
"""Keys that do not choose a model or data to evaluate."""
_SUMS = ("lit_rl.rewards.Rewards", "lit_rl.rewards.from_paths")
"""Targets that add up reward functions by their weights."""
_OF_ROWS = ("fit", "eval", "validate", "test", "predict", "plan", "reward_test", "data_check", "env_check", "best_of_n")
"""Tasks that read data."""
_OF_A_TRAINER = tuple(task for task in _OF_ROWS if task != "data_check")
"""Tasks that build everything in the config."""
DRAW = tuple(f"lit_rl.algorithms.{name}" for name in ("GRPO", "RLOO", "Reinforce", "PPO", "OnlineDPO", "NashMD", "XPO"))
"""Algorithms that learn from completions of the policy."""
_OF_A_MODEL = ("fit", "eval", "validate", "test", "predict", "plan", "best_of_n", "doctor")
"""Tasks that load the policy of the config."""


def check(config: DictConfig) -> None:
    """Refuse numbers out of range, and files and folders that are missing, in every process alike: none may wait for
    one that has left.

    What rank 0 alone decides, the folder and the checkpoint of the run, is looked at where it is alone so far.

    Args:
        config: The composed config.

    Raises:
        LitRLError: as whoever reads it would raise it.
    """
    allowed.check(config, whole=config.task in _OF_A_TRAINER)
    if config.run_dir:
        _check_run(config, Path(str(config.run_dir)).expanduser())
    elif config.task in (*_OF_A_RUN, *_OF_ITS_CONFIG) and config.task != "chat":
        raise ConfigError(f"lit-rl {config.task} needs the folder of a run: run_dir=runs/...")
    if config.task in _OF_ROWS:
        computed = _at(config, "data.task") is not None and "data" in own_keys.typed()  # not the demo's, which is left
        if str(_at(config, "data._target_")).startswith("lit_rl.data.") and not computed:
            check_data(_texts(_at(config, "data.path")))
        by_path = _at(config, "reward._target_") == "lit_rl.rewards.from_paths"
        _check_functions(config, "data.map_row", *(["reward.fn"] if by_path else []))
        _check_weights(allowed.plain(config, "reward"))
    if config.task in _OF_A_MODEL:
        _check_engine(config)
        _check_first_stage(config)
        for name in _texts(_at(config, "model.name")):
            local_model("model.name", name)
    temperature = _at(config, "sampling.temperature")
    if config.task in ("fit", "plan") and _at(config, "algo._target_") in DRAW and isinstance(temperature, int | float):
        check_draws(temperature)
    if config.task in _OF_A_TRAINER:
        accelerators.check(_at(config, "trainer.accelerator"))
    if not is_launched():
        _check_start(config)
        _check_hub(config)


def _check_hub(config: DictConfig) -> None:
    """Refuse a model of the hub that is not there. Where settings of a run come first, its model is not this one."""
    ours = _at(config, "model._target_") == "lit_rl.models.LanguageModel"
    ours &= not _at(config, "model.init_kwargs") and not _at(config, "model.trust_remote_code")  # said of it first
    if config.task in (*_OF_A_MODEL, "data_check") and ours and not is_over_a_run(config.task, config.run_dir):
        for name in _texts(_at(config, "model.name")):
            check_can_be_read("model.name", name)


def _check_functions(config: DictConfig, *keys: str) -> None:
    """Refuse paths of functions whose files are not there, or have no such name."""
    for key in keys:
        for path in _texts(_at(config, key)):
            check_function(path, key)


def _check_engine(config: DictConfig) -> None:
    """Refuse a generator whose package is not there."""
    name = str(_at(config, "generator._target_")).rpartition(".")[2]
    if name == "VLLMGenerator":
        require_vllm("generator=vllm")
    if name == "VLLMServerGenerator" and _at(config, "generator.launch") is True:
        require_vllm("generator.launch=true")


def _check_first_stage(config: DictConfig) -> None:
    """Refuse an experiment that begins with the model of an SFT run, where that run has left none."""
    folder, model = (str(_at(config, key) or "") for key in ("sft_dir", "model.name"))
    if not folder or model != f"{folder}/hf" or Path(model).expanduser().is_dir():
        return
    first = f"{HydraConfig.get().runtime.choices.get('experiment')}_sft"
    shipped = (listing.conf_folder() / "experiment" / f"{first}.yaml").is_file()
    line = f" Run it: {entered([f'experiment={first}', f'run_dir={folder}'])}." if shipped else ""
    raise ConfigError(
        f"sft_dir={folder}: there is no {model}. The run begins with the model of a finished SFT run.{line} For one "
        "that you have, type sft_dir=RUN_DIR."
    )


def _check_run(config: DictConfig, folder: Path) -> None:
    """Refuse a folder without a run, where one is read. An exported model can be talked to without more."""
    if config.task in _OF_A_RUN:
        folder_state.check_is_folder(folder)
    if config.task in _OF_ITS_CONFIG and not (config.task == "chat" and (folder / "hf").is_dir()):
        folder_state.check_has_config(folder)


def _check_weights(reward: Any) -> None:
    """Refuse weights of reward functions that are no numbers, or another count, where the config alone names these."""
    if not isinstance(reward, dict) or reward.get("_target_") not in _SUMS or reward.get("weights") is None:
        return
    functions = reward.get("functions")
    if isinstance(functions, dict):
        names = list(functions)
    else:
        names = [path.rpartition(":")[2] for path in _each(reward.get("fn"))]
    # Files with functions of the same name are told apart as they are loaded.
    if names and len(set(names)) == len(names):
        weights_by_name(reward["weights"], names)


def _check_start(config: DictConfig) -> None:
    """Refuse a missing checkpoint, and a folder that a new run cannot have."""
    if config.task in _OF_ROWS and config.ckpt_path not in (None, "last"):
        check_checkpoint(str(config.ckpt_path))
    if is_sweep():
        return
    if config.task in _OF_A_TRAINER and config.task != "fit" and config.ckpt_path == "last":
        folder_state.check_has_checkpoint(folder_of(config))
    check_evaluated(config)
    if config.task == "fit" and config.run_dir:
        _check_folder(config)


def check_evaluated(config: DictConfig) -> None:
    """Refuse a new folder where nothing else to evaluate was typed: it is the mistyped name of a run.

    Raises:
        ConfigError: names it, and the nearest run that stands beside it.
    """
    if config.task in _OVER_A_RUN and config.run_dir and not is_sweep() and not _says_what_to_evaluate():
        folder_state.check_has_config(folder_of(config))


def _says_what_to_evaluate() -> bool:
    """Tell whether a model, data or anything else was typed beside the folder: then it may be a new one."""
    return any(key.partition(".")[0] not in _OF_THE_EVALUATION for key in own_keys.typed())


def check_sweep(words: Sequence[str]) -> None:
    """Refuse a sweep of a command over one run, before Hydra makes the sweep's folder.

    Args:
        words: As they come to Hydra, with `task=`.

    Raises:
        ConfigError: says what to do in its place.
    """
    task, run_dir = typed_value(words, "task") or "fit", typed_value(words, "run_dir")
    if {"-m", "--multirun"} & {*words} and run_dir and is_over_a_run(task, run_dir):
        raise no_sweep(task, run_dir)


def no_sweep(task: str, run_dir: str) -> ConfigError:
    """Return the error about such a sweep."""
    return ConfigError(
        f"lit-rl {task.replace('_', '-')} over the run of {run_dir} takes no sweep (-m): start it once for each "
        "setting. Each start writes a folder of its own there."
    )


def check_words(words: Sequence[str]) -> None:
    """Refuse a missing `data.path`, before its columns choose a group. A command without rows reports that itself.

    Args:
        words: Of the command line; a value that Hydra would read as anything but a plain text is left to it.
    """
    for word in words if typed_value(words, "task", "fit") in _OF_ROWS else ():
        key, _, value = word.partition("=")
        if key == "data.path" and value and not set(value) & set(",$[]{}'\"\\ "):
            check_data([value])


def check_data(paths: Sequence[str]) -> None:
    """Refuse missing files among texts that are written as paths.

    Raises:
        DataError: names it, and the nearest that is there.
    """
    for path in paths:
        local_path(path)


def check_checkpoint(path: str) -> None:
    """Refuse a missing checkpoint.

    Raises:
        ConfigError: names it.
    """
    if not Path(path).exists():
        raise ConfigError(f"ckpt_path={path} does not exist. Allowed is a checkpoint, or `last`.")


def _check_folder(config: DictConfig) -> None:
    """Refuse a folder that a new run cannot have: a file, or one with a run that has ended. Further checks follow once
    it is known that no other process writes there."""
    folder = folder_of(config)
    if writes_nothing(config):
        return
    folder_state.check_is_no_file(folder)
    if config.ckpt_path is None and "SLURM_JOB_ID" not in os.environ and folder_state.is_finished(folder):
        raise folder_state.held(folder, "a finished run")


def _at(config: DictConfig, key: str) -> Any:
    """Return the value of a key; None where there is none, or a reference in it leads nowhere."""
    return OmegaConf.select(config, key, throw_on_resolution_failure=False, throw_on_missing=False)


def _texts(value: Any) -> list[str]:
    """Return one text, or those of a list; other values are left to their reader."""
    return list(_each(value))


def _each(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) or OmegaConf.is_list(value):
        yield from (each for each in value if isinstance(each, str))
