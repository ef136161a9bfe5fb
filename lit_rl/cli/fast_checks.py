"""Checks of a config before torch loads: numbers and words that a constructor would refuse, in its own words, and files
that are missing.

The allowed values stand in `schema_keys.yaml`, as `scripts/config_reference.py` reads them from the constructors.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli import key_checks, listing, messages, schemas
from lit_rl.cli.key_checks import typed_value
from lit_rl.cli.listing import schema_keys
from lit_rl.cli.run_info import folder_of, is_launched, is_over_a_run, is_sweep, training_command, writes_nothing
from lit_rl.core.declared_settings import Allowed
from lit_rl.core.errors import ConfigError, check_betas, check_draws, check_strings, in_range, one_of
from lit_rl.core.machine import require_vllm
from lit_rl.core.model_paths import check_model_is_readable, resolve_model_path
from lit_rl.core.speedups import DecodingSpeedups, ModelSpeedups
from lit_rl.core.user_functions import check_function, weights_by_name
from lit_rl.data.sources import local_path
from lit_rl.reports.run_files import (
    RunFiles,
    check_has_checkpoint,
    check_has_config,
    check_is_folder,
    check_not_a_file,
    folder_taken_error,
)

# ---------------------------------------------------------------------- tasks, by what they need


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


# ---------------------------------------------------------------------- models, functions, files and folders


def check_config(config: DictConfig) -> None:
    """Refuse numbers out of range, and files and folders that are missing, in every process alike: none may wait for
    one that has left.

    What rank 0 alone decides, the folder and the checkpoint of the run, is looked at where it is alone so far.

    Args:
        config: The composed config.

    Raises:
        LitRLError: as whoever reads it would raise it.
    """
    check_values(config, whole=config.task in _OF_A_TRAINER)
    if config.run_dir:
        _check_run(config, Path(str(config.run_dir)).expanduser())
    elif config.task in (*_OF_A_RUN, *_OF_ITS_CONFIG) and config.task != "chat":
        raise ConfigError(f"lit-rl {config.task} needs the folder of a run: run_dir=runs/...")
    if config.task in _OF_ROWS:
        computed = (
            _value_at(config, "data.task") is not None and "data" in key_checks.overridden_keys()
        )  # not the demo's, which is left
        if str(_value_at(config, "data._target_")).startswith("lit_rl.data.") and not computed:
            check_data(_texts(_value_at(config, "data.path")))
        by_path = _value_at(config, "reward._target_") == "lit_rl.rewards.from_paths"
        _check_functions(config, "data.map_row", *(["reward.fn"] if by_path else []))
        _check_weights(plain_value(config, "reward"))
    if config.task in _OF_A_MODEL:
        _check_engine(config)
        _check_first_stage(config)
        for name in _texts(_value_at(config, "model.name")):
            resolve_model_path("model.name", name)
    temperature = _value_at(config, "sampling.temperature")
    if (
        config.task in ("fit", "plan")
        and _value_at(config, "algo._target_") in DRAW
        and isinstance(temperature, int | float)
    ):
        check_draws(temperature)
    if config.task in _OF_A_TRAINER:
        messages.check_accelerator(_value_at(config, "trainer.accelerator"))
    if not is_launched():
        _check_start(config)
        _check_hub(config)


def _check_hub(config: DictConfig) -> None:
    """Refuse a model of the hub that is not there. Where settings of a run come first, its model is not this one."""
    ours = _value_at(config, "model._target_") == "lit_rl.models.LanguageModel"
    ours &= not _value_at(config, "model.init_kwargs") and not _value_at(
        config, "model.trust_remote_code"
    )  # checked before
    if config.task in (*_OF_A_MODEL, "data_check") and ours and not is_over_a_run(config.task, config.run_dir):
        for name in _texts(_value_at(config, "model.name")):
            check_model_is_readable("model.name", name)


def _check_functions(config: DictConfig, *keys: str) -> None:
    """Refuse paths of functions whose files are not there, or have no such name."""
    for key in keys:
        for path in _texts(_value_at(config, key)):
            check_function(path, key)


def _check_engine(config: DictConfig) -> None:
    """Refuse a generator whose package is not there."""
    name = str(_value_at(config, "generator._target_")).rpartition(".")[2]
    if name == "VLLMGenerator":
        require_vllm("generator=vllm")
    if name == "VLLMServerGenerator" and _value_at(config, "generator.launch") is True:
        require_vllm("generator.launch=true")


def _check_first_stage(config: DictConfig) -> None:
    """Refuse an experiment that begins with the model of an SFT run, where that run has left none."""
    folder, model = (str(_value_at(config, key) or "") for key in ("sft_dir", "model.name"))
    if not folder or model != f"{folder}/hf" or Path(model).expanduser().is_dir():
        return
    first = f"{HydraConfig.get().runtime.choices.get('experiment')}_sft"
    shipped = (listing.conf_folder() / "experiment" / f"{first}.yaml").is_file()
    line = f" Run it: {training_command([f'experiment={first}', f'run_dir={folder}'])}." if shipped else ""
    raise ConfigError(
        f"sft_dir={folder}: there is no {model}. This run starts from the model of a finished SFT run.{line} If you "
        "have one elsewhere, type sft_dir=RUN_DIR."
    )


def _check_run(config: DictConfig, folder: Path) -> None:
    """Refuse a folder without a run, where one is read. An exported model can be talked to without more."""
    if config.task in _OF_A_RUN:
        check_is_folder(folder)
    if config.task in _OF_ITS_CONFIG and not (config.task == "chat" and (folder / "hf").is_dir()):
        check_has_config(folder)


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
        check_has_checkpoint(folder_of(config))
    check_evaluated(config)
    if config.task == "fit" and config.run_dir:
        _check_folder(config)


def check_checkpoint(path: str) -> None:
    """Refuse a missing checkpoint.

    Raises:
        ConfigError: names it.
    """
    if not Path(path).exists():
        raise ConfigError(f"ckpt_path={path} does not exist: give the path of a checkpoint, or `last`.")


def _check_folder(config: DictConfig) -> None:
    """Refuse a folder that a new run cannot have: a file, or one with a run that has ended. Further checks follow once
    it is known that no other process writes there."""
    folder = folder_of(config)
    if writes_nothing(config):
        return
    check_not_a_file(folder)
    if config.ckpt_path is None and "SLURM_JOB_ID" not in os.environ and RunFiles(folder).finished:
        raise folder_taken_error(folder, "a finished run")


def check_evaluated(config: DictConfig) -> None:
    """Refuse a new folder where nothing else to evaluate was typed: it is the mistyped name of a run.

    Raises:
        ConfigError: names it, and the nearest run that stands beside it.
    """
    if config.task in _OVER_A_RUN and config.run_dir and not is_sweep() and not _says_what_to_evaluate():
        check_has_config(folder_of(config))


def _says_what_to_evaluate() -> bool:
    """Tell whether a model, data or anything else was typed beside the folder: then it may be a new one."""
    return any(key.partition(".")[0] not in _OF_THE_EVALUATION for key in key_checks.overridden_keys())


def check_data(paths: Sequence[str]) -> None:
    """Refuse missing files among texts that are written as paths.

    Raises:
        DataError: names it, and the nearest that is there.
    """
    for path in paths:
        local_path(path)


# ---------------------------------------------------------------------- words before Hydra composes


def check_sweep(words: Sequence[str]) -> None:
    """Refuse a sweep of a command over one run, before Hydra makes the sweep's folder.

    Args:
        words: As they come to Hydra, with `task=`.

    Raises:
        ConfigError: says what to do in its place.
    """
    task, run_dir = typed_value(words, "task") or "fit", typed_value(words, "run_dir")
    if {"-m", "--multirun"} & {*words} and run_dir and is_over_a_run(task, run_dir):
        raise no_sweep_error(task, run_dir)


def no_sweep_error(task: str, run_dir: str) -> ConfigError:
    """Return the error about such a sweep."""
    return ConfigError(
        f"lit-rl {task.replace('_', '-')} of the run {run_dir} cannot be a sweep (-m): start it once for each "
        "setting. Each start writes its own folder there."
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


# ---------------------------------------------------------------------- numbers and words in their ranges


BUILT = ("algo", "data", "callbacks", "trainer")
"""Parts that every task with a Trainer builds. They refer to all other parts of a config that are read."""

_OF_THE_DEVICE = ("accelerator", "precision", "strategy", "devices")
"""Settings of the Trainer that other tasks read, too."""

_REGISTERED = {
    "trainer.accelerator": ("lightning.pytorch.accelerators", "AcceleratorRegistry", "available_accelerators"),
    "trainer.strategy": ("lightning.pytorch.strategies", "StrategyRegistry", "available_strategies"),
}
"""Keys whose values any code can add to, each with Lightning's registry of them."""

