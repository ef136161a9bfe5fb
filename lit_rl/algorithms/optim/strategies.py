"""Strategies that Lightning has, set up the way a policy needs them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from lit_rl.algorithms.optim.zero import ZeROStrategy
from lit_rl.models.policy.sharding import unsharded


class FSDP2Strategy(ModelParallelStrategy):
    """`ModelParallelStrategy` with every device in the data-parallel mesh, which is FSDP2, and whole checkpoints.

    Lightning's own default is the other way round: all devices of a node in the tensor-parallel mesh.
    """

    def __init__(self, process_group_backend: str | None = None, **kwargs: Any) -> None:
        """`process_group_backend`: None lets torch choose (nccl on GPUs, gloo on CPUs)."""
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            **kwargs,
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shards(strategy: Any) -> bool:
    """Whether the ranks may hold parts of the weights, so that to read a whole one takes all of them."""
    if isinstance(strategy, ZeROStrategy):
        return strategy.stage == 3
    return flattens(strategy) or isinstance(strategy, ModelParallelStrategy)


def flattens(strategy: Any) -> bool:
    """Whether it flattens the weights of all modules into one, so that none of them can be given back alone."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy)


def whole_weights(strategy: Any, model: nn.Module) -> AbstractContextManager[None]:
    """Hold every parameter of a model whole on every rank: gathered once, not once a generated token.

    Does nothing where every rank has whole ones. A collective where not.
    """
    return strategy.whole() if isinstance(strategy, ZeROStrategy) else unsharded(model)
