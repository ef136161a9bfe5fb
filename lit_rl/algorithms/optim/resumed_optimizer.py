"""An optimizer and its schedule that are resumed from a checkpoint, with the settings of this run.

Restoring them restores the settings of the run that wrote the checkpoint too, and the learning rate of its next step: 0
where that run was over. So the settings of this run are put back, and the rate is computed from the schedule anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_rl.algorithms.optim.master_weights import MasterWeights, optimizer_path
from lit_rl.core import upstream
from lit_rl.core.errors import StorageError


def initial_settings(optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return the class of a new optimizer, the settings of its groups and those of its schedule, as plain values.

    The learning rate is that before the schedule.
    """
    inner = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        groups.append(_plain(settings | {"lr": float(group.get("initial_lr", group["lr"]))}))
    state = scheduler.state_dict()
    schedule = (
        {}
        if isinstance(scheduler, LambdaLR)
        else _plain({k: v for k, v in state.items() if k not in upstream.SCHEDULER_COUNTS})
    )
    return {"class": optimizer_path(inner), "groups": groups, "schedule": schedule}


def _plain(value: Any) -> Any:
    """Return numbers, strings, and containers of them; None for everything else."""
    if isinstance(value, Mapping):
        plain = {str(key): _plain(each) for key, each in value.items() if key not in upstream.SCHEDULER_COUNTS}
        return {key: each for key, each in plain.items() if each is not None or value.get(key, 0) is None}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def check_optimizer_state(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Refuse an optimizer that cannot read the state of a checkpoint.

    Args:
        before: `initial_settings` of the run that wrote it; None where that run had no optimizer.
        now: `initial_settings` of this run.

    Returns:
        Descriptions of the settings that differ in this run.

    Raises:
        StorageError: the optimizer is another, or has other groups.
    """
    if before is None:
        return []
    if before["class"] != now["class"]:
        raise StorageError(
            f"The checkpoint was written with optimizer={before['class']}, and this run has {now['class']}, which "
            "cannot read the other's state. Resume with the optimizer (optimizer, optimizer.path) of the run's "
            "config.yaml, or start a new run from the exported model: model.name=<run_dir>/hf."
        )
    if len(before["groups"]) != len(now["groups"]):
        raise StorageError(
            f"The checkpoint's optimizer has {len(before['groups'])} groups of parameters, and this run's has "
            f"{len(now['groups'])}. Resume with the algorithm settings of the run's config.yaml."
        )
    several = len(now["groups"]) > 1
    changes = [
        f"optimizer.{key} {was} -> {value}" + (f" ({group.get('name', 'a group')})" if several else "")
        for old_group, group in zip(before["groups"], now["groups"], strict=True)
        for key, (was, value) in _changed_settings(old_group, group).items()
    ]
    schedule = _changed_settings(before["schedule"], now["schedule"])
    return changes + [f"scheduler.{key} {was} -> {value}" for key, (was, value) in schedule.items()]


def _changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each setting that differs; a newer torch may have further settings."""
    return {key: (before[key], value) for key, value in now.items() if key in before and before[key] != value}


def apply_settings(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    before: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    make_schedule: Callable[[Optimizer], LRScheduler],
) -> LRScheduler:
    """Apply this run's settings to a restored optimizer and schedule.

    Args:
        optimizer: The restored optimizer.
        scheduler: The restored schedule.
        before: `initial_settings` of the run that wrote the checkpoint; None where that run had no optimizer.
        now: `initial_settings` of this run.
        make_schedule: Function that makes this run's schedule anew.

    Returns:
        The schedule to use: the restored one, unless it has other settings than this run and cannot take new ones;
        then a new one that was stepped as far.
    """
    if before is None:
        return scheduler
    rates = [group["lr"] for group in now["groups"]]
    rate_changed = False
    for group, old, new in zip(optimizer.param_groups, before["groups"], now["groups"], strict=True):
        changes = _changed_settings(old, new)
        rate_changed = rate_changed or "lr" in changes
        group.update({key: tuple(v) if isinstance(v, list) else v for key, (_, v) in changes.items() if key != "lr"})
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = rates
        step = scheduler.last_epoch
        for group, rate, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["initial_lr"], group["lr"] = rate, rate * factor(step)
        upstream.set_last_rates(scheduler, [group["lr"] for group in optimizer.param_groups])
    elif rate_changed or before["schedule"] != now["schedule"]:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = group["lr"] = rate
        new_schedule = make_schedule(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is stepped before the optimizer
            for _ in range(scheduler.last_epoch):
                new_schedule.step()
        return new_schedule
    return scheduler
