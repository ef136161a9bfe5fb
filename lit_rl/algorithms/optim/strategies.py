"""Lightning's strategies, set up as a policy needs them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim import Optimizer

from lit_rl.algorithms.optim.zero import ZeROStrategy
from lit_rl.errors import ConfigError, RewardError, StorageError
from lit_rl.models.policy.sharding import move_all_but_shards, unsharded


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
        """The ranks over which reward models are sharded; None before the processes are started, and where ranks share
        rows."""
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

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
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
        return self._load_settings_alone(checkpoint_path, weights_only, saved)

    def _load_settings_alone(
        self, checkpoint_path: _PATH, weights_only: bool | None, saved: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Load only settings of optimizers without state, as SGD without momentum: torch asks state for a device."""
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        finally:
            self.optimizers = optimizers
        for optimizer, of_file in zip(optimizers, saved, strict=True):
            for group, settings in zip(optimizer.param_groups, of_file["param_groups"], strict=True):
                group.update({name: value for name, value in settings.items() if name != "params"})
        return checkpoint

    def _check_numbers(self, path: Path, saved: Sequence[dict[str, Any]]) -> None:
        """Check an optimizer's parameter numbers: Lightning counts all parameters, others only trained ones."""
        ours = [numbers for each in self.optimizers for numbers in self._numbers_of(each)]
        theirs = [group["params"] for each in saved for group in each["param_groups"]]
        if list(map(sorted, ours)) != list(map(sorted, theirs)):
            raise StorageError(
                f"{path} was written without FSDP2 by a run that trains a part of its parameters, or trains other ones "
                "than this run: which of them its optimizer means cannot be told. Go on with the strategy and the "
                "model settings of the run's config.yaml, or start a new run from the exported model: "
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

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
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

    def first_of_group(self, mine: Any) -> Any:
        """Return the value of the first rank of this tensor-parallel group. A collective.

        Raises:
            RewardError: on every rank of the group, where it cannot be pickled.
        """
        held: list[Any] = [pickled(mine)]
        torch.distributed.broadcast_object_list(held, group=self.tensor_group, group_src=0)
        if held[0] is None:
            raise RewardError(
                "What a reward function gave log_extra cannot be sent to the other rank of its tensor-parallel group: "
                "give it numbers and text."
            )
        return pickle.loads(held[0])  # from a rank of this run


def pickled(value: Any) -> bytes | None:
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
    asked = strategy._tensor_parallel_size
    size = strategy.num_processes if isinstance(asked, str) else asked  # "auto"
    if size > 1:
        raise ConfigError(
            f"{type(strategy).__name__}(tensor_parallel_size={size}) has ranks that share rows, and it is not told how "
            f"layers are cut. Take strategy=fsdp_tp with trainer.strategy.tp_size={size}; or strategy=fsdp, which has "
            "every device in the data-parallel part. In Python these are FSDPTPStrategy and FSDP2Strategy."
        )


def offload_policy(strategy: Any) -> OffloadPolicy:
    """Return FSDP2's offload policy of a strategy."""
    return strategy.offload_policy if isinstance(strategy, FSDP2Strategy) else OffloadPolicy()


def shards(strategy: Any) -> bool:
    """Tell whether the ranks may hold parts of the weights, so that reading a whole one is a collective."""
    if isinstance(strategy, ZeROStrategy):
        return strategy.stage == 3
    return flattens(strategy) or isinstance(strategy, ModelParallelStrategy)


def flattens(strategy: Any) -> bool:
    """Tell whether a strategy flattens the weights of all modules into one, so that none can be restored alone."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy)


def whole_weights(strategy: Any, model: nn.Module) -> AbstractContextManager[None]:
    """Hold every parameter of a model whole on every rank: gathered once, not once a generated token.

    Does nothing where every rank has whole ones; else a collective.
    """
    return strategy.whole() if isinstance(strategy, ZeROStrategy) else unsharded(model)
