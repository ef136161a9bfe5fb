"""From a config to Lightning's Trainer: its settings, callbacks and loggers, and what every run has beside them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar

from lit_rl.callbacks import AtomicCheckpointIO, JsonlLogger, Record, let_loggers_fail
from lit_rl.cli.build import build, check_trainer
from lit_rl.cli.listing import some_keys
from lit_rl.cli.other_words import meaning, no_key
from lit_rl.commands.run_dir import RunDir
from lit_rl.errors import ConfigError, StorageError, did_you_mean


def trainer_of(tree: dict[str, Any], run_dir: RunDir, dry: bool) -> L.Trainer:
    """Return the Trainer with the run's parts: whole checkpoints, metrics.jsonl, and a record that a resume can cut.

    Args:
        tree: The config, in plain values.
        run_dir: Folder of the run.
        dry: True if nothing is written.

    Raises:
        ConfigError: what is no setting of a Trainer, no callback or no logger.
    """
    settings = dict(tree["trainer"])
    if settings["logger"] is not None:
        raise ConfigError(
            f"trainer.logger={settings['logger']} has no effect: choose with logger=csv, tensorboard, wandb, mlflow, "
            "trackio or none."
        )
    if (target := settings.pop("_target_")) != "lightning.Trainer":
        raise ConfigError(f"trainer._target_={target!r}: it is lightning.Trainer, and its arguments are the settings.")
    atomic = {"_target_": f"{AtomicCheckpointIO.__module__}.{AtomicCheckpointIO.__qualname__}"}
    settings["plugins"] = [*_as_list(settings["plugins"]), atomic]
    settings = {name: build(value) if isinstance(value, (dict, list)) else value for name, value in settings.items()}

    _check_nodes(tree)
    callbacks = [build(node) for node in (tree.get("callbacks") or {}).values() if node]
    unwanted: tuple[type, ...] = () if settings["enable_progress_bar"] in (None, True) else (ProgressBar,)
    if settings["enable_checkpointing"] is False or dry:
        unwanted += (ModelCheckpoint,)
    callbacks = [callback for callback in callbacks if not isinstance(callback, unwanted)]
    loggers = []
    if not dry:
        callbacks.insert(0, Record(run_dir.path))  # its cut is what others find when training starts
        loggers = [JsonlLogger(run_dir.metrics), *(build(node) for node in (tree.get("logger") or {}).values() if node)]

    if (root := settings["default_root_dir"]) and not dry:
        _check_root(str(root))
    settings["callbacks"] = callbacks + _as_list(settings["callbacks"])
    if wrong := [callback for callback in settings["callbacks"] if not isinstance(callback, L.Callback)]:
        raise ConfigError(f"{wrong[0]!r} is no callback: callbacks and trainer.callbacks are those of Lightning.")
    settings["logger"] = loggers or False
    settings["default_root_dir"] = settings["default_root_dir"] or str(run_dir.path)
    settings["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in settings["callbacks"])
    known = [*inspect.signature(L.Trainer).parameters]
    if unknown := [name for name in settings if name not in known]:
        name = unknown[0]
        told = meaning(name) or did_you_mean(name, known) + some_keys("trainer", name, known)
        raise no_key(f"trainer.{name}", told)
    try:
        trainer = L.Trainer(**settings)
    except (TypeError, ValueError, AttributeError) as error:  # it checks settings one by one, and names what it refuses
        raise ConfigError(f"trainer: {error}") from error
    check_trainer(trainer, settings["precision"])
    return let_loggers_fail(trainer)


def _check_root(root: str) -> None:
    """Refuse a folder of the Trainer's that cannot be made or written: every sample of the run would be lost there."""
    if "://" in root:  # Lightning writes there by fsspec
        return
    folder = Path(root).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writes = os.access(folder, os.W_OK)
    except OSError:
        writes = False
    if not writes:
        raise StorageError(
            f"trainer.default_root_dir={folder} cannot be written. Leave it out: what a run writes is in run_dir then."
        )


def _check_nodes(tree: dict[str, Any]) -> None:
    """Refuse a callback or a logger without a target."""
    for group in ("callbacks", "logger"):
        for name, node in (tree.get(group) or {}).items():
            if node and not (isinstance(node, dict) and "_target_" in node):
                raise ConfigError(
                    f"{group}.{name}={node!r} builds nothing: it needs a class, {group}.{name}._target_=PACKAGE.CLASS."
                )


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
