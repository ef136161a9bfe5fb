"""Weights in bfloat16 whose optimizer steps in float32.

A bfloat16 weight ``w`` has a float32 master ``m``, and the user's optimizer (any of `optim.optimizers`) moves masters:

    m <- m + update(m, g)        g the gradient, summed in float32 over all micro-batches and ranks
    w <- round(m)                to the nearest bfloat16, after every step

So small updates add up in ``m`` until ``w`` takes the next of its values, and nothing is added that float32 weights
would not add. What computes (forward passes, the in-process generator, the export) reads ``w``. A trained weight takes
2 bytes, its master 4 and its gradient 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_rl.algorithms.optim.optimizers import AdamWSplit, OptimizerFactory
from lit_rl.algorithms.optim.split_adamw import SplitAdamW
from lit_rl.errors import StorageError

MASTER = "master"
"""The masters' key in the state of the optimizer."""

_MASTERS = (MASTER, "remainder")

_BUCKET = 1 << 23


def with_masters(make: OptimizerFactory, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """The optimizer of these groups; inside a `MasterWeights` where a parameter is bfloat16 and it keeps no masters.

    Gradients of bfloat16 parameters are float32 from now on (`Tensor.grad_dtype`), and so are their sums.

    Args:
        make: Makes the optimizer.
        groups: Parameter groups.
    """
    held = [{**group, "params": list(group["params"])} for group in groups]
    narrow = [weight for group in held for weight in group["params"] if is_narrow(weight)]
    for weight in narrow:
        weight.grad_dtype = torch.float32
    return MasterWeights(make, held) if narrow and not getattr(make, "keeps_masters", False) else make(held)


def check_masters(
    optimizer_states: Iterable[Mapping[str, Any]], weights: Iterable[Tensor], make: OptimizerFactory
) -> None:
    """Refuse to go on where the masters and moments that a checkpoint keeps would be dropped or misread.

    Args:
        optimizer_states: Of the checkpoint.
        weights: What is trained now.
        make: Makes the optimizer of this run.

    Raises:
        StorageError: no trained weight is bfloat16, and an optimizer has masters, or remainders that make them; or one
            of the two is `SplitAdamW`, whose state no other optimizer can read, and the other is not.
    """
    kept = _kept(optimizer_states)
    was_split, is_split = SplitAdamW.BOUND in kept, isinstance(make, AdamWSplit)
    if kept and was_split != is_split:
        names = {True: "optimizer=adamw_split", False: "another optimizer"}
        raise StorageError(
            f"The checkpoint was written with {names[was_split]}, and this run has {names[is_split]}: neither can read "
            "the other's state. Resume with the optimizer of the run's config.yaml, or start a new run from the "
            "exported model: model.name=<run_dir>/hf."
        )
    if kept.isdisjoint(_MASTERS) or any(is_narrow(weight) for weight in weights):
        return
    raise StorageError(
        "The checkpoint's optimizer keeps float32 masters of bfloat16 weights, and this run trains float32 weights: "
        "the masters would be lost. Resume with the trainer.precision and model.dtype of the run's config.yaml, or "
        "start a new run from the exported model: model.name=<run_dir>/hf."
    )


def holds_masters(optimizer_states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the optimizers of a checkpoint keep masters, or remainders that make them."""
    return not _kept(optimizer_states).isdisjoint(_MASTERS)


def _kept(optimizer_states: Iterable[Mapping[str, Any]]) -> set[str]:
    """What they keep of their weights, by name."""
    return {key for state in optimizer_states for one in state["state"].values() for key in one}


def is_narrow(weight: Tensor) -> bool:
    """Whether a master stands for it."""
    return weight.dtype == torch.bfloat16


def average_over_ranks(weights: Iterable[Tensor], world_size: int) -> None:
    """Replace the gradient of every weight by its mean over the ranks, in the gradient's own type. A collective.

    A weight without a gradient counts as one of 0, unless no weight has one.
    """
    held = list(weights)
    if all(weight.grad is None for weight in held):
        return
    for weight in held:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    for gradients in _buckets([weight.grad for weight in held if weight.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        parts = flat.div_(world_size).split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
        )


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours, about `_BUCKET` numbers together: one message each, and little memory beside the gradients."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(part.numel() for part in bucket) >= _BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class MasterWeights(Optimizer):
    """An optimizer over weights in bfloat16, around one over their float32 masters; other weights it moves itself.

    `param_groups` hold the weights: schedules, clipping and `zero_grad` work as with any optimizer. Gradients
    have to be float32, see `with_masters`. `state` holds for each weight what the inner optimizer keeps, and its
    master; it is the whole state, and restoring it is exact. Masters begin as the weights of the first step. Weights
    that something else changes after it go back to round(master) with the next step.

    Args:
        make: Makes the inner optimizer.
        groups: Parameter groups.
    """

    def __init__(self, make: OptimizerFactory, groups: list[dict[str, Any]]) -> None:
        weights = [weight for group in groups for weight in group["params"]]
        self._stands_for: dict[Tensor, Tensor] = {weight: _master_of(weight) for weight in weights}
        """Each weight's master, in the order of the groups; a weight that is not bfloat16 is its own."""
        moved = [{**group, "params": [self._stands_for[weight] for weight in group["params"]]} for group in groups]
        self.inner = make(moved)
        super().__init__(groups, self.inner.defaults)
        self._begun = False
        self._copy_settings(self.inner.param_groups, self.param_groups)

    @property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Bfloat16 weights and their masters."""
        return [(weight, master) for weight, master in self._stands_for.items() if weight is not master]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of the inner optimizer. A weight without a gradient stays, and so does its master."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        pairs = [pair for pair in self._pairs if pair[0].grad is not None]
        self._begin()
        for weight, master in pairs:
            master.grad = weight.grad
        self._copy_settings(self.param_groups, self.inner.param_groups)
        self.inner.step()
        self._copy_settings(self.inner.param_groups, self.param_groups)
        if pairs:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [weight for weight, _ in pairs], [master for _, master in pairs]
            )
        for _, master in pairs:
            master.grad = None
        self._show_state()
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, each tensor in the type that it was kept in.

        The inner optimizer reads it, whose parameters are the masters: `Optimizer.load_state_dict` casts state to the
        type of the parameter, which would round masters and moments. A state without masters (of a run with float32
        weights) makes them of the weights as they are now.
        """
        self.inner.load_state_dict(state_dict)
        self._copy_settings(self.inner.param_groups, self.param_groups)
        kept = {master: self.inner.state.get(master, {}).pop(MASTER, None) for _, master in self._pairs}
        self._begun = False
        if any(values is not None for values in kept.values()):
            self._begin()
        for master, values in kept.items():
            if values is not None:
                master.copy_(values)
        self._show_state()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            for weight, master in self._pairs:
                master.copy_(weight)

    def _show_state(self) -> None:
        """The inner optimizer's state under the names of the weights, not copied."""
        self.state.clear()
        for weight, master in self._stands_for.items():
            kept = dict(self.inner.state.get(master, {}))
            if weight is not master and self._begun:
                kept[MASTER] = master.data
            if kept:
                self.state[weight] = kept

    @staticmethod
    def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Learning rates and all else but the parameters, from one optimizer's groups to the other's."""
        for theirs, ours in zip(source, target, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})


def _master_of(weight: Tensor) -> Tensor:
    if not is_narrow(weight):
        return weight
    return nn.Parameter(weight.detach().float())
