"""Numbers and words that a constructor refuses are refused before it can be imported, in its own words.

What each allows stands in `schema_keys.yaml`, as `scripts/range_calls.py` reads it from the constructors.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli import stored_schemas
from lit_rl.cli.key_names import schema_keys
from lit_rl.errors import ConfigError, check_betas, check_strings, in_range, one_of

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
    ("lit_rl.rollout.Sampling", "sampling.stop", check_strings),
    ("lit_rl.rollout.Sampling", "sampling.bad_words", check_strings),
)
"""Keys of several values, which no schema checks: the beginning of their target's path, and the check of the value."""

_NUMBERS = re.compile(r"\s*-?\d+\s*(,\s*\d+\s*)*,?\s*")


def check(config: DictConfig, *, whole: bool) -> None:
    """Refuse values out of range, and unknown choices.

    Args:
        config: The composed config.
        whole: True if the task builds everything in the config; else the Trainer's devices alone are read.

    Raises:
        ConfigError: as the constructor raises it.
    """
    for top in BUILT if whole else ("trainer",):
        for node in _nodes(plain(config, top)):
            for name, asked in schema_keys()["_allowed_"].get(str(node.get("_target_")), {}).items():
                if (whole or name in _OF_THE_DEVICE) and not _may_be_registered(node.get(name), asked, config):
                    _check(node.get(name), asked)
            for built, key, check_list in LISTS if whole else ():
                value = node.get(key.partition(".")[2])
                if value is not None and str(node.get("_target_")).startswith(built):
                    check_list(key, value)
    _check_commands(config)
    trainer = plain(config, "trainer")
    if isinstance(trainer, dict):
        _check_devices(trainer)
        if whole:
            _check_length(trainer)
            _check_numbers(trainer)


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


def _check_commands(config: DictConfig) -> None:
    """Refuse a command's keys of another type, and a value in the place of all of them."""
    for command, types in _COMMANDS.items():
        if command not in config:
            continue
        keys = config.get(command)
        if not OmegaConf.is_dict(keys):
            names = ", ".join(f"{command}.{name}" for name in types) or f"{command}.KEY"
            raise ConfigError(f"{command}={keys} stands for no settings: type one of them, {names}=...")
        for name, kind in types.items():
            value = keys.get(name)
            if value is not None and kind is bool and not isinstance(value, bool):
                raise ConfigError(f"{command}.{name}={value} is no switch: type true or false.")
            if kind is int and isinstance(value, float | bool):
                raise ConfigError(f"{command}.{name}={value} is no whole number, such as {command}.{name}=4.")
            if kind is float and value is not None:
                in_range(f"{command}.{name}", value, low=0, open_low=True)


def _may_be_registered(value: Any, asked: list[dict[str, Any]], config: DictConfig) -> bool:
    """Tell whether a value is unknown here, but may be in a registry of Lightning once it is loaded.

    A plugin registers a strategy or an accelerator when it is imported: by what the config names, by a package that
    Lightning loads, or by the script that called.
    """
    key = asked[0]["key"]
    if not key.startswith("trainer.") or not isinstance(value, str) or value.lower() in asked[0].get("allowed", ()):
        return False
    if schema_keys()["_versions_"] != stored_schemas.versions():  # another Lightning has words of its own
        return True
    if key not in _REGISTERED:
        return False
    module, registry, names = _REGISTERED[key]
    if module in sys.modules and value.lower() in getattr(getattr(sys.modules[module], registry), names)():
        return True
    groups, tree = importlib.metadata.entry_points().groups, plain(config, None)
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


def _check(value: Any, asked: list[dict[str, Any]]) -> None:
    for call in asked:
        if "allowed" in call:
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                word = str(value).lower() if call["key"] == "trainer.strategy" else str(value)  # as Lightning reads it
                one_of(call["key"], word, call["allowed"])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            in_range(value=value, **call)


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
            f"scheduler.warmup_steps={warmup} is more than trainer.max_steps={steps}: the learning rate would end at "
            f"{steps / warmup:.0%} of optimizer.lr, still rising. Lower the first, or raise the second."
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
            f"trainer.devices={devices!r}: a run takes one device at least. Allowed is auto, how many (2), or which "
            "(trainer.devices=[0,2]). Their kind is trainer.accelerator: trainer.accelerator=cpu takes no GPU."
        )
    words = devices if isinstance(devices, list) else [devices]
    if any(isinstance(word, str) and word != "auto" and not _NUMBERS.fullmatch(word) for word in words):
        raise ConfigError(
            f"trainer.devices={devices!r} is no number of devices. Allowed is auto, how many (2), or which "
            "(trainer.devices=[0,2]). Their kind is trainer.accelerator."
        )


def plain(config: DictConfig, key: str | None) -> Any:
    """Return a part of the config, or all of it, with its references followed; None where one leads nowhere, which is
    refused later."""
    part = config if key is None else config.get(key)
    try:
        return OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else None
    except OmegaConfBaseException:
        return None


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every node with a `_target_`."""
    if isinstance(tree, dict):
        yield from (tree,) if "_target_" in tree else ()
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)
