"""Checkpoints by the clock: bounded in time, at the end of optimizer steps. The clock is one that the tests turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from runs_helpers import SMALL, assert_same_run, interrupted
from torch.utils.data import DataLoader

from lit_rl.callbacks import TimedCheckpoint, timed_checkpoint
from lit_rl.errors import ConfigError


class TurnedClock:
    """Stands for the `time` of the callback: a batch takes a second, a checkpoint as long as it is told to."""

    def __init__(self, saving: float) -> None:
        self.now, self.saving = 100.0, saving

    def monotonic(self) -> float:
        return self.now


class Line(L.LightningModule):
    def __init__(self, clock: TurnedClock) -> None:
        super().__init__()
        self.weight, self.clock = torch.nn.Parameter(torch.zeros(1)), clock

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.now += 1
        return (self.weight - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slow(TorchCheckpointIO):
    """Takes its time, and notes after which batch it was asked."""

    def __init__(self, clock: TurnedClock) -> None:
        super().__init__()
        self.clock, self.batches = clock, []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.clock.now += self.clock.saving
        self.batches.append(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"])
        super().save_checkpoint(checkpoint, path, storage_options)


def saved_after(
    folder: Path, monkeypatch: Any, *, saving: float, accumulate: int = 1, start: Path | None = None, **settings: Any
) -> list[int]:
    """The batches after which a run of 400 saved, or the rest of one."""
    clock = TurnedClock(saving)
    monkeypatch.setattr(timed_checkpoint, "time", clock)
    slow = Slow(clock)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate, plugins=[slow],
        callbacks=[TimedCheckpoint(dirpath=folder, save_on_train_epoch_end=False, **settings)],
    )  # fmt: skip
    trainer.fit(Line(clock), DataLoader(torch.ones(400, 1)), ckpt_path=start, weights_only=True)
    return slow.batches


def test_what_is_quick_is_saved_at_the_shortest_interval(tmp_path, monkeypatch):
    found = saved_after(tmp_path, monkeypatch, saving=0.0, every_seconds=30)
    assert found == list(range(30, 401, 30))


def test_what_is_slow_takes_no_more_than_its_share(tmp_path, monkeypatch):
    found = saved_after(tmp_path, monkeypatch, saving=5.0, every_seconds=10, max_share=0.05)
    assert found == [10, 105, 200, 295, 390]  # 5 seconds of writing, 95 of training


@pytest.mark.parametrize("accumulate", [1, 4])
def test_only_whole_optimizer_steps_are_saved(accumulate, tmp_path, monkeypatch):
    found = saved_after(tmp_path, monkeypatch, saving=0.0, every_seconds=10, accumulate=accumulate)
    assert len(found) > 20 and all(batch % accumulate == 0 for batch in found)


def test_a_number_of_steps_is_kept_whatever_it_takes(tmp_path, monkeypatch):
    found = saved_after(tmp_path, monkeypatch, saving=1000.0, accumulate=4, every_n_train_steps=25)
    assert found == [100, 200, 300, 400]


def test_a_resumed_run_saves_nothing_between_two_micro_batches(tmp_path, monkeypatch):
    """Not the step again that it goes on from, after the first of them."""
    how: dict[str, Any] = {"saving": 0.0, "accumulate": 4, "every_n_train_steps": 25, "save_top_k": -1}
    assert saved_after(tmp_path, monkeypatch, **how) == [100, 200, 300, 400]
    (start,) = tmp_path.glob("*step=25.ckpt")
    assert saved_after(tmp_path, monkeypatch, start=start, **how) == [200, 300, 400]


@pytest.mark.parametrize("settings", [{"max_share": 0.0}, {"max_share": 1.5}, {"every_seconds": -1.0}])
def test_bad_values_are_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"callbacks.checkpoint.{name}"):
        TimedCheckpoint(**settings)


@pytest.mark.all
@pytest.mark.parametrize("interval, step", [(2, 2), (3, 3)], ids=["in an epoch", "at its end"])
def test_a_validation_that_was_due_when_it_was_written_is_made_by_the_run_that_goes_on(
    train, tmp_path, interval: int, step: int
) -> None:
    """SIGKILL between the checkpoint and the validation of one step, of 3 steps an epoch."""
    run = [*SMALL, "trainer.max_steps=5", "data.task.max_operand=3", f"trainer.val_check_interval={interval}"]
    run += ["callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert train(*run, f"run_dir={whole}") == 0
    interrupted(whole, again, step)
    assert train(*run, f"run_dir={again}", "ckpt_path=last") == 0
    assert_same_run(whole, again)
