"""Optimizers and schedules as values."""

from __future__ import annotations

import math

import pytest
import torch

from lit_rl.algorithms.optimizers import AdamW, AdamW8bit, ByPath
from lit_rl.algorithms.schedules import Constant, Cosine, Linear
from lit_rl.errors import BackendError, ConfigError


def rates(schedule, total, steps):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = schedule(optimizer, total)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_constant_after_the_warm_up():
    assert rates(Constant(warmup_steps=4), math.inf, 6) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_linear_falls_to_its_final_share():
    assert rates(Linear(), 4, 5) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    assert rates(Linear(warmup_steps=2, final=0.5), 6, 7) == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_is_half_a_period():
    assert rates(Cosine(), 4, 5) == pytest.approx([1 + math.cos(math.pi * k / 4) for k in range(5)])


@pytest.mark.parametrize("schedule", [Linear(), Cosine()])
def test_a_schedule_that_ends_needs_an_end(schedule):
    with pytest.raises(ConfigError, match="trainer.max_steps"):
        rates(schedule, math.inf, 1)


def test_adamw_is_torchs():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    ours = AdamW(lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)([{"params": [weights[0]]}])
    theirs = torch.optim.AdamW([weights[1]], lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(3):
        gradient = torch.randn(3)
        for weight, optimizer in zip(weights, (ours, theirs)):
            weight.grad = gradient.clone()
            optimizer.step()
    assert torch.allclose(weights[0], weights[1])


def test_any_optimizer_by_path():
    optimizer = ByPath("torch.optim.SGD", lr=0.5, kwargs={"momentum": 0.9})(
        [{"params": [torch.nn.Parameter(torch.ones(1))]}]
    )
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("path", "kwargs", "word"),
    [
        ("torch.optim.SGDD", {}, "Did you mean 'SGD'"),
        ("nowhere.SGD", {}, "cannot be imported"),
        ("SGD", {}, "cannot be imported"),
        ("torch.nn.Linear", {}, "torch.optim.Optimizer class"),
        ("torch.optim.SGD", {"momentumm": 1}, "do not fit"),
    ],
)
def test_a_wrong_path_is_refused(path, kwargs, word):
    with pytest.raises(ConfigError, match=word):
        ByPath(path, kwargs=kwargs)([{"params": [torch.nn.Parameter(torch.ones(1))]}])


@pytest.mark.parametrize("lr", [0, -1e-6, math.nan, 1e3])
@pytest.mark.parametrize("cls", [AdamW, AdamW8bit])
def test_learning_rates_out_of_range(cls, lr):
    with pytest.raises(ConfigError, match="optimizer.lr"):
        cls(lr=lr)


def test_eight_bits_without_bitsandbytes_says_how_to_get_it():
    pytest.importorskip("torch")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(BackendError, match=r"lit-rl\[quant\]"):
            AdamW8bit()([{"params": [torch.nn.Parameter(torch.ones(1))]}])
