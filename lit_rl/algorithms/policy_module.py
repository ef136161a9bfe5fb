"""What every algorithm with a policy shares: loading, sharding, optimizer, clipping, what a checkpoint holds.

Mechanics only: no advantage, no loss and no reward formula stands here.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.algorithms import state
from lit_rl.algorithms.optimizers import AdamW, OptimizerFactory
from lit_rl.algorithms.schedules import Linear, Schedule
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.reference import Auto, Reference
from lit_rl.models.sharding import shard


class PolicyModule(L.LightningModule):
    """A LightningModule with a policy that is described at once and loaded in `configure_model`.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reference: What a KL term is measured against. None chooses by the policy (`lit_rl.models.reference.Auto`).
        optimizer: Makes the optimizer. None is AdamW at 1e-6.
        scheduler: Makes the learning-rate schedule. None is linear to zero.
        seed: Of everything that this module draws.
    """

    def __init__(
        self,
        model: LanguageModel | str,
        *,
        reference: Reference | None,
        optimizer: OptimizerFactory | None,
        scheduler: Schedule | None,
        seed: int,
    ) -> None:
        super().__init__()
        self.model = LanguageModel(model) if isinstance(model, str) else model
        self.reference: Reference = Auto() if reference is None else reference
        self.optimizer: OptimizerFactory = AdamW() if optimizer is None else optimizer
        self.scheduler: Schedule = Linear() if scheduler is None else scheduler
        self.seed = seed
        self.policy: Any = None
        self.reference_policy: nn.Module | None = None
        self.grad_norm = torch.zeros(())
        self._resumed_rng: dict[str, Any] | None = None
        self.strict_loading = False  # a checkpoint holds what is trained; state.check_weights refuses anything else

    needs_reference = False
    """Whether a term of the objective reads the reference; without one no reference is loaded."""

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def trainer_or_none(self) -> L.Trainer | None:
        """The Trainer, or None where the module is used by hand (a notebook's cells)."""
        return getattr(self, "_trainer", None)

    @property
    def world_size(self) -> int:
        return self.trainer_or_none.world_size if self.trainer_or_none else 1

    @property
    def step(self) -> int:
        """Optimizer steps taken: the version of the policy."""
        return self.trainer_or_none.global_step if self.trainer_or_none else 0

    def configure_model(self) -> None:
        """Load the policy, and the reference if a term needs it. Lightning calls it; by hand, call it once."""
        if self.policy is not None:
            return
        policy = self.model.load()
        reference = self.reference.module(policy) if self.needs_reference else None
        strategy = self.trainer_or_none.strategy if self.trainer_or_none else None
        if isinstance(strategy, ModelParallelStrategy):
            mesh = strategy.device_mesh["data_parallel"]
            shard(policy, mesh)
            if reference is not None:
                shard(reference, mesh)
        self.policy, self.reference_policy = policy, reference

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = self.optimizer([{"params": trained, "name": "policy"}])
        # Fused optimizers say that they unscale fp16 gradients themselves; then these would be clipped while scaled.
        optimizer._step_supports_amp_scaling = False  # pyright: ignore
        schedule = self.scheduler(optimizer, self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def total_steps(self) -> float:
        """Optimizer steps of the whole run; infinite where nothing ends it.

        Not `Trainer.estimated_stepping_batches`: read before a checkpoint is restored, that makes Lightning set up the
        training data at once, and the restored position of the loader is never used.
        """
        trainer: Any = self.trainer
        steps = math.inf if trainer.max_steps in (None, -1) else trainer.max_steps
        if trainer.max_epochs in (None, -1):
            return steps
        batches, limit = len(trainer.datamodule.train_dataloader()), trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return min(steps, math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip, and keep the norm from before the clipping. Without a limit the norm is measured all the same."""
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            return  # its engine clips, with the Trainer's setting
        by_value = gradient_clip_algorithm == "value"
        limit = math.inf if by_value or not gradient_clip_val else gradient_clip_val
        if isinstance(strategy, FSDPStrategy):
            norm = self.trainer.model.clip_grad_norm_(limit)  # pyright: ignore
        else:
            norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], limit)
        self.grad_norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).detach()
        if by_value:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_fit_start(self) -> None:
        self.policy.train()  # from_pretrained gives evaluation mode, where gradient checkpointing is silently off

    # ------------------------------------------------------------------ checkpoints

    def rank_state(self) -> dict[str, Any]:
        """What this rank needs beyond weights to go on exactly; tensors, numbers and strings only."""
        return {}

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        """The counterpart of `rank_state`."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep trained tensors only (no reference, no frozen base), and every rank's own state."""
        if checkpoint.get("state_dict"):
            trained = self._trained_names()
            weights = {name: tensor for name, tensor in checkpoint["state_dict"].items() if name in trained}
            checkpoint["state_dict"] = weights
        mine = {"module": self.rank_state(), "rng": state.rng_state()}
        checkpoint["lit_rl"] = state.gather_ranks(mine)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if weights := checkpoint.get("state_dict"):
            state.check_weights(weights, self._trained_names())
        if "lit_rl" in checkpoint and self.trainer_or_none is not None:
            saved = state.of_rank(checkpoint["lit_rl"], self.global_rank, self.world_size)
            self.load_rank_state(saved["module"])
            self._resumed_rng = saved["rng"]

    def on_train_start(self) -> None:
        if self._resumed_rng is not None:
            state.set_rng_state(self._resumed_rng)
            self._resumed_rng = None

    def _trained_names(self) -> dict[str, Tensor]:
        """Names and tensors of what training changes: parameters with gradient, and buffers that are saved."""
        saved = self.policy.state_dict(keep_vars=True)
        return {f"policy.{name}": t for name, t in saved.items() if not isinstance(t, nn.Parameter) or t.requires_grad}
