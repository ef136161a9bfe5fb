"""Checkpoints by the clock: bounded in time, at the end of optimizer steps. The clock is one that the tests turn."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader

from lit_rl.callbacks import GracefulStop, TimedCheckpoint, timed_checkpoint
from lit_rl.callbacks.checkpoint_io import step_of
from lit_rl.callbacks.timed_checkpoint import save_step


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


class Stops(L.Callback):
    """Is told of a signal while it makes this optimizer step."""

    def __init__(self, stop: GracefulStop, step: int) -> None:
        self.stop, self.step = stop, step

    def on_train_batch_start(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.stop.signum = signal.SIGTERM


def stopped_at(folder: Path, step: int, start: Path | None = None, **settings: Any) -> list[str]:
    """What lies in the folder after a run that saves every fourth step, and was stopped at this one, or ended."""
    stop = GracefulStop()
    saves = {"every_n_train_steps": 4, "filename": "step_{step:08d}", "auto_insert_metric_name": False}
    saves |= {
        "save_on_train_epoch_end": False,
        "monitor": "step",
        "mode": "max",
        "save_top_k": 1,
        "enable_version_counter": False,
        **settings,
    }
    trainer = L.Trainer(
        accelerator="cpu", max_steps=20, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Stops(stop, step), stop, TimedCheckpoint(dirpath=folder / "own", **saves)],
    )  # fmt: skip
    trainer.fit(Line(TurnedClock(0.0)), DataLoader(torch.ones(40, 1)), ckpt_path=start, weights_only=True)
    assert trainer.global_step == step
    if stop.signum is None:
        save_step(trainer, folder / "own" / f"step_{step:08d}.ckpt")
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt"))


def test_a_run_that_is_stopped_and_goes_on_keeps_the_newest_alone(tmp_path):
    own = tmp_path / "own"
    assert stopped_at(tmp_path, 3) == ["own/step_00000003.ckpt"]
    assert stopped_at(tmp_path, 6, own / "step_00000003.ckpt") == ["own/step_00000006.ckpt"]
    (own / "before_alarm").mkdir()
    named = [tmp_path / "mine.ckpt", own / "before_alarm" / "step_00000006.ckpt"]
    for path in named:
        path.write_bytes((own / "step_00000006.ckpt").read_bytes())
    theirs = sorted(path.relative_to(tmp_path).as_posix() for path in named)
    assert stopped_at(tmp_path, 9, named[0]) == sorted([*theirs, "own/step_00000009.ckpt"])
    assert stopped_at(tmp_path, 10, named[1]) == sorted(
        [*theirs, "own/step_00000009.ckpt", "own/step_00000010.ckpt"]
    ), "that a run which began elsewhere has saved more is not known to it"
    assert stopped_at(tmp_path, 20, own / "step_00000010.ckpt")[-1] == "own/step_00000020.ckpt"


def test_the_signal_of_one_fit_does_not_end_the_next(tmp_path):
    """Of a notebook, with one callback for both."""
    stop = GracefulStop()
    for told, ends in ((2, 2), (99, 5)):
        trainer = L.Trainer(
            accelerator="cpu", max_steps=5, default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[Stops(stop, told), stop],
        )  # fmt: skip
        trainer.fit(Line(TurnedClock(0.0)), DataLoader(torch.ones(40, 1)))
        assert trainer.global_step == ends


@pytest.mark.parametrize(
    ("name", "step"),
    [("step_00000003", 3), ("step_00000003-v1", 3), ("epoch=2-step=41", 41), ("best_7", 7), ("last", -1)],
)
def test_the_step_in_a_checkpoints_name(name, step):
    assert step_of(Path(f"{name}.ckpt")) == step


def test_several_are_kept_where_several_are_asked_for(tmp_path):
    assert stopped_at(tmp_path, 11, save_top_k=2) == ["own/step_00000008.ckpt", "own/step_00000011.ckpt"]
    again = stopped_at(tmp_path, 13, tmp_path / "own" / "step_00000011.ckpt", save_top_k=2)
    assert again == ["own/step_00000012.ckpt", "own/step_00000013.ckpt"]


def test_the_one_before_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    stopped_at(tmp_path, 3)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space"):
        stopped_at(tmp_path, 6, tmp_path / "own" / "step_00000003.ckpt")
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["step_00000003.ckpt"]
