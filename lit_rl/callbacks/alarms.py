"""Alarms: warn of, stop, or roll back a run whose metrics go wrong slowly, while it can still be mended.

`Alarm` looks at the metrics, counts consecutive problems, rings, and does what the user chose (`then`); its subclasses
say what a problem is. Each limit is a rule of thumb, and a key of the config. A roll-back is PaLM's (2204.02311,
section 5.1): weights and optimizer of an earlier checkpoint, and data that come later, as the same data would lead to
the same place. Alarms whose metrics the run does not log are reported once.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_rl.callbacks.output_files import ALARMS
from lit_rl.core import upstream
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, StorageError, nearest
from lit_rl.ops.ranges import AboveOne, AtLeastOne, Fraction, Positive, Share

# ---------------------------------------------------------------------- roll-backs


BEFORE_ALARM_FOLDER = "before_alarm"
"""The folder of kept checkpoints, in the folder of checkpoints."""


class GoodCheckpoint:
    """A hard link to the newest checkpoint that was saved without a problem; it stays when that one is replaced.

    Args:
        key: Name of the alarm and of the file.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._newest = ""

    def keep(self, trainer: L.Trainer, *, quiet: bool) -> None:
        """Link the checkpoint that was saved since the last call, if there was no problem (`quiet`)."""
        newest = upstream.last_saved(trainer.checkpoint_callback)
        if newest in ("", self._newest):
            return
        self._newest = newest
        if not quiet or not trainer.is_global_zero or not Path(newest).is_file():
            return
        target = Path(newest).parent / BEFORE_ALARM_FOLDER / f"{self.key}.ckpt"
        try:
            target.parent.mkdir(exist_ok=True)
            partial = target.with_suffix(".new")
            partial.unlink(missing_ok=True)
            os.link(newest, partial)
            os.replace(partial, target)
        except OSError as error:
            rank_zero_warn(
                f"The checkpoint that callbacks.{self.key} would roll back to could not be kept ({error}): a roll-back "
                "takes an earlier one, or stops the run."
            )

    def go_back(self, trainer: L.Trainer, module: Any) -> int | None:
        """Restore the kept checkpoint; return its optimizer step, or None where there is no checkpoint.

        A collective, called between two rollouts.
        """
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        path = Path(folder or ".") / BEFORE_ALARM_FOLDER / f"{self.key}.ckpt"
        if not trainer.strategy.broadcast(path.is_file()):
            return None
        try:
            checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
        except StorageError as error:
            rank_zero_warn(str(error))
            return None
        if checkpoint["global_step"] >= trainer.global_step:
            return None  # from an earlier attempt at this run, which was resumed from an older checkpoint
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        module.roll_back_to(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        for optimizer, before in zip(trainer.optimizers, rates):
            for group, rate in zip(optimizer.param_groups, before):
                group["lr"] = rate  # the schedule goes on
        return int(checkpoint["global_step"])


# ---------------------------------------------------------------------- metrics that are not logged


_LINES = 3
"""Lines of the training's log after which no new metrics are expected."""


class LoggedNames:
    """A detector of when all metrics of the training, and of the validation where there is one, have been logged."""

    def __init__(self) -> None:
        self._lines, self._newest = 0, None
        self._open = {"train", "val"}

    def now_known(self, trainer: L.Trainer, *, ended: bool = False) -> set[str]:
        """Return `train`, `val` or both, once all their names are known, each once.

        Called after an optimizer step, or at the end of the training.
        """
        logged = trainer.callback_metrics if self._open else {}
        newest: Any = next((value for name, value in logged.items() if metric_stage(name) == "train"), None)
        if newest is not self._newest:
            self._lines, self._newest = self._lines + 1, newest
        if self._lines < _LINES and not ended:
            return set()
        validated = ended or not trainer.enable_validation or any(metric_stage(name) == "val" for name in logged)
        found = self._open & ({"train", "val"} if validated else {"train"})
        self._open -= found
        return found


def metric_stage(name: str) -> str:
    """Return the stage of a metric: `val`, or `train` for everything else."""
    return "val" if name.startswith("val") else "train"


# ---------------------------------------------------------------------- the base


Then = Literal["warn", "stop", "roll_back"]


@checked("callbacks.{key}")
class Alarm(L.Callback, ABC):
    """The base of alarms, which ring once after `patience` consecutive problems, until there is none.

    A subclass defines the problem, in `problem`. The metrics of each rollout are looked at once, or those of a line of
    the log where a method learns from a data set; on every rank, as they are reduced over all ranks.

    Args:
        then: Action when it rings. "warn" reports it. "stop" ends the run after this optimizer step. "roll_back" goes
            back to the last checkpoint without a problem (weights, optimizer's moments, controllers) and on with the
            next data; step count and learning-rate schedule are not set back.
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

    def __init__(self, then: Then = "warn", patience: AtLeastOne = 5, roll_backs: AtLeastOne = 2) -> None:
        self.then: Then = then
        self.patience, self.roll_backs = patience, roll_backs
        self.in_a_row = 0
        self.rolled_back = 0
        self.stopped_at: int | None = None
        """The optimizer step at which it ended the run; None if it did not."""
        self._seen: dict[str, Any] = {}
        self._good = GoodCheckpoint(self.key)
        self._logged = LoggedNames()

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
        """Refuse a run that could not be rolled back, where the alarm would do that.

        Raises:
            ConfigError: the strategy spreads weights, nothing is saved, or completions are drawn ahead.
        """
        if stage != "fit" or self.then != "roll_back":
            return
        setting = f"callbacks.{self.key}.then=roll_back"
        instead = f"Set callbacks.{self.key}.then=stop, and go on by hand from the checkpoint that you want."
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            name = type(trainer.strategy).__name__
            raise ConfigError(
                f"{setting} works with strategy=auto and strategy=ddp only, and this run uses {name}. {instead}"
            )
        if getattr(getattr(pl_module, "generator", None), "lag", 0):
            raise ConfigError(
                f"{setting} does not work with completions that are generated ahead: set generator.lag=0. Or: {instead}"
            )
        if trainer.checkpoint_callback is None and not trainer.fast_dev_run:  # pyright: ignore
            raise ConfigError(f"{setting} needs checkpoints, and this run saves none: remove callbacks=none. {instead}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stopped_at = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.then == "roll_back":
            self._good.keep(trainer, quiet=self.in_a_row == 0)
        logged = {name: value for name, value in trainer.callback_metrics.items() if name in self.watched}
        # Tensors are compared by identity: a new line of the log has new ones, of equal value or not.
        new = {name for name, value in logged.items() if self._seen.get(name) is not value}
        self._seen = logged
        numbers = {name: float(value) for name, value in logged.items()} if new else {}
        if self.notice(new, numbers):
            self._look(trainer, pl_module, {name: value for name, value in numbers.items() if math.isfinite(value)})
        self._report_silent_alarms(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.should_stop:  # a stopped run may not have reached its first validation
            self._report_silent_alarms(trainer, ended=True)

    def notice(self, new: set[str], metrics: Mapping[str, float]) -> bool:
        """Take in new metrics, and tell whether to look now.

        Args:
            new: Metrics that were logged since the last call.
            metrics: The metrics of `watched` that are logged.
        """
        return bool(new)

    def _report_silent_alarms(self, trainer: L.Trainer, *, ended: bool = False) -> None:
        """Report alarms that cannot ring, in one line for all, printed by the first; with similar names that are
        logged, and the key that names the metric."""
        alarms = [each for each in trainer.callbacks if isinstance(each, Alarm)]  # pyright: ignore
        if self is not alarms[0] or not (known := self._logged.now_known(trainer, ended=ended)):
            return
        logged, silent = trainer.callback_metrics, []
        for each in alarms:
            missing = []
            for name in (name for name in each.missing(logged) if metric_stage(name) in known):
                prefix, setting = name[: name.find("/") + 1], each.named_by.get(name)
                candidates = (other.removeprefix(prefix) for other in logged if other.startswith(prefix))
                near = nearest(name.removeprefix(prefix), candidates)  # a common prefix makes no two names alike
                hint = "" if near is None else f", did you mean {prefix}{near}?"
                missing.append(f"{name}{hint}" + (f" Set callbacks.{each.key}.{setting}" if hint and setting else ""))
            if missing:
                then = "" if each.then == "warn" else f", then={each.then}"
                silent.append(f"{each.key} ({'; '.join(missing)}){then}")
        if silent:
            rank_zero_info(
                f"Alarms that cannot ring, as this run does not log what they watch: {'; '.join(silent)}. "
                "callbacks.<name>=null leaves one out."
            )

    def missing(self, logged: Collection[str]) -> list[str]:
        """Return the missing metrics that keep it from ringing, in a run that logs these; none where it may ring."""
        if found := [name for name in self.essential if name not in logged]:
            return found
        return [] if any(name in logged for name in self.watched) else list(self.watched)

    def _look(self, trainer: L.Trainer, pl_module: Any, metrics: Mapping[str, float]) -> None:
        found = self.problem(metrics)
        self.in_a_row = 0 if found is None else self.in_a_row + 1
        if found is None or self.in_a_row != self.patience:
            return
        often = "" if self.patience == 1 else f", {self.patience} times in a row"
        done = self._act(trainer, pl_module)
        message = f"Alarm {self.key} at optimizer step {trainer.global_step}: {found}{often}. {done}{self.advice}"
        rank_zero_info(message)  # a warning would show a path and a line of code
        self._write(trainer, message)

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
        if self.rolled_back >= self.roll_backs:
            return f"The run was rolled back as often as allowed (roll_backs={self.roll_backs}), and ends here. "
        return "The run has no checkpoint from before that, and ends here. "

    @rank_zero_only
    def _write(self, trainer: L.Trainer, message: str) -> None:
        if trainer.fast_dev_run:  # pyright: ignore
            return
        row = {"step": trainer.global_step, "alarm": self.key, "then": self.then, "message": message}
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


# ---------------------------------------------------------------------- the alarms


@checked("callbacks.{key}")
class _DriftAlarm(Alarm):
    """An alarm that compares a metric with its mean over the first looks of the run."""

    def __init__(self, then: Then, patience: AtLeastOne, roll_backs: AtLeastOne, first: AtLeastOne) -> None:
        super().__init__(then, patience, roll_backs)
        self.first = first
        self._began: list[float] = []

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        value = metrics.get(self.watched[0])
        if value is None:
            return None
        if len(self._began) < self.first:
            self._began.append(value)
            return None
        return self.drifted(value, sum(self._began) / len(self._began))

    @abstractmethod
    def drifted(self, value: float, before: float) -> str | None:
        """Return the problem with a value, given the mean of the first ones."""

    def memory(self) -> dict[str, Any]:
        return {"began": list(self._began)}

    def remember(self, saved: dict[str, Any]) -> None:
        self._began = list(saved["began"])


@checked("callbacks.{key}")
class EntropyCollapse(_DriftAlarm):
    """An alarm for a policy that hardly explores: `train/entropy` is a small share of its initial mean.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        share: Share of the initial mean below which there is a problem, in (0, 1).
        first: Looks in the initial mean, at least 1.
    """

    key = "entropy_collapse"
    watched = ("train/entropy",)
    advice = (
        "Completions of a prompt become alike, and there is less and less to learn from: lower optimizer.lr, add "
        "algo/entropy, or raise sampling.temperature. Where the reward is as high as it can be, the run is done."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: AtLeastOne = 5,
        roll_backs: AtLeastOne = 2,
        share: Fraction = 0.1,
        first: AtLeastOne = 5,
    ) -> None:
        super().__init__(then, patience, roll_backs, first)
        self.share = share

    def drifted(self, value: float, before: float) -> str | None:
        if value >= self.share * before:
            return None
        return f"train/entropy is {value:.3g} nats, below {self.share:g} of the {before:.3g} that the run began with"


@checked("callbacks.{key}")
class LengthDrift(_DriftAlarm):
    """An alarm for completions that became several times as long or as short: often a way to game the reward.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        factor: Ratio to the initial mean, or its inverse, beyond which there is a problem, above 1.
        first: Looks in the initial mean, at least 1.
    """

    key = "length_drift"
    watched = ("train/completions/mean_length",)
    advice = (
        "Read what the policy writes (samples/): reasoning may grow for good reason. If not, look at how reward and "
        "loss treat length (reward=soft_overlong, algo/reduction)."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: AtLeastOne = 5,
        roll_backs: AtLeastOne = 2,
        factor: AboveOne = 4.0,
        first: AtLeastOne = 5,
    ) -> None:
        super().__init__(then, patience, roll_backs, first)
        self.factor = factor

    def drifted(self, value: float, before: float) -> str | None:
        if before / self.factor <= value <= before * self.factor:
            return None
        return f"completions have {value:.4g} tokens on average, and the run began with {before:.4g}"


@checked("callbacks.{key}")
class RepetitionDrift(_DriftAlarm):
    """An alarm for completions that repeat themselves more than at the start.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        rise: Rise of `train/completions/repetition` above the initial mean, in (0, 1).
        first: Looks in the initial mean, at least 1.
    """

    key = "repetition_drift"
    watched = ("train/completions/repetition",)
    advice = (
        "Read what the policy writes (samples/), and what the reward gives for it; reward=repetition takes from it."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: AtLeastOne = 5,
        roll_backs: AtLeastOne = 2,
        rise: Fraction = 0.2,
        first: AtLeastOne = 5,
    ) -> None:
        super().__init__(then, patience, roll_backs, first)
        self.rise = rise

    def drifted(self, value: float, before: float) -> str | None:
        if value <= before + self.rise:
            return None
        return f"{value:.0%} of a completion's 4-grams stood in it before, and the run began with {before:.0%}"


@checked("callbacks.{key}")
class DeadGroups(Alarm):
    """An alarm for groups of equal rewards, from which nothing is learned.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        most: Share of completions in such groups, in (0, 1], from which on there is a problem.
    """

    key = "dead_groups"
    watched = ("train/frac_reward_zero_std", "train/reward")
    essential = ("train/frac_reward_zero_std",)
    advice = (
        "Where the reward is high, the prompts are too easy by now, or the run is done; where it is low, too hard. "
        "algo/groups=dynamic draws others in their place."
    )

    def __init__(
        self, then: Then = "warn", patience: AtLeastOne = 10, roll_backs: AtLeastOne = 2, most: Share = 0.95
    ) -> None:
        super().__init__(then, patience, roll_backs)
        self.most = most

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        share = metrics.get("train/frac_reward_zero_std", 0.0)
        if share < self.most:
            return None
        reward = f", and the mean reward is {metrics['train/reward']:.3g}" if "train/reward" in metrics else ""
        return f"{share:.0%} of the completions are in groups of equal rewards{reward}"


@checked("callbacks.{key}")
class KLBlowUp(Alarm):
    """An alarm for a policy far from the reference, or that moves far within one rollout.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        most: KL to the reference (`train/kl`), in nats a token, above which there is a problem; above 0.
        most_in_rollout: The same for the KL to the sampling policy (`train/approx_kl`); above 0.
    """

    key = "kl_blow_up"
    watched = ("train/kl", "train/approx_kl")
    advice = "Lower optimizer.lr, raise algo.beta, or take fewer algo.minibatches and algo.iterations."

    def __init__(
        self,
        then: Then = "warn",
        patience: AtLeastOne = 3,
        roll_backs: AtLeastOne = 2,
        most: Positive = 1.0,
        most_in_rollout: Positive = 0.2,
    ) -> None:
        super().__init__(then, patience, roll_backs)
        self.limits = {"train/kl": most, "train/approx_kl": most_in_rollout}

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        above = [
            f"{name} is {metrics[name]:.3g} nats a token, above {limit:g}"
            for name, limit in self.limits.items()
            if metrics.get(name, 0.0) > limit
        ]
        return " and ".join(above) or None


@checked("callbacks.{key}")
class ClippedShare(Alarm):
    """An alarm for many completions cut by the length limit, or many tokens clipped by the loss.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        most_completions: Share of completions cut by `sampling.max_new_tokens`, in (0, 1], above which there is a
            problem.
        most_tokens: The same for the share of tokens that the loss clips, in (0, 1].
    """

    key = "clipped_share"
    watched = ("train/completions/clipped_ratio", "train/clip_ratio/region_mean")
    advice = (
        "Completions that are cut were not finished: raise sampling.max_new_tokens, or see whether they end at all. "
        "Tokens that are clipped teach nothing: lower optimizer.lr, or take fewer updates of a rollout."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: AtLeastOne = 5,
        roll_backs: AtLeastOne = 2,
        most_completions: Share = 0.5,
        most_tokens: Share = 0.3,
    ) -> None:
        super().__init__(then, patience, roll_backs)
        self.most_completions, self.most_tokens = most_completions, most_tokens

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        cut = metrics.get("train/completions/clipped_ratio", 0.0)
        clipped = metrics.get("train/clip_ratio/region_mean", 0.0)
        found = [f"{cut:.0%} of the completions are cut by the length limit"] if cut > self.most_completions else []
        found += [f"the loss clips {clipped:.0%} of the tokens"] if clipped > self.most_tokens else []
        return " and ".join(found) or None


@checked("callbacks.{key}")
class HeldOutFlat(Alarm):
    """An alarm for a training reward that rises while a held-out one does not.

    The policy then games the reward, or has memorised the prompts. At each validation the mean of `proxy` since the
    last one is compared with that of `window` validations earlier, and so is `held_out`.

    Args:
        then: See `Alarm`.
        patience: Consecutive validations with a problem before it rings, at least 1.
        roll_backs: See `Alarm`.
        proxy: The metric that is optimised.
        held_out: The metric that should rise with it, of other prompts or of another reward.
        rise: Least rise of `proxy`, in its own units, above 0.
        window: Validations to look back, at least 1.
    """

    key = "held_out_flat"
    advice = (
        "Read what the policy writes (samples/): it may have found a way to please the reward. Else there are too few "
        "prompts, or too many epochs of them."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: AtLeastOne = 2,
        roll_backs: AtLeastOne = 2,
        proxy: str = "train/reward",
        held_out: str = "val/reward",
        rise: Positive = 0.1,
        window: AtLeastOne = 3,
    ) -> None:
        super().__init__(then, patience, roll_backs)
        self.proxy, self.held_out, self.rise, self.window = proxy, held_out, rise, window
        self.watched = self.essential = (proxy, held_out)
        self.named_by = {proxy: "proxy", held_out: "held_out"}
        self._validated: float | None = None
        self._since: list[float] = []
        self._pairs: list[tuple[float, float]] = []

    def notice(self, new: set[str], metrics: Mapping[str, float]) -> bool:
        """Look at the end of the rollout after a validation: in the middle of one a run cannot be rolled back."""
        if self.held_out in new:
            self._validated = metrics[self.held_out]
        if self.proxy in new and math.isfinite(metrics[self.proxy]):
            self._since.append(metrics[self.proxy])
        return self.proxy in new and self._validated is not None

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        since, held_out = self._since, self._validated
        self._since, self._validated = [], None
        if not since or held_out is None or not math.isfinite(held_out):
            return None
        self._pairs = [*self._pairs, (sum(since) / len(since), held_out)][-self.window - 1 :]
        (proxy_then, held_then), (proxy_now, held_now) = self._pairs[0], self._pairs[-1]
        full = len(self._pairs) == self.window + 1
        if not full or proxy_now - proxy_then < self.rise or held_now > held_then:
            return None
        return (
            f"over {self.window} validations {self.proxy} has risen from {proxy_then:.3g} to {proxy_now:.3g}, and "
            f"{self.held_out} has not: {held_then:.3g} then, {held_now:.3g} now"
        )

    def memory(self) -> dict[str, Any]:
        return {"validated": self._validated, "since": list(self._since), "pairs": [list(pair) for pair in self._pairs]}

    def remember(self, saved: dict[str, Any]) -> None:
        self._validated, self._since = saved["validated"], list(saved["since"])
        self._pairs = [(proxy, held_out) for proxy, held_out in saved["pairs"]]
