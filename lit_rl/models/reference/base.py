"""What the KL of an objective is measured against: the policy as it was before the first update, or what follows it.

A reference is asked three times: at setup, for the module to hold beside the policy (if there is one); at every
scoring, for the module to call; and after every optimizer step, to follow the policy if it does. So an algorithm needs
no branch, and the KL is 0 at step 0 in every mode. References that follow are in `lit_rl.models.reference.moving`, one
with weights of its own is in `lit_rl.models.reference.other_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from lit_rl.errors import ConfigError
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.trunk import trained_of_base

if TYPE_CHECKING:
    from peft import PeftModel


class OnCPU:
    """A model that stays on the CPU and is called from any device: inputs go to it, logits come back.

    It is no `nn.Module`, so the module that holds it neither moves, shards nor saves it. Autocast is the caller's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.to("cpu")

    def __call__(self, **inputs: Any) -> Any:
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        with torch.autocast(
            "cpu",
            dtype=torch.get_autocast_dtype(device.type),
            enabled=torch.is_autocast_enabled(device.type),
        ):
            output = self.model(**move_data_to_device(inputs, torch.device("cpu")))
        output.logits = output.logits.to(device)
        return output

    @property
    def training(self) -> bool:
        return self.model.training

    def train(self, mode: bool = True) -> OnCPU:
        self.model.train(mode)
        return self

    def eval(self) -> OnCPU:
        return self.train(False)

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()


Scorer = nn.Module | OnCPU
"""The module that computes a reference's logits: called like the policy."""


class Reference(Protocol):
    """The protocol. Call `module` on the initial policy: before a checkpoint is restored, and before sharding."""

    moves: ClassVar[bool]
    """True where it follows the policy, so that a checkpoint must hold its `state`."""

    def module(self, policy: nn.Module) -> Scorer | None:
        """Return the frozen module to hold. None where the policy itself serves.

        An `nn.Module` is to be registered, placed and sharded like the policy; an `OnCPU` is left where it is.
        """
        ...

    def scoring(self, policy: nn.Module, module: Scorer | None) -> AbstractContextManager[Scorer]:
        """Yield the module that computes the reference's logits. ``module`` is the result of `module`."""
        ...

    def update(self, policy: nn.Module, module: Scorer | None, step: int) -> None:
        """Follow the policy, after ``step`` optimizer steps. Every rank calls it after every step."""
        ...

    def state(self, module: Scorer | None) -> dict[str, Tensor]:
        """Return the moved tensors, for a checkpoint: whole, on the CPU. Every rank calls it."""
        ...

    def load_state(self, module: Scorer | None, state: dict[str, Tensor]) -> None:
        """Load the result of `state`."""
        ...


class Fixed:
    """The part of the protocol for a reference that never moves."""

    moves: ClassVar[bool] = False

    def update(self, policy: nn.Module, module: Scorer | None, step: int) -> None:
        """Do nothing: it never moves."""

    def state(self, module: Scorer | None) -> dict[str, Tensor]:
        return {}

    def load_state(self, module: Scorer | None, state: dict[str, Tensor]) -> None:
        """Do nothing: there is no state."""


class Held:
    """A second module, on the policy's device or on the CPU.

    Args:
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.
    """

    def __init__(self, device: Literal["cpu"] | None = None) -> None:
        if device not in (None, "cpu"):
            raise ConfigError(f"reference.device={device!r} is unknown: allowed is cpu, or null for the policy's own.")
        self.device: Literal["cpu"] | None = device

    def copied(self, policy: nn.Module) -> nn.Module:
        """Return a copy, which shares weights that nothing trains, unless it is to stay behind when the policy
        moves."""
        return shared_copy(policy) if self.device is None else copy.deepcopy(policy)

    def hold(self, model: nn.Module) -> Scorer:
        """Return the model frozen, and where it belongs."""
        model = model.eval().requires_grad_(False)
        return OnCPU(model) if self.device == "cpu" else model

    @contextmanager
    def scoring(self, policy: nn.Module, module: Scorer | None) -> Iterator[Scorer]:
        assert module is not None, f"{type(self).__name__} scores with the module that it made"
        module.eval()  # the module that holds it may have called train() on all its parts
        yield module


