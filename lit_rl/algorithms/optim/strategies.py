"""Lightning's strategies set up as a policy needs them: FSDP2, FSDP2 with tensor parallelism, DeepSpeed's ZeRO.

ZeRO (1910.02054) writes checkpoints in parts, one a process, so all nodes have to see one folder
(`check_checkpoints_are_shared`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim import Optimizer

from lit_rl.core import upstream
from lit_rl.core.durable_files import PARTIAL, check_free_space, flush_tree, retry_on_full_disk, write_manifest
from lit_rl.core.errors import BackendError, ConfigError, RewardError, StorageError
from lit_rl.core.ranks import broadcast_object, gather_objects
from lit_rl.models.sharding import move_all_but_shards, restore_whole_parameters

# ---------------------------------------------------------------------- one folder for all nodes


SEEN_WITHIN = 30.0
"""Seconds in which a network disk shows new files to other nodes."""


def check_checkpoints_are_shared(trainer: L.Trainer) -> None:
    """Call `check_every_node_sees` for each checkpoint folder of a run under DeepSpeed."""
    strategy: Any = trainer.strategy
    folders = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    for folder in dict.fromkeys(filter(None, folders)):
        check_every_node_sees(Path(folder), strategy, f"deepspeed_{strategy.stage}")


def check_every_node_sees(folder: Path, strategy: Any, name: str) -> None:
    """Refuse a run whose checkpoints could not be resumed, before it has learned anything. A collective.

    Args:
        folder: Folder of the checkpoints; it need not exist yet.
        strategy: Lightning's strategy of the run, with initialised processes.
        name: Name of the chosen strategy, for the message.

    Raises:
        ConfigError: a node does not see what rank 0 writes there; on every rank.
        StorageError: rank 0 cannot write there; on every rank.
    """
    folder, problem = folder.absolute(), None
    with contextlib.ExitStack() as stack:
        marker = None
        if strategy.is_global_zero:
            try:
                marker = stack.enter_context(_marker_file(folder))
            except OSError as error:
                problem = f"The checkpoints of this run would be in {folder}, where nothing can be written: {error}."
        marker, problem = strategy.broadcast((marker, problem))
        if problem is not None:
            raise StorageError(problem)
        is_seen = strategy.local_rank != 0 or _wait_for_file(Path(marker))
        hosts = gather_objects(None if is_seen else socket.gethostname())
    if blind := list(dict.fromkeys(filter(None, hosts))):
        raise ConfigError(
            f"With strategy={name} each process writes its part of a checkpoint, and {' and '.join(blind)} cannot "
            f"see what rank 0 writes into {Path(marker).parent}. Every node must see the same folder: set run_dir to a "
            "folder on a disk that all nodes share, or take strategy=fsdp, whose checkpoints rank 0 writes whole."
        )


@contextlib.contextmanager
def _marker_file(folder: Path) -> Iterator[str]:
    """Keep a file in the folder, or its nearest existing parent, with a name that is new to every node."""
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    with tempfile.NamedTemporaryFile(prefix=".seen_by_every_node_", dir=existing) as file:
        yield file.name


def _wait_for_file(path: Path) -> bool:
    """Return False if the file does not appear within `SEEN_WITHIN` seconds."""
    deadline = time.monotonic() + SEEN_WITHIN
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # so that a network disk refreshes its entries
    return True


# ---------------------------------------------------------------------- DeepSpeed


FACTS = "lit_rl.json"
"""The file in a checkpoint's folder with the facts that a resume needs unchanged."""

_DEVICES = ("remote_device", "offload_params_device", "offload_optimizer_device")


