"""What the KL of an objective is measured against: the policy as it was before the first update.

A reference is asked twice: once at setup, for the module to register beside the policy (if there is one), and at every
scoring, for the module to call. So an algorithm needs no branch, and the KL is 0 at step 0 in every mode.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from torch import nn

from lit_rl.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel


class Reference(Protocol):
    """The protocol. Call `module` on the initial policy: before a checkpoint is restored, and before sharding."""

    def module(self, policy: nn.Module) -> nn.Module | None:
        """The frozen module to register, place and shard like the policy. None where the policy itself serves."""
        ...

    def scoring(self, policy: nn.Module, module: nn.Module | None) -> AbstractContextManager[nn.Module]:
        """While open, the module that it yields computes the reference's logits. ``module`` is what `module` gave."""
        ...


class FrozenCopy:
    """A frozen copy of the initial policy, adapters included. Weights that nothing trains are shared, not copied."""

    def module(self, policy: nn.Module) -> nn.Module:
        # Parameters in the memo are taken as they are: with an adapter, the copy costs no more than the adapter.
        frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
        return copy.deepcopy(policy, memo=frozen).eval().requires_grad_(False)

    @contextmanager
    def scoring(self, policy: nn.Module, module: nn.Module | None) -> Iterator[nn.Module]:
        assert module is not None, "FrozenCopy scores with the module that it made"
        yield module


class AdapterBase:
    """The policy with its adapters switched off: no second model. It is the initial policy only for fresh adapters."""

    def module(self, policy: nn.Module) -> None:
        """Raises ConfigError for a policy without adapters."""
        _require_peft(policy)

    @contextmanager
    def scoring(self, policy: nn.Module, module: nn.Module | None) -> Iterator[nn.Module]:
        was_training = policy.training
        policy.eval()
        try:
            with _require_peft(policy).disable_adapter():
                yield policy
        finally:
            policy.train(was_training)


class Auto:
    """`AdapterBase` where the policy carries adapters that change nothing yet (``model.lora``), else `FrozenCopy`.

    A policy that continues a trained adapter (``model.adapter``) is measured against that adapter, not its base.
    """

    def module(self, policy: nn.Module) -> nn.Module | None:
        return None if carries_fresh_adapter(policy) else FrozenCopy().module(policy)

    @contextmanager
    def scoring(self, policy: nn.Module, module: nn.Module | None) -> Iterator[nn.Module]:
        reference: Reference = AdapterBase() if module is None else FrozenCopy()
        with reference.scoring(policy, module) as scorer:
            yield scorer


def carries_fresh_adapter(policy: nn.Module) -> bool:
    """True for a LoRA policy that still equals its base: every ``lora_B`` is zero, as initialised."""
    up = [p for name, p in policy.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name]
    return bool(up) and not any(p.any() for p in up)


def _require_peft(policy: nn.Module) -> PeftModel:
    from peft import PeftModel

    if not isinstance(policy, PeftModel):
        raise ConfigError(
            "reference=adapter_base measures KL against the policy without its adapters, but the policy has none. "
            "Set model.lora, or use reference=frozen_copy."
        )
    return policy
