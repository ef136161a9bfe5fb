"""An exponential moving average of the policy's weights, kept beside the run and exported at its end.

Lightning's `EMAWeightAveraging` does not fit: it copies the whole module, frozen base and reference included, and puts
it into every checkpoint; its average cannot be restored from a checkpoint of trained tensors only, as those of adapter
runs are; and it leaves the average in the policy, so that a run could not go on from its last checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.callbacks.export import card_facts
from lit_rl.callbacks.graceful_stop import GracefulStop
from lit_rl.errors import ConfigError, in_range
from lit_rl.models.policy.sharding import full_state_dict
from lit_rl.models.policy.shards import laid_out, local, stored_parameters


class EMAWeights(L.Callback):
    """After every optimizer step ``average <- decay average + (1 - decay) weights``, in float32, of what the policy
    trains (adapters only, where there are adapters). It begins with the initial weights.

    The run, its checkpoints' weights and its export in `hf/` are those without it; a checkpoint holds the average too.

    Args:
        folder: Where the averaged policy is exported when the training ends; null exports nothing.
        decay: Share of the old average that stays at an optimizer step, in [0, 1].
    """

    def __init__(self, folder: str | None = None, decay: float = 0.992) -> None:
        in_range("callbacks.ema.decay", decay, low=0, high=1)
        self.folder, self.decay = folder, decay
        self._average: dict[str, Tensor] = {}
        self._step = 0
        self._saved: dict[str, Any] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise ConfigError(
                f"callbacks=ema cannot average weights that {type(trainer.strategy).__name__} holds in pieces of its "
                "own: take strategy=fsdp, ddp or auto, or callbacks=default."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = self._weights(pl_module)
        if self._saved is not None:
            # Placed only now: when a checkpoint is read, the weights are not on their devices yet.
            self._average = {name: laid_out(self._saved["average"][name], weight) for name, weight in weights.items()}
            self._step, self._saved = self._saved["step"], None
            self._catch_up(trainer, pl_module)
            return
        if trainer.global_step:
            rank_zero_warn("The checkpoint holds no average of the weights: it begins with those of this step.")
        self._average = {name: weight.detach().float().clone() for name, weight in weights.items()}
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._catch_up(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return
        self._catch_up(trainer, pl_module)  # another callback may save at the end of a batch before we saw it
        checkpoint["callbacks"][self.state_key] = {"average": self._whole(), "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        stops = [callback for callback in trainer.callbacks if isinstance(callback, GracefulStop)]  # pyright: ignore
        stopped = any(callback.signum is not None for callback in stops)
        if self.folder is not None and not stopped and not trainer.fast_dev_run:  # pyright: ignore
            self._export(trainer, pl_module, Path(self.folder))

    def averaged(self, pl_module: Any) -> dict[str, Tensor]:
        """The policy's whole state dict with the average in place of what is trained. Collective; rank 0 gets it."""
        state, average = full_state_dict(pl_module.policy), self._whole()
        names = {id(weight): name for name, weight in self._weights(pl_module).items()}
        tied = {alias: names.get(id(t)) for alias, t in pl_module.policy.state_dict(keep_vars=True).items()}
        return {
            alias: tensor if (name := tied[alias]) is None else average[name].to(tensor.dtype)
            for alias, tensor in state.items()
        }

    def _weights(self, pl_module: Any) -> dict[str, Tensor]:
        trained = [name for name, p in pl_module.policy.named_parameters() if p.requires_grad]
        return stored_parameters(pl_module.policy, trained)

    @torch.no_grad()
    def _catch_up(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        for name, weight in self._weights(pl_module).items():
            local(self._average[name]).lerp_(local(weight).float(), 1 - self.decay)

    def _whole(self) -> dict[str, Tensor]:
        """The average as whole tensors on the CPU: a collective where it is sharded."""
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in self._average.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        state = self.averaged(pl_module)
        if trainer.is_global_zero:
            what = f": moving average of the weights, decay {self.decay:g}"
            pl_module.export(state, folder, card_facts(trainer, pl_module, what))
        trainer.strategy.barrier()
