"""The content of an update of an engine: all weights, or the adapter alone once the base is there."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from lit_rl.errors import ConfigError
from lit_rl.generation import ranks
from lit_rl.generation.vllm.engine import Engine, Facts, Weights, push_adapter, push_weights
from lit_rl.generation.vllm.host import shared_memory
from lit_rl.models.export.adapter_folder import adapter_only, write_adapter

PUSHES = ("auto", "adapter", "merged")


class Sender:
    """A sender of a policy's weights to an engine.

    Args:
        push: "adapter", "merged", or "auto": the adapter alone where the engine can run it.
    """

    def __init__(self, push: str) -> None:
        self._push = push
        self._base_is_there = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def forget(self) -> None:
        """Forget what the engine holds: it has lost its weights."""
        self._base_is_there = False

    def __call__(self, engine: Engine, facts: Facts, weights: Weights, version: int, *, sends: bool) -> None:
        """Send the weights; `sends` is False on ranks whose engine another rank sends to. A collective.

        Raises:
            GenerationError: the engine did not take them.
            ConfigError: the adapter alone is wanted, and cannot be sent.
        """
        if not self.by_adapter(weights.policy, facts):
            self._send(engine, weights, version, sends)
            return
        if not self._base_is_there:
            self._send(engine, Weights(weights.policy, weights.dtype, base_only=True), version, sends)
            self._base_is_there = True
        self._send_adapter(engine, weights.policy, version, sends)

    def _send(self, engine: Engine, weights: Weights, version: int, sends: bool) -> None:
        def work() -> None:
            if sends:
                push_weights(engine, weights, version)
            else:
                for _ in weights:  # gathering them is a collective
                    pass

        ranks.together(work)

    def _send_adapter(self, engine: Engine, policy: nn.Module, version: int, sends: bool) -> None:
        # Kept until the next one is there: a server reads it again whenever it makes room for the adapter.
        before = self._folder
        self._folder = tempfile.TemporaryDirectory(prefix="lit_rl_adapter_", dir=shared_memory())
        folder = ranks.gather_objects(self._folder.name)[0]  # rank 0 writes, for all of one machine
        write_adapter(policy, folder)
        # Together, because who has not read the folder yet must find it.
        ranks.together(lambda: push_adapter(engine, folder, version) if sends else None)
        if before is not None:
            before.cleanup()

    def by_adapter(self, policy: nn.Module, facts: Facts) -> bool:
        """Tell whether the adapter is sent by itself."""
        why = adapter_only(policy)
        rank, room = rank_of_adapter(policy), facts.max_lora_rank or 0
        if why is None and rank is not None and rank > room:
            why = f"its rank is {rank}, and the engine has room for {room}: raise generator.max_lora_rank"
        if self._push == "adapter" and why is not None:
            raise ConfigError(f"generator.push=adapter: the adapter cannot be sent by itself: {why}. Take merged.")
        return self._push != "merged" and why is None


def rank_of_adapter(policy: nn.Module) -> int | None:
    """Return the highest rank of an adapter that an engine can run by itself; None where the policy has none."""
    if adapter_only(policy) is not None:
        return None
    lora: Any = policy
    config = lora.peft_config[lora.active_adapter]
    return max(config.r, *(config.rank_pattern or {}).values(), 0)


def torch_dtype(name: str) -> torch.dtype:
    """Return ``torch.float32`` for "float32"."""
    return getattr(torch, name)
