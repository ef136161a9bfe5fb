"""The base of callbacks that keep an average of the policy's weights beside the run and export it at its end.

Lightning's `EMAWeightAveraging` does not fit: it copies the whole module, frozen base and reference included, and puts
it into every checkpoint; its average cannot be restored from a checkpoint of trained tensors only, as those of adapter
runs are; and it leaves the average in the policy, so that a run could not be resumed from its last checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.algorithms.optim.strategies import FSDPTPStrategy
from lit_rl.callbacks.export import unfinished_card
from lit_rl.callbacks.graceful_stop import GracefulStop
from lit_rl.errors import ConfigError
from lit_rl.models.policy.sharding import full_state_dict
from lit_rl.models.policy.shards import laid_out, local, stored_parameters


class AveragedWeights(L.Callback, ABC):
    """The abstract base: float32 tensors beside each trained weight, moved after every optimizer step.

    The run, its checkpoints' weights and its export in `hf/` do not depend on it; a checkpoint holds the tensors too.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
    """

    choice: ClassVar[str]
    """The option of the config group `callbacks`, for messages."""
    kinds: ClassVar[tuple[str, ...]]
    """Kinds of tensors kept for each weight, initially equal to it; the first is exported unless `exported` is
    overridden."""

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
    def told(self) -> str:
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
                kind: {name: laid_out(saved[kind][name], weight) for name, weight in weights.items()}
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
        stops = [callback for callback in trainer.callbacks if isinstance(callback, GracefulStop)]  # pyright: ignore
        stopped = any(callback.signum is not None for callback in stops)
        if self.folder is not None and not stopped and not trainer.fast_dev_run:  # pyright: ignore
            self._export(trainer, pl_module, Path(self.folder))

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
            kept = {kind: local(tensors[name]) for kind, tensors in self._kept.items()}
            self.move(kept, local(weight).float(), self._step)

    def _whole(self, kind: str) -> dict[str, Tensor]:
        """Return the kept tensors of a kind, whole, on the CPU. A collective where they are sharded."""
        return self._on_cpu(self._kept[kind])

    @staticmethod
    def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        state = self.averaged(pl_module)
        if trainer.is_global_zero:
            pl_module.export(state, folder, unfinished_card(trainer, pl_module, f": {self.told}"))
        trainer.strategy.barrier()
