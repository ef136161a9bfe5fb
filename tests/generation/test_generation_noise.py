from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.generation.noise import prompt_key, row_keys, uniform

WORD = 2**64
integers = st.integers(-(2**63), 2**63 - 1)


def signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


def reference(key: int, x: int) -> int:
    """SplitMix64 with big integers."""
    z = (key + (x + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def key_of(word: int, x: int) -> int:
    """The key that ``reference(key, x)`` maps to ``word``: every step of the hash is undone."""

    def unshift(z: int, bits: int) -> int:
        out = z
        for _ in range(64 // bits + 1):
            out = z ^ (out >> bits)
        return out

    z = unshift(word, 31) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return signed((unshift(z, 30) - (x + 1) * 0x9E3779B97F4A7C15) % WORD)


def test_samples_of_a_group_are_the_published_splitmix64_stream() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert row_keys([1234567], 4).tolist() == [signed(word) for word in published]


@given(parts=st.tuples(integers, integers, integers, integers))
def test_prompt_key_equals_big_integer_reference_for_integers_and_tensors(parts: tuple[int, int, int, int]) -> None:
    expected = 0
    for part in parts:
        expected = reference(expected % WORD, part)
    assert prompt_key(*parts) == signed(expected)
    assert prompt_key(*(torch.tensor([part]) for part in parts)).tolist() == [signed(expected)]


def test_prompt_key_broadcasts_over_rows() -> None:
    rows = torch.arange(5)
    assert prompt_key(3, 2, rows, torch.zeros_like(rows)).tolist() == [prompt_key(3, 2, r, 0) for r in range(5)]


@given(key=integers, position=st.integers(0, 2**31))
def test_uniform_equals_big_integer_reference(key: int, position: int) -> None:
    expected = (reference(key % WORD, position) >> 40) / 2**24
    assert uniform(torch.tensor([key]), position).tolist() == [expected]
    assert uniform(torch.tensor([key]), torch.tensor([position])).tolist() == [expected]


@given(word=st.integers(0, WORD - 1), x=st.integers(0, 1000))
def test_inverse_of_the_hash(word: int, x: int) -> None:
    assert reference(key_of(word, x) % WORD, x) == word


def test_uniform_reaches_zero_but_never_one() -> None:
    keys = torch.tensor([key_of(0, 0), key_of(WORD - 1, 0)])
    lowest, highest = uniform(keys, 0).tolist()
    assert lowest == 0
    assert highest == 1 - 2**-24
    assert uniform(keys, 0).dtype == torch.float32


def draws(axis: str) -> torch.Tensor:
    """About two million uniforms, neighbours along one part of the name."""
    if axis == "position":
        keys = row_keys([prompt_key(0, 0, row, 0) for row in range(64)], 8)
        return uniform(keys[:, None], torch.arange(4096)).flatten()
    if axis == "sample":
        return uniform(row_keys([prompt_key(0, 0, row, 0) for row in range(64)], 32768), 0)
    rows = torch.arange(2**21)
    zero = torch.zeros_like(rows)
    parts = {"row": (zero, zero, rows, zero), "rollout": (zero, rows, zero, zero), "seed": (rows, zero, zero, zero)}
    return uniform(row_keys(prompt_key(*parts[axis]), 1), 0)


@pytest.mark.parametrize("axis", ["position", "sample", "row", "rollout", "seed"])
def test_statistics_of_two_million_draws(axis: str) -> None:
    u = draws(axis).double()
    n = len(u)
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    for bins in (256, 4096):
        counts = torch.histc(u, bins, 0, 1)
        chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum()
        assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))
    centered = u - 0.5
    for lag in (1, 2, 8, 64):
        correlation = (centered[lag:] * centered[:-lag]).mean() * 12
        assert abs(correlation) < 5 / math.sqrt(n - lag)
    # The low bits of the 24 are as even as the high ones.
    low = (u * 2**24).long() % 256
    chi2 = ((torch.bincount(low, minlength=256) - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


def test_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    state, first = torch.get_rng_state(), uniform(row_keys([1], 4), 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(uniform(row_keys([1], 4), 0), first)