class UncastBatches(DeepSpeedPrecision):
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
                f"A DeepSpeed config (config=, or the environment variable {self.DEEPSPEED_ENV_VAR}) would override "
                "keys of the Trainer. Set keys of trainer.strategy instead: stage, offload_optimizer, "
                "reduce_bucket_size, and so on."
            )
        if "nvme" in (kwargs.get(name) for name in _DEVICES):
            raise ConfigError(
                "Offloading to NVMe is not tested. Set offload_optimizer=true, which offloads to the CPU."
            )
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
        self.precision_plugin = UncastBatches(self.precision_plugin.precision)  # pyright: ignore
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
                restore_whole_parameters(engine.module)
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
        """Validate with whole weights, outside DeepSpeed's engine, whose forward pass allows no gathering to decode."""
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

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        target = self.broadcast(os.fspath(filepath))
        self._check_disk_space(target)
        partial = self.broadcast(f"{target}{PARTIAL}{os.getpid()}")
        with self._without_frozen_weights():
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

    def _check_disk_space(self, target: str) -> None:
        """Check the disk space before writing, on rank 0 for all ranks.

        Raises:
            StorageError: there is too little, also after retries; on every rank.
        """
        size, folder = self.checkpoint_bytes(), os.path.dirname(target)

        problem = None
        if self.is_global_zero:
            try:
                retry_on_full_disk(lambda: check_free_space(folder, size), f"The checkpoint {target}")
            except OSError as error:
                problem = str(error)
        if (problem := self.broadcast(problem)) is not None:
            raise StorageError(
                f"The checkpoint {target} could not be written: {problem}. Earlier checkpoints are unchanged. Free "
                "disk space, and resume with ckpt_path=last."
            )

    @contextmanager
    def _without_frozen_weights(self) -> Iterator[None]:
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

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
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
            f"{path.parent} is no complete checkpoint of a run with DeepSpeed ({type(error).__name__}: {path.name}). "
            "Set ckpt_path to another one."
        ) from error
    for name in ("stage", "processes"):
        if kept[name] != here[name]:
            raise StorageError(
                f"{path.parent} was written with {name}={kept[name]}, but this run has {here[name]}, and DeepSpeed "
                "cannot redistribute its parts. Resume with the strategy, trainer.devices and trainer.num_nodes of the "
                "run's config.yaml, or start a new run from the exported model: model.name=<run_dir>/hf."
            )
    other = sorted(
        name for name in {*kept["trained"], *here["trained"]} if kept["trained"].get(name) != here["trained"].get(name)
    )
    if other:
        raise StorageError(
            f"The checkpoint is not of this model: missing, unexpected or of another shape are {other[:5]}. Resume "
            "with the algorithm, model and adapter settings of the run's config.yaml."
        )


