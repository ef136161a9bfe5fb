"""Callbacks that export policies as Hugging Face folders: at a step, as a moving average, or merged with the start.

`Export` writes the policy while the run goes on. `EMAWeights`, `BEMAWeights` and `MergedWeights` keep float32 tensors
beside the trained weights (`AveragedWeights`), and export at the end.

Lightning's `EMAWeightAveraging` does not fit: it copies the whole module, frozen base and reference included, and puts
it into every checkpoint; its average cannot be restored from a checkpoint of trained tensors only, as those of adapter
runs are; and it leaves the average in the policy, so that a run could not be resumed from its last checkpoint.
"""

from __future__ import annotations

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.algorithms.optim.strategies import FSDPTPStrategy
from lit_rl.callbacks.graceful_stop import GracefulStop
from lit_rl.callbacks.hub_samples import HubPushes, check_repository
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.core import machine
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.models.model_card import ModelName
from lit_rl.models.sharding import full_state_dict, laid_out_like, local_shard, stored_parameters
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, NotNegative, Portion, Positive, Range


class _Sent(NamedTuple):
    """An export on its way to the hub."""

    folder: Path
    message: str


@checked("callbacks.export")
class Export(L.Callback):
    """Exports of the policy during the training, as the end of a run writes `hf/`: for transformers and vLLM, verified.
    They may be sent to the Hugging Face hub, so that a machine that is taken away leaves them there.

    An export that cannot be written is warned of, and the run goes on (`unwritten`).

    Rank 0 sends beside the training, one folder at a time; if several are due, the newest. The branch `main` holds the
    best one with `best`, and then the newest is on the branch `newest`; else `main` holds the newest, at the end that
    of the last step. A push that fails is warned of, and the run goes on: the next export is sent in its place, and at
    the end a failed one is tried once more. The end waits for it, `wait` seconds at most; a run that a signal ends does
    not wait. The hub's client takes `HF_TOKEN`.

    Args:
        folder: The folder of the exports, one subfolder each: `step_00000100`, `best_00000100`.
        every: Optimizer steps between two of them, at least 1. null writes none.
        best: Export after each validation whose `callbacks.checkpoint.monitor`, a metric of validation, is better than
            before, by `callbacks.checkpoint.mode`. Only the best one is kept.
        push_to_hub: The model on the hub, `user/name`, created if missing. null sends nothing.
        private: Whether a newly created model is private.
        wait: Seconds that the end of the training waits for what is not sent yet, above 0.

    Raises:
        ConfigError: `every` is below 1, `push_to_hub` is no name on the hub, or there is nothing to send.
    """

    def __init__(
        self,
        folder: str,
        every: AtLeastOne | None = None,
        best: bool = False,
        push_to_hub: str | None = None,
        private: bool = True,
        wait: Positive = 120.0,
    ) -> None:
        if push_to_hub is not None:
            check_repository("callbacks.export.push_to_hub", push_to_hub)
            if every is None and not best:
                raise ConfigError(
                    f"callbacks.export.push_to_hub={push_to_hub} would send nothing: set callbacks.export.every=100 "
                    "(optimizer steps), callbacks.export.best=true, or both. After a run it is `lit-rl export "
                    "export.push_to_hub=`."
                )
        self.folder, self.every, self.best = Path(folder), every, best
        self.push_to_hub, self.private, self.wait = push_to_hub, private, wait
        self.unwritten = WriteFailures("Export")
        self._pushes = HubPushes(f"sending weights to {push_to_hub}", self.unwritten)
        self._due: dict[str, _Sent] = {}
        """Exports to send, by branch."""
        self._failed: dict[str, _Sent] = {}
        """Exports that the hub did not take, by branch; none where a newer one is due."""
        self._step, self._exported = 0, -1
        self._best: float | None = None
        self._best_folder: Path | None = None
        self._left: list[Path] = []
        """Former best ones, to be removed when none is being sent."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        monitor = getattr(trainer.checkpoint_callback, "monitor", None)
        if stage == "fit" and self.best and monitor in (None, "step", "epoch"):
            raise ConfigError(
                f"callbacks.export.best=true with callbacks.checkpoint.monitor={monitor or 'null'}, which is no metric "
                "of validation. Set callbacks.checkpoint.monitor=val/reward callbacks.checkpoint.mode=max, or another "
                "metric."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped, self._step = trainer.global_step > self._step, trainer.global_step
        due = self.every is not None and stepped and self._step % self.every == 0
        if due and not trainer.fast_dev_run:  # pyright: ignore
            self._export_step(trainer, pl_module)
        elif stepped:
            self._send_next()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if not self.best or not training or trainer.fast_dev_run:  # pyright: ignore
            return
        saves: Any = trainer.checkpoint_callback
        if saves.monitor not in trainer.callback_metrics:
            raise ConfigError(
                f"callbacks.export.best=true: a validation has logged no {saves.monitor} (callbacks.checkpoint."
                f"monitor). There are: {', '.join(sorted(trainer.callback_metrics))}."
            )
        value, sign = float(trainer.callback_metrics[saves.monitor]), 1 if saves.mode == "max" else -1
        better = not math.isnan(value) and (self._best is None or sign * value > sign * self._best)
        if not trainer.strategy.broadcast(better):  # exporting is a collective
            return
        self._best, step = value, trainer.global_step
        what = f"step {step}, best {saves.monitor} {value:.6g}"
        before, folder = self._best_folder, self.folder / f"best_{step:08d}"
        if self._export(trainer, pl_module, folder, what, "main"):
            self._left += [] if before in (None, folder) else [before]
            self._best_folder = folder
            self._send_next()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        last = self.push_to_hub is not None and self.every is not None and self._exported != trainer.global_step
        if last and not trainer.fast_dev_run and not _signalled(trainer):  # pyright: ignore
            self._step = trainer.global_step
            self._export_step(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not _signalled(trainer):
            self._send_the_rest()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):  # a signal waits for no hub
            self._send_the_rest()

    def state_dict(self) -> dict[str, Any]:
        """Return what the best one so far had, and its folder; empty without one."""
        return {"best": self._best, "folder": str(self._best_folder or "")} if self.best else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.best and state_dict:
            self._best = state_dict["best"]
            self._best_folder = Path(state_dict["folder"]) if state_dict["folder"] else None

    def _export_step(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._exported = self._step
        branch = "newest" if self.best else "main"
        self._export(trainer, pl_module, self.folder / f"step_{self._step:08d}", f"step {self._step}", branch)
        self._send_next()

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path, what: str, branch: str) -> bool:
        """Write an export, due to be sent; return whether it is there, false on other ranks. A collective."""
        weights, done = full_state_dict(pl_module.policy), False
        if trainer.is_global_zero:
            with self.unwritten.spared(f"an export of {folder.name}"):
                pl_module.export(weights, folder, unfinished_card(trainer, pl_module, f", {what}"))
                done = True
        if done and self.push_to_hub is not None:
            self._due[branch] = _Sent(folder, f"lit_rl, {what}")
            self._failed.pop(branch, None)
        trainer.strategy.barrier()
        return done

    # ------------------------------------------------------------------ the hub, on rank 0

    def _send_next(self) -> None:
        """Begin to send what is due, unless something is on its way; remove former best ones."""
        if self._pushes.busy():
            return
        due = {sent.folder for sent in (*self._due.values(), *self._failed.values())}
        for folder in [each for each in self._left if each not in due]:
            shutil.rmtree(folder, ignore_errors=True)
            self._left.remove(folder)
        if not self._due or self.unwritten.left_out:
            return
        branch = next(iter(self._due))
        sent = self._due.pop(branch)

        def over(done: bool) -> None:
            if not done and branch not in self._due:
                self._failed[branch] = sent

        self._pushes.start(partial(self._send, sent, branch), over)

    def _send_the_rest(self) -> None:
        """Send what is due or has failed, and wait for it."""
        until = time.monotonic() + self.wait
        self._due, self._failed = {**self._failed, **self._due}, {}
        while self._pushes.wait(until):
            waiting = len(self._due)
            self._send_next()
            if not waiting or self.unwritten.left_out:
                return
        late = TimeoutError(f"it was not over after {self.wait:g} seconds (callbacks.export.wait)")
        self.unwritten.note(self._pushes.what, late, self.wait)

    def _send(self, sent: _Sent, branch: str) -> None:
        """Send a folder. Runs in a thread of its own."""
        from huggingface_hub import HfApi

        assert self.push_to_hub is not None
        if (why := machine.why_hub_is_unreachable()) is not None:
            raise ConnectionError(f"the hub was not asked: {why}")
        api = HfApi()
        api.create_repo(self.push_to_hub, private=self.private, exist_ok=True)
        if branch != "main":
            api.create_branch(self.push_to_hub, branch=branch, exist_ok=True)
        api.upload_folder(
            repo_id=self.push_to_hub, folder_path=sent.folder, commit_message=sent.message, revision=branch
        )


def _signalled(trainer: L.Trainer) -> bool:
    stop = GracefulStop.of(trainer)
    return bool(stop and stop.signum)


def unfinished_card(trainer: L.Trainer, pl_module: Any, what: str) -> dict[str, Any]:
    """Return the facts for a model card before the run is over.

    Args:
        what: The end of its title, after the model and the algorithm.
    """
    base, algorithm = pl_module.model.name, type(pl_module).__name__.lower()
    title = f"{ModelName.of(base)} trained with {algorithm}{what}"
    facts = {"base_model": base, "algorithm": algorithm, "title": title}
    data: Any = trainer.datamodule  # pyright: ignore
    form, task = getattr(data, "prompt_form", None), getattr(data, "task", None)
    paths = [str(source.path) for source in getattr(data, "sources", ())]
    name = ", ".join(paths) or (type(task).__name__.lower() if task is not None else "")
    facts |= {"dataset": name} if name else {}
    facts |= {"command": pl_module.command} if getattr(pl_module, "command", "") else {}
    return facts | ({"prompts": form} if form else {})


class AveragedWeights(L.Callback, ABC):
    """The abstract base: float32 tensors beside each trained weight, moved after every optimizer step.

    The run, its checkpoints' weights and its export in `hf/` do not depend on it; a checkpoint holds the tensors too.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
    """

    choice: ClassVar[str]
    """The option of the config group `callbacks`, for messages."""
    kinds: ClassVar[tuple[str, ...]]
    """Kinds of tensors kept for each weight, which begin as the weight; `exported` returns the first by default."""

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._step = 0
        self._saved: dict[str, Any] | None = None

    @abstractmethod
    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        """Update the tensors kept for one weight.

        Args:
            kept: Float32 tensors by kind; under sharding this rank's part.
            weight: The current weight, of the same shape, float32.
            step: Optimizer steps taken.
        """

    @property
    @abstractmethod
    def description(self) -> str:
        """A description of the average, for the card of the export."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, FSDPTPStrategy)):
            raise ConfigError(
                f"callbacks={self.choice} cannot average weights that {type(trainer.strategy).__name__} holds in "
                "pieces of its own: take strategy=fsdp, ddp or auto, or callbacks=default."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = self._weights(pl_module)
        if self._saved is not None:
            # Placed only now: the weights were not on their devices yet when the checkpoint was read.
            saved, self._saved = self._saved, None
            self._kept = {
                kind: {name: laid_out_like(saved[kind][name], weight) for name, weight in weights.items()}
                for kind in self.kinds
            }
            self._step = saved["step"]
            self._catch_up(trainer, pl_module)
            return
        if trainer.global_step:
            rank_zero_warn("The checkpoint holds no average of the weights: it begins with those of this step.")
        self._kept = {
            kind: {name: weight.detach().float().clone() for name, weight in weights.items()} for kind in self.kinds
        }
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._catch_up(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not self._kept:
            return
        self._catch_up(trainer, pl_module)  # another callback may save at the end of a batch before we saw it
        kept = {kind: self._whole(kind) for kind in self.kinds}
        checkpoint["callbacks"][self.state_key] = {**kept, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.folder is None or _signalled(trainer) or trainer.fast_dev_run:  # pyright: ignore
            return
        state = self.averaged(pl_module)
        if trainer.is_global_zero:
            pl_module.export(state, Path(self.folder), unfinished_card(trainer, pl_module, f": {self.description}"))
        trainer.strategy.barrier()

    def averaged(self, pl_module: Any) -> dict[str, Tensor]:
        """Return the policy's state dict with the average in place of trained weights, on rank 0. A collective."""
        state, average = full_state_dict(pl_module.policy), self.exported(pl_module)
        names = {id(weight): name for name, weight in self._weights(pl_module).items()}
        tied = {alias: names.get(id(t)) for alias, t in pl_module.policy.state_dict(keep_vars=True).items()}
        return {
            alias: tensor if (name := tied[alias]) is None else average[name].to(tensor.dtype)
            for alias, tensor in state.items()
        }

    def exported(self, pl_module: Any) -> dict[str, Tensor]:
        """Return the replacement of each trained weight, whole, on the CPU. A collective where it is sharded."""
        return self._whole(self.kinds[0])

    def _weights(self, pl_module: Any) -> dict[str, Tensor]:
        trained = [name for name, p in pl_module.policy.named_parameters() if p.requires_grad]
        return stored_parameters(pl_module.policy, trained)

    @torch.no_grad()
    def _catch_up(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        for name, weight in self._weights(pl_module).items():
            kept = {kind: local_shard(tensors[name]) for kind, tensors in self._kept.items()}
            self.move(kept, local_shard(weight).float(), self._step)

    def _whole(self, kind: str) -> dict[str, Tensor]:
        """Return the kept tensors of a kind, whole, on the CPU. A collective where they are sharded."""
        return self._on_cpu(self._kept[kind])

    @staticmethod
    def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}


@checked("callbacks.ema")
class EMAWeights(AveragedWeights):
    """An exponential moving average of the trained weights, exported at the end of the training.

    After every optimizer step ``average <- decay average + (1 - decay) weights``, in float32, over what the policy
    trains (adapters only, where there are adapters). It begins with the initial weights.

    The run, its checkpoints' weights and its export in `hf/` do not depend on it; a checkpoint holds the average too.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
        decay: Share of the old average that stays at an optimizer step, in [0, 1].
    """

    choice: ClassVar[str] = "ema"
    kinds: ClassVar[tuple[str, ...]] = ("average",)

    def __init__(self, folder: str | None = None, decay: Portion = 0.992) -> None:
        super().__init__(folder)
        self.decay = decay

    @property
    def description(self) -> str:
        return f"moving average of the weights, decay {self.decay:g}"

    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        kept["average"].lerp_(weight, 1 - self.decay)


@checked("callbacks.bema")
class BEMAWeights(AveragedWeights):
    """A bias-corrected moving average of the trained weights (2508.00180), with less lag than an EMA.

    With the weights theta_t after t optimizer steps, at every ``every``-th step after ``burn_in``::

        average   <- (1 - beta_t) average + beta_t theta_t      beta_t  = max((lag + multiplier t)^-ema_power, min_beta)
        corrected <- average + alpha_t (theta_t - theta_0)      alpha_t = (lag + multiplier t)^-bias_power

    theta_0, and the average's first value, are the weights after ``burn_in`` steps. ``corrected`` of the last update is
    exported: before the first one, the initial weights. Three float32 copies of the trained weights are kept.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
        ema_power: Exponent by which the weight beta of new weights falls; 0 makes the average the weights themselves.
        bias_power: Exponent by which the weight alpha of the correction falls; a large one gives a plain average.
        lag: Offset of the step count in both weights, in steps, at least 1.
        multiplier: Factor of the step count beside the lag, at least 0.
        min_beta: Lower bound of beta, in [0, 1].
        every: Optimizer steps between two updates, at least 1.
        burn_in: Optimizer steps before the averaging begins.
    """

    choice: ClassVar[str] = "bema"
    kinds: ClassVar[tuple[str, ...]] = ("corrected", "average", "initial")

    def __init__(
        self,
        folder: str | None = None,
        ema_power: NotNegative = 0.5,
        bias_power: NotNegative = 0.2,
        lag: Annotated[float, Range(1)] = 10.0,
        multiplier: NotNegative = 1.0,
        min_beta: Portion = 0.0,
        every: AtLeastOne = 400,
        burn_in: AtLeastZero = 0,
    ) -> None:
        super().__init__(folder)
        self.ema_power, self.bias_power, self.lag, self.multiplier = ema_power, bias_power, lag, multiplier
        self.min_beta, self.every, self.burn_in = min_beta, every, burn_in

    @property
    def description(self) -> str:
        return f"bias-corrected moving average of the weights, every {self.every} steps after {self.burn_in}"

    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        if step < self.burn_in or (step - self.burn_in) % self.every:
            return
        if step == self.burn_in:
            kept["average"].copy_(weight)
            kept["initial"].copy_(weight)
            return
        time = self.lag + self.multiplier * step
        average, initial = kept["average"], kept["initial"]
        average.lerp_(weight, max(time**-self.ema_power, self.min_beta))
        kept["corrected"].copy_(average + time**-self.bias_power * (weight - initial))


@checked("callbacks.merge")
class MergedWeights(AveragedWeights):
    """An export of ``start + share (trained - start)`` of every trained weight (WiSE-FT, 2109.01903).

    It is a point on the line between the initial policy and the trained one, computed in float32. The callback holds a
    float32 copy of the initial weights, and so do checkpoints. The run and its export in `hf/` do not depend on it.

    Args:
        folder: Where the merged policy is exported when the training ends; null exports nothing.
        share: 1 is the trained policy, 0 the initial one; above 1 extrapolates beyond the trained one. In [0, 2].
    """

    choice: ClassVar[str] = "merge"
    kinds: ClassVar[tuple[str, ...]] = ("initial",)

    def __init__(self, folder: str | None = None, share: Annotated[float, Range(0, 2)] = 0.5) -> None:
        super().__init__(folder)
        self.share = share

    @property
    def description(self) -> str:
        return f"{self.share:g} of the way from the initial weights to the trained ones"

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        model = getattr(pl_module, "model", None)
        if getattr(model, "lora", None) is not None or getattr(model, "adapter", None) is not None:
            raise ConfigError(
                "callbacks=merge interpolates weights, and interpolating the two factors of an adapter does not "
                "interpolate their product. Scale the adapter instead (lora_alpha in adapter_config.json, times the "
                "share), or train without model.lora and model.adapter."
            )

    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        """Do nothing: the initial weights are kept as they are."""

    def exported(self, pl_module: Any) -> dict[str, Tensor]:
        now = {name: weight.detach().float() for name, weight in self._weights(pl_module).items()}
        start = self._kept["initial"]
        return self._on_cpu({name: start[name] + self.share * (weight - start[name]) for name, weight in now.items()})
