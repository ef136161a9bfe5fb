"""An optimizer that goes on from a checkpoint has the settings of its run, and the rate of the run's schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiers import in_turn
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR

from lit_rl.algorithms.loop import run_identity
from lit_rl.algorithms.optim.master_weights import with_masters
from lit_rl.algorithms.optim.schedules import After, Constant, Cosine, Linear, as_schedule, scheduler_by_group
from lit_rl.core.errors import StorageError


class Run:
    """An optimizer over two groups, and its schedule."""

    def __init__(self, schedule: Any, steps: int, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
        groups = [{"params": [weight], "name": name} for weight, name in zip(self.weights, ("policy", "critic"))]
        make = settings.pop("make", AdamW)
        self.optimizer = with_masters(partial(make, **{"lr": 1e-2, **settings}), groups)
        schedules = schedule if isinstance(schedule, list) else [as_schedule(schedule)] * 2
        self.make_schedule = lambda optimizer: scheduler_by_group(optimizer, steps, schedules)
        self.scheduler = self.make_schedule(self.optimizer)
        self.made = run_identity.initial_settings(self.optimizer, self.scheduler)

    def step(self) -> list[float]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for weight in self.weights:
            weight.grad = torch.ones(3)
        self.optimizer.step()
        self.scheduler.step()
        return rates

    def goes_on_from(self, other: Run) -> Run:
        self.said = run_identity.check_optimizer_state(other.made, self.made)
        with torch.no_grad():
            for ours, theirs in zip(self.weights, other.weights, strict=True):
                ours.copy_(theirs)
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        self.scheduler.load_state_dict(other.scheduler.state_dict())
        self.scheduler = run_identity.continue_with_settings(
            self.optimizer, self.scheduler, other.made, self.made, self.make_schedule
        )
        return self


def warmed_up(optimizer: Any, cut: int = 2) -> Any:
    parts = [LinearLR(optimizer, start_factor=0.5, total_iters=cut), CosineAnnealingLR(optimizer, T_max=9)]
    return SequentialLR(optimizer, parts, milestones=[cut])


SCHEDULES: dict[str, tuple[Any, Any]] = {
    "the same, longer": (Linear(), Linear()),
    "cosine": (Cosine(warmup_steps=2), Cosine(warmup_steps=2)),
    "another": (Constant(), Cosine(final=0.1)),
    "a later critic": ([Linear(), After(2, Linear())], [Linear(), After(2, Linear())]),
    "torch's": (partial(StepLR, step_size=2, gamma=0.5), partial(StepLR, step_size=2, gamma=0.5)),
    "torch's, another": (partial(StepLR, step_size=2, gamma=0.5), partial(StepLR, step_size=2, gamma=0.9)),
    "torch's in parts": (warmed_up, partial(warmed_up, cut=4)),
    "torch's for ours": (Linear(), partial(StepLR, step_size=2, gamma=0.9)),
    "one cycle": (partial(OneCycleLR, max_lr=0.1, total_steps=30), partial(OneCycleLR, max_lr=0.2, total_steps=30)),
}


@in_turn(kind=SCHEDULES, dtype=[torch.float32, torch.bfloat16])
def test_from_where_it_goes_on_the_rate_is_that_of_a_run_with_these_settings(kind: str, dtype: torch.dtype) -> None:
    """A run that ended after five steps goes on to ten, with another rate and weight decay."""
    before, now = SCHEDULES[kind]
    for changed in ({}, {"lr": 3e-2, "weight_decay": 0.2, "betas": (0.8, 0.99)}):
        first, whole = Run(before, 5, dtype), Run(now, 10, dtype, **changed)
        for _ in range(5):
            first.step()
            whole.step()
        resumed = Run(now, 10, dtype, **changed).goes_on_from(first)
        assert not any(group["lr"] == 0 for group in resumed.optimizer.param_groups)
        for _ in range(4):
            assert resumed.step() == pytest.approx(whole.step(), rel=1e-12)
        for ours, theirs in zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
            settings = {key: value for key, value in ours.items() if key != "params"}
            assert settings == pytest.approx({key: theirs[key] for key in settings}, rel=1e-12)
        assert ("optimizer.weight_decay 0.01 -> 0.2 (policy)" in resumed.said) == bool(changed)


@pytest.mark.parametrize("schedule", [Linear(), partial(StepLR, step_size=2)])
def test_a_run_that_nothing_changed_goes_on_to_the_bit(schedule: Any) -> None:
    whole, first = Run(schedule, 10, weight_decay=0.1), Run(schedule, 10, weight_decay=0.1)
    for _ in range(4):
        whole.step()
        first.step()
    resumed = Run(schedule, 10, weight_decay=0.1).goes_on_from(first)
    assert resumed.said == []
    for _ in range(5):
        assert resumed.step() == whole.step()
    assert all(torch.equal(a, b) for a, b in zip(resumed.weights, whole.weights, strict=True))


def test_what_an_optimizer_counts_in_its_groups_stays() -> None:
    """Prodigy and schedule-free optimizers keep there what they learned."""

    class Counting(SGD):
        def __init__(self, groups: Any, lr: float, **settings: Any) -> None:
            super().__init__(groups, lr, **settings)
            for group in self.param_groups:
                group["seen"] = 0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["seen"] += 1
            return super().step(closure)

    first = Run(Constant(), 10, make=Counting)
    for _ in range(3):
        first.step()
    resumed = Run(Constant(), 10, make=Counting, momentum=0.5).goes_on_from(first)
    assert [(group["seen"], group["momentum"]) for group in resumed.optimizer.param_groups] == [(3, 0.5)] * 2


def test_another_optimizer_is_refused_before_it_reads_anything() -> None:
    first = Run(Linear(), 5)
    first.step()
    with pytest.raises(StorageError, match=r"optimizer=.*torch\.optim\.SGD.*optimizer\.path.*model\.name=<run_dir>/hf"):
        Run(Linear(), 5, make=SGD).goes_on_from(first)
    with pytest.raises(StorageError, match=r"has torch\.optim\.Adam,"):
        Run(Linear(), 5, make=Adam).goes_on_from(first)


def test_a_checkpoint_of_a_run_without_an_optimizer_changes_nothing() -> None:
    run = Run(Linear(), 6, lr=0.5)
    assert run_identity.check_optimizer_state(None, run.made) == []
    kept = run_identity.continue_with_settings(run.optimizer, run.scheduler, None, run.made, run.make_schedule)
    assert kept is run.scheduler and run.step() == [0.5] * 2
