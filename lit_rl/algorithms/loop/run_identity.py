"""The identity of a run: what its checkpoints note of model, settings and optimizer, and what a resume compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_rl.algorithms.optim import resumed_optimizer
from lit_rl.algorithms.rollouts import checkpoints, identity
from lit_rl.models.language_model import LanguageModel

CONFIG_GROUPS = {
    **{name: name for name in ("reward", "sampling", "generator", "env", "judge", "reference", "scheduler")},
    "evaluation": "eval",
}
"""Arguments that are config groups of their own; all others are settings of `algo`."""
_MODEL_SETTINGS = (
    *(
        "dtype",
        "attn_implementation",
        "freeze",
        "disable_dropout",
        "lm_head_fp32",
        "use_liger_kernel",
        "compile",
        "quantization",
    ),
    *("init_kwargs", "eos_token", "pad_token"),
)
_TRAINER_SETTINGS = (
    *("max_steps", "max_epochs", "precision", "gradient_clip_val", "gradient_clip_algorithm", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
)

_PLAIN_MODEL_STRINGS = ("dtype", "attn_implementation", "quantization")
"""Strings that are no secrets, and are recorded in plain text."""


def _plain_string(value: Any) -> Any:
    return identity.Word(value) if isinstance(value, str) else value


def run_settings(
    algorithm: type, arguments: Mapping[str, Any], model: LanguageModel, trainer: Any = None
) -> identity.Record:
    """Return the settings that change what a run learns or logs, without the optimizer's.

    Args:
        algorithm: The class of the method.
        arguments: The arguments of its constructor, by name.
        model: The description of the policy.
        trainer: The Trainer; None without one.
    """
    held = {name: getattr(model, name) for name in _MODEL_SETTINGS}
    given: dict[str, Any] = {"model": held | {name: _plain_string(held[name]) for name in _PLAIN_MODEL_STRINGS}}
    given["model"]["chat_template"] = getattr(model.tokenizer, "chat_template", None)
    given["model"]["lora.dropout"] = getattr(model.lora, "dropout", None)
    given["algo"] = algorithm
    for name, value in identity.with_choices(algorithm, arguments).items():
        if name in CONFIG_GROUPS:
            given[CONFIG_GROUPS[name]] = value
        elif name not in ("optimizer", "micro_batch_size"):
            given[f"algo.{name}"] = value
    if trainer is not None:
        given["trainer"] = {name: _plain_string(getattr(trainer, name)) for name in _TRAINER_SETTINGS}
        for callback in trainer.callbacks:
            name = getattr(callback, "choice", "") or getattr(callback, "key", "") or type(callback).__name__
            given[f"callbacks.{name}"] = identity.numbers_of(callback)
        given["trainer"]["strategy"] = _plain_string(type(trainer.strategy).__name__)
        given["trainer"]["accelerator"] = _plain_string(trainer.strategy.root_device.type)
    return identity.settings_record(given)


class _Resumed(NamedTuple):
    """A checkpoint's record of the run that wrote it."""

    optimizer: dict[str, Any] | None
    """`resumed_optimizer.initial_settings` of its optimizer; None in a checkpoint without one."""
    changes: list[str]
    """Descriptions of settings that differ from this run's."""


class RunIdentity:
    """The identity of a run: its base weights, its settings and its optimizer, as they were when it began."""

    def __init__(self) -> None:
        self.model: identity.Record = {}
        """`identity.model_record` of the base weights; empty until the policy is loaded."""
        self.settings: identity.Record = {}
        """`run_settings` at the start of the fit: files of functions may be edited while it runs. Empty before."""
        self.optimizer: identity.Record = {}
        """`resumed_optimizer.initial_settings` of the new optimizer; empty until it is made."""
        self._resumed: _Resumed | None = None

    def record(self, settings: identity.Record) -> dict[str, identity.Record]:
        """Return a checkpoint's record of the run, with its `settings`; outside a fit they are those of now."""
        found = {"model": self.model, "settings": settings}
        return found | ({"optimizer": self.optimizer} if self.optimizer else {})

    def compare(self, checkpoint: Mapping[str, Any], algorithm: str, *, resumes: bool, allow_changed: bool) -> None:
        """Refuse weights of another model, and an optimizer that cannot read the state; note other changes.

        Args:
            checkpoint: The checkpoint.
            algorithm: The class that reads it, for messages.
            resumes: Whether a fit goes on from it; otherwise its weights are read alone.
            allow_changed: `model.allow_changed`.

        Raises:
            StorageError: names the difference.
        """
        if not resumes and "run" not in checkpoint:
            return  # weights alone
        noted, changes = checkpoints.saved_by_algorithm(checkpoint, algorithm)["run"], []
        if self.model:
            beside = () if resumes else ("reference weights",)
            now = {name: value for name, value in self.model.items() if name not in beside}
            changes += identity.check_model(noted["model"], now, allowed=allow_changed)
        if resumes:
            changes += identity.differences(noted["settings"], self.settings)
            self._resumed = _Resumed(noted.get("optimizer"), changes)
            self._optimizer_changes()

    def note_optimizer(self, optimizer: Optimizer, schedule: LRScheduler) -> None:
        """Note a new optimizer.

        Raises:
            StorageError: it cannot read the state of the checkpoint that the run is resumed from.
        """
        self.optimizer = resumed_optimizer.initial_settings(optimizer, schedule)
        self._optimizer_changes()

    def _optimizer_changes(self) -> list[str]:
        """Refuse an optimizer that cannot read the checkpoint's state. Waits until both are known, in either order."""
        if self._resumed is None or not self.optimizer:
            return []
        return resumed_optimizer.check_optimizer_state(self._resumed.optimizer, self.optimizer)

    @property
    def is_resumed(self) -> bool:
        """True from a checkpoint's comparison until `apply_settings`."""
        return self._resumed is not None

    def apply_settings(
        self, optimizer: Optimizer, schedule: LRScheduler, make: Callable[[Optimizer], LRScheduler], *, step: int
    ) -> LRScheduler:
        """Continue with the optimizer's settings of this run, and report the differences from the checkpoint's run.

        Args:
            optimizer: The restored optimizer.
            schedule: The restored schedule.
            make: Function that makes this run's schedule anew.
            step: Optimizer steps of the checkpoint.

        Returns:
            The schedule to use.
        """
        resumed = self._resumed
        assert resumed is not None, "there is no checkpoint to go on from"
        schedule = resumed_optimizer.apply_settings(optimizer, schedule, resumed.optimizer, self.optimizer, make)
        if changes := [*self._optimizer_changes(), *resumed.changes]:
            rank_zero_info(
                f"Going on from step {step} with what the checkpoint's run had otherwise: {', '.join(changes)}."
            )
        self._resumed = None
        return schedule