_OURS = ("lit_rl.", "lightning.", "torch.", "transformers.", "hydra.")

_CODE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")
"""Forms in which a config names code: `./file.py:name`, `package.module:name`."""

_DURATION = re.compile(r"\d+:\d\d:\d\d:\d\d")

_ENDLESS = {"max_steps": "infinite steps", "max_epochs": "infinite epochs"}
"""Lengths of a run, each with the meaning of -1."""

_SHARES = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches")
"""Settings of the Trainer that are a number of batches or a share of them, of which Lightning compares a word."""

LISTS = (
    ("lit_rl.algorithms.optim.optimizers.AdamW", "optimizer.betas", check_betas),
    ("lit_rl.core.rollout.Sampling", "sampling.stop", check_strings),
    ("lit_rl.core.rollout.Sampling", "sampling.bad_words", check_strings),
    ("lit_rl.models.LanguageModel", "model.speedups", ModelSpeedups.read),
    ("lit_rl.generation.native.NativeGenerator", "generator.speedups", DecodingSpeedups.read),
)
"""Keys of several values, which no schema checks: the beginning of their target's path, and the check of the value."""

_NUMBERS = re.compile(r"\s*-?\d+\s*(,\s*\d+\s*)*,?\s*")

_COMMANDS: dict[str, dict[str, type]] = {
    "plan": {"memory_gb": float, "probe": bool},
    "reward_test": {"rows": int},
    "data_check": {"rows": int},
    "env_check": {},
    "chat": {"plain": bool},
    "serve": {"port": int, "startup_timeout": float},
    "doctor": {"prompts": int, "completions": int},
    "transcripts": {"rollouts": int, "episodes": int, "tokens": int},
    "export": {"private": bool},
    "replay": {},
}
"""The keys of commands that are numbers or switches: they are in no constructor, so no schema checks them."""


