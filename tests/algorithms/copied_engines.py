"""An engine with weights of its own: a copy of the policy, taken over at each sync, in another precision if asked."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import nn

from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.native import NativeGenerator


class CopiedPolicyGenerator(NativeGenerator):
    """Decodes with a copy of the policy as it was at the last sync.

    Args:
        dtype: Of the copy's weights. bfloat16 makes samples of a slightly other policy.
        lag: As `generator.lag`.
    """

    exact = False

    def __init__(self, dtype: torch.dtype = torch.float32, lag: int = 0) -> None:
        super().__init__()
        self.dtype, self.lag = dtype, lag
        self.copied: Any = None
        self.synced: list[int] = []
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"copied": None, "lock": None}

    def sync(self, policy: nn.Module, version: int) -> None:
        with self.lock:
            self.copied = copy.deepcopy(policy).to(self.dtype)
            self.synced.append(version)
            super().sync(self.copied, version)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        with self.lock:
            return super().generate(prompts, sampling)
