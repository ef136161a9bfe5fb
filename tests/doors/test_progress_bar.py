"""Lightning's own progress bar shows what matters, with no callback of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lit_rl import GRPO, SFT, RolloutDataModule, Sampling, SupervisedDataModule

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(4)]


class Seen(L.Callback):
    """What a bar is given when a batch is over."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.read: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.shown.append(dict(trainer.progress_bar_metrics))
        metrics = trainer.callback_metrics  # what a ModelCheckpoint monitors
        self.read = {name: float(metrics[name]) for name in ("reward", "train/reward") if name in metrics}


def test_a_rollout_shows_its_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = GRPO(
        "tiny",
        lambda completions, **columns: [0.5] * len(completions),
        group_size=2,
        sampling=Sampling(max_new_tokens=2),
    )
    data, seen = RolloutDataModule([{"prompt": "1+1="}] * 4, prompts_per_rollout=2, val_fraction=0), Seen()
    L.Trainer(max_epochs=1, callbacks=[seen], default_root_dir=tmp_path, **QUIET).fit(module, datamodule=data)
    (shown,) = seen.shown
    assert shown["reward"] == 0.5 and shown["loss"] == pytest.approx(0, abs=1e-5)
    assert seen.read == {"reward": 0.5, "train/reward": 0.5}
    assert "reward" in capsys.readouterr().out


def test_a_data_set_shows_its_loss(tmp_path: Path) -> None:
    seen, data = Seen(), SupervisedDataModule(ROWS, batch_size=2, val_fraction=0)
    trainer = L.Trainer(max_epochs=1, log_every_n_steps=1, callbacks=[seen], default_root_dir=tmp_path, **QUIET)
    trainer.fit(SFT("tiny"), datamodule=data)
    (shown,) = seen.shown
    assert shown["loss"] > 0 and shown["loss"] == pytest.approx(float(trainer.callback_metrics["train/loss"]))
