"""Loggers, trackers and samples that fail end no run, and change no bit of it. Every part is real but the tracker."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path

import lightning as L
import pytest
from failing_trackers import Tracker
from lightning.pytorch.loggers import TensorBoardLogger
from no_room import no_file_above
from runs_helpers import SMALL, assert_same, newest

from lit_rl.callbacks import JsonlLogger, let_loggers_fail, not_written
from lit_rl.callbacks import loggers as unwritten


@pytest.mark.all
def test_a_run_to_which_nothing_listens_learns_the_same_bits(
    train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    every = [*SMALL, "trainer.max_steps=3", "eval.limit=1", "callbacks.samples.print=1", "callbacks.samples.every=1"]
    assert train(*every, f"run_dir={tmp_path / 'whole'}") == 0
    broken = [
        "allow_targets=[failing_trackers]",
        "logger=[tensorboard]",
        f"logger.tensorboard.save_dir={tmp_path / 'file' / 'events'}",
        "+logger.tracker._target_=failing_trackers.Tracker",
        "+callbacks.spoiled._target_=failing_trackers.Spoiled",
    ]
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert train(*every, *broken, f"run_dir={tmp_path / 'broken'}") == 0
    names = ["JsonlLogger", "TensorBoardLogger", "Tracker", "Samples", "TokenSamples"]
    firsts = [str(each.message).split()[0] for each in told if "Training goes on" in str(each.message)]
    assert sorted(firsts) == sorted(names)  # once each
    said = capsys.readouterr().out
    (line,) = (line for line in said.splitlines() if line.startswith("not written"))
    assert all(f"{name}, " in line for name in names) and "NotADirectoryError" in line and "[Errno 28]" in line
    assert_same(newest(tmp_path / "whole")["state_dict"], newest(tmp_path / "broken")["state_dict"])


def test_tensorboard_on_a_full_disk_raises_nothing(tmp_path: Path) -> None:
    made = L.Trainer(logger=TensorBoardLogger(tmp_path), enable_checkpointing=False, enable_progress_bar=False)
    trainer = let_loggers_fail(let_loggers_fail(made))
    (logger,) = trainer.loggers
    assert isinstance(logger, TensorBoardLogger) and logger.save_dir == str(tmp_path)
    assert not hasattr(logger, "log_table") and not hasattr(logger.experiment, "no_such_thing")
    logger.log_metrics({"a": 1.0}, step=0)
    assert not not_written(trainer)
    with no_file_above(1000), pytest.warns(UserWarning, match="TensorBoardLogger failed in .*File too large"):
        for step in range(100):
            logger.log_metrics({"a": 1.0}, step=step)
            logger.experiment.flush()
        logger.finalize("success")
    (missing,) = not_written(trainer)
    assert missing.failures > 100 and not missing.left_out


def test_it_travels_to_processes_that_a_strategy_spawns(tmp_path: Path) -> None:
    """They are sent the Trainer, with its loggers."""
    trainer = let_loggers_fail(L.Trainer(logger=JsonlLogger(tmp_path / "m.jsonl"), enable_progress_bar=False))
    (there,) = pickle.loads(pickle.dumps(trainer.loggers))
    assert isinstance(there, JsonlLogger) and there.path == tmp_path / "m.jsonl" and there.unwritten.failures == 0
    with no_file_above(0), pytest.warns(UserWarning, match="Training goes on"):
        there.log_metrics({"a": 1.0}, 0)


def test_a_tracker_that_takes_long_to_fail_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Slow(Tracker):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            calls.append(step or 0)
            super().log_metrics(metrics, step)

    monkeypatch.setattr(unwritten, "PATIENCE", 30.0)
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(unwritten.time, "monotonic", lambda: float(next(clock)))
    trainer = let_loggers_fail(L.Trainer(logger=Slow(), enable_checkpointing=False, enable_progress_bar=False))
    with pytest.warns(UserWarning, match="Slow failed in log_metrics: ConnectionError"):
        for step in range(10):
            trainer.loggers[0].log_metrics({}, step)
            trainer.loggers[0].experiment.log({})  # pyright: ignore
    assert calls == [0, 1, 2, 3]
    assert "then left out" in str(not_written(trainer)[0])


def test_lines_of_metrics_wait_for_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log_metrics({"a": 1}, 0)
    with no_file_above(30):
        for step in (1, 2):
            with pytest.raises(OSError):
                logger.log_metrics({"a": 1}, step)
            assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": 1}\n'
    logger.finalize("success")
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