def check_values(config: DictConfig, *, whole: bool) -> None:
    """Refuse values out of range, and unknown choices.

    Args:
        config: The composed config.
        whole: True if the task builds everything in the config; else the Trainer's devices alone are read.

    Raises:
        ConfigError: as the constructor raises it.
    """
    for top in BUILT if whole else ("trainer",):
        for node in _target_nodes(plain_value(config, top)):
            for name, asked in schema_keys()["_allowed_"].get(str(node.get("_target_")), {}).items():
                if (whole or name in _OF_THE_DEVICE) and not _may_be_registered(node.get(name), asked, config):
                    _check_value(node.get(name), asked)
            for built, key, check_list in LISTS if whole else ():
                value = node.get(key.partition(".")[2])
                if value is not None and str(node.get("_target_")).startswith(built):
                    check_list(key, value)
    _check_commands(config)
    trainer = plain_value(config, "trainer")
    if isinstance(trainer, dict):
        _check_devices(trainer)
        if whole:
            _check_length(trainer)
            _check_numbers(trainer)


def _check_commands(config: DictConfig) -> None:
    """Refuse a command's keys of another type, and a value in the place of all of them."""
    for command, types in _COMMANDS.items():
        if command not in config:
            continue
        keys = config.get(command)
        if not OmegaConf.is_dict(keys):
            names = ", ".join(f"{command}.{name}" for name in types) or f"{command}.KEY"
            raise ConfigError(f"{command}={keys} sets nothing: type one of its keys, {names}=...")
        for name, kind in types.items():
            value = keys.get(name)
            if value is not None and kind is bool and not isinstance(value, bool):
                raise ConfigError(f"{command}.{name}={value} is not a switch: type true or false.")
            if kind is int and isinstance(value, float | bool):
                raise ConfigError(f"{command}.{name}={value} is not a whole number, such as {command}.{name}=4.")
            if kind is float and value is not None:
                in_range(f"{command}.{name}", value, low=0, open_low=True)


