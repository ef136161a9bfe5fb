"""DeepSpeed's ZeRO (1910.02054) through Lightning's strategy, set up as a policy needs it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.optim import Optimizer

from lit_rl.durable import PARTIAL, check_room, flush_tree, tried_again, write_manifest
from lit_rl.errors import BackendError, ConfigError, StorageError
from lit_rl.models.policy.partitions import give_back

FACTS = "lit_rl.json"
"""The file in a checkpoint's folder with the facts that a resume needs unchanged."""

_DEVICES = ("remote_device", "offload_params_device", "offload_optimizer_device")


class BatchesAsTheyAre(DeepSpeedPrecision):
    """A precision plugin that casts no batch: Lightning's would, and fails for a frozen dataclass."""

    def convert_input(self, data: Any) -> Any:
        return data


class ZeROStrategy(DeepSpeedStrategy):
    """A `DeepSpeedStrategy` with the module's optimizer steps, and whole weights on demand.

    Differences from Lightning's:

    - Every rank loads whole weights, and DeepSpeed shards them: a policy is read from its own files.
    - Only Lightning counts micro-batches. Otherwise both its loop and DeepSpeed's engine would divide the loss by their
      number, and `optimizer_step` of the module would be called for each micro-batch.
    - Weights are sharded during a fit, and whole before and after it: validation by itself has no engine.
    - A checkpoint is a folder of trained weights. It is written beside the target and renamed; reading runs no code.
    """

    def __init__(self, stage: int = 2, **kwargs: Any) -> None:
        """Set up the strategy.

        Args:
            stage: 1 shards the optimizer's state over the ranks, 2 gradients too, 3 weights too.
            kwargs: Further arguments of `DeepSpeedStrategy`.
        """
        if stage not in (1, 2, 3):
            raise ConfigError(f"trainer.strategy.stage={stage!r}: ZeRO has the stages 1, 2 and 3.")
        if "config" in kwargs or self.DEEPSPEED_ENV_VAR in os.environ:
            raise ConfigError(
                f"A config of DeepSpeed's own (config=, or {self.DEEPSPEED_ENV_VAR} of the environment) would set what "
                "the Trainer's keys set here. Give keys of trainer.strategy instead: stage, offload_optimizer, "
                "reduce_bucket_size, and so on."
            )
        if "nvme" in (kwargs.get(name) for name in _DEVICES):
            raise ConfigError("Offload to NVMe was never run here. Take offload_optimizer=true, which is to the CPU.")
        super().__init__(stage=stage, exclude_frozen_parameters=True, **kwargs)
        assert isinstance(self.config, dict)
        self.config["zero_force_ds_cpu_optimizer"] = (
            False  # torch's own optimizers may step offloaded weights, if more slowly
        )
        self._has_engine = self._is_whole = self._left_out = False

    @property
    def stage(self) -> int:
        assert isinstance(self.config, dict)
        return int(self.config["zero_optimization"]["stage"])

    def check_device(self) -> None:
        """Refuse a run without GPUs.

        Raises:
            BackendError: there is none.
        """
        if not isinstance(self.accelerator, CUDAAccelerator):
            raise BackendError(
                f"strategy=deepspeed_{self.stage} needs GPUs, and this run has none. Take strategy=ddp or fsdp."
            )

    def setup_environment(self) -> None:
        self.check_device()
        super().setup_environment()

    # ------------------------------------------------------------------ weights

    def setup(self, trainer: L.Trainer) -> None:
        self.precision_plugin = BatchesAsTheyAre(self.precision_plugin.precision)  # pyright: ignore
        super().setup(trainer)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        self._init_config_if_needed()
        yield

    def init_deepspeed(self) -> None:
        module = self.lightning_module
        assert module is not None
        if module.trainer.training:
            self._initialize_deepspeed_train(module)
            self._has_engine = True
        else:
            self.model_to_device()

    def teardown(self) -> None:
        if self._has_engine:
            self._has_engine = False
            engine, self.model = self.deepspeed_engine, self.lightning_module
            engine.destroy()
            if self.stage == 3 and not engine.module.trainer.interrupted:  # another rank may be gone
                give_back(engine.module)
        super().teardown()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold every weight of the module whole on every rank, without DeepSpeed's hooks: gathered once.

        A collective where stage 3 shards them, else a no-op.
        """
        if self._is_whole or not (self._has_engine and self.stage == 3):
            yield
            return
        import deepspeed  # pyright: ignore[reportMissingImports]

        self._is_whole = True
        try:
            with deepspeed.zero.unwrap_model_for_generation(self.deepspeed_engine):
                yield
        finally:
            self._is_whole = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate with whole weights, outside DeepSpeed's engine: in its forward pass none can be gathered to
        decode."""
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.val_step_context(), self.whole():
            return module.validation_step(*args, **kwargs)

    # ------------------------------------------------------------------ steps

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # only its throughput timer reads it
        super()._format_batch_size_and_grad_accum_config()
        self.config["gradient_accumulation_steps"] = 1

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Mark a micro-batch that no optimizer step follows."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        self._left_out = False
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @property
    def gradient_norm(self) -> float:
        """The norm in the last optimizer step, before clipping, over all ranks.

        Infinite where it was not finite, so that DeepSpeed skipped the step; 0 after `leave_out_step`.
        """
        if self.optimizers[0].overflow:  # pyright: ignore[reportAttributeAccessIssue]
            return 0.0 if self._left_out else math.inf
        return float(self.deepspeed_engine.get_global_grad_norm())

    def leave_out_step(self) -> None:
        """Skip the step after a backward pass: neither a weight nor a moment moves. Every rank calls it.

        DeepSpeed skips steps whose gradient is not finite, and has no other way to drop the gradients it holds.
        """
        from deepspeed.utils import safe_set_full_grad  # pyright: ignore[reportMissingImports]

        self._left_out = True
        weight = next(p for p in self.deepspeed_engine.module.parameters() if p.requires_grad)
        shape = getattr(weight, "ds_shape", weight.shape)
        safe_set_full_grad(weight, torch.full(shape, math.nan, device=self.root_device))

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        target = self.broadcast(os.fspath(filepath))
        self._check_room(target)
        partial = self.broadcast(f"{target}{PARTIAL}{os.getpid()}")
        with self._frozen_left_out():
            super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        if self.is_global_zero:
            (Path(partial) / FACTS).write_text(json.dumps(self._facts()))
            write_manifest(Path(partial))
        if self.local_rank == 0:
            flush_tree(Path(partial))
        self.barrier()
        if self.is_global_zero:
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
        self.barrier()

    def checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint over all ranks.

        It has the optimizer's state with its own copy of the trained weights, and below stage 3 these weights again.
        """
        trained = [weight for weight in self.deepspeed_engine.module.parameters() if weight.requires_grad]
        size = sum(getattr(weight, "ds_numel", weight.numel()) * weight.element_size() for weight in trained)
        moments = max(len(group.get("betas", ())) for group in self.optimizers[0].param_groups)
        return size * (1 + moments + (self.stage < 3))

    def _check_room(self, target: str) -> None:
        """Check the disk space before writing, on rank 0 for all ranks.

        Raises:
            StorageError: there is too little, also after retries; on every rank.
        """
        size, folder = self.checkpoint_bytes(), os.path.dirname(target)

        said = None
        if self.is_global_zero:
            try:
                tried_again(lambda: check_room(folder, size), f"The checkpoint {target}")
            except OSError as error:
                said = str(error)
        if (said := self.broadcast(said)) is not None:
            raise StorageError(
                f"The checkpoint {target} could not be written: {said}. What was saved before is as it was: make "
                "room, and go on from there with ckpt_path=last."
            )

    @contextmanager
    def _frozen_left_out(self) -> Iterator[None]:
        """Drop all frozen weights from the state: of a weight with two names DeepSpeed drops the first only."""
        module = self.deepspeed_engine.module
        frozen = [name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad]

        def leave_out(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name in frozen:
                state.pop(f"{prefix}{name}", None)

        handle = module.register_state_dict_post_hook(leave_out)
        try:
            yield
        finally:
            handle.remove()

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        check_facts(Path(checkpoint_path) / FACTS, self._facts())
        self.deepspeed_engine.checkpoint_engine.load = _load_plain
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _facts(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        trained = {
            name: list(getattr(weight, "ds_shape", weight.shape))
            for name, weight in module.named_parameters()
            if weight.requires_grad
        }
        return {"stage": self.stage, "processes": self.world_size, "trained": trained}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: DeepSpeed's engine has loaded the weights already."""