class Copy(Held):
    """A copy of the initial policy, adapters included. Weights that nothing trains are shared, not copied."""

    def module(self, policy: nn.Module) -> Scorer:
        return self.hold(self.copied(policy))


class FrozenCopy(Copy, Fixed):
    """A frozen copy of the initial policy, adapters included. Weights that nothing trains are shared, not copied.

    Args:
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.
    """


class InitialAdapter(FrozenCopy):
    """A frozen copy of the initial adapter, over the policy's own base: for a policy that continues a trained adapter.

    `FrozenCopy` does the same where the policy has adapters. This one refuses a policy without, so it can never cost a
    second model. It stands beside the policy and not inside: the policy's adapters, flags and exports never know of it.
    Under FSDP2 the shared base is sharded once more.
    """

    def __init__(self) -> None:
        super().__init__()

    def module(self, policy: nn.Module) -> Scorer:
        """Return a frozen copy. Raise ConfigError for a policy without adapters."""
        return super().module(_require_peft(policy, "initial_adapter", "the adapters that it began with"))


class AdapterBase(Fixed):
    """The policy with its adapters switched off: no second model. It is the initial policy only for fresh adapters."""

    def module(self, policy: nn.Module) -> None:
        """Raise ConfigError for a policy without adapters, or with weights of its base that are trained too."""
        _require_peft(policy, "adapter_base", "itself without its adapters")
        if trained := trained_of_base(policy):
            raise ConfigError(
                "reference=adapter_base measures the policy's KL against itself without its adapters, and "
                f"{len(trained)} weights of its base are trained beside them ({', '.join(trained[:3])}): the reference "
                "would move with them. Use reference=frozen_copy."
            )

    @contextmanager
    def scoring(self, policy: nn.Module, module: Scorer | None) -> Iterator[Scorer]:
        adapted = _require_peft(policy, "adapter_base", "itself without its adapters")
        trained = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
        try:
            with evaluation_mode(policy), adapted.disable_adapter():
                yield policy
        finally:
            for parameter, flag in trained:  # switching adapters on again makes every part of them trainable
                parameter.requires_grad_(flag)


class Auto(Held, Fixed):
    """`AdapterBase` where the policy carries adapters that change nothing yet (``model.lora``), else `FrozenCopy`.

    A policy that continues a trained adapter (``model.adapter``) is measured against that adapter, not its base.

    Args:
        device: Where the frozen copy is held, if there is one: "cpu", or null for the policy's own device.
    """

    def module(self, policy: nn.Module) -> Scorer | None:
        return None if carries_fresh_adapter(policy) else FrozenCopy(self.device).module(policy)

    @contextmanager
    def scoring(self, policy: nn.Module, module: Scorer | None) -> Iterator[Scorer]:
        reference: Reference = AdapterBase() if module is None else FrozenCopy(self.device)
        with reference.scoring(policy, module) as scorer:
            yield scorer


class ReferenceFree(Fixed):
    """No reference: its log-probs count as 0, so that log ratios are the policy's log-probs."""

    def module(self, policy: nn.Module) -> None:
        return None

    def scoring(self, policy: nn.Module, module: Scorer | None) -> AbstractContextManager[Scorer]:
        raise ConfigError(
            "reference=free computes no log-probs, and this algorithm needs them: take another reference, such as auto."
        )


def shared_copy(policy: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters without gradient: with an adapter, it costs no more than the adapter."""
    # Parameters in the memo are taken as they are.
    frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
    return copy.deepcopy(policy, memo=frozen)


def carries_fresh_adapter(policy: nn.Module) -> bool:
    """Tell whether a LoRA policy equals its base, and its base stays: every ``lora_B`` is zero, as initialised."""
    if trained_of_base(policy):
        return False
    up = [p for name, p in policy.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name]
    return bool(up) and not any(p.any() for p in up)


def _require_peft(policy: nn.Module, choice: str, what: str) -> PeftModel:
    from peft import PeftModel

    if not isinstance(policy, PeftModel):
        raise ConfigError(
            f"reference={choice} measures the policy's KL against {what}, but the policy has no adapters. "
            "Set model.lora or model.adapter, or use reference=frozen_copy."
        )
    return policy