def _may_be_registered(value: Any, asked: Mapping[str, Any], config: DictConfig) -> bool:
    """Tell whether a value is unknown here, but may be in a registry of Lightning once it is loaded.

    A plugin registers a strategy or an accelerator when it is imported: by what the config names, by a package that
    Lightning loads, or by the script that called.
    """
    key = asked["key"]
    if not key.startswith("trainer.") or not isinstance(value, str) or value.lower() in asked.get("words", ()):
        return False
    if schema_keys()["_versions_"] != schemas.schema_versions():  # another Lightning has words of its own
        return True
    if key not in _REGISTERED:
        return False
    module, registry, names = _REGISTERED[key]
    if module in sys.modules and value.lower() in getattr(getattr(sys.modules[module], registry), names)():
        return True
    groups, tree = importlib.metadata.entry_points().groups, plain_value(config, None)
    return tree is None or _names_code(tree) or any(group.startswith("lightning.") for group in groups)


def _names_code(tree: Any) -> bool:
    """Tell whether anything in the tree is built from, or calls, code that is neither ours nor that of our
    libraries."""
    if isinstance(tree, dict):
        target = tree.get("_target_")
        built = str(tree.get("path") if target == "hydra.utils.get_method" else target or _OURS[0])
        return not built.startswith(_OURS) or any(map(_names_code, tree.values()))
    if isinstance(tree, list):
        return any(map(_names_code, tree))
    return isinstance(tree, str) and _CODE.fullmatch(tree) is not None


def _check_value(value: Any, asked: Mapping[str, Any]) -> None:
    key, allowed = asked["key"], Allowed.restore(asked)
    plain = (str, int, float, list) if allowed.many else (str, int, float)
    if isinstance(value, bool) or not isinstance(value, plain):
        return
    if key.startswith("trainer."):  # as Lightning reads it
        value = str(value).lower() if key == "trainer.strategy" else str(value)
    if allowed.words or not isinstance(value, str):
        allowed.check(key, value)


def _check_length(trainer: Mapping[str, Any]) -> None:
    """Refuse lengths of a run that Lightning refuses."""
    for name, endless in _ENDLESS.items():
        value = trainer.get(name)
        if isinstance(value, int) and value < -1:
            raise ConfigError(f"trainer.{name}={value} must be a non-negative integer or -1 ({endless}).")
    time = trainer.get("max_time")
    if isinstance(time, (str, int, float)) and not _DURATION.fullmatch(str(time).strip()):
        raise ConfigError(
            f"trainer.max_time={time!r} is not a valid duration: expected is a text of the form DD:HH:MM:SS, such as "
            "00:01:00:00 for one hour."
        )


def check_warmup(config: DictConfig, typed: Collection[str]) -> None:
    """Refuse a warm-up that ends behind the run, where it was typed. One of a preset may: a trial is no mistake.

    Args:
        config: Config of a training.
        typed: The keys of the command line.
    """
    trainer = config.get("trainer") or {}
    warmup, steps = OmegaConf.select(config, "scheduler.warmup_steps"), trainer.get("max_steps")
    if "scheduler.warmup_steps" not in typed or trainer.get("fast_dev_run"):
        return
    if isinstance(warmup, int) and isinstance(steps, int) and 0 < steps < warmup:
        raise ConfigError(
            f"scheduler.warmup_steps={warmup} is more than trainer.max_steps={steps}: the learning rate would still be "
            f"rising at the end, at {steps / warmup:.0%} of optimizer.lr. Lower the first, or raise the second."
        )


