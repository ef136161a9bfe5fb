"""Callbacks that export policies as Hugging Face folders: at a step, as a moving average, or merged with the start.

`Export` writes the policy while the run goes on. `EMAWeights`, `BEMAWeights` and `MergedWeights` keep float32 tensors
beside the trained weights (`AveragedWeights`), and export at the end.

Lightning's `EMAWeightAveraging` does not fit: it copies the whole module, frozen base and reference included, and puts
it into every checkpoint; its average cannot be restored from a checkpoint of trained tensors only, as those of adapter
runs are; and it leaves the average in the policy, so that a run could not be resumed from its last checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.algorithms.optim.strategies import FSDPTPStrategy
from lit_rl.callbacks.graceful_stop import GracefulStop
from lit_rl.callbacks.loggers import WriteFailures
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.models.model_card import ModelName
from lit_rl.models.sharding import full_state_dict, laid_out_like, local_shard, stored_parameters
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, NotNegative, Portion, Range


@checked("callbacks.export")
class Export(L.Callback):
    """Exports of the policy every N steps, as the end of a run writes `hf/`: for transformers and vLLM, verified.

    An export that cannot be written is warned of, and the run goes on (`unwritten`).

    Args:
        folder: The folder of the exports, one subfolder each: `step_00000100`.
        every: Optimizer steps between two of them, at least 1. null writes none.

    Raises:
        ConfigError: `every` is below 1.
    """

    def __init__(self, folder: str, every: AtLeastOne | None = None) -> None:
        self.folder, self.every = Path(folder), every
        self.unwritten = WriteFailures("Export")
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped, self._step = trainer.global_step > self._step, trainer.global_step
        due = self.every is not None and stepped and self._step % self.every == 0
        if not due or trainer.fast_dev_run:  # pyright: ignore
            return
        weights = full_state_dict(pl_module.policy)  # a collective
        if trainer.is_global_zero:
            name = f"step_{self._step:08d}"
            with self.unwritten.spared(f"an export of {name}"):
                pl_module.export(
                    weights, self.folder / name, unfinished_card(trainer, pl_module, f", step {self._step}")
                )
        trainer.strategy.barrier()


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
        stop = GracefulStop.of(trainer)
        if self.folder is None or (stop and stop.signum) or trainer.fast_dev_run:  # pyright: ignore
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
