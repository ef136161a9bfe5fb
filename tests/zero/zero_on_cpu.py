"""DeepSpeed's engine on processes of the CPU: what is tested here is real but for these three methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy

from lit_rl.algorithms.optim.strategies import ZeROStrategy


class ZeROOnCPU(ZeROStrategy):
    """`ZeROStrategy` without Lightning's refusal of the CPU and its check of GPU numbers.

    Every parameter is taken apart: DeepSpeed would leave those of a small policy whole on every rank.
    """

    def __init__(self, stage: int = 2, **kwargs: Any) -> None:
        super().__init__(stage, process_group_backend="gloo", **kwargs)
        assert isinstance(self.config, dict)
        self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        self.seen = {"apart": 0, "gathered_times": 0}
        """How often weights were apart before they were asked for whole, and how often they were then gathered."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        weights = [p for p in self.lightning_module.policy.parameters() if hasattr(p, "ds_id")]
        apart = any(weight.numel() < weight.ds_numel for weight in weights)
        with super().whole():
            assert all(weight.shape == weight.ds_shape for weight in weights)
            self.seen["apart"] += apart
            yield
            self.seen["gathered_times"] += apart and all(weight.shape == weight.ds_shape for weight in weights)

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def check_device(self) -> None:
        """There is none to check."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()
