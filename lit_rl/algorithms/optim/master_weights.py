"""Weights in bfloat16 whose optimizer steps in float32, and `trainer.precision=bf16-true`, which means them.

A bfloat16 weight ``w`` has a float32 master ``m``, and the user's optimizer (any of `optim.optimizers`) moves masters:

    m <- m + update(m, g)        g the gradient, summed in float32 over all micro-batches and ranks
    w <- round(m)                to the nearest bfloat16, after every step

So small updates add up in ``m`` until ``w`` takes the next of its values, and nothing is added that float32 weights
would not add. Forward passes, the in-process generator and the export read ``w``. Between steps a master is its weight
and a 16-bit remainder (`optim.split_adamw`), and a step makes the masters of some weights at a time, or of slices of a
large one. A trained weight takes 2 bytes, its remainder 2 and its gradient 4.

Under bf16-true the weights are bfloat16, and nothing else (`BFloat16Weights`). Lightning's own plugin would make
bfloat16 of everything: of the frequencies of position embeddings (wrong by up to 1/512), of rewards and advantages
that are made while it is in force, and of the float columns of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import LBFGS, Optimizer

from lit_rl.algorithms.optim.optimizers import AdamWSplit, OptimizerFactory
from lit_rl.algorithms.optim.split_adamw import SplitAdamW, join, split
from lit_rl.core import upstream
from lit_rl.core.errors import ConfigError, StorageError

REMAINDER = "remainder"
"""Key of the remainder of a weight's master, in the optimizer's state."""

BUCKET = 1 << 23
"""Approximate numbers of gradients in one message, and of masters that exist at a time."""


def with_masters(make: OptimizerFactory, groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Make the optimizer of these groups, in a `MasterWeights` if a parameter is bfloat16 and it keeps no masters.

    Gradients of bfloat16 parameters are float32 from now on (`Tensor.grad_dtype`), and so are their sums.

    Args:
        make: Factory of the optimizer.
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
    """Refuse a resume in which the masters and moments of a checkpoint would be dropped or misread.

    Args:
        optimizer_states: Optimizer states of the checkpoint.
        weights: Trained weights of this run.
        make: Factory of this run's optimizer.

    Raises:
        StorageError: no trained weight is bfloat16, and an optimizer has remainders; or one of the two is
            `SplitAdamW`, whose state no other optimizer can read, and the other is not.
    """
    state_keys = {key for state in optimizer_states for one in state["state"].values() for key in one}
    was_split, is_split = SplitAdamW.BOUND in state_keys, isinstance(make, AdamWSplit)
    if state_keys and was_split != is_split:
        names = {True: "optimizer=adamw_split", False: "another optimizer"}
        raise StorageError(
            f"The checkpoint was written with {names[was_split]}, and this run has {names[is_split]}: neither can read "
            "the other's state. Resume with the optimizer of the run's config.yaml, or start a new run from the "
            "exported model: model.name=<run_dir>/hf."
        )
    if REMAINDER not in state_keys or any(is_narrow(weight) for weight in weights):
        return
    raise StorageError(
        "The checkpoint's optimizer keeps float32 masters of bfloat16 weights, and this run trains float32 weights: "
        "the masters would be lost. Resume with the trainer.precision and model.dtype of the run's config.yaml, or "
        "start a new run from the exported model: model.name=<run_dir>/hf."
    )


def is_narrow(weight: Tensor) -> bool:
    """Tell whether a weight has a master."""
    return weight.dtype == torch.bfloat16


def averages_gradients(optimizer: Any, strategy: Any) -> bool:
    """Tell whether `average_over_ranks` is needed: DDP would reduce gradients in the narrow dtype of weights."""
    narrow = any(is_narrow(weight) for group in optimizer.param_groups for weight in group["params"])
    return narrow and isinstance(strategy, DDPStrategy)


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
        upstream.copy_tensors(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours of about `BUCKET` numbers in sum, at least one: few at a time need little memory."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        bucket.append(tensor)
        if sum(part.numel() for part in bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class MasterWeights(Optimizer):
    """An optimizer of bfloat16 weights, around one of their float32 masters; other weights are moved directly.

    `param_groups` hold the weights: schedules, clipping and `zero_grad` work as with any optimizer. Gradients
    have to be float32, see `with_masters`. `state` holds for each weight what the inner optimizer keeps, and its
    remainder; it is the whole state, and restoring it is exact. Masters begin as the weights of their first step.

    Args:
        make: Factory of the inner optimizer.
        groups: Parameter groups.

    Raises:
        ConfigError: the inner optimizer computes the loss several times a step.
    """

    def __init__(self, make: OptimizerFactory, groups: list[dict[str, Any]]) -> None:
        weights = [weight for group in groups for weight in group["params"]]
        self._stands_for: dict[Tensor, Tensor] = {
            weight: nn.Parameter(_no_memory_like(weight)) if is_narrow(weight) else weight for weight in weights
        }
        """Masters by weight, in the order of the groups; a weight that is not bfloat16 is its own."""
        self._remainders: dict[Tensor, Tensor] = {}
        """Remainders by weight, of the bfloat16 weights that were moved."""
        moved = [{**group, "params": [self._stands_for[weight] for weight in group["params"]]} for group in groups]
        self.inner = make(moved)
        if isinstance(self.inner, LBFGS):
            raise ConfigError(
                "optimizer.path=torch.optim.LBFGS computes the loss several times a step, and the float32 masters of "
                "bfloat16 weights move once. Take another optimizer, or trainer.precision=32-true."
            )
        super().__init__(groups, self.inner.defaults)
        self._copy_settings(self.inner.param_groups, self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step of the inner optimizer, which is called for some weights at a time.

        A weight without a gradient stays, and so does its remainder. The closure is called once, before.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients = {weight: weight.grad for weight in self._stands_for if weight.grad is not None}
        for weight in gradients:  # the inner optimizer moves what has a gradient
            weight.grad = None
        self._copy_settings(self.param_groups, self.inner.param_groups)
        path = optimizer_path(self.inner)
        large = (w for w in gradients if is_narrow(w) and w.numel() > BUCKET and w.is_contiguous())
        sliced = set(large) if moves_numbers_alone(path) else set()
        for weight in sliced:
            self._move_in_slices(weight, gradients[weight])
        unsliced = [weight for weight in gradients if weight not in sliced]
        for weights in _buckets(unsliced) if moves_each_alone(path) else [unsliced]:
            self._move({weight: gradients[weight] for weight in weights})
        self._copy_settings(self.inner.param_groups, self.param_groups)
        for weight, gradient in gradients.items():
            weight.grad = gradient
        self._show_state()
        return result

    def _move(self, gradients: dict[Tensor, Tensor]) -> None:
        """Move these weights, whose masters exist meanwhile."""
        masters = {weight: self._stands_for[weight] for weight in gradients}
        narrow = {weight: master for weight, master in masters.items() if weight is not master}
        for weight, master in narrow.items():
            master.data = join(weight, self._remainder_of(weight))
        for weight, master in masters.items():
            master.grad = gradients[weight]
        self.inner.step()
        for master in masters.values():
            master.grad = None
        for weight, master in narrow.items():
            split(master.data, weight, self._remainders[weight])
            master.data = _no_memory_like(weight)

    def _move_in_slices(self, weight: Tensor, gradient: Tensor) -> None:
        """Move a large weight slice by slice, with the slice's master and optimizer state."""
        master = self._stands_for[weight]
        state_before = self.inner.state.pop(master, {})  # nothing, if this is its first step
        whole_values = {name: value for name, value in state_before.items() if _is_per_number(value, weight)}
        state_after: dict[str, Any] = {}
        parts = (each.reshape(-1).split(BUCKET) for each in (weight, self._remainder_of(weight), gradient))
        for number, (weight_part, remainder_part, gradient_part) in enumerate(zip(*parts, strict=True)):
            place = slice(number * BUCKET, (number + 1) * BUCKET)
            master.grad = None
            master.data = join(weight_part, remainder_part)
            master.grad = gradient_part
            self.inner.state[master] = {  # a count of steps is copied: each slice takes the same step
                name: value.view(-1)[place] if _is_per_number(value, weight) else copy.deepcopy(value)
                for name, value in state_before.items()
            }
            self.inner.step()
            split(master.data, weight_part, remainder_part)
            state_after = self.inner.state.pop(master, {})
            for name, value in state_after.items():
                if _is_per_number(value, weight_part):
                    if name not in whole_values:
                        whole_values[name] = value.new_empty(weight.shape)
                    whole_values[name].view(-1)[place] = value
        self.inner.state[master] = {name: whole_values.get(name, value) for name, value in state_after.items()}
        master.grad = None
        master.data = _no_memory_like(weight)

    def _remainder_of(self, weight: Tensor) -> Tensor:
        if weight not in self._remainders:
            self._remainders[weight] = torch.zeros_like(weight, dtype=torch.int16)
        return self._remainders[weight]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, each tensor in the type that it was kept in.

        The inner optimizer reads it, whose parameters are the masters: `Optimizer.load_state_dict` casts state to the
        type of the parameter, which would round moments. A state without remainders (of a run with float32 weights)
        makes masters of the weights as they are.
        """
        states = state_dict["state"].items()
        inner_states = {
            number: {name: value for name, value in state.items() if name != REMAINDER} for number, state in states
        }
        self.inner.load_state_dict({**state_dict, "state": inner_states})
        self._copy_settings(self.inner.param_groups, self.param_groups)
        self._remainders.clear()
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, weight in zip(numbers, self._stands_for, strict=True):
            state = state_dict["state"].get(number, {})
            if is_narrow(weight) and REMAINDER in state:
                self._remainder_of(weight).copy_(state[REMAINDER])
        self._show_state()

    def _show_state(self) -> None:
        """Expose the inner optimizer's state by weight, not copied."""
        self.state.clear()
        for weight, master in self._stands_for.items():
            state = dict(self.inner.state.get(master, {}))
            if weight in self._remainders:
                state[REMAINDER] = self._remainders[weight]
            if state:
                self.state[weight] = state

    @staticmethod
    def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Copy learning rates and all settings but the parameters from one optimizer's groups to another's."""
        for source_group, target_group in zip(source, target, strict=True):
            target_group.update({key: value for key, value in source_group.items() if key != "params"})


def moves_each_alone(path: str) -> bool:
    """Tell whether an optimizer, by its dotted path, is known to move each weight by its own gradient and state.

    Those of torch and bitsandbytes do. Others may have state of all weights together, such as a learned step size.
    """
    return path.partition(".")[0] in ("torch", "bitsandbytes")


def moves_numbers_alone(path: str) -> bool:
    """Tell whether an optimizer, by its dotted path, moves each number of a weight by its own gradient and state.

    Many of torch's do; others use rows and columns of a matrix, as Adafactor and Muon do.
    """
    return path.startswith("torch.optim.") and path.rpartition(".")[2] in _BY_NUMBER


_BY_NUMBER = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD")


def optimizer_path(optimizer: Any) -> str:
    """Return the dotted path of an optimizer's class, as in a config: `torch.optim.AdamW`."""
    path = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    return f"torch.optim.{type(optimizer).__name__}" if path.startswith("torch.optim.") else path