def _check_numbers(trainer: Mapping[str, Any]) -> None:
    """Check settings of the Trainer of several types, which no schema checks."""
    for name in _SHARES:
        if isinstance(value := trainer.get(name), str):
            in_range(f"trainer.{name}", value, low=0)  # pyright: ignore (it says that this is no number)
    _check_interval(trainer.get("val_check_interval"))
    fast = trainer.get("fast_dev_run")
    if fast is not None and (not isinstance(fast, int) or fast < 0):
        raise ConfigError(f"trainer.fast_dev_run={fast!r}: allowed is true, false, or how many steps, such as 3.")
    if (fixed := trainer.get("deterministic")) not in (None, True, False, "warn"):
        raise ConfigError(f"trainer.deterministic={fixed!r}: allowed is true, false or warn.")
    profiler = trainer.get("profiler")
    if isinstance(profiler, str | int | float):
        one_of("trainer.profiler", str(profiler).lower(), ("simple", "advanced", "pytorch", "xla"))
    lows = {"check_val_every_n_epoch": 1, "log_every_n_steps": 0, "num_sanity_val_steps": -1, "num_nodes": 1}
    for name, low in lows.items():
        if isinstance(value := trainer.get(name), int):
            in_range(f"trainer.{name}", value, low=low)
    if isinstance(value := trainer.get("gradient_clip_val"), (int, float, str)):
        in_range("trainer.gradient_clip_val", value, low=0)  # pyright: ignore
    if trainer.get("accumulate_grad_batches") is not None:
        check_accumulation(trainer["accumulate_grad_batches"])


def _check_interval(value: Any) -> None:
    """Refuse intervals of validation that Lightning refuses: micro-batches, a share of the epoch, or time."""
    if isinstance(value, str):
        allowed = _DURATION.fullmatch(value.strip()) is not None
    elif isinstance(value, (int, float)):
        allowed = 0 < value <= 1 or (value > 1 and value % 1 == 0)
    else:
        allowed = True
    if not allowed:
        raise ConfigError(
            f"trainer.val_check_interval={value!r}: allowed is a whole number of micro-batches, a share of the epoch "
            "above 0.0 to 1.0, a time of the form DD:HH:MM:SS, or null for the end of every epoch. "
            "trainer.limit_val_batches=0 leaves validation out."
        )


def check_accumulation(accumulate: Any) -> None:
    """Refuse anything but `auto` or a number of micro-batches.

    Raises:
        ConfigError: says what is allowed.
    """
    counts = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1
    if not counts and accumulate != "auto":
        raise ConfigError(
            f"trainer.accumulate_grad_batches={accumulate!r}: allowed is auto (as many micro-batches as memory needs), "
            "or a number of 1 or more."
        )


def _check_devices(trainer: Mapping[str, Any]) -> None:
    """Refuse devices other than Lightning takes: a number, a list of numbers, or a text of them."""
    devices = trainer.get("devices")
    if devices in (0, "0", "", [], False) or (isinstance(devices, int) and devices < -1):
        raise ConfigError(
            f"trainer.devices={devices!r}: a run needs at least one device. Allowed are auto, a number (2), and a list "
            "(trainer.devices=[0,2]). trainer.accelerator chooses their kind: trainer.accelerator=cpu uses no GPU."
        )
    words = devices if isinstance(devices, list) else [devices]
    if any(isinstance(word, str) and word != "auto" and not _NUMBERS.fullmatch(word) for word in words):
        raise ConfigError(
            f"trainer.devices={devices!r} is not a number of devices. Allowed are auto, a number (2), and a list "
            "(trainer.devices=[0,2]). trainer.accelerator chooses their kind."
        )


# ---------------------------------------------------------------------- values of a config


def plain_value(config: DictConfig, key: str | None) -> Any:
    """Return a part of the config, or all of it, with its references followed; None where one leads nowhere, which is
    refused later."""
    part = config if key is None else config.get(key)
    try:
        return OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else None
    except OmegaConfBaseException:
        return None


def _target_nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every node with a `_target_`."""
    if isinstance(tree, dict):
        yield from (tree,) if "_target_" in tree else ()
        for value in tree.values():
            yield from _target_nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _target_nodes(value)


def _value_at(config: DictConfig, key: str) -> Any:
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
