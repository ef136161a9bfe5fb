"""Counter-based noise: the random number of a token is a pure function of the token's name.

A name is (seed, rollout, data-set row, occurrence, sample, token position). Its parts are folded into a 64-bit key one
after another, each by one step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): ``fold(key, x)`` is output number
``x`` of the generator seeded with ``key``. There is no state, so the same token gets the same number on every rank and
device, in every batch, and after every resume, and no global generator is read or moved.

Keys are signed 64-bit integers, because torch has no unsigned arithmetic: products wrap as they should, right shifts
are made logical by a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _shift(word: Tensor, bits: int) -> Tensor:
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _fold(key: Tensor, x: Tensor | int) -> Tensor:
    step = _signed((x + 1) * _STEP) if isinstance(x, int) else (x + 1) * _signed(_STEP)
    word = key + step
    for bits, factor in _ROUNDS:
        word = (word ^ _shift(word, bits)) * _signed(factor)
    return word ^ _shift(word, _LAST_SHIFT)


def _fold_int(key: int, x: int) -> int:
    # Plain integers beat tensors 20 times for one key, and a rollout names its prompts one by one.
    word = (key + (x + 1) * _STEP) & _WORD
    for bits, factor in _ROUNDS:
        word = ((word ^ (word >> bits)) * factor) & _WORD
    return _signed(word ^ (word >> _LAST_SHIFT))


@overload
def prompt_key(seed: int, rollout: int, row: int, occurrence: int) -> int: ...


@overload
def prompt_key(seed: Tensor, rollout: Tensor, row: Tensor, occurrence: Tensor) -> Tensor: ...


@overload
def prompt_key(
    seed: int | Tensor, rollout: int | Tensor, row: int | Tensor, occurrence: int | Tensor
) -> int | Tensor: ...


def prompt_key(seed: int | Tensor, rollout: int | Tensor, row: int | Tensor, occurrence: int | Tensor) -> int | Tensor:
    """Return the noise key of one prompt of one rollout, in [-2^63, 2^63). Any integer is a valid part.

    Tensors (int64, broadcast against each other) give a tensor of keys, plain integers give an integer; the numbers
    are the same.
    """
    parts = (seed, rollout, row, occurrence)
    if any(isinstance(part, Tensor) for part in parts):
        tensors = torch.broadcast_tensors(
            *(part.long() if isinstance(part, Tensor) else torch.tensor(_signed(part)) for part in parts)
        )
        key = torch.zeros_like(tensors[0])
        for tensor in tensors:
            key = _fold(key, tensor)
        return key
    name = 0
    for part in parts:
        name = _fold_int(name, int(part))
    return name


def sample_key(key: int, sample: int) -> int:
    """Return the key of a prompt that is completed once, as completion number `sample` of the prompt with `key`."""
    return _signed(key + sample * _STEP)


def turn_key(key: int, turn: int) -> int:
    """Return the key of a turn of a conversation that is drawn turn by turn; the first turn has the prompt's."""
    return key if turn == 0 else _fold_int(key, turn)


def row_keys(prompt_keys: Tensor | Sequence[int], group_size: int) -> Tensor:
    """Return one key a completion: int64 ``(n * group_size,)``, the rows of a prompt being neighbours."""
    keys = torch.as_tensor(prompt_keys, dtype=torch.int64)
    samples = torch.arange(group_size, dtype=torch.int64, device=keys.device)
    return _fold(keys[:, None], samples[None, :]).flatten()


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return float32 uniforms in [0, 1), multiples of 2^-24, never 1: one a key, at a token position counted from 0.

    Shapes broadcast: ``uniform(keys[:, None], torch.arange(t))`` is the noise of ``t`` tokens a row.
    """
    return _shift(_fold(keys, position), 40).to(torch.float32) * 2.0**-24
