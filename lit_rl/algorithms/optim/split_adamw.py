"""Split masters of bfloat16 weights, and AdamW (1711.05101) in 4 bytes of state a weight on top of them.

The bits of the float32 master ``m`` are those of the weight ``w`` and of a 16-bit remainder ``r``, to the bit:

    w = the upper 16 bits of (bits(m) + 2^15)        m rounded to the nearest bfloat16
    r = bits(m) - 2^16 w,  in [-2^15, 2^15)          bits(m) = 2^16 w + r

so no second copy of the weight is held. A master halfway between two bfloat16 numbers goes to the one farther from
zero, where torch's own rounding takes the even one: an even weight would then have remainders from -2^15 to 2^15, one
value more than 16 bits can distinguish. A weight that is changed from outside takes its master along: the remainder
stays.

`SplitAdamW` also keeps its moments in 8 bits (as 2110.02861 does): codes c below the power of two 2^e that bounds their
block of `BLOCK` numbers:

    |m1| ~ 2^(e - (127 - c) / 6), a sign and 7 bits        m2 ~ 2^(e - (255 - c) / 6), 8 bits

Codes are drawn between the two nearest so that their mean is the number: a second moment changes by 1 part in 1000 a
step, which rounding to the nearest would lose. The draws are a hash of the step, the weight and the place of the number
in it, so a resumed run repeats them, and cutting a weight into parts changes none. A bound that moves, does so by whole
octaves, which moves codes to codes: only what changes a number adds noise to it. The roots of second moments have the
range of first ones, and none above 0 becomes 0: steps stay of AdamW's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_LARGEST = 2**31 - 1 - 2**15
"""The largest bits that can be rounded: NaNs are above, such as a GPU's, whose bits are all set."""

