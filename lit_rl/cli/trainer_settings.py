"""Lightning's Trainer from a config: settings, callbacks and loggers, with `precision: auto` and
`accumulate_grad_batches: auto` decided.

Precision is decided once, for a run that begins: a run that resumes has the precision of its checkpoint.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from rich.console import Console

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.master_weights import (
    BF16,
    FLOAT32,
    BFloat16Weights,
    checkpoint_precision,
    multiplies_bfloat16,
)
from lit_rl.callbacks import AtomicCheckpointIO, JsonlLogger, Record, let_loggers_fail
from lit_rl.callbacks.checkpoint_io import read_lazily
from lit_rl.cli.build import build, check_trainer
from lit_rl.cli.fast_checks import check_accumulation
from lit_rl.cli.listing import neighbouring_keys
from lit_rl.cli.schemas import parameters
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.other_names import unknown_key
from lit_rl.models.language_model import LanguageModel
from lit_rl.runs.run_dir import RunDir

# ---------------------------------------------------------------------- the Trainer


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
        raise unknown_key(f"trainer.{name}", "train", known, neighbouring_keys("trainer", name, known))
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


# ---------------------------------------------------------------------- accumulate_grad_batches: auto


Accumulation = int | Literal["auto"]
"""Values of the key."""


def cut_by(module: PolicyModule, accumulate: Any) -> int:
    """Leave `auto` to the module, which knows the memory of a step; return the Trainer's value.

    A module whose `micro_batch_size` is set keeps it.

    Raises:
        ConfigError: it is neither `auto` nor a number of micro-batches.
    """
    check_accumulation(accumulate)
    if accumulate != "auto":
        return accumulate
    if module.micro_batches.size is None:
        module.micro_batches.size = "auto"
    return 1


# ---------------------------------------------------------------------- precision: auto


AUTO = "auto"

Asked = dict((p.name, hint) for p, hint in parameters(L.Trainer))["precision"] | Literal["auto"]
"""Values of the key."""


@dataclass(frozen=True)
class PrecisionChoice:
    """A `trainer.precision`, and the reason for it."""

    precision: str
    why: str

    def say(self) -> None:
        """Print one line on stdout."""
        Console().print(f"precision {self.precision}: {self.why}", soft_wrap=True, markup=False, highlight=False)


def trainer_precision(settings: Mapping[str, Any], checkpoint: str | None) -> Any:
    """Return the Trainer's value: the key's; for `auto` that of the checkpoint to resume from, or None.

    Args:
        settings: Settings of the Trainer. One of its plugins may be a precision, and then it takes no name of one.
        checkpoint: A file; a word of Lightning's for one ("last") is not known yet.
    """
    if settings["precision"] != AUTO:
        return settings["precision"]
    if settings["plugins"] or checkpoint is None or not Path(checkpoint).exists():
        return None
    return precision_of(Path(checkpoint))


def precision_of(checkpoint: Path) -> str | None:
    """Return the `trainer.precision` of the run that wrote a checkpoint; None where it cannot be read, as loading will
    report."""
    saved = read_lazily(checkpoint)
    return checkpoint_precision(saved) if saved else None


def settle_precision(asked: Any, given: Any, trainer: L.Trainer, module: PolicyModule) -> PrecisionChoice | None:
    """Decide `auto`, now that the Trainer knows its device and strategy, and set it in the Trainer and the module.

    Args:
        asked: The key's value.
        given: Result of `trainer_precision`.
        trainer: Was made with `given`.
        module: Refuses a checkpoint that was made in another precision, where that could not be read before.

    Returns:
        The choice; None where there was none to make: a precision was named, or a plugin of the user's decides.
    """
    if asked != AUTO:
        return None
    if given is not None:
        return PrecisionChoice(str(given), "the checkpoint was made in it")
    strategy: Any = trainer.strategy
    plugin = strategy.precision_plugin
    if plugin.precision != FLOAT32 or not type(plugin).__module__.startswith("lightning."):
        return None
    choice = automatic_precision_on(strategy.root_device, type(strategy), module.model)
    if choice.precision == BF16:
        strategy.precision_plugin = BFloat16Weights()
    module.precision_by_device = True
    return choice


def automatic_precision_on(device: torch.device, strategy: type, model: LanguageModel) -> PrecisionChoice:
    """Return `automatic_precision` for a model on a device of this machine."""
    return automatic_precision(
        device.type, multiplies_bfloat16(device), strategy, model.dtype if model.dtype_was_set else None
    )


def automatic_precision(device: str, units: bool, strategy: type, dtype: str | None) -> PrecisionChoice:
    """Return bfloat16 weights where the device multiplies it in hardware and small updates are kept; float32
    elsewhere.

    Args:
        device: Type of the device that computes, such as "cuda".
        units: True if it multiplies bfloat16 in hardware.
        strategy: Class of the strategy.
        dtype: `model.dtype` where it was set, which decides; else None.
    """
    if dtype is not None:
        return PrecisionChoice(FLOAT32, f"model.dtype={dtype} says what the weights are")
    if issubclass(strategy, DeepSpeedStrategy):
        return PrecisionChoice(FLOAT32, "with DeepSpeed bf16-true would round rewards and advantages too")
    if issubclass(strategy, FSDPStrategy):
        return PrecisionChoice(FLOAT32, f"{strategy.__name__} keeps no float32 masters of bfloat16 weights")
    if device not in ("cpu", "cuda"):
        return PrecisionChoice(FLOAT32, f"bf16-true was measured on no device of the type {device}")
    name = {"cpu": "processor", "cuda": "GPU"}[device]
    if not units:
        return PrecisionChoice(FLOAT32, f"this {name} has no units for bfloat16")
    return PrecisionChoice(BF16, f"this {name} has units for bfloat16; updates go into float32 masters of the weights")