def _load_plain(path: str, map_location: Any | None = None) -> Any:
    """Load a file of DeepSpeed: tensors, numbers, strings, and the few classes of its own that describe them."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.zero.config import ZeroStageEnum  # pyright: ignore[reportMissingImports]
    from deepspeed.utils.tensor_fragment import fragment_address  # pyright: ignore[reportMissingImports]

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


# ---------------------------------------------------------------------- FSDP2


class FSDP2Strategy(ModelParallelStrategy):
    """A `ModelParallelStrategy` with all devices in the data-parallel mesh, which is FSDP2, and whole checkpoints.

    Lightning's own default is the opposite: all devices of a node in the tensor-parallel mesh.
    """

    tp_size = 1
    """Processes that share rows, and hold parts of the same layers."""

    def __init__(self, process_group_backend: str | None = None, cpu_offload: bool = False, **kwargs: Any) -> None:
        """Set up the strategy.

        Args:
            process_group_backend: None takes nccl on GPUs, gloo on CPUs, and both where `cpu_offload` needs both.
            cpu_offload: Keep shards of weights and gradients, the optimizer's state and its step in the host's memory.
                Gathered weights are on the GPU. On a CPU nothing moves.
            kwargs: Further arguments of `ModelParallelStrategy`.
        """
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            **kwargs,
        )
        self.cpu_offload = cpu_offload

    @property
    def offload_policy(self) -> OffloadPolicy:
        """The offload policy of `fully_shard`. Shards on the host are pinned, so that copies to the GPU do not wait."""
        if not self.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.root_device.type != "cpu")

    @property
    def reward_mesh(self) -> Any:
        """The ranks that shard reward models; None before the processes are started, and where ranks share rows."""
        if self._device_mesh is None or self.tp_size > 1:
            return None
        return self._device_mesh["data_parallel"]

    def _get_process_group_backend(self) -> str:
        """Return the backend for the devices of the shards: norms and checkpoints are reduced and gathered there."""
        backend = super()._get_process_group_backend()
        if not self.cpu_offload or self.root_device.type == "cpu" or "cpu:" in backend:
            return backend
        if self._process_group_backend is not None:
            raise ConfigError(
                f"trainer.strategy.process_group_backend={backend} sends tensors of GPUs alone, and with "
                "trainer.strategy.cpu_offload=true gradients are in the host's memory. Leave it unset, or set it to "
                f"cpu:gloo,{self.root_device.type}:{backend}."
            )
        return f"cpu:gloo,{self.root_device.type}:{backend}"

    def model_to_device(self) -> None:
        """Move the model as Lightning does, except shards that belong in the host's memory."""
        if not self.cpu_offload:
            super().model_to_device()
            return
        assert self.model is not None
        move_all_but_shards(self.model, self.root_device)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes // self.tp_size
        super().setup_environment()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return Lightning's state, with numbers in place of the names that it leaves where no weight has state."""
        found = super().optimizer_state(optimizer)
        if not found.get("state"):
            for group, numbers in zip(found.get("param_groups", ()), self._numbers_of(optimizer), strict=False):
                group["params"] = numbers
        return found

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of whole tensors into any number of processes, as Lightning does.

        Raises:
            StorageError: the file was written without FSDP2, and the weights of its optimizer are ambiguous.
        """
        path = Path(self.broadcast(checkpoint_path))
        if not self.optimizers or not path.is_file():
            return super().load_checkpoint(checkpoint_path, weights_only)
        saved = torch.load(path, mmap=True, map_location="cpu", weights_only=True).get("optimizer_states", ())
        self._check_numbers(path, saved)
        if any(each["state"] for each in saved):
            return super().load_checkpoint(checkpoint_path, weights_only)
        # Optimizers without state, as SGD without momentum: torch asks the state for a device, so only settings load.
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self.optimizers = optimizers
        for optimizer, state in zip(optimizers, saved, strict=True):
            for group, settings in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({name: value for name, value in settings.items() if name != "params"})
        return checkpoint

    def _check_numbers(self, path: Path, saved: Sequence[dict[str, Any]]) -> None:
        """Check an optimizer's parameter numbers: Lightning counts all parameters, others only trained ones."""
        own_numbers = [numbers for each in self.optimizers for numbers in self._numbers_of(each)]
        saved_numbers = [group["params"] for each in saved for group in each["param_groups"]]
        if list(map(sorted, own_numbers)) != list(map(sorted, saved_numbers)):
            raise StorageError(
                f"{path} was written without FSDP2 by a run that trained a part of its parameters, or other ones than "
                "this run, so the optimizer's state cannot be matched to the parameters. Resume with the strategy and "
                "the model settings of the run's config.yaml, or start a new run from the exported model: "
                "model.name=<run_dir>/hf."
            )

    def _numbers_of(self, optimizer: Optimizer) -> list[list[int]]:
        """Return the numbers of the weights in each group, among all parameters."""
        assert self.model is not None
        numbers = {weight: number for number, weight in enumerate(self.model.parameters())}
        return [[numbers[weight] for weight in group["params"]] for group in optimizer.param_groups]


