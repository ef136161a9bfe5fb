"""Strategies that Lightning has, set up the way a policy needs them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy


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
    return flattens(strategy) or isinstance(strategy, ModelParallelStrategy)


def flattens(strategy: Any) -> bool:
    """Whether it flattens the weights of all modules into one, so that none of them can be given back alone."""
    return isinstance(strategy, FSDPStrategy | DeepSpeedStrategy)
