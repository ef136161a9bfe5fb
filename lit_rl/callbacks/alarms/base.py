"""The base of alarms: look at the metrics, count consecutive problems, ring, and do what the user chose."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_rl.callbacks.alarms.going_back import GoodCheckpoint, can_go_back
from lit_rl.callbacks.alarms.silent import WhatIsLogged, kind_of, sentence
from lit_rl.callbacks.file_names import ALARMS
from lit_rl.errors import ConfigError, in_range

Then = Literal["warn", "stop", "roll_back"]


class Alarm(L.Callback, ABC):
    """The base of alarms, which ring once after `patience` consecutive problems, until there is none.

    A subclass defines the problem, in `problem`. The metrics of each rollout are looked at once, or those of a line of
    the log where a method learns from a data set; on every rank, as they are reduced over all ranks.

    Args:
        then: Action when it rings. "warn" reports it, and the run goes on. "stop" ends the run after this optimizer
            step, as `EarlyStopping` does. "roll_back" restores the weights, the optimizer's moments and the controllers
            of the last checkpoint that was saved without a problem, and goes on with the next data; the step count and
            the learning-rate schedule are not set back.
        patience: Consecutive looks with a problem before it rings, at least 1.
        roll_backs: Most roll-backs, after which the run stops, at least 1.
    """

    key = ""
    """The name in a config: `callbacks.<key>`."""

    watched: tuple[str, ...] = ()
    """The metrics that it reads."""

    essential: tuple[str, ...] = ()
    """The metrics among these that it needs; where none is named, any one suffices."""

    named_by: Mapping[str, str] = {}
    """Settings by the metric that they name."""

    advice = ""
    """Advice for the user, in a sentence."""

    def __init__(self, then: Then = "warn", patience: int = 5, roll_backs: int = 2) -> None:
        if then not in get_args(Then):
            raise ConfigError(f"callbacks.{self.key}.then={then!r} is none of {', '.join(get_args(Then))}.")
        in_range(f"callbacks.{self.key}.patience", patience, low=1)
        in_range(f"callbacks.{self.key}.roll_backs", roll_backs, low=1)
        self.then: Then = then
        self.patience, self.roll_backs = patience, roll_backs
        self.in_a_row = 0
        self.rolled_back = 0
        self.stopped_at: int | None = None
        """The optimizer step at which it ended the run; None if it did not."""
        self._seen: dict[str, Any] = {}
        self._good = GoodCheckpoint(self.key)
        self._logged = WhatIsLogged()

    @property
    def state_key(self) -> str:
        return f"alarm_{self.key}"

    @abstractmethod
    def problem(self, metrics: Mapping[str, float]) -> str | None:
        """Return the problem, as the beginning of a sentence; None without one.

        Args:
            metrics: The metrics of `watched` that are logged and finite.
        """

    def memory(self) -> dict[str, Any]:
        """Return the state of `problem` from earlier looks, lists and numbers, for a checkpoint."""
        return {}

    def remember(self, saved: dict[str, Any]) -> None:
        """Restore the state that `memory` returned."""

    # ------------------------------------------------------------------ the clock

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and self.then == "roll_back":
            can_go_back(self.key, trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stopped_at = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.then == "roll_back":
            self._good.keep(trainer, quiet=self.in_a_row == 0)
        told = {name: value for name, value in trainer.callback_metrics.items() if name in self.watched}
        # Tensors are compared by identity: a new line of the log has new ones, of equal value or not.
        new = {name for name, value in told.items() if self._seen.get(name) is not value}
        self._seen = told
        numbers = {name: float(value) for name, value in told.items()} if new else {}
        if self.notice(new, numbers):
            self._look(trainer, pl_module, {name: value for name, value in numbers.items() if math.isfinite(value)})
        self._say_who_is_silent(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.should_stop:  # a stopped run may not have reached its first validation
            self._say_who_is_silent(trainer, ended=True)

    def notice(self, new: set[str], metrics: Mapping[str, float]) -> bool:
        """Take in new metrics, and tell whether to look now.

        Args:
            new: Metrics that were logged since the last call.
            metrics: The metrics of `watched` that are logged.
        """
        return bool(new)

    def _say_who_is_silent(self, trainer: L.Trainer, *, ended: bool = False) -> None:
        """Report alarms that cannot ring, in one line for all, printed by the first."""
        alarms = [each for each in trainer.callbacks if isinstance(each, Alarm)]  # pyright: ignore
        if self is not alarms[0] or not (known := self._logged.now_known(trainer, ended=ended)):
            return
        logged, said = trainer.callback_metrics, []
        for each in alarms:
            if missing := [name for name in each.missing(logged) if kind_of(name) in known]:
                then = "" if each.then == "warn" else f", then={each.then}"
                said.append(sentence(each.key, missing, each.named_by, logged) + then)
        if said:
            rank_zero_info(
                f"Alarms that cannot ring, as this run does not log what they watch: {'; '.join(said)}. "
                "callbacks.<name>=null leaves one out."
            )

    def missing(self, logged: Collection[str]) -> list[str]:
        """Return the metrics whose absence keeps it from ringing, for a run that logs these; empty where it may
        ring."""
        if found := [name for name in self.essential if name not in logged]:
            return found
        return [] if any(name in logged for name in self.watched) else list(self.watched)

    def _look(self, trainer: L.Trainer, pl_module: Any, metrics: Mapping[str, float]) -> None:
        found = self.problem(metrics)
        self.in_a_row = 0 if found is None else self.in_a_row + 1
        if found is not None and self.in_a_row == self.patience:
            self._ring(trainer, pl_module, found)

    def _ring(self, trainer: L.Trainer, pl_module: Any, found: str) -> None:
        often = "" if self.patience == 1 else f", {self.patience} times in a row"
        done = self._act(trainer, pl_module)
        said = f"Alarm {self.key} at optimizer step {trainer.global_step}: {found}{often}. {done}{self.advice}"
        rank_zero_info(said)  # a warning would show a path and a line of code
        self._write(trainer, said)

    def _act(self, trainer: L.Trainer, pl_module: Any) -> str:
        """Do what the user chose, and return a sentence about it."""
        if self.then == "warn":
            return ""
        if self.then == "roll_back" and self.rolled_back < self.roll_backs:
            back = self._good.go_back(trainer, pl_module)
            if back is not None:
                self.rolled_back += 1
                self.in_a_row = 0
                return f"The run goes on with the weights of optimizer step {back}, and with the data that come next. "
        trainer.should_stop, self.stopped_at = True, trainer.global_step
        if self.then == "stop":
            return "The run ends here. "
        why = "went back as often as it may" if self.rolled_back else "has no checkpoint from before that"
        return f"The run {why}, and ends here. "

    @rank_zero_only
    def _write(self, trainer: L.Trainer, said: str) -> None:
        if trainer.fast_dev_run:  # pyright: ignore
            return
        row = {"step": trainer.global_step, "alarm": self.key, "then": self.then, "message": said}
        try:
            with (Path(trainer.default_root_dir) / ALARMS).open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # it was printed; a full disk ends no run
            rank_zero_warn(f"{ALARMS} could not be written: {error}.")

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "rolled_back": self.rolled_back, "memory": self.memory()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row, self.rolled_back = state_dict["in_a_row"], state_dict["rolled_back"]
        self.remember(state_dict["memory"])
