"""A float32 master as a bfloat16 weight and 16 bits more: the same number to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_rl.algorithms.optim import split_adamw
from lit_rl.algorithms.optim.split_adamw import join, split


def halves_of(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.zeros_like(master, dtype=torch.bfloat16)
    remainder = torch.zeros_like(master, dtype=torch.int16)
    split(master.clone(), weight, remainder)
    return weight, remainder


def of_bits(*bits: int) -> Tensor:
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("part", [2**18, 1000])
def test_two_halves_are_the_master_to_the_bit_and_the_upper_one_is_the_nearest_bfloat16(part, monkeypatch):
    monkeypatch.setattr(split_adamw, "_SPLIT_PART", part)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(0))
    halves = of_bits(0x3F808000, 0x3F818000, 0x3F817FFF, 0xBF808000, 0, 0x80000000)  # between two, and zeros
    every = torch.cat([bits.to(torch.int32).view(torch.float32), halves])
    masters = every[every.isfinite() & (every.abs() < 3e38)]
    weight, remainder = halves_of(masters)
    assert torch.equal(join(weight, remainder).view(torch.int32), masters.view(torch.int32))
    halfway = masters.view(torch.int32) & 0xFFFF == 0x8000  # torch takes the even one of the two nearest
    assert torch.equal(weight[~halfway], masters[~halfway].bfloat16())
    assert (weight.double() - masters.double()).abs().le((masters.bfloat16().double() - masters.double()).abs()).all()
    assert (weight[halfway].abs() > masters[halfway].abs()).all()


def test_what_is_no_number_stays_none():
    """A GPU's has all bits set but the sign: rounded up, they would be those of -0."""
    broken = of_bits(0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000)
    weight, remainder = halves_of(broken)
    for seen in (weight, join(weight, remainder)):
        assert seen.isnan().tolist() == [True, True, True, False, False]
        assert torch.equal(seen[3:].float(), broken[3:])


def test_strides_do_not_matter():
    master = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    weight, remainder = halves_of(master.t())
    assert not weight.is_contiguous() and torch.equal(join(weight, remainder), master.t())


def test_a_weight_that_is_changed_takes_its_master_along():
    master = torch.linspace(1.0, 1.9, 100)
    weight, remainder = halves_of(master)
    assert torch.equal(join(2 * weight, remainder) - 2 * weight.float(), 2 * (master - weight.float()))