_SPLIT_PART = 2**18
"""Numbers that are processed at a time: intermediate results stay in a CPU's cache."""


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master, a new tensor, of a bfloat16 weight and its int16 remainder of the same shape."""
    master = torch.empty_like(weight, dtype=torch.float32)
    for m, w, r in _parts(master, weight, remainder):
        m.copy_(w).view(torch.int32).add_(r)
    return master


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a master into its weight and remainder; the master's own values are lost."""
    for m, w, r in _parts(master, weight, remainder):
        bits = m.view(torch.int32)
        r.copy_(bits)  # the lower 16 bits, as a signed number, are the remainder
        w.view(torch.int16).copy_(bits.clamp_(max=_LARGEST).add_(2**15).bitwise_right_shift_(16))


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same numbers of each; whole tensors where these are not contiguous."""
    if all(tensor.is_contiguous() for tensor in tensors):
        size = _SPLIT_PART if tensors[0].device.type == "cpu" else tensors[0].numel()
        yield from zip(*(tensor.view(-1).split(max(size, 1)) for tensor in tensors), strict=True)
    else:
        yield tensors


BLOCK = 256

PART, GPU_PART = 2**17, 2**24
"""Numbers that are moved at a time, multiples of `BLOCK`: intermediate results stay in a CPU's cache; a GPU is kept
busy, and its memory bounded."""

_MIX = (-1640531535, -2048144777, -1028477379)
"""Odd factors that spread a change of any bit over all bits (those of xxHash, as signed integers of 32 bits)."""

_OCTAVE = 6
"""Codes from one power of two to the next: neighbours differ by 12 %, and a block spans a factor of 2^21."""


class SplitAdamW(Optimizer):
    """AdamW whose state takes 4 bytes a bfloat16 weight, and 2 a float32 one, which needs no remainder.

    Args:
        groups: Parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    BOUND = "first_bound"
    """A key of the state that no other optimizer has."""

    def __init__(
        self, groups: Any, lr: float, betas: tuple[float, float], eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step. Float32 copies exist for a part of one weight tensor at a time."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for number, (group, weight) in enumerate((g, weight) for g in self.param_groups for weight in g["params"]):
            if weight.grad is not None:
                self._move(group, weight, number)
        return result

    def _move(self, group: dict[str, Any], weight: Tensor, number: int) -> None:
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:
            bound = torch.zeros(-(-weight.numel() // BLOCK), dtype=torch.float32, device=weight.device)
            codes = torch.zeros(weight.numel(), dtype=torch.uint8, device=weight.device)
            state |= {"step": torch.zeros(()), "first": codes, "first_bound": bound}
            state |= {"second": codes.clone(), "second_bound": bound.clone()}
            if weight.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(weight, dtype=torch.int16, memory_format=torch.contiguous_format)
        state["step"] += 1
        seed = (int(state["step"]) << 20) + number
        numbers, gradients = weight.flatten(), grad.flatten()  # views, where they are contiguous
        size = PART if weight.device.type == "cpu" else GPU_PART
        for start in range(0, len(numbers), size):
            part = slice(start, start + size)  # begins and ends with whole blocks
            blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
            views = {name: state[name].view(-1)[part] for name in ("first", "second", "remainder") if name in state}
            views |= {"step": state["step"]} | {name: state[name][blocks] for name in ("first_bound", "second_bound")}
            draws = _draws(seed, start, len(numbers[part]), weight.device)
            _move_part(group, numbers[part], gradients[part], views, draws)
        if numbers.data_ptr() != weight.data_ptr():
            weight.copy_(numbers.view_as(weight))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, each tensor in its own type: torch would cast it to that of the weight."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[weight][name] = value.to("cpu" if name == "step" else weight.device, copy=True).contiguous()


def _move_part(
    group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor], draws: tuple[Tensor, Tensor]
) -> None:
    """Take a step for some numbers of a weight; their gradient, state and draws are as long."""
    step, (beta1, beta2) = int(state["step"]), group["betas"]
    grad = grad.float()
    master = join(weight, state["remainder"]) if "remainder" in state else weight.clone()
    signed, positive = _table(weight.device, 127, signed=True), _table(weight.device, 255)
    first = _numbers(state["first"], state["first_bound"], signed).lerp_(grad, 1 - beta1)
    second = _numbers(state["second"], state["second_bound"], positive).lerp_(grad.square(), 1 - beta2)
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    master.mul_(1 - group["lr"] * group["weight_decay"])
    master.addcdiv_(first, scale, value=-group["lr"] / (1 - beta1**step))
    sign = first.view(torch.int32).bitwise_right_shift(24).bitwise_and_(128)
    state["first"].copy_(_codes(first.abs(), state["first_bound"], draws[0], top=127).add_(sign))
    codes = _codes(second, state["second_bound"], draws[1], top=255)
    state["second"].copy_(torch.maximum(codes, second.sign().int()))  # none above 0 becomes 0
    if "remainder" in state:
        split(master, weight, state["remainder"])
    else:
        weight.copy_(master)


# ---------------------------------------------------------------- 8-bit codes: 0 is 0, c is the largest times a power


@cache
def _table(device: torch.device, top: int, *, signed: bool = False) -> Tensor:
    """Return the value of each code for a bound of 1: 0, or 2^(-(top - code) / _OCTAVE); negative from `top + 1` on."""
    sizes = torch.exp2((torch.arange(top + 1, device=device, dtype=torch.float32) - top) / _OCTAVE)
    sizes[0] = 0
    return torch.cat([sizes, -sizes]) if signed else sizes


def _numbers(codes: Tensor, bound: Tensor, table: Tensor) -> Tensor:
    """Return the values of codes `(n,)` whose blocks have these bounds."""
    return table.index_select(0, codes.int()).mul_(bound.repeat_interleave(BLOCK)[: len(codes)])


def _codes(numbers: Tensor, bound: Tensor, draws: Tensor, *, top: int) -> Tensor:
    """Return the code below or above each number >= 0, so that over `draws`, uniform in (0, 1), the mean is exact.

    Neighbours v < q v, q = 2^(1 / _OCTAVE), have a number s between them: q s / (1 + (q - 1) u) is at least the upper
    one where u is at most (s / v - 1) / (q - 1), and its code is then the upper one. The first two are 0 and the least,
    v: u is at most s / v. `bound` is written.
    """
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
    bound.copy_(torch.ldexp(torch.ones_like(bound), torch.frexp(padded.amax(1)).exponent))
    share = (padded / bound[:, None]).flatten()[: len(numbers)]
    place = (share / (draws * (2 ** (1 / _OCTAVE) - 1)).add_(1)).log2_().mul_(_OCTAVE).add_(top + 1).clamp_(max=top)
    above_none = share.mul_(2 ** ((top - 1) / _OCTAVE)).sub_(draws).add_(1).clamp_(max=1)
    return torch.maximum(place, above_none).int()


def _draws(seed: int, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two independent numbers in (0, 1), in steps of 2^-16, for each place of a weight from `start` on."""
    places = torch.arange(count, dtype=torch.int32, device=device)
    offset = start * _MIX[0] + seed * _MIX[1]
    bits = places.mul_(_MIX[0]).add_((offset + 2**31) % 2**32 - 2**31)  # its last 32 bits as a signed integer
    for factor in _MIX[1:]:
        _fold(bits).mul_(factor)
    _fold(bits)
    return _to_unit_interval(bits >> 16), _to_unit_interval(bits.bitwise_left_shift_(16).bitwise_right_shift_(16))


def _fold(bits: Tensor) -> Tensor:
    """Fold upper bits onto lower ones, in place, without the sign bits that a shift repeats."""
    return bits.bitwise_xor_((bits >> 15).bitwise_and_(2**17 - 1))


def _to_unit_interval(halves: Tensor) -> Tensor:
    """Map integers of 16 bits to numbers in (0, 1)."""
    return halves.float().mul_(2**-16).add_(0.5 + 2**-17)