def _is_per_number(value: Any, weight: Tensor) -> bool:
    """Tell whether a value of the state has an entry for each number of a weight."""
    return isinstance(value, Tensor) and value.shape == weight.shape


def _no_memory_like(weight: Tensor) -> Tensor:
    """Return a float32 tensor of the weight's shape that takes no memory: one number stands for all."""
    return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)


# ---------------------------------------------------------------------- bf16-true


BF16 = "bf16-true"
FLOAT32 = "32-true"


class BFloat16Weights(Precision):
    """A precision plugin that leaves autocast, inputs and default types; the policy is loaded in bfloat16."""

    precision: Any = BF16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tell whether a device multiplies bfloat16 in hardware: AMX, AVX-512 BF16, Arm's BF16; Ampere or newer.

    Others emulate it, and are several times as fast in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def checkpoint_precision(checkpoint: Mapping[str, Any]) -> str:
    """Return the `trainer.precision` of the run that wrote a checkpoint.

    One that does not name it, such as a file of weights alone, counts as float32.
    """
    return str(checkpoint.get("precision", FLOAT32))


def replace_half_precision(strategy: Any) -> bool:
    """Replace Lightning's plugin by `BFloat16Weights`; return whether that is in force now.

    DeepSpeed and FSDP1 have plugins of their own, which stay.
    """
    plugin = strategy.precision_plugin
    if isinstance(plugin, HalfPrecision) and plugin.precision == BF16:
        strategy.precision_plugin = BFloat16Weights()
    return isinstance(strategy.precision_plugin, BFloat16Weights)


def shard_precision(strategy: ModelParallelStrategy) -> MixedPrecisionPolicy:
    """Return FSDP2's precision policy.

    Under bf16-true the shards are float32, which are the masters, and gathered weights are bfloat16; gradients are
    summed over ranks and micro-batches in float32.
    """
    if not isinstance(strategy.precision_plugin, BFloat16Weights):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
