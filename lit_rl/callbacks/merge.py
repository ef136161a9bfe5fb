"""An export of the trained weights merged with the initial ones, when the training ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L
from torch import Tensor

from lit_rl.callbacks.averaged import AveragedWeights
from lit_rl.errors import ConfigError, in_range


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

    def __init__(self, folder: str | None = None, share: float = 0.5) -> None:
        super().__init__(folder)
        in_range("callbacks.merge.share", share, low=0, high=2)
        self.share = share

    @property
    def told(self) -> str:
        return f"{self.share:g} of the way from the initial weights to the trained ones"

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        model = getattr(pl_module, "model", None)
        if getattr(model, "lora", None) is not None or getattr(model, "adapter", None) is not None:
            raise ConfigError(
                "callbacks=merge goes along a line between weights, and the two factors of an adapter multiply: their "
                "line is another one. Merge a share of an adapter by its scale instead (lora_alpha in "
                "adapter_config.json, times the share), or train without model.lora and model.adapter."
            )

    def move(self, kept: Mapping[str, Tensor], weight: Tensor, step: int) -> None:
        """Do nothing: the initial weights are kept as they are."""

    def exported(self, pl_module: Any) -> dict[str, Tensor]:
        now = {name: weight.detach().float() for name, weight in self._weights(pl_module).items()}
        start = self._kept["initial"]
        return self._on_cpu({name: start[name] + self.share * (weight - start[name]) for name, weight in now.items()})
