"""`trainer.precision: auto`, the default of both command lines; Lightning's Trainer takes names.

It is decided once, for a run that begins: a run that goes on has the precision that its checkpoint was made in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from rich.console import Console

from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.precision import BF16, FLOAT32, BFloat16Weights, made_in, multiplies_bfloat16
from lit_rl.callbacks.checkpoint_files import contents
from lit_rl.cli.schemas import parameters
from lit_rl.models.policy.language_model import LanguageModel

AUTO = "auto"

Asked = dict((p.name, hint) for p, hint in parameters(L.Trainer))["precision"] | Literal["auto"]
"""Values of the key."""


@dataclass(frozen=True)
class Choice:
    """A `trainer.precision`, and the reason for it."""

    precision: str
    why: str

    def say(self) -> None:
        """Print one line on stdout."""
        Console().print(f"precision {self.precision}: {self.why}", soft_wrap=True, markup=False, highlight=False)


def automatic(device: str, units: bool, strategy: type, dtype: str | None) -> Choice:
    """Return bfloat16 weights where the device multiplies it in hardware and small updates are kept; float32
    elsewhere.

    Args:
        device: Type of the device that computes, such as "cuda".
        units: True if it multiplies bfloat16 in hardware.
        strategy: Class of the strategy.
        dtype: `model.dtype` where it was set, which decides; else None.
    """
    if dtype is not None:
        return Choice(FLOAT32, f"model.dtype={dtype} says what the weights are")
    if issubclass(strategy, DeepSpeedStrategy):
        return Choice(FLOAT32, "with DeepSpeed bf16-true would round rewards and advantages too")
    if issubclass(strategy, FSDPStrategy):
        return Choice(FLOAT32, f"{strategy.__name__} keeps no float32 masters of bfloat16 weights")
    if device not in ("cpu", "cuda"):
        return Choice(FLOAT32, f"bf16-true was measured on no device of the type {device}")
    name = {"cpu": "processor", "cuda": "GPU"}[device]
    if not units:
        return Choice(FLOAT32, f"this {name} has no units for bfloat16")
    return Choice(BF16, f"this {name} has units for bfloat16; updates go into float32 masters of the weights")


def for_trainer(settings: Mapping[str, Any], checkpoint: str | None) -> Any:
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


def settle(asked: Any, given: Any, trainer: L.Trainer, module: PolicyModule) -> Choice | None:
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
        return Choice(str(given), "the checkpoint was made in it")
    strategy: Any = trainer.strategy
    plugin = strategy.precision_plugin
    if plugin.precision != FLOAT32 or not type(plugin).__module__.startswith("lightning."):
        return None
    choice = automatic_on(strategy.root_device, type(strategy), module.model)
    if choice.precision == BF16:
        strategy.precision_plugin = BFloat16Weights()
    module.precision_by_device = True
    return choice


def automatic_on(device: torch.device, strategy: type, model: LanguageModel) -> Choice:
    """Return `automatic_precision` for a model on a device of this machine."""
    return automatic(device.type, multiplies_bfloat16(device), strategy, model.dtype if model.dtype_was_set else None)


def precision_of(checkpoint: Path) -> str | None:
    """Return the `trainer.precision` of the run that wrote a checkpoint; None where it cannot be read, as loading will
    report."""
    saved = contents(checkpoint)
    return made_in(saved) if saved else None
