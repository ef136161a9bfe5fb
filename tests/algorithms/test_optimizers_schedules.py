"""Optimizers and schedules as values."""

from __future__ import annotations

import math

import pytest
import torch

from lit_rl.algorithms.optim.optimizers import AdamW, AdamW8bit, ByPath
from lit_rl.algorithms.optim.schedules import After, Constant, Cosine, Linear, ScheduleByPath, scheduler_by_group
from lit_rl.core.errors import BackendError


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


@pytest.mark.parametrize("schedule", [Constant(3), Linear(2, 0.1), Cosine(1, 0.2), After(3, Linear(2))])
def test_the_factor_is_the_share_of_the_learning_rate(schedule):
    assert rates(schedule, 8, 8) == pytest.approx([2.0 * schedule.factor(step, 8) for step in range(8)])


TORCH = "torch.optim.lr_scheduler"
BY_PATH = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CosineAnnealingLR": {"T_max": 8, "eta_min": 0.1},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
}


@pytest.mark.parametrize("name", BY_PATH)
def test_a_scheduler_by_path_gives_the_rates_that_it_gives_in_torch(name):
    """With a learning rate of 2, of which `eta_min` is a share."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    kwargs = BY_PATH[name] | ({"eta_min": 0.2} if "eta_min" in BY_PATH[name] else {})
    scheduler, expected = getattr(torch.optim.lr_scheduler, name)(optimizer, **kwargs), []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(ScheduleByPath(f"{TORCH}.{name}", kwargs=BY_PATH[name]), 8, 8) == pytest.approx(expected)


def test_a_scheduler_by_path_begins_after_the_warm_up_and_takes_the_length_of_the_run():
    warm = ScheduleByPath(f"{TORCH}.CosineAnnealingLR", warmup_steps=2)
    bare = Cosine(warmup_steps=2)
    assert rates(warm, 8, 8) == pytest.approx(rates(bare, 8, 8))
    cycle = ScheduleByPath(f"{TORCH}.OneCycleLR", kwargs={"max_lr": 1.0, "cycle_momentum": False})
    seen = [cycle.factor(step, 10) for step in range(10)]
    assert max(seen) == pytest.approx(1.0) and seen[0] == pytest.approx(1 / 25) and seen[-1] < 1e-4
    assert cycle.factor(4, 10) == seen[4], "an earlier step can be asked for again, as a resume does"
    assert cycle.factor(4, 20) != seen[4]


def two_groups(*schedules, total=6):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "name": name} for name in ("policy", "critic")]
    groups[1]["lr"] = 0.5
    optimizer = torch.optim.SGD(groups, lr=2.0)
    return optimizer, scheduler_by_group(optimizer, total, list(schedules))


def test_each_group_has_its_own_schedule_and_learning_rate():
    optimizer, scheduler = two_groups(Linear(), Constant(warmup_steps=2))
    seen = []
    for _ in range(3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert seen == [pytest.approx(pair) for pair in ([2.0, 0.25], [2.0 * 5 / 6, 0.5], [2.0 * 4 / 6, 0.5])]


def test_a_schedule_for_each_group_is_needed():
    with pytest.raises(ValueError, match="2"):
        two_groups(Linear())


def test_after_is_the_inner_schedule_later():
    inner = Linear(warmup_steps=2, final=0.5)
    waits = After(3, inner)
    assert [waits.factor(step, 9) for step in range(10)] == [0.0] * 3 + [inner.factor(step, 6) for step in range(7)]
    assert After(0, inner).factor(2, 9) == inner.factor(2, 9)
    assert After(2, Constant()).factor(5, math.inf) == 1.0


def test_a_weight_waits_while_its_factor_is_zero():
    """Also where weight decay or moments would move it: AdamW multiplies both by the learning rate."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weight], "name": name} for weight, name in zip(weights, ("policy", "critic"))]
    optimizer = AdamW(lr=0.1, weight_decay=0.5)(groups)
    scheduler = scheduler_by_group(optimizer, 10, [After(2, Constant()), Constant()])
    for step in range(3):
        for weight in weights:
            weight.grad = torch.ones(1)
        assert bool(weights[0] == 1) and bool(weights[1] == 1) == (step == 0)
        optimizer.step()
        scheduler.step()
    assert weights[0] != 1


@pytest.mark.parametrize(
    "factory", [AdamW(lr=0.1), ByPath("torch.optim.SGD", lr=0.1), ByPath("torch.optim.RMSprop", 0.1)]
)
def test_a_groups_own_learning_rate_beats_the_optimizers(factory):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "name": "policy"}, {"params": [weights[1]], "name": "critic", "lr": 0.01}]
    optimizer = factory(groups)
    assert [(group["name"], group["lr"]) for group in optimizer.param_groups] == [("policy", 0.1), ("critic", 0.01)]
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer.step()
    moved = [1 - weight.item() for weight in weights]
    assert moved[0] == pytest.approx(10 * moved[1], rel=1e-3)


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


def test_eight_bits_without_bitsandbytes_says_how_to_get_it():
    pytest.importorskip("torch")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(BackendError, match=r"lit-rl\[quant\]"):
            AdamW8bit()([{"params": [torch.nn.Parameter(torch.ones(1))]}])
