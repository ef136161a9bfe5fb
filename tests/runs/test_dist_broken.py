"""One rank of two has a loss or a gradient that is not finite: both leave the step out, and both end after several."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import dist_equal
import lightning as L
import pytest
import torch
from dist_equal import assert_equal_runs, left
from lightning.pytorch.strategies import DDPStrategy

from lit_rl.algorithms import GRPO, Constant
from lit_rl.algorithms.optim.broken_steps import LIMIT
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.core.errors import ConfigError, NumericError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition

pytestmark = [pytest.mark.dist, pytest.mark.all]

NAMES = ("loss", "gradient")
BROKEN = 2
"""The step that breaks, of `STEPS`, counted from 0."""
STEPS = 4


class Breaks(L.Callback):
    """On the last rank, the first micro-batch of some optimizer steps: its loss is infinite, or its loss is what it
    was and its gradient is NaN. Keeps what each step said."""

    def __init__(self, steps: Collection[int], what: str) -> None:
        self.steps, self.what, self.last = steps, what, -1
        self.said: list[dict[str, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        whole = pl_module.training_step

        def broken(*given: Any) -> torch.Tensor:
            loss, step = whole(*given), trainer.global_step
            first, self.last = step != self.last, step
            if not first or step not in self.steps or trainer.global_rank < trainer.world_size - 1:
                return loss
            return loss * torch.inf if self.what == "loss" else loss + (loss * 0).sqrt()

        pl_module.training_step = broken

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **keywords: Any) -> None:
        if trainer.global_step > len(self.said):
            self.said.append(dist_equal.logged(trainer))


def varied(completions: list[str]) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def fitted(folder: Path, devices: int, breaks: Breaks, steps: int, **more: Any) -> tuple[Any, L.Trainer, int]:
    """Momentum and decay move a weight in a step without gradients too, unless it is left out.

    Returns:
        The module, the Trainer, and the exit code of what ended the run; 0 where it came to its end.
    """
    module = GRPO(
        "tiny", varied, group_size=4, sampling=Sampling(max_new_tokens=4), scheduler=Constant(),
        optimizer=ByPath("torch.optim.SGD", lr=0.1, kwargs={"momentum": 0.9, "weight_decay": 0.1}),
    )  # fmt: skip
    trainer = dist_equal.trainer(folder, devices, max_steps=steps, callbacks=[breaks], gradient_clip_val=1.0, **more)
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    try:
        trainer.fit(module, datamodule=data)
    except NumericError as error:
        return module, trainer, error.exit_code
    return module, trainer, 0


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, with one broken step, and leave `name.pt` there."""
    breaks = Breaks([BROKEN], name)
    module, trainer, _ = fitted(folder, devices, breaks, STEPS, accumulate_grad_batches=accumulate, **more)
    each = [{key: said[f"train/{key}"] for key in ("skipped_steps", "grad_norm")} for said in breaks.said]
    dist_equal.leave(module, trainer, folder / f"{name}.pt", metrics=breaks.said[-1], each=each)


def ended(folder: Path, **more: Any) -> None:
    """Train until too many steps in a row were broken, and leave `ended.pt`: what each rank ended with, and where."""
    breaks = Breaks(range(1, 99), "gradient")
    _, trainer, code = fitted(folder, 2, breaks, LIMIT + 3, **more)
    ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(ranks, (code, trainer.global_step))
    if trainer.is_global_zero:
        torch.save([list(each) for each in ranks], folder / "ended.pt")
    trainer.strategy.barrier()


def refused(folder: Path) -> None:
    """Steps that do not divide over the two: leave `refused.pt`, what each rank refused, before it read weights."""
    said: list[list[str]] = []
    for words in (["algo=dpo", "data.batch_size=3"], ["algo=grpo", "data.prompts_per_rollout=3", "algo.group_size=3"]):
        module, data = dist_equal.parts(*words)
        trainer = dist_equal.trainer(folder, 2, max_steps=1)
        try:
            trainer.fit(module, datamodule=data)
        except ConfigError as error:
            every: list[Any] = [None, None]
            torch.distributed.all_gather_object(every, f"{error}" if module.policy is None else "too late")
            said.append(every)
    if trainer.is_global_zero:
        torch.save(said, folder / "refused.pt")
    trainer.strategy.barrier()


def main(folder: Path) -> None:
    for where, strategy in (("ddp", DDPStrategy), ("fsdp", FSDP2Strategy)):
        (folder / where).mkdir(exist_ok=True)
        for name in NAMES:
            run(name, folder / where, 2, accumulate=2, strategy=strategy())
        ended(folder / where, strategy=strategy())
    refused(folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_both_ranks_leave_out_the_step_that_one_of_them_breaks(strategy, name, two, one):
    """The weights are those of one process that left it out, and so finite."""
    found = left(two / strategy, name)
    assert_equal_runs(one(name), found, share=2e-4, beyond=2e-6, moved=1e-3)
    assert [step["skipped_steps"] for step in found["each"]] == [0, 0, 1, 0]
    norms = [step["grad_norm"] for step in found["each"]]
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True] and min(norms[:2]) > 0


def test_in_python_every_rank_refuses_a_step_that_does_not_divide_before_it_reads_weights(two):
    for key, said in zip(("data.batch_size=3", "data.prompts_per_rollout=3"), left(two, "refused"), strict=True):
        assert len(said) == 2 and all(key in each and "data-parallel size 2" in each for each in said), said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_in_a_row_end_both_ranks_with_the_same_error(strategy, two):
    assert left(two / strategy, "ended") == [[6, LIMIT]] * 2, "one good step, and the last broken one is not counted"