class FSDPTPStrategy(FSDP2Strategy):
    """A strategy with FSDP2 over one dimension of a mesh, and tensor parallelism over the other.

    The `tp_size` ranks of a tensor-parallel group are neighbours, so that they are on one node. They have the same rows
    and parts of each layer; weights, gradients and the optimizer's state are sharded over all ranks.
    """

    def __init__(
        self,
        tp_size: int = 2,
        fsdp_size: int | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Set up the strategy.

        Args:
            tp_size: Ranks of a tensor-parallel group, at least 2. It divides the devices of a node, and the heads.
            fsdp_size: Ranks over which rows and weights are distributed; "auto" is devices / `tp_size`.
            process_group_backend: See `FSDP2Strategy`.
            kwargs: Further arguments of `FSDP2Strategy`.
        """
        if tp_size < 2:
            raise ConfigError(
                f"trainer.strategy.tp_size={tp_size}: a tensor-parallel group has two ranks or more. Without one, take "
                "strategy=fsdp."
            )
        if kwargs.get("cpu_offload"):
            raise ConfigError(
                "trainer.strategy.cpu_offload=true was never compared with one process under strategy=fsdp_tp. Leave "
                "it out, or take strategy=fsdp."
            )
        super().__init__(process_group_backend=process_group_backend, **kwargs)
        self.tp_size, self.fsdp_size = tp_size, fsdp_size
        self._tensor_parallel_size = tp_size

    def check_sizes(self) -> None:
        """Refuse a mesh that is not as large as the run, before its processes are started.

        Raises:
            ConfigError: names the sizes that fit.
        """
        devices, tp = self.num_processes, self.tp_size
        if devices % tp:
            raise ConfigError(
                f"trainer.strategy.tp_size={tp} does not divide trainer.devices={devices}: a tensor-parallel group is "
                f"on one node. Take a divisor, or trainer.devices={devices + tp - devices % tp}."
            )
        fits = self.num_nodes * devices // tp
        if self.fsdp_size not in ("auto", fits):
            raise ConfigError(
                f"trainer.strategy.fsdp_size={self.fsdp_size} x tp_size={tp} is not the number of processes, "
                f"{self.num_nodes * devices}. Take fsdp_size={fits}, or auto."
            )

    def setup_environment(self) -> None:
        self.check_sizes()
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint as `FSDP2Strategy` does."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        for optimizer in self.optimizers:  # a checkpoint restores the step implementation of its run
            step_one_by_one(optimizer)
        return checkpoint

    @property
    def data_group(self) -> Any:
        """The process group of ranks with different rows; None before the processes are started."""
        return None if self._device_mesh is None else self._device_mesh["data_parallel"].get_group()

    @property
    def tensor_group(self) -> Any:
        """The process group of ranks with the same rows; None before the processes are started."""
        return None if self._device_mesh is None else self._device_mesh["tensor_parallel"].get_group()

    def first_of_group(self, value: Any) -> Any:
        """Return the value of the first rank of this tensor-parallel group. A collective.

        Raises:
            RewardError: on every rank of the group, where it cannot be pickled.
        """
        pickled = broadcast_object(try_pickle(value), self.tensor_group)
        if pickled is None:
            raise RewardError(
                "A value that a reward function passed to log_extra cannot be pickled, and so not be sent to the other "
                "ranks of its tensor-parallel group. Pass numbers and text."
            )
        return pickle.loads(pickled)  # from a rank of this run


def try_pickle(value: Any) -> bytes | None:
    """Pickle a value; None where it cannot be pickled, as results of a user's functions may not be."""
    try:
        return pickle.dumps(value)
    except Exception:  # a user's class may raise anything
        return None


def step_one_by_one(optimizer: Optimizer) -> None:
    """Make an optimizer step each weight by itself: fused and foreach need all weights on one mesh."""
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update({name: False for name in ("fused", "foreach") if name in group})


def check_mesh(strategy: Any) -> None:
    """Refuse a mesh with an unused tensor-parallel part, the default of Lightning's own strategy.

    Its ranks would learn from different rows, and their gradients would not be reduced.

    Raises:
        ConfigError: names the strategies to take, before processes are started.
    """
    if not isinstance(strategy, ModelParallelStrategy) or isinstance(strategy, FSDP2Strategy):
        return
    size = upstream.tensor_parallel_size(strategy)
    if size > 1:
        raise ConfigError(
            f"{type(strategy).__name__}(tensor_parallel_size={size}) asks for tensor parallelism, but this strategy "
            f"splits no layers. Set strategy=fsdp_tp with trainer.strategy.tp_size={size}; or strategy=fsdp, which "
            "has every device in the data-parallel part. In Python these are FSDPTPStrategy and FSDP2Strategy."
        )


# ---------------------------------------------------------------------- properties of strategies


def offload_policy(strategy: Any) -> OffloadPolicy:
    """Return FSDP2's offload policy of a strategy."""
    return strategy.offload_policy if isinstance(strategy, FSDP2Strategy) else OffloadPolicy()


def shards_weights(strategy: Any) -> bool:
    """Tell whether the ranks may hold parts of the weights, so that reading a whole one is a collective."""
    if isinstance(strategy, ZeROStrategy):
        return strategy.stage == 3
    return flattens_weights(strategy) or isinstance(strategy, ModelParallelStrategy)


def flattens_weights(strategy: Any) -> bool:
    """Tell whether a strategy flattens the weights of all modules into one, so that none can be restored alone."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy)


def drop_gradients(optimizer: Any, strategy: Any) -> None:
    """Drop the gradients of a backward pass, so that the optimizer changes neither weights nor moments."""
    if isinstance(strategy, ZeROStrategy):
        strategy.leave_out_step()
    else:
        optimizer.zero_grad()
