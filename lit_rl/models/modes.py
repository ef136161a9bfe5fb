"""Modes of a model: evaluation for a while, dropout, and gradient checkpointing.

Under gradient checkpointing (1604.06174) a layer keeps its input alone, and the backward pass computes the rest anew.
With ``offload`` that input waits in the memory of the host. A layer's input is copied once each way, ``b s d``
numbers, on the stream that computes: a cost that grows with the length of a text, where that of its attention grows
with the square. The host needs memory for the inputs of all layers of a micro-batch, pinned. GPU-untested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, inside; at the end every part is in its former mode, also after an error."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Part by part: `model.train()` would also wake what somebody froze in evaluation mode.
        for part, training in modes:
            part.training = training


def drops_out(module: nn.Module) -> bool:
    """Tell whether training mode changes the output of a module, as far as its probabilities of dropout tell."""
    return any(
        isinstance(value, float) and value > 0
        for part in module.modules()
        for key, value in vars(part).items()
        if "dropout" in key or (isinstance(part, nn.Dropout) and key == "p")
    )


def disable_dropout(module: nn.Module) -> None:
    """Set every dropout probability to 0: modules of dropout, and the numbers that attention layers keep."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for key, value in list(vars(part).items()):
            if "dropout" in key and isinstance(value, float):
                setattr(part, key, 0.0)


def set_checkpointing(module: nn.Module, how: bool | Literal["offload"]) -> None:
    """Switch gradient checkpointing of every transformer in a module on or off.

    Not the reentrant kind: it would give a LoRA policy no gradient, as the embedding that feeds its layers is frozen.

    Args:
        module: A model, or what holds some.
        how: Off, on, or on with what layers keep on the host.
    """
    from transformers import PreTrainedModel

    for part in module.modules():
        if not isinstance(part, PreTrainedModel) or not part.supports_gradient_checkpointing:
            continue
        # The model's own switch: transformers 5.24 names it "activation", earlier releases "gradient".
        kind = "activation" if hasattr(part, "activation_checkpointing_enable") else "gradient"
        if how:
            switch = getattr(part, f"{kind}_checkpointing_enable")
            switch(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
        elif recomputes(part):
            getattr(part, f"{kind}_checkpointing_disable")()
        if how == "offload":
            part._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=offloaded_checkpoint)


def recomputes(model: nn.Module) -> bool:
    """Tell whether gradient checkpointing of a model is on."""
    on = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if on is None else on)


def offloaded_checkpoint(function: Any, *inputs: Any, **others: Any) -> Any:
    """Apply ``torch.utils.checkpoint`` to a layer whose input waits on the host."""
    with OffloadToHost():
        return checkpoint(function, *inputs, use_reentrant=False, **others)


class OffloadToHost(torch.autograd.graph.saved_tensors_hooks):
    """A context in which tensors for the backward pass of a checkpoint are kept in pinned memory of the host.

    Only what carries a gradient is: masks and angles of positions are the same tensor in every layer.

    No copy needs an event of its own. Autograd runs the backward pass of a layer on the stream of its forward pass, so
    both copies and the work before and behind them are in one stream; and PyTorch gives neither side's memory to others
    before the copy is over: the device's by its stream, the host's by an event that it records for pinned memory.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def away(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is to be moved."""
        return tensor.requires_grad and tensor.device.type == "cuda"

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        if not self.away(tensor):
            return tensor.device, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=host.is_pinned())

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        device, kept = packed
        return kept.to(device, non_blocking=True)