def check_facts(path: Path, here: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that DeepSpeed would read in part, or fail to read.

    Args:
        path: The file with the facts of the run that wrote it.
        here: The facts of this run.

    Raises:
        StorageError: it is no checkpoint of ours, or another stage, number of processes or model wrote it.
    """
    try:
        there = json.loads(path.read_text())
        kept = {name: there[name] for name in here}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path.parent} is no whole checkpoint of a run with DeepSpeed ({type(error).__name__}: {path.name}). Take "
            "another one with ckpt_path."
        ) from error
    for name in ("stage", "processes"):
        if kept[name] != here[name]:
            raise StorageError(
                f"{path.parent} was written with {name}={kept[name]}, and this run has {here[name]}: DeepSpeed cannot "
                "deal its parts out anew. Resume with the strategy, trainer.devices and trainer.num_nodes of the run's "
                "config.yaml, or start a new run from the exported model: model.name=<run_dir>/hf."
            )
    other = sorted(name for name in {*kept["trained"], *here["trained"]} if _shape(kept, name) != _shape(here, name))
    if other:
        raise StorageError(
            f"The checkpoint is not of this model: missing, unexpected or of another shape are {other[:5]}. Resume "
            "with the algorithm, model and adapter settings of the run's config.yaml."
        )


def _shape(facts: Mapping[str, Any], name: str) -> list[int] | None:
    return facts["trained"].get(name)


def _load_plain(path: str, map_location: Any | None = None) -> Any:
    """Load a file of DeepSpeed: tensors, numbers, strings, and the few classes of its own that describe them."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.zero.config import ZeroStageEnum  # pyright: ignore[reportMissingImports]
    from deepspeed.utils.tensor_fragment import fragment_address  # pyright: ignore[reportMissingImports]

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)
